"""Deliberate bugs, and the audit that catches each: an audit that misses them would be worth nothing.

Every row of the table breaks one function of the package, runs the audit that is meant for it and expects a
verdict against the claim at the level of the command (99.9 % over all its audits). The same audits find
nothing in the package as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import opacus_bc.batch_norm.gradients as norm_gradients
import opacus_bc.engine.book_keeping as book_keeping_builder
import opacus_bc.engine.individual as individual_builder
import opacus_bc.mechanism.blocks as mechanism
import opacus_bc.mechanism.clipping as clipping
import opacus_bc.optimizers.book_keeping as book_keeping
import opacus_bc.optimizers.private as private_optimizer
from opacus_bc.accounting import FDPAccountant
from opacus_bc.audit.adaptive import AdaptiveToy, audit_adaptive
from opacus_bc.audit.claims import AuditResult
from opacus_bc.audit.resumed import audit_resumed
from opacus_bc.audit.table import all_audits, second_step
from opacus_bc.audit.toys import PrivateToy, Toy, make_toy, single_round
from opacus_bc.audit.training import audit_buffers, audit_chunks, audit_worst_case_loop
from opacus_bc.audit.worst_case import audit_worst_case, releases
from opacus_bc.batch_norm.layers import ConstantStatistics
from opacus_bc.batch_norm.policy import BatchNormPolicy
from opacus_bc.draws.ledger import NoFreshBatchError
from opacus_bc.draws.loader import DrawLedger
from opacus_bc.draws.sources import PoissonBins, whole_units
from opacus_bc.gradients import probe
from opacus_bc.gradients.book_keeping.book import Book
from opacus_bc.gradients.book_keeping.products import Rows
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.optimizers.mini_sets import BatchClippingOptimizer
from opacus_bc.optimizers.stock import AdaptiveOptimizer

AUDITS = len(all_audits(quick=True))
Patch = pytest.MonkeyPatch
Stds = Callable[[Any], list[float]]

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the bugs ---------------------------------------------------------------------------------------------


def noise_for_one_bound(patch: Patch) -> None:
    """Noise C sigma instead of 2C sigma: a mini-set's sensitivity is taken for a sample's."""
    patch.setattr(mechanism, "sensitivity", lambda clip_bound, *, unit, adjacency: clip_bound)


def noise_divided_by_the_batch(patch: Patch) -> None:
    """The sum gets the noise of the mean, and both are divided."""
    release, add = BatchClippingOptimizer._release, TorchNoise.add_

    def divided(self: Any, draw: Any) -> Any:
        self.noise.add_ = lambda tensor, std: add(self.noise, tensor, std / self.expected_batch_size)
        return release(self, draw)

    patch.setattr(BatchClippingOptimizer, "_release", divided)


def _fields(block: clipping.Block) -> dict[str, Any]:
    return {name: getattr(block, name) for name in block.__slots__}


def root_of_layers_forgotten(patch: Patch) -> None:
    patch.setattr(mechanism, "step_mu", lambda blocks: max(b.sensitivity / b.noise_std for b in blocks))


def accountant_is_told_sigma(patch: Patch) -> None:
    """Sigma instead of sigma_eff."""
    patch.setattr(
        private_optimizer,
        "effective_noise_multiplier",
        lambda blocks: blocks[0].noise_std / blocks[0].sensitivity,
    )


def release_with(patch: Patch, stds: Stds, scale: Stds) -> None:
    """``_release`` as it is, but with other noise and with its result multiplied by ``scale``."""

    def changed(self: Any, draw: Any) -> Any:
        release = draw.clipped_sum or [torch.zeros_like(p) for p in draw.params]
        for p, value, std, factor in zip(draw.params, release, stds(draw), scale(draw), strict=True):
            self.noise.add_(value, std)
            p.grad = value.mul_(factor)

    patch.setattr(BatchClippingOptimizer, "_release", changed)


def _scales(draw: Any) -> list[float]:
    return [b.noise_std / m for b in draw.blocks for m in b.factors]


def _factors(draw: Any) -> list[float]:
    return [m for b in draw.blocks for m in b.factors]


def nothing_is_scaled_back(patch: Patch) -> None:
    """The paper's code: multiplied by m before clipping, never divided. Private, but not what is stated."""
    release_with(patch, _scales, _factors)


def only_the_noise_is_scaled_back(patch: Patch) -> None:
    """Clipping forgets the factors that the noise is divided by."""
    clip = clipping.clip_coefficients

    def without_factors(grads: Any, blocks: Any, *how: Any) -> Any:
        plain = [clipping.Block(**{**_fields(b), "factors": (1.0,) * len(b.names)}) for b in blocks]
        return clip(grads, plain, *how)

    patch.setattr("opacus_bc.optimizers.mini_sets.clip_coefficients", without_factors)


def one_group_without_noise(patch: Patch) -> None:
    release_with(patch, lambda draw: [0.0, *_scales(draw)[1:]], lambda draw: [1.0] * len(draw.params))


def no_noise_on_empty_batches(patch: Patch) -> None:
    release = BatchClippingOptimizer._release

    def lazy(self: Any, draw: Any) -> Any:
        if draw.clipped_sum is not None:
            release(self, draw)
            return
        for p in draw.params:
            p.grad = torch.zeros_like(p)

    patch.setattr(BatchClippingOptimizer, "_release", lazy)


def the_same_noise_on_two_steps(patch: Patch) -> None:
    def repeating(make: Any) -> Any:
        def again(self: Any, tensor: Any, std: float) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            generator = self.stream(tensor.device)
            if self.calls % 2 == 0:
                generator.set_state(self.before)
            self.before = generator.get_state()
            return make(self, tensor, std)

        return again

    for name in ("add_", "normal"):
        patch.setattr(TorchNoise, name, repeating(getattr(TorchNoise, name)))


def two_steps_on_one_draw(patch: Patch) -> None:
    """A delivery stays valid until the next one."""

    def deliver(self: Any, delivery: Any) -> None:
        self._listener().before_delivery()
        self._outstanding = [delivery]

    patch.setattr(DrawLedger, "consume", DrawLedger.outstanding)
    patch.setattr(DrawLedger, "_deliver", deliver)


def contiguous_chunks(patch: Patch) -> None:
    """What Opacus's BatchSplittingSampler would do: cut the batch into consecutive pieces."""

    def draw(self: Any) -> Any:
        size = self.generator.binomial(self.plan.dataset_size, self.plan.sample_rate)
        indices = np.sort(self.generator.choice(self.plan.dataset_size, size=size, replace=False))
        return [part.tolist() for part in np.array_split(indices, self.plan.mini_sets)]

    patch.setattr(PoissonBins, "draw", draw)


def buffers_released(patch: Patch) -> None:
    """Running statistics are written by private forwards, and nobody looks."""
    patch.setattr(BatchNormPolicy, "_patch", lambda self, child, undo: None)
    patch.setattr("opacus_bc.batch_norm.snapshot.Snapshot.check", lambda *_, **__: None)
    patch.setattr("opacus_bc.batch_norm.buffers.BufferWatch._remember", lambda *_: None)
    patch.setattr("opacus_bc.batch_norm.public.PublicKeeper.refresh", lambda self: None)


def accountant_drops_steps(patch: Patch) -> None:
    """Every second step is not booked."""
    step = FDPAccountant.step

    def forgetful(self: Any, **what: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2:
            step(self, **what)

    patch.setattr(FDPAccountant, "step", forgetful)


def resume_repeats_the_noise(patch: Patch) -> None:
    """The script's seeds stay in force: the resumed run begins with the noise of the first steps."""
    patch.setattr("opacus_bc.engine.resume.parts.draw_fresh_randomness", lambda run: None)


def resume_forgets_what_was_booked(patch: Patch) -> None:
    patch.setattr(FDPAccountant, "load_state_dict", lambda self, state: None)


def _in_training(layer: Any) -> bool:
    return bool(layer.training and layer.collecting is None)


def without_the_first_checks(patch: Patch) -> None:
    """Probe and exactness check would refuse such a forward before any audit."""
    patch.setattr(probe, "FORWARDS", 0)
    patch.setattr("opacus_bc.gradients.book_keeping.attached._CHECKED", 0)


def statistics_of_the_private_batch(patch: Patch) -> None:
    """Individual clipping normalises with its own batch: one sample moves the gradients of all."""
    forward = ConstantStatistics.forward

    def own(self: Any, x: Any) -> Any:
        if _in_training(self):
            self.constant_var, self.constant_mean = torch.var_mean(x.detach(), 0)
        return forward(self, x)

    patch.setattr(ConstantStatistics, "forward", own)
    without_the_first_checks(patch)


def one_gradient_through_the_statistics_for_all(patch: Patch) -> None:
    """What goes through the statistics is computed once a batch and given to every sample."""
    rows = norm_gradients.upstream_gradients

    def shared(before: Any, into_mean: Any, into_var: Any) -> Any:
        means = (into.mean(0, keepdim=True).expand_as(into) for into in (into_mean, into_var))
        return rows(before, *means)

    patch.setattr(norm_gradients, "upstream_gradients", shared)


def norm_of_the_wrong_sample(patch: Patch) -> None:
    """Book-keeping clips every sample by its neighbour's norm."""
    clip = book_keeping.coefficients_of_norms

    def of_the_neighbour(norms: Any, *args: Any, **how: Any) -> Any:
        return clip([norm.roll(1) for norm in norms], *args, **how)

    patch.setattr(book_keeping, "coefficients_of_norms", of_the_neighbour)


def clipped_after_the_sum(patch: Patch) -> None:
    """Book-keeping clips the sum of the samples' gradients as if it were one sample's."""
    read = Book.read

    def summed(self: Any, parameters: Any, **how: Any) -> Any:
        def one(entry: Any) -> Rows:
            rows = entry.rows()
            first = torch.zeros_like(rows)
            first[0] = rows.sum(0)
            return Rows(first)

        return {p: one(entry) for p, entry in read(self, parameters, **how).items()}

    patch.setattr(Book, "read", summed)
    without_the_first_checks(patch)


@dataclass(frozen=True)
class Outside:
    """An entry whose norms leave out what the samples add through the statistics."""

    clipped: Any
    whole: Any

    def norms(self) -> Any:
        return self.clipped.norms()

    def weighted_sum(self, weights: Any, bound: float | None = None) -> Any:
        return self.whole.weighted_sum(weights, bound)

    def rows(self) -> Any:
        return self.whole.rows()

    def only(self, keep: Any) -> Outside:
        return Outside(self.clipped.only(keep), self.whole.only(keep))


def a_term_of_the_statistics_outside_of_the_clip(patch: Patch) -> None:
    with_terms = Book._with_terms
    without_the_first_checks(patch)
    patch.setattr(Book, "_with_terms", lambda self, key: Outside(self._entries[key], with_terms(self, key)))


def rows_of_one_sample_are_clipped_one_by_one(patch: Patch) -> None:
    """Four views of every sample in one batch, and nobody counts rows."""
    step = PrivateToy.step
    patch.setattr(PrivateToy, "step", lambda self, x: step(self, x.repeat(4, 1)))
    patch.setattr("opacus_bc.optimizers.samples.check_rows", lambda *_, **__: None)


def views_of_one_sample_are_clipped_one_by_one(patch: Patch) -> None:
    """The loader delivers every sample's views and nobody says which rows belong together."""

    def rows(draw: Any) -> Any:
        return replace(whole_units(draw), counts=None)

    for module in (individual_builder, book_keeping_builder):
        patch.setattr(module, "whole_units", rows)


class DrawnByView:
    """Draws in which each view of a sample is drawn by itself."""

    def __init__(self, source: Any) -> None:
        self.plan, self.source = source.plan, source

    def __iter__(self) -> Any:
        for _ in range(self.plan.steps_per_epoch):
            drawn = [index for _ in range(self.plan.views) for index in next(iter(self.source))[0]]
            indices, counts = np.unique(drawn, return_counts=True)
            yield [[i] * n for i, n in zip(indices.tolist(), counts.tolist(), strict=True)]


def views_are_drawn_one_by_one(patch: Patch) -> None:
    """Four chances to take part instead of one: 0.34 instead of 0.1."""
    patch.setattr(book_keeping_builder, "with_views", DrawnByView)


def count_without_noise(patch: Patch) -> None:
    """The number of unclipped samples moves the clip bound as it is."""
    add_noise = AdaptiveOptimizer.add_noise

    def exact(self: Any) -> None:
        count = float(self.unclipped_num)
        add_noise(self)
        self.unclipped_num = torch.tensor([count])

    patch.setattr(AdaptiveOptimizer, "add_noise", exact)


def sum_with_the_noise_of_the_whole(patch: Patch) -> None:
    """The sum has noise for all of sigma, so that nothing is left for the count."""
    add_noise = AdaptiveOptimizer.add_noise

    def whole(self: Any) -> None:
        own, self.unclipped_num_std = self.unclipped_num_std, 1e6
        count = float(self.unclipped_num)
        add_noise(self)
        self.unclipped_num_std = own
        self.unclipped_num = count + own * torch.randn(1, generator=self.generator)

    patch.setattr(AdaptiveOptimizer, "add_noise", whole)


def booked_at_half_the_rate(patch: Patch) -> None:
    """The accountant is told of fewer draws than the sampler makes: m/N of another N."""
    step = FDPAccountant.step

    def half(self: Any, *, noise_multiplier: float, sample_rate: float, **what: Any) -> None:
        step(self, noise_multiplier=noise_multiplier, sample_rate=sample_rate / 2, **what)

    patch.setattr(FDPAccountant, "step", half)


def individual_buffers_released(patch: Patch) -> None:
    """Private forwards under individual clipping write running statistics, and nobody looks."""
    forward = ConstantStatistics.forward

    def writing(self: Any, x: Any) -> Any:
        if _in_training(self):
            self.running_var.lerp_(x.detach().var(0), self.momentum)
        return forward(self, x)

    patch.setattr(ConstantStatistics, "forward", writing)
    patch.setattr("opacus_bc.batch_norm.snapshot.Snapshot.check", lambda *_, **__: None)
    patch.setattr("opacus_bc.batch_norm.public.PublicKeeper.refresh", lambda self: None)


# --- the audits -------------------------------------------------------------------------------------------

FIFTY = {"steps": 50, "steps_per_epoch": 10}


def single(method: str, repetitions: int = 20_000) -> Callable[..., AuditResult]:
    return partial(audit_worst_case, single_round(method), name=method, repetitions=repetitions)


def fifty(method: str) -> Callable[..., AuditResult]:
    return partial(audit_worst_case, Toy(method=method, **FIFTY), name=method, repetitions=20_000)


def twice(method: str) -> Callable[..., AuditResult]:
    toy = Toy(method=method, noise_multiplier=0.7, **FIFTY)
    return partial(audit_worst_case, toy, name=method, repetitions=20_000, steps_per_draw=2)


def resumed(method: str) -> Callable[..., AuditResult]:
    toy = Toy(method=method, **FIFTY)
    return partial(audit_resumed, toy, name=method, repetitions=20_000, exact=False, seed=1)


BC, GBC, IC, BK = (single(name) for name in ("BC", "GBC", "IC", "BK"))
ALC, SCALE = single("BC + ALC"), single("BC + ALC by scaling")
RUN, IC_RUN, BK_RUN = fifty("BC"), fifty("IC"), fifty("BK")
TWICE, RESUMED, BK_RESUMED = twice("BC"), resumed("BC"), resumed("BK")
EMPTY = partial(
    audit_worst_case_loop,
    Toy(method="BC", steps_per_epoch=2, steps=40, noise_multiplier=50.0),
    copies=3,
    name="empty batches",
    runs=120,
)
CHUNKS = partial(audit_chunks, name="chunks", runs=250)
BUFFERS = partial(audit_buffers, name="buffers", runs=60, noise_multiplier=8.0)
INDIVIDUAL_BUFFERS, BK_BUFFERS = (
    partial(BUFFERS, method=f"{how} + BatchNorm, differentiated", steps=6, noise_multiplier=30.0, runs=80)
    for how in ("IC", "BK")
)
NORM, BK_NORM = (single(f"{how} + BatchNorm, differentiated", 10_000) for how in ("IC", "BK"))
BK_THROUGH = partial(
    audit_worst_case,
    single_round("BK + BatchNorm, differentiated", through_statistics=True),
    name="through",
    repetitions=10_000,
)
BK_CONSTANTS = single("BK + BatchNorm, public", 10_000)
VIEWS, BK_VIEWS, BK_VIEWS_RUN = single("IC of views"), single("BK of views"), fifty("BK of views")
ADAPTIVE = partial(audit_adaptive, AdaptiveToy(), name="adaptive", repetitions=300)
TIGHT = partial(audit_adaptive, AdaptiveToy(count_std=1.05), name="adaptive", repetitions=2000)


@dataclass(frozen=True)
class Mutant:
    """A bug, the audit for it, and what the audit must say."""

    bug: Callable[[Patch], None]
    audit: Callable[..., AuditResult]
    verdict: str = "VIOLATION"


TABLE = {
    "noise C sigma instead of 2C sigma": Mutant(noise_for_one_bound, BC),
    "noise divided by the batch size": Mutant(noise_divided_by_the_batch, GBC),
    "sqrt(L) forgotten": Mutant(root_of_layers_forgotten, ALC),
    "accountant fed sigma instead of sigma_eff": Mutant(accountant_is_told_sigma, ALC),
    "no un-scaling in scale": Mutant(nothing_is_scaled_back, SCALE, "DIFFERS"),
    "only the noise is un-scaled in scale": Mutant(only_the_noise_is_scaled_back, SCALE),
    "an un-noised group in scale": Mutant(one_group_without_noise, SCALE),
    "noise skipped on empty batches": Mutant(no_noise_on_empty_batches, EMPTY),
    "the same noise on two steps": Mutant(the_same_noise_on_two_steps, RUN),
    "two steps on one draw": Mutant(two_steps_on_one_draw, TWICE),
    "contiguous chunks": Mutant(contiguous_chunks, CHUNKS),
    "BatchNorm buffers released": Mutant(buffers_released, BUFFERS),
    "accountant drops steps": Mutant(accountant_drops_steps, RUN),
    "noise repeated after a resume": Mutant(resume_repeats_the_noise, RESUMED),
    "steps before a resume forgotten": Mutant(resume_forgets_what_was_booked, RESUMED),
    "IC with statistics of the private batch": Mutant(statistics_of_the_private_batch, NORM),
    "IC with one gradient through the statistics for all": Mutant(
        one_gradient_through_the_statistics_for_all, NORM
    ),
    "BatchNorm buffers released under IC": Mutant(individual_buffers_released, INDIVIDUAL_BUFFERS),
    "BatchNorm buffers released under BK": Mutant(individual_buffers_released, BK_BUFFERS),
    "BK with statistics of the private batch": Mutant(statistics_of_the_private_batch, BK_NORM),
    "BK clips by the norm of the wrong sample": Mutant(norm_of_the_wrong_sample, BK),
    "BK clips after the sum": Mutant(clipped_after_the_sum, BK_CONSTANTS),
    "BK with a term of the statistics outside of the clip": Mutant(
        a_term_of_the_statistics_outside_of_the_clip, BK_THROUGH
    ),
    "rows of one sample clipped one by one": Mutant(rows_of_one_sample_are_clipped_one_by_one, IC),
    "two steps on one draw under IC": Mutant(two_steps_on_one_draw, twice("IC")),
    "two steps on one draw under BK": Mutant(two_steps_on_one_draw, twice("BK")),
    "the same noise on two steps under IC": Mutant(the_same_noise_on_two_steps, IC_RUN),
    "the same noise on two steps under BK": Mutant(the_same_noise_on_two_steps, BK_RUN),
    "IC booked at half the rate of its draws": Mutant(booked_at_half_the_rate, IC_RUN),
    "noise repeated after a resume under BK": Mutant(resume_repeats_the_noise, BK_RESUMED),
    "views of one sample clipped one by one": Mutant(views_of_one_sample_are_clipped_one_by_one, VIEWS),
    "views of one sample clipped one by one under BK": Mutant(
        views_of_one_sample_are_clipped_one_by_one, BK_VIEWS
    ),
    "views of one sample drawn one by one": Mutant(views_are_drawn_one_by_one, BK_VIEWS_RUN),
    "count of unclipped samples without noise": Mutant(count_without_noise, ADAPTIVE),
    "sum and count with more than the booked budget": Mutant(sum_with_the_noise_of_the_whole, TIGHT),
}


SLOW = [pytest.mark.slow]  # what is the same code under IC, and steps one after the other


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SLOW if mutant.audit in (BK_BUFFERS, TIGHT) else [])
        for name, mutant in TABLE.items()
    ],
)
def test_every_deliberate_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    mutant = TABLE[name]
    mutant.bug(monkeypatch)
    result = mutant.audit(audits=AUDITS)
    print(f"{name}: ε claimed {result.claimed_epsilon:.3g}, audited {result.audited_epsilon:.3g}")
    assert result.verdict == mutant.verdict


FEWER = [partial(audit, runs=20) for audit in (EMPTY, CHUNKS, BUFFERS, INDIVIDUAL_BUFFERS, BK_BUFFERS)]
EXACT = partial(RESUMED, exact=True)
RUNS = [RUN, IC_RUN, BK_RUN, BK_VIEWS_RUN]


SINGLE = [BC, GBC, ALC, SCALE, IC, BK, NORM, BK_NORM, BK_THROUGH, BK_CONSTANTS, VIEWS, BK_VIEWS]


@pytest.mark.parametrize(
    "audit", [*SINGLE, *RUNS, RESUMED, BK_RESUMED, EXACT, ADAPTIVE, pytest.param(TIGHT, marks=SLOW), *FEWER]
)
def test_the_same_audits_find_nothing_in_the_package_as_it_is(audit: Callable[..., AuditResult]) -> None:
    # Each verdict is wrong with probability at most 0.001 / AUDITS.
    result = audit(audits=AUDITS)
    assert result.verdict == "holds"


def test_rows_that_are_not_samples_are_refused_before_they_can_be_audited(monkeypatch: Patch) -> None:
    step = PrivateToy.step
    monkeypatch.setattr(PrivateToy, "step", lambda self, x: step(self, x.repeat(4, 1)))
    with pytest.raises(RuntimeError, match="the loader delivered 3 samples"):
        IC(audits=AUDITS)


def test_a_second_step_on_one_batch_is_refused() -> None:
    with pytest.raises(NoFreshBatchError, match="needs a new batch"):
        TWICE(audits=AUDITS)
    row = second_step(delta=1e-5, audits=AUDITS, seed=0)
    assert (row.verdict, row.setting) == ("holds", "T = 1, q = 0.1, σ_eff = 0.7")  # one step is booked


def test_the_commands_row_audits_a_second_step_that_is_not_refused(monkeypatch: Patch) -> None:
    two_steps_on_one_draw(monkeypatch)
    assert second_step(delta=1e-5, audits=AUDITS, seed=0).verdict == "VIOLATION"


def test_an_audit_that_breaks_down_is_not_taken_for_a_refusal(monkeypatch: Patch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrivateToy, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        second_step(delta=1e-5, audits=AUDITS, seed=0)


def test_a_refused_step_that_has_moved_weights_is_a_violation(monkeypatch: Patch) -> None:
    step = PrivateToy.step

    def leaving_a_trace(self: Any, x: Any) -> None:
        try:
            step(self, x)
        except NoFreshBatchError:
            with torch.no_grad():
                next(self.inner.parameters()).add_(1.0)
            raise

    monkeypatch.setattr(PrivateToy, "step", leaving_a_trace)
    assert second_step(delta=1e-5, audits=AUDITS, seed=0).verdict == "VIOLATION"


def test_an_engine_states_no_epsilon_for_steps_that_its_accountant_has_dropped(monkeypatch: Patch) -> None:
    accountant_drops_steps(monkeypatch)
    private = make_toy(Toy(method="BC", steps_per_epoch=2), canaries=1)
    releases(private, with_canary=True, draws=4)
    for question in (private.engine.get_tradeoff, lambda: private.engine.get_epsilon(1e-5)):
        with pytest.raises(RuntimeError, match="4 steps were taken and 2 are booked"):
            question()


def test_without_its_second_step_the_same_loop_holds() -> None:
    assert TWICE(audits=AUDITS, steps_per_draw=1).verdict == "holds"

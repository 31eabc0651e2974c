"""Builds what individual clipping in one backward needs (``grad_sample_mode="bk"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

from numpy.random import Generator
from torch import nn, optim

from opacus_bc._opacus import DPDataLoader
from opacus_bc.alc.choice import make_meter, make_rule, trainable
from opacus_bc.batch_norm.policy import make_policy
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.sources import (
    Draw,
    DrawSource,
    Part,
    PoissonBins,
    WholeBatches,
    draws_of_users,
    whole_batch,
    whole_units,
    with_views,
)
from opacus_bc.engine.agreement import check_agreement
from opacus_bc.engine.booking import Booking, check_accountant
from opacus_bc.engine.bounds import clip_bounds
from opacus_bc.engine.losses import check_criterion
from opacus_bc.engine.outsiders import Outsiders
from opacus_bc.engine.randomness import streams
from opacus_bc.engine.request import Request
from opacus_bc.engine.run import Guest, Run
from opacus_bc.gradients.book_keeping.attached import BookKeeping
from opacus_bc.gradients.book_keeping.book import Book
from opacus_bc.gradients.probe import CouplingProbe
from opacus_bc.gradients.sequences import SortedSequences
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer
from opacus_bc.parallel.ddp import (
    SummedReduction,
    check_data_parallel,
    part_of_batch,
    part_of_units,
    ranks_of,
)
from opacus_bc.parallel.wrappers import LateWrapping, bare, data_parallel


def build_book_keeping(request: Request, accountant: Any, noise: SecureNoise | None, undo: ExitStack) -> Run:
    """Set book-keeping up; ``undo`` gets what takes the changes back if anything fails."""
    check_accountant(accountant, request.kind)
    outsiders = Outsiders(
        request.module, request.module.parameters() if request.distributed else request.held
    )
    undo.callback(outsiders.remove)
    check_criterion(request)
    bounds, clip_bound = clip_bounds(request)
    plan, optimizer, plain = request.plan, request.inner_optimizer, bare(request.module)
    policy = make_policy(
        plain,
        request.policy,
        individual=True,
        private_loader=request.data_loader,
        refresh_every=request.batch_norm_refresh,
        can_follow=True,
        trained=request.held,
    )
    wrapper = data_parallel(request.module)
    ranks = None if wrapper is None else ranks_of(wrapper)
    if wrapper is not None and ranks is not None:
        check_data_parallel(wrapper, sampling=plan.kind, policy=policy.name, one_by_one=plan.one_by_one)
        check_agreement(ranks, request, policy, bounds or (clip_bound,))
    generator, noise_source = streams(request, ranks, None, noise)
    policy.install(undo, trained=dict(trainable(plain, optimizer)).values())
    part: Callable[[Draw], Part] = whole_units if request.several_rows else whole_batch
    if ranks is not None:
        own = part_of_units if request.several_rows else part_of_batch
        part = partial(own, rank=ranks.rank, size=ranks.size)
    loader = _loader(request, generator, part)
    names = {p: name for name, p in plain.named_parameters()}
    book = Book(names, partial(_trained, optimizer), loader.ledger, instantiate=request.instantiate)
    probe = CouplingProbe(plain, paused=nullcontext)  # its hook comes first: nothing is recorded then
    undo.callback(probe.remove)
    recording = BookKeeping(plain, book, names, when_grown=probe.restart)
    undo.callback(recording.remove)
    reduction = None
    if wrapper is not None and ranks is not None:
        reduction = SummedReduction(ranks)
        reduction.attach(wrapper)
        wrapper.broadcast_buffers = False
    meter = make_meter(plain, plan, ranks=ranks, hooks=recording)
    private = BookKeepingOptimizer(
        optimizer,
        book=book,
        noise_multiplier=request.noise_multiplier,
        max_grad_norm=clip_bound,
        clip_rule=make_rule(
            request.config, optimizer, plan=plan, meter=meter, bounds=bounds, criterion=request.criterion
        ),
        ledger=loader.ledger,
        noise=noise_source,
        parameter_names=names,
        expected_batch_size=int(plan.dataset_size * plan.sample_rate),
        loss_reduction=request.loss_reduction,
        reduction=reduction,
    )
    private.booking = Booking(accountant, plan)
    guests: tuple[Guest, ...] = (probe, recording, outsiders, SortedSequences(plain))
    if ranks is None:
        guests = (*guests, LateWrapping(plain))
    return Run(
        policy=policy,
        wrapper=request.module,
        optimizer=private,
        loader=loader,
        data_loader=request.data_loader,
        plan=plan,
        meter=meter,
        clipping=request.clipping,
        users=request.users,
        alc_loader=None if request.config is None else request.config.public_loader,
        ranks=ranks,
        guests=guests,
    )


def _loader(request: Request, generator: Generator, part: Callable[[Draw], Part]) -> PrivateDataLoader:
    plan, given = request.plan, request.data_loader
    draws: DrawSource
    if request.users is not None:
        draws = draws_of_users(plan, request.users, generator)
    elif plan.kind == "poisson":
        draws = with_views(PoissonBins(plan, generator))
    else:
        assert given.batch_sampler is not None  # the plan has seen to it
        draws = with_views(WholeBatches(plan, given.batch_sampler))
    # Opacus's loader knows how to collate an empty draw.
    poisson = plan.kind == "poisson"
    collating = (
        DPDataLoader.from_data_loader(given, rand_on_empty=request.rand_on_empty) if poisson else given
    )
    return PrivateDataLoader(collating, draws=draws, part=part)


def _trained(optimizer: optim.Optimizer) -> Iterator[nn.Parameter]:
    """The parameters that the optimizer holds now."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)

"""Builds what individual clipping needs, by overriding Opacus's four ``_prepare_*`` methods."""

from __future__ import annotations

import inspect
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_bc._opacus import DPDataLoader, StockPrivacyEngine, get_optimizer_class
from opacus_bc.alc.choice import make_meter, make_rule, trainable
from opacus_bc.batch_norm.policy import BatchNormPolicy, make_policy
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.sources import (
    DrawSource,
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
from opacus_bc.engine.request import Request
from opacus_bc.engine.run import Guest, Run
from opacus_bc.gradients.ghost import GhostCriterion
from opacus_bc.gradients.probe import CouplingProbe
from opacus_bc.gradients.samples import without_recording, wrapped
from opacus_bc.gradients.sequences import SortedSequences
from opacus_bc.mechanism.names import Sampling, type_name
from opacus_bc.mechanism.noise import SecureNoise, TorchNoise
from opacus_bc.mechanism.randomness import entropy, fresh_seed, sampling_generator
from opacus_bc.mechanism.warn import users_level
from opacus_bc.optimizers.samples import IndividualClippingOptimizer, SampleOptimizer
from opacus_bc.optimizers.stock import GUARDED, GhostOptimizer
from opacus_bc.parallel.ddp import part_of_batch
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.parallel.wrappers import LateWrapping, data_parallel, unwrap


def build_individual(request: Request, accountant: Any, noise: SecureNoise | None, undo: ExitStack) -> Run:
    """Set individual clipping up; ``undo`` gets what takes the changes back if anything fails."""
    check_accountant(accountant, request.kind)
    _check_secure(request, noise)
    held = request.module.parameters() if request.distributed else request.held
    outsiders = Outsiders(request.module, held)
    undo.callback(outsiders.remove)
    bounds, clip_bound = clip_bounds(request)
    if request.clipping == "adaptive":
        _check_adaptive(accountant.mechanism(), request.kind)
    check_criterion(request)
    plan = request.plan
    policy = _policy(request)
    if request.distributed:
        if request.kind == "shuffle" and _ranks(request).size > 1:
            raise ValueError(
                "without Poisson sampling every rank would go through all samples in an order of its own, "
                "and one sample would count on all of them: use poisson_sampling=True on several processes"
            )
        check_agreement(_ranks(request), request, policy, bounds or (clip_bound,))
    policy.install(undo, trained=dict(trainable(request.module, request.inner_optimizer)).values())
    stock = inspect.signature(StockPrivacyEngine.make_private).parameters
    given = {name: getattr(request, name) for name in Request.__dataclass_fields__ if name in stock}
    given["criterion"] = nn.CrossEntropyLoss() if request.criterion is None else request.criterion
    given["poisson_sampling"] = request.kind == "poisson"
    given["grad_sample_mode"] = request.mode
    made = _Build(request, noise, undo).make_private(**given, **request.extra)
    wrapper, optimizer, *criterion, loader = made
    optimizer.booking = Booking(accountant, plan)
    probe = CouplingProbe(
        unwrap(request.module),
        batch_first=request.batch_first,
        paused=partial(without_recording, wrapper),
        where=wrapper if request.mode == "ew" else None,
    )
    guests: tuple[Guest, ...] = (SortedSequences(request.module), outsiders, probe)
    if not request.distributed:
        guests = (*guests, LateWrapping(request.module))
    return Run(
        policy=policy,
        wrapper=wrapper,
        optimizer=optimizer,
        loader=loader,
        data_loader=request.data_loader,
        plan=plan,
        meter=make_meter(request.module, plan, hooks=wrapper),
        clipping=request.clipping,
        users=request.users,
        criterion=criterion[0] if criterion else None,
        alc_loader=None if request.config is None else request.config.public_loader,
        guests=guests,
    )


class _Unhooked:
    """Stands for the accountant in Opacus's set-up: the private optimizer books by itself."""

    def get_optimizer_hook_fn(self, *, sample_rate: float) -> None:
        """No hook."""


class _Build(StockPrivacyEngine):  # type: ignore[misc]  # Opacus is untyped
    """One run of Opacus's ``make_private`` with our model wrapper, loader, optimizer and criterion."""

    def __init__(self, request: Request, noise: SecureNoise | None, undo: ExitStack) -> None:
        self.request, self.noise, self.undo = request, noise, undo
        self.wrapper: Any = None
        self.loader: PrivateDataLoader | None = None
        # What Opacus's make_private reads of an engine:
        self.accountant, self.dataset = _Unhooked(), None
        self.secure_mode, self.secure_rng = False, None

    def _prepare_model(self, module: nn.Module, **arguments: Any) -> Any:
        self.validate(module=module, optimizer=None, data_loader=None)
        self.wrapper = wrapped(module, **arguments)
        if self.wrapper is not module:
            self.undo.callback(self.wrapper.cleanup)
        return self.wrapper

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *, poisson_sampling: bool, distributed: bool, **arguments: Any
    ) -> PrivateDataLoader:
        """Opacus's draws, or draws from a stream of our own, behind our loader and its ledger."""
        plan, given, secure = self.request.plan, data_loader.generator, self.noise is not None
        draws: DrawSource
        part = whole_batch
        if not poisson_sampling:
            assert data_loader.batch_sampler is not None  # the plan has seen to it
            draws, opacus = WholeBatches(plan, data_loader.batch_sampler), data_loader
        else:
            opacus = DPDataLoader.from_data_loader(data_loader, distributed=distributed, **arguments)
            if distributed:
                ranks = _ranks(self.request)
                agreed = np.random.Philox(ranks.agree(fresh_seed(given)))
                draws = PoissonBins(plan, np.random.Generator(agreed))
                part = partial(part_of_batch, rank=ranks.rank, size=ranks.size)
            elif secure or given is None:
                draws = PoissonBins(plan, sampling_generator(secure=secure))
            else:
                draws = WholeBatches(plan, opacus.batch_sampler)
        if self.request.several_rows:
            part, draws = whole_units, with_views(draws)
        if self.request.users is not None:
            generator = sampling_generator(secure=secure, generator=given)
            draws = draws_of_users(plan, self.request.users, generator)
        self.loader = PrivateDataLoader(opacus, draws=draws, part=part)
        return self.loader

    def _prepare_optimizer(
        self, *, expected_batch_size: int, distributed: bool, **as_in_request: Any
    ) -> SampleOptimizer:
        request, loader = self.request, self.loader
        module, optimizer = request.module, request.inner_optimizer
        assert loader is not None  # Opacus prepares the loader first
        bounds, clip_bound = clip_bounds(request)
        plan, hooks = request.plan, self.wrapper
        if request.users is not None:  # Opacus has divided the number of samples by that of its batches
            expected_batch_size = plan.vectors
        common: dict[str, Any] = {
            "noise_multiplier": request.noise_multiplier,
            "max_grad_norm": request.max_grad_norm,
            "expected_batch_size": expected_batch_size,
            "loss_reduction": request.loss_reduction,
            "ledger": loader.ledger,
            "noise": None,
            "parameter_names": {p: name for name, p in module.named_parameters()},
            "clip_rule": make_rule(
                request.config,
                optimizer,
                plan=plan,
                meter=make_meter(module, plan, hooks=hooks),
                bounds=bounds,
                criterion=request.criterion,
            ),
        }
        if request.own_arithmetic:
            common["noise"] = self.noise or TorchNoise(request.noise_generator)
            common["max_grad_norm"] = clip_bound
            return IndividualClippingOptimizer(optimizer, **common)
        kind = GUARDED[get_optimizer_class(request.clipping, distributed, request.mode)]
        if issubclass(kind, GhostOptimizer):
            common["hooks"] = hooks
        if request.noise_generator is None and kind is GhostOptimizer:
            common["noise"] = self.noise or TorchNoise()
        else:
            common["generator"] = request.noise_generator or _own_generator(optimizer)
        return kind(optimizer, **common, **request.extra)

    def _prepare_criterion(
        self, *, module: Any, optimizer: Any, criterion: Any, loss_reduction: str, **extra: Any
    ) -> GhostCriterion:
        return GhostCriterion(module, optimizer, criterion, loss_reduction)


def _own_generator(optimizer: torch.optim.Optimizer) -> torch.Generator:
    """A stream of its own for Opacus's noise, which no ``torch.manual_seed`` in the loop can repeat."""
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    return torch.Generator(device=device).manual_seed(entropy())


def _ranks(request: Request) -> Ranks:
    """The processes of Opacus's data parallel wrapper: all there are."""
    return Ranks(None, next(request.module.parameters()).device)


def _policy(request: Request) -> BatchNormPolicy:
    policy = make_policy(
        request.module,
        request.policy,
        individual=True,
        private_loader=request.data_loader,
        refresh_every=request.batch_norm_refresh,
        can_follow=request.mode == "hooks",
        trained=request.held,
    )
    mode = request.mode
    if policy.layers and (mode not in ("hooks", "ghost") or not request.batch_first):
        raise ValueError(
            "BatchNorm under individual clipping needs grad_sample_mode 'bk' (the default), 'hooks' or "
            f"'ghost', got {mode!r}"
            if request.batch_first
            else "BatchNorm under individual clipping needs batch_first=True, got False"
        )
    if policy.layers and data_parallel(request.module) is not None:
        raise ValueError(
            f"BatchNorm in torch's DistributedDataParallel does not go with grad_sample_mode={mode!r} "
            f"(sampling={request.kind!r}): wrap the plain module in "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel instead, or use "
            "grad_sample_mode='bk' with Poisson sampling"
        )
    if policy.public is not None and policy.public.differentiate and mode != "hooks":
        raise ValueError(
            f"PublicStatistics(differentiate=True) needs grad_sample_mode='bk' or 'hooks', got {mode!r}: "
            "Opacus's ghost norms know of no gradient from one layer into another"
        )
    return policy


def _check_secure(request: Request, noise: SecureNoise | None) -> None:
    ghost = request.mode == "ghost" and not request.distributed
    if noise is None or request.own_arithmetic or ghost:
        return
    raise ValueError(
        f"secure_mode=True does not go with clipping={request.clipping!r} and "
        f"grad_sample_mode={request.mode!r} for a {type_name(request.module)}: there "
        "Opacus's optimizer draws its noise itself, from torch generators, none of which is cryptographic. "
        "Use 'flat' or 'per_layer' with per-sample gradients, ghost clipping in one process, or "
        "clipping='batch'"
    )


def _check_adaptive(mechanism: str, sampling: Sampling) -> None:
    """Refuse a certified epsilon where Opacus's adaptive clipping has none.

    Under Poisson sampling it divides the noised count of unclipped samples by the exact batch size, and books
    the count with half of its sensitivity. With a shuffled loader the size is public and replacing a sample
    is booked in full. Accountants other than ``"fdp"`` warn.
    """
    if sampling != "poisson":
        return
    message = (
        "Opacus's clipping='adaptive' uses the exact batch size and half of the count's sensitivity, so "
        "under Poisson sampling its epsilon is not an upper bound"
    )
    if mechanism == "fdp":
        raise ValueError(
            f"{message}: use poisson_sampling=False, or accountant='prv' for Opacus's own figure"
        )
    warnings.warn(message, stacklevel=users_level())

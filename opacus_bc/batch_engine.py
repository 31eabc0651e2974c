"""The part of the engine that makes ``clipping="batch"``: plan, policy, draws, optimizer, accounting."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import Generator
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import batch_norm as bn
from opacus_bc._opacus import AbstractGradSampleModule, DPOptimizer
from opacus_bc.alc import ALC
from opacus_bc.clip_rules import mini_set_rule
from opacus_bc.clipping import (
    check_positive,
    effective_noise_multiplier,
    noise_against_individual_clipping,
)
from opacus_bc.distributed import (
    LateWrapping,
    attach,
    check_data_parallel,
    data_parallel,
    joint_statistics,
    part_for,
    ranks_of,
)
from opacus_bc.loader import PrivateDataLoader
from opacus_bc.noise import (
    NoiseSource,
    SecureNoise,
    TorchNoise,
    fresh_seed,
    sampling_generator,
    secure_generator,
    secure_key,
)
from opacus_bc.optimizer import BatchClippingOptimizer, check_optimizer
from opacus_bc.ranks import Ranks
from opacus_bc.release_engine import ReleaseEngine, bare, is_distributed
from opacus_bc.run import Run
from opacus_bc.sampling import Sampling, SamplingPlan, make_draws, make_plan
from opacus_bc.sharded import ShardedReduction
from opacus_bc.shards import Sharding, check_sharded, fully_sharded
from opacus_bc.stock import PassBook

logger = logging.getLogger("opacus_bc")


class BatchEngine(ReleaseEngine):
    """What ``PrivacyEngine.make_private`` calls for ``clipping="batch"``."""

    _secure_noise: SecureNoise | None
    dataset: Any

    def _make_batch_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        loss_reduction: str,
        sampling: Sampling,
        noise_generator: torch.Generator | None,
        mini_batch_size: int | None,
        batch_norm: Any,
        alc: ALC | None,
        criterion: Any,
    ) -> tuple[nn.Module, BatchClippingOptimizer, PrivateDataLoader]:
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        check_batch_module(module, optimizer)
        plain = bare(module)
        clip_bound = check_positive("max_grad_norm", max_grad_norm)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if isinstance(data_loader, PrivateDataLoader):
            raise ValueError("data_loader is private already: several optimizers cannot share its draws")
        self._check_accountant(sampling)
        plan = make_plan(data_loader, sampling=sampling, mini_batch_size=mini_batch_size)
        policy = bn.make_policy(plain, batch_norm, private_loader=data_loader)
        if policy.private and self.accountant.mechanism() == "gdp":
            raise ValueError("accountant='gdp' cannot compose the release of batch_norm='private': use 'fdp'")
        wrapper = data_parallel(module)
        ranks, sharding = None, None
        if wrapper is not None:
            check_data_parallel(wrapper, sampling=sampling, policy=policy.name, mini_sets=plan.mini_sets)
            ranks = ranks_of(wrapper)
        elif fully_sharded(plain):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            sharding = check_sharded(
                plain, params, sampling=sampling, policy=policy, freeze=alc is not None and bool(alc.freeze)
            )
            ranks = sharding.ranks
        if ranks is not None:
            ranks.check_same("make_private's arguments", plan, noise_multiplier, clip_bound, loss_reduction)
        randomness = self._batch_randomness(ranks, sharding, noise_generator, data_loader.generator)
        draws = make_draws(plan, data_loader, randomness[0])
        self._remember(data_loader)

        whole = wrapper is not None and plan.mini_sets > 1
        loader = PrivateDataLoader(
            data_loader, draws=draws, part=part_for(ranks, whole=whole, joint=joint_statistics(plain))
        )
        mean = loss_reduction == "mean"
        policy.install(normaliser=plan.dataset_size, adjacency=plan.adjacency)
        with policy.withdrawn_on_error(), ExitStack() as withdrawn:
            reduction = None
            if sharding is not None:
                reduction = ShardedReduction(plain, sharding, loader.ledger, mean=mean)
                withdrawn.callback(reduction.detach)
            rule = mini_set_rule(
                alc,
                plain,
                optimizer,
                plan=plan,
                criterion=criterion,
                ranks=ranks,
                measure=None if reduction is None else reduction.parameter_norms,
            )
            withdrawn.pop_all()
        private = BatchClippingOptimizer(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_bound,
            clip_rule=rule,
            ledger=loader.ledger,
            mini_sets=plan.mini_sets,
            noise=randomness[1],
            parameter_names={p: name for name, p in plain.named_parameters()},
            loss_reduction=loss_reduction,
        )
        private.accounting_hook = self._accounting_hook(plan)
        private.reduction = reduction
        if wrapper is not None and ranks is not None:
            private.reduction = attach(wrapper, ranks, loader.ledger, plan, mean=mean)
        attached = (LateWrapping(plain),) if ranks is None else () if reduction is None else (reduction,)
        self._start(
            Run(
                policy=policy,
                wrapper=module,
                optimizer=private,
                data_loader=data_loader,
                sampling=plan.kind,
                clipping="batch",
                mini_set_size=plan.mini_set_size,
                alc_loader=None if alc is None else alc.public_loader,
                draws=draws,
                ranks=ranks,
                sharded=reduction is not None,
                attached=attached,
            )
        )
        logger.info(
            "clipping='batch': at equal C and noise_multiplier an update carries %g times the noise of "
            "individual clipping's",
            noise_against_individual_clipping(plan.mini_set_size, adjacency=plan.adjacency),
        )
        return module, private, loader

    def _batch_randomness(
        self,
        ranks: Ranks | None,
        sharding: Sharding | None,
        noise_generator: torch.Generator | None,
        loader_generator: torch.Generator | None,
    ) -> tuple[Generator, NoiseSource]:
        """Who draws the batches and who the noise.

        On several ranks batches are the same everywhere, and noise is too, unless it is for different shards.
        """
        if ranks is None:
            generator = sampling_generator(secure=self.secure_mode, generator=loader_generator)
            return generator, self._secure_noise or TorchNoise(noise_generator)
        if self.secure_mode:
            same_noise = ranks if sharding is None else sharding.replicas
            own = secure_key()
            key = own if same_noise is None else same_noise.agree(own)
            return secure_generator(ranks.agree(secure_key())), SecureNoise(key)
        generator = np.random.Generator(np.random.Philox(ranks.agree(fresh_seed(loader_generator))))
        noise = TorchNoise(offset=0 if sharding is None else sharding.noise_offset)
        noise.reseed(ranks.agree(fresh_seed(noise_generator)))
        return generator, noise

    def _remember(self, data_loader: DataLoader[Any]) -> None:
        if self.dataset is not None and self.dataset is not data_loader.dataset:
            warnings.warn(
                "this engine has accounted another data set object before: its epsilon is meant for one data "
                "set, so use a new PrivacyEngine unless both are the same data",
                stacklevel=4,
            )
        self.dataset = data_loader.dataset

    def _accounting_hook(self, plan: SamplingPlan) -> Callable[[BatchClippingOptimizer], None]:
        book = PassBook(self.accountant)

        def hook(optimizer: BatchClippingOptimizer) -> None:
            book.step(
                noise_multiplier=effective_noise_multiplier(optimizer.blocks()),
                sample_rate=plan.sample_rate,
                sampling=plan.kind,
                pass_index=optimizer.ledger.pass_index,
            )

        return hook


def check_batch_module(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse modules and optimizers that batch clipping cannot serve; changes nothing.

    Raises:
        ValueError: Says what is wrong.
    """
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError("module is wrapped for per-sample gradients: pass the plain nn.Module")
    if data_parallel(module) is not None and fully_sharded(module):
        raise ValueError("a fully_shard model inside DistributedDataParallel: use fully_shard alone")
    synchronised = any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())
    if synchronised and not is_distributed(module) and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "SyncBatchNorm would mix the draws of processes that are accounted one by one: wrap the module "
            "in DistributedDataParallel first, or use BatchNorm"
        )
    if is_distributed(module) and data_parallel(module) is None and not fully_sharded(module):
        raise ValueError(
            f"clipping='batch' does not support {type(module).__name__} yet: pass the plain module"
        )
    check_optimizer(optimizer)
    own = set(module.parameters())
    if any(p not in own for p in chain.from_iterable(g["params"] for g in optimizer.param_groups)):
        raise ValueError("optimizer holds parameters that are not module's: build it on module.parameters()")

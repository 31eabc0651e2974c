"""Builds what ``clipping="batch"`` needs: plan, policy, draws, loader, optimizer."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn, optim

from opacus_bc._opacus import AbstractGradSampleModule
from opacus_bc.alc.choice import make_meter, make_rule, trainable
from opacus_bc.batch_norm.choices import needs_several_samples
from opacus_bc.batch_norm.policy import BatchNormPolicy, make_policy
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import SMALLEST_MINI_SET
from opacus_bc.draws.sources import draws_of_users, make_draws
from opacus_bc.engine.agreement import check_agreement
from opacus_bc.engine.booking import Booking, check_accountant
from opacus_bc.engine.randomness import streams
from opacus_bc.engine.release import check_private_rows
from opacus_bc.engine.request import Request, check_held
from opacus_bc.engine.run import Guest, Run
from opacus_bc.mechanism.blocks import noise_against_individual_clipping
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.optimizers.mini_sets import BatchClippingOptimizer
from opacus_bc.parallel.ddp import attach, check_data_parallel, joint_statistics, part_for, ranks_of
from opacus_bc.parallel.fsdp import ShardedReduction
from opacus_bc.parallel.ranks import Ranks, Reduction
from opacus_bc.parallel.shards import Sharding, check_sharded, fully_sharded
from opacus_bc.parallel.wrappers import LateWrapping, bare, data_parallel, is_distributed

logger = logging.getLogger("opacus_bc")


def build_batch(request: Request, accountant: Any, noise: SecureNoise | None, undo: ExitStack) -> Run:
    """Set batch clipping up; ``undo`` gets what takes the changes back if anything fails."""
    optimizer, data_loader = request.inner_optimizer, request.data_loader
    _check_module(request.module, optimizer)
    plain = bare(request.module)
    clip_bound = check_positive("max_grad_norm", request.max_grad_norm)
    check_accountant(accountant, request.kind)
    plan = request.plan
    policy = make_policy(plain, request.policy, private_loader=data_loader, trained=request.held)
    if policy.name == "private" and accountant.mechanism() == "gdp":
        raise ValueError("accountant='gdp' cannot compose the release of batch_norm='private': use 'fdp'")
    ranks, sharding = _processes(request, policy)
    if ranks is not None:
        check_agreement(ranks, request, policy, (clip_bound,))
    generator, noise_source = streams(request, ranks, sharding, noise)
    wrapper = data_parallel(request.module)
    whole = wrapper is not None and plan.one_by_one
    alone = request.users is not None and not needs_several_samples(plain, policy.name)
    smallest = 1 if alone else SMALLEST_MINI_SET
    part = part_for(ranks, whole=whole, joint=joint_statistics(plain), smallest=smallest)
    if request.users is None:
        draws = make_draws(plan, data_loader, generator)
    else:
        draws = draws_of_users(plan, request.users, generator)
    loader = PrivateDataLoader(data_loader, draws=draws, part=part)
    trained = dict(trainable(plain, optimizer)).values()
    policy.install(
        undo, trained=trained, normaliser=plan.dataset_size, adjacency=plan.adjacency, unit=plan.unit
    )
    if policy.name == "private":
        check_private_rows(plain, data_loader, of_users=request.users is not None)
    mean = request.loss_reduction == "mean"
    reduction: Reduction | None = None
    guests: tuple[Guest, ...] = ()
    measure = None
    if sharding is not None:
        reduction = sharded = ShardedReduction(plain, sharding, loader.ledger, mean=mean)
        undo.callback(sharded.remove)
        guests, measure = (sharded,), sharded.parameter_norms
    config, meter = request.config, make_meter(plain, plan, ranks=ranks, measure=measure)
    rule = make_rule(config, optimizer, plan=plan, meter=meter, criterion=request.criterion)
    if wrapper is not None and ranks is not None:
        reduction = attach(wrapper, ranks, loader.ledger, plan, mean=mean)
    private = BatchClippingOptimizer(
        optimizer,
        noise_multiplier=request.noise_multiplier,
        max_grad_norm=clip_bound,
        clip_rule=rule,
        ledger=loader.ledger,
        mini_sets=plan.mini_sets,
        noise=noise_source,
        parameter_names={p: name for name, p in plain.named_parameters()},
        loss_reduction=request.loss_reduction,
        reduction=reduction,
    )
    private.booking = Booking(accountant, plan)
    if plan.unit == "mini-set":
        logger.info(
            "clipping='batch': at equal C and noise_multiplier an update carries %g times the noise of "
            "individual clipping's",
            noise_against_individual_clipping(plan.mini_set_size, adjacency=plan.adjacency),
        )
    return Run(
        policy=policy,
        wrapper=request.module,
        optimizer=private,
        loader=loader,
        data_loader=data_loader,
        plan=plan,
        meter=meter,
        users=request.users,
        clipping="batch",
        alc_loader=None if config is None else config.public_loader,
        ranks=ranks,
        sharded=sharding is not None,
        guests=guests if ranks is not None else (LateWrapping(plain),),
    )


def _processes(request: Request, policy: BatchNormPolicy) -> tuple[Ranks | None, Sharding | None]:
    """The processes that train together, and how they hold the model; None for one process."""
    wrapper = data_parallel(request.module)
    if wrapper is not None:
        plan = request.plan
        check_data_parallel(wrapper, sampling=plan.kind, policy=policy.name, one_by_one=plan.one_by_one)
        return ranks_of(wrapper), None
    plain = bare(request.module)
    if not fully_sharded(plain):
        return None, None
    params = [p for group in request.inner_optimizer.param_groups for p in group["params"]]
    freeze = request.config is not None and bool(request.config.freeze)
    sharding = check_sharded(plain, params, sampling=request.plan.kind, policy=policy, freeze=freeze)
    return sharding.ranks, sharding


def _check_module(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse modules and optimizers that batch clipping cannot serve; changes nothing."""
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
            f"clipping='batch' adds the ranks' gradients up itself, which {type_name(module)} does not know: "
            "wrap the plain module in torch.nn.parallel.DistributedDataParallel instead"
        )
    check_held(module, optimizer)

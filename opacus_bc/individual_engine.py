"""The part of the engine that makes individual clipping: Opacus's own modes with what they get on top."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import batch_norm as bn
from opacus_bc._opacus import DPOptimizer
from opacus_bc.alc import ALC
from opacus_bc.backward_guards import SortedSequences, guard_backward
from opacus_bc.clip_rules import sample_rule
from opacus_bc.distributed import LateWrapping
from opacus_bc.ghost import GhostCriterion
from opacus_bc.guards import check_individual
from opacus_bc.individual import IndividualClippingOptimizer
from opacus_bc.noise import TorchNoise
from opacus_bc.output_hooks import hook_outputs
from opacus_bc.release_engine import ReleaseEngine, is_distributed
from opacus_bc.run import Run
from opacus_bc.sampling import Sampling
from opacus_bc.stock import (
    ShuffledLoader,
    check_adaptive,
    check_keywords,
    count_draws,
    guard_accumulation,
    guard_frozen_parameters,
    guard_grad_scaler,
    guard_noise,
    guard_per_layer_bounds,
    individual_hook,
    one_step_per_draw,
)


class IndividualEngine(ReleaseEngine):
    """What ``PrivacyEngine.make_private`` calls for ``"flat"``, ``"per_layer"`` and ``"adaptive"``."""

    def _make_individual_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool,
        loss_reduction: str,
        sampling: Sampling,
        clipping: str,
        noise_generator: torch.Generator | None,
        grad_sample_mode: str,
        wrap_model: bool,
        rand_on_empty: bool,
        batch_norm: Any,
        batch_norm_refresh: int,
        alc: ALC | None,
        criterion: Any,
        extra: dict[str, Any],
    ) -> tuple[Any, ...]:
        check_keywords(
            extra, clipping=clipping, distributed=is_distributed(module), grad_sample_mode=grad_sample_mode
        )
        if self.secure_mode:
            raise ValueError(
                f"secure_mode=True works with clipping='batch'; Opacus's clipping={clipping!r} draws its "
                "noise from torch generators, none of which is cryptographic"
            )
        self._check_accountant(sampling)
        check_individual(module, max_grad_norm, data_loader, clipping=clipping, blocks=alc is not None)
        if clipping == "adaptive":
            check_adaptive(self.accountant.mechanism(), sampling)
        policy = bn.make_policy(
            module,
            batch_norm,
            individual=True,
            private_loader=data_loader,
            refresh_every=batch_norm_refresh,
        )
        if policy.layers and (grad_sample_mode not in ("hooks", "ghost") or not batch_first):
            raise ValueError(
                f"BatchNorm under individual clipping needs grad_sample_mode 'hooks' or 'ghost' and "
                f"batch_first=True, got {grad_sample_mode!r} and {batch_first}"
            )
        if policy.public is not None and policy.public.differentiate and grad_sample_mode != "hooks":
            raise ValueError(
                f"PublicStatistics(differentiate=True) needs grad_sample_mode='hooks', got "
                f"{grad_sample_mode!r}: Opacus's ghost norms know of no gradient from one layer into another"
            )
        if sampling == "partition":
            raise ValueError(f"sampling='partition' goes with clipping='batch', got clipping={clipping!r}")
        loader = data_loader if sampling == "poisson" else ShuffledLoader(data_loader)
        policy.install()
        with policy.withdrawn_on_error():
            if alc is not None:
                extra["clip_rule"] = sample_rule(alc, module, optimizer, data_loader, sampling, criterion)
            result = super().make_private(
                module=module,
                optimizer=optimizer,
                criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
                data_loader=loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=sampling == "poisson",
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                **extra,
            )
        private_optimizer: DPOptimizer = result[1]
        if grad_sample_mode == "ghost":
            result[2].__class__ = GhostCriterion
        self._start(
            Run(
                policy=policy,
                wrapper=result[0],
                optimizer=private_optimizer,
                data_loader=data_loader,
                sampling=sampling,
                clipping=clipping,
                alc_loader=None if alc is None else alc.public_loader,
                attached=(
                    SortedSequences(module),
                    *(() if is_distributed(module) else (LateWrapping(module),)),
                ),
            )
        )
        hook_outputs(result[0])
        guard_backward(result[0])
        guard_per_layer_bounds(private_optimizer)
        guard_frozen_parameters(private_optimizer)
        guard_grad_scaler(private_optimizer)
        guard_noise(private_optimizer)
        guard_accumulation(private_optimizer)
        counter = count_draws(result[-1], private_optimizer)
        if isinstance(private_optimizer, IndividualClippingOptimizer):
            private_optimizer.attach_to(module, hooks=result[0])
        if isinstance(private_optimizer, IndividualClippingOptimizer) or sampling == "shuffle":
            private_optimizer.attach_step_hook(
                individual_hook(self.accountant, counter, sample_rate=1 / len(loader), sampling=sampling)
            )
        if counter is not None:
            private_optimizer.attach_step_hook(one_step_per_draw(private_optimizer.step_hook, counter))
        return tuple(result)

    def _prepare_optimizer(self, *, clip_rule: Any = None, **kwargs: Any) -> DPOptimizer:
        if clip_rule is None:
            return super()._prepare_optimizer(**kwargs)
        return IndividualClippingOptimizer(
            getattr(kwargs["optimizer"], "original_optimizer", kwargs["optimizer"]),
            noise_multiplier=kwargs["noise_multiplier"],
            max_grad_norm=kwargs["max_grad_norm"],
            expected_batch_size=kwargs["expected_batch_size"],
            clip_rule=clip_rule,
            noise=TorchNoise(kwargs["noise_generator"]),
            loss_reduction=kwargs["loss_reduction"],
        )

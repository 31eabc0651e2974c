"""From a request to a run: all of it is set up, or nothing is different."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opacus_bc.batch_norm.choices import keeps_statistics
from opacus_bc.engine.batch import build_batch
from opacus_bc.engine.book_keeping import build_book_keeping
from opacus_bc.engine.booking import check_protected
from opacus_bc.engine.individual import build_individual
from opacus_bc.engine.limit import Limit
from opacus_bc.engine.release import final_release
from opacus_bc.engine.reports import warn_at_start
from opacus_bc.engine.request import Request
from opacus_bc.engine.run import Run
from opacus_bc.gradients.half_precision import HalfPrecisionWatch
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.mechanism.warn import users_level
from opacus_bc.parallel.wrappers import bare, is_distributed, uncompiled, unwrap


def start(
    request: Request,
    accountant: Any,
    noise: SecureNoise | None,
    earlier: Sequence[Run],
    dataset: Any,
    limit: Limit | None = None,
) -> Run:
    """Set a run up.

    **Formal guarantee**: if it raises, module, optimizer, accountant and data loader are what they were.

    Args:
        request: What is asked for.
        accountant: Who will be told of its steps.
        noise: The cryptographic source, in secure mode.
        earlier: The runs that the same accountant counts already.
        dataset: The data set that was accounted last, or None.
        limit: The budget that its final release must fit into, or None.
    """
    build = build_individual
    if request.batch or request.book_keeping:
        build = build_batch if request.batch else build_book_keeping
    with ExitStack() as undo:
        undo.callback(_restore, [(p, p.grad, set(vars(p))) for p in request.module.parameters()])
        run = build(request, accountant, noise, undo)
        if not request.batch:
            run.optimizer.half_precision = watch = HalfPrecisionWatch(unwrap(run.policy.root))
            run.guests = (*run.guests, watch)
        for guest in run.guests:
            undo.callback(guest.remove)
        check_protected(accountant, run.plan, [other.plan for other in earlier])
        if limit is not None and (final := final_release(run)) is not None:
            limit.check_reserved(final)
        _warn_of_idle_policy(request, run)
        _warn_of_others(run, earlier, dataset)
        _warn_of_lone_ranks(request)
        if noise is None:
            _warn_of_constant_seeds(request)
        _warn_of_costly_mode(request, run)
        warn_at_start(run)
        undo.pop_all()
    run.optimizer.put_buffers_back = run.policy.before_delivery
    run.optimizer.licence.take_over(run.policy.after_step)
    return run


def _restore(parameters: list[tuple[nn.Parameter, torch.Tensor | None, set[str]]]) -> None:
    """Give parameters their gradients back, and take off what was hung on them since."""
    for p, grad, names in parameters:
        p.grad = grad
        for name in set(vars(p)) - names:
            delattr(p, name)


def _warn_of_idle_policy(request: Request, run: Run) -> None:
    if request.batch_norm is None or run.policy.layers or keeps_statistics(bare(request.module)):
        return
    warnings.warn(
        "batch_norm= changes nothing: this model has no BatchNorm layer. If it had some, look who replaced "
        "them (ModuleValidator.fix puts fresh GroupNorms there)",
        stacklevel=users_level(),
    )


def _warn_of_others(run: Run, earlier: Sequence[Run], dataset: Any) -> None:
    """Say where epsilon will add up what are other people's data, or miss what another engine counts."""
    if dataset is not None and dataset is not run.data_loader.dataset:
        warnings.warn(
            "this engine has accounted another data set object before, and its epsilon adds both up. "
            "That is right where people are in both (folds of one data set); use a new PrivacyEngine for "
            "the data of other people",
            stacklevel=users_level(),
        )
    former = run.optimizer.licence.holder()
    own = [other.optimizer.licence for other in earlier]
    if former is not None and former.steps_taken and former not in own:
        warnings.warn(
            f"another PrivacyEngine has made {former.steps_taken} steps with this optimizer, and this "
            "one does not count them: go on with that engine, or start with a new model and optimizer",
            stacklevel=users_level(),
        )


def _warn_of_lone_ranks(request: Request) -> None:
    """Say that processes which could train one model train one each."""
    if is_distributed(uncompiled(request.module)) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    warnings.warn(
        f"{dist.get_world_size()} processes are connected, and this module is wrapped for one: each trains a "
        "model of its own, and on the same data their epsilons add up. Put torch's "
        "DistributedDataParallel around the module before make_private",
        stacklevel=users_level(),
    )


def _warn_of_constant_seeds(request: Request) -> None:
    """Say that a generator is torch's constant one, which anybody can repeat."""
    unseeded = torch.Generator().initial_seed()
    for name, given in (
        ("data_loader's generator", request.data_loader.generator),
        ("noise_generator", request.noise_generator),
    ):
        if given is not None and given.initial_seed() == unseeded:
            warnings.warn(
                f"{name} was never seeded, and every such torch.Generator starts at the same number, so that "
                "anybody can repeat what it draws: leave it out (the operating system seeds one), or call "
                "its seed()",
                stacklevel=users_level(),
            )


def _warn_of_costly_mode(request: Request, run: Run) -> None:
    """Say what a mode costs that Opacus's scripts name and nobody here needs to."""
    asked = request.grad_sample_mode == "hooks" and request.clipping in ("flat", "per_layer")
    own = request.noise_generator is not None or not request.wrap_model  # what 'bk' does not have
    if asked and run.policy.layers and not request.distributed and not own:
        warnings.warn(
            "grad_sample_mode='hooks' keeps every sample's gradient, as Opacus does. With BatchNorm the "
            "default 'bk' makes the same release in a fraction of the time and memory: leave hooks out, "
            "unless 'bk' refuses a layer",
            stacklevel=users_level(),
        )

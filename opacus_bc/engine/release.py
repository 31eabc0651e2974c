"""What leaves the engine: the finished module, and running statistics that are released with noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from opacus_bc._opacus import AbstractGradSampleModule, GradSampleHooks
from opacus_bc.batch_norm.choices import resolve, statistics_modules
from opacus_bc.batch_norm.layers import PolicyLayer
from opacus_bc.batch_norm.policy import FINALIZED
from opacus_bc.batch_norm.private import (
    PrivateKeeper,
    PrivateStatistics,
    check_rows_apart,
    execution_order,
    release_multiplier,
)
from opacus_bc.draws.order import check_reads_in_order
from opacus_bc.draws.sources import rows_of_user
from opacus_bc.draws.units import UserIndex
from opacus_bc.engine.booking import book_release
from opacus_bc.engine.limit import Limit
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.randomness import sampling_generator
from opacus_bc.parallel.wrappers import unwrap
from opacus_bc.public.row_tests import row_count
from opacus_bc.public.running import batch_input, samples


def check_private_rows(root: nn.Module, data_loader: DataLoader[Any], *, of_users: bool) -> None:
    """Refuse, before training, a model whose running statistics could not be released in the end."""
    if of_users:
        check_reads_in_order(data_loader.dataset)
    layers = [child for child in root.modules() if isinstance(child, PolicyLayer)]
    batch = next(iter(in_order(data_loader)))
    if samples(inputs := batch_input(batch)) == 0:
        raise ValueError(
            f"batch_norm='private' needs batches with a row for each sample, and gets a {type_name(inputs)} "
            "of which nobody can say what is whose: use a public loader"
        )
    check_rows_apart(root, layers, batch)


def recalibrate(
    run: Run,
    accountant: Any,
    *,
    noise_multiplier: float | None,
    bound: float | None,
    limit: Limit | None = None,
) -> None:
    """Release a run's running statistics with noise; the accountant is told before anything is released.

    Raises:
        BudgetSpentError: ``limit`` does not cover it.
    """
    keeper, policy = run.policy.keeper, run.policy
    assert isinstance(keeper, PrivateKeeper)  # the only keeper that releases
    if policy.finished:
        raise RuntimeError("this model was finalized: its statistics are released already")
    sigma = keeper.config.noise_multiplier if noise_multiplier is None else noise_multiplier
    users = None if run.users is None else UserBatches(run.users, run.plan.cap, run.data_loader)
    loader = in_order(run.data_loader, users)
    layers = [child for child in policy.layers.values() if isinstance(child, PolicyLayer)]
    ordered = execution_order(policy.root, layers, next(iter(loader)))
    check_rows_apart(policy.root, layers, next(iter(loader)))
    cost = release_multiplier(sigma, max(1, len(ordered)))
    assert run.optimizer.noise is not None  # batch clipping never leaves noise to Opacus
    if limit is not None:
        limit.check_release(cost, keeper.neighbours, instead_of=final_release(run))
    book_release(accountant, noise_multiplier=cost, adjacency=keeper.neighbours)
    bound = keeper.config.bound if bound is None else bound
    keeper.release(
        ordered,
        loader,
        noise=run.optimizer.noise,
        noise_multiplier=sigma,
        bound=bound,
        counts=None if users is None else users.counts,
    )


def reserved_releases(accountant: Any, module: nn.Module, batch_norm: Any) -> tuple[float, ...]:
    """Noise multipliers of what will be released besides the steps: the final running statistics."""
    config, layers = resolve(batch_norm), statistics_modules(module)
    if not isinstance(config, PrivateStatistics) or not layers:
        return ()
    if accountant.mechanism() != "fdp":
        raise ValueError(
            f"accountant={accountant.mechanism()!r} cannot reserve the release of batch_norm='private' in a "
            "calibration: use PrivacyEngine(accountant='fdp')"
        )
    return (release_multiplier(config.noise_multiplier, len(layers)),)


def final_release(run: Run) -> tuple[float, str] | None:
    """The noise multiplier and adjacency of the release that ``finalize`` will make, if it will make one."""
    keeper, policy = run.policy.keeper, run.policy
    if not isinstance(keeper, PrivateKeeper) or policy.finished:
        return None
    return release_multiplier(keeper.config.noise_multiplier, max(1, len(policy.layers))), keeper.neighbours


def finished_module(run: Run, accountant: Any) -> nn.Module:
    """The plain module of a run, with statistics up to date and nothing added to it; no more steps."""
    if run.policy.keeper.owes_release and not run.policy.finished:
        recalibrate(run, accountant, noise_multiplier=None, bound=None)
    run.policy.finish(released=run.optimizer.licence.moved, steps=run.steps)
    for guest in run.guests:
        guest.remove()
    hooked = hasattr(run.wrapper, "autograd_grad_sample_hooks")
    if hooked and isinstance(run.wrapper, (AbstractGradSampleModule, GradSampleHooks)):
        run.wrapper.cleanup()
    plain = unwrap(run.policy.root)
    scrub(plain)
    run.optimizer.licence.close(FINALIZED, release_inner=False)
    return plain


# What Opacus hangs on parameters; pickling a module would write it out.
_ADDED_BY_OPACUS = ("grad_sample", "summed_grad", "_current_grad_sample", "_forward_counter", "_norm_sample")


def scrub(module: nn.Module) -> None:
    """Remove raw gradients, per-sample gradients and captured activations: they are private data."""
    for p in module.parameters():
        p.grad = None
        for name in _ADDED_BY_OPACUS:
            p.__dict__.pop(name, None)
    for child in module.modules():
        for name in ("activations", "max_batch_len"):
            child.__dict__.pop(name, None)


class OneByOne:
    """The user's collate function on every sample by itself, so that it cannot mix samples (mixup)."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        made = [self.collate([sample]) for sample in samples]
        if any(row_count(batch) > 1 for batch in made):
            raise ValueError(
                "data_loader's collate function makes several rows of one sample: batch_norm='private' needs "
                "one row for each sample; make the views in the training loop, or use public data"
            )
        return _joined(made)


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_joined([part[i] for part in parts]) for i in range(len(first))]
    kind = type(first).__name__
    raise TypeError(f"batch_norm='private' cannot join batches of {kind}: collate into tensors")


class UserBatches:
    """Batches of whole users, every user once; of a large one so many samples as in a step, chosen anew.

    Attributes:
        counts: For each batch, how many samples each of its users has.
    """

    def __init__(self, users: UserIndex, cap: int, data_loader: DataLoader[Any]) -> None:
        self._users, self._cap = users, cap
        most = max(cap, data_loader.batch_size or cap)
        self._members: list[list[int]] = [[]]
        self.counts: list[tuple[int, ...]] = []
        held: list[int] = []
        for user, size in enumerate(np.diff(users.offsets).tolist()):
            rows = min(size, cap)
            if sum(held) + rows > most and held:
                self.counts.append(tuple(held))
                self._members.append([])
                held = []
            held.append(rows)
            self._members[-1].append(user)
        self.counts.append(tuple(held))

    def __iter__(self) -> Iterator[list[int]]:
        generator = sampling_generator(secure=False)
        for members in self._members:
            rows = [rows_of_user(self._users, self._cap, 1, generator, user) for user in members]
            yield [index for own in rows for index in own]


def in_order(data_loader: DataLoader[Any], users: UserBatches | None = None) -> DataLoader[Any]:
    """The loader's data, every sample exactly once and by itself, or every user once."""
    collate = data_loader.collate_fn
    batches: dict[str, Any] = {"batch_sampler": users}
    return DataLoader(
        data_loader.dataset,
        collate_fn=collate if collate is default_collate else OneByOne(collate),
        num_workers=data_loader.num_workers,
        **({"batch_size": data_loader.batch_size} if users is None else batches),
    )

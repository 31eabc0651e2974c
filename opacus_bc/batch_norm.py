"""What happens to running statistics: BatchNorm that does not leak.

Gradients through batch statistics are inside the clipped vector. The running mean and variance are not: an
ordinary forward in training mode writes raw private statistics into buffers that ship with the model. A
policy says what happens instead; there is no silent default.

==================  =========================================  ============================================
policy              private forwards                           running statistics
==================  =========================================  ============================================
a public loader     batch clipping: the mini-set's own         re-estimated on public data when stale and
                    statistics; individual clipping: those     about to be read
                    of a public batch, as constants
``"private"``       the mini-set's own                         ``engine.recalibrate_batch_norm``, with noise
``"batch"``         the mini-set's own                         none; evaluation normalises with its batch
``"frozen"``        the given running statistics               never written
``"unprotected"``   as plain PyTorch                           **leak**; only to reproduce the paper
==================  =========================================  ============================================
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from opacus_bc.buffers import BufferWatch, ParameterWatch, check_unmoved, snapshot, untouched_buffers
from opacus_bc.clipping import Adjacency
from opacus_bc.norm_policies import (
    POLICIES,
    BatchNormPolicyError,
    Config,
    UnprotectedStatisticsError,
    check_policy,
    resolve,
    statistics_modules,
)
from opacus_bc.norm_types import (
    ConstantStatistics,
    FrozenStatistics,
    MiniSetStatistics,
    PolicyLayer,
    patch,
    unpatch,
)
from opacus_bc.private_statistics import PrivateKeeper, PrivateStatistics
from opacus_bc.public_data import PublicDataDescription, describe
from opacus_bc.public_statistics import ConstantsKeeper, PublicBatches, PublicKeeper, PublicStatistics

__all__ = [
    "POLICIES",
    "BatchNormPolicy",
    "BatchNormPolicyError",
    "UnprotectedStatisticsError",
    "check_policy",
    "make_policy",
    "resolve",
    "statistics_modules",
]

FINALIZED = (
    "this model was finalized: its BatchNorm layers are plain again and would write private statistics. Call "
    "make_private of this same engine anew to go on training: its accountant knows what was spent"
)


class BatchNormPolicy:
    """A policy at work on one model. Made by :func:`make_policy`, which validates; ``install`` changes it.

    **Formal guarantee**: between ``install`` and ``finish``, for every policy but ``"unprotected"``, no
    training forward changes a buffer of a layer in ``layers``, and one that changes any other buffer raises.

    Attributes:
        root: The model.
        name: ``"public"``, ``"private"``, ``"batch"``, ``"frozen"``, ``"unprotected"`` or ``"none"``.
        layers: What it is about, by name.
        keeper: Who writes the running statistics, if anybody does.
        public: The public data's configuration, if there is any.
        refresh_every: Steps between new training constants (individual clipping).
    """

    def __init__(
        self,
        root: nn.Module,
        config: Config,
        layers: dict[str, nn.Module],
        *,
        individual: bool,
        refresh_every: int,
    ) -> None:
        self.root = root
        self.layers = layers
        self.individual = individual
        self.refresh_every = refresh_every
        self.public = config if isinstance(config, PublicStatistics) else None
        self.private = config if isinstance(config, PrivateStatistics) else None
        self.name = config if isinstance(config, str) else "public" if self.public else "private"
        if not layers:
            self.name = "none"
        self.keeper: PublicKeeper | PrivateKeeper | None = None
        self.finished = False
        self._watches: list[BufferWatch | ParameterWatch] = []
        self._before: list[Any] = []
        self._dropped: list[tuple[nn.Module, str, Any]] = []
        self._modes = [(child, child.training) for child in layers.values()]

    @property
    def protected(self) -> bool:
        """False if running statistics leak."""
        return self.name != "unprotected"

    def install(self, *, normaliser: int = 1, adjacency: Adjacency = "add/remove one") -> None:
        """Make private forwards obey the policy.

        Args:
            normaliser: Public constant that divides the sums of ``"private"``.
            adjacency: Which neighbours ``"private"`` protects.

        Raises:
            PublicDataError: The model cannot run on the public data; it is as it was then.
        """
        with self.withdrawn_on_error():
            self._install(normaliser, adjacency)

    def _install(self, normaliser: int, adjacency: Adjacency) -> None:
        self._before = snapshot(self.root)
        if self.public and self.layers:
            batches = PublicBatches(self.public)
            self.keeper = (ConstantsKeeper if self.individual else PublicKeeper)(self.root, batches)
        elif self.private and self.layers:
            self.keeper = PrivateKeeper(self.root, self.private, normaliser=normaliser, adjacency=adjacency)
            widest = max(int(child.num_features) for child in self.layers.values())  # type: ignore[arg-type]  # norm layers have it
            self.keeper.warn_of_noise(widest)
        for child in self.layers.values():
            self._patch(child)
        if isinstance(self.keeper, PublicKeeper):
            self.keeper.try_out()
        if isinstance(self.keeper, ConstantsKeeper):
            self.keeper.refresh_every = self.refresh_every
            with untouched_buffers(self.root):
                self.keeper.refresh_constants()
            if self.public and self.public.differentiate and not self.keeper.followed:
                warnings.warn(
                    "differentiate=True changes nothing here: no BatchNorm layer with trainable weights "
                    "normalises the output of a linear or convolution layer directly",
                    stacklevel=5,
                )
        answered = self.layers.values() if not self.protected else filter(is_patched, self.layers.values())
        self._watches = [
            BufferWatch(self.root, frozenset(id(child) for child in answered)),
            ParameterWatch(self.root),
        ]
        if not self.protected:
            warnings.warn(
                f"batch_norm='unprotected': the running statistics of {len(self.layers)} layers are written "
                "from raw private batches and ship with the model. Differential privacy does not hold; this "
                "is meant for reproducing the paper and nothing else.",
                stacklevel=5,
            )

    def _patch(self, child: nn.Module) -> None:
        if self.name == "batch":
            for name, value in (
                ("track_running_stats", False),
                ("running_mean", None),
                ("running_var", None),
                ("num_batches_tracked", None),
            ):
                self._dropped.append((child, name, getattr(child, name)))
                setattr(child, name, value)
        elif self.name == "frozen":
            patch(child, ConstantStatistics if self.individual else FrozenStatistics)
        elif self.name != "unprotected":
            patch(child, ConstantStatistics if self.individual else MiniSetStatistics, self.keeper)

    @contextmanager
    def withdrawn_on_error(self) -> Iterator[None]:
        """Undo ``install`` if the body raises."""
        try:
            yield
        except BaseException:
            for child, training in self._modes:
                unpatch(child)
                child.training = training
            for child, name, value in self._dropped:
                setattr(child, name, value)
            self._unwatch()
            raise

    def after_step(self) -> None:
        """The weights have moved."""
        if isinstance(self.keeper, ConstantsKeeper):
            self.keeper.after_step()

    def _written(self) -> frozenset[int]:
        """Modules whose buffers a release of this engine writes, or that are knowingly unprotected."""
        return (
            frozenset(id(child) for child in self.layers.values()) if self.name != "frozen" else frozenset()
        )

    def check_buffers(self) -> None:
        """Refuse to speak of privacy while some buffer holds what nobody released.

        Raises:
            MovingBufferError: Names the buffer.
        """
        if not self.finished:
            check_unmoved(self._before, self._written())

    def finish(self) -> None:
        """Bring the statistics up to date, check every buffer and give the layers their plain types back.

        Raises:
            MovingBufferError: A buffer holds what nobody released.
        """
        if self.finished:
            return
        if isinstance(self.keeper, PublicKeeper):
            self.keeper.refresh()
        elif isinstance(self.keeper, PrivateKeeper):
            self.keeper.check()
        for child in self.layers.values():
            training = self.root.training
            unpatch(child)
            child.training = training
        check_unmoved(self._before, self._written())
        self._unwatch()
        self.finished = True

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()

    def describe_public(self) -> PublicDataDescription | None:
        """Size and fingerprint of the public data in use."""
        return describe(self.public.loader) if self.public and self.layers else None


def is_patched(child: nn.Module) -> bool:
    """Whether one of this package's types, over one of torch's, answers for the layer's buffers."""
    return isinstance(child, PolicyLayer) and child.plain_type.__module__.startswith("torch.nn.modules")


def make_policy(
    module: nn.Module,
    policy: Any,
    *,
    individual: bool = False,
    private_loader: DataLoader[Any] | None = None,
    refresh_every: int = 1,
) -> BatchNormPolicy:
    """Validate ``policy`` for ``module`` (see :func:`check_policy`); nothing changes before ``install``."""
    layers = check_policy(module, policy, individual=individual, private_loader=private_loader)
    if isinstance(refresh_every, bool) or not isinstance(refresh_every, int) or refresh_every < 1:
        raise ValueError(f"batch_norm_refresh must be a whole number >= 1, got {refresh_every!r}")
    return BatchNormPolicy(
        module, resolve(policy), layers, individual=individual, refresh_every=refresh_every
    )

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
from collections.abc import Collection, Iterable
from contextlib import ExitStack

from torch import Tensor, nn

from opacus_bc.batch_norm.buffers import BufferWatch, ParameterWatch
from opacus_bc.batch_norm.choices import Config, check_policy, has_initial_statistics, resolve
from opacus_bc.batch_norm.constants import ConstantsKeeper
from opacus_bc.batch_norm.keeper import Keeper
from opacus_bc.batch_norm.layers import (
    STATISTICS,
    ConstantStatistics,
    FrozenStatistics,
    MiniSetStatistics,
    PolicyLayer,
    patch,
    unpatch,
)
from opacus_bc.batch_norm.once_a_step import OnceAStep
from opacus_bc.batch_norm.private import PrivateKeeper, PrivateStatistics
from opacus_bc.batch_norm.public import PublicBatches, PublicKeeper, PublicStatistics
from opacus_bc.batch_norm.snapshot import Left, Snapshot
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.types import Loader, State
from opacus_bc.mechanism.warn import users_level
from opacus_bc.public.data import PublicDataDescription, describe

FINALIZED = (
    "this model was finalized: its BatchNorm layers are plain again and would write private statistics. Call "
    "make_private of this same engine anew to go on training: its accountant knows what was spent"
)


_NOBODY_WRITES = {
    "none": "the model keeps no running statistics",
    "batch": "no running statistics are kept; evaluation normalises with its own batch",
    "frozen": "running statistics are the given ones and were never written",
    "unprotected": "RUNNING STATISTICS LEAK: they were written from raw private batches and are not covered",
}


class BatchNormPolicy:
    """A policy at work on one model. Made by :func:`make_policy`, which validates; ``install`` changes it.

    **Formal guarantee**: between ``install`` and ``finish``, for every policy but ``"unprotected"``, no
    training forward changes a buffer of a layer in ``layers``, and one that changes any other buffer raises.
    """

    def __init__(
        self,
        root: nn.Module,
        config: Config,
        layers: dict[str, nn.Module],
        *,
        individual: bool,
        refresh_every: int,
        can_follow: bool,
    ) -> None:
        self.root = root
        self.layers = layers
        self.individual = individual
        self.config = config
        self.public = config if isinstance(config, PublicStatistics) else None
        self.name = policy_name(config) if layers else "none"
        self.refresh_every = refresh_every
        self.follow = can_follow and self.public is not None and self.public.differentiate is not False
        self.keeper = Keeper(_NOBODY_WRITES["none"])
        self.finished = False
        self._watches: list[BufferWatch | ParameterWatch] = []
        self._before = Snapshot.of(nn.Module(), ())
        self._once = OnceAStep(nn.Module())
        self._modes = [(child, child.training) for child in layers.values()]

    @property
    def protected(self) -> bool:
        """False if running statistics leak."""
        return self.name != "unprotected"

    def install(
        self,
        undo: ExitStack,
        *,
        trained: Collection[Tensor] = (),
        normaliser: int = 1,
        adjacency: Adjacency = "add/remove one",
        unit: Unit = "sample",
    ) -> None:
        """Make private forwards obey the policy; ``undo`` gets what takes the changes back.

        ``trained`` are the parameters that releases will move; all others must stay.
        ``"private"`` divides its sums by the public ``normaliser`` and protects neighbours by ``adjacency``;
        of users (``unit``) it clips one vector each.
        """
        undo.callback(self._withdraw)
        self._once = OnceAStep(self.root, frozenset(map(id, self.layers.values())))
        self._before = Snapshot.of(self.root, trained)
        self.keeper = self._make_keeper(normaliser, adjacency, unit)
        for child in self.layers.values():
            self._patch(child, undo)
        self.keeper.start()
        answered = self.layers.values() if not self.protected else filter(is_patched, self.layers.values())
        self._watches = [
            BufferWatch(self.root, frozenset(id(child) for child in answered)),
            ParameterWatch(self.root),
        ]
        initial = [name for name, child in self.layers.items() if has_initial_statistics(child)]
        if self.name == "frozen" and initial:
            warnings.warn(
                f"batch_norm='frozen': {len(initial)} layers ({initial[0]} first) hold the statistics they "
                "were made with, mean 0 and variance 1, and will never have others: load pretrained weights "
                "before make_private, or pass a public DataLoader",
                stacklevel=users_level(),
            )
        if not self.protected:
            warnings.warn(
                f"batch_norm='unprotected': the running statistics of {len(self.layers)} layers are written "
                "from raw private batches and ship with the model. Differential privacy does not hold; this "
                "is meant for reproducing the paper and nothing else.",
                stacklevel=users_level(),
            )

    def _make_keeper(self, normaliser: int, adjacency: Adjacency, unit: Unit) -> Keeper:
        if self.name == "public" and self.public is not None:
            batches = PublicBatches(self.public)
            if self.individual:
                return ConstantsKeeper(
                    self.root, batches, refresh_every=self.refresh_every, follow=self.follow
                )
            return PublicKeeper(self.root, batches)
        if self.name == "private" and isinstance(self.config, PrivateStatistics):
            owner: Unit = "user" if unit == "user" else "sample"
            return PrivateKeeper(
                self.root, self.config, normaliser=normaliser, adjacency=adjacency, unit=owner
            )
        return Keeper(_NOBODY_WRITES[self.name])

    def _patch(self, child: nn.Module, undo: ExitStack) -> None:
        if self.name == "batch":
            for name, value in {"track_running_stats": False, **dict.fromkeys(STATISTICS)}.items():
                undo.callback(setattr, child, name, getattr(child, name))
                setattr(child, name, value)
        elif self.name == "frozen":
            patch(child, ConstantStatistics if self.individual else FrozenStatistics)
        elif self.name != "unprotected":
            patch(child, ConstantStatistics if self.individual else MiniSetStatistics, self.keeper)

    def _withdraw(self) -> None:
        for child, training in self._modes:
            unpatch(child)
            child.training = training
        self._unwatch()

    def before_delivery(self) -> None:
        """A batch is about to be delivered, or has been used: counters must not count deliveries."""
        if not self.finished:
            self._once.put_back()

    def after_step(self) -> None:
        """The weights have moved."""
        self._once.after_step()
        self.keeper.after_step()

    def _answered(self, *, whole: bool) -> Left:
        """Statistics that a release of this engine or public data write, or that are knowingly unprotected.

        Before a release (``whole``) it is those that were written.
        """
        if self.name == "frozen":
            return frozenset()
        layers: Iterable[nn.Module] = self.layers.values()
        names: Collection[str] = STATISTICS
        if whole and self.name in ("public", "private"):
            layers = [layer for layer in layers if id(layer) in self.keeper.written]
            names = STATISTICS if self.name == "public" else STATISTICS[:2]
        elif whole and self.name == "batch":
            return frozenset((id(e), n) for e in layers for n in names if getattr(e, n, None) is None)
        return frozenset((id(layer), name) for layer in layers for name in names)

    def check_buffers(self) -> None:
        """Refuse to speak of privacy while some buffer holds what nobody released."""
        if not self.finished:
            self._before.check(self.root, leave_out=self._answered(whole=False))

    def check_untrained(self, released: Collection[Tensor], steps: int) -> None:
        """Refuse to save a model in which anything but what was released has moved."""
        leave_out = self._answered(whole=False)
        self._before.check(self.root, leave_out=leave_out, released=released, steps=steps, whole=True)

    def finish(self, *, released: Collection[Tensor] = (), steps: int = 0) -> None:
        """Bring the statistics up to date, check all that the model holds and give it its plain types back.

        Args:
            released: Parameters that a release has moved.
            steps: How many steps have been made.
        """
        if self.finished:
            return
        self.before_delivery()
        self.keeper.finish()
        leave_out = self._answered(whole=True)
        for child in self.layers.values():
            unpatch(child)
            child.training = self.root.training
        self._before.check(self.root, leave_out=leave_out, released=released, steps=steps, whole=True)
        self._unwatch()
        self.finished = True

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()

    def describe_public(self) -> PublicDataDescription | None:
        """Size and fingerprint of the public data in use."""
        return describe(self.public.loader) if self.public and self.layers else None

    def state_dict(self) -> State:
        """What an exact resume must know; all of it is released or public. (Buffers are in the module's.)"""
        return {"policy": self.name, "layers": sorted(self.layers), "keeper": self.keeper.state_dict()}

    def check_state(self, state: State) -> None:
        """Refuse the state of another policy or of other layers; changes nothing."""
        if (state["policy"], state["layers"]) != (self.name, sorted(self.layers)):
            raise ValueError(
                f"the checkpoint was written with batch_norm policy {state['policy']!r} on "
                f"{state['layers']}, this model has {self.name!r} on {sorted(self.layers)}: pass the same "
                "batch_norm= to make_private"
            )

    def load_state_dict(self, state: State | None, *, steps: int = 0) -> None:
        """Go on where :meth:`state_dict` was taken, after ``steps`` steps; None if a checkpoint has none.

        Weights and buffers are loaded.
        """
        self._once.keep()
        constant = [layer for layer in self.layers.values() if isinstance(layer, ConstantStatistics)]
        with ExitStack() as shown:
            for layer in constant:
                shown.enter_context(layer.with_buffers())
            # Checked when the checkpoint was written.
            self._before = Snapshot.of(self.root, self._before.trained, steps=steps)
        if self.name == "frozen":
            for layer in constant:
                layer.take_running_statistics()
        self.keeper.load_state_dict(None if state is None else state["keeper"])

    def snapshot(self) -> Snapshot:
        """What nobody may move, as it was; :meth:`put_back` takes it."""
        return self._before

    def put_back(self, before: Snapshot) -> None:
        """Compare with this again."""
        self._before = before


def policy_name(config: Config) -> str:
    """What a configuration is called."""
    if isinstance(config, str):
        return config
    return "private" if isinstance(config, PrivateStatistics) else "public"


def is_patched(child: nn.Module) -> bool:
    """Whether one of this package's types, over one of torch's, answers for the layer's buffers."""
    return isinstance(child, PolicyLayer) and child.plain_type.__module__.startswith("torch.nn.modules")


def make_policy(
    module: nn.Module,
    policy: object,
    *,
    individual: bool = False,
    private_loader: Loader | None = None,
    refresh_every: int = 1,
    can_follow: bool = False,
    trained: Collection[nn.Parameter] | None = None,
) -> BatchNormPolicy:
    """Validate ``policy`` for ``module`` (see :func:`check_policy`); nothing changes before ``install``.

    ``can_follow`` says whether per-sample gradients can follow public statistics into the layers before.
    """
    layers = check_policy(
        module, policy, individual=individual, private_loader=private_loader, trained=trained
    )
    check_count("batch_norm_refresh", refresh_every)
    return BatchNormPolicy(
        module,
        resolve(policy),
        layers,
        individual=individual,
        refresh_every=refresh_every,
        can_follow=can_follow,
    )

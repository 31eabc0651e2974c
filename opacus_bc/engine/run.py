"""What ``make_private`` set up, for whoever has to report on it, release it or save it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from torch.utils.data import DataLoader

from opacus_bc.alc.measuring import PublicNorms
from opacus_bc.batch_norm.policy import BatchNormPolicy
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.units import UserIndex
from opacus_bc.engine.booking import Booking
from opacus_bc.engine.limit import Limit
from opacus_bc.optimizers.private import PrivateOptimizer
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.public.data import describe


class Guest(Protocol):
    """What hangs on a module until it is finished."""

    def remove(self) -> None:
        """Take it off again."""
        ...


@dataclass(kw_only=True, eq=False)
class Run:
    """One call of ``make_private``: who trains what on which data."""

    policy: BatchNormPolicy
    wrapper: Any  # what Opacus put around the module, or the module itself
    optimizer: PrivateOptimizer
    loader: PrivateDataLoader
    data_loader: DataLoader[Any]  # the user's
    plan: SamplingPlan
    meter: PublicNorms  # measures gradients on public data as this run clips them
    clipping: str
    criterion: Any = None  # of ghost clipping
    users: UserIndex | None = None  # whose samples are which, where users are protected
    alc_loader: DataLoader[Any] | None = None
    ranks: Ranks | None = None  # None: one process
    sharded: bool = False
    guests: tuple[Guest, ...] = ()
    start: dict[str, Any] = field(init=False)  # noise and bounds before any scheduler moved them

    def __post_init__(self) -> None:
        self.start = self.noise_and_bounds()

    @property
    def returned(self) -> tuple[Any, ...]:
        """What the user gets, in Opacus's order."""
        criterion = () if self.criterion is None else (self.criterion,)
        return (self.wrapper, self.optimizer, *criterion, self.loader)

    @property
    def steps(self) -> int:
        """How often the weights have moved."""
        return self.optimizer.steps_taken

    @property
    def booking(self) -> Booking:
        """What tells the accountant."""
        booking = self.optimizer.booking
        assert isinstance(booking, Booking)  # all builders see to it
        return booking

    def obey(self, limit: Limit) -> None:
        """End the loader, and refuse steps, where the budget is spent."""
        self.booking.obey(limit)
        self.loader.ledger.ask_before_draws(partial(self.booking.covers, self.optimizer))

    def noise_and_bounds(self) -> dict[str, Any]:
        """The optimizer's noise multiplier and clip bound, as plain numbers."""
        return {
            "noise_multiplier": float(self.optimizer.noise_multiplier),
            "max_grad_norm": float(self.optimizer.max_grad_norm),
        }

    @cached_property
    def public_data(self) -> list[str]:
        """Fingerprints of the public data: what was private before a resume must not be public after it."""
        alc = None if self.alc_loader is None else describe(self.alc_loader)
        return [data.sha256 for data in (alc, self.policy.describe_public()) if data is not None]

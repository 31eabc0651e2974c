"""The f-DP accountant for Opacus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from opacus.accountants import IAccountant
from opacus.accountants.registry import register_accountant

from opacus_bc.accounting import query
from opacus_bc.accounting.calibration import tradeoff_of
from opacus_bc.accounting.clt import mu_clt_of
from opacus_bc.accounting.events import (
    ADJACENCY,
    RELEASES,
    Entry,
    base_kind,
    check_delta,
    check_entry,
    check_kind,
    check_number,
    check_sigma,
    to_steps,
)
from opacus_bc.accounting.lattice import Step
from opacus_bc.accounting.tradeoff import TradeOffCurve


class FDPAccountant(IAccountant):  # type: ignore[misc]  # Opacus has no types
    """Composes the exact privacy-loss distributions of all steps and answers with certified bounds.

    `history` holds (sigma_eff, sample_rate, steps, sampling); entries of three fields, as Opacus writes them,
    mean Poisson sampling. One entry per pass for "shuffle"; entries of the kinds in
    `events.RELEASES` are one-off Gaussian releases and no steps. "poisson over users" and its kin protect
    users with all their samples; entries about samples and about users do not mix.

    **Formal guarantee.** `get_epsilon` and `get_delta` are upper bounds and `get_tradeoff` is a lower one,
    for the adjacency in `adjacency`, provided the noise schedule and the number of steps were fixed in
    advance.

    >>> accountant = FDPAccountant()
    >>> for _ in range(100):
    ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    >>> len(accountant), accountant.adjacency, round(accountant.get_epsilon(1e-5), 2)
    (100, 'add/remove one', 0.72)
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []

    @property
    def adjacency(self) -> str | None:
        """What neighbouring data sets are, or None for an empty history.

        "add/remove one" or "replace one" (sample), "add/remove one user" or "replace one user".
        """
        return ADJACENCY[check_entry(self.history[0])[3]] if self.history else None

    def step(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        sampling: str = "poisson",
        new_pass: bool = False,
    ) -> None:
        """Account one optimizer step.

        Args:
            noise_multiplier: sigma_eff = 1/mu of the step.
            sample_rate: probability that a sample takes part in it.
            sampling: "poisson", "partition" or "shuffle", each also with " over users".
            new_pass: for "shuffle": this step is the first of a pass over the data. A pass costs its
                noisiest-to- least-noisy worst case, G of the largest mu among its steps; mu^2 adds up over
                passes.

        Raises:
            ValueError: on values out of range, and when the sampling contradicts the adjacency of earlier
                steps.
        """
        kind = check_kind(sampling)
        sigma = check_sigma(noise_multiplier)
        rate = check_number("sample_rate", sample_rate, 0, 1)
        self._check_adjacency(ADJACENCY[kind], f"sampling={sampling!r}")
        place = self._last_step()
        if place is not None:
            last = check_entry(self.history[place])
            shuffled = base_kind(kind) == "shuffle"
            if shuffled and kind == last[3] and not new_pass:
                self.history[place] = (min(last[0], sigma), max(last[1], rate), last[2] + 1, kind)
                return
            if not shuffled and (last[0], last[1], last[3]) == (sigma, rate, kind):
                self.history[place] = (sigma, rate, last[2] + 1, kind)
                return
        self.history.append((sigma, rate, 1, kind))

    def _last_step(self) -> int | None:
        """Where the last entry that is not a one-off release stands."""
        for place in range(len(self.history) - 1, -1, -1):
            if check_entry(self.history[place])[3] not in RELEASES:
                return place
        return None

    def _check_adjacency(self, adjacency: str, what: str) -> None:
        if self.adjacency not in (None, adjacency):
            raise ValueError(
                f"{what} protects against {adjacency}, what this accountant holds already against "
                f"{self.adjacency}; use a new accountant for it."
            )

    def release(self, *, noise_multiplier: float, adjacency: str | None = None) -> None:
        """Account a one-off Gaussian release of all the data.

        Args:
            noise_multiplier: noise standard deviation over the sensitivity in the adjacency.
            adjacency: "add/remove one" or "replace one", each also with " user"; None means that of what was
                accounted before.

        Raises:
            ValueError: when it contradicts what was accounted before, or is None and nothing was.
        """
        sigma = check_sigma(noise_multiplier)
        chosen = self.adjacency if adjacency is None else adjacency
        kinds = {ADJACENCY[kind]: kind for kind in RELEASES}
        if chosen not in kinds:
            known = " or ".join(map(repr, kinds))
            raise ValueError(f"adjacency={adjacency!r} must be {known} for the first entry of an accountant.")
        self._check_adjacency(chosen, f"adjacency={adjacency!r}")
        self.history.append((sigma, 1.0, 0, kinds[chosen]))

    def _entries(self) -> list[Entry]:
        entries = [check_entry(entry) for entry in self.history]
        kinds = {ADJACENCY[entry[3]] for entry in entries}
        if len(kinds) > 1:
            raise ValueError(
                f"history mixes the adjacencies {sorted(kinds)}; there is no guarantee to compute for it."
            )
        return entries

    def _steps(self) -> tuple[Step, ...]:
        return to_steps(self._entries())

    def get_epsilon(self, delta: float, *args: object, **kwargs: object) -> float:
        """Certified upper bound on epsilon at delta. Further arguments, as Opacus's callers pass them, are
        ignored.
        """
        return query.epsilon_upper(self._steps(), check_delta(delta))

    def get_epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Certified (lower, upper) bounds on epsilon of the dominating pair, as far as numerics go.

        Steps rounded to levels (more than 256 different ones) make the lower bound one for the rounded
        history.
        """
        return query.epsilon_bounds(self._steps(), check_delta(delta))

    def get_delta(self, epsilon: float) -> float:
        """Certified upper bound on delta at epsilon >= 0."""
        return query.delta_upper(self._steps(), check_number("epsilon", epsilon, 0, math.inf))

    def get_tradeoff(self) -> TradeOffCurve:
        """The certified trade-off curve of everything accounted so far."""
        return tradeoff_of(self._entries())

    def get_mu(self, delta: float = 1e-10) -> float:
        """The least mu with delta_run(epsilon) <= delta_{G_mu}(epsilon) wherever delta_run(epsilon) >= delta,
        rounded up.
        """
        curve = self.get_tradeoff()
        ceiling = query.unamplified_mu(query.normalise(self._steps()))
        return min(ceiling, curve.dominating_mu(delta))

    def get_mu_clt(self) -> float:
        """The paper's sqrt(2) sqrt(E m/N) h(sigma_eff): an approximation, which can be optimistic, and no
        guarantee.
        """
        return mu_clt_of(self._entries())

    def __len__(self) -> int:
        """Number of optimizer steps."""
        return sum(int(entry[2]) for entry in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name under which Opacus knows this accountant."""
        return "fdp"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this accountant, or the history of Opacus's prv, rdp or gdp, which means Poisson
        sampling.
        """
        state = dict(state_dict or {})
        if state.get("mechanism") in ("prv", "rdp", "gdp"):
            state["mechanism"] = self.mechanism()
        before = self.history
        super().load_state_dict(state)
        try:
            self.history = list(self._entries())
        except (ValueError, TypeError):
            self.history = before
            raise


def register() -> None:
    """Make "fdp" known to Opacus's `create_accountant`; harmless to repeat, also after a reload."""
    register_accountant(FDPAccountant.mechanism(), FDPAccountant, force=True)

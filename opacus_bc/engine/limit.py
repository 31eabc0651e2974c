"""A budget that training does not exceed: loaders end before it, and a step beyond it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from opacus_bc.accounting.events import base_kind
from opacus_bc.mechanism.numbers import check_positive

_MOST_STEPS = 10**8
_MOST_PASSES = 10**4  # over shuffled data, each of which is an entry of a history


class BudgetSpentError(RuntimeError):
    """A step or release that the budget of ``engine.stop_at`` does not cover; nothing was moved or booked."""


class Limit:
    """What ``engine.stop_at`` asked for.

    **Formal guarantee**: while every step is asked for with :meth:`covers`, the accountant's epsilon at
    ``delta`` stays at most ``epsilon``, with the releases that ``reserved`` names still to come. Other
    releases are asked for with :meth:`check_release`.

    Args:
        accountant: Whose history counts.
        epsilon: The most that may be spent.
        delta: At which delta.
        reserved: The noise multipliers and adjacencies of the releases that will be made at the end.
    """

    def __init__(
        self,
        accountant: Any,
        *,
        epsilon: float,
        delta: float,
        reserved: Callable[[], tuple[tuple[float, str], ...]],
    ) -> None:
        self.accountant = accountant
        self.epsilon, self.delta = check_positive("epsilon", epsilon), check_positive("delta", delta)
        if delta >= 1:
            raise ValueError(f"delta={delta!r} must lie strictly between 0 and 1")
        self.reserved = reserved
        self._known: tuple[Any, int] | None = None  # how many steps of one kind fit behind a history

    def covers(self, *, noise_multiplier: float, sample_rate: float, sampling: str, new_pass: bool) -> bool:
        """Whether one more step fits."""
        if noise_multiplier == 0:
            return False
        if base_kind(sampling) == "shuffle":
            trial = self._copy(self.accountant.history)
            trial.step(
                noise_multiplier=noise_multiplier,
                sample_rate=sample_rate,
                sampling=sampling,
                new_pass=new_pass,
            )
            return self._fits(trial)
        made, most = self._made_and_most(noise_multiplier, sample_rate, sampling)
        return made < most

    def check_reserved(self, *more: tuple[float, str]) -> None:
        """Refuse a budget that does not cover the releases that will be made at the end.

        Args:
            *more: Those of a run that is about to begin.

        Raises:
            ValueError: They would spend more.
        """
        reserved = (*self.reserved(), *more)
        if reserved and not self._fits(self._copy(self.accountant.history), reserved):
            raise ValueError(
                f"epsilon={self.epsilon:g} at delta={self.delta:g} does not cover the final release of "
                "batch_norm='private' with what is spent already: give PrivateStatistics a larger "
                "noise_multiplier, or allow a larger epsilon"
            )

    def check_release(self, noise_multiplier: float, adjacency: str, *, instead_of: Any) -> None:
        """Refuse a release of running statistics that does not fit.

        Args:
            noise_multiplier: sigma_eff of the release.
            adjacency: Of the release.
            instead_of: The reserved release that need not be made if no step follows, or None.

        Raises:
            BudgetSpentError: It would spend more.
        """
        reserved = list(self.reserved())
        if instead_of in reserved:
            reserved.remove(instead_of)
        if not self._fits(self._copy(self.accountant.history), ((noise_multiplier, adjacency), *reserved)):
            raise BudgetSpentError(
                f"this release of running statistics would spend more than epsilon={self.epsilon:g} at "
                f"delta={self.delta:g}, where engine.stop_at put the end: use a larger noise_multiplier, or "
                "finalize the model, for whose release there is enough. Nothing was released"
            )

    def more_steps(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        sampling: str,
        steps_per_pass: int,
        left_in_pass: int = 0,
    ) -> int:
        """How many more steps of one kind fit, one after the other.

        **Formal guarantee**: so many keep epsilon at most ``epsilon`` with the reserved releases, and one
        more does not. Both were asked of a copy of the accountant.

        **Edge cases**: 0 if more is spent already, and without noise. At most 10^8 steps of a kind, or 10^4
        passes over shuffled data, are looked at.

        Args:
            noise_multiplier: sigma_eff of each.
            sample_rate: Of each.
            sampling: As accountants call it.
            steps_per_pass: For shuffled data, which cost by the pass.
            left_in_pass: Steps of a pass that was begun, and will be finished.
        """
        if noise_multiplier == 0 or any(entry[0] == 0 for entry in self.accountant.history):
            return 0
        if base_kind(sampling) != "shuffle":
            made, most = self._made_and_most(noise_multiplier, sample_rate, sampling)
            return most - made
        base = self._copy(self.accountant.history)
        step = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "sampling": sampling}
        if left_in_pass:
            base.step(**step)
        if not self._fits(self._copy(base.history)):
            return 0

        def fit(passes: int) -> bool:
            whole = (noise_multiplier, sample_rate, steps_per_pass, sampling)
            return self._fits(self._copy([*base.history, *[whole] * passes]))

        return left_in_pass + steps_per_pass * _largest(fit, at_least=0, most=_MOST_PASSES)

    def _made_and_most(self, noise_multiplier: float, sample_rate: float, sampling: str) -> tuple[int, int]:
        """How many steps of a kind were made, and how many fit in all."""
        step = (noise_multiplier, sample_rate, 1)
        if self.accountant.mechanism() == "fdp":
            step = (*step, sampling)  # type: ignore[assignment]  # entries of Opacus's accountants are shorter
        base, made = list(map(tuple, self.accountant.history)), 0
        for entry in reversed(base):
            if (entry[:2], entry[3:]) == (step[:2], step[3:]):
                base.remove(entry)
                made = int(entry[2])
                break
        key = (step, tuple(base), self.reserved())
        if self._known is None or self._known[0] != key:
            self._known = key, self._most(base, step, made)
        return made, self._known[1]

    def _most(self, base: list[Any], step: tuple[Any, ...], made: int) -> int:
        """The most steps of this kind that fit behind ``base``, at least as many as were made."""

        def fit(steps: int) -> bool:
            return self._fits(self._copy([*base, (*step[:2], steps, *step[3:])]))

        return _largest(fit, at_least=made, most=_MOST_STEPS)

    def _copy(self, history: list[Any]) -> Any:
        copy = type(self.accountant)()
        copy.history = list(history)
        return copy

    def _fits(self, trial: Any, releases: Iterable[tuple[float, str]] | None = None) -> bool:
        for multiplier, adjacency in self.reserved() if releases is None else releases:
            if trial.mechanism() == "fdp":
                trial.release(noise_multiplier=multiplier, adjacency=adjacency)
            else:
                trial.step(noise_multiplier=multiplier, sample_rate=1.0)
        return float(trial.get_epsilon(self.delta)) <= self.epsilon


def _largest(fit: Callable[[int], bool], *, at_least: int, most: int) -> int:
    """The largest number up to ``most`` that fits, with one more that does not.

    >>> _largest(lambda n: n <= 11, at_least=3, most=100), _largest(lambda n: False, at_least=3, most=100)
    (11, 3)
    """
    low, high = at_least, at_least + 1
    while fit(high):
        low, high = high, min(2 * high + 1, most)
        if low == high:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low

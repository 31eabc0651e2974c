"""What accountants are told, in every mode by the same words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.engine.limit import BudgetSpentError, Limit
from opacus_bc.mechanism.names import Sampling
from opacus_bc.optimizers.private import PrivateOptimizer


class Booking:
    """Tells an accountant of every release of an optimizer, and of passes where these count.

    **Formal guarantee**: what is booked is sigma_eff of the blocks that are released, and the sample rate and
    sampling of the plan that the loader draws by.

    **Edge cases**: if somebody else wrote into the accountant's history since the last step, the next one
    opens a new pass: that can only book too much.
    """

    def __init__(self, accountant: Any, plan: SamplingPlan) -> None:
        self.accountant, self.plan = accountant, plan
        self.limit: Limit | None = None
        self._last: tuple[int, int, Any] | None = None

    def obey(self, limit: Limit) -> None:
        """From now on refuse steps beyond this budget."""
        self.limit = limit

    def covers(self, optimizer: PrivateOptimizer) -> bool:
        """Whether the next step is within the budget, if there is one."""
        return self.limit is None or self.limit.covers(
            noise_multiplier=optimizer.effective_noise_multiplier,
            sample_rate=self.plan.sample_rate,
            sampling=self.plan.event,
            new_pass=self._mark(optimizer.ledger.pass_index) != self._last,
        )

    def more_steps(self, optimizer: PrivateOptimizer, limit: Limit) -> int:
        """How many more steps like the next one a budget covers, if the pass under way is finished."""
        a_pass, left = self.plan.steps_per_epoch, 0
        if self._last is not None and self._mark(optimizer.ledger.pass_index) == self._last:
            left = max(0, a_pass - int(self.accountant.history[-1][2]))
        return limit.more_steps(
            noise_multiplier=optimizer.effective_noise_multiplier,
            sample_rate=self.plan.sample_rate,
            sampling=self.plan.event,
            steps_per_pass=a_pass,
            left_in_pass=left,
        )

    def __call__(self, optimizer: PrivateOptimizer) -> None:
        """Book the release under way.

        Raises:
            BudgetSpentError: The budget does not cover it.
        """
        if not self.covers(optimizer):
            assert self.limit is not None  # without one everything is covered
            raise BudgetSpentError(
                f"one more step would spend more than epsilon={self.limit.epsilon:g} at delta="
                f"{self.limit.delta:g}, where engine.stop_at put the end: finalize the model. Nothing was "
                "moved"
            )
        pass_index = optimizer.ledger.pass_index
        extra: dict[str, Any] = {}
        if self.accountant.mechanism() == "fdp":
            extra = {"sampling": self.plan.event, "new_pass": self._mark(pass_index) != self._last}
        self.accountant.step(
            noise_multiplier=optimizer.effective_noise_multiplier, sample_rate=self.plan.sample_rate, **extra
        )
        self._last = self._mark(pass_index)

    def _mark(self, pass_index: int) -> tuple[int, int, Any]:
        history = self.accountant.history
        return pass_index, len(history), tuple(history[-1]) if history else None


def check_accountant(accountant: Any, sampling: Sampling) -> None:
    """Refuse an accountant that does not model the sampling: Opacus's know Poisson sampling alone."""
    mechanism = accountant.mechanism()
    if sampling != "poisson" and mechanism != "fdp":
        raise ValueError(
            f"accountant={mechanism!r} models Poisson sampling only, got sampling={sampling!r}: use "
            "PrivacyEngine(accountant='fdp')"
        )


def check_booked(accountant: Any, optimizers: Iterable[PrivateOptimizer]) -> None:
    """Refuse to speak for, save or hand out weights that moved without the accountant."""
    booked = sum(int(entry[2]) for entry in accountant.history)
    taken = sum(optimizer.steps_taken for optimizer in optimizers)
    if taken > booked:
        raise RuntimeError(
            f"{taken} steps were taken and {booked} are booked: something replaced the accountant, so no "
            "epsilon describes this run"
        )


def check_protected(accountant: Any, plan: SamplingPlan, others: Iterable[SamplingPlan]) -> None:
    """Refuse to account users and samples together: the sum would be about neither.

    Args:
        accountant: What was booked already.
        plan: What is to be booked.
        others: What else this engine books.
    """
    booked = accountant.adjacency if accountant.mechanism() == "fdp" else None
    known = {other.neighbours for other in others if other.protected != plan.protected}
    if booked is not None and booked.endswith("user") != (plan.protected == "user"):
        known.add(booked)
    if known:
        raise ValueError(
            f"this run protects {plan.protected}s ({plan.neighbours}), and what this engine has accounted "
            f"already is about other neighbours ({sorted(known)[0]}): no epsilon holds for both. Use a new "
            "PrivacyEngine"
        )


def book_release(accountant: Any, *, noise_multiplier: float, adjacency: str) -> None:
    """Book a one-off Gaussian release of all the data."""
    if accountant.mechanism() == "fdp":
        accountant.release(noise_multiplier=noise_multiplier, adjacency=adjacency)
    else:  # a Gaussian mechanism on all data is a step with sample rate 1
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)

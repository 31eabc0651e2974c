"""What an engine has made private, what that has cost, and every answer about it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from opacus_bc._opacus import DPOptimizer, StockPrivacyEngine
from opacus_bc.alc.report import LayerReport
from opacus_bc.batch_norm.choices import UnprotectedStatisticsError
from opacus_bc.engine import statement as st
from opacus_bc.engine.booking import check_booked
from opacus_bc.engine.budget import warn_of_large_delta
from opacus_bc.engine.card import model_card, write_card
from opacus_bc.engine.limit import Limit
from opacus_bc.engine.logs import loggable
from opacus_bc.engine.release import final_release
from opacus_bc.engine.reports import public_report
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.warn import users_level
from opacus_bc.parallel.wrappers import unwrap


class AccountedEngine(StockPrivacyEngine):  # type: ignore[misc]  # Opacus is untyped
    """The part of :class:`opacus_bc.PrivacyEngine` that answers for its runs: budget, statement, reports.

    It starts no run and changes none; ``PrivacyEngine`` does, and enters each into ``_runs``.

    **Formal guarantee**: no answer is given for weights that moved without the accountant, nor, unless it is
    asked for, where running statistics leak.
    """

    def __init__(self, *, accountant: str) -> None:
        with warnings.catch_warnings():
            # Opacus's advice to turn its own secure mode on, which imports a package that no current torch
            # can load; the statement says which generator was used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self.dataset: Any = None
        self._runs: list[Run] = []
        self._limit: Limit | None = None
        if accountant == "gdp":
            warnings.warn(
                "accountant='gdp' is a central-limit approximation, not an upper bound: it can claim less "
                "than is attained. Use accountant='fdp' for a certified value.",
                stacklevel=users_level(),
            )

    def get_epsilon(self, delta: float, *, allow_unprotected: bool = False) -> float:
        """Epsilon spent so far at ``delta``; infinite if any step was taken without noise.

        Args:
            delta: The delta of (epsilon, delta)-DP.
            allow_unprotected: Answer for the gradients alone where running statistics leak.

        Raises:
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        warn_of_large_delta(delta, [run.plan for run in self._runs])
        if any(entry[0] == 0 for entry in self.accountant.history):
            return math.inf
        return float(super().get_epsilon(delta))

    def get_tradeoff(self, *, allow_unprotected: bool = False) -> Any:
        """The trade-off curve of the steps and releases so far (accountant ``"fdp"``).

        Args:
            allow_unprotected: Answer for the gradients alone where running statistics leak.

        Raises:
            ValueError: The accountant knows no trade-off curve.
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        if not hasattr(self.accountant, "get_tradeoff"):
            raise ValueError(
                f"accountant={self.accountant.mechanism()!r} has no trade-off curve: use "
                "PrivacyEngine(accountant='fdp')"
            )
        return self.accountant.get_tradeoff()

    def stop_at(self, epsilon: float, delta: float) -> None:
        """End training before more than ``(epsilon, delta)`` is spent by all runs of this engine together.

        Loaders that ``make_private`` returned, and will return, deliver no draw whose step the budget does
        not cover: loops over them end by themselves. A step beyond it is refused before anything moves. The
        final release of ``batch_norm="private"`` is reserved.

        **Formal guarantee**: :meth:`get_epsilon` at ``delta`` stays at most ``epsilon``, ``finalize``
        included. When training ends follows from public constants alone.

        **Edge cases**: what was spent already counts. ``recalibrate_batch_norm`` during training shortens the
        rest, and is refused where it does not fit. A new call replaces the budget.

        Args:
            epsilon: The most that may be spent.
            delta: At which delta.
        """
        warn_of_large_delta(delta, [run.plan for run in self._runs])
        limit = Limit(self.accountant, epsilon=epsilon, delta=delta, reserved=self._reserved)
        if self.accountant.history and self.get_epsilon(delta, allow_unprotected=True) > epsilon:
            raise ValueError(
                f"epsilon={epsilon:g} at delta={delta:g} is spent already: "
                f"{self.get_epsilon(delta, allow_unprotected=True):.4g}"
            )
        limit.check_reserved()
        self._limit = limit
        for run in self._runs:
            run.obey(limit)

    def remaining(self, epsilon: float, delta: float) -> int:
        """How many more steps of the latest run fit into a budget, at its present noise.

        **Formal guarantee**: if that many are taken, :meth:`get_epsilon` at ``delta`` is at most ``epsilon``,
        ``finalize`` included; one step more and it is not. The number follows from public constants alone.

        **Edge cases**: see :meth:`opacus_bc.engine.limit.Limit.more_steps`. Shuffled data are counted in
        whole passes, the one under way included.

        Args:
            epsilon: The most that may be spent by all runs of this engine together.
            delta: At which delta.

        Raises:
            ValueError: Nothing was made private yet.
            UnprotectedStatisticsError: Running statistics leak.
        """
        limit = Limit(self.accountant, epsilon=epsilon, delta=delta, reserved=self._reserved)
        self._check_protected(False)
        run = self._latest("remaining()")
        return run.booking.more_steps(run.optimizer, limit)

    def statement(self, delta: float, *, format: str = "text", allow_unprotected: bool = False) -> str:
        """What a reviewer has to know about the privacy of this run.

        Args:
            delta: The delta at which epsilon is stated.
            format: ``"text"``, ``"markdown"`` or ``"json"``.
            allow_unprotected: Speak for the gradients alone where running statistics leak.

        Raises:
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        return st.render(st.facts(self, self._runs, delta), format=format)

    def save_model_card(
        self,
        path: Any,
        delta: float,
        *,
        title: str = "Model card",
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a model card for Hugging Face's hub: front matter, and the statement as a section.

        Args:
            path: The file, or a folder, which gets a README.md.
            delta: The delta at which epsilon is stated.
            title: The card's heading.
            metadata: More entries of the front matter, for instance ``{"license": "mit"}``.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the card.

        Raises:
            FileExistsError: The file exists already.
            UnprotectedStatisticsError: Running statistics leak.
        """
        section = self.statement(delta, format="markdown")
        return write_card(path, model_card(section, title=title, metadata=metadata), overwrite=overwrite)

    def loggable(self, delta: float) -> dict[str, float]:
        """Numbers of the latest run that may be logged, published or plotted while it trains.

        **Formal guarantee**: nothing in it was computed from private data, but for what epsilon covers; see
        :func:`opacus_bc.engine.logs.loggable`. Losses, accuracies on training data, gradient norms and
        actual batch sizes are not in it, because they are private.

        Args:
            delta: The delta at which epsilon and mu are stated.

        Raises:
            ValueError: Nothing was made private yet.
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(False)
        return loggable(self, self._latest("loggable()"), delta)

    def layer_report(
        self,
        public_loader: DataLoader[Any] | None = None,
        *,
        criterion: Any = None,
        gradient: Any = None,
        compare_public: bool = True,
    ) -> LayerReport:
        """Norms and noise of each layer, from public data only; warns where noise drowns the signal.

        With ``alc=`` it needs no arguments, and also says how the layers' norms moved. A public loader is
        measured now, at the present weights, over what this run clips: single samples, users or mini-sets.

        **Formal guarantee**: weights, buffers, gradients, hooks, modes and random states stay as they are.
        (Checks that look at the first training forwards and then take themselves off count these too.)

        Args:
            public_loader: Public data, disjoint from the private data: pairs ``(x, y)`` unless ``gradient``
                says otherwise.
            criterion: The loss; None is cross entropy.
            gradient: As :class:`opacus_bc.ALC` takes it.
            compare_public: As in :meth:`make_private`.

        Raises:
            ValueError: Nothing was made private with ``alc=``, and there is no public loader.
            PublicDataError: The public data are private ones, or their gradients say nothing.
        """
        if public_loader is not None:
            run = self._latest("layer_report()")
            return public_report(
                run, public_loader, criterion=criterion, gradient=gradient, compare_public=compare_public
            )
        for run in reversed(self._runs):
            if run.optimizer.adaptive is not None:
                return run.optimizer.layer_report()
        raise ValueError(
            "layer_report() needs layer norms from public data: pass a public loader to it, or pass alc= to "
            "make_private"
        )

    def _check_protected(self, allow_unprotected: bool) -> None:
        for run in self._runs:
            run.policy.check_buffers()
        self._check_booked()
        if not allow_unprotected and any(not run.policy.protected for run in self._runs):
            raise UnprotectedStatisticsError(
                "batch_norm='unprotected': running statistics leak, so no epsilon describes this run. "
                "allow_unprotected=True gives the value of the gradients' release alone"
            )

    def _check_booked(self) -> None:
        check_booked(self.accountant, [run.optimizer for run in self._runs])

    def _reserved(self) -> tuple[tuple[float, Any], ...]:
        return tuple(found for run in self._runs if (found := final_release(run)) is not None)

    def _latest(self, what: str) -> Run:
        if not self._runs:
            raise ValueError(f"{what} speaks of a run: call make_private first")
        return self._runs[-1]

    def _run_of(self, module: nn.Module, optimizer: DPOptimizer | None) -> Run | None:
        for run in reversed(self._runs):
            if run.optimizer is optimizer or unwrap(run.policy.root) is unwrap(module):
                return run
        return None

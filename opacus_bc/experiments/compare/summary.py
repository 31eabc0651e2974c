"""From results to rows. Pure functions of kept numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_bc.experiments.training.methods import METHODS, Method
from opacus_bc.experiments.training.result import spent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one budget, over its seeds.

    Attributes:
        budget: The epsilon that was asked for; None without privacy.
        epsilon: The certified one, the largest over seeds; None where there is none.
        accuracies: Test accuracy in per cent at the end, one a seed.
        curves: Test accuracy after each epoch, one list a seed.
        history: What the accountant of the first seed holds.
        layers: Noise-to-signal ratios by layer, of the first seed.
        time: Time per epoch over plain SGD's, None if not measured; likewise the others.
    """

    name: str
    title: str
    family: str
    adjacency: str
    protected: bool
    budget: float | None
    delta: float
    epsilon: float | None
    accuracies: tuple[float, ...]
    curves: tuple[tuple[float, ...], ...]
    test_size: int
    majority_share: float
    batch_size: int
    lr: float
    clip: float
    noise_multiplier: float | None
    sigma_eff: float | None
    groups: int | None
    noise_factor: float | None
    history: tuple[tuple[Any, ...], ...]
    layers: tuple[Mapping[str, Any], ...]
    time: float | None = None
    time_low: float | None = None
    time_high: float | None = None
    memory: float | None = None
    peak_mib: float | None = None

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.accuracies)

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.accuracies) if self.seeds > 1 else None

    @property
    def standard_error(self) -> float:
        """Of the mean: from the spread over seeds and from the finite test set, which all seeds share."""
        share = min(max(self.mean / 100, 0.5 / self.test_size), 1 - 0.5 / self.test_size)
        images = 100 * math.sqrt(share * (1 - share) / self.test_size)
        return math.hypot((self.spread or 0.0) / math.sqrt(self.seeds), images)

    @property
    def private(self) -> bool:
        """Whether it has an epsilon to be held to."""
        return self.budget is not None


def separation(a: Row, b: Row) -> float:
    """Difference of two means in units of its standard error."""
    return (a.mean - b.mean) / math.hypot(a.standard_error, b.standard_error)


def make_rows(results: Iterable[Mapping[str, Any]], costs: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Group results by budget and method, in the order in which they first appear.

    Args:
        results: What `opacus_bc.experiments.training.train.train` returned.
        costs: Measured costs by "budget/method"; see `cost_name`.
    """
    grouped: dict[tuple[float | None, str], list[Mapping[str, Any]]] = {}
    for result in results:
        cell = result["cell"]
        grouped.setdefault((cell["epsilon"], cell["method"]["name"]), []).append(result)
    return [_row(found, costs.get(cost_name(*which), {})) for which, found in grouped.items()]


def cost_name(budget: float | None, method: str) -> str:
    """How costs are looked up."""
    return f"{budget}/{method}"


def _row(found: Sequence[Mapping[str, Any]], cost: Mapping[str, Any]) -> Row:
    first = found[0]
    cell, method = first["cell"], first["cell"]["method"]
    return Row(
        name=method["name"],
        title=method["title"],
        family=family(method),
        adjacency=first["adjacency"],
        protected=first.get("protected", False),
        budget=cell["epsilon"],
        delta=cell["delta"],
        epsilon=max((_epsilon(r) for r in found if r["epsilon"] is not None), default=None),
        accuracies=tuple(r["accuracies"][-1] for r in found),
        curves=tuple(tuple(r["accuracies"]) for r in found),
        test_size=first["test_size"],
        majority_share=first["majority_share"],
        batch_size=cell["batch_size"],
        lr=cell["lr"],
        clip=cell["clip"],
        noise_multiplier=first.get("noise_multiplier"),
        sigma_eff=first.get("sigma_eff"),
        groups=first.get("groups"),
        noise_factor=first.get("noise_factor"),
        history=tuple(tuple(entry) for entry in first.get("history", ())),
        layers=tuple(first.get("layers", ())),
        **{
            name: cost[name]
            for name in ("time", "time_low", "time_high", "memory", "peak_mib")
            if name in cost
        },
    )


def _epsilon(result: Mapping[str, Any]) -> float:
    """Of what the accountant held, by today's accountant: kept runs may be older than a correction of it."""
    history = tuple(tuple(entry) for entry in result["history"])
    epochs = len(result["accuracies"])
    return spent(history, float(result["cell"]["delta"]), epochs, epochs)


def family(method: Mapping[str, Any]) -> str:
    """`Method.family` of a method that was written down."""
    known = METHODS.get(method["name"])
    fields = {name: method[name] for name in ("name", "title", "private", "clipping", "mini_set")}
    return (known or Method(**fields)).family

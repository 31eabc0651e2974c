"""From results to rows, and from rows to a recommendation in words. Pure functions of kept numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_bc.experiments.training.methods import METHODS, Method
from opacus_bc.experiments.training.result import spent

# A difference counts when it exceeds this many of its standard errors.
FACTOR = 2.0
VERY_SURE = 4.0
# Times are measured on a machine that does other things too: smaller ratios are not told.
CHEAPER = 1.25


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


def recommend(
    rows: Sequence[Row], *, tuned: bool, tuned_on_public: bool = False, public_apart: bool = False
) -> list[str]:
    """Paragraphs: for every budget and adjacency which method to use, why, and how sure that is.

    Methods under different adjacencies get paragraphs of their own and are never compared.
    """
    plain = next((row for row in rows if not row.private), None)
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if row.budget is not None and row.protected and row.epsilon is not None:
            groups.setdefault((row.budget, row.adjacency), []).append(row)
    texts = [_paragraph(members, plain) for members in groups.values()]
    if len({adjacency for _, adjacency in groups}) > 1:
        texts.append(
            "Epsilon means something else under another adjacency, so methods of different adjacencies are "
            "not ranked against each other."
        )
    if texts:
        texts += [_caveat(tuned, tuned_on_public), _not_a_release(public_apart)]
    return texts or ["No private method was compared, so there is nothing to recommend."]


def _paragraph(members: Sequence[Row], plain: Row | None) -> str:
    ranked = sorted(members, key=lambda row: -row.mean)
    best = ranked[0]
    budget = f"At ε = {best.budget:g}, δ = {best.delta:g} ({best.adjacency})"
    if not _learned(best):
        return (
            f"{budget} no method learned anything: the best, {best.title}, gets {_figure(best)}, and always "
            f"answering with the most frequent class gets {best.majority_share:.1f} %. More private samples, "
            "a larger ε or public pre-training are needed."
        )
    parts = [f"{budget} use **{best.title}**: {_figure(best)}.", _certainty(ranked)]
    if plain is not None:
        parts.append(f"Privacy costs {plain.mean - best.mean:.1f} points: without it {_figure(plain)}.")
    if best.time is not None:
        parts.append(f"An epoch takes {_cost(best)}.")
    if best.family == "individual":
        parts += _without_sample_gradients(ranked)
    lost = [row.title for row in ranked if not _learned(row)]
    if lost:
        parts.append(
            f"Not distinguishable from always answering with the most frequent class: {', '.join(lost)}."
        )
    return " ".join(parts)


def _certainty(ranked: Sequence[Row]) -> str:
    best, others = ranked[0], ranked[1:]
    if not others:
        return "It was the only one compared under this adjacency."
    if min(row.seeds for row in ranked) < 2:
        return (
            f"The next is {others[0].title} with {_figure(others[0])}; with one seed the spread is unknown, "
            "so this is a hint and not a result."
        )
    tied = [row for row in others if separation(best, row) < FACTOR]
    if tied:
        cheapest = min([best, *tied], key=_time)
        text = (
            f"Not sure: {', '.join(row.title for row in tied)} cannot be told apart from it (less than "
            f"{FACTOR:g} standard errors, seeds and test images together)"
        )
        if CHEAPER * _time(cheapest) < _time(best):
            text += f", and {cheapest.title} is cheaper: {_figure(cheapest)} at {_cost(cheapest)}"
        return text + "."
    second = others[0]
    distance = separation(best, second)
    words = "very sure" if distance >= VERY_SURE else "fairly sure"
    return (
        f"That is {words}: the next, {second.title}, gets {_figure(second)}, {best.mean - second.mean:.1f} "
        f"points less, which is {distance:.1f} standard errors (seeds and test images together)."
    )


def _without_sample_gradients(ranked: Sequence[Row]) -> list[str]:
    batch = [row for row in ranked if row.family in ("batch", "mini-sets") and _learned(row)]
    if not batch:
        return []
    row = batch[0]
    cost = f" at {_cost(row)}" if row.time is not None else ""
    return [f"Without per-sample gradients the best is {row.title}: {_figure(row)}{cost}."]


def _learned(row: Row) -> bool:
    return row.mean - row.majority_share > FACTOR * row.standard_error


def _time(row: Row) -> float:
    return math.inf if row.time is None else row.time


def _figure(row: Row) -> str:
    if row.spread is None:
        return f"{row.mean:.1f} %"
    return f"{row.mean:.1f} ± {row.spread:.1f} % ({row.seeds} seeds)"


def _cost(row: Row) -> str:
    text = f"{row.time:.2f} × the time of plain SGD" if row.time is not None else "a time not measured"
    return text if row.memory is None else f"{text} and {row.memory:.2f} × its memory"


def _caveat(tuned: bool, on_public: bool) -> str:
    if tuned and on_public:
        return (
            "Learning rates were chosen out of three for every private method in short runs on public images "
            "alone (two fifths of them trained, the last fifth judged, with the noise of the largest ε), "
            "which costs the private images nothing. Batch sizes and clip bounds are defaults."
        )
    if tuned:
        return (
            "Learning rates and clip bounds were tuned with equal effort for every method by training on the "
            "private data, and **this tuning is not accounted**: the ε shown is that of one run."
        )
    return (
        "Learning rates and clip bounds are defaults, chosen by hand for their test accuracy on benchmark "
        "data (this data set or one like it), which no ε here accounts for; other settings may change the "
        "order (--tune searches)."
    )


def _not_a_release(public_apart: bool) -> str:
    public = (
        "The public images are a folder of their own and are not protected"
        if public_apart
        else "A tenth of the training images, drawn at random, counts as public and is not protected"
    )
    return (
        "What ε is about: one run of a method with secret randomness. The runs here are seeded, so that "
        "anybody can repeat them; there are several on the same data, and the one without privacy protects "
        f"nobody. {public}, nor are the test images; normalisation constants and the number of classes are "
        "those of the whole data set. So this report compares methods; it is not itself a private release of "
        "the data."
    )

"""From rows to a recommendation in words. Pure functions of kept numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus_bc.experiments.compare.summary import Row, separation
from opacus_bc.experiments.training.methods import NEEDS_WEIGHTS

# A difference counts when it exceeds this many of its standard errors.
FACTOR = 2.0
VERY_SURE = 4.0
# Times are measured on a machine that does other things too: smaller ratios are not told.
FASTER = 1.25
DEFAULTS = "defaults and not tuned"


def recommend(
    rows: Sequence[Row],
    *,
    tuned: bool,
    tuned_on_public: bool = False,
    public_apart: bool = False,
    samples: str = "images",
) -> list[str]:
    """Paragraphs: for every budget and adjacency which method to use, why, and how sure that is.

    Methods under different adjacencies get paragraphs of their own and are never compared. ``samples`` is
    what the data consist of.
    """
    # A linear probe is no measure of what privacy costs: it trains less than the others do.
    plain = next((row for row in rows if not row.private and row.name not in NEEDS_WEIGHTS), None)
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if row.budget is not None and row.protected and row.epsilon is not None:
            groups.setdefault((row.budget, row.adjacency), []).append(row)
    settings = "" if tuned else DEFAULTS
    if tuned_on_public:
        settings = "defaults, which a search on public images leaves alone"
    texts = [_paragraph(members, plain, settings) for members in groups.values()]
    if len({adjacency for _, adjacency in groups}) > 1:
        texts.append(
            "Epsilon means something else under another adjacency, so methods of different adjacencies are "
            "not ranked against each other."
        )
    if texts:
        texts += [_caveat(tuned, tuned_on_public, samples), _not_a_release(public_apart, samples)]
    return texts or ["No private method was compared, so there is nothing to recommend."]


def _paragraph(members: Sequence[Row], plain: Row | None, settings: str) -> str:
    ranked = sorted(members, key=lambda row: -row.mean)
    best = ranked[0]
    budget = f"At ε = {best.budget:g}, δ = {best.delta:g} ({best.adjacency})"
    if not _learned(best):
        return (
            f"{budget} no method learned anything: the best, {best.title}, gets {_figure(best)}, and always "
            f"answering with the most frequent class gets {best.majority_share:.1f} %. More private samples, "
            "a larger ε or public pre-training are needed."
        )
    if len(ranked) == 1:
        parts = [f"{budget} **{best.title}** has nothing to be compared with: {_figure(best)}."]
    else:
        parts = [f"{budget} use **{best.title}**: {_figure(best)}.", _certainty(ranked)]
    if plain is not None:
        parts.append(_price(plain, best, settings))
    if best.time is not None:
        parts.append(f"An epoch takes {_cost(best)}.")
    if best.family == "individual":
        parts += _without_sample_gradients(ranked)
    lost = [row.title for row in ranked if not _learned(row)]
    if lost:
        parts.append(
            f"Not shown to learn anything (within {FACTOR:g} standard errors of the "
            f"{best.majority_share:.1f} % that always answering with the most frequent class gets): "
            f"{', '.join(lost)}."
        )
    return " ".join(parts)


def _price(plain: Row, best: Row, settings: str) -> str:
    """What privacy costs; a run without it that is clearly below a private one is no measure of that.

    Args:
        plain: Without privacy.
        best: With it.
        settings: What those of ``plain`` are, unless they were searched for.
    """
    without = f"without it {_figure(plain)}"
    if plain.mean > best.mean:
        return f"Privacy costs {_points(plain, best)} points: {without}."
    if separation(best, plain) < FACTOR:
        return f"Privacy costs no accuracy that these runs can show: {without}."
    said = f" (its settings are {settings})" if settings else ""
    advice = "--tune or more --epochs" if settings == DEFAULTS else "more --epochs"
    return (
        f"What privacy costs is not known here: {without}, which is below a private run. The baseline is "
        f"probably undertrained{said}; {advice} may tell."
    )


def _certainty(ranked: Sequence[Row]) -> str:
    best, others = ranked[0], ranked[1:]
    if min(row.seeds for row in ranked) < 2:
        return (
            f"The next is {others[0].title} with {_figure(others[0])}; with one seed the spread is unknown, "
            "so this is a hint and not a result."
        )
    tied = [row for row in others if separation(best, row) < FACTOR]
    if tied:
        fastest = min([best, *tied], key=_time)
        behind = ", ".join(f"{row.title} ({_points(best, row)} points behind)" for row in tied)
        text = (
            f"Not sure: these runs do not show whether it is better than {behind}: the differences are below "
            f"{FACTOR:g} standard errors (seeds and test set together). That does not make them equal; more "
            "seeds or a larger test set may tell."
        )
        if FASTER * _time(fastest) < _time(best):
            text += f" {fastest.title} takes less time: {_figure(fastest)} at {_cost(fastest)}."
        return text
    second = others[0]
    distance = separation(best, second)
    words = "very sure" if distance >= VERY_SURE else "fairly sure"
    return (
        f"That is {words}: the next, {second.title}, gets {_figure(second)}, {_points(best, second)} "
        f"points less; the difference is {distance:.1f} standard errors (seeds and test set together)."
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


def _points(better: Row, worse: Row) -> str:
    """The difference of two accuracies as they are shown, so that a reader who subtracts finds the same."""
    return f"{round(better.mean, 1) - round(worse.mean, 1):.1f}"


def _figure(row: Row) -> str:
    if row.spread is None:
        return f"{row.mean:.1f} %"
    return f"{row.mean:.1f} ± {row.spread:.1f} % ({row.seeds} seeds)"


def _cost(row: Row) -> str:
    text = f"{row.time:.2f} × the time of plain SGD" if row.time is not None else "a time not measured"
    return text if row.memory is None else f"{text} and {row.memory:.2f} × its memory"


def _caveat(tuned: bool, on_public: bool, samples: str) -> str:
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
    if samples != "images":
        return (
            "Learning rates, clip bounds and batch sizes were chosen for images, and scaled to these "
            f"{samples} without a search; other settings may change the order (--tune searches)."
        )
    return (
        "Learning rates and clip bounds are defaults, chosen by hand for their test accuracy on benchmark "
        "data (this data set or one like it), which no ε here accounts for; other settings may change the "
        "order (--tune searches)."
    )


def _not_a_release(public_apart: bool, samples: str) -> str:
    public = (
        f"The public {samples} are a folder of their own and are not protected"
        if public_apart
        else f"A tenth of the training {samples}, drawn at random, counts as public and is not protected"
    )
    constants = (
        "normalisation constants and the number of classes are those of the whole data set"
        if samples == "images"
        else "columns are standardised by the public rows, and the classes are those of the whole file"
    )
    return (
        "What ε is about: one run of a method with secret randomness. The runs here are seeded, so that "
        "anybody can repeat them; there are several on the same data, and the one without privacy protects "
        f"nobody. {public}, nor are the test {samples}; {constants}. So this report compares methods; it is "
        "not itself a private release of the data."
    )

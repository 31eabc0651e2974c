"""What a figure of the paper is: runs that differ in a few settings, printed numbers, claims in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from opacus_bc.experiments.training.cells import Cell, Reading
from opacus_bc.experiments.training.methods import Layerwise, Method
from opacus_bc.experiments.training.models import NORM_FIRST, Norm
from opacus_bc.mechanism.layerwise import Rule

Mode = Literal["none", "bc", "ic"]
Variant = Literal["paper", "code", "sound", "unprotected"]
DELTA = 1e-5

VARIANTS: Mapping[Variant, str] = MappingProxyType(
    {
        "paper": "as printed: draws with replacement, plain BatchNorm; not private",
        "code": "as printed, with choices of the authors' public code: norm before activation, bounds by "
        "tensor, learning rate cut only when test accuracy stalls; not private",
        "sound": "Poisson draws, BatchNorm statistics from public data; certified epsilon",
        "unprotected": "Poisson draws, plain BatchNorm whose running statistics leak; no epsilon",
    }
)
DEFAULT: tuple[Variant, ...] = ("paper", "sound")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number that the paper prints: test accuracy in per cent after some epochs."""

    value: float
    epoch: int = 50
    about: bool = False  # printed with an approximation sign


@dataclass(frozen=True, kw_only=True)
class Run:
    """One curve or point of a figure; the defaults are those of the paper's main body.

    Attributes:
        label: What the table calls it; unique in its figure.
        x: Where it stands on the figure's axis.
        paper: What the paper prints for it; empty where it only shows a curve.
        mode: No privacy, batch clipping or individual clipping.
        rule: ALC's rule: the paper's ratio, Zhang's norm, or None for full gradient clipping.
        layers: What ALC counts as a layer.
        clip: The master clip bound C.
        sigma: The noise multiplier.
        batch_size: m.
        lr_decay: Factor on the step size after each epoch (1 is the paper's "css").
        clip_decay: Factor on C after each epoch.
        norm: ``"none"`` takes the BatchNorm layers out.
        record_norms: Whether layer norms are kept.
        core: Whether ``--core`` runs it.
        variants: The only variants that make sense for it; empty means all.
        plateau: Whether the step size falls only after an epoch that did not raise test accuracy, as in
            variant "code".
        reading: Another way to understand the paper's description; see `as_published`.
    """

    label: str
    x: float | None = None
    paper: tuple[Published, ...] = ()
    mode: Mode = "bc"
    rule: Rule | None = "ratio"
    layers: Literal["module", "parameter"] = "parameter"
    clip: float = 0.095
    sigma: float = 0.01875
    batch_size: int = 64
    lr_decay: float = 0.9
    clip_decay: float = 1.0
    norm: Norm = "batch"
    record_norms: bool = False
    core: bool = False
    variants: tuple[Variant, ...] = ()
    plateau: bool = False
    reading: Reading = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something the paper says about a figure, and how it is checked.

    Attributes:
        words: What it says.
        above: Labels of runs from best to worst: each must be strictly better than the next.
        best: Labels of runs of which the first must be the best.
        at_most: A label and the accuracy that it must not exceed.
        within: Labels, and the lowest and the highest accuracy that they may have.
        gap: Two labels: the words say how far the first is ahead, the answer gives ours.
    """

    words: str
    above: tuple[str, ...] = ()
    best: tuple[str, ...] = ()
    at_most: tuple[str, float] | None = None
    within: tuple[tuple[str, ...], float, float] | None = None
    gap: tuple[str, str] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The runs that it is about; empty for a claim in words only."""
        if self.at_most is not None:
            return self.at_most[:1]
        if self.within is not None:
            return self.within[0]
        return self.gap or self.above or self.best

    def judge(self, accuracies: Sequence[float]) -> str:
        """What the runs' accuracies, in the order of `labels`, say about it."""
        first = accuracies[0]
        if self.gap is not None:
            return f"{first - accuracies[1]:+.1f} points"
        if self.at_most is not None:
            held = first <= self.at_most[1]
        elif self.within is not None:
            held = all(self.within[1] <= accuracy <= self.within[2] for accuracy in accuracies)
        elif self.best:
            held = all(first > other for other in accuracies[1:])
        else:
            held = all(better > worse for better, worse in pairwise(accuracies))
        return "holds" if held else "fails"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A figure of the paper.

    Attributes:
        id: What ``--only`` calls it.
        where: Its place in the paper.
        axis: What the runs differ in.
        epochs: The paper's number of epochs.
    """

    id: str
    title: str
    where: str
    model: Literal["bn_lenet5", "convnet", "resnet18"]
    dataset: Literal["mnist", "cifar10"]
    axis: str
    runs: tuple[Run, ...]
    claims: tuple[Claim, ...] = ()
    epochs: int = 50

    def __post_init__(self) -> None:
        labels = [run.label for run in self.runs]
        if len(set(labels)) != len(labels):
            raise ValueError(f"{self.id}: two runs have the same label")
        for claim in self.claims:
            for label in claim.labels:
                if label not in labels:
                    raise ValueError(f"{self.id}: a claim is about {label!r}, which is no run")


def method_of(run: Run, variant: Variant) -> Method:
    """How a run clips, and what happens to BatchNorm."""
    if run.mode == "none":
        return Method(name="none", title="no privacy", private=False, batch_norm=None)
    layers = "parameter" if variant == "code" else run.layers
    policy: Literal["public", "unprotected"] = "public" if variant == "sound" else "unprotected"
    return Method(
        name=run.mode,
        title=run.mode.upper() + (" + ALC" if run.rule else " + FGC"),
        clipping="batch" if run.mode == "bc" else "flat",
        alc=None if run.rule is None else Layerwise(rule=run.rule, layers=layers),
        batch_norm=policy if run.norm == "batch" else None,
    )


def cell_of(
    spec: Spec,
    run: Run,
    variant: Variant,
    *,
    seed: int = 0,
    epochs: int | None = None,
    limit: int | None = None,
) -> Cell:
    """The training run that a variant of a figure's run stands for."""
    own = variant == "code" and spec.model != "resnet18"
    return Cell(
        method=method_of(run, variant),
        dataset=spec.dataset,
        model=NORM_FIRST + spec.model if own else spec.model,
        noise_multiplier=None if run.mode == "none" else run.sigma,
        delta=DELTA,
        epochs=spec.epochs if epochs is None else epochs,
        batch_size=run.batch_size,
        lr=0.025,
        clip=run.clip,
        seed=seed,
        momentum=0.0,
        lr_decay=run.lr_decay,
        clip_decay=run.clip_decay,
        augment=True,
        norm=run.norm,
        limit=limit,
        published=run.mode != "none" and variant in ("paper", "code"),
        lr_on_plateau=variant == "code" or run.plateau,
        reading=run.reading,
        record_norms=run.record_norms,
        channels_last=run.mode != "ic" or variant != "sound",  # Opacus's hooks take weights as they come
    )


def variants_of(run: Run, wanted: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Which of the wanted variants a run has.

    Without privacy "paper", "sound" and "unprotected" are one and the same. "unprotected" is about BatchNorm
    under batch clipping: the engine refuses it with individual clipping.
    """
    allowed = [v for v in wanted if not run.variants or v in run.variants]
    if run.mode == "ic" or (run.mode == "bc" and run.norm != "batch"):
        allowed = [v for v in allowed if v != "unprotected"]
    if run.mode == "none":
        same = [v for v in allowed if v != "code"]
        allowed = [v for v in allowed if v == "code" or v == same[0]]
    return tuple(allowed)

"""The ways to train that are compared: one frozen description each, and nothing else.

A `Method` says what is clipped, what happens to BatchNorm and how batches are drawn; step size, clip bound
and batch size belong to a data set and live in `opacus_bc.experiments.compare.presets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from opacus_bc.accounting.events import ADJACENCY
from opacus_bc.experiments.training.store import LATER
from opacus_bc.mechanism.layerwise import Apply, NoiseName, Rule
from opacus_bc.mechanism.names import Sampling

Family = Literal["plain", "individual", "batch", "mini-sets"]
Train = Literal["all", "norm+head", "head", "convolutions+head"]


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """Adaptive layerwise clipping, as `opacus_bc.ALC` takes it, without the public loader."""

    layers: Literal["module", "parameter"] | int = "module"
    apply: Apply = "clip"
    rule: Rule = "ratio"
    noise: NoiseName = "proportional"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the comparison.

    Attributes:
        name: What ``--methods`` calls it.
        title: What tables call it.
        private: Whether it is trained with differential privacy at all.
        clipping: ``"flat"`` clips every sample's gradient, ``"batch"`` that of mini-sets.
        mini_set: Size of the mini-sets; None clips the whole batch.
        group_norm: Whether Opacus's ``ModuleValidator.fix`` replaces BatchNorm by GroupNorm first.
        batch_norm: Policy for running statistics; ``"public"`` takes the public part of the data set.
        differentiate: See `opacus_bc.PublicStatistics`.
        alc: Layerwise bounds from the public part, if any.
        sampling: How a step's samples are drawn; decides the adjacency.
        train: Which parameters of a pretrained network move, whatever the cell says; None leaves it to that.
    """

    name: str
    title: str
    private: bool = True
    clipping: Literal["flat", "batch"] = "flat"
    mini_set: int | None = None
    group_norm: bool = False
    batch_norm: Literal["public", "private", "batch", "frozen", "unprotected"] | None = "public"
    differentiate: bool = False
    alc: Layerwise | None = None
    sampling: Sampling = "poisson"
    train: Train | None = field(default=None, metadata=LATER)

    @property
    def family(self) -> Family:
        """Methods of one family want similar step sizes."""
        if not self.private:
            return "plain"
        if self.clipping == "flat":
            return "individual"
        return "batch" if self.mini_set is None else "mini-sets"

    @property
    def adjacency(self) -> str:
        """What neighbouring data sets are; epsilons under different adjacencies cannot be compared."""
        return ADJACENCY[self.sampling] if self.private else "none"


def _batch(name: str, title: str, alc: Layerwise | None = None, sampling: Sampling = "poisson") -> Method:
    return Method(name=name, title=title, clipping="batch", alc=alc, sampling=sampling)


def _mini_sets(size: int, *, scale: bool = False) -> Method:
    return Method(
        name=f"gbc-{size}" + ("-scale" if scale else ""),
        title=f"GBC s={size}" + (" + ALC scale" if scale else ""),
        clipping="batch",
        mini_set=size,
        alc=Layerwise(apply="scale") if scale else None,
    )


_ALL = (
    Method(name="no-dp", title="no privacy", private=False, batch_norm=None),
    Method(name="opacus", title="Opacus IC, GroupNorm", group_norm=True, batch_norm=None),
    Method(name="ic", title="IC, public BatchNorm"),
    _batch("bc", "BC"),
    _batch("bc-alc", "BC + ALC by module", Layerwise()),
    _batch("bc-alc-tensor", "BC + ALC by tensor", Layerwise(layers="parameter")),
    _batch("bc-alc-4", "BC + ALC, 4 groups", Layerwise(layers=4)),
    _batch("bc-scale", "BC + ALC scale", Layerwise(apply="scale")),
    _batch("zhang", "BC + Zhang's rule", Layerwise(rule="norm")),
    _mini_sets(4),
    _mini_sets(8),
    _mini_sets(8, scale=True),
    _mini_sets(16),
)
_ON_REQUEST = (
    _mini_sets(16, scale=True),
    _batch("bc-alc-partition", "BC + ALC, fixed partition (replace one)", Layerwise(), sampling="partition"),
    Method(name="ic-alc", title="IC + ALC, public BatchNorm", alc=Layerwise()),
    Method(name="ic-diff", title="IC, public BN differentiated", differentiate=True),
)

# What people do with pretrained networks. The first three are open to users of stock Opacus.
_FINE_TUNING = (
    Method(name="swap", title="Opacus IC, GroupNorm swap", group_norm=True, batch_norm=None),
    Method(name="stock-head", title="Opacus IC, head on frozen features", batch_norm="frozen", train="head"),
    Method(
        name="stock-conv",
        title="Opacus IC, BatchNorm all frozen",
        batch_norm="frozen",
        train="convolutions+head",
    ),
    Method(name="ic-frozen", title="IC, frozen BatchNorm", batch_norm="frozen"),
)
_PROBES = (
    Method(name="probe", title="linear probe, no privacy", private=False, batch_norm=None, train="head"),
    Method(
        name="probe-swap",
        title="linear probe after the GroupNorm swap, no privacy",
        private=False,
        group_norm=True,
        batch_norm=None,
        train="head",
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (*_ALL[:1], *_PROBES, *_FINE_TUNING, *_ALL[1:], *_ON_REQUEST)}
)
DEFAULT: tuple[str, ...] = tuple(method.name for method in _ALL)
# For networks that start from weights in a file.
PRETRAINED: tuple[str, ...] = (
    "no-dp",
    *(method.name for method in _PROBES),
    *(method.name for method in _FINE_TUNING),
    "ic",
    "gbc-16",
    "bc",
)
BASELINE = _ALL[0]


def select(names: Sequence[str], default: Sequence[str] = DEFAULT) -> list[Method]:
    """The named methods in the registry's order; no names mean the default ones.

    Raises:
        ValueError: A name is unknown.

    >>> [method.name for method in select(["bc", "no-dp"])]
    ['no-dp', 'bc']
    """
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods {' '.join(unknown)}: not among {', '.join(METHODS)}")
    return [method for name, method in METHODS.items() if name in (names or default)]

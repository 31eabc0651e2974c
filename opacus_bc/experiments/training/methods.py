"""The ways to train that are compared: one frozen description each, and nothing else.

A `Method` says what is clipped, what happens to BatchNorm and how batches are drawn; step size, clip bound
and batch size belong to a data set and live in `opacus_bc.experiments.compare.presets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from opacus_bc.accounting.events import ADJACENCY
from opacus_bc.experiments.training.store import LATER
from opacus_bc.mechanism.layerwise import Apply, NoiseName, Rule
from opacus_bc.mechanism.names import Sampling, event_kind

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
        grad_sample_mode: How ``"flat"`` makes per-sample gradients, as `opacus_bc.PrivacyEngine` takes it.
        users: Made-up users among whom the private images are dealt out, and who are protected; 0 protects
            images. ``mini_set`` is then the most images of a user in a step, and batch sizes count users.
        local_steps: Steps of DP-FedAvg on a user's images, whose weight change is clipped; 0 clips gradients.
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
    grad_sample_mode: Literal["hooks", "bk"] = field(default="hooks", metadata=LATER)
    users: int = field(default=0, metadata=LATER)
    local_steps: int = field(default=0, metadata=LATER)
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
        kind = event_kind(self.sampling, "user" if self.users else "sample")
        return ADJACENCY[kind] if self.private else "none"


def _one_backward(name: str, title: str, **kwargs: Any) -> Method:
    return Method(name=name, title=title, grad_sample_mode="bk", **kwargs)


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


def _of_users(name: str, title: str, cap: int = 8, local_steps: int = 0) -> Method:
    return Method(name=name, title=title, clipping="batch", mini_set=cap, users=1000, local_steps=local_steps)


_ALL = (
    Method(name="no-dp", title="no privacy", private=False, batch_norm=None),
    Method(name="opacus", title="Opacus IC, GroupNorm", group_norm=True, batch_norm=None),
    _one_backward("ic", "IC, public BatchNorm", differentiate=True),
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
    _one_backward("ic-alc", "IC + ALC, public BatchNorm", alc=Layerwise(), differentiate=True),
    _one_backward("ic-constants", "IC, public BatchNorm as constants"),
    _one_backward("user-ic", "IC of users, at most 8 images", mini_set=8, users=1000, differentiate=True),
    _one_backward(
        "user-ic-32", "IC of users, at most 32 images", mini_set=32, users=1000, differentiate=True
    ),
    _of_users("user-gbc", "GBC of users, at most 8 images"),
    _of_users("user-gbc-32", "GBC of users, at most 32 images", cap=32),
    _of_users("user-fedavg", "DP-FedAvg, 3 local steps", local_steps=3),
)

# What people do with pretrained networks. The first three are open to users of stock Opacus, whose hooks make
# the same clipped sums; depthwise convolutions take them seconds a layer, so one backward makes them here.
_FINE_TUNING = (
    _one_backward("swap", "Opacus IC, GroupNorm swap", group_norm=True, batch_norm=None),
    _one_backward("stock-head", "Opacus IC, head on frozen features", batch_norm="frozen", train="head"),
    _one_backward(
        "stock-conv", "Opacus IC, BatchNorm all frozen", batch_norm="frozen", train="convolutions+head"
    ),
    _one_backward("ic-frozen", "IC, frozen BatchNorm", batch_norm="frozen"),
    _one_backward("ic-frozen-all", "IC, frozen BatchNorm, all trained", batch_norm="frozen", train="all"),
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
# Whole sets of methods that ``--methods`` knows by one name. With users: what protecting 1,000 made-up users
# with all their images costs against protecting images, and what the cap on a user's images costs.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"users": ("gbc-8", "user-ic", "user-ic-32", "user-gbc", "user-gbc-32", "user-fedavg")}
)
NEEDS_WEIGHTS: frozenset[str] = frozenset(method.name for method in (*_PROBES, *_FINE_TUNING))
BASELINE = _ALL[0]


def listing() -> str:
    """Every name that ``--methods`` takes, a line each; ``*``: by default, ``w``: needs ``--weights``.

    >>> listing().splitlines()[:2]
    ['* no-dp: no privacy', 'w probe: linear probe, no privacy']
    """
    lines = [
        f"{'*' if name in DEFAULT else 'w' if name in NEEDS_WEIGHTS else ' '} {name}: {method.title}"
        for name, method in METHODS.items()
    ]
    return "\n".join([*lines, *(f"  {name}: the group {' '.join(group)}" for name, group in GROUPS.items())])


def select(names: Sequence[str], default: Sequence[str] = DEFAULT) -> list[Method]:
    """The named methods in the registry's order; no names mean the default ones, a group's all of its own.

    Raises:
        ValueError: A name is unknown.

    >>> [method.name for method in select(["bc", "no-dp"])]
    ['no-dp', 'bc']
    >>> len(select(["users", "gbc-8"]))
    6
    """
    unknown = [name for name in names if name not in METHODS and name not in GROUPS]
    if unknown:
        raise ValueError(_unknown(unknown))
    wanted = {each for name in names or default for each in GROUPS.get(name, (name,))}
    return [method for name, method in METHODS.items() if name in wanted]


def _unknown(names: Sequence[str]) -> str:
    """One line with what was probably meant: names are separated by spaces, and some are nearly right."""
    known = (*METHODS, *GROUPS)
    pieces = [piece for name in names for piece in name.split(",") if piece]
    guesses = [get_close_matches(piece, known, n=1) for piece in pieces]
    if all(guesses):
        hint = f"did you mean --methods {' '.join(guess for (guess,) in guesses)}?"
        hint += " Spaces separate names." if any("," in name for name in names) else ""
        return f"--methods {' '.join(names)}: {hint} There are {', '.join(known)}"
    return f"--methods {' '.join(names)}: not among {', '.join(known)}"

"""The tables of what is audited: one row for each way of clipping, unit of privacy and BatchNorm policy.

A new mode, unit or policy is one more row of :data:`MODES`, or of :data:`USERS`, where every sample of one
user is the adversary's; the command, the toys and the tests read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.alc.config import ALC
from opacus_bc.batch_norm.public import PublicStatistics

Clipping = Literal["batch", "flat", "per_layer"]
Policy = Literal["public", "differentiated", "frozen", "batch", "private"]
Keywords = Callable[[int], Mapping[str, Any]]


def _none(size: int) -> Mapping[str, Any]:
    return {}


def _views(size: int) -> Mapping[str, Any]:
    return {"views": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How the vectors are made and clipped.

    Attributes:
        clipping: What ``make_private`` calls ``clipping``.
        gradients: What it calls ``grad_sample_mode``.
        alc: Adaptive layerwise clipping, and how its bounds are applied.
        batch_norm: The policy; with one, the model has a BatchNorm layer.
        stock: Opacus's own arithmetic, which a given noise generator asks for.
        unit: What is protected.
        mini_sets: Of a draw, in an audit of one or a few rounds.
        local_steps: Steps of the user's own that make the vector; 0 is a gradient.
        keywords: More arguments of ``make_private`` for a data set of so many samples, such as the users of
            its rows.
    """

    clipping: Clipping = "flat"
    gradients: str = "hooks"
    alc: Literal["clip", "scale"] | None = None
    batch_norm: Policy | None = None
    stock: bool = False
    unit: str = "sample"
    mini_sets: int = 1
    local_steps: int = 0
    keywords: Keywords = _none

    @property
    def individual(self) -> bool:
        """Whether one clipped vector is one unit, so that the unit adds a vector and changes no other."""
        return self.clipping != "batch"

    @property
    def seeded_by_generator(self) -> bool:
        """Whether the noise comes from the generator that ``make_private`` was given."""
        return self.stock or not self.individual

    def arguments(
        self, *, size: int, bound: float, proportions: tuple[float, ...] = (1.0,), public_mean: float = 0.0
    ) -> dict[str, Any]:
        """What this mode says to ``make_private``.

        Args:
            size: Samples of the data set.
            bound: C.
            proportions: Relative sizes of the layers' gradients.
            public_mean: How far the public features' means are from zero.
        """
        found: dict[str, Any] = {"clipping": self.clipping, "max_grad_norm": bound, **self.keywords(size)}
        if self.individual:
            found["grad_sample_mode"] = self.gradients
        if self.clipping == "per_layer":
            scale = bound / sum(p**2 for p in proportions) ** 0.5
            found["max_grad_norm"] = [scale * p for p in proportions]
        if self.alc is not None:
            found["alc"] = ALC(
                _public(proportions),
                layers="parameter",
                apply=self.alc,
                refresh="once",
                gradient=lambda module, batch: module(batch[0]).mean().backward(),
            )
        if self.batch_norm is not None:
            found["batch_norm"] = policy_argument(self.batch_norm, public_mean)
        return found


def policy_argument(policy: Policy, public_mean: float = 0.0) -> PublicStatistics | str:
    """What ``make_private`` calls ``batch_norm``, with public rows for :class:`audit.models.Normalised`."""
    if policy in ("public", "differentiated"):
        differentiate = policy == "differentiated"
        return PublicStatistics(loader=_public_rows(public_mean), differentiate=differentiate)
    return policy


def _public(proportions: tuple[float, ...]) -> DataLoader[Any]:
    x = torch.tensor([proportions]).repeat(8, 1)
    return DataLoader(TensorDataset(x, torch.zeros(8)), batch_size=4)


def _public_rows(mean: float) -> DataLoader[Any]:
    """Rows and their opposites, whose means are exactly those that are asked for."""
    half = torch.randn(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([half, -half]) + torch.tensor([mean, -mean])
    rows = torch.cat([x, torch.ones(32, 1, dtype=torch.float64)], dim=1)
    return DataLoader(TensorDataset(rows), batch_size=32)


OF_MINI_SETS: tuple[Policy, ...] = ("public", "batch", "private", "frozen")
OF_CONSTANTS: tuple[Policy, ...] = ("public", "differentiated", "frozen")


def _with_policies(policies: tuple[Policy, ...], modes: Mapping[str, Mode]) -> dict[str, Mode]:
    """Each mode without BatchNorm, and after it the same mode with every policy."""
    return {
        name if policy is None else f"{name} + BatchNorm, {policy}": replace(mode, batch_norm=policy)
        for name, mode in modes.items()
        for policy in (None, *policies)
    }


_LAYERS: dict[str, Clipping] = {"": "flat", ", per_layer": "per_layer"}
_VIEWS: dict[str, Any] = {"unit": "sample with four views", "keywords": _views}
MODES: Mapping[str, Mode] = MappingProxyType(
    {
        **_with_policies(
            OF_MINI_SETS, {"BC": Mode(clipping="batch"), "GBC": Mode(clipping="batch", mini_sets=4)}
        ),
        "BC + ALC": Mode(clipping="batch", alc="clip"),
        "BC + ALC by scaling": Mode(clipping="batch", alc="scale"),
        "GBC + ALC": Mode(clipping="batch", mini_sets=4, alc="clip"),
        **_with_policies(
            OF_CONSTANTS,
            {
                "IC": Mode(),
                "IC, per_layer": Mode(clipping="per_layer"),
                "IC, Opacus's arithmetic": Mode(stock=True),
                "IC, Opacus's per_layer": Mode(stock=True, clipping="per_layer"),
                "BK": Mode(gradients="bk"),
                "BK, per_layer": Mode(gradients="bk", clipping="per_layer"),
                "IC of views": Mode(**_VIEWS),
                "IC of views, per_layer": Mode(clipping="per_layer", **_VIEWS),
                "BK of views": Mode(gradients="bk", **_VIEWS),
                "BK of views, per_layer": Mode(gradients="bk", clipping="per_layer", **_VIEWS),
            },
        ),
        **_with_policies(("public", "frozen"), {"IC, ghost": Mode(gradients="ghost")}),
        **{
            f"IC{unit}, {gradients}{layers}": Mode(gradients=gradients, clipping=clipping, **more)
            for gradients in ("functorch", "ew")
            for unit, more in {"": {}, " of views": _VIEWS}.items()
            for layers, clipping in _LAYERS.items()
        },
        **{
            f"IC, {gradients}{layers}, Opacus's arithmetic": Mode(
                gradients=gradients, clipping=clipping, stock=True
            )
            for gradients in ("functorch", "ew")
            for layers, clipping in _LAYERS.items()
        },
        "IC + ALC": Mode(alc="clip"),
        "IC + ALC by scaling": Mode(alc="scale"),
        "BK + ALC": Mode(gradients="bk", alc="clip"),
        "BK + ALC by scaling": Mode(gradients="bk", alc="scale"),
        "IC of views + ALC": Mode(alc="clip", **_VIEWS),
        "BK of views + ALC": Mode(gradients="bk", alc="clip", **_VIEWS),
    }
)
USERS: Mapping[str, Mode] = MappingProxyType(
    {
        **_with_policies(
            OF_CONSTANTS, {"IC of users": Mode(unit="user"), "BK of users": Mode(gradients="bk", unit="user")}
        ),
        "IC of users, functorch": Mode(gradients="functorch", unit="user"),
        "IC of users, ew": Mode(gradients="ew", unit="user"),
        **_with_policies(
            OF_MINI_SETS,
            {
                "GBC of users": Mode(clipping="batch", unit="user"),
                "DP-FedAvg of users": Mode(clipping="batch", unit="user", local_steps=2),
            },
        ),
        "BK of users + ALC": Mode(gradients="bk", alc="clip", unit="user"),
        "GBC of users + ALC": Mode(clipping="batch", alc="clip", unit="user"),
    }
)

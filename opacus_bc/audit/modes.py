"""The table of what is audited: one row for each way of clipping, unit of privacy and BatchNorm policy.

A new mode, unit or policy is one more row of :data:`MODES`; the command, the toys and the tests read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        unit: What one clipped vector belongs to.
        keywords: More arguments of ``make_private`` for a data set of so many samples, such as the users of
            its rows.
    """

    clipping: Clipping = "flat"
    gradients: str = "hooks"
    alc: Literal["clip", "scale"] | None = None
    batch_norm: Policy | None = None
    stock: bool = False
    unit: str = "sample"
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
        if self.batch_norm in ("public", "differentiated"):
            differentiate = self.batch_norm == "differentiated"
            found["batch_norm"] = PublicStatistics(
                loader=_public_rows(public_mean), differentiate=differentiate
            )
        elif self.batch_norm is not None:
            found["batch_norm"] = self.batch_norm
        return found


def _public(proportions: tuple[float, ...]) -> DataLoader[Any]:
    x = torch.tensor([proportions]).repeat(8, 1)
    return DataLoader(TensorDataset(x, torch.zeros(8)), batch_size=4)


def _public_rows(mean: float) -> DataLoader[Any]:
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += torch.tensor([mean, -mean])
    rows = torch.cat([x, torch.ones(32, 1, dtype=torch.float64)], dim=1)
    return DataLoader(TensorDataset(rows), batch_size=32)


_BATCH = Mode(clipping="batch")
_VIEWS: dict[str, Any] = {"unit": "sample with four views", "keywords": _views}
MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "BC": _BATCH,
        "GBC": _BATCH,
        "BC + ALC": Mode(clipping="batch", alc="clip"),
        "BC + ALC by scaling": Mode(clipping="batch", alc="scale"),
        "BC + BatchNorm, public": Mode(clipping="batch", batch_norm="public"),
        "BC + BatchNorm, batch": Mode(clipping="batch", batch_norm="batch"),
        "BC + BatchNorm, private": Mode(clipping="batch", batch_norm="private"),
        "BC + BatchNorm, frozen": Mode(clipping="batch", batch_norm="frozen"),
        "IC": Mode(),
        "IC, functorch": Mode(gradients="functorch"),
        "IC, ew": Mode(gradients="ew"),
        "IC, ghost": Mode(gradients="ghost"),
        "IC, per_layer": Mode(clipping="per_layer"),
        "IC, Opacus's arithmetic": Mode(stock=True),
        "IC, Opacus's per_layer": Mode(stock=True, clipping="per_layer"),
        "IC + ALC": Mode(alc="clip"),
        "IC + ALC by scaling": Mode(alc="scale"),
        "IC + BatchNorm, public": Mode(batch_norm="public"),
        "IC + BatchNorm, differentiated": Mode(batch_norm="differentiated"),
        "IC + BatchNorm, frozen": Mode(batch_norm="frozen"),
        "IC, ghost + BatchNorm, public": Mode(gradients="ghost", batch_norm="public"),
        "BK": Mode(gradients="bk"),
        "BK, per_layer": Mode(gradients="bk", clipping="per_layer"),
        "BK + ALC": Mode(gradients="bk", alc="clip"),
        "BK + ALC by scaling": Mode(gradients="bk", alc="scale"),
        "BK + BatchNorm, public": Mode(gradients="bk", batch_norm="public"),
        "BK + BatchNorm, differentiated": Mode(gradients="bk", batch_norm="differentiated"),
        "BK + BatchNorm, frozen": Mode(gradients="bk", batch_norm="frozen"),
        "IC of views": Mode(**_VIEWS),
        "IC of views, per_layer": Mode(clipping="per_layer", **_VIEWS),
        "IC of views + BatchNorm, differentiated": Mode(batch_norm="differentiated", **_VIEWS),
        "BK of views": Mode(gradients="bk", **_VIEWS),
        "BK of views + ALC": Mode(gradients="bk", alc="clip", **_VIEWS),
        "BK of views + BatchNorm, differentiated": Mode(
            gradients="bk", batch_norm="differentiated", **_VIEWS
        ),
    }
)

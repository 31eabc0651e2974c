"""Clip rules: from trainable parameters, a bound and a noise multiplier to the blocks of a release."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from opacus_bc.mechanism.blocks import Block, make_block, sensitivity
from opacus_bc.mechanism.names import Adjacency, Unit


class ClipRule(Protocol):
    """Turns the trainable parameters of the moment into the blocks of a release."""

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """Blocks that name every parameter exactly once."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatClipping:
    """One block: the whole vector is clipped to ``max_grad_norm``."""

    unit: Unit
    adjacency: Adjacency

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """See :meth:`ClipRule.blocks`."""
        return [
            make_block(
                names=[name for name, _ in parameters],
                dimension=sum(p.numel() for _, p in parameters),
                clip_bound=max_grad_norm,
                noise_multiplier=noise_multiplier,
                unit=self.unit,
                adjacency=self.adjacency,
            )
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpacusClipping:
    """What Opacus's own modes release: noise of ``sigma * C`` whatever the adjacency is.

    **Formal guarantee**: the blocks carry the sensitivity of the adjacency next to Opacus's noise. Replacing
    a sample moves the sum by up to 2C, so a shuffled run has sigma_eff = sigma / 2.

    Attributes:
        adjacency: What neighbouring data sets are.
        bounds: The clip bounds of the parameter tensors in proportion (``clipping="per_layer"``): they are
            scaled so that their root sum of squares is C. None clips the whole vector to C.
    """

    adjacency: Adjacency
    bounds: tuple[float, ...] | None = None

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """See :meth:`ClipRule.blocks`."""
        if self.bounds is None:
            groups = [(tuple(parameters), 1.0)]
        else:
            total = math.hypot(*self.bounds)
            groups = [((one,), bound / total) for one, bound in zip(parameters, self.bounds, strict=True)]
        whole = sensitivity(1.0, unit="sample", adjacency=self.adjacency)
        return [
            Block(
                names=tuple(name for name, _ in members),
                factors=(1.0,) * len(members),
                clip_bound=share * max_grad_norm,
                sensitivity=sensitivity(share * max_grad_norm, unit="sample", adjacency=self.adjacency),
                noise_multiplier=noise_multiplier / (whole * share),
                dimension=sum(p.numel() for _, p in members),
            )
            for members, share in groups
        ]

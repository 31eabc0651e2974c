"""ALC at work: a clip rule whose bounds follow public layer norms, renewed between draws."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from opacus_bc.alc.config import ALC, finest_layers, nominal_rule
from opacus_bc.alc.freezing import HoverWatch
from opacus_bc.alc.groups import by_norm
from opacus_bc.alc.measuring import LARGEST_COUNT, PublicNorms
from opacus_bc.mechanism.blocks import Block
from opacus_bc.mechanism.layerwise import floored
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.types import Loss, State
from opacus_bc.mechanism.warn import users_level
from opacus_bc.public.data import PublicDataError
from opacus_bc.public.norms import loss_gradient, mean_group_norms

logger = logging.getLogger("opacus_bc")

# An estimation computes at most this share of the gradients of the steps between two of them, so that it
# stays below 5 % of their time (benchmarks/alc_estimation_cost.py); a single sample costs more than its share
# of a batch.
SHARE: Mapping[Unit, float] = {"mini-set": 0.04, "user": 0.04, "sample": 0.005}

# For the plot: when there are more estimations, every second one is dropped.
LONGEST_HISTORY = 1000


def default_count(unit: Unit, gradients: int) -> int:
    """How many public gradients an estimation looks at when training computes ``gradients`` between two."""
    return max(1, min(LARGEST_COUNT[unit], int(SHARE[unit] * gradients)))


class AdaptiveClipping:
    """ALC at work: a clip rule that estimates its norms anew between draws.

    **Formal guarantee**: it reads the module's weights, which are released, and public data; never a
    gradient, a private batch or a buffer that one has written. Bounds move in :meth:`begin_draw` only, so a
    draw is clipped and noised with the same ones.
    """

    def __init__(
        self,
        config: ALC,
        meter: PublicNorms,
        names: Sequence[str],  # of the trainable parameters
        *,
        unit: Unit,
        adjacency: Adjacency,
        mini_set_size: int,  # samples in a unit; 1 for individual clipping of samples, the most of a user
        steps_per_epoch: int,
        gradients_per_step: int,  # units clipped in a step
        criterion: Loss | None = None,
    ) -> None:
        self.config = config
        self.meter = meter
        self.mini_set_size = mini_set_size
        self.period = steps_per_epoch if isinstance(config.refresh, str) else config.refresh
        self.count = config.max_batches or default_count(unit, self.period * gradients_per_step)
        self.gradient = config.gradient or loss_gradient(criterion)
        self.layers = finest_layers(config.layers, names)
        self.rule = nominal_rule(config, names, unit=unit, adjacency=adjacency)
        self.steps = 0
        self.estimations = 0
        self.history: list[tuple[int, dict[str, float]]] = []
        self.frozen: dict[str, Tensor] = {}
        self.fixed_values: dict[str, Tensor] = {}
        self._watch = HoverWatch(config.freeze) if config.freeze else None
        self._estimated_at: int | None = None
        self._names = tuple(names)
        size = len(config.public_loader.dataset)  # type: ignore[arg-type]  # torch types data sets as unsized
        if size < mini_set_size:
            warnings.warn(
                f"the public data has {size} samples, fewer than a mini-set of "
                f"{mini_set_size}: layer norms are estimated from a smaller mini-set and come out too large",
                stacklevel=users_level(),
            )
        if not self._estimate():
            raise PublicDataError(
                "the gradients on the public data are all zero or not finite, so they say nothing about the "
                "layers: check the public loader, the model and make_private's criterion= (None means cross "
                "entropy)"
            )

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        return self.rule.blocks(parameters, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)

    @property
    def norms(self) -> dict[str, float]:
        """The latest e_h by layer (for ``layers=G`` by module)."""
        return self.history[-1][1]

    def begin_draw(self) -> None:
        """Estimate the norms anew if it is time; called before a draw's blocks are read."""
        scheduled = self.config.refresh != "once" and self.steps % self.period == 0
        due = self._estimated_at is None or (scheduled and self._estimated_at != self.steps)
        if due and not self._estimate():
            self._estimated_at = self.steps
            warnings.warn(
                f"step {self.steps}: the public gradients are all zero or not finite; the clip bounds stay "
                "what they were",
                stacklevel=users_level(),
            )

    def _estimate(self) -> bool:
        self.estimations += 1
        measured = self.meter(
            self._names,
            loader=self.config.public_loader,
            gradient=self.gradient,
            mini_set_size=self.mini_set_size,
            count=self.count,
            seed=self.estimations,
            frozen=self.frozen,
        )
        if not measured:
            return False
        layers = mean_group_norms(measured, self.layers)
        if max(layers.values()) == 0:
            return False
        groups = self.rule.groups
        if isinstance(self.config.layers, int):
            groups = by_norm(self.layers, floored(layers), self.config.layers)
        self.rule = replace(
            self.rule,
            groups=groups,
            norms=mean_group_norms(measured, groups),
            frozen={name: int(mask.sum()) for name, mask in self.frozen.items()},
        )
        self.history.append((self.steps, layers))
        if len(self.history) > LONGEST_HISTORY:
            self.history = [*self.history[:-1:2], self.history[-1]]
        self._estimated_at = self.steps
        return True

    def end_step(self, weights: Mapping[str, Tensor], noise_steps: Mapping[str, float]) -> None:
        """A step with noise of these deviations moved the weights: hold frozen entries, look for others."""
        self.steps += 1
        if self._watch is None:
            return
        self._hold(weights)
        if self._watch.points == 0:
            self._watch.start(weights)
            return
        found = self._watch.observe(weights, noise_steps)
        if found is None:
            return
        fresh = 0
        for name, (hovers, mean) in found.items():
            old = self.frozen.get(name, torch.zeros_like(hovers))
            new = hovers & ~old
            if count := int(new.sum()):
                fresh += count
                before = self.fixed_values.get(name, mean)
                self.fixed_values[name] = torch.where(old, before, mean)
                self.frozen[name] = old | new
        if fresh:
            self._hold(weights)
            self._estimated_at = None  # the frozen entries must leave e_h before the next draw
            logger.info("step %d: %d entries have converged and are fixed", self.steps, fresh)

    def _hold(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, mask in self.frozen.items():
                weights[name].copy_(torch.where(mask, self.fixed_values[name], weights[name]))

    def state_dict(self) -> State:
        """What an exact resume needs; all of it comes from released weights and public data."""
        return {
            "steps": self.steps,
            "estimations": self.estimations,
            "estimated_at": self._estimated_at,
            "groups": dict(self.rule.groups),
            "norms": dict(self.rule.norms),
            "history": [(step, dict(norms)) for step, norms in self.history],
            "frozen": {name: mask.clone() for name, mask in self.frozen.items()},
            "fixed_values": {name: value.clone() for name, value in self.fixed_values.items()},
            "watch": None if self._watch is None else self._watch.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where :meth:`state_dict` was taken."""
        grouped = sorted(name for names in state["groups"].values() for name in names)
        if grouped != sorted(self._names) or len(state["groups"]) != len(self.rule.groups):
            raise ValueError("the state is that of other layers: make the model private with the same alc=")
        if (state["watch"] is None) != (self._watch is None):
            raise ValueError("the state was taken with another freeze=: make the model private with the same")
        self.steps, self._estimated_at = state["steps"], state["estimated_at"]
        self.estimations, self.history = state["estimations"], list(state["history"])
        self.frozen, self.fixed_values = dict(state["frozen"]), dict(state["fixed_values"])
        counts = {name: int(mask.sum()) for name, mask in self.frozen.items()}
        self.rule = replace(self.rule, groups=state["groups"], norms=state["norms"], frozen=counts)
        if self._watch is not None:
            self._watch.load_state_dict(state["watch"])

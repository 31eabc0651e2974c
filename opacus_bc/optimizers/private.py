"""The private optimizer of every mode: where a gradient goes from the backward pass to the weights.

Read :meth:`PrivateOptimizer.pre_step` from top to bottom (CONTRIBUTING.md has the way in five lines). The
kinds differ in how a delivered batch becomes clipped vectors; nothing else moves weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc._opacus import DPOptimizer
from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.alc.report import LayerReport, layer_report
from opacus_bc.draws.ledger import Delivery, DrawLedger
from opacus_bc.gradients.half_precision import HalfPrecisionWatch
from opacus_bc.mechanism.blocks import Block, effective_noise_multiplier
from opacus_bc.mechanism.clipping import HALF
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.noise import NoiseSource
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.mechanism.precision import in_full_precision
from opacus_bc.mechanism.rules import ClipRule
from opacus_bc.mechanism.warn import users_level
from opacus_bc.optimizers.licence import Licence
from opacus_bc.optimizers.rates import RateWatch

COPIES = (
    "a private optimizer or engine cannot be copied or pickled: a copy would repeat its noise. Save its "
    "state_dict(), and call make_private anew on a copy of the model"
)
GRAD_SCALER = (
    "torch.amp.GradScaler skips steps and moves its scale by what it finds in private gradients, without "
    "noise: use bfloat16, or float16 with a constant scale (multiply the loss by it; with clipping='batch' "
    "set optimizer.loss_scale to it). Individual clipping then needs a summed loss and loss_reduction='sum'"
)


@dataclass(kw_only=True)
class OpenDraw:
    """The draw that the next step will release; its bounds and noise hold until then."""

    serial: int
    blocks: list[Block]
    params: list[nn.Parameter]
    noise_multiplier: float
    max_grad_norm: float
    clipped_sum: list[Tensor] | None = None  # batch clipping's, in the order of params
    unclipped_chunks: list[Tensor] | None = None  # batch clipping's, of the mini-set under way
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # individual clipping's

    @property
    def names(self) -> list[str]:
        """Parameter names in the order of ``params``."""
        return [name for block in self.blocks for name in block.names]


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """A DPOptimizer that steps on complete draws of a ledger and on nothing else.

    **Formal guarantee**: one completed step releases the blocks that :meth:`blocks` describes, given the draw
    ``G_mu``-DP with ``mu = 1 / effective_noise_multiplier``; it is booked before weights move. A step without
    a fresh batch, with several of them or without gradients raises before anything changes. Bounds and noise
    are read once, when the first batch of a draw arrives: schedulers move both between draws only. The torch
    optimizer inside raises before it moves anything that was not released here.

    **Edge cases**: gradients are cleared before a batch is delivered, so ``zero_grad()`` may be forgotten; an
    exception while a draw is released or booked leaves the weights alone and gives the draw up.

    Args:
        optimizer: The user's optimizer; any first-order one.
        ledger: The private loader's record of deliveries.
        clip_rule: How the parameters are grouped and clipped.
        noise: Source of the Gaussian noise; None leaves noise to Opacus and its ``generator``.
        parameter_names: Names of the parameters; numbered if missing.
        **opacus: For Opacus's optimizer.

    Attributes:
        booking: Told of every release before weights move.
        put_buffers_back: Called before every delivery and after its use: see ``batch_norm/once_a_step.py``.
        half_precision: Individual clipping's watch over the forward passes.
        licence: Lets the torch optimizer inside move weights, once for each release.
    """

    certified_norms = True  # whether the clip bound holds with float rounding included
    # torch.amp.GradScaler asks for this; it then tells us of itself instead of skipping steps on its own.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        ledger: DrawLedger,
        clip_rule: ClipRule,
        noise: NoiseSource | None,
        parameter_names: Mapping[nn.Parameter, str] | None = None,
        **opacus: Any,
    ) -> None:
        check_optimizer(optimizer)
        self._draw: OpenDraw | None = None
        self._in_force: OpenDraw | None = (
            None  # the draw, within pre_step: Opacus's arithmetic reads its numbers
        )
        self._released_blocks: list[Block] = []
        self._names = dict(parameter_names or {})
        self.noise = noise
        self.clip_rule = clip_rule
        self.ledger = ledger
        self.booking: Callable[[PrivateOptimizer], None] | None = None
        self.put_buffers_back: Callable[[], None] | None = None
        self.half_precision: HalfPrecisionWatch | None = None
        self.licence = Licence(optimizer)
        self._rates = RateWatch()
        super().__init__(optimizer, **opacus)
        self.before_pass()  # whatever was computed before belongs to no draw
        ledger.tell(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(COPIES)

    @property
    def steps_taken(self) -> int:
        """How often the weights have moved."""
        return self.licence.steps_taken

    @property
    def weights_moved(self) -> bool:
        """Whether the last ``step()`` moved the weights; deliveries that do not end a draw move nothing."""
        return self.steps_taken > 0 and not self._is_last_step_skipped

    # -- numbers that schedulers move -----------------------------------------------------------------------

    @property
    def noise_multiplier(self) -> float:
        """Sigma: noise standard deviation over L2-sensitivity; schedulers set it, for the next draw."""
        return self._noise_multiplier if self._in_force is None else self._in_force.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = check_positive("noise_multiplier", value, zero_allowed=True)

    @property
    def max_grad_norm(self) -> float:
        """C: the single source of every clip bound and noise scale; schedulers set it, for the next draw."""
        return self._max_grad_norm if self._in_force is None else self._in_force.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._max_grad_norm = check_positive("max_grad_norm", value)

    # -- what is released -----------------------------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable parameters by name."""
        return [(self._names.get(p, f"parameter_{i}"), p) for i, p in enumerate(self.params)]

    def blocks(self) -> list[Block]:
        """What the step under way releases, or what the next one will: the only source of noise scales."""
        if self._draw is not None:
            return list(self._draw.blocks)
        return self.clip_rule.blocks(
            self.named_parameters(),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=float(self.max_grad_norm),
        )

    @property
    def effective_noise_multiplier(self) -> float:
        """``sigma_eff = 1 / sqrt(sum_h (Delta_h / tau_h)^2)``, what accountants are told."""
        return effective_noise_multiplier(self.blocks())

    @property
    def adaptive(self) -> AdaptiveClipping | None:
        """ALC's state, if there is any."""
        return self.clip_rule if isinstance(self.clip_rule, AdaptiveClipping) else None

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Parameter names of every clip group used now."""
        if self.adaptive is not None:
            return dict(self.adaptive.rule.groups)
        blocks = self.blocks()
        return {"all" if len(blocks) == 1 else ", ".join(block.names): block.names for block in blocks}

    @property
    def clip_bounds(self) -> dict[str, float]:
        """Clip bound of every group used now; for ``apply="scale"`` C_h, what C amounts to in that group.

        Groups whose entries are all frozen have none.
        """
        bounds = {
            name: block.clip_bound / factor
            for block in self.blocks()
            for name, factor in zip(block.names, block.factors, strict=True)
        }
        frozen = {} if self.adaptive is None else self.adaptive.frozen
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        return {
            group: bounds[names[0]]
            for group, names in self.layers.items()
            if any(name not in frozen or int(frozen[name].sum()) < sizes[name] for name in names)
        }

    def layer_report(self) -> LayerReport:
        """What ALC does to each layer now; see :meth:`opacus_bc.PrivacyEngine.layer_report`.

        Raises:
            ValueError: There is no ALC.
        """
        if self.adaptive is None:
            raise ValueError("layer_report() needs layer norms from public data: pass alc= to make_private")
        vectors = int(self.expected_batch_size)
        return layer_report(self.adaptive, dict(self.named_parameters()), self.blocks(), vectors=vectors)

    # -- the way of a gradient ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Consume the delivered batch; on the last one of a draw, release and move the weights.

        Args:
            closure: Evaluated once, before anything else.

        Returns:
            The closure's value, if there is one.
        """
        if hasattr(self, "found_inf"):  # torch.amp.GradScaler.step is calling
            raise RuntimeError(GRAD_SCALER)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            if self.pre_step():
                self._reduce()
                self.original_optimizer.step()
                self._tell_alc()
        finally:
            self.licence.revoke()
        return loss

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Accumulate the delivered batch; on the last one of a draw, leave the release in ``.grad``.

        Returns:
            Whether the draw is complete, so that the torch optimizer inside may step.
        """
        self.licence.begin_step()
        delivery = self.ledger.outstanding()
        self._check_delivery(delivery)
        self._rates.look(delivery.serial, self.original_optimizer)
        draw = self._open(delivery)
        if not delivery.placeholder:
            in_full_precision(self._check_gradients, draw, delivery)

        self.ledger.consume()
        self._draw = self._in_force = draw
        try:
            in_full_precision(self._accumulate, draw, delivery)
            self._is_last_step_skipped = True  # Opacus's name: schedulers ask whether weights moved
            if not delivery.ends_draw:
                return False
            self._release(draw)
            if self.booking is not None:
                self.booking(self)
            if self.step_hook:
                self.step_hook(self)
        except BaseException:
            self.before_pass()
            raise
        finally:
            self._in_force = None
        self._draw = None
        self._is_last_step_skipped = False
        self._released_blocks = draw.blocks
        self._after_release()
        self.licence.grant()
        return True

    def _open(self, delivery: Delivery) -> OpenDraw:
        draw = self._draw
        if draw is not None and draw.serial == delivery.serial:
            return draw
        self._draw = None  # left over by a loop that was broken off: iter(loader) has discarded its draw
        if self.adaptive is not None:
            self.adaptive.begin_draw()  # renews the bounds if it is time
        blocks = self.blocks()
        by_name = dict(self.named_parameters())
        ordered = [by_name[name] for block in blocks for name in block.names]
        if len(ordered) != len(by_name):
            raise RuntimeError(f"the clip rule covers {len(ordered)} of {len(by_name)} trainable parameters")
        return OpenDraw(
            serial=delivery.serial,
            blocks=blocks,
            params=ordered,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
        )

    def _check_delivery(self, delivery: Delivery) -> None:
        """Refuse a delivery whose gradients cannot be what must be clipped; changes nothing."""

    def _check_gradients(self, draw: OpenDraw, delivery: Delivery) -> None:
        """Refuse gradients that are not this delivery's; changes nothing."""

    def _accumulate(self, draw: OpenDraw, delivery: Delivery) -> None:
        """Add the delivered batch's clipped vectors to the draw."""
        raise NotImplementedError

    def _release(self, draw: OpenDraw) -> None:
        """Leave the noised and scaled sum in ``.grad``, and nothing un-noised anywhere."""
        raise NotImplementedError

    def _after_release(self) -> None:
        """Choose the next draw's numbers from what was released, where a kind does that."""

    def _reduce(self) -> None:
        """Bring the releases of several processes together, where each has its own, and grant the result."""

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Called by Opacus's BatchMemoryManager before it fetches a chunk."""
        self.ledger.announce_chunk(ends_set=not do_skip)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the torch optimizer's state. It has no record of epsilon, and a warning says so."""
        if state_dict.get("state") and self.steps_taken == 0:
            warnings.warn(NO_EPSILON, stacklevel=users_level())
        super().load_state_dict(state_dict)

    def held_parameters(self) -> list[nn.Parameter]:
        """All parameters of the torch optimizer inside, also those that are frozen now."""
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def before_delivery(self) -> None:
        """Forget all gradients, so that none survives from another batch."""
        self.licence.revoke()
        if self.put_buffers_back is not None:
            self.put_buffers_back()
        if self.half_precision is not None:
            self.half_precision.forget()
        for p in self.held_parameters():
            p.grad = None

    def before_pass(self) -> None:
        """Forget all gradients and a draw that was left unfinished."""
        self._draw = None
        self._is_last_step_skipped = False
        self.before_delivery()

    def _refuse_half_precision_of_a_mean(self, dtypes: Iterable[torch.dtype]) -> None:
        """Refuse per-sample gradients that were rounded after a division by the batch's size.

        One sample more would change how all others are rounded; a sum's rounding is a sample's own.
        """
        found = self._through_half_precision() or any(dtype in HALF for dtype in dtypes)
        if self.loss_reduction == "mean" and found:
            raise RuntimeError(HALF_OF_A_MEAN)

    def _through_half_precision(self) -> bool:
        return self.half_precision is not None and self.half_precision.found

    # -- converged entries (ALC's freeze) -------------------------------------------------------------------

    def mask_(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """Set the frozen entries of gradients to zero, in place."""
        if self.adaptive is None or not self.adaptive.frozen:
            return
        for tensor, name in zip(tensors, names, strict=True):
            mask = self.adaptive.frozen.get(name)
            if mask is not None:
                tensor.masked_fill_(mask, 0.0)

    def _tell_alc(self) -> None:
        """The weights have moved by a release: ALC counts it, and holds converged entries."""
        if self.adaptive is None:
            return
        divisor = float(self.expected_batch_size) if self.loss_reduction == "mean" else 1.0
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        by_name = dict(self.named_parameters())
        self.adaptive.end_step(
            by_name,
            {
                name: rates[by_name[name]] * block.noise_std / factor / divisor
                for block in self._released_blocks
                for name, factor in zip(block.names, block.factors, strict=True)
            },
        )


HALF_OF_A_MEAN = (
    "gradients in half precision (autocast, or half-precision weights, frozen ones too) of a mean loss: the "
    "mean divides by the batch's size before they are rounded, so one sample more changes how all others are "
    "rounded, which no clip bound covers. Use a summed loss with make_private(loss_reduction='sum') and "
    "divide the learning rate by the expected batch size, or use float32 or clipping='batch'. Nothing was "
    "released"
)
NO_EPSILON = (
    "the state that was loaded comes from earlier steps, which this engine's epsilon does not count. If they "
    "used these private data, resume by engine.save_checkpoint and engine.load_checkpoint: they keep epsilon"
)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers and parameters that a Gaussian release cannot serve.

    Raises:
        ValueError: LBFGS (it evaluates the private loss many times a step), or complex parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times for each step: use a first-order optimizer")
    params: Sequence[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type_name(optimizer)} has no step hooks of torch.optim.Optimizer, so nothing could keep "
            "it from moving weights by itself: let its __init__ call super().__init__"
        )
    if not any(p.requires_grad for p in params):
        raise ValueError("optimizer has no trainable parameters: there is nothing to make private")
    for p in params:
        if p.is_complex():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is complex ({p.dtype}): use real ones")

"""What the optimizers that release blocks have in common: parameters, blocks, bounds, frozen entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from opacus_bc._opacus import DPOptimizer
from opacus_bc.adaptive import AdaptiveClipping
from opacus_bc.clipping import Block, ClipRule, check_positive, effective_noise_multiplier
from opacus_bc.noise import NoiseSource

GRAD_SCALER = (
    "torch.amp.GradScaler skips steps and moves its scale by what it finds in private gradients, without "
    "noise: use bfloat16, or float16 with a constant scale (multiply the loss by it; with clipping='batch' "
    "set optimizer.loss_scale to it)"
)


class BlockOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """A DPOptimizer whose clipping and noise come from blocks and from nothing else.

    **Formal guarantee**: a scheduler that sets ``noise_multiplier`` or ``max_grad_norm`` moves clipping and
    noise together, because both are read off :meth:`blocks`; the blocks of a draw are read once, when its
    first batch arrives, so nothing moves within one.
    """

    clip_rule: ClipRule
    noise: NoiseSource
    _names: Mapping[nn.Parameter, str]

    # torch.amp.GradScaler asks for this; it then tells us of itself instead of skipping steps on its own.
    _step_supports_amp_scaling = True

    def _refuse_grad_scaler(self) -> None:
        """Raise if ``torch.amp.GradScaler.step`` is calling.

        Whether it skips a step and which scale it takes next follow from un-noised private gradients.

        Raises:
            RuntimeError: It is.
        """
        if hasattr(self, "found_inf"):
            raise RuntimeError(GRAD_SCALER)

    @property
    def noise_multiplier(self) -> float:
        """Sigma: noise standard deviation over L2-sensitivity; schedulers set it."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = check_positive("noise_multiplier", value, zero_allowed=True)

    @property
    def max_grad_norm(self) -> float:
        """C: the single source of every clip bound and, through it, of every noise scale."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._max_grad_norm = check_positive("max_grad_norm", value)

    def _named_params(self) -> list[tuple[str, nn.Parameter]]:
        return [(self._names.get(p, f"parameter_{i}"), p) for i, p in enumerate(self.params)]

    def _blocks_under_way(self) -> list[Block] | None:
        """Blocks of the draw that has been opened and not yet released."""
        raise NotImplementedError

    def blocks(self) -> list[Block]:
        """What the step under way releases, or what the next one will: the only source of noise scales."""
        under_way = self._blocks_under_way()
        if under_way is not None:
            return list(under_way)
        return self.clip_rule.blocks(
            self._named_params(), noise_multiplier=self.noise_multiplier, max_grad_norm=self.max_grad_norm
        )

    @property
    def effective_noise_multiplier(self) -> float:
        """``sigma_eff = 1 / sqrt(sum_h (Delta_h / tau_h)^2)``, what accountants are fed."""
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
        return {"all": tuple(name for name, _ in self._named_params())}

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
        adaptive = self.adaptive
        return {
            group: bounds[names[0]]
            for group, names in self.layers.items()
            if adaptive is None or not _all_frozen(names, dict(self._named_params()), adaptive.frozen)
        }

    def _begin_draw(self) -> list[Block]:
        """Renew the bounds if it is time; what this returns holds until the release."""
        if self.adaptive is not None:
            self.adaptive.begin_draw()
        return self.blocks()

    def _mask_(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """Set the frozen entries of gradients to zero, in place."""
        if self.adaptive is None or not self.adaptive.frozen:
            return
        for tensor, name in zip(tensors, names, strict=True):
            mask = self.adaptive.frozen.get(name)
            if mask is not None:
                tensor.masked_fill_(mask, 0.0)

    def _end_step(self, released: Sequence[Block]) -> None:
        """The underlying optimizer has moved the weights by a release of these blocks."""
        if self.adaptive is None:
            return
        divisor = float(self.expected_batch_size) if self.loss_reduction == "mean" else 1.0
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        by_name = dict(self._named_params())
        self.adaptive.end_step(
            by_name,
            {
                name: rates[by_name[name]] * block.noise_std / factor / divisor
                for block in released
                for name, factor in zip(block.names, block.factors, strict=True)
            },
        )


def _all_frozen(names: Sequence[str], parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> bool:
    return all(name in frozen and int(frozen[name].sum()) == parameters[name].numel() for name in names)

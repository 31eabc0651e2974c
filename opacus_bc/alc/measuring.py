"""Gradient norms on public data, measured the way the model's training makes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from opacus_bc.mechanism.names import Unit
from opacus_bc.mechanism.types import Loader
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.public.norms import Gradient, parameter_norms

Measure = Callable[..., list[dict[str, float]]]

# More public gradients add little: their mean norm is then known to within about 10 per cent.
LARGEST_COUNT: Mapping[Unit, int] = {"mini-set": 32, "user": 32, "sample": 128}


class Hooks(Protocol):
    """What makes per-sample gradients of a model's passes: Opacus's wrappers and hooks, and book-keeping."""

    hooks_enabled: bool

    def disable_hooks(self) -> None:
        """Make none for the time being."""
        ...

    def enable_hooks(self) -> None:
        """Make them again."""
        ...


@dataclass(frozen=True)
class PublicNorms:
    """Norms of every parameter's gradient on public mini-sets (single samples for individual clipping).

    **Formal guarantee**: see :func:`opacus_bc.public.norms.parameter_norms`: nothing of the model, nor any
    random stream, is different afterwards.

    Attributes:
        module: The model, not wrapped.
        measure: What computes the norms; another one where the model is sharded.
        hooks: Silenced while public data pass.
        ranks: Processes that must find the same norms.
    """

    module: nn.Module
    measure: Measure = parameter_norms
    hooks: Hooks | None = None
    ranks: Ranks | None = None

    def __call__(
        self,
        names: Sequence[str],
        *,
        loader: Loader,
        gradient: Gradient,
        mini_set_size: int,
        count: int,
        seed: int,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> list[dict[str, float]]:
        """For each of up to ``count`` mini-sets, the norm of the gradient of every named parameter."""
        with self._silenced():
            measured = self.measure(
                self.module,
                names,
                loader=loader,
                gradient=gradient,
                mini_set_size=mini_set_size,
                count=count,
                seed=seed,
                frozen=frozen,
            )
        if self.ranks is None:
            return measured
        rows = self.ranks.agree_on_rows([[norms[name] for name in names] for norms in measured])
        return [dict(zip(names, row, strict=True)) for row in rows]

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        hooks = self.hooks
        if hooks is None or not getattr(hooks, "hooks_enabled", False):
            yield
            return
        hooks.disable_hooks()
        try:
            yield
        finally:
            hooks.enable_hooks()

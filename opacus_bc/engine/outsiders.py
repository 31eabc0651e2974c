"""Parameters of the model that the optimizer does not hold: nobody computes gradients of them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

_FROZEN: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by us, and not given back yet


class Outsiders:
    """Freezes what the optimizer does not hold, so that it costs no per-sample gradients.

    **Formal guarantee**: between construction and :meth:`remove` no raw private gradient is computed for a
    parameter that the optimizer does not move.

    **Edge cases**: a later ``make_private`` whose optimizer holds such a parameter gives it back at once.
    """

    def __init__(self, module: nn.Module, held: Iterable[nn.Parameter]) -> None:
        wanted = set(held)
        for p in wanted:
            _give_back(p)
        others = (p for p in module.parameters() if not is_lazy(p))
        self._params = [p for p in others if p.requires_grad and p not in wanted]
        for p in self._params:
            p.requires_grad_(False)
            _FROZEN[p] = True

    def remove(self) -> None:
        """Thaw what was frozen here and not given back since."""
        for p in self._params:
            _give_back(p)
        self._params = []


def _give_back(p: nn.Parameter) -> None:
    if p in _FROZEN:
        del _FROZEN[p]
        p.requires_grad_(True)

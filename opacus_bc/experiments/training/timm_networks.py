"""Networks of timm by name: ``timm:NAME``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

TIMM = "timm:"  # before the name of one of timm's networks


def timm_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of a network of timm, with random weights.

    Raises:
        ValueError: timm is not installed, or has no network of that name.
    """
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        message = f"model {name!r}: needs timm: pip install 'opacus-bc[experiments]'"
        raise ValueError(message) from error
    network = name.removeprefix(TIMM)
    if not timm.is_model(network):
        near = timm.list_models(f"*{network}*")[:3] or get_close_matches(network, timm.list_models(), n=3)
        hint = f"; near: {', '.join(TIMM + other for other in near)}" if near else ""
        raise ValueError(f"model {name!r}: timm {timm.__version__} has none of that name{hint}")

    def create(num_classes: int = 1000) -> nn.Module:
        created: nn.Module = timm.create_model(network, pretrained=False, num_classes=num_classes)
        return created

    return create

"""The paper's three networks, each with BatchNorm, with GroupNorm in its place, or without normalisation,
and a small one for quick answers.

=============  ==========================================  ==================  =================
name           what it is                                  input               with BatchNorm
=============  ==========================================  ==================  =================
``bn_lenet5``  LeNet-5 with a norm after each convolution  1 × 32 × 32         8 layers, 16 tensors
``convnet``    four convolution blocks, one linear layer   3 × ≥8 × ≥8         9 layers, 18 tensors
``resnet18``   ResNet-18 with the 3×3 stem for CIFAR       3 × ≥8 × ≥8         41 layers, 62 tensors
``smallnet``   two convolution blocks on a quarter size    1 × ≥16 × ≥16       5 layers, 10 tensors
=============  ==========================================  ==================  =================

"Layers" are modules with parameters, "tensors" their parameters. No operation works in place, so Opacus's
hooks apply. ``norm="group"`` puts in what Opacus's ``ModuleValidator.fix`` puts in.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from opacus_bc.experiments.training.tables import mlp
from opacus_bc.experiments.training.timm_networks import TIMM, timm_factory

Norm = Literal["batch", "group", "none"]
Activation = Literal["tanh", "relu"]
Order = Literal["conv-act-norm", "conv-norm-act"]

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({"tanh": nn.Tanh, "relu": nn.ReLU})


def _checked(what: str, value: str, choices: object) -> str:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{what}={value!r}: choose one of {', '.join(map(repr, allowed))}")
    return value


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(32, channels), channels)
    return nn.Identity()


def _block(
    stage: int, conv: nn.Conv2d, *, norm: Norm, activation: Activation, order: Order, pool: nn.Module | None
) -> list[tuple[str, nn.Module]]:
    """One row group of the paper's tables: convolution, activation and norm in the given order, pooling."""
    act = (f"act{stage}", _ACTIVATIONS[activation]())
    normalise = (f"norm{stage}", _norm(norm, conv.out_channels))
    middle = [act, normalise] if order == "conv-act-norm" else [normalise, act]
    return [(f"conv{stage}", conv), *middle, *([(f"pool{stage}", pool)] if pool is not None else [])]


def bn_lenet5(
    norm: Norm = "batch",
    *,
    activation: Activation = "tanh",
    order: Order = "conv-act-norm",
    in_channels: int = 1,
    num_classes: int = 10,
) -> nn.Module:
    """BN-LeNet-5: LeNet-5 with a norm after each of its three convolutions.

    The paper's table names the activation in the convolution's row and BatchNorm in the next one, hence the
    default ``order``; ``"conv-norm-act"`` is the other common reading of it.

    Args:
        norm: What stands in the place of BatchNorm.
        activation: The paper's is tanh.
        order: Whether the norm comes after or before the activation.
        in_channels: Channels of the images, which must be 32 × 32.
        num_classes: Number of outputs (logits: the softmax is in the loss).

    Example:
        >>> model = bn_lenet5()
        >>> sum(p.numel() for p in model.parameters())
        61990
    """
    _checked("norm", norm, Norm)
    _checked("activation", activation, Activation)
    _checked("order", order, Order)
    layers: list[tuple[str, nn.Module]] = []
    for stage, (fan_in, fan_out) in enumerate([(in_channels, 6), (6, 16), (16, 120)], start=1):
        pool = nn.AvgPool2d(2) if stage < 3 else None
        conv = nn.Conv2d(fan_in, fan_out, 5)
        layers += _block(stage, conv, norm=norm, activation=activation, order=order, pool=pool)
    layers += [("flatten", nn.Flatten()), ("fc1", nn.Linear(120, 84)), ("act4", _ACTIVATIONS[activation]())]
    layers += [("fc2", nn.Linear(84, num_classes))]
    return nn.Sequential(OrderedDict(layers))


def convnet(
    norm: Norm = "batch",
    *,
    activation: Activation = "relu",
    order: Order = "conv-act-norm",
    in_channels: int = 3,
    num_classes: int = 10,
) -> nn.Module:
    """The paper's convnet: four blocks of convolution, norm and average pooling, and one linear layer.

    Args:
        norm: What stands in the place of BatchNorm.
        activation: The paper's is ReLU.
        order: Whether the norm comes after or before the activation (see `bn_lenet5`).
        in_channels: Channels of the images, of any size from 8 × 8.
        num_classes: Number of outputs.
    """
    _checked("norm", norm, Norm)
    _checked("activation", activation, Activation)
    _checked("order", order, Order)
    layers: list[tuple[str, nn.Module]] = []
    for stage, (fan_in, fan_out) in enumerate([(in_channels, 32), (32, 64), (64, 64), (64, 128)], start=1):
        pool = nn.AvgPool2d(2) if stage < 4 else nn.AdaptiveAvgPool2d(1)
        conv = nn.Conv2d(fan_in, fan_out, 3, padding=1)
        layers += _block(stage, conv, norm=norm, activation=activation, order=order, pool=pool)
    layers += [("flatten", nn.Flatten()), ("fc", nn.Linear(128, num_classes))]
    return nn.Sequential(OrderedDict(layers))


def smallnet(norm: Norm = "batch", *, in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """Two small convolution blocks on images of a quarter of the size: seconds an epoch become tenths.

    Digits have 8 × 8 pixels of their own and come enlarged four times, so the first pooling loses nothing.

    Args:
        norm: What stands in the place of BatchNorm.
        in_channels: Channels of the images, of any size from 16 × 16.
        num_classes: Number of outputs.
    """
    _checked("norm", norm, Norm)
    layers: list[tuple[str, nn.Module]] = [("shrink", nn.AvgPool2d(4))]
    for stage, (fan_in, fan_out) in enumerate([(in_channels, 16), (16, 32)], start=1):
        conv = nn.Conv2d(fan_in, fan_out, 3, padding=1)
        pool = nn.MaxPool2d(2) if stage == 1 else nn.AdaptiveMaxPool2d(2)
        layers += _block(stage, conv, norm=norm, activation="relu", order="conv-norm-act", pool=pool)
    layers += [("flatten", nn.Flatten()), ("fc", nn.Linear(32 * 2 * 2, num_classes))]
    return nn.Sequential(OrderedDict(layers))


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, fan_out)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            convolution = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=convolution, norm=_norm(norm, fan_out)))
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        activated: Tensor = self.act2(out + self.shortcut(x))
        return activated


def resnet18(norm: Norm = "batch", *, in_channels: int = 3, num_classes: int = 10) -> nn.Module:
    """ResNet-18 with the stem for CIFAR: a 3×3 convolution of stride 1 and no max-pooling.

    Args:
        norm: What stands in the place of BatchNorm; with ``"none"`` the layers are left out as in the paper's
            comparison, and nothing takes their place.
        in_channels: Channels of the images, of any size from 8 × 8.
        num_classes: Number of outputs.
    """
    _checked("norm", norm, Norm)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)),
        ("norm1", _norm(norm, 64)),
        ("act1", nn.ReLU()),
    ]
    fan_in = 64
    for stage, fan_out in enumerate([64, 128, 256, 512], start=1):
        first = _BasicBlock(fan_in, fan_out, 1 if stage == 1 else 2, norm)
        layers += [(f"layer{stage}", nn.Sequential(first, _BasicBlock(fan_out, fan_out, 1, norm)))]
        fan_in = fan_out
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    layers += [("fc", nn.Linear(512, num_classes))]
    return nn.Sequential(OrderedDict(layers))


MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"bn_lenet5": bn_lenet5, "convnet": convnet, "resnet18": resnet18, "smallnet": smallnet}
)
# The norm before the activation, as the authors' public code has it; keys of kept results hash these names.
NORM_FIRST = "opacus_bc.experiments.reproduction.networks:"
_KEPT_NAMES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        NORM_FIRST + network.__name__: partial(network, order="conv-norm-act")
        for network in (bn_lenet5, convnet)
    }
)


def replace_batch_norm(model: nn.Module, norm: Norm) -> nn.Module:
    """Puts GroupNorm (as Opacus's ``ModuleValidator.fix``) or nothing in the place of every BatchNorm layer.

    Args:
        model: Changed, unless ``norm="batch"``.
        norm: What to put there.

    Returns:
        ``model``, or its replacement if it is itself a BatchNorm layer.
    """
    if norm == "batch":
        return model
    if isinstance(model, _BatchNorm):
        channels = model.num_features
        groups = nn.GroupNorm(math.gcd(32, channels), channels, affine=model.affine)
        put = groups if norm == "group" else nn.Identity()
        rest = list(model.children())  # timm's BatchNormAct2d holds dropout and activation
        return nn.Sequential(put, *rest) if rest else put
    for name, child in list(model.named_children()):
        setattr(model, name, replace_batch_norm(child, norm))
    return model


def find_factory(name: str) -> Callable[..., nn.Module]:
    """What ``"mlp"``, a name of `MODELS`, ``"timm:NAME"`` or ``"package.module:factory"`` stands for.

    Raises:
        ValueError: The name is unknown or cannot be imported.
    """
    named = {**MODELS, "mlp": mlp}
    own = named.get(name) or _KEPT_NAMES.get(name)
    if own is not None:
        return own
    known = ", ".join(named)
    if ":" not in name:
        raise ValueError(
            f"model {name!r}: not one of {known}, nor of the form 'package.module:factory' or 'timm:NAME'"
        )
    if name.startswith(TIMM):
        return timm_factory(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way it likes
        raise ValueError(f"model {name!r}: cannot import module {module_name!r} ({error})") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise ValueError(f"model {name!r}: module {module_name!r} has no {attribute!r}")
    if not callable(factory):
        raise ValueError(f"model {name!r}: {attribute!r} is a {type(factory).__name__}, not a callable")
    found: Callable[..., nn.Module] = factory
    return found


def build(
    model: str | Callable[..., nn.Module],
    *,
    norm: Norm = "batch",
    in_channels: int | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """Builds a model of the paper, or the user's own.

    Args:
        model: A name of `MODELS`, ``"package.module:factory"``, or the factory itself. A factory is called
            with those of ``norm``, ``in_channels`` and ``num_classes`` that its signature names; one that
            ends in ``**kwargs``, as torchvision's do, gets ``num_classes`` too.
        norm: Where the factory does not take it, BatchNorm layers are replaced in the model it returns.
        in_channels: Channels of the images; None leaves it to the factory.
        num_classes: Number of classes; None leaves it to the factory.

    Returns:
        The model.

    Raises:
        ValueError: The name is unknown, cannot be imported, or the factory does not return a module.

    Example:
        >>> type(build("bn_lenet5", norm="group").norm1).__name__
        'GroupNorm'
    """
    _checked("norm", norm, Norm)
    factory = find_factory(model) if isinstance(model, str) else model
    wanted: dict[str, object] = {"norm": norm, "in_channels": in_channels, "num_classes": num_classes}
    try:
        named = inspect.signature(factory).parameters
    except ValueError:  # some callables written in C have no signature
        named = MappingProxyType({})
    names = {*named, *(["num_classes"] if any(p.kind is p.VAR_KEYWORD for p in named.values()) else [])}
    built = factory(**{key: value for key, value in wanted.items() if key in names and value is not None})
    if not isinstance(built, nn.Module):
        raise ValueError(
            f"model {model!r}: the factory returned a {type(built).__name__}, not a torch module"
        )
    if "norm" not in named:
        built = replace_batch_norm(built, norm)
    return built

"""Batch size, step size and clip bound of every method, by data set.

They were set by hand, in short runs on the data sets themselves; on CIFAR-10 only the learning rates of
individual clipping and of mini-sets of 8 and 16 were, the rest is scaled from MNIST. ``--tune`` searches
around them with equal effort for every method. Momentum is 0.9 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from opacus_bc.experiments.training.methods import Method
from opacus_bc.experiments.training.tables import is_table


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method is trained with.

    Attributes:
        batch_size: Expected samples in a step.
        lr: Learning rate.
        clip: The clip bound C.
    """

    batch_size: int
    lr: float
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults for one data set.

    Attributes:
        model: A name for `opacus_bc.experiments.training.models.build`.
        epochs: Passes over the private data.
        settings: By method name; what is missing is looked up by family.
        private_size: Number of private images that the batch sizes were chosen for; batch sizes follow the
            square root of another number. None: they are the data set's own.
    """

    model: str
    epochs: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    private_size: int | None = None

    def setting(self, method: Method) -> Setting:
        """What ``method`` is trained with."""
        return self.settings.get(method.name) or self.settings[method.family]


_DIGITS = Preset(
    model="smallnet",
    epochs=10,
    settings={
        "plain": Setting(batch_size=32, lr=0.05),
        "individual": Setting(batch_size=256, lr=0.7, clip=1.0),
        "batch": Setting(batch_size=32, lr=0.003, clip=0.1),
        "zhang": Setting(batch_size=32, lr=0.0007, clip=0.1),
        "mini-sets": Setting(batch_size=672, lr=0.8, clip=0.1),
        "gbc-16": Setting(batch_size=672, lr=0.5, clip=0.1),
        "gbc-16-scale": Setting(batch_size=672, lr=0.5, clip=0.1),
    },
)
_MNIST = Preset(
    model="bn_lenet5",
    epochs=5,
    settings={
        "plain": Setting(batch_size=64, lr=0.02),
        "individual": Setting(batch_size=1024, lr=0.8, clip=1.0),
        "batch": Setting(batch_size=64, lr=0.001, clip=0.1),
        "zhang": Setting(batch_size=64, lr=0.0004, clip=0.1),
        "mini-sets": Setting(batch_size=2048, lr=0.25, clip=0.3),
        "gbc-4": Setting(batch_size=2048, lr=0.45, clip=0.3),
        "gbc-16": Setting(batch_size=2048, lr=0.17, clip=0.3),
        "user-ic": Setting(batch_size=200, lr=0.5, clip=0.5),
        "user-ic-32": Setting(batch_size=200, lr=0.5, clip=0.5),
        "user-gbc": Setting(batch_size=200, lr=0.5, clip=0.5),
        "user-gbc-32": Setting(batch_size=200, lr=0.5, clip=0.5),
        "user-fedavg": Setting(batch_size=200, lr=0.5, clip=0.5),
    },
)
_CIFAR10 = Preset(
    model="convnet",
    epochs=10,
    settings={
        "plain": Setting(batch_size=64, lr=0.02),
        "individual": Setting(batch_size=1024, lr=0.5, clip=1.0),
        "batch": Setting(batch_size=64, lr=0.002, clip=0.1),
        "zhang": Setting(batch_size=64, lr=0.0004, clip=1.0),
        "mini-sets": Setting(batch_size=2048, lr=0.45, clip=0.3),
        "gbc-16": Setting(batch_size=2048, lr=0.3, clip=0.3),
    },
)
_FOLDER = replace(_CIFAR10, private_size=45_000)
_TABLE = replace(_FOLDER, model="mlp")  # not searched
# Fine-tuning from weights in a file, whatever the data set.
_PRETRAINED = Preset(
    model="",
    epochs=3,
    private_size=45_000,
    settings={
        "plain": Setting(batch_size=64, lr=0.05),
        "probe": Setting(batch_size=64, lr=0.001),
        "probe-swap": Setting(batch_size=64, lr=0.001),
        "individual": Setting(batch_size=1000, lr=0.5, clip=1.0),
        "batch": Setting(batch_size=64, lr=0.003, clip=0.1),
        "mini-sets": Setting(batch_size=2000, lr=0.1, clip=0.3),
    },
)
_BY_NAME: Mapping[str, Preset] = {
    "digits": _DIGITS,
    "mnist": _MNIST,
    "fashion-mnist": _MNIST,
    "cifar10": _CIFAR10,
}
TRIALS = 3  # of `candidates`, for pretrained networks: three learning rates


def preset(dataset: str, *, pretrained: bool = False) -> Preset:
    """The defaults for a data set; a folder or table of the user's own gets those of CIFAR-10, scaled."""
    own = _TABLE if is_table(dataset) else _FOLDER
    return _PRETRAINED if pretrained else _BY_NAME.get(dataset, own)


def canonical(dataset: str) -> str:
    """The data set's name, or the full path of the user's folder or file: two never share results."""
    own = Path(dataset)
    return str(own.resolve()) if dataset not in _BY_NAME and own.exists() else dataset


def scaled(setting: Setting, chosen_for: int | None, private_size: int) -> Setting:
    """The setting with a batch size for another number of private samples: it follows the square root.

    Fewer images need larger sample rates, or the noise drowns every step; a constant batch size would end in
    steps over all images, which nothing amplifies.

    >>> scaled(Setting(batch_size=1024, lr=0.5), 45_000, 675).batch_size
    125
    """
    if chosen_for is None:
        return setting
    return replace(setting, batch_size=round(setting.batch_size * math.sqrt(private_size / chosen_for)))


def fitted(setting: Setting, method: Method, private_size: int) -> Setting:
    """The setting with a batch size that the data and the method's mini-sets allow.

    >>> from opacus_bc.experiments.training.methods import METHODS
    >>> fitted(Setting(batch_size=2048, lr=1.0), METHODS["gbc-8"], 1350).batch_size
    1344
    """
    size = min(setting.batch_size, method.users or private_size)
    if method.users:
        return Setting(batch_size=size, lr=setting.lr, clip=setting.clip)
    unit = method.mini_set or (1 if method.clipping == "flat" else 2)
    size = max(unit, size - size % unit)
    return Setting(batch_size=size, lr=setting.lr, clip=setting.clip)


def candidates(setting: Setting, method: Method) -> list[Setting]:
    """What ``--tune`` tries: the default, longer and shorter steps, larger and smaller bounds; always five.

    A bound moves at constant ``lr * clip``, the length of a fully clipped step, so that the two directions
    are searched separately. Without privacy there is no bound, and five step sizes are tried.

    >>> from opacus_bc.experiments.training.methods import METHODS
    >>> tried = candidates(Setting(batch_size=8, lr=1.0, clip=0.3), METHODS["bc"])
    >>> [(round(s.lr, 3), round(s.clip, 3)) for s in tried]
    [(1.0, 0.3), (3.0, 0.3), (0.333, 0.3), (0.333, 0.9), (3.0, 0.1)]
    """
    private = ((1, 1), (3, 1), (1 / 3, 1), (1 / 3, 3), (3, 1 / 3))
    plain = ((1, 1), (3, 1), (1 / 3, 1), (10, 1), (1 / 10, 1))
    return [
        Setting(batch_size=setting.batch_size, lr=setting.lr * step, clip=setting.clip * bound)
        for step, bound in (private if method.private else plain)
    ]

"""What a training run depends on: one frozen description, from which its name and its result follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from opacus_bc.experiments.training.methods import Method, Train
from opacus_bc.experiments.training.models import Norm
from opacus_bc.experiments.training.store import LATER

Reading = Literal["", "bounds of a public model", "noise once an epoch"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that a run's result depends on, besides the data.

    Attributes:
        method: What is clipped and what happens to BatchNorm.
        dataset: Name of the data set.
        model: A name for `opacus_bc.experiments.training.models.build`.
        epsilon: Budget for which the noise is calibrated; None with ``noise_multiplier``, and without
            privacy.
        noise_multiplier: Instead of a budget: the noise itself.
        delta: The delta of (epsilon, delta)-DP.
        epochs: Passes over the private data.
        batch_size: Expected samples in a step.
        lr: Learning rate.
        clip: The clip bound C.
        seed: Of weights, batches, noise and augmentation.
        optimizer: ``"sgd"`` (with ``momentum``) or ``"adam"``.
        momentum: Of SGD.
        weight_decay: Of the optimizer.
        lr_decay: Factor on the learning rate after each epoch.
        clip_decay: Factor on the clip bound after each epoch (Opacus's ``ExponentialGradClip``).
        augment: Whether the paper's random crops and flips are applied.
        norm: What stands in the place of the model's BatchNorm.
        limit: Training images that are used (public and private together); the test set shrinks with them.
        published: Trained as the paper's experiments are, which is not private: see
            `opacus_bc.experiments.reproduce.as_published`.
        lr_on_plateau: Whether the learning rate only decays after an epoch whose test accuracy did not rise.
        record_norms: Whether the layers' gradient norms on public data are kept for every epoch.
        content: Fingerprint of a user's own data or model; empty for those that this package knows by name.
        weights: Name of the file with the weights that training starts from; empty for random ones.
        image_size: Pixels to which images are enlarged for pretrained weights.
        train: Which parameters of a pretrained network move.
        train_from: Name of its first layer that does; what lies before is frozen. Empty: no such limit.
        trial: Whether this is a short run on public images alone, to choose settings by.
        channels_last: Whether the weights are laid out channels last, which is faster for convolutions.
        reading: Another way to understand the paper's description; see
            `opacus_bc.experiments.reproduce.as_published`. Empty: as printed.
    """

    method: Method
    dataset: str
    model: str
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float
    epochs: int
    batch_size: int
    lr: float
    clip: float
    seed: int
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    clip_decay: float = 1.0
    augment: bool = False
    norm: Norm = field(default="batch", metadata=LATER)
    limit: int | None = field(default=None, metadata=LATER)
    published: bool = field(default=False, metadata=LATER)
    lr_on_plateau: bool = field(default=False, metadata=LATER)
    record_norms: bool = field(default=False, metadata=LATER)
    content: str = field(default="", metadata=LATER)
    channels_last: bool = field(default=False, metadata=LATER)
    reading: Reading = field(default="", metadata=LATER)
    weights: str = field(default="", metadata=LATER)
    image_size: int | None = field(default=None, metadata=LATER)
    train: Train = field(default="all", metadata=LATER)
    train_from: str = field(default="", metadata=LATER)
    trial: bool = field(default=False, metadata=LATER)

    @property
    def unit(self) -> int:
        """Samples that are clipped together (of a user, at most)."""
        if self.method.users:
            return self.method.mini_set or 1
        return 1 if self.method.clipping == "flat" else self.method.mini_set or self.batch_size

    @property
    def vectors(self) -> int:
        """Vectors that a step clips; of users ``batch_size``."""
        return self.batch_size if self.method.users else self.batch_size // self.unit

    def __post_init__(self) -> None:
        given = (self.epsilon is not None) + (self.noise_multiplier is not None)
        if given != int(self.method.private):
            wanted = "exactly one of epsilon and noise_multiplier" if self.method.private else "neither"
            raise ValueError(
                f"method {self.method.name!r} takes {wanted}, got epsilon={self.epsilon!r} and "
                f"noise_multiplier={self.noise_multiplier!r}"
            )
        if self.published and self.noise_multiplier is None:
            raise ValueError("published=True has no budget: give noise_multiplier, and a method with noise")
        if self.reading and not self.published:
            raise ValueError(f"reading={self.reading!r} is not private: it goes with published=True")

"""What a comparison is about: images or a table, and the weights that networks start from; checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opacus_bc.accounting.events import check_count
from opacus_bc.experiments.compare import presets
from opacus_bc.experiments.training.data import EMBEDDED, NAMES, Source
from opacus_bc.experiments.training.methods import Train
from opacus_bc.experiments.training.tables import is_table
from opacus_bc.experiments.training.timm_networks import TIMM

IMAGE_SIZE = 96  # pixels, for pretrained networks


@dataclass(frozen=True, kw_only=True)
class Images:
    """Which images, or which table.

    Attributes:
        dataset: A name that this package knows, a folder, or a CSV file.
        data: Where the named data set's files are; None is the folder ``data``.
        download: Whether torchvision may download what is missing.
        public: Folder of public images that go with a folder of private ones.
        limit: Training images that are used, public ones included.
        target: The column of classes in a CSV file.
    """

    dataset: str
    data: Path | None = None
    download: bool = False
    public: Path | None = None
    limit: int | None = None
    target: str | None = None

    def check(self) -> None:
        """Raise a ValueError that names the option."""
        if self.limit is not None:
            check_count("--limit", self.limit, 10)
        own = is_table(self.dataset) or (self.dataset not in NAMES and Path(self.dataset).is_dir())
        if self.data is not None and (own or self.dataset == EMBEDDED):
            hint = "" if own else f"; to train on images of your own say --dataset {self.data}"
            raise ValueError(f"--data {self.data}: --dataset {self.dataset} reads nothing there{hint}")
        if is_table(self.dataset) and self.target is None:
            raise ValueError(f"--dataset {self.dataset}: name its column of classes: --target COLUMN")
        if self.target is not None and not is_table(self.dataset):
            raise ValueError(f"--target {self.target}: goes with a CSV file as --dataset")
        if self.public is not None and not self.public.is_dir():
            raise ValueError(f"--public {self.public}: no such folder")
        if self.public is not None and not Path(self.dataset).is_dir():
            raise ValueError(f"--public {self.public}: goes with a folder of images as --dataset")

    @property
    def name(self) -> str:
        """The data set in one word."""
        return Path(presets.canonical(self.dataset)).name


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Where networks start; without weights at random.

    Attributes:
        weights: File with a state dict.
        image_size: Pixels to which images are enlarged.
        train: Which parameters move.
        train_from: Name of the first layer of which any does.
    """

    weights: Path | None = None
    image_size: int | None = None
    train: Train = "all"
    train_from: str = ""

    def check(self, model: str | None) -> None:
        """Raise a ValueError that names the option: those of pretrained networks come together."""
        if self.weights is None:
            if model is not None and model.startswith(TIMM):
                raise ValueError(f"--model {model}: needs --weights FILE, the state dict to start from")
            given = {"--image-size": self.image_size, "--train-from": self.train_from or None}
            given["--train"] = self.train if self.train != "all" else None
            for option, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{option} {value}: goes with --weights FILE, a state dict to start from"
                    )
            return
        if model is None:
            raise ValueError(f"--weights {self.weights}: name the network that they fit: --model timm:NAME")
        if not self.weights.is_file():
            raise ValueError(f"--weights {self.weights}: no such file")
        if self.image_size is not None:
            check_count("--image-size", self.image_size, 8)


def make_source(images: Images, start: FineTuning, folder: Path) -> Source:
    """Where every cell's data come from.

    Args:
        images: Checked.
        start: Checked.
        folder: Of the results; features are kept beside them.
    """
    tuned = start.weights is not None
    return Source(
        dataset=presets.canonical(images.dataset),
        root=images.data or Path("data"),
        download=images.download,
        target=images.target or "",
        public=None if images.public is None else images.public.resolve(),
        image_size=start.image_size or IMAGE_SIZE if tuned else None,
        weights=start.weights,
        features=folder / "features" if tuned else None,
    )

"""Data sets in memory, cut into private, public and test part in one documented way.

The training set is permuted with a fixed seed; its first tenth is *public* (the paper's choice: 6,000 of
MNIST's 60,000 images) and the rest is *private*. Images are normalised with the constants that are written
below; those of digits, MNIST, Fashion-MNIST and CIFAR-10 are statistics of the whole data sets, as is usual
with benchmarks, and a folder of images gets 0.5 and 0.25. The number of classes is read off all labels. All
images come out as 32 × 32: MNIST and Fashion-MNIST get a border of two black pixels, digits are enlarged four
times, an image folder's pictures are resized. Columns of a table are standardised by its public rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from opacus_bc.experiments.training import readers as read
from opacus_bc.experiments.training.tables import is_table, standardisation, standardised, table

EMBEDDED = "digits"  # the only one that needs no files
NAMES = (EMBEDDED, "mnist", "fashion-mnist", "cifar10")


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """One data set, ready to train on.

    Attributes:
        name: The name it was asked for.
        private: What is to be protected: images or rows (float32, normalised) and labels (int64).
        public: Unprotected, disjoint from ``private``: for ALC and BatchNorm statistics.
        test: For the reported accuracy.
        num_classes: Number of classes.
        mean: The constants of the normalisation, by channel or column.
        std: The same.
        weights: File with the weights that networks start from, if any.
        features: Folder in which outputs of frozen networks are kept.
        public_apart: Whether the public images were brought by the user, and not cut off the training set.
        crop_padding: Padding of the random crop in the paper's augmentation, on top of the border that is
            already in the images (a crop of 32 × 32 after padding by 4, both for 28 × 28 and for 32 × 32).
    """

    name: str
    private: TensorDataset
    public: TensorDataset
    test: TensorDataset
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int
    weights: Path | None = None
    features: Path | None = None
    public_apart: bool = False

    @property
    def in_channels(self) -> int:
        """Number of channels of the images, or columns of the table."""
        return len(self.mean)

    @property
    def samples(self) -> str:
        """What one sample is called, in the plural."""
        return "images" if self.private.tensors[0].ndim > 2 else "rows"

    @property
    def black(self) -> Tensor:
        """What a black pixel is after normalisation, by channel; the ``fill`` of `augment`."""
        return -torch.tensor(self.mean) / torch.tensor(self.std)


def augment(
    images: Tensor,
    *,
    generator: torch.Generator,
    padding: int = 4,
    flip: bool = True,
    fill: Tensor | float = 0.0,
) -> Tensor:
    """Random crops after padding, and random horizontal flips, one draw for each image.

    Args:
        images: Batch of shape (B, channels, height, width); left as it is.
        generator: The only source of randomness.
        padding: Pixels added on each side before cropping back to the old size; 0 for no crop.
        flip: Whether each image is mirrored with probability 1/2.
        fill: Value of the padding, one number or one by channel.

    Returns:
        A batch of the same shape.

    Raises:
        ValueError: The shape or the padding makes no sense.
    """
    if images.ndim != 4 or padding < 0:
        raise ValueError(f"need images (B, C, H, W) and padding ≥ 0, got {tuple(images.shape)} and {padding}")
    count, channels, height, width = images.shape
    out = images
    if padding:
        base = torch.as_tensor(fill, dtype=images.dtype).reshape(-1, 1, 1).expand(channels, 1, 1)
        windows = F.pad(images - base, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        row, column = torch.randint(0, 2 * padding + 1, (2, count), generator=generator)
        out = windows[torch.arange(count), :, row, column] + base
    if flip:
        mirrored = torch.rand(count, generator=generator) < 0.5
        out = torch.where(mirrored[:, None, None, None], out.flip(3), out)
    return out


def deskew(images: Tensor) -> Tensor:
    """Shear every image upright by its own second moments (LeCun et al. 1998, section III).

    **Formal guarantee**: an image's result depends on that image alone, so it may be applied to private data
    before training at no cost in privacy.

    Args:
        images: Batch of shape (B, 1, size, size), background 0 and ink positive.
    """
    if images.ndim != 4 or images.shape[1] != 1 or images.shape[2] != images.shape[3]:
        raise ValueError(f"need square images (B, 1, size, size), got {tuple(images.shape)}")
    ink, size = images[:, 0], images.shape[2]
    place = torch.arange(size, dtype=images.dtype)
    mass = ink.sum((1, 2)).clamp_min(1e-6)
    down = place - ((ink.sum(2) * place).sum(1) / mass)[:, None]
    across = place - ((ink.sum(1) * place).sum(1) / mass)[:, None]
    tilt = torch.einsum("nyx,ny,nx->n", ink, down, across) / (ink.sum(2) * down**2).sum(1).clamp_min(1e-6)
    centre = -(2 * down[:, 0] - 1) / size - 1  # of mass, in the coordinates of grid_sample
    one, zero = torch.ones_like(tilt), torch.zeros_like(tilt)
    shear = torch.stack([one, tilt, -tilt * centre, zero, one, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(shear, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def load(
    name: str,
    root: str | Path = "data",
    *,
    public_fraction: float = 0.1,
    seed: int = 0,
    download: bool = False,
    image_size: int | None = None,
    public: Path | None = None,
    target: str = "",
) -> Data:
    """Loads a data set and cuts it into private, public and test part.

    Args:
        name: "digits" (inside scikit-learn, no files needed), "mnist", "fashion-mnist", "cifar10", or the
            path of an image folder: FOLDER/train/CLASS/*.png and FOLDER/test/CLASS/*.png, or
            FOLDER/CLASS/*.png, of which a sixth is then held out as the test set; or that of a CSV file (see
            `opacus_bc.experiments.training.tables`).
        root: Where the files are: MNIST/raw and FashionMNIST/raw as torchvision lays them out;
            ``cifar10.npz`` with x_train, y_train, x_test, y_test, or torchvision's cifar-10-batches-py.
        public_fraction: Share of the training set that becomes public.
        seed: Seed of the permutation behind the split; the split does not depend on anything else.
        download: Whether torchvision may download what is missing.
        image_size: For pretrained networks, which bring their own normalisation: images stay bytes, and those
            of a folder are read at this size.
        public: Folder of public images with the same classes; all training images are private then.
        target: The column of classes in a CSV file.

    Raises:
        ValueError: Unknown name, impossible fraction, or public images that do not go with the private ones.
        FileNotFoundError: Files are missing; the message says which, where and how to get them.
        ImportError: torchvision or scikit-learn is not installed.
    """
    if not 0 < public_fraction < 1:
        raise ValueError(f"public_fraction={public_fraction}: must lie strictly between 0 and 1")
    folder = Path(root)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if name == "digits":
        images, mean, std, crop = read.digits(seed), (0.3053,), (0.3761,), 4
    elif name == "mnist":
        images, mean, std, crop = read.torchvision("MNIST", folder, download), (0.1307,), (0.3081,), 2
    elif name == "fashion-mnist":
        images, mean, std, crop = read.torchvision("FashionMNIST", folder, download), (0.2860,), (0.3530,), 2
    elif name == "cifar10":
        images, crop = read.cifar10(folder, download), 4
        mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # the paper's
    elif is_table(name):
        images, mean, std, crop = table(Path(name), target, seed), (), (), 0
    elif Path(name).is_dir():
        images, mean, std, crop = read.image_folder(Path(name), seed, image_size), (0.5,) * 3, (0.25,) * 3, 4
    else:
        raise ValueError(
            f"dataset {name!r}: neither one of {', '.join(NAMES)} nor an existing folder of images nor a .csv"
        )
    train_x, train_y, test_x, test_y = images
    order = read.permutation(len(train_y), seed)
    if public is None:
        cut = round(len(train_y) * public_fraction)
        if not 0 < cut < len(train_y):
            raise ValueError(
                f"dataset {name!r}: {len(train_y)} training images cannot be cut at {public_fraction}"
            )
        public_x, public_y = train_x[order[:cut]], train_y[order[:cut]]
    else:
        cut = 0
        public_x, public_y = read.public_folder(public, Path(name), seed, image_size)
    if is_table(name):
        mean, std = standardisation(public_x)
    if image_size is not None:
        mean, std, crop = (0.0,) * len(mean), (1.0,) * len(mean), 0

    def part(x: Tensor, y: Tensor) -> TensorDataset:
        if image_size is not None:
            return TensorDataset((x * 255).round().to(torch.uint8), y)
        if is_table(name):
            return TensorDataset(standardised(x, mean, std), y)
        shape = (1, len(mean), 1, 1)
        return TensorDataset((x - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape), y)

    return Data(
        name=name,
        private=part(train_x[order[cut:]], train_y[order[cut:]]),
        public=part(public_x, public_y),
        test=part(test_x, test_y),
        num_classes=int(torch.cat([train_y, test_y]).max()) + 1,
        mean=mean,
        std=std,
        crop_padding=crop,
        public_apart=public is not None,
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from, and for pretrained networks their weights.

    Attributes:
        dataset: See `load`.
        root: Where its files are.
        download: Whether torchvision may download what is missing.
        public: Folder of public images; None cuts them off the training set.
        image_size: See `load`.
        target: See `load`.
        weights: File with the weights that networks start from.
        features: Folder in which outputs of frozen networks are kept.
    """

    dataset: str
    root: Path
    download: bool = False
    public: Path | None = None
    image_size: int | None = None
    weights: Path | None = None
    features: Path | None = None
    target: str = ""

    def load(self) -> Data:
        """The data set; read once in every process."""
        return _loaded(self)


@lru_cache(maxsize=1)
def _loaded(source: Source) -> Data:
    found = load(
        source.dataset,
        source.root,
        download=source.download,
        image_size=source.image_size,
        public=source.public,
        target=source.target,
    )
    return replace(found, weights=source.weights, features=source.features)


def limited(data: Data, limit: int | None) -> Data:
    """The same data set with at most ``limit`` training images, public and private together, and the same
    share of its test images; None leaves it whole.

    >>> small = limited(load("digits"), 300)
    >>> len(small.private), len(small.public), len(small.test)
    (270, 30, 59)
    """
    total = len(data.private) + len(data.public)
    if limit is None or limit >= total:
        return data
    public = max(1, round(limit * len(data.public) / total))

    def first(part: TensorDataset, count: int) -> TensorDataset:
        return TensorDataset(*(tensor[:count] for tensor in part.tensors))

    return replace(
        data,
        private=first(data.private, limit - public),
        public=first(data.public, public),
        test=first(data.test, max(1, round(limit * len(data.test) / total))),
    )

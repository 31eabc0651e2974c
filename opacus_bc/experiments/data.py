"""Data sets in memory, cut into private, public and test part in one documented way.

The training set is permuted with a fixed seed; its first tenth is *public* (the paper's choice: 6,000 of
MNIST's 60,000 images) and the rest is *private*. Images are normalised with the constants that are written
below; those of digits, MNIST, Fashion-MNIST and CIFAR-10 are statistics of the whole data sets, as is usual
with benchmarks, and a folder of images gets 0.5 and 0.25. The number of classes is read off all labels. All
images come out as 32 × 32: MNIST and Fashion-MNIST get a border of two black pixels, digits are enlarged four
times, an image folder's pictures are resized.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SIZE = 32
NAMES = ("digits", "mnist", "fashion-mnist", "cifar10")

_Images = tuple[Tensor, Tensor, Tensor, Tensor]  # train images in [0, 1], labels, test images, labels


@dataclass(frozen=True, kw_only=True)
class Data:
    """One data set, ready to train on.

    Attributes:
        name: The name it was asked for.
        private: What is to be protected: images (float32, normalised) and labels (int64).
        public: Unprotected, disjoint from ``private``: for ALC and BatchNorm statistics.
        test: For the reported accuracy.
        num_classes: Number of classes.
        mean: The constants of the normalisation, by channel.
        std: The same.
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

    @property
    def in_channels(self) -> int:
        """Number of channels of the images."""
        return len(self.mean)

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
) -> Data:
    """Loads a data set and cuts it into private, public and test part.

    Args:
        name: "digits" (inside scikit-learn, no files needed), "mnist", "fashion-mnist", "cifar10", or the
            path of an image folder: FOLDER/train/CLASS/*.png and FOLDER/test/CLASS/*.png, or
            FOLDER/CLASS/*.png, of which a sixth is then held out as the test set.
        root: Where the files are: MNIST/raw and FashionMNIST/raw as torchvision lays them out;
            ``cifar10.npz`` with x_train, y_train, x_test, y_test, or torchvision's cifar-10-batches-py.
        public_fraction: Share of the training set that becomes public.
        seed: Seed of the permutation behind the split; the split does not depend on anything else.
        download: Whether torchvision may download what is missing.

    Raises:
        ValueError: Unknown name or impossible fraction.
        FileNotFoundError: Files are missing; the message says which, where and how to get them.
        ImportError: torchvision or scikit-learn is not installed.
    """
    if not 0 < public_fraction < 1:
        raise ValueError(f"public_fraction={public_fraction}: must lie strictly between 0 and 1")
    folder = Path(root)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if name == "digits":
        images, mean, std, crop = _digits(seed), (0.3053,), (0.3761,), 4
    elif name == "mnist":
        images, mean, std, crop = _torchvision("MNIST", folder, download), (0.1307,), (0.3081,), 2
    elif name == "fashion-mnist":
        images, mean, std, crop = _torchvision("FashionMNIST", folder, download), (0.2860,), (0.3530,), 2
    elif name == "cifar10":
        images, crop = _cifar10(folder, download), 4
        mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # the paper's
    elif Path(name).is_dir():
        images, mean, std, crop = _image_folder(Path(name), seed), (0.5,) * 3, (0.25,) * 3, 4
    else:
        raise ValueError(
            f"dataset {name!r}: neither one of {', '.join(NAMES)} nor an existing folder of images"
        )
    train_x, train_y, test_x, test_y = images
    order = _permutation(len(train_y), seed)
    cut = round(len(train_y) * public_fraction)
    if not 0 < cut < len(train_y):
        raise ValueError(
            f"dataset {name!r}: {len(train_y)} training images cannot be cut at {public_fraction}"
        )

    def normalised(x: Tensor, y: Tensor) -> TensorDataset:
        shape = (1, len(mean), 1, 1)
        return TensorDataset((x - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape), y)

    return Data(
        name=name,
        private=normalised(train_x[order[cut:]], train_y[order[cut:]]),
        public=normalised(train_x[order[:cut]], train_y[order[:cut]]),
        test=normalised(test_x, test_y),
        num_classes=int(torch.cat([train_y, test_y]).max()) + 1,
        mean=mean,
        std=std,
        crop_padding=crop,
    )


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


def _permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f'{what} needs {module}: pip install "opacus-bc[experiments]" ({error})'
        raise ImportError(message) from error


def _digits(seed: int) -> _Images:
    """1,797 handwritten digits of 8 × 8 pixels: 1,500 to train with, 297 to test."""
    bunch = _import("sklearn.datasets", "dataset 'digits'").load_digits()
    small = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32))[:, None] / 16
    x = small.repeat_interleave(SIZE // 8, dim=2).repeat_interleave(SIZE // 8, dim=3)
    y = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    order = _permutation(len(y), seed)
    train, test = order[:1500], order[1500:]
    return x[train], y[train], x[test], y[test]


def _torchvision(kind: str, root: Path, download: bool) -> _Images:
    """A set of torchvision's; greyscale images get a black border up to 32 × 32."""
    factory: Callable[..., Any] = getattr(_import("torchvision.datasets", f"dataset {kind}"), kind)
    try:
        parts = [factory(str(root), train=train, download=download) for train in (True, False)]
    except (RuntimeError, OSError) as error:  # "Dataset not found", or a download that failed
        raise _missing(kind, root, f"{kind}/raw/*-ubyte", str(error).splitlines()[0]) from error
    images: list[Tensor] = []
    for part in parts:
        pixels = _pixels(part.data[:, None] if part.data.ndim == 3 else part.data.transpose(0, 3, 1, 2))
        border = (SIZE - pixels.shape[-1]) // 2
        images += [F.pad(pixels, (border,) * 4), torch.as_tensor(part.targets, dtype=torch.int64)]
    return images[0], images[1], images[2], images[3]


def _cifar10(root: Path, download: bool) -> _Images:
    path = root / "cifar10.npz"
    if not path.exists():
        try:
            return _torchvision("CIFAR10", root, download)
        except FileNotFoundError as error:
            reason = str(error.__cause__).splitlines()[0]
            raise _missing("CIFAR10", root, "cifar10.npz or cifar-10-batches-py", reason) from error
    images: list[Tensor] = []
    with np.load(path) as archive:
        for part in ("train", "test"):
            if f"x_{part}" not in archive or f"y_{part}" not in archive:
                raise ValueError(f"{path}: has {archive.files}, needs x_train, y_train, x_test and y_test")
            images.append(_pixels(archive[f"x_{part}"].transpose(0, 3, 1, 2)))
            images.append(torch.from_numpy(archive[f"y_{part}"].astype(np.int64).reshape(-1)))
    return images[0], images[1], images[2], images[3]


def _image_folder(root: Path, seed: int) -> _Images:
    """Pictures in one folder for each class, as RGB of 32 × 32."""
    datasets = _import("torchvision.datasets", "an image folder")

    def read(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
        try:
            found = datasets.ImageFolder(str(folder))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder}: needs one subfolder of images for each class ({error})"
            ) from error
        pixels = [np.array(image.convert("RGB").resize((SIZE, SIZE))) for image, _ in found]
        return _pixels(np.stack(pixels).transpose(0, 3, 1, 2)), torch.tensor(found.targets), found.classes

    if (root / "train").is_dir() and (root / "test").is_dir():
        train_x, train_y, train_classes = read(root / "train")
        test_x, test_y, test_classes = read(root / "test")
        if train_classes != test_classes:
            raise ValueError(f"{root}: train has the classes {train_classes}, test has {test_classes}")
        return train_x, train_y, test_x, test_y
    x, y, _ = read(root)
    order = _permutation(len(y), seed)
    train, test = order[len(y) // 6 :], order[: len(y) // 6]
    return x[train], y[train], x[test], y[test]


def _pixels(raw: Any) -> Tensor:
    """Bytes to numbers between 0 and 1."""
    return torch.as_tensor(np.ascontiguousarray(raw)).to(torch.float32) / 255


def _missing(what: str, root: Path, files: str, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{what} is not in {root.resolve()} ({reason}); expected {files}. Put the files there, name another "
        "folder, or let torchvision download them (download=True; on the command line --download)"
    )

"""Reads the data sets' files: images of 32 × 32 with entries in [0, 1], and their labels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 32

Images = tuple[Tensor, Tensor, Tensor, Tensor]  # train images in [0, 1], labels, test images, labels


def permutation(count: int, seed: int) -> Tensor:
    """A fixed order of ``count`` images."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f'{what} needs {module}: pip install "opacus-bc[experiments]" ({error})'
        raise ImportError(message) from error


def digits(seed: int) -> Images:
    """1,797 handwritten digits of 8 × 8 pixels: 1,500 to train with, 297 to test."""
    bunch = _import("sklearn.datasets", "dataset 'digits'").load_digits()
    small = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32))[:, None] / 16
    x = small.repeat_interleave(SIZE // 8, dim=2).repeat_interleave(SIZE // 8, dim=3)
    y = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    order = permutation(len(y), seed)
    train, test = order[:1500], order[1500:]
    return x[train], y[train], x[test], y[test]


def torchvision(kind: str, root: Path, download: bool) -> Images:
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


def cifar10(root: Path, download: bool) -> Images:
    """CIFAR-10, from ``cifar10.npz`` or from torchvision's files."""
    path = root / "cifar10.npz"
    if not path.exists():
        try:
            return torchvision("CIFAR10", root, download)
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


def _folder(folder: Path, size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Images, labels and names of classes."""
    datasets = _import("torchvision.datasets", "an image folder")
    try:
        found = datasets.ImageFolder(str(folder))
    except FileNotFoundError as error:
        message = f"{folder}: needs one subfolder of images for each class ({error})"
        raise FileNotFoundError(message) from error
    pixels = [np.array(image.convert("RGB").resize((size, size))) for image, _ in found]
    return _pixels(np.stack(pixels).transpose(0, 3, 1, 2)), torch.tensor(found.targets), found.classes


def public_folder(folder: Path, private: Path, seed: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Public pictures in one folder for each class of the private ones, in a random order.

    Raises:
        ValueError: The private data are no folder, or have other classes.
    """
    if not private.is_dir():
        raise ValueError(f"--public {folder}: goes with a folder of private images, not with {private}")
    x, y, classes = _folder(folder, size or SIZE)
    inside = private / "train" if (private / "train").is_dir() else private
    expected = sorted(entry.name for entry in inside.iterdir() if entry.is_dir())
    if classes != expected:
        raise ValueError(f"--public {folder}: has the classes {classes}, the private images {expected}")
    order = permutation(len(y), seed)
    return x[order], y[order]


def image_folder(root: Path, seed: int, size: int | None = None) -> Images:
    """Pictures in one folder for each class, as RGB of ``size`` (32) pixels a side."""

    def read(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
        return _folder(folder, size or SIZE)

    if (root / "train").is_dir() and (root / "test").is_dir():
        train_x, train_y, train_classes = read(root / "train")
        test_x, test_y, test_classes = read(root / "test")
        if train_classes != test_classes:
            raise ValueError(f"{root}: train has the classes {train_classes}, test has {test_classes}")
        order = permutation(len(test_y), seed)  # folders come class by class; a part must hold all of them
        return train_x, train_y, test_x[order], test_y[order]
    x, y, _ = read(root)
    order = permutation(len(y), seed)
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

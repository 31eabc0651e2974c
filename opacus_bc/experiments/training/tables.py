"""Tables: a CSV file with numbers and a column of classes, and the small network that learns from it.

A sixth of the rows, drawn at random, is held out as the test set; of the rest a tenth is public and the rest
private, as for images. Columns are standardised with mean and standard deviation of the **public** rows.
"""

from __future__ import annotations

import csv
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from opacus_bc.experiments.training.readers import Images, permutation

LEAST_ROWS = 100
ROWS_OF_A_CLASS = 10  # on average; fewer, and the column is no class but a number, a name or a date
FARTHEST = 10.0  # standard deviations: what lies beyond is moved there
_NOTHING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


def is_table(dataset: str) -> bool:
    """Whether a data set is meant as a CSV file; whether there is one is for `table` to say."""
    return dataset.lower().endswith(".csv")


def table(path: Path, target: str, seed: int) -> Images:
    """Numbers and classes of a CSV file with names of columns in its first line, cut into train and test.

    Classes are the values of ``target``, numbered in the order of the alphabet.

    Args:
        path: The file, with commas, in UTF-8.
        target: Name of the column that is to be predicted; all others are inputs.
        seed: Of the permutation behind the cut.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file cannot be used; the message says which column or line, and shows no value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--dataset {path}: no such file")
    head, rows = _lines(path)
    if target not in head:
        raise ValueError(f"--target {target}: {path} has no such column; it has {', '.join(head)}")
    if len(rows) < LEAST_ROWS:
        raise ValueError(f"--dataset {path}: {len(rows)} rows are too few; at least {LEAST_ROWS} are needed")
    place = head.index(target)
    names = [row[place].strip() for _, row in rows]
    classes = sorted(set(names))
    most = len(rows) // ROWS_OF_A_CLASS
    if not 2 <= len(classes) <= most:
        found = "one value only" if len(classes) < 2 else f"more than {most} different values"
        raise ValueError(
            f"--target {target}: {found} in {len(rows)} rows; methods are compared on at least 2 classes of "
            f"{ROWS_OF_A_CLASS} rows or more on average"
        )
    if any(name.lower() in _NOTHING for name in classes):
        line = next(line for line, row in rows if row[place].strip().lower() in _NOTHING)
        raise ValueError(f"--target {target}: line {line} of {path} has no value; leave such rows out")
    inputs = [i for i in range(len(head)) if i != place]
    if not inputs:
        raise ValueError(f"--dataset {path}: has no column beside {target}")
    x = torch.tensor(
        [[_number(row[i], head[i], path, line) for i in inputs] for line, row in rows],
        dtype=torch.float64,
    )
    y = torch.tensor([classes.index(name) for name in names])
    order = permutation(len(y), seed)
    test, train = order[: len(y) // 6], order[len(y) // 6 :]
    return x[train], y[train], x[test], y[test]


def _lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Names of columns, and rows of as many entries with their line's number; empty lines are left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, line) for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"--dataset {path}: cannot be read as CSV: {reason}") from error
    if not lines:
        raise ValueError(f"--dataset {path}: is empty; the first line must name the columns")
    head = [name.strip() for name in lines[0][1]]
    if len(set(head)) < len(head):
        twice = next(name for name in head if head.count(name) > 1)
        raise ValueError(f"--dataset {path}: two columns are called {twice!r}")
    for number, line in lines[1:]:
        if len(line) != len(head):
            raise ValueError(
                f"--dataset {path}: line {number} has {len(line)} entries, the first line {len(head)}"
            )
    return head, lines[1:]


def _number(text: str, column: str, path: Path, line: int) -> float:
    """An entry as a number. Messages name its place and not its value, which may be somebody's."""
    where = f"--dataset {path}: column {column!r}, line {line}"
    if text.strip().lower() in _NOTHING:
        raise ValueError(f"{where}: the value is missing; fill it in, or leave the row or the column out")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where}: not a number; encode the column as numbers, or leave it out") from None
    if not math.isfinite(value):
        raise ValueError(f"{where}: not a finite number")
    return value


def standardisation(public: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every column over public rows; a constant column gets 1.

    **Formal guarantee**: the constants depend on no private row.
    """
    deviation = public.std(dim=0, unbiased=False)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return tuple(public.mean(dim=0).tolist()), tuple(deviation.tolist())


def standardised(rows: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Every row by constants, at most `FARTHEST` from 0: a row's result depends on that row alone."""
    centred = rows.double() - torch.tensor(mean, dtype=torch.float64)
    return (centred / torch.tensor(std, dtype=torch.float64)).clamp(-FARTHEST, FARTHEST).float()


def mlp(*, in_channels: int = 30, num_classes: int = 2) -> nn.Module:
    """Two hidden layers of 64 with BatchNorm, for tables.

    Args:
        in_channels: Number of columns.
        num_classes: Number of outputs.
    """
    layers: list[tuple[str, nn.Module]] = []
    for stage, width in enumerate((in_channels, 64), start=1):
        layers += [(f"fc{stage}", nn.Linear(width, 64)), (f"norm{stage}", nn.BatchNorm1d(64))]
        layers += [(f"act{stage}", nn.ReLU())]
    return nn.Sequential(OrderedDict([*layers, ("fc3", nn.Linear(64, num_classes))]))

"""Tables: what is read, what is refused without showing a value, and whose rows the constants come from."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from opacus_bc.experiments.training.data import Data, load
from opacus_bc.experiments.training.models import build
from opacus_bc.experiments.training.tables import FARTHEST, LEAST_ROWS

HEAD = ["height", "label", "weight"]


def rows(count: int = 120) -> list[list[str]]:
    generator = torch.Generator().manual_seed(0)
    heights, weights = torch.randn(2, count, generator=generator).tolist()
    return [
        [f"{170 + 9 * heights[i]:.3f}", "sick" if i % 3 else "well", f"{weights[i]:.4f}"]
        for i in range(count)
    ]


def write(path: Path, lines: list[list[str]], head: list[str] = HEAD) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *lines])
    return path


def read(path: Path, target: str = "label") -> Data:
    return load(str(path), target=target)


def test_a_sixth_is_for_the_test_and_a_tenth_of_the_rest_is_public(tmp_path: Path) -> None:
    data = read(write(tmp_path / "people.csv", rows()))
    assert (len(data.private), len(data.public), len(data.test)) == (90, 10, 20)
    assert (data.in_channels, data.num_classes, data.samples) == (2, 2, "rows")
    parts = [part.tensors[0] for part in (data.private, data.public, data.test)]
    back = torch.cat(parts) * torch.tensor(data.std) + torch.tensor(data.mean)
    written = torch.tensor([[float(row[0]), float(row[2])] for row in rows()])
    assert torch.allclose(back.sort(dim=0).values, written.sort(dim=0).values, atol=1e-3), "no row is lost"
    labels = torch.cat([part.tensors[1] for part in (data.private, data.public, data.test)])
    assert labels.sum() == 40, "sick is 0 and well is 1, as in the alphabet"


def test_the_constants_of_the_standardisation_come_from_public_rows_alone(tmp_path: Path) -> None:
    lines = rows()
    before = read(write(tmp_path / "people.csv", lines))
    public = before.public.tensors[0]
    assert torch.allclose(public.mean(dim=0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(public.std(dim=0, unbiased=False), torch.ones(2), atol=1e-5)
    heights = {f"{value:.3f}" for value in (public[:, 0] * before.std[0] + before.mean[0]).tolist()}
    changed = [row if row[0] in heights else ["1e6", row[1], "-1e6"] for row in lines]
    assert sum(row[0] == "1e6" for row in changed) == 110
    after = read(write(tmp_path / "other.csv", changed))
    assert (after.mean, after.std) == (before.mean, before.std)
    assert torch.equal(after.public.tensors[0], public)
    assert set(after.private.tensors[0].flatten().tolist()) == {FARTHEST, -FARTHEST}


def test_a_column_that_is_constant_among_public_rows_stays_finite(tmp_path: Path) -> None:
    data = read(write(tmp_path / "people.csv", [["3", *row[1:]] for row in rows()]))
    assert data.std[0] == 1
    assert torch.equal(data.private.tensors[0][:, 0], torch.zeros(90))


def with_change(line: int, column: int, value: str) -> list[list[str]]:
    lines = rows()
    lines[line][column] = value
    return lines


@pytest.mark.parametrize(
    ("lines", "target", "words"),
    [
        (rows(), "lable", "--target lable: .* has no such column; it has height, label, weight"),
        (rows(LEAST_ROWS - 1), "label", "99 rows are too few; at least 100 are needed"),
        (with_change(5, 0, "secret"), "label", "column 'height', line 7: not a number; encode the column"),
        (with_change(5, 2, ""), "label", "column 'weight', line 7: the value is missing; fill it in"),
        (with_change(5, 2, "NaN"), "label", "column 'weight', line 7: the value is missing; fill it in"),
        (with_change(5, 2, "inf"), "label", "column 'weight', line 7: not a finite number"),
        (with_change(5, 1, " "), "label", "--target label: line 7 of .* has no value"),
        ([row[:1] if i == 3 else row for i, row in enumerate(rows())], "label", "line 5 has 1 entries"),
        (
            rows(),
            "weight",
            "--target weight: more than 12 different values in 120 rows; .* at least 2 classes of 10",
        ),
        ([[row[0], "same", row[2]] for row in rows()], "label", "one value only in 120 rows"),
    ],
)
def test_what_cannot_be_used_is_told_by_its_place_and_without_its_value(
    lines: list[list[str]], target: str, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "people.csv", lines)
    with pytest.raises(ValueError, match=words) as caught:
        read(path, target)
    assert "secret" not in str(caught.value)
    assert not re.search(r"\d\.\d", str(caught.value).replace(str(path), ""))


def test_files_that_are_no_tables_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(tmp_path / "nowhere.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="is empty; the first line must name the columns"):
        read(tmp_path / "empty.csv")
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read as CSV: it is not UTF-8"):
        read(tmp_path / "image.csv")
    with pytest.raises(ValueError, match="two columns are called 'a'"):
        read(write(tmp_path / "twice.csv", rows(), ["a", "label", "a"]))
    alone = [[row[1]] for row in rows()]
    with pytest.raises(ValueError, match="has no column beside label"):
        read(write(tmp_path / "alone.csv", alone, ["label"]))


def test_empty_lines_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", rows())
    expected = read(path)
    path.write_text("\ufeff" + path.read_text().replace("\n", "\n\n"))
    assert torch.equal(read(path).private.tensors[0], expected.private.tensors[0])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], "x,sick,1", *lines[10:]]))
    with pytest.raises(ValueError, match="line 11: not a number"):
        read(path)


def test_the_default_network_for_tables_has_batch_norm() -> None:
    model = build("mlp", in_channels=7, num_classes=3)
    assert model(torch.zeros(4, 7)).shape == (4, 3)
    assert sum(isinstance(module, nn.BatchNorm1d) for module in model.modules()) == 2
    replaced = build("mlp", in_channels=7, num_classes=3, norm="group")
    assert sum(isinstance(module, nn.GroupNorm) for module in replaced.modules()) == 2

"""The command on a pretrained network and folders of images: options, report, and what is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from opacus_bc import cli
from opacus_bc.experiments.compare import command, presets
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import load
from opacus_bc.experiments.training.methods import METHODS
from opacus_bc.experiments.training.store import key

ROWS = ("stock-head", "ic-frozen")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "compare"
CELLS = sorted(RESULTS.glob("pretrained-*/cells/*.json"))


def pictures(folder: Path, count: int, seed: int, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    """Noise around a level that tells the class."""
    generator = torch.Generator().manual_seed(seed)
    for place, label in enumerate(classes):
        (folder / label).mkdir(parents=True)
        for i in range(count):
            noise = torch.randint(0, 60, (24, 20, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray((noise + 90 * place).numpy()).save(folder / label / f"{i}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private and public pictures, and weights."""
    root = tmp_path_factory.mktemp("fine-tuning")
    pictures(root / "pets" / "train", 20, 0)
    pictures(root / "pets" / "test", 8, 1)
    pictures(root / "public", 15, 2)
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet")
    model(torch.randn(8, 3, 32, 32))  # frozen statistics should not be those of initialisation
    torch.save(model.state_dict(), root / "w.pth")
    return root


def arguments(place: Path, *more: str, out: str = "out") -> list[str]:
    words = ["compare", "--dataset", str(place / "pets"), "--out", str(place / out), "--jobs", "1"]
    words += ["--model", "timm:test_efficientnet", "--weights", str(place / "w.pth"), "--image-size", "32"]
    words += ["--train", "norm+head", "--train-from", "blocks.3", "--seeds", "1", "--epochs", "1"]
    return [*words, "--no-costs", "--json", *more]


def test_a_pretrained_network_is_compared_on_private_and_public_folders_and_nothing_is_done_twice(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = arguments(place, "--public", str(place / "public"), "--tune", "--methods", *ROWS)
    assert cli.main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in printed["rows"]] == ["no-dp", *ROWS]
    assert printed["facts"]["private_size"] == 40
    assert printed["facts"]["public_size"] == 30
    assert "trained: norm+head from blocks.3 on" in printed["facts"]["start"]
    assert "--public public" in printed["facts"]["command"]
    report = (place / "out" / "report.md").read_text()
    assert "The public images are a folder of their own" in report
    assert "on public images alone" in " ".join(report.split())
    cells = [json.loads(path.read_text())["cell"] for path in (place / "out" / "cells").glob("*.json")]
    trials = [cell for cell in cells if cell["trial"]]
    assert len(trials) == presets.TRIALS * len(ROWS)
    assert {cell["epsilon"] for cell in trials} == {None}
    assert len(list((place / "out" / "features").glob("*.pt"))) == 2  # at the cut, and before the head

    monkeypatch.setattr(command, "train", None)  # a second run has nothing to train
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == printed["rows"]


def test_other_weights_get_cells_and_features_of_their_own(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    other = place / "later" / "w.pth"
    other.parent.mkdir()
    assert cli.main(arguments(place, "--methods", "stock-head", out="two")) == 0
    torch.save(timm.create_model("test_efficientnet").state_dict(), other)
    words = arguments(place, "--methods", "stock-head", out="two")
    words[words.index("--weights") + 1] = str(other)
    assert cli.main(words) == 0
    capsys.readouterr()
    assert len(list((place / "two" / "cells").glob("*.json"))) == 4
    assert len(list((place / "two" / "features").glob("*.pt"))) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "timm:resnet18"], "needs --weights FILE"),
        (["--train", "head"], "--train head: goes with --weights FILE"),
        (["--image-size", "96"], "--image-size 96: goes with --weights FILE"),
        (["--weights", "nowhere.pth"], "--weights nowhere.pth: name the network"),
        (["--weights", "nowhere.pth", "--model", "timm:resnet18"], "no such file"),
        (["--model", "timm:resnet99"], "timm:resnet99: needs --weights FILE"),
        (["--public", "nowhere"], "--public nowhere: no such folder"),
        (["--public", "."], "goes with a folder of images as --dataset"),
        (["--limit", "3"], "--limit"),
        (["--methods", "ic-frozen"], "--methods ic-frozen: goes with --weights FILE"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_any_work(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["compare", *words, "--out", str(tmp_path / "never")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--train-from", "block3", "--train-from block3: timm:test_efficientnet has no such layer; near: "),
        ("--weights", "resnet.pth", "resnet.pth: does not fit timm:test_efficientnet: Error(s)"),
        ("--weights", "list.pth", "list.pth: not a state dict of tensors (list)"),
        ("--weights", "text.pth", "text.pth: not a state dict of tensors ("),
        ("--model", "timm:testefficientnet", "near: timm:test_efficientnet"),
        ("--data", "pets", "--data pets: --dataset "),
    ],
)
def test_a_wrong_start_is_told_once_before_any_training(
    place: Path, option: str, value: str, said: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_resnet").state_dict(), "resnet.pth")
    torch.save([torch.zeros(1)], "list.pth")
    Path("text.pth").write_text("no weights")
    assert cli.main(arguments(place, option, value, out="never")) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not (place / "never").exists()


@pytest.mark.parametrize("train", ["head", "norm+head"])
def test_public_pictures_that_are_the_private_ones_are_refused_whoever_looks_at_them(
    place: Path, train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    same = str(place / "pets" / "train")
    words = arguments(place, "--public", same, "--train", train, "--methods", "ic", out="never")
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert f"--public {same}: 40 of 40 of its images that were looked at are private ones of" in error
    assert "leave --public out" in error
    assert "make_private" not in error
    assert not (place / "never").exists()


def test_public_pictures_of_other_classes_are_refused(place: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "birds", 2, 0, classes=("bird", "dog"))
    with pytest.raises(ValueError, match=r"has the classes \['bird', 'dog'\], the private images"):
        load(str(place / "pets"), public=tmp_path / "birds")


def test_with_public_pictures_of_the_users_own_every_training_image_is_private(place: Path) -> None:
    apart = load(str(place / "pets"), public=place / "public", image_size=24)
    assert (len(apart.private), len(apart.public), apart.public_apart) == (40, 30, True)
    assert apart.private.tensors[0].dtype is torch.uint8
    assert apart.private.tensors[0].shape[1:] == (3, 24, 24)
    cut = load(str(place / "pets"))
    assert (len(cut.private), len(cut.public), cut.public_apart) == (36, 4, False)


def test_batch_sizes_follow_the_number_of_images_so_that_a_small_folder_is_not_one_batch() -> None:
    preset = presets.preset("some/folder")
    for name in ("ic", "gbc-8"):
        setting = preset.setting(METHODS[name])
        small = presets.scaled(setting, preset.private_size, 675).batch_size
        assert small / 675 < 0.4
        assert presets.scaled(setting, preset.private_size, 45_000) == setting
    assert presets.preset("mnist").private_size is None


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("pretrained-*/cells/*.json")), ids=lambda path: path.stem
)
def test_a_committed_cell_is_kept_under_the_name_that_the_command_looks_for(path: Path) -> None:
    kept = json.loads(path.read_text())["cell"]
    method = METHODS[kept["method"]["name"]]
    assert asdict(method) == kept["method"]
    assert key(Cell(**{**kept, "method": method})) == path.stem

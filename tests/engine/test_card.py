"""Model cards: the hub's own parser reads them, and they replace nothing unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import blobs, engine, mlp
from torch import optim
from torch.utils.data import DataLoader

from opacus_bc import UnprotectedStatisticsError
from opacus_bc.engine.card import model_card, write_card


def private(**kwargs: Any) -> Any:
    made, model = engine(), mlp(norm="batch_norm" in kwargs)
    made.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(64), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        **kwargs,
    )
    return made


def test_the_hub_reads_the_card(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="timm, in the extra [experiments], brings it")
    made = private()
    given = {"license": "mit", "language": ["en", "no"], "model_name": 'a: "b" #c', "tags": ["digits"]}
    path = made.save_model_card(tmp_path, 1e-5, title="Digits", metadata=given)
    assert path == tmp_path / "README.md"
    card = hub.ModelCard.load(path)
    assert card.data.to_dict() == {**given, "tags": ["differential-privacy", "opacus-bc", "digits"]}
    assert card.text.strip().startswith("# Digits\n\n## Privacy statement\n\n| | |\n|---|---|\n| Guarantee |")
    assert made.statement(1e-5, format="markdown") in card.text


def test_an_existing_card_stays_unless_told(tmp_path: Path) -> None:
    made, path = private(), tmp_path / "card.md"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        made.save_model_card(path, 1e-5)
    assert path.read_text() == "mine"
    assert made.save_model_card(path, 1e-5, overwrite=True) == path
    assert path.read_text().startswith("---\n")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("folder", "folder/README.md"),
        ("folder/", "folder/README.md"),
        ("deep/er/model-1.0", "deep/er/model-1.0/README.md"),
        ("deep/README.md", "deep/README.md"),
        ("card.md", "card.md"),
    ],
)
def test_folders_of_a_card_are_made(tmp_path: Path, given: str, written: str) -> None:
    path = write_card(f"{tmp_path}/{given}", "a card", overwrite=False)
    assert path == tmp_path / written
    assert path.read_text() == "a card"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_card(f"{tmp_path}/{given}", "another", overwrite=False)


def test_a_card_goes_into_an_existing_file_without_a_suffix(tmp_path: Path) -> None:
    path = tmp_path / "CARD"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_card(path, "another", overwrite=False)
    assert write_card(path, "another", overwrite=True) == path


def test_no_card_is_written_for_statistics_that_leak(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="unprotected"):
        made = private(clipping="batch", batch_norm="unprotected")
    with pytest.raises(UnprotectedStatisticsError):
        made.save_model_card(tmp_path, 1e-5)
    assert not list(tmp_path.iterdir())


def test_metadata_that_would_break_the_front_matter_are_refused() -> None:
    for metadata, words in (
        ({"a b": 1}, "is no name"),
        ({"---\nx": 1}, "is no name"),
        ({"tags": "digits"}, "list of strings"),
    ):
        with pytest.raises(ValueError, match=words):
            model_card("", title="", metadata=metadata)
    with pytest.raises(ValueError, match="one line"):
        model_card("", title="a\nb")

"""A model card with the privacy statement, in the format that Hugging Face's hub reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TAGS = ("differential-privacy", "opacus-bc")


def model_card(section: str, *, title: str, metadata: Mapping[str, Any] | None = None) -> str:
    """Front matter, a title and the statement's section.

    Args:
        section: ``engine.statement(delta, format="markdown")``.
        title: The card's heading.
        metadata: More entries of the front matter, for instance ``{"license": "mit"}``: values are what JSON
            can write. ``tags`` are added to those that say that the model is private.

    >>> print(model_card("## Privacy statement", title="A model", metadata={"license": "mit"}))
    ---
    license: "mit"
    tags: ["differential-privacy", "opacus-bc"]
    ---
    <BLANKLINE>
    # A model
    <BLANKLINE>
    ## Privacy statement
    <BLANKLINE>
    """
    entries = dict(metadata or {})
    own = entries.pop("tags", [])
    if isinstance(own, str) or not all(isinstance(tag, str) for tag in own):
        raise ValueError(f"metadata: tags must be a list of strings, got {own!r}")
    if "\n" in title:
        raise ValueError(f"title must be one line, got {title!r}")
    entries["tags"] = list(dict.fromkeys([*_TAGS, *own]))
    # What JSON writes on one line is YAML too, whatever characters a value has.
    lines = [f"{_key(name)}: {json.dumps(value, allow_nan=False)}" for name, value in entries.items()]
    return "\n".join(["---", *lines, "---", "", f"# {title}", "", section, ""])


def _key(name: object) -> str:
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"metadata: {name!r} is no name of letters, digits, - and _")
    return name


def write_card(path: str | os.PathLike[str], text: str, *, overwrite: bool) -> Path:
    """Write a card into a file, or into README.md of a folder; an existing one stays unless told.

    Args:
        path: A folder if there is one, or if the path ends with a slash, without a suffix or with that of a
            version (``model-1.0``); otherwise a file. Folders that are missing are made.
        text: The card.
        overwrite: Whether an existing card is replaced.

    Returns:
        The file that was written.

    Raises:
        FileExistsError: The card exists, or a file is where a folder should be.
    """
    target = Path(path)
    if _means_a_folder(os.fspath(path)):
        target = target / "README.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise FileExistsError(
            f"{target} exists already: pass overwrite=True to replace it, or another path"
        ) from None
    return target


def _means_a_folder(path: str) -> bool:
    target = Path(path)
    if path.endswith(("/", os.sep)) or target.is_dir():
        return True
    ending = target.suffix.removeprefix(".")
    return not target.exists() and (not ending or ending.isdigit())

"""docs/zoo.md out of what the zoo has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "zoo.md"


def write_page(kept: dict[str, Any]) -> None:
    """Write the page."""

"""The rooms of the house, and the one direction in which they may use each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import opacus_bc

ROOT = Path(opacus_bc.__file__).parent
# From the ground up: a room uses those before it, never those after it.
ROOMS = (
    "_opacus",
    "mechanism",
    "accounting",
    "draws",
    "public",
    "parallel",
    "batch_norm",
    "gradients",
    "alc",
    "optimizers",
    "engine",
    "integrations",
    "audit",
    "experiments",
    "cli",
    "__main__",
)
FRONT_DOOR = "engine"  # ``from opacus_bc import PrivacyEngine``


def imported(path: Path) -> set[str]:
    """Rooms that ``path`` uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "opacus_bc":
            found |= {alias.name if alias.name in ROOMS else FRONT_DOOR for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("opacus_bc."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("opacus_bc.")}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_the_package_has_exactly_these_rooms() -> None:
    assert {room_of(path) for path in MODULES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_only_the_rooms_before_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in MODULES:
        if room_of(path) == room:
            assert imported(path) <= allowed, path


def test_the_two_commands_use_training_and_not_each_other() -> None:
    folder, rooms = ROOT / "experiments", ("training", "compare", "reproduce")
    assert {path.name for path in folder.iterdir() if path.name[:2] != "__"} == set(rooms)
    for room in rooms:
        for path in (folder / room).rglob("*.py"):
            used = re.findall(r"opacus_bc\.experiments(?:\.| import )(\w+)", _imports(path))
            assert set(used) <= {"training", room}, path


def _imports(path: Path) -> str:
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(node) for node in found)


def test_only_one_module_imports_opacus_private_names() -> None:
    for path in ROOT.rglob("*.py"):
        if path.name == "_opacus.py" or "experiments" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "opacus":
                allowed = {"opacus.accountants", "opacus.accountants.utils", "opacus.schedulers"}
                assert "accounting" in path.parts or "cli" in path.parts, path
                assert node.module in allowed | {"opacus.accountants.registry"}, (path, node.module)


def test_accounting_does_not_import_torch() -> None:
    for path in (ROOT / "accounting").glob("*.py"):
        assert "import torch" not in path.read_text(), path

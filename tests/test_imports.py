"""Imports go one way: a module may use those to its left, never those to its right."""

from __future__ import annotations

import ast
from pathlib import Path

import opacus_bc

ROOT = Path(opacus_bc.__file__).parent


def imported(path: Path) -> set[str]:
    """Top-level modules of this package that ``path`` imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "opacus_bc":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("opacus_bc."):
            found.add(node.module.split(".")[1])
    return found


def graph() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name != "__init__":
            edges.setdefault(name, set()).update(imported(path) - {name})
    names = set(edges)
    # ``from opacus_bc import PrivacyEngine`` goes through the package's front door.
    return {name: {t if t in names else "privacy_engine" for t in used} for name, used in edges.items()}


def test_imports_have_no_cycle():
    edges, order = graph(), []
    while edges:
        free = sorted(name for name, used in edges.items() if not used & set(edges))
        assert free, f"a cycle among {sorted(edges)}"
        order += free
        edges = {name: used for name, used in edges.items() if name not in free}
    position = {name: i for i, name in enumerate(order)}
    assert position["clipping"] < position["optimizer"] < position["privacy_engine"] < position["experiments"]
    assert position["accounting"] < position["privacy_engine"]


def test_only_one_module_imports_opacus_private_names():
    for path in ROOT.rglob("*.py"):
        if path.name == "_opacus.py" or "experiments" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "opacus":
                allowed = {"opacus.accountants", "opacus.accountants.utils", "opacus.schedulers"}
                assert "accounting" in path.parts or path.name == "cli.py", path
                assert node.module in allowed | {"opacus.accountants.registry"}, (path, node.module)


def test_accounting_does_not_import_torch():
    for path in (ROOT / "accounting").glob("*.py"):
        assert "import torch" not in path.read_text(), path

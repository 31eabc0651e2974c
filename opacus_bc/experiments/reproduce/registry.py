"""Every figure and table of the paper, in its order, and how they are chosen by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from opacus_bc.experiments.reproduce.facts import Sheet
from opacus_bc.experiments.reproduce.resnet_figures import FIGURES as RESNET
from opacus_bc.experiments.reproduce.sheets import SHEETS
from opacus_bc.experiments.reproduce.small_figures import CONVNET, LENET
from opacus_bc.experiments.reproduce.specs import Spec


def _number(spec: Spec) -> tuple[int, str]:
    found = re.fullmatch(r"fig(\d+)([ab]?)", spec.id)
    assert found is not None, spec.id
    return int(found[1]), found[2]


SPECS: Mapping[str, Spec] = MappingProxyType(
    {spec.id: spec for spec in sorted((*RESNET, *CONVNET, *LENET), key=_number)}
)


def select(names: Sequence[str]) -> tuple[list[Spec], list[Sheet]]:
    """Figures and sheets by id or by model, in the order in which they are named; no names mean all.

    Raises:
        ValueError: A name is unknown.

    >>> specs, sheets = select(["fig12b", "bn_lenet5", "table2"])
    >>> [spec.id for spec in specs], [sheet.id for sheet in sheets]
    (['fig12b', 'fig11', 'fig12a'], ['table2'])
    """
    if not names:
        return list(SPECS.values()), list(SHEETS.values())
    specs: dict[str, Spec] = {}
    sheets: dict[str, Sheet] = {}
    for name in names:
        found = [spec for spec in SPECS.values() if name in (spec.id, spec.model)]
        specs |= {spec.id: spec for spec in found if spec.id not in specs}
        if name in SHEETS:
            sheets[name] = SHEETS[name]
        elif not found:
            models = dict.fromkeys(spec.model for spec in SPECS.values())
            known = ", ".join((*SPECS, *SHEETS, *models))
            raise ValueError(f"--only {name}: not among {known}")
    return list(specs.values()), list(sheets.values())

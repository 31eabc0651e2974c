"""Which parameters are clipped together: by module, by tensor, by name pattern, or by similar norm. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from opacus_bc.mechanism.layerwise import Groups

Patterns = Sequence[str] | Mapping[str, str | Sequence[str]]
Layers = Literal["module", "parameter"] | int | Patterns

ROOT = "(model)"


def by_module(names: Sequence[str]) -> Groups:
    """Group parameter names by the module that owns them, in the order of first appearance.

    >>> by_module(["conv.weight", "conv.bias", "temperature"])
    {'conv': ('conv.weight', 'conv.bias'), '(model)': ('temperature',)}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or ROOT, []).append(name)
    return {owner: tuple(members) for owner, members in found.items()}


def by_parameter(names: Sequence[str]) -> Groups:
    """Every parameter tensor by itself."""
    return {name: (name,) for name in names}


def by_pattern(names: Sequence[str], patterns: Patterns) -> Groups:
    """Group by ``fnmatch`` patterns on the full parameter name, one or several for each group.

    >>> by_pattern(["conv.weight", "fc.weight", "fc.bias"], ["conv.*", "fc.*"])
    {'conv.*': ('conv.weight',), 'fc.*': ('fc.weight', 'fc.bias')}
    """
    wanted = patterns if isinstance(patterns, Mapping) else {pattern: pattern for pattern in patterns}
    groups: dict[str, list[str]] = {group: [] for group in wanted}
    for name in names:
        homes = [
            group
            for group, given in wanted.items()
            if any(fnmatchcase(name, p) for p in ([given] if isinstance(given, str) else given))
        ]
        if len(homes) != 1:
            where = f"several groups: {', '.join(map(repr, homes))}" if homes else "no group"
            raise ValueError(
                f"layers: parameter {name!r} is in {where}; the patterns must put each parameter into "
                "exactly one"
            )
        groups[homes[0]].append(name)
    empty = [group for group, members in groups.items() if not members]
    if empty:
        raise ValueError(f"layers: no parameter matches {', '.join(map(repr, empty))}")
    return {group: tuple(members) for group, members in groups.items()}


def cluster(values: Sequence[float], groups: int) -> list[list[int]]:
    """Cut values into ``min(groups, len(values))`` non-empty clusters of least squared deviation, exactly.

    In one dimension optimal clusters are intervals of the sorted values (a value between two members of a
    cluster is nowhere better off), so dynamic programming over the cuts finds the optimum. Clusters come in
    ascending order, as positions of their values.

    >>> cluster([0.0, 5.0, 0.1, 5.2, 9.0], 3)
    [[0, 2], [1, 3], [4]]
    """
    n = len(values)
    k = min(groups, n)
    order = np.argsort(np.asarray(values, dtype=float), kind="stable")
    x = np.asarray(values, dtype=float)[order]
    x = x - x.mean()  # differences of cumulated squares lose digits far from zero
    first = np.concatenate([[0.0], np.cumsum(x)])
    second = np.concatenate([[0.0], np.cumsum(x * x)])

    def cost(i: int, j: int) -> float:
        """Squared deviation of x[i:j] from its mean."""
        total = first[j] - first[i]
        return max(0.0, float(second[j] - second[i] - total * total / (j - i)))

    best = [0.0] + [math.inf] * n  # best[j]: cheapest way to cut x[:j] into the clusters made so far
    cuts: list[list[int]] = []
    for made in range(1, k + 1):
        row, cut = [math.inf] * (n + 1), [0] * (n + 1)
        for j in range(made, n + 1):
            row[j], cut[j] = min((best[i] + cost(i, j), i) for i in range(made - 1, j))
        best = row
        cuts.append(cut)
    bounds, end = [], n
    for cut in reversed(cuts):
        bounds.append((cut[end], end))
        end = cut[end]
    return [sorted(int(position) for position in order[i:j]) for i, j in reversed(bounds)]


def by_norm(layers: Groups, norms: Mapping[str, float], groups: int) -> Groups:
    """Merge layers with similar norms: exact clustering of ``log e_h``, smallest norms first.

    **Formal guarantee**: exactly ``min(groups, len(layers))`` groups whatever the norms are, so a refresh
    cannot change the number of blocks and with it the effective noise multiplier.
    """
    names = list(layers)
    clusters = cluster([math.log(norms[name]) for name in names], groups)
    return {
        f"group {i}": tuple(p for position in members for p in layers[names[position]])
        for i, members in enumerate(clusters, start=1)
    }


def check_layers(layers: object) -> None:
    """Refuse a ``layers`` argument that says nothing, with a ValueError that says what would be right."""
    wrong = f"layers must be 'module', 'parameter', a number of groups or name patterns, got {layers!r}"
    if isinstance(layers, str):
        if layers in ("module", "parameter"):
            return
        raise ValueError(f"{wrong} (a single pattern goes into a list)")
    if isinstance(layers, int) and not isinstance(layers, bool):
        if layers < 1:
            raise ValueError(f"layers={layers}: a number of groups must be at least 1")
        return
    if not isinstance(layers, (Mapping, Sequence)) or not layers:
        raise ValueError(wrong)
    given = list(layers.values()) if isinstance(layers, Mapping) else list(layers)
    if not isinstance(layers, Mapping) and len(set(map(str, given))) != len(given):
        raise ValueError(f"layers={layers!r} names a pattern twice")
    for entry in given:
        parts = [entry] if isinstance(entry, str) else entry
        if not isinstance(parts, Sequence) or not parts or not all(isinstance(p, str) for p in parts):
            raise ValueError(f"layers: {entry!r} is no name pattern (such as 'conv*.weight')")

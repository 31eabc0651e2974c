"""Clipping, noise and sensitivity of every combination against plain implementations of the mathematics."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from support.alc import UNITS, adaptive, data, one_step, three_layers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_bc.alc.measuring import PublicNorms
from opacus_bc.mechanism.blocks import effective_noise_multiplier
from opacus_bc.mechanism.layerwise import LayerwiseClipping

C, SIGMA = 0.03, 0.7
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
PATTERNS = {"first": "0.*", "rest": ["2.*", "4.*"]}
LAYERS = {
    "module": [[0, 1], [2, 3], [4, 5]],
    "parameter": [[0], [1], [2], [3], [4], [5]],
    "patterns": [[0, 1], [2, 3, 4, 5]],
    "two": None,  # found by trying all
}
NOISES = ["proportional", "isotropic", "optimal", "weights"]
CASES = [
    (rule, layers, apply, noise, unit)
    for rule, layers, apply, noise, unit in product(
        ["ratio", "norm"], LAYERS, ["clip", "scale"], NOISES, UNITS
    )
    if not (apply == "scale" and noise != "proportional")
    and not (noise == "weights" and layers == "two")
    # Adjacency only enters through Delta: one row of the table for each unit shows it.
    and not (unit[1] == "replace one" and (rule, layers) != ("ratio", "module"))
]


def gradients(model: nn.Module, dataset: TensorDataset, parts: list[list[int]]) -> list[list[Tensor]]:
    """Plain autograd, one mean gradient for each part."""
    return [
        list(
            torch.autograd.grad(
                nn.functional.cross_entropy(model(dataset[part][0]), dataset[part][1]), model.parameters()
            )
        )
        for part in parts
    ]


def vector_norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in tensors]).norm())


def two_groups(units: list[list[Tensor]]) -> list[list[int]]:
    """The cheapest of the three ways to cut three modules into two groups."""
    modules = LAYERS["module"]
    logs = [math.log(sum(vector_norm([g[i] for i in m]) for g in units) / len(units)) for m in modules]
    cuts = [([a], [b for b in range(3) if b != a]) for a in range(3)]
    spread = [
        sum((logs[i] - sum(logs[j] for j in part) / len(part)) ** 2 for part in cut for i in part)
        for cut in cuts
    ]
    return [[i for module in part for i in modules[module]] for part in cuts[spread.index(min(spread))]]


def weights_for(groups: list[list[int]]) -> list[float]:
    return [1.0 + 0.5 * i for i in range(len(groups))]


def oracle(model, public, public_parts, private, parts, case, c) -> tuple[list[Tensor], list[Tensor]]:
    """The sum of clipped gradients and the noise std of every tensor, from the formulas alone."""
    rule, layers, apply, noise, (unit, adjacency) = case
    units = gradients(model, public, public_parts)
    groups = LAYERS[layers] or two_groups(units)
    e = [sum(vector_norm([g[i] for i in group]) for g in units) / len(units) for group in groups]
    bounds = [c * value / (max(e) if rule == "ratio" else 1.0) for value in e]
    per_bound = 1.0 if (unit, adjacency) == ("sample", "add/remove one") else 2.0
    d = [sum(list(model.parameters())[i].numel() for i in group) for group in groups]
    delta = [per_bound * b for b in bounds]
    if apply == "scale":
        tau = [SIGMA * per_bound * c * b / c for b in bounds]  # sigma * Delta / m_h with m_h = C / C_h
    elif noise == "isotropic":
        tau = [SIGMA * math.sqrt(sum(v**2 for v in delta))] * len(groups)
    elif noise == "optimal":
        power = sum(v * math.sqrt(n) for v, n in zip(delta, d, strict=True))
        tau = [
            SIGMA * v / math.sqrt(len(d) * v * math.sqrt(n) / power) for v, n in zip(delta, d, strict=True)
        ]
    elif noise == "weights":
        tau = [SIGMA * v / p for v, p in zip(delta, weights_for(groups), strict=True)]
    else:
        tau = [SIGMA * v for v in delta]
    total = [torch.zeros_like(p) for p in model.parameters()]
    for g in gradients(model, private, parts):
        sizes = [vector_norm([g[i] for i in group]) / b for group, b in zip(groups, bounds, strict=True)]
        whole = math.sqrt(sum(v**2 for v in sizes))
        for group, size in zip(groups, sizes, strict=True):
            for i in group:
                total[i] += g[i] / max(1.0, whole if apply == "scale" else size)
    std = {i: t for group, t in zip(groups, tau, strict=True) for i in group}
    return total, [torch.full_like(p, std[i]) for i, p in enumerate(model.parameters())]


def settings(rule, layers, apply, noise) -> dict:
    given = {"patterns": PATTERNS, "two": 2}.get(layers, layers)
    if noise == "weights":
        keys = {"module": ["0", "2", "4"], "parameter": NAMES, "patterns": list(PATTERNS)}[layers]
        noise = dict(zip(keys, weights_for(LAYERS[layers]), strict=True))
    return {"rule": rule, "layers": given, "apply": apply, "noise": noise}


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, (*c[:4], *c[4]))))
def test_release_is_what_the_formulas_say(case):
    rule, layers, apply, noise, (unit, adjacency) = case
    model, public, private = three_layers(), data(6, seed=5), data(16)
    draw = [list(range(8)), list(range(8, 16))]
    parts, public_parts = (
        (draw, [list(range(6))])
        if unit == "mini-set"
        else ([[i] for i in range(16)], [[i] for i in range(6)])
    )
    chosen = adaptive(model, public, unit=unit, adjacency=adjacency, **settings(rule, layers, apply, noise))
    # At the smaller bound everything is clipped, at the larger one some of it; then the noise by itself.
    for c, noise_size in ((0.03, 0.0), (0.6, 0.0), (0.03, 1.0)):
        clipped, stds = oracle(model, public, public_parts, private, parts, case, c)
        again = three_layers()
        chosen.meter = PublicNorms(again)
        released, _ = one_step(
            again, private, draw, chosen, unit=unit, sigma=SIGMA, clip_bound=c, noise=noise_size
        )
        for name, value, std in zip(NAMES, clipped, stds, strict=True):
            # Clipping stays inside the ball by 1e-5 of its radius.
            close = {"rtol": 3e-5, "atol": 2e-5 * c}
            torch.testing.assert_close(released[name], value + noise_size * std, **close)


class Slices(nn.Module):
    """Loss <w, x> over three tensors: the gradient of each is the mean of its slice of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("a", 2), ("b", 3), ("c", 4)):
            layer = nn.Linear(size, 1, bias=False).double()
            nn.init.zeros_(layer.weight)
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x[:, :2]) + self.b(x[:, 2:5]) + self.c(x[:, 5:])).squeeze(1)


def slices_loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    out = model(x)
    return out.mean()


NORMS = {"a": 3.0, "b": 0.4, "c": 0.05}
GROUPS = {name: (f"{name}.weight",) for name in NORMS}


def slices_rule(rule, apply, noise, unit, adjacency) -> LayerwiseClipping:
    spread = {"a": 1.0, "b": 2.0, "c": 0.5} if noise == "weights" else noise
    return LayerwiseClipping(
        groups=GROUPS, norms=NORMS, rule=rule, apply=apply, noise=spread, unit=unit, adjacency=adjacency
    )


def whitened_shift(x: Tensor, canary: Tensor, rule: LayerwiseClipping, unit, adjacency) -> float:
    """Distance of two neighbours' releases, every entry in units of its noise."""
    k, n = 2, len(x) // 2
    draw = [list(range(n)), list(range(n, 2 * n))]
    if adjacency == "add/remove one":
        dataset = TensorDataset(torch.cat([x, canary[None]]), torch.zeros(len(x) + 1))
        pairs = [(dataset, draw), (dataset, [draw[0] + [2 * n], draw[1]])]
    else:
        other = x.clone()
        other[0] = canary
        pairs = [(TensorDataset(values, torch.zeros(k * n)), draw) for values in (x, other)]
    sums = []
    for dataset, chosen in pairs:
        released, optimizer = one_step(
            Slices(),
            dataset,
            chosen,
            rule,
            unit=unit,
            sigma=SIGMA,
            clip_bound=C,
            noise=0.0,
            loss=slices_loss,
        )
        sums.append(released)
    stds = {n: b.noise_std / m for b in optimizer.blocks() for n, m in zip(b.names, b.factors, strict=True)}
    return math.sqrt(sum(float(((sums[0][n] - sums[1][n]) / stds[n]).norm()) ** 2 for n in stds))


VARIANTS = [
    (rule, apply, noise, unit)
    for rule, apply, noise, unit in product(["ratio", "norm"], ["clip", "scale"], NOISES, UNITS)
    if not (apply == "scale" and noise != "proportional")
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, (*v[:3], *v[3]))))
def test_whitened_shift_of_neighbours_never_exceeds_one_over_sigma_eff_and_reaches_it(variant):
    rule, apply, noise, (unit, adjacency) = variant
    chosen = slices_rule(rule, apply, noise, unit, adjacency)
    named = [(f"{n}.weight", p) for n, p in zip(NORMS, Slices().parameters(), strict=True)]
    limit = 1 / effective_noise_multiplier(chosen.blocks(named, noise_multiplier=SIGMA, max_grad_norm=C))

    u = torch.ones(9, dtype=torch.float64)
    worst = whitened_shift(-10 * u.repeat(8, 1), 1e3 * u, chosen, unit, adjacency)
    assert 0.95 * limit <= worst <= limit * (1 + 1e-9)

    generator = torch.Generator().manual_seed(VARIANTS.index(variant))
    for trial in range(6):
        x = torch.randn(8, 9, generator=generator, dtype=torch.float64) * 10.0 ** (trial - 3)
        canary = torch.randn(9, generator=generator, dtype=torch.float64) * 10.0 ** (trial % 4)
        assert whitened_shift(x, canary, chosen, unit, adjacency) <= limit * (1 + 1e-9)

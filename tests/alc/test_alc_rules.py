"""Groups, bounds, noise weights and what they make of sigma; clipping against scaling."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.alc.config import ALC, nominal_rule
from opacus_bc.alc.groups import by_module, by_norm, by_pattern, cluster
from opacus_bc.experiments.training.models import bn_lenet5
from opacus_bc.mechanism.blocks import effective_noise_multiplier
from opacus_bc.mechanism.clipping import clip_coefficients
from opacus_bc.mechanism.layerwise import NORM_FLOOR, LayerwiseClipping, floored, layer_bounds, noise_weights

PUBLIC = DataLoader(TensorDataset(torch.zeros(4, 1), torch.zeros(4)), batch_size=2)


def sigma_eff(model: nn.Module, sigma: float = 1.0, **alc) -> float:
    named = list(model.named_parameters())
    rule = nominal_rule(
        ALC(PUBLIC, **alc), [n for n, _ in named], unit="mini-set", adjacency="add/remove one"
    )
    return effective_noise_multiplier(rule.blocks(named, noise_multiplier=sigma, max_grad_norm=0.1))


@pytest.fixture(scope="module")
def resnet():
    return torchvision.models.resnet18()


@pytest.mark.parametrize(
    ("alc", "groups"),
    [
        ({"layers": "parameter"}, 62),
        ({"layers": "module"}, 41),
        ({"layers": 4}, 4),
        ({"layers": 100}, 41),
        ({"apply": "scale"}, 1),
        ({"layers": "parameter", "apply": "scale"}, 1),
        ({"noise": "isotropic"}, 1),
        ({"layers": "parameter", "noise": "optimal"}, 62),
        ({"noise": "optimal"}, 41),
        ({"layers": 4, "noise": "optimal"}, 4),
        ({"layers": ["layer*", "[!l]*"]}, 2),
    ],
    ids=str,
)
def test_resnet18_pays_the_root_of_its_number_of_groups(resnet, alc, groups):
    assert len(list(resnet.parameters())) == 62
    assert sigma_eff(resnet, 1.3, **alc) == pytest.approx(1.3 / math.sqrt(groups), rel=1e-11)


def test_bn_lenet5_by_module_pays_root_eight():
    assert sigma_eff(bn_lenet5(), 2.5) == pytest.approx(2.5 / math.sqrt(8), rel=1e-11)


def partitions(items: list[int], k: int):
    """All ways to cut the items into k non-empty sets."""
    if k == 1:
        yield [items]
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) - k + 2):
        for chosen in combinations(rest, size):
            left = [i for i in rest if i not in chosen]
            for others in partitions(left, k - 1):
                yield [[first, *chosen], *others]


def spread(values: list[float], parts: list[list[int]]) -> float:
    means = [sum(values[i] for i in part) / len(part) for part in parts]
    return sum((values[i] - m) ** 2 for part, m in zip(parts, means, strict=True) for i in part)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.floats(-20, 20), min_size=1, max_size=7), groups=st.integers(1, 5))
def test_clustering_is_exact_and_never_leaves_a_group_empty(values, groups):
    found = cluster(values, groups)
    k = min(groups, len(values))
    assert len(found) == k
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(len(values)))
    best = min(spread(values, parts) for parts in partitions(list(range(len(values))), k))
    assert spread(values, found) <= best + 1e-9


def test_equal_norms_still_make_the_number_of_groups_that_was_asked_for():
    layers = by_module([f"{i}.weight" for i in range(6)])
    assert len(by_norm(layers, dict.fromkeys(layers, 1.0), 4)) == 4


def test_a_parameter_in_no_group_or_in_two_is_an_error():
    names = ["conv.weight", "fc.weight"]
    assert by_pattern(names, {"all": ["conv*", "fc*"]}) == {"all": ("conv.weight", "fc.weight")}
    with pytest.raises(ValueError, match=r"'fc\.weight' is in no group"):
        by_pattern(names, ["conv*"])
    with pytest.raises(ValueError, match=r"'conv\.weight' is in several groups: 'conv\*', '\*'"):
        by_pattern(names, ["conv*", "*"])
    with pytest.raises(ValueError, match=r"no parameter matches 'bn\*'"):
        by_pattern(names, ["conv*", "fc*", "bn*"])


def test_shared_parameters_count_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert sigma_eff(model, layers="parameter") == pytest.approx(1 / math.sqrt(3), rel=1e-11)


def test_a_dead_layer_gets_the_floor_and_stays_clipped_and_noised():
    bounds = layer_bounds({"live": 2.0, "dead": 0.0}, rule="ratio", max_grad_norm=0.5)
    assert bounds == {"live": 0.5, "dead": 0.5 * NORM_FLOOR}
    with pytest.raises(ValueError, match="not all zero"):
        floored({"a": 0.0, "b": 0.0})
    with pytest.raises(ValueError, match="finite"):
        floored({"a": math.inf, "b": 0.0})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    deltas=st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=8),
    noise=st.sampled_from(["proportional", "isotropic", "optimal"]),
    data=st.data(),
)
def test_weights_have_a_sum_of_squares_that_no_norm_can_move(deltas, noise, data):
    names = [str(i) for i in range(len(deltas))]
    sizes = data.draw(st.lists(st.integers(1, 10**6), min_size=len(names), max_size=len(names)))
    weights = noise_weights(
        noise,
        dict(zip(names, deltas, strict=True)),
        dict(zip(names, sizes, strict=True)),
        groups=len(names),
    )
    expected = 1.0 if noise == "isotropic" else len(names)
    assert sum(p**2 for p in weights.values()) == pytest.approx(expected, rel=1e-12)


def test_optimal_noise_has_the_least_power_at_equal_mu():
    deltas, sizes = {"a": 0.3, "b": 2.0, "c": 0.01}, {"a": 50, "b": 4, "c": 9000}

    def power(p: dict[str, float]) -> float:
        return sum(sizes[h] * (deltas[h] / p[h]) ** 2 for h in deltas)

    best = noise_weights("optimal", deltas, sizes, groups=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = {h: p * math.exp(0.3 * float(torch.randn((), generator=generator))) for h, p in best.items()}
        norm = math.sqrt(3 / sum(p**2 for p in other.values()))
        assert power({h: p * norm for h, p in other.items()}) >= power(best) * (1 - 1e-12)
    assert power(best) < 0.8 * power(noise_weights("proportional", deltas, sizes, groups=3))


def rule_for(norms: dict[str, float], apply: str) -> LayerwiseClipping:
    return LayerwiseClipping(
        groups={h: (h,) for h in norms},
        norms=norms,
        rule="ratio",
        apply=apply,
        noise="proportional",
        unit="mini-set",
        adjacency="add/remove one",
    )


def paired_blocks(norms: dict[str, float], named, c: float, sigma: float):
    """Clipping at (C, sigma), and scaling at (C sqrt(L), sigma / sqrt(L))."""
    root = math.sqrt(len(norms))
    clip = rule_for(norms, "clip").blocks(named, noise_multiplier=sigma, max_grad_norm=c)
    scale = rule_for(norms, "scale").blocks(named, noise_multiplier=sigma / root, max_grad_norm=c * root)
    return clip, scale


def stds(blocks) -> dict[str, float]:
    return {n: b.noise_std / m for b in blocks for n, m in zip(b.names, b.factors, strict=True)}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), inside=st.floats(0.01, 0.9999))
def test_scaling_leaves_unclipped_whatever_clipping_does_at_equal_noise_and_mu(seed, inside):
    generator = torch.Generator().manual_seed(seed)
    norms = {str(h): float(torch.rand((), generator=generator)) + 0.01 for h in range(5)}
    grads = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in norms]
    named = list(zip(norms, grads, strict=True))
    clip, scale = paired_blocks(norms, named, 0.7, 1.5)
    assert effective_noise_multiplier(clip) == pytest.approx(effective_noise_multiplier(scale), rel=1e-11)
    assert stds(clip) == pytest.approx(stds(scale))
    grads = [g / g.norm() * b.clip_bound * inside for g, b in zip(grads, clip, strict=True)]
    assert clip_coefficients(grads, clip) == clip_coefficients(grads, scale) == [1.0] * 5
    grads[0] *= 1.05 / inside  # one layer beyond its bound, the others with room: only clipping cuts it
    if inside < 0.95:
        assert clip_coefficients(grads, clip)[0] < 1.0
        assert clip_coefficients(grads, scale) == [1.0] * 5


def test_one_exploding_layer_shrinks_all_layers_under_scaling_and_itself_only_under_clipping():
    norms = {"a": 1.0, "b": 0.5, "c": 0.1}
    grads = [torch.full((4,), v / 2, dtype=torch.float64) for v in norms.values()]
    clip, scale = paired_blocks(norms, list(zip(norms, grads, strict=True)), 1.0, 1.0)
    grads[0] *= 100
    by_clip, by_scale = clip_coefficients(grads, clip), clip_coefficients(grads, scale)
    assert by_clip[0] == pytest.approx(0.01, rel=1e-4)
    assert by_clip[1:] == pytest.approx([1.0, 1.0], rel=1e-4)
    assert by_scale == pytest.approx([math.sqrt(3) / math.hypot(100, 1, 1)] * 3, rel=1e-4)


def test_a_group_without_live_entries_hands_its_budget_to_the_others():
    named = [("a", torch.zeros(4)), ("b", torch.zeros(3)), ("c", torch.zeros(2))]
    rule = rule_for({"a": 1.0, "b": 0.5, "c": 0.2}, "clip")
    before = rule.blocks(named, noise_multiplier=2.0, max_grad_norm=1.0)
    after = LayerwiseClipping(**{**vars(rule), "frozen": {"a": 4, "b": 1}}).blocks(
        named, noise_multiplier=2.0, max_grad_norm=1.0
    )
    assert effective_noise_multiplier(after) == effective_noise_multiplier(before)
    assert [(b.names, b.dimension) for b in after] == [(("b", "a"), 2), (("c",), 2)]
    # b is now the largest layer, so its bound is C; per unit of bound the noise is sqrt(2/3) of what it was.
    assert after[0].noise_std / after[0].clip_bound == pytest.approx(
        math.sqrt(2 / 3) * before[1].noise_std / before[1].clip_bound
    )


def test_parameters_that_appear_after_make_private_are_refused():
    rule = rule_for({"a": 1.0}, "clip")
    with pytest.raises(RuntimeError, match="changed since make_private"):
        rule.blocks([("a", torch.zeros(1)), ("b", torch.zeros(1))], noise_multiplier=1.0, max_grad_norm=1.0)

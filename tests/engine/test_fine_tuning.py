"""Fine-tuning as people do it: frozen backbones, heads, BatchNorm's weights alone, adapters."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import engine
from support.batch_norm import BACKWARD_HOOK_REMARK, images, public
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc import PrivacyEngine
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
CLIPPINGS = ("batch", "flat")
MODES = ("bk", "hooks")
DATA = images(16)


class Pretrained(nn.Module):
    """A backbone with BatchNorm that has seen data, and a new head."""

    def __init__(self, padding_mode: str = "zeros") -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
        self.backbone = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3))
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 2)
        with torch.no_grad():
            self(images(32, seed=8).tensors[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(x)).relu().mean((2, 3)))


def private(
    model: nn.Module, params: Any, eng: PrivacyEngine | None = None, **kwargs: Any
) -> tuple[Any, ...]:
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_norm": "frozen", **kwargs}
    return (eng or engine()).make_private(
        module=model,
        optimizer=optim.SGD(list(params), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=8),
        poisson_sampling=False,
        **given,
    )


def backward(module: Any, loader: Any) -> None:
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()


def train(module: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("how", ["requires_grad", "optimizer"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_frozen_backbone_with_batch_norm_gets_an_error_that_says_frozen(clipping: str, how: str) -> None:
    model = Pretrained()
    if how == "requires_grad":
        model.requires_grad_(False).head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"not trained: batch_norm='frozen' leaves the statistics"):
        private(model, model.head.parameters(), clipping=clipping, batch_norm=None)
    assert all(p.requires_grad == (how == "optimizer") for p in model.backbone.parameters())


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_trained_backbone_is_not_told_that_it_is_frozen(clipping: str) -> None:
    model = Pretrained()
    with pytest.raises(ValueError, match=r"Say what shall happen") as caught:
        private(model, model.parameters(), clipping=clipping, batch_norm=None)
    assert "not trained" not in str(caught.value)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("policy", ["frozen", public()], ids=["frozen", "public"])
def test_an_optimizer_that_holds_only_the_head_moves_only_the_head(clipping: str, policy: Any) -> None:
    model, eng = Pretrained(), engine()
    before = copy.deepcopy(model.state_dict())
    made = private(model, model.head.parameters(), eng, clipping=clipping, batch_norm=policy)
    train(*made)
    plain = eng.finalize(made[0])
    weights = {name for name, _ in model.named_parameters()}
    assert moved(model, before) & weights == {"head.weight", "head.bias"}
    assert all(p.requires_grad for p in plain.parameters())  # as the user had them


def per_sample(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """How many numbers are held for all samples together, by parameter, between backward and step."""
    if isinstance(optimizer, BookKeepingOptimizer):
        held = optimizer._book.read(model.parameters())
        return {name: held[p].rows().numel() for name, p in model.named_parameters() if p in held}
    found = {name: getattr(p, "grad_sample", None) for name, p in model.named_parameters()}
    return {name: rows.numel() for name, rows in found.items() if rows is not None}


@pytest.mark.parametrize("mode", MODES)
def test_parameters_outside_the_optimizer_cost_no_gradients_of_any_kind(mode: str) -> None:
    model = Pretrained()
    module, optimizer, loader = private(model, model.head.parameters(), grad_sample_mode=mode)
    reached: list[Tensor] = []
    model.backbone.register_forward_hook(lambda _m, _x, output: reached.append(output))
    backward(module, loader)
    assert set(per_sample(model, optimizer)) == {"head.weight", "head.bias"}
    assert all(p.grad is None for name, p in model.named_parameters() if not name.startswith("head"))
    assert not any(hasattr(layer, "activations") for layer in model.backbone.modules())
    assert not reached[-1].requires_grad  # no backward goes into the backbone


def test_a_layer_that_has_no_rule_is_welcome_where_the_optimizer_does_not_hold_it() -> None:
    model = Pretrained(padding_mode="reflect")
    with pytest.raises(ValueError, match="padding_mode='reflect'"):
        private(model, model.parameters(), grad_sample_mode="hooks")
    module, optimizer, loader = private(model, model.head.parameters(), grad_sample_mode="hooks")
    train(module, optimizer, loader)
    assert optimizer.steps_taken == 2


def test_a_function_that_one_backward_cannot_follow_is_welcome_outside_the_optimizer() -> None:
    """Its product is averaged over the batch: no rule tells samples apart. It is zero and mixes none."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.shift = Pretrained(), nn.Parameter(torch.zeros(3, 1, 1))
            self.head = self.inner.head

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + (x * self.shift).mean())

    model = Odd()
    module, optimizer, loader = private(model, model.head.parameters())
    assert isinstance(optimizer, BookKeepingOptimizer)
    train(module, optimizer, loader)
    assert optimizer.steps_taken == 2


def test_a_failed_make_private_leaves_every_requires_grad_flag() -> None:
    model = Pretrained()
    model.norm.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="max_grad_norm"):
        private(model, model.head.parameters(), max_grad_norm=-1.0)
    assert [p.requires_grad for p in model.parameters()] == before


def test_what_was_frozen_for_the_head_trains_again_with_an_optimizer_that_holds_it() -> None:
    model, eng = Pretrained(), engine()
    made = private(model, model.head.parameters(), eng)
    train(*made)
    eng.finalize(made[0])
    before = copy.deepcopy(model.state_dict())
    train(*private(model, model.parameters(), eng))
    assert {"backbone.0.weight", "norm.weight", "head.weight"} <= moved(model, before)


def test_a_second_optimizer_on_the_wrapped_module_cannot_train_what_has_no_hooks() -> None:
    model, eng = Pretrained(), engine()
    module, *_ = private(model, model.head.parameters(), eng, batch_norm="frozen")
    with pytest.raises(ValueError, match="already obeys a policy"):
        private(module, model.parameters(), eng)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_frozen_statistics_that_nothing_has_written_warn(clipping: str) -> None:
    fresh = nn.Sequential(nn.Conv2d(3, 4, 6), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    with pytest.warns(
        UserWarning, match=r"1 layers \(1 first\) hold the statistics .* mean 0 and variance 1"
    ):
        private(fresh, fresh.parameters(), clipping=clipping)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Full backward hook")
        model = Pretrained()
        private(model, model.parameters(), clipping=clipping)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("policy", ["frozen", public()], ids=["frozen", "public"])
def test_a_policy_for_a_model_without_batch_norm_warns(clipping: str, policy: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 6), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="batch_norm= changes nothing: this model has no BatchNorm layer"):
        private(model, model.parameters(), clipping=clipping, batch_norm=policy)


def oracle(model: nn.Module, names: set[str], bound: float = 1.0) -> dict[str, Tensor]:
    """The clipped mean gradient over the first batch, sample by sample, in evaluation mode."""
    plain = copy.deepcopy(model).eval()
    params = {name: p for name, p in plain.named_parameters() if name in names}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    x, y = (t[:8] for t in DATA.tensors)
    for i in range(8):
        loss = nn.functional.cross_entropy(plain(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(params.values()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        for name, g in zip(params, grads, strict=True):
            total[name] += g * min(1.0, bound / float(norm)) / 8
    return total


class Adapter(nn.Module):
    """LoRA: the frozen layer plus a trained product of two thin ones."""

    def __init__(self, layer: nn.Linear, rank: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def recipes() -> dict[str, tuple[nn.Module, set[str]]]:
    """Models, and the names of what is trained."""
    film = Pretrained()
    norms = {name for name, _ in film.named_parameters() if name.split(".")[-2] in ("1", "norm", "head")}
    lora = Pretrained()
    lora.head = Adapter(lora.head)
    biases = Pretrained()
    return {
        "BatchNorm and head": (film, norms),
        "LoRA": (lora, {"head.down.weight", "head.up.weight"}),
        "biases": (biases, {name for name, _ in biases.named_parameters() if name.endswith("bias")}),
    }


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["requires_grad", "optimizer"])
@pytest.mark.parametrize("recipe", ["BatchNorm and head", "LoRA", "biases"])
def test_a_recipe_releases_the_clipped_mean_of_what_it_trains_and_computes_nothing_else(
    recipe: str, how: str, mode: str
) -> None:
    model, names = recipes()[recipe]
    if how == "requires_grad":
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
    expected = oracle(model, names)
    trained = [p for name, p in model.named_parameters() if name in names]
    before = copy.deepcopy(model.state_dict())
    module, optimizer, loader = private(model, trained, noise_multiplier=0.0, grad_sample_mode=mode)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    assert set(per_sample(model, optimizer)) == names
    optimizer.step()
    assert moved(model, before) == names
    for name, gradient in expected.items():
        found = (before[name] - model.state_dict()[name]) / 0.1
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_training_batch_norm_and_head_holds_a_small_part_of_the_per_sample_gradients(mode: str) -> None:
    model, names = recipes()["BatchNorm and head"]
    trained = [p for name, p in model.named_parameters() if name in names]
    module, optimizer, loader = private(model, trained, grad_sample_mode=mode)
    backward(module, loader)
    numbers = {name: p.numel() for name, p in model.named_parameters() if name in names}
    assert per_sample(model, optimizer) == {name: 8 * count for name, count in numbers.items()}
    assert not hasattr(model.backbone[3], "activations")

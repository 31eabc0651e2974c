"""Fine-tuning in the comparison: what is trained, what is computed once, and what a trial may see."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import opacus
import pytest
import timm
import torch
from opacus.validators import ModuleValidator
from support.experiments import tiny_cell
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.experiments.compare.plan import Plan
from opacus_bc.experiments.compare.presets import Setting, preset
from opacus_bc.experiments.training import pretrained
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data, Source
from opacus_bc.experiments.training.methods import METHODS, PRETRAINED
from opacus_bc.experiments.training.session import prepare
from opacus_bc.experiments.training.store import Store
from opacus_bc.experiments.training.train import train

NETWORK = "timm:test_efficientnet"
SIZE = 40
CONSTANTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what timm says of this network


def own_network(num_classes: int = 10) -> nn.Module:
    """Nothing works in place, so stock Opacus takes it."""
    convolutions = [
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2, bias=False),
        nn.BatchNorm2d(8),
    ]
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    )


def settled(model: nn.Module) -> nn.Module:
    """With statistics that are not those of initialisation."""
    torch.manual_seed(1)
    model.train()
    for _ in range(3):
        model(torch.randn(16, 3, SIZE, SIZE))
    return model.eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as people have them: a thousand classes."""
    path = tmp_path_factory.mktemp("weights") / "test.pth"
    torch.manual_seed(0)
    torch.save(settled(timm.create_model("test_efficientnet", num_classes=1000)).state_dict(), path)
    return path


@pytest.fixture
def data(weights: Path, tmp_path: Path) -> Data:
    """Bytes; no two images are equal."""
    generator = torch.Generator().manual_seed(2)

    def part(count: int) -> TensorDataset:
        x = torch.randint(256, (count, 1, 32, 32), generator=generator, dtype=torch.uint8)
        return TensorDataset(x, torch.arange(count) % 10)

    return Data(
        name="tiny", private=part(40), public=part(20), test=part(12), num_classes=10, mean=(0.0,),
        std=(1.0,), crop_padding=0, weights=weights, features=tmp_path / "features",
    )  # fmt: skip


def cell(name: str, **changes: Any) -> Cell:
    given: dict[str, Any] = {
        "model": NETWORK,
        "weights": "test.pth",
        "image_size": SIZE,
        "train": "norm+head",
    }
    return tiny_cell(name, **(given | changes))


def whole(data: Data) -> nn.Module:
    """The network as the cell's seed makes it, with nothing of the code under test but its name."""
    torch.manual_seed(3)
    model = timm.create_model("test_efficientnet", num_classes=10)
    assert data.weights is not None
    state = torch.load(data.weights, weights_only=True)
    model.load_state_dict({k: v for k, v in state.items() if "classifier" not in k}, strict=False)
    return model.eval()


def as_pretrained(x: Tensor) -> Tensor:
    """What timm's own preprocessing makes of a grey image, enlarged."""
    grey = x.float().repeat(1, 3, 1, 1) / 255
    mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in CONSTANTS)
    return nn.functional.interpolate((grey - mean) / std, size=(SIZE, SIZE), mode="bicubic")


@pytest.mark.parametrize("name", ["ic-frozen", "stock-head"])
@pytest.mark.parametrize("first", ["", "blocks.2"], ids=["whole", "from blocks.2"])
def test_the_trained_part_on_features_computes_what_the_whole_network_does(
    data: Data, name: str, first: str
) -> None:
    torch.manual_seed(3)
    part, found = pretrained.start(cell(name, train_from=first), data)
    said = timm.create_model("test_efficientnet").pretrained_cfg
    assert (said["mean"], said["std"]) == CONSTANTS
    with torch.no_grad():
        network = whole(data)
        new = pretrained._head(part)[1]
        assert not any(p.any() for p in new.parameters()), "a new head starts at zero"
        new.load_state_dict(network.classifier.state_dict())
        if name == "stock-head":  # a head gets features with mean 0 and variance 1 on the public images
            head, network.classifier = network.classifier, nn.Identity()
            public = network(as_pretrained(data.public.tensors[0]))
            features = network(as_pretrained(data.test.tensors[0]))
            expected = head((features - public.mean(0)) / public.std(0).clamp_min(1e-3))
        else:
            expected = network(as_pretrained(data.test.tensors[0]))
        outputs = part.eval()(found.test.tensors[0])
    assert torch.equal(found.test.tensors[1], data.test.tensors[1])
    torch.testing.assert_close(outputs, expected, rtol=0, atol=5e-2)  # features are kept in half precision


def test_features_are_computed_once_for_all_cells_that_share_the_frozen_part(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    real = pretrained._outputs
    monkeypatch.setattr(pretrained, "_outputs", lambda m, part: computed.append(len(part)) or real(m, part))
    for name, changes in (
        ("ic-frozen", {}),
        ("ic", {"seed": 9}),
        ("swap", {"lr": 1.0}),
        ("bc", {"epochs": 7}),
    ):
        pretrained.start(cell(name, train_from="blocks.2", **changes), data)
    assert computed == [40, 20, 12]
    pretrained._features.cache_clear()  # as a new process
    first = pretrained.start(cell("stock-conv", train_from="blocks.2"), data)[1]
    assert computed == [40, 20, 12], "they are read from their file"
    pretrained.start(cell("stock-head", train_from="blocks.2"), data)
    assert len(computed) == 6, "a head's features start from the shared ones"
    for other in (
        cell("ic", train_from="blocks.3"),
        cell("ic", train_from="blocks.2", image_size=48),
        cell("ic", train_from="blocks.2", content="other weights"),
    ):
        found = pretrained.start(other, data)[1].test.tensors[0]
        assert found.shape != first.test.tensors[0].shape or other.content
    assert len(computed) == 15


def test_a_swap_of_the_whole_network_never_shares_features_with_one_that_keeps_batch_norm(data: Data) -> None:
    kept, swapped = (
        pretrained.start(cell(name, epsilon=None, train_from=first), data)[1].test.tensors[0]
        for name, first in (("probe", "blocks.2"), ("probe-swap", "blocks.2"))
    )
    assert kept.shape == swapped.shape
    assert not torch.allclose(kept, swapped, atol=0.1)
    again = pretrained.start(cell("probe-swap", epsilon=None), data)[1].test.tensors[0]
    torch.testing.assert_close(again, swapped, rtol=5e-3, atol=5e-3)  # with or without a first part


@pytest.mark.parametrize("name", ["swap", "probe-swap"])
def test_no_batch_norm_is_left_after_the_swap_and_every_activation_is(name: str, data: Data) -> None:
    part, _ = pretrained.start(cell(name, epsilon=8.0 if name == "swap" else None, train="all"), data)
    model = part if name == "swap" else pretrained._with_group_norm(whole(data))
    kinds = [type(layer).__name__ for layer in model.modules()]
    plain = [type(layer).__name__ for layer in whole(data).modules()]
    assert not any("BatchNorm" in kind for kind in kinds)
    assert kinds.count("GroupNorm") == sum("BatchNorm" in kind for kind in plain)
    activations = [kind for kind in plain if kind in ("ReLU", "ReLU6", "SiLU")]
    assert [kind for kind in kinds if kind in ("ReLU", "ReLU6", "SiLU")] == activations


@pytest.mark.parametrize(
    ("name", "train_", "moved"),
    [
        ("ic-frozen", "all", {"conv", "norm", "head"}),
        ("ic-frozen", "norm+head", {"norm", "head"}),
        ("stock-conv", "norm+head", {"conv", "head"}),
        ("stock-head", "all", {"head"}),
        ("no-dp", "norm+head", {"norm", "head"}),
    ],
)
def test_only_what_is_to_be_trained_moves(name: str, train_: Any, moved: set[str], data: Data) -> None:
    training = prepare(cell(name, train=train_), data)
    before = copy.deepcopy(training.model.state_dict())
    norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    kinds = {}
    for owner, layer in training.model.named_modules():
        kind = "norm" if isinstance(layer, norms) else "head" if isinstance(layer, nn.Linear) else "conv"
        kinds |= {f"{owner}.{entry}".lstrip("."): kind for entry, _ in layer.named_parameters(recurse=False)}
    for x, y in training.batches():
        training.step(x, y)
    after = training.model.state_dict()
    changed = {kind for entry, kind in kinds.items() if not torch.equal(after[entry], before[entry])}
    assert changed == moved
    held = {id(p) for group in training.plain_optimizer.param_groups for p in group["params"]}
    assert {kinds[n] for n, p in training.model.named_parameters() if id(p) in held} == moved


@pytest.mark.parametrize("name", ["stock-conv", "swap"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_stock_rows_release_what_stock_opacus_releases(name: str, data: Data, tmp_path: Path) -> None:
    """One backward makes the clipped sums; Opacus's own engine and hooks are the oracle."""
    torch.manual_seed(0)
    model = settled(own_network())
    file = tmp_path / "own.pth"
    torch.save(model.state_dict(), file)
    data = replace(data, weights=file, features=None)
    x, y = data.private.tensors
    stock = copy.deepcopy(model)
    if name == "swap":
        stock = ModuleValidator.fix(stock)
    stock = nn.Sequential(pretrained.Inputs(SIZE, *pretrained.IMAGENET), stock)
    norms = [layer for layer in stock.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.requires_grad_(False)
    wanted = [p for p in stock.parameters() if p.requires_grad]
    made, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=stock, optimizer=optim.SGD(wanted, lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=40), poisson_sampling=False,
    )  # fmt: skip
    made.train()
    for layer in norms:
        layer.eval()
    for a, b in loader:
        nn.functional.cross_entropy(made(a), b).backward()
    optimizer.pre_step()
    expected = [p.grad for p in wanted]

    ours = cell(
        name, model=f"{__name__}:own_network", train="all", epsilon=None, noise_multiplier=1e-9,
        clip=0.5, batch_size=40, epochs=1, lr=1.0, momentum=0.0,
    )  # fmt: skip
    training = prepare(ours, data)
    held = [p for group in training.plain_optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in held]
    for a, b in training.batches():  # q = 1: all samples
        training.step(a, b)
    for old, p, gradient in zip(before, held, expected, strict=True):
        torch.testing.assert_close(old - p.detach(), gradient, rtol=2e-3, atol=2e-6)


def test_a_trial_sees_public_images_alone_and_three_parts_of_them_that_share_none(data: Data) -> None:
    found = pretrained.start(cell("ic-frozen", trial=True, epsilon=None, noise_multiplier=1.0), data)[1]
    images = data.public.tensors[0]
    parts = [part.tensors[0] for part in (found.private, found.public, found.test)]
    assert [len(part) for part in parts] == [8, 8, 4]
    assert torch.equal(torch.cat(parts), images)
    private = {row.numpy().tobytes() for row in data.private.tensors[0]}
    assert not any(row.numpy().tobytes() in private for part in parts for row in part)


def plan(data: Data, tmp_path: Path) -> Plan:
    assert data.weights is not None
    source = Source(dataset="tiny", root=tmp_path, image_size=SIZE, weights=data.weights)
    return Plan(
        source=source, preset=preset("tiny", pretrained=True), model=NETWORK, budgets=(1.0, 8.0), delta=1e-5,
        methods=tuple(METHODS[name] for name in PRETRAINED), seeds=1, epochs=3, jobs=1,
        store=Store(tmp_path), train="norm+head",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ic-frozen", "gbc-16"])
def test_a_trial_has_the_sample_rate_and_the_noise_in_an_update_of_the_run(
    name: str, data: Data, tmp_path: Path
) -> None:
    setting = Setting(batch_size=2240, lr=0.3, clip=0.5)
    made = plan(data, tmp_path)
    trial = made.trial(METHODS[name], 8.0, setting, (45_000, 2_000))
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    assert trial.trial
    assert trial.epsilon is None
    assert trial.epochs == 1
    assert trial.lr == 0.3
    rates = math.ceil(2_000 / trial.batch_size), math.ceil(45_000 / 2240)
    assert abs(rates[0] - rates[1]) <= 1  # as near as whole numbers come
    assert trial.noise_multiplier is not None
    sigma = trial.noise_multiplier * 2240 / trial.batch_size  # of a run with the same noise / batch size
    accountant = PLDAccountant()
    rate = 1 / math.ceil(45_000 / 2240)
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    accountant.compose(step, 3 * math.ceil(45_000 / 2240))
    assert accountant.get_epsilon(1e-5) == pytest.approx(8.0, rel=2e-3)


def test_a_fine_tuning_that_is_killed_between_epochs_ends_with_the_same_numbers(
    data: Data, tmp_path: Path
) -> None:
    run = cell("ic-frozen", train_from="blocks.3")
    straight = train(run, data)
    path = tmp_path / "unfinished.pt"

    class Killed(Exception):
        pass

    def stop(epoch: int) -> None:
        if epoch == 1:
            raise Killed

    with pytest.raises(Killed):
        train(run, data, checkpoint=path, on_epoch=stop)
    assert path.exists()
    resumed = train(run, data, checkpoint=path)
    assert resumed["accuracies"] == straight["accuracies"]
    assert resumed["history"] == straight["history"]
    assert resumed["layers"] == straight["layers"]


def test_weights_that_do_not_fit_are_refused_in_one_sentence(data: Data, tmp_path: Path) -> None:
    file = tmp_path / "odd.pth"
    assert data.weights is not None
    state = torch.load(data.weights, weights_only=True)
    torch.save({k: v for k, v in state.items() if not k.startswith("bn1")}, file)
    with pytest.raises(ValueError, match=r"odd.pth: does not fit .*: missing \['bn1"):
        pretrained.start(cell("ic"), replace(data, weights=file))
    torch.save(state | {"extra": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"not known \['extra'\]"):
        pretrained.start(cell("ic"), replace(data, weights=file))
    file.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="not a state dict of tensors"):
        pretrained.start(cell("ic"), replace(data, weights=file))


@pytest.mark.parametrize(
    ("model", "first", "words"),
    [
        (NETWORK, "blocks.99", "has no such layer"),
        (NETWORK, "blocks.2.0", "do not run one after the other there"),
        ("timm:test_resnet", "layer2", "do not run one after the other there"),
    ],
)
def test_a_network_is_cut_only_where_its_layers_run_one_after_the_other(
    model: str, first: str, words: str, data: Data, tmp_path: Path
) -> None:
    file = tmp_path / "w.pth"
    torch.save(timm.create_model(model.partition(":")[2]).state_dict(), file)
    with pytest.raises(ValueError, match=words):
        pretrained.start(cell("ic", model=model, train_from=first), replace(data, weights=file))

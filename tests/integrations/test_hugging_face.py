"""The FAQ's recipes for Accelerate and the Hugging Face Trainer, run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, reseed, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from opacus_bc import WarmupCosine, accounting

accelerate = pytest.importorskip("accelerate", reason="the extra [dev] brings it")
transformers = pytest.importorskip("transformers", reason="the extra [dev] brings it")

pytestmark = pytest.mark.filterwarnings("ignore")  # their advice on devices, workers and what they deprecate

FAQ = Path(__file__).parents[2] / "docs" / "faq.md"
EPOCHS, SAMPLES, BATCH, SIGMA = 2, 60, 12, 1.0
MODES: dict[str, dict[str, Any]] = {
    "one backward": {},
    "hooks": {"grad_sample_mode": "hooks"},
    "bc": {"clipping": "batch"},
    "gbc": {"clipping": "batch", "mini_batch_size": 3},
}


def recipe(heading: str) -> str:
    """The code that stands under a heading of the FAQ."""
    section = FAQ.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


ACCELERATE = recipe("Does it work with Accelerate?")
TRAINER = recipe("Does it work with the Hugging Face Trainer?")


class Images(Dataset[dict[str, Tensor]]):
    """Two classes told apart by their brightness, as a Trainer wants them."""

    def __init__(self, count: int, seed: int) -> None:
        self.labels = torch.arange(count) % 2
        noise = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.images = noise + self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def resnet() -> nn.Module:
    """Transformers' own network with BatchNorm, as small as it gets."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=2
    )
    return transformers.ResNetForImageClassification(config)


class Setup:
    """What a reader of a recipe has already; every draw and all noise of ours follow from seeds."""

    def __init__(self, *, model: nn.Module, data: Dataset[Any], public: Dataset[Any], mode: str) -> None:
        self.engine, self.model = engine(), model
        self.public = DataLoader(public, batch_size=len(public))
        self.names: dict[str, Any] = {
            "engine": self,
            "model": model,
            "optimizer": optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "loader": DataLoader(data, batch_size=BATCH),
            "dataset": data,
            "criterion": nn.functional.cross_entropy,
            "epochs": EPOCHS,
            "privacy": {
                "noise_multiplier": SIGMA,
                "max_grad_norm": 1.0,
                "batch_norm": self.public,
                **MODES[mode],
            },
        }

    def make_private(self, **kwargs: Any) -> tuple[Any, ...]:
        """The engine's, whose streams are seeded before anybody takes a step."""
        self.private = self.engine.make_private(**kwargs)
        _, self.optimizer, self.loader = self.private
        reseed(self.optimizer, self.loader, 1)
        return self.private

    def finalize(self, module: nn.Module) -> nn.Module:
        return self.engine.finalize(module)

    def run(self, code: str) -> nn.Module:
        """Execute a recipe; what it releases."""
        exec(compile(code, str(FAQ), "exec"), self.names)
        released = self.names["released"]
        assert isinstance(released, nn.Module)
        return released


def accelerated(mode: str) -> Setup:
    return Setup(model=mlp(norm=True), data=blobs(SAMPLES), public=blobs(40, seed=1), mode=mode)


def trained(mode: str) -> Setup:
    return Setup(model=resnet(), data=Images(SAMPLES, 0), public=Images(40, 1), mode=mode)


def plain_loop(setup: Setup, *, schedule: bool) -> nn.Module:
    names = setup.names
    given = {"module": names["model"], "optimizer": names["optimizer"], "data_loader": names["loader"]}
    model, optimizer, loader = setup.make_private(**given, **names["privacy"])
    rate = WarmupCosine(optimizer, total_steps=EPOCHS * loader.steps_per_epoch) if schedule else None
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            pair = not isinstance(batch, dict)
            loss = names["criterion"](model(batch[0]), batch[1]) if pair else model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            if rate is not None:
                rate.step()
    return setup.finalize(model)


def check_steps(setup: Setup) -> None:
    """Every move of the weights was private and booked, and costs what as many steps cost anywhere."""
    steps = EPOCHS * SAMPLES // BATCH
    assert setup.optimizer.steps_taken == len(setup.engine.accountant) == steps
    expected = accounting.epsilon(
        noise_multiplier=setup.optimizer.effective_noise_multiplier,
        sample_rate=BATCH / SAMPLES,
        steps=steps,
        delta=1e-5,
    )
    assert setup.engine.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


def same(found: nn.Module, expected: nn.Module) -> bool:
    """Parameters and buffers, bit by bit."""
    pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_accelerate_takes_the_private_steps_of_a_plain_loop(mode: str) -> None:
    setup, by_hand = accelerated(mode), accelerated(mode)
    before = weights(setup.model).clone()
    released, expected = setup.run(ACCELERATE), plain_loop(by_hand, schedule=False)
    check_steps(setup)
    assert setup.engine.get_epsilon(1e-5) == by_hand.engine.get_epsilon(1e-5)
    assert same(released, expected)
    assert not torch.equal(weights(released), before)
    seen = released[0](torch.cat([x for x, _ in setup.public])).detach()
    torch.testing.assert_close(released[1].running_mean, seen.mean(0))
    assert int(released[1].num_batches_tracked) == 1  # the public batch


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_takes_the_private_steps_of_a_plain_loop(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    setup, by_hand = trained(mode), trained(mode)
    before = weights(setup.model).clone()
    released, expected = setup.run(TRAINER), plain_loop(by_hand, schedule=True)
    check_steps(setup)
    assert setup.engine.get_epsilon(1e-5) == by_hand.engine.get_epsilon(1e-5)
    assert same(released, expected)
    assert not torch.equal(weights(released), before)
    stem = released.resnet.embedder.embedder
    seen = stem.convolution(setup.public.dataset.images).detach()
    torch.testing.assert_close(stem.normalization.running_mean, seen.mean((0, 2, 3)))
    assert int(stem.normalization.num_batches_tracked) == 1
    assert not any(tmp_path.rglob("*.*"))  # nothing was written that holds no statement


def with_slip(code: str, right: str, wrong: str) -> str:
    """A recipe with one thing done otherwise."""
    assert code.count(right) == 1
    return code.replace(right, wrong)


SLIPS = {
    "accelerate, loader prepared too": (
        accelerated,
        with_slip(
            ACCELERATE,
            "model, optimizer = accelerator.prepare(model, optimizer)",
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        ),
        "needs a new batch of the loader",
    ),
    "accelerate, accumulation": (
        accelerated,
        with_slip(
            with_slip(ACCELERATE, "cpu=True", "cpu=True, gradient_accumulation_steps=2"),
            "        accelerator.backward(criterion(model(x), y))\n        optimizer.step()\n",
            "        with accelerator.accumulate(model):\n"
            "            accelerator.backward(criterion(model(x), y))\n            optimizer.step()\n",
        ),
        "several batches were delivered",
    ),
    "trainer, accumulation": (
        trained,
        with_slip(TRAINER, "use_cpu=True", "use_cpu=True, gradient_accumulation_steps=2"),
        "several batches were delivered",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_refused_before_anything_moves(
    slip: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    make, code, message = SLIPS[slip]
    setup = make("bc")
    before = weights(setup.model).clone()
    with pytest.raises(RuntimeError, match=message):
        setup.run(code)
    assert torch.equal(weights(setup.model), before)
    assert len(setup.engine.accountant) == 0

"""What the zoo does with one network: a private step, the release, and a plain network that takes it over."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine

Build = Callable[[], nn.Module]
SAMPLES, CLASSES, RATE, BOUND = 4, 10, 0.1, 1.0
SIZES = (32, 64, 96, 256)


def data(pixels: int, *, seed: int, samples: int = SAMPLES) -> TensorDataset:
    """Random images with random labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, pixels, pixels, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


def public(pixels: int) -> DataLoader[Any]:
    """Two public batches."""
    return DataLoader(data(pixels, seed=1, samples=2 * SAMPLES), batch_size=SAMPLES)


def smallest_images(build: Build) -> int:
    """The smallest size of images on which the plain network trains and evaluates."""
    for pixels in SIZES:
        model = build()
        try:
            for _ in range(2):
                logits(model(data(pixels, seed=4, samples=2).tensors[0])).sum().backward()
                model.eval()
        except Exception:
            if pixels == SIZES[-1]:
                raise
        else:
            return pixels
    raise AssertionError("the last size returns or raises")


def logits(output: Any) -> Tensor:
    """The class scores; torchvision's GoogLeNet and Inception give auxiliary ones besides."""
    return output[0] if isinstance(output, tuple) else output


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy, as the network's authors train it: auxiliary classifiers count 0.3."""
    outputs = [one for one in output if one is not None] if isinstance(output, tuple) else [output]
    losses = [nn.functional.cross_entropy(one, labels) for one in outputs]
    return losses[0] + 0.3 * sum(losses[1:])


def private_step(
    model: nn.Module, pixels: int, *, noise: float = 1.0, **arguments: Any
) -> tuple[PrivacyEngine, Any]:
    """One logical step over all samples; the engine, and the module as it trains."""
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=RATE),
            data_loader=DataLoader(data(pixels, seed=0), batch_size=SAMPLES),
            noise_multiplier=noise,
            max_grad_norm=BOUND,
            poisson_sampling=False,
            **arguments,
        )
        module.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(module(x), y).backward()
            optimizer.step()
    if optimizer.steps_taken != 1:
        raise AssertionError(f"{optimizer.steps_taken} steps were taken, not one")
    return engine, module


def released(build: Build, pixels: int, **arguments: Any) -> None:
    """A step, ``finalize``, and a plain network that loads the release and gives the same outputs."""
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    engine, module = private_step(model, pixels, **arguments)
    plain = engine.finalize(module)
    if not any(not torch.equal(p, old) for p, old in zip(plain.parameters(), before, strict=True)):
        raise AssertionError("no parameter has moved")
    fresh = build()
    fresh.load_state_dict(plain.state_dict(), strict=True)
    kinds = [(type(a), type(b)) for a, b in zip(plain.modules(), fresh.modules(), strict=True)]
    if any(a is not b for a, b in kinds):
        raise AssertionError("the released network has other layers than a plain one")
    x = data(pixels, seed=2).tensors[0]
    with torch.no_grad():
        if not torch.equal(logits(plain.eval()(x)), logits(fresh.eval()(x))):
            raise AssertionError("a plain network with the released weights gives other outputs")


def stock(build: Build, pixels: int) -> None:
    """One step of stock Opacus after its own repair of the network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ModuleValidator.fix(build())
        module, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=RATE),
            data_loader=DataLoader(data(pixels, seed=0), batch_size=SAMPLES),
            noise_multiplier=1.0,
            max_grad_norm=BOUND,
            poisson_sampling=False,
        )
        module.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(module(x), y).backward()
            optimizer.step()


def without_randomness(model: nn.Module) -> nn.Module:
    """Dropout and stochastic depth off, so that a second run computes the same."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def settle(model: nn.Module, pixels: int) -> nn.Module:
    """Give running statistics values that a trained network could have."""
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(data(pixels, seed=3, samples=8).tensors[0])
    return model


def oracle_update(model: nn.Module, pixels: int) -> list[Tensor]:
    """What a step without noise releases: gradients of single samples in evaluation mode, clipped, averaged.

    Nothing of this package is used.
    """
    plain = copy.deepcopy(model).train()
    for module in plain.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
    total = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    for x, y in DataLoader(data(pixels, seed=0), batch_size=1):
        grads = torch.autograd.grad(loss_of(plain(x), y), list(plain.parameters()), allow_unused=True)
        rows = [torch.zeros_like(t) if g is None else g.double() for g, t in zip(grads, total, strict=True)]
        norm = torch.sqrt(sum((row.square().sum() for row in rows), torch.zeros(())))
        factor = min(1.0, BOUND / float(norm))
        for sum_, row in zip(total, rows, strict=True):
            sum_ += factor * row
    return [sum_ / SAMPLES for sum_ in total]


def oracle_distance(build: Build, pixels: int, mode: str = "hooks") -> float:
    """Relative distance of the noise-free release of IC with frozen statistics from the oracle's.

    Args:
        build: Makes the network.
        pixels: Height and width of the images.
        mode: ``grad_sample_mode`` of the step: per-sample gradients (``"hooks"``) or one backward (``"bk"``).
    """
    model = without_randomness(settle(build(), pixels))
    expected = oracle_update(model, pixels)
    before = [p.detach().double().clone() for p in model.parameters()]
    private_step(model, pixels, noise=0.0, clipping="flat", batch_norm="frozen", grad_sample_mode=mode)
    found = [(old - p.detach().double()) / RATE for old, p in zip(before, model.parameters(), strict=True)]
    apart = torch.sqrt(
        sum(((a - b).square().sum() for a, b in zip(found, expected, strict=True)), torch.zeros(()))
    )
    size = torch.sqrt(sum((b.square().sum() for b in expected), torch.zeros(())))
    return float(apart / size)

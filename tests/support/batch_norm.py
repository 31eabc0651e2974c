"""What the BatchNorm tests share: small image data, a network with two BatchNorm layers, a training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from support import engine

# The first layer's input asks for no gradient; torch remarks on it under every full backward hook.
BACKWARD_HOOK_REMARK = "ignore:Full backward hook is firing:UserWarning"

PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [1.0] * 10}
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}
GHOST = {"clipping": "flat", "grad_sample_mode": "ghost"}
INDIVIDUAL: dict[str, dict[str, Any]] = {
    "flat": {"clipping": "flat"},
    "per_layer": PER_LAYER,
    "adaptive": ADAPTIVE,
    "ghost": GHOST,
}


def images(n: int = 48, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 6, 6, generator=generator) * 2 + 1
    return TensorDataset(x, (x.mean((1, 2, 3)) > 1).long())


def public(n: int = 40, batch_size: int = 16, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(images(n, seed=99), batch_size=batch_size, **kwargs)


def network(seed: int = 0, **norm: Any) -> nn.Sequential:
    """Two convolutions with BatchNorm; the affine parameters are not the identity."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, **norm),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5, **norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 2),
    )
    for layer in (model[1], model[4]):
        if layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return model


def make_private(
    model: nn.Module,
    dataset: TensorDataset | None = None,
    *,
    accountant: str = "fdp",
    lr: float = 0.1,
    seed: int = 0,
    batch_size: int = 16,
    eng: PrivacyEngine | None = None,
    **kwargs: Any,
) -> tuple[PrivacyEngine, Any, Any, Any, Any]:
    """Engine, module, optimizer, criterion and loader; everything random follows ``seed``."""
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "clipping": "batch"} | kwargs
    if given["clipping"] == "adaptive" and accountant == "fdp":
        accountant = "prv"  # Opacus's adaptive clipping has no certified epsilon
    eng = eng or engine(accountant=accountant)
    torch.manual_seed(seed)
    loader = DataLoader(
        dataset or images(), batch_size=batch_size, generator=torch.Generator().manual_seed(seed)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="batch_norm='unprotected'")
        warnings.filterwarnings("ignore", message="batch_norm='private': with")  # tiny data, much noise
        warnings.filterwarnings("ignore", message="batch_norm='frozen': .* hold the statistics")
        warnings.filterwarnings("ignore", message="Opacus's clipping='adaptive'")
        made = eng.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=lr),
            data_loader=loader,
            noise_generator=torch.Generator().manual_seed(seed),
            **given,
        )
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    return eng, made[0], made[1], criterion, made[-1]


def train(model: Any, optimizer: Any, criterion: Any, loader: Any, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            if len(x) == 0:
                continue
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()


def batches(loader: Any, count: int) -> Iterator[Any]:
    """``count`` batches of as many passes as it takes."""
    endless = chain.from_iterable(iter(loader) for _ in repeat(None))
    return islice(endless, count)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics as a state dict shows them."""
    own = {name for name, _ in model.named_parameters()}
    return {name: value.clone() for name, value in model.state_dict().items() if name not in own}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

"""Fine-tune a network of timm privately from pretrained weights, with its BatchNorm in place.

    python examples/finetune_timm.py --weights tf_efficientnet_lite0.pth --data DIR    # CIFAR-10 in DIR
    python examples/finetune_timm.py --model test_efficientnet --image-size 32         # digits, no weights
    python examples/finetune_timm.py --clipping batch --backend inductor --bfloat16    # compiled

Running statistics stay those of the weights (``batch_norm="frozen"``), so nothing private enters them. Only
BatchNorm's weights and biases and the head are trained, unless ``--train`` says otherwise; what the optimizer
does not hold costs nothing. Without ``--data`` the images are scikit-learn's digits; a tenth of the training
images counts as public.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import BatchMemoryManager, PrivacyEngine
from opacus_bc.experiments.training.data import Data, limited, load


def pretrained(name: str, weights: Path | None, num_classes: int) -> nn.Module:
    """The network with the weights of the file and a new head."""
    model = timm.create_model(name, num_classes=num_classes)
    if weights is not None:
        head = {id(p) for p in model.get_classifier().parameters()}
        new = {entry for entry, p in model.named_parameters() if id(p) in head}
        state = torch.load(weights, weights_only=True)
        missing, unknown = model.load_state_dict(
            {entry: value for entry, value in state.items() if entry not in new}, strict=False
        )
        if set(missing) != new or unknown:
            raise SystemExit(f"{weights} does not fit {name}: missing {missing[:3]}, not known {unknown[:3]}")
    return model


def moving(model: nn.Module, train: str) -> list[nn.Parameter]:
    """The parameters that the optimizer gets."""
    if train == "all":
        return list(model.parameters())
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)] if train == "norm+head" else []
    return [p for layer in (*norms, model.get_classifier()) for p in layer.parameters()]


def images(part: TensorDataset, size: int, model: nn.Module) -> TensorDataset:
    """RGB of the network's size, normalised as in pretraining."""
    x, y = part.tensors
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    large = nn.functional.interpolate(x.float() / 255, size=(size, size), mode="bicubic")
    return TensorDataset((large - mean) / std, y)


def accuracy(model: nn.Module, part: TensorDataset) -> float:
    """Per cent right."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(part, batch_size=100))
    model.train()
    return 100 * right / len(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", type=Path, help="state dict to start from; none: random weights")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10; none: digits")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--train", choices=("all", "norm+head", "head"), default="norm+head")
    parser.add_argument("--clipping", choices=("flat", "batch"), default="flat")
    parser.add_argument("--samples", type=int, default=2000, help="training images, public ones included")
    parser.add_argument("--batch-size", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--backend", help="of torch.compile, with --clipping batch; none: not compiled")
    parser.add_argument("--bfloat16", action="store_true", help="autocast the forward pass (batch clipping)")
    config = parser.parse_args()

    torch.manual_seed(0)
    name, root = ("digits", "data") if config.data is None else ("cifar10", config.data)
    data: Data = limited(load(name, root, image_size=32), config.samples)
    model = pretrained(config.model, config.weights, data.num_classes)
    private, public, test = (
        images(part, config.image_size, model) for part in (data.private, data.public, data.test)
    )
    if config.weights is None:  # statistics of nothing would be frozen: take those of public images
        model(public.tensors[0])

    torch.seed()  # nobody may know the masks of dropout
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(moving(model, config.train), lr=config.lr, momentum=0.9),
        data_loader=DataLoader(private, batch_size=config.batch_size, shuffle=True),
        target_epsilon=config.epsilon,
        target_delta=config.delta,
        epochs=config.epochs,
        max_grad_norm=1.0,
        clipping=config.clipping,
        batch_norm="frozen",
        **({"grad_sample_mode": "bk"} if config.clipping == "flat" else {}),  # one ordinary backward
    )
    # Poisson batches differ in size.
    forward = torch.compile(module, backend=config.backend, dynamic=True) if config.backend else module
    print(f"{sum(p.numel() for p in moving(model, config.train))} parameters are trained")

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()

    for epoch in range(config.epochs):
        started = time.perf_counter()
        module.train()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=128, optimizer=optimizer
        ) as chunks:
            for x, y in chunks:
                step(x, y)
        print(f"epoch {epoch + 1}: {time.perf_counter() - started:.1f} s, {accuracy(model, test):.1f} %")
    epsilon = math.ceil(100 * engine.get_epsilon(config.delta)) / 100  # an upper bound is rounded up
    print(f"epsilon {epsilon:.2f} at delta {config.delta:g} after {len(engine.accountant)} steps")

    released = engine.finalize(module)
    plain = pretrained(config.model, None, data.num_classes)
    plain.load_state_dict(released.state_dict(), strict=True)
    print(f"test accuracy {accuracy(plain, test):.1f} % of the released weights in a plain network")


if __name__ == "__main__":
    main()

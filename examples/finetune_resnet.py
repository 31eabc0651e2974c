"""Fine-tune a torchvision ResNet with batch clipping, torch.compile and bfloat16 autocast.

BatchNorm stays: private forwards use the mini-set's statistics, evaluation those of public data. The data
are synthetic images of CIFAR's shape, so that the script runs anywhere; put your own in their place, and
``weights="DEFAULT"`` for pretrained weights.

    python examples/finetune_resnet.py                       # two to three CPU minutes, mostly compiling
    python examples/finetune_resnet.py --backend aot_eager   # without a C++ compiler
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from opacus_bc import PrivacyEngine


def images(n: int, seed: int) -> TensorDataset:
    """Ten classes, told apart by a faint pattern each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (n,), generator=generator)
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.randn(n, 3, 32, 32, generator=generator) + 0.5 * patterns[labels], labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    config = parser.parse_args()

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=10)
    for name, parameter in model.named_parameters():  # train the last block and the head
        parameter.requires_grad_(name.startswith(("layer4", "fc")))

    engine = PrivacyEngine()
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(trainable, lr=0.05, momentum=0.9),
        data_loader=DataLoader(images(config.samples, seed=1), batch_size=config.batch_size, shuffle=True),
        target_epsilon=50.0,
        target_delta=1e-4,
        epochs=config.epochs,
        max_grad_norm=1.0,
        clipping="batch",
        batch_norm=DataLoader(images(128, seed=2), batch_size=64),
    )
    compiled = torch.compile(model, backend=config.backend, dynamic=True)  # Poisson batches differ in size

    for epoch in range(config.epochs):
        started = time.perf_counter()
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(compiled(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {time.perf_counter() - started:.1f} s")
    epsilon = math.ceil(100 * engine.get_epsilon(1e-4)) / 100  # an upper bound is rounded up
    print(f"epsilon {epsilon:.2f} at delta 1e-4 after {len(engine.accountant)} steps")

    released = engine.finalize(model).eval()
    x, y = images(256, seed=3).tensors
    with torch.no_grad():
        print(f"test accuracy {(released(x).argmax(1) == y).float().mean():.1%}")


if __name__ == "__main__":
    main()

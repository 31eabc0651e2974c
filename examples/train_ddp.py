"""Batch clipping on DistributedDataParallel: the loop of one process, on several.

    torchrun --nproc-per-node 2 examples/train_ddp.py                       # BC: one clip a batch
    torchrun --nproc-per-node 2 examples/train_ddp.py --mini-batch-size 16  # GBC: one clip a mini-set

Every rank passes the same loader over all the data, with the global batch size: the private loader deals each
draw out to the ranks. Draws, noise and epsilon are those of one process. The data are synthetic.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine


def data(n: int, seed: int) -> TensorDataset:
    """Two classes told apart by a direction."""
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--mini-batch-size", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--checkpoint", type=Path, default=None, help="resumed from if it exists, then written"
    )
    config = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(model)  # starts from rank 0's weights

    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data(config.samples, seed=1), batch_size=config.batch_size),
        target_epsilon=20.0,
        target_delta=1e-5,
        epochs=config.epochs,
        max_grad_norm=1.0,
        clipping="batch",
        mini_batch_size=config.mini_batch_size,
        batch_norm=DataLoader(data(256, seed=2), batch_size=128),
    )
    if config.checkpoint is not None and config.checkpoint.exists():
        engine.load_checkpoint(path=config.checkpoint, module=model, optimizer=optimizer)

    for _ in range(config.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if config.checkpoint is not None:
        engine.save_checkpoint(path=config.checkpoint, module=model, optimizer=optimizer)

    released = engine.finalize(model).eval()
    x, y = data(1024, seed=3).tensors
    accuracy = (released(x).argmax(1) == y).float().mean()
    epsilon = math.ceil(100 * engine.get_epsilon(1e-5)) / 100  # an upper bound is rounded up
    print(
        f"rank {dist.get_rank()}: epsilon {epsilon:.2f} after {len(engine.accountant)} steps, "
        f"test accuracy {accuracy:.1%}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Batch clipping on FSDP2: no process holds the whole model, its gradient or its noise.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                       # BC: one clip a batch
    torchrun --nproc-per-node 2 examples/train_fsdp.py --mini-batch-size 32  # GBC: one clip a mini-set

Shard first, build the optimizer on the shards, then make it private. Every rank passes the same loader over
all the data, with the global batch size; each mini-set is split over the ranks. The data are synthetic.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, PrivacyEngine


def data(n: int, seed: int) -> TensorDataset:
    """Two classes told apart by a direction."""
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def network() -> nn.Sequential:
    """Four layers; the second has most of the parameters."""
    return nn.Sequential(
        nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--mini-batch-size", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=3)
    config = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same initial weights everywhere
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

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
        alc=ALC(DataLoader(data(512, seed=2)), apply="scale"),  # norms of public data, added up over shards
    )
    for _ in range(config.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    state = get_model_state_dict(engine.finalize(model), options=StateDictOptions(full_state_dict=True))
    epsilon = math.ceil(100 * engine.get_epsilon(1e-5)) / 100  # an upper bound is rounded up
    line = f"epsilon {epsilon:.2f} after {len(engine.accountant)} steps"
    if dist.get_rank() == 0:  # the whole model, for whoever receives it
        released = network()
        released.load_state_dict(state)
        x, y = data(1024, seed=3).tensors
        line += f", test accuracy {(released(x).argmax(1) == y).float().mean():.1%}"
    print(f"rank {dist.get_rank()}: {held} of {whole} parameters, {line}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

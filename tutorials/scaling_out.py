# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scaling out: more data, more processes, interrupted runs
#
# Batch clipping makes no per-sample gradients and leaves the model as it is, so what is known about training on many processes applies.
# It comes in two kinds: **BC** clips the gradient of a whole batch of m samples, in **GBC** (general batch clipping) each drawn sample falls into one of k *mini-sets* of about s samples, and the
# gradient of each is clipped; `keep_your_batchnorm` compares them. This notebook shows what a draw costs as the data grow, the same run on one and on two
# processes, and a run that is interrupted and resumed without losing a bit, or a step of privacy.

# %%
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import PrivacyEngine
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import PoissonBins

# Cryptographic noise is not for a notebook; Opacus's hooks see inputs without gradients.
warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
ROOT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "examples").is_dir())

# %% [markdown]
# ## More data: what a draw costs
#
# Poisson sampling takes every sample with probability q. Asking each of N samples costs O(N) a step. The same distribution comes out if one first
# draws how many samples there are, from Binomial(N, q), and then that many different indices: O(m) for a batch of m, whatever N is.


# %%
def milliseconds(action, repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


BATCH = 1024
sizes = [10**e for e in ((4, 5) if QUICK else range(4, 10))]
ours, coins = [], []
for size in sizes:
    plan = SamplingPlan(
        kind="poisson", dataset_size=size, steps_per_epoch=size // BATCH, mini_sets=1, mini_set_size=BATCH
    )
    ours.append(milliseconds(PoissonBins(plan, np.random.default_rng(0)).draw, 9))
    if size <= 10**7:
        coins.append(milliseconds(lambda size=size: torch.nonzero(torch.rand(size) < BATCH / size), 5))

# %% [markdown]
# **Look at** the slope. The grey line flips N coins; at 10⁹ samples it would take seconds and gigabytes, so it stops at 10⁷.

# %%
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.loglog(sizes, ours, "o-", color="#0072b2", label="binomial, then indices: O(m)")
axes.loglog(sizes[: len(coins)], coins, "s--", color="0.5", label="one coin a sample: O(N)")
axes.set(xlabel="samples N", ylabel="milliseconds a draw", title=f"drawing a batch of about {BATCH:,}")
axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## More processes: DistributedDataParallel
#
# `examples/train_ddp.py` is an ordinary DDP script with one `make_private_with_epsilon` in it. These are the lines that matter:
#
# ```python
# dist.init_process_group("gloo")
# model = DistributedDataParallel(model)                     # first DDP, then make_private
# engine = PrivacyEngine()
# model, optimizer, loader = engine.make_private_with_epsilon(
#     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
#     data_loader=DataLoader(everything, batch_size=256),    # on every rank: all the data, the global batch size
#     target_epsilon=20.0, target_delta=1e-5, epochs=epochs, max_grad_norm=1.0,
#     clipping="batch", mini_batch_size=mini_batch_size, batch_norm=public_loader,
# )
# for x, y in loader:                                        # the loop of one process; each rank gets its share
# ```
#
# The data are 4,096 synthetic points of two classes, told apart by a direction, so 50 % is guessing. The model has BatchNorm. The target is ε = 20 at δ = 10⁻⁵. We start
# the script with `torchrun`.

# %%
folder = tempfile.TemporaryDirectory()
small = ["--samples", "512", "--batch-size", "64", "--epochs", "1"] if QUICK else ["--epochs", "2"]


def torchrun(ranks: int, *arguments: str, script: str = "train_ddp.py") -> None:
    """Run the example on that many processes, in the temporary folder, and print what each rank says."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(ROOT / "examples" / script), *small, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder.name, check=False
    )
    assert done.returncode == 0, done.stderr
    print(f"$ torchrun --nproc-per-node {ranks} examples/{script} {' '.join([*small, *arguments])}")
    for line in sorted(re.findall(r"rank \d+: .*? steps(?:, test accuracy [\d.]+%)?", done.stdout)):
        print(line)


# %% [markdown]
# First GBC with mini-sets of 16. Each draw of 256 samples is 16 mini-sets. The ranks share out whole mini-sets, clip their own, and add up the clipped sums: what is sent is one
# vector a step. As on one process, the loader delivers mini-sets, and the weights move once a draw: `zero_grad()` clears the gradient between mini-sets, `step()` adds each clipped
# gradient to the sum and makes the step at the last one. `loader.steps_per_epoch` counts steps, 16 here.
#
# **Look at** ε, the number of steps and the accuracy: two processes have those of one. A draw is one draw however many ranks share it, and so is its noise.

# %%
print("target: epsilon 20 at delta 1e-5")
torchrun(1, "--mini-batch-size", "16")
if not QUICK:
    torchrun(2, "--mini-batch-size", "16", "--checkpoint", "run.pt")

# %% [markdown]
# Now BC, one clip a batch: the ranks split the batch, and the sum of their gradients is clipped. Draw, clip and noise are again those of one process, but BatchNorm normalises with the
# statistics of each rank's part of the batch (use SyncBatchNorm if you want those of the whole), so the two runs are not the same.
#
# **Look at** the accuracy, next to that above. At equal C, σ and m, BC carries 2m = 512 times the noise of clipping single samples, and mini-sets of 16 carry 2s = 32 times. With 4,096
# samples and 32 steps BC hardly learns. The third call shows what it wants: more data in smaller batches. Then 2m is 64, σ is smaller too, because the sample rate is, and there are 1,024 steps
# for the noise to average out.

# %%
if not QUICK:
    torchrun(1)
    torchrun(2)
    torchrun(2, "--samples", "16384", "--batch-size", "32")

# %% [markdown]
# ## Interrupted runs
#
# `save_checkpoint` writes weights, optimizer, accountant and the place in the run into one file: nothing that ε does not cover. A run that is resumed from it
# draws fresh noise. With `exact=True` a second file, `.secret`, holds the states of the random generators, and the resumed run is the same to the bit. Whoever
# has that file can take the noise off: keep it to yourself.
#
# This is what stands at the beginning of the script, the same in every run, and an epoch of training:

# %%
digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1)
data = TensorDataset(images, torch.tensor(digits.target))
private, public = random_split(data, [1600, 197], torch.Generator().manual_seed(0))


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(private, batch_size=160, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(2),  # known seeds: only to compare two runs
        clipping="batch",
        mini_batch_size=8,
        batch_norm=DataLoader(public, batch_size=197),
    )
    return engine, *made


def train_an_epoch(model, optimizer, loader) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# %% [markdown]
# We train two epochs without a break, then one epoch, save, *forget everything*, resume and train the second one.

# %%
engine, model, optimizer, loader = start()
train_an_epoch(model, optimizer, loader)
train_an_epoch(model, optimizer, loader)
straight, spent = [p.detach().clone() for p in model.parameters()], engine.get_epsilon(1e-4)

path = f"{folder.name}/digits.pt"
engine, model, optimizer, loader = start()
train_an_epoch(model, optimizer, loader)
engine.save_checkpoint(path=path, module=model, optimizer=optimizer, exact=True)
print("files:", sorted(name for name in os.listdir(folder.name) if name.startswith("digits")))

del engine, model, optimizer, loader  # the machine goes down here
engine, model, optimizer, loader = start()
engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
print(f"resumed after {len(engine.accountant)} steps")
train_an_epoch(model, optimizer, loader)

# %% [markdown]
# **Look at** the lines: not one weight differs, and ε (an upper bound, so rounded up) counts the steps before the break.

# %%
same = all(torch.equal(a, b.detach()) for a, b in zip(straight, model.parameters(), strict=True))
print(f"weights equal bit by bit: {same}")
for words, value in (("without a break", spent), ("with one", engine.get_epsilon(1e-4))):
    print(f"epsilon {words}: {math.ceil(1e4 * value) / 1e4:.4f} after {len(engine.accountant)} steps")
assert same
assert spent == engine.get_epsilon(1e-4)

# %% [markdown]
# The same on two processes: the example resumes from its checkpoint if there is one, so the call from above goes on where it ended.
#
# **Look at** the number of steps, and at ε: it has passed the target of 20. That is an overrun, and the accountant, which came along in the checkpoint, does not hide it. The noise was
# calibrated for two epochs and four were made. If you mean to stop and go on, pass the *total* to `epochs=` in every call, and train what is left.

# %%
if not QUICK:
    torchrun(2, "--mini-batch-size", "16", "--checkpoint", "run.pt")

# %% [markdown]
# ## Models that do not fit on one device: FSDP2
#
# `fully_shard` gives every rank a piece of each layer. Shard first, build the optimizer on the shards, then make it private; these lines of `examples/train_fsdp.py` matter:
#
# ```python
# mesh = init_device_mesh("cpu", (dist.get_world_size(),))
# for layer in model:
#     if isinstance(layer, nn.Linear):
#         fully_shard(layer, mesh=mesh)
# fully_shard(model, mesh=mesh)
# optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# model, optimizer, loader = engine.make_private_with_epsilon(
#     module=model, optimizer=optimizer, data_loader=DataLoader(everything, batch_size=256), ...,
#     clipping="batch", mini_batch_size=mini_batch_size, alc=ALC(public_loader, apply="scale"),
# )
# ```
#
# A mini-set spans all ranks; norms are added up over shards, and each shard gets noise from a stream of its own: the same noise on two shards could be subtracted. This model has
# *no* BatchNorm, since public statistics are not available under FSDP2 yet; in their place it shows clip bounds by layer
# (ALC by scaling, see `adaptive_layerwise_clipping`). Checkpoints are not built for FSDP2 either; `examples/README.md` says what to do, and lists what is refused.
#
# **Look at** how many parameters each rank holds, and that ε stays within the target of 20. (Rank 0 tests the whole model.)

# %%
if not QUICK:
    torchrun(2, "--mini-batch-size", "32", script="train_fsdp.py")
folder.cleanup()

# %% [markdown]
# ## What to take home
#
# - One draw, one noise, one ε, on any number of ranks; a step sends what plain DDP sends (the documentation's page on scaling has the formulas).
# - Checkpoints carry the accountant: a resumed run cannot forget what it has spent.
# - Two continuations from one checkpoint that are both looked at have spent both, and no accountant sees that.

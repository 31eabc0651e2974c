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
# This notebook shows what a draw costs as the data grow, the same run on one and on two processes, and a run that is interrupted
# and resumed without losing a bit, or a step of privacy.

# %%
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
from opacus_bc.sampling import PoissonBins, SamplingPlan

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
#
# **Look at** the slope. The grey line flips N coins; at 10⁹ samples it would take seconds and gigabytes, so it stops at 10⁷.

# %%
BATCH = 1024
sizes = [10**e for e in ((4, 5) if QUICK else range(4, 10))]
ours, coins = [], []
for size in sizes:
    plan = SamplingPlan(
        kind="poisson",
        dataset_size=size,
        steps_per_epoch=max(1, size // BATCH),
        mini_sets=1,
        mini_set_size=BATCH,
    )
    draws = PoissonBins(plan, np.random.default_rng(0))
    times = []
    for _ in range(9):
        started = time.perf_counter()
        draws.draw()
        times.append(time.perf_counter() - started)
    ours.append(1e3 * np.median(times))
    if size <= 10**7:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            torch.nonzero(torch.rand(size) < BATCH / size)
            times.append(time.perf_counter() - started)
        coins.append(1e3 * np.median(times))

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.loglog(sizes, ours, "o-", color="#0072b2", label="binomial, then indices: O(m)")
axes.loglog(sizes[: len(coins)], coins, "s--", color="0.5", label="one coin a sample: O(N)")
axes.set(xlabel="samples N", ylabel="milliseconds a draw", title=f"drawing a batch of about {BATCH:,}")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## More processes: DistributedDataParallel
#
# `examples/train_ddp.py` is an ordinary DDP script with one `make_private_with_epsilon` in it. Every rank passes the *same* loader with the *global*
# batch size; the private loader deals each draw out to the ranks. We start it with `torchrun`, on one and on two processes.
#
# **Look at** ε and the number of steps: they are those of one process. Draw, clip and noise are too: a draw is one draw however many ranks share it.

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


torchrun(1)
if not QUICK:
    torchrun(2, "--checkpoint", "run.pt")

# %% [markdown]
# With `--mini-batch-size 16` the ranks share out the mini-sets of a draw, clip their own, and add up clipped sums: what is sent is again one vector a step.

# %%
if not QUICK:
    torchrun(2, "--mini-batch-size", "16")

# %% [markdown]
# ## Interrupted runs
#
# `save_checkpoint` writes weights, optimizer, accountant and the place in the run into one file: nothing that ε does not cover. A run that is resumed from it
# draws fresh noise. With `exact=True` a second file, `.secret`, holds the states of the random generators, and the resumed run is the same to the bit. Whoever
# has that file can take the noise off: keep it to yourself.
#
# We train two epochs without a break, then one epoch, save, *forget everything*, resume and train the second one.

# %%
digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1), torch.tensor(digits.target)
)
private, public = random_split(data, [1600, 197], torch.Generator().manual_seed(0))


def start():
    """What stands at the beginning of the script, the same in every run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(private, batch_size=160, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
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
# **Look at** both lines: not one weight differs, and ε counts the steps before the break.

# %%
same = all(torch.equal(a, b.detach()) for a, b in zip(straight, model.parameters(), strict=True))
print(f"weights equal bit by bit: {same}")
print(
    f"epsilon without a break {spent:.4f}, with one {engine.get_epsilon(1e-4):.4f}, {len(engine.accountant)} steps"
)
assert same
assert spent == engine.get_epsilon(1e-4)

# %% [markdown]
# The same on two processes: the example resumes from its checkpoint if there is one, so the call from above goes on where it ended. **Look at** the number of
# steps, and that ε passes the target of the first call: the accountant came along.

# %%
if not QUICK:
    torchrun(2, "--checkpoint", "run.pt")

# %% [markdown]
# ## Models that do not fit on one device: FSDP2
#
# `fully_shard` gives every rank a piece of each layer. Shard first, build the optimizer on the shards, then make it private. A mini-set spans all ranks; norms are
# added up over shards, and each shard gets noise from a stream of its own: the same noise on two shards could be subtracted. Public BatchNorm statistics are not
# available here yet; `examples/README.md` lists what is refused.
#
# **Look at** how many parameters each rank holds, and that ε is that of one process again.

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

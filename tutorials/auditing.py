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
# # Auditing: attack your own run
#
# An accountant says what a mechanism *should* give away at most. A bug in clipping, noise or sampling does not crash: it makes that number a lie.
# An audit looks from outside. It trains many times with and without one *canary*, tries to tell the two apart from what was released, and turns its
# success into a **lower bound** on ε. If the lower bound lies above the claim, the claim is false.
#
# We audit a right run and two broken ones. What an audit cannot do: a low bound only says that *this attack* failed.

# %%
import os
import warnings
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.audit import Toy, audit_training, audit_worst_case

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
REPETITIONS, RUNS = (4_000, 40) if QUICK else (40_000, 150)
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "0.5"

# %% [markdown]
# ## The worst case, through the real optimizer
#
# A `Toy` is the hardest data set that we know: all samples point one way, and the canary turns the clipped mini-set around, a move of the full
# sensitivity 2C. `audit_worst_case` sends it through the real loader, optimizer and accountant, thousands of times side by side.

# %%
toy = Toy(method="BC", noise_multiplier=1.0)  # one step, no sampling: the claim is a Gaussian with mu = 1
right = audit_worst_case(toy, name="BC as it is", repetitions=REPETITIONS)
print(f"claimed mu {right.claimed_mu:.2f}, audited mu >= {right.audited_mu:.2f}: {right.verdict}")

# %% [markdown]
# Now the classic mistake: noise for a sensitivity of C instead of 2C, as if a mini-set were a sample. We break that one function and audit
# again. The accountant does not notice.

# %%
with mock.patch("opacus_bc.clipping.sensitivity", lambda clip_bound, *, unit, adjacency: clip_bound):
    broken = audit_worst_case(toy, name="noise for C", repetitions=REPETITIONS)
print(f"claimed mu {broken.claimed_mu:.2f}, audited mu >= {broken.audited_mu:.2f}: {broken.verdict}")

# %% [markdown]
# **Look at** the overlap of the two histograms: it is the adversary's uncertainty. On the right, the claim is the solid line; every test that the
# scores allow is a point. A point *below* the line refutes the claim. (The verdict uses confidence limits and held-out repetitions; the picture shows
# raw rates, so a point or two below the line would prove nothing.)

# %%
figure, axes = plt.subplots(2, 2, figsize=(8.5, 5.6), layout="constrained", width_ratios=[1.4, 1])
alpha = np.linspace(0, 1, 400)
for (left, panel), result, title in zip(axes, (right, broken), ("as it is", "noise for C only"), strict=True):
    bins = np.linspace(
        *np.quantile(np.concatenate([result.scores.present, result.scores.absent]), [0.001, 0.999]), 60
    )
    left.hist(result.scores.absent, bins, color=GREY, alpha=0.6, label="without the canary")
    left.hist(result.scores.present, bins, color=ORANGE, alpha=0.6, label="with it")
    left.set(title=f"{title}: scores", xlabel="the attack's score", yticks=[])
    thresholds = np.quantile(result.scores.absent, np.linspace(0.005, 0.995, 60))
    false_positive = [(result.scores.absent > t).mean() for t in thresholds]
    false_negative = [(result.scores.present <= t).mean() for t in thresholds]
    panel.plot(alpha, result.curve(alpha), color=BLUE, label="claimed trade-off")
    panel.plot(false_positive, false_negative, ".", color=ORANGE, label="tests found")
    panel.set(
        xlabel="false positive rate", ylabel="false negative rate", title=result.verdict, aspect="equal"
    )
axes[0, 0].legend(frameon=False, fontsize=9)
axes[0, 1].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## Many steps, drawn at random
#
# The same with 50 steps at sample rate 0.1. **Look at** the audited ε next to the claimed one: the audit reaches most of what is claimed and never
# more than it, so the noise is really there and the accountant is not far from the truth.

# %%
repetitions = REPETITIONS // 4
print(f"{'':24}{'claimed ε':>12}{'audited ε ≥':>14}{'verdict':>12}")
for method, extra in (("IC", {}), ("BC", {}), ("ALC", {"layers": 4})):
    sigma = 2.0 if method == "ALC" else 1.0  # four layers: sigma_eff = 2 / sqrt(4)
    drawn = Toy(method=method, noise_multiplier=sigma, steps_per_epoch=10, steps=5 if QUICK else 50, **extra)
    result = audit_worst_case(drawn, name=method, repetitions=repetitions)
    print(f"{method:24}{result.claimed_epsilon:12.2f}{result.family_epsilon:14.2f}{result.verdict:>12}")

# %% [markdown]
# ## Audit a training function of yours
#
# `audit_training` takes any function `train(with_canary, seed)` that trains once and returns a score: larger where the canary seems in. It must depend on
# what is *released* only. Here: a small network with BatchNorm, and an adversary who looks at the running mean of its first layer.
#
# First with plain BatchNorm, `batch_norm="unprotected"`: gradients are clipped and noised, the buffers are not. The engine refuses an ε for this; we ask for
# the gradients' trade-off curve all the same, and audit it. Then with `batch_norm=` public data.

# %%
BASE = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
LABELS = (BASE[:, 0] > 0).long()
PUBLIC = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(32).long())
curves = {}


def trainer(batch_norm):
    def train(with_canary: bool, seed: int) -> float:
        torch.manual_seed(seed)
        x, y = BASE, LABELS
        if with_canary:
            x, y = torch.cat([x, torch.full((1, 4), 5.0)]), torch.cat([y, torch.ones(1).long()])
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),  # q = 1, both data sets alike
            noise_multiplier=4.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm=batch_norm,
        )
        for _ in range(4):
            for x_batch, y_batch in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x_batch), y_batch).backward()
                optimizer.step()
        curves[str(batch_norm)] = engine.get_tradeoff(allow_unprotected=True)
        model.eval()
        return float(engine.finalize(model)[0].running_mean.sum())

    return train


policies = {"unprotected": "unprotected", "public": DataLoader(PUBLIC, batch_size=32)}
found = {}
for name, policy in policies.items():
    train = trainer(policy)
    with warnings.catch_warnings(action="ignore"):
        train(False, 10**6)  # one run, for the claim
        found[name] = audit_training(train, curves[str(policy)], runs=RUNS, name=name, delta=1e-5)

# %% [markdown]
# **Look at** the verdicts. The claim is the same, and right for the weights; the running statistics make it false.

# %%
for name, result in found.items():
    print(
        f"{name:12} claimed ε {result.claimed_epsilon:.2f}, audited ε >= {result.audited_epsilon:.2f}: {result.verdict}"
    )

figure, axes = plt.subplots(1, 2, figsize=(8.5, 2.6), layout="constrained", sharex=True)
everything = np.concatenate([part for r in found.values() for part in (r.scores.present, r.scores.absent)])
bins = np.linspace(everything.min() - 0.02, everything.max() + 0.02, 40)
for panel, (name, result) in zip(axes, found.items(), strict=True):
    panel.hist(result.scores.absent, bins, color=GREY, alpha=0.6, label="without the canary")
    panel.hist(result.scores.present, bins, color=ORANGE, alpha=0.6, label="with it")
    panel.set(title=f"{name}: {result.verdict}", xlabel="sum of the running mean", yticks=[])
axes[1].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## What to take home
#
# - `opacus-bc audit --quick` audits the package as installed, in a minute or two; SECURITY.md has its table.
# - A verdict against a claim is wrong with probability at most 0.001; a bound near 0 proves nothing.
# - Audit what you release: the weights, the buffers, and whatever else leaves the building.

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
import math
import os
import warnings
from functools import partial
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine, accounting
from opacus_bc.audit import Toy, audit_training, audit_worst_case

# Cryptographic noise is not for a notebook; Opacus's hooks see inputs without gradients.
warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
REPETITIONS, RUNS = (4_000, 40) if QUICK else (40_000, 150)
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "0.5"


def up(value: float) -> str:
    """Two digits, rounded up: for claims, which are upper bounds."""
    return f"{math.ceil(100 * value) / 100:.2f}"


def down(value: float) -> str:
    """Two digits, rounded down: for what an audit found, a lower bound."""
    return f"{math.floor(100 * value) / 100:.2f}"


# %% [markdown]
# ## The worst case, through the real optimizer
#
# A `Toy` is the hardest data set that we know. Here for **BC**, batch clipping, which clips the gradient of a whole batch to norm C: all samples point one way, and the
# canary turns the clipped vector around, a move of 2C, the full sensitivity. `audit_worst_case` sends it through the real loader, optimizer and
# accountant, thousands of times side by side.
#
# One step without sampling is a plain Gaussian release, and its claim is one number: **μ**, the distance of the two means in units of the noise. Telling them
# apart must be as hard as telling N(0, 1) from N(μ, 1). At a given δ each μ has its ε; for μ = 1 and δ = 10⁻⁵ it is 4.38.

# %%
toy = Toy(method="BC", noise_multiplier=1.0)  # one step, no sampling: the claim is a Gaussian with mu = 1
right = audit_worst_case(toy, name="BC as it is", repetitions=REPETITIONS)
print(f"claimed mu {right.claimed_mu:.2f}, audited mu >= {down(right.audited_mu)}: {right.verdict}")
print(f"claimed epsilon at delta {right.delta:g}: {up(right.claimed_epsilon)}")

# %% [markdown]
# Now the classic mistake: noise for a sensitivity of C instead of 2C, as if a mini-set were a sample. We break that one function and audit
# again. The accountant does not notice.

# %%
with mock.patch("opacus_bc.mechanism.blocks.sensitivity", lambda clip_bound, *, unit, adjacency: clip_bound):
    broken = audit_worst_case(toy, name="noise for C", repetitions=REPETITIONS)
print(f"claimed mu {broken.claimed_mu:.2f}, audited mu >= {down(broken.audited_mu)}: {broken.verdict}")

# %% [markdown]
# **Look at** the overlap of the two histograms: it is the adversary's uncertainty. On the right, the claim is the solid line; every test that the
# scores allow is a point. A point *below* the line refutes the claim. (The verdict uses confidence limits and held-out repetitions; the picture shows
# raw rates, so a point or two below the line would prove nothing.) Both rows have the same horizontal axis. The score
# is the logarithm of a likelihood ratio, so it spreads when the two are easier to tell apart.

# %%
figure, axes = plt.subplots(2, 2, figsize=(8.5, 5.6), layout="constrained", width_ratios=[1.4, 1])
alpha = np.linspace(0, 1, 400)
both = np.concatenate([part for r in (right, broken) for part in (r.scores.present, r.scores.absent)])
bins = np.linspace(*np.quantile(both, [0.001, 0.999]), 60)
for (left, panel), result, title in zip(axes, (right, broken), ("as it is", "noise for C only"), strict=True):
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
# Now 50 steps at sample rate 0.1, for three ways of clipping: **BC** as above; **IC**, individual clipping, where the other samples have gradient 0 and the canary adds
# a vector of norm C, the full sensitivity there; and **ALC**, batch clipping with four layers clipped separately, all of which the canary turns around. With
# σ = 2 for four layers, and σ = 1 otherwise, all three have σ_eff = 1 and the same claim.
#
# Every bound is for δ = 10⁻⁵ at 95 % confidence. The first column assumes nothing about the mechanism. The second assumes that it *is* a Gaussian release of samples drawn at
# this rate, and only its noise is unknown: the audit limits the noise, and our own accountant turns that limit into an ε.
#
# **Read** the two columns differently. Neither is above the claim, so no claim is refuted. The second is no evidence about the accountant, through which it went;
# it says how much larger than needed the noise can be at most: not much, if the figure is close to the claim.

# %%
print(f"{'':10}{'claimed ε':>12}{'ε ≥, no assumption':>22}{'ε ≥, if sampled Gaussian':>28}{'verdict':>10}")
for method, extra in (("IC", {}), ("BC", {}), ("BC + ALC", {"layers": 4})):
    sigma = 2.0 if method == "BC + ALC" else 1.0  # four layers: sigma_eff = 2 / sqrt(4)
    drawn = Toy(method=method, noise_multiplier=sigma, steps_per_epoch=10, steps=5 if QUICK else 50, **extra)
    result = audit_worst_case(drawn, name=method, repetitions=REPETITIONS)
    bounds = f"{down(result.audited_epsilon):>22}{down(result.family_epsilon):>28}"
    print(f"{method:10}{up(result.claimed_epsilon):>12}{bounds}{result.verdict:>10}")

# %% [markdown]
# ## Audit a training function of yours
#
# Here: a small network with BatchNorm, trained for four steps at sample rate 1/2. `train` returns the engine and the released model. The canary lies far out, at 10 in each of
# four features.

# %%
BASE = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
LABELS = (BASE[:, 0] > 0).long()
CANARY = torch.full((1, 4), 10.0)
PUBLIC = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(32).long())


def train(batch_norm, with_canary: bool, seed: int):
    torch.manual_seed(seed)
    x = torch.cat([BASE, CANARY]) if with_canary else BASE
    y = torch.cat([LABELS, torch.ones(1).long()]) if with_canary else LABELS
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)  # the adversary knows the first weights
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=25),  # q = 1/2 for 48 and for 49 samples
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        clipping="batch",
        batch_norm=batch_norm,
    )
    for _ in range(2):
        for x_batch, y_batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_batch), y_batch).backward()
            optimizer.step()
    return engine, engine.finalize(model)


# %% [markdown]
# With plain BatchNorm, `batch_norm="unprotected"`, gradients are clipped and noised, and the running statistics are not. The engine warns, and refuses an ε:

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    engine, _ = train("unprotected", with_canary=True, seed=10**6)
print("warning:", next(str(w.message) for w in caught if "unprotected" in str(w.message)))
try:
    engine.get_epsilon(1e-5)
except RuntimeError as error:
    print("\nget_epsilon:", error)
warnings.filterwarnings("ignore", message="batch_norm='unprotected'")  # seen once

# %% [markdown]
# `audit_training` takes any function of `(with_canary, seed)` that trains once and returns a score: larger where the canary seems in. The score must depend on
# what is *released* only. Ours look at the running mean, and at the weights: the canary pulls those of class 1 up and those of class 0 down. The claim is the one
# that the gradients' noise would justify.
#
# **Look at** the verdicts first. The claim is the same three times, and right for the weights; running statistics of private data make it false.

# %%
CLAIM = accounting.tradeoff(noise_multiplier=4.0, sample_rate=0.5, steps=4)
public = DataLoader(PUBLIC, batch_size=32)


def running_mean(model) -> float:
    return float(model[0].running_mean.sum())


def weights(model) -> float:
    class_0, class_1 = model[1].weight.detach().sum(1)
    return float(class_1 - class_0)


def attack(policy, score, with_canary: bool, seed: int) -> float:
    _, model = train(policy, with_canary, seed)
    return score(model)


found = {}
for name, policy, score in (
    ("unprotected, running mean", "unprotected", running_mean),
    ("public, running mean", public, running_mean),
    ("public, weights", public, weights),
):
    found[name] = audit_training(partial(attack, policy, score), CLAIM, runs=RUNS, name=name, delta=1e-5)
    epsilons = f"claimed ε {up(CLAIM.epsilon(1e-5))}, audited ε ≥ {down(found[name].audited_epsilon)}"
    print(f"{name:28}{epsilons}, no assumption: {found[name].verdict}")

# %% [markdown]
# **Look at** what the adversary saw. On the left most runs with the canary stand out; the others are mainly those in which one draw had it, or none (1 run in 16). On the right the noise covers it. The second audit is
# not drawn: its running mean is that of the public data, the same number in every run.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.5, 2.6), layout="constrained")
for panel, name in zip(axes, ("unprotected, running mean", "public, weights"), strict=True):
    scores = found[name].scores
    bins = np.histogram_bin_edges(np.concatenate([scores.present, scores.absent]), 40)
    panel.hist(scores.absent, bins, color=GREY, alpha=0.6, label="without the canary")
    panel.hist(scores.present, bins, color=ORANGE, alpha=0.6, label="with it")
    panel.set(title=f"{name}: {found[name].verdict}", xlabel="score", yticks=[])
axes[1].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## What to take home
#
# - `opacus-bc audit --quick` audits the package as installed, in some minutes; docs/audit.md has its table.
# - A verdict against a claim is wrong with probability at most 0.001; a bound near 0 proves nothing.
# - Audit what you release: the weights, the buffers, and whatever else leaves the building.

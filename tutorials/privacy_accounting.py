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
# # Privacy accounting
#
# Differential privacy is a statement about a test: somebody who sees the trained model guesses whether your sample was in the data.
# This notebook draws that test, shows what clipping by layer costs, what approximations get wrong, and how to find the noise
# for a budget. Nothing is trained: accounting needs the noise multiplier σ, the sample rate q and the number of steps T only.

# %%
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
from opacus.accountants import GaussianAccountant

from opacus_bc import FDPAccountant, TradeOffCurve, accounting

plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
POINTS = 3 if QUICK else 12
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.5"

# %% [markdown]
# ## A trade-off curve
#
# Every test makes two kinds of error: it accuses an absent sample (false positive, α) or misses a present one (false negative, β). The
# trade-off curve f is the least β at each α, for the *best possible* test. 1 − α is guessing. Our curves are certified from below: no
# test does better than they say.
#
# The run: the paper's, BN-LeNet-5 on MNIST. N = 54,000, m = 64, 50 epochs, σ = 2.5, one group.
#
# **Look at** the left end of the right panel. A test that accuses one innocent in a thousand: how many present samples does it find?
# That is what an attacker cares about, and where one ε at one δ says least.

# %%
RUN = {"sample_rate": 64 / 54_000, "steps": 42_188}
curves = {sigma: accounting.tradeoff(noise_multiplier=sigma, **RUN) for sigma in (2.5, 0.8, 0.53)}

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
alpha, small = np.linspace(0, 1, 500), np.logspace(-6, 0, 300)
for (sigma, curve), colour in zip(curves.items(), (GREEN, BLUE, ORANGE), strict=True):
    axes[0].plot(alpha, curve(alpha), color=colour, label=f"σ = {sigma}: ε = {curve.epsilon(1e-5):.2f}")
    axes[1].loglog(small, 1 - curve(small), color=colour)
axes[0].plot(alpha, 1 - alpha, "--", color=GREY, label="guessing")
axes[1].loglog(small, small, "--", color=GREY)
axes[0].set(xlabel="false positive rate α", ylabel="false negative rate β", title="trade-off", aspect="equal")
axes[1].set(
    xlabel="false positive rate α", ylabel="true positive rate 1 − β", title="the same, for careful attackers"
)
axes[0].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## √L: what clipping by layer costs
#
# Clip and noise L groups separately, each with multiplier σ, and one step releases L Gaussians at once. Their parameters add up in squares:
# μ² = L/σ², so the step is as private as one with **σ_eff = σ/√L**. BN-LeNet-5 has 8 layers in 16 tensors.
#
# **Look at** the vertical axis: it is logarithmic. If a report says "σ = 2.5" and does not say L, you know nothing.

# %%
layers = [1, 2, 4, 8, 16, 32, 62]
epsilons = [accounting.epsilon(noise_multiplier=2.5, delta=1e-5, layers=L, **RUN) for L in layers]

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(layers, epsilons, "o-", color=BLUE)
for L, value in zip(layers, epsilons, strict=True):
    axes.annotate(
        f"{value:.3g}", (L, value), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9
    )
axes.set(xscale="log", yscale="log", xlabel="groups L, each with σ = 2.5", ylabel="certified ε at δ = 1e-5")
axes.set_xticks(layers, layers)
axes.minorticks_off()
axes.set_ylim(min(epsilons) / 2, max(epsilons) * 4)
plt.show()

# %% [markdown]
# ## Exact against the central limit theorem
#
# Many small steps together look Gaussian. The paper uses this limit: μ = √2 · q√T · h(σ_eff), and Opacus's accountant `"gdp"` a similar one.
# A limit is not a bound. Our accountant composes the exact privacy-loss distributions and returns an interval.
#
# **Look at** where the dashed lines are *below* the certified interval (which is as thin as a line): there the approximation promises
# privacy that the mechanism does not have.

# %%
warnings.filterwarnings("ignore", message="GDP accounting is experimental")
deltas = np.logspace(-10, -3, POINTS)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True)
for panel, sigma in zip(axes, (2.5 / 8**0.5, 1.5 / 8**0.5), strict=True):
    exact, opacus = FDPAccountant(), GaussianAccountant()
    exact.history = [(sigma, RUN["sample_rate"], RUN["steps"], "poisson")]
    opacus.history = [(sigma, RUN["sample_rate"], RUN["steps"])]
    low, high = np.array([exact.get_epsilon_bounds(delta) for delta in deltas]).T
    panel.fill_between(deltas, low, high, color=BLUE, label="exact: certified interval")
    panel.plot(
        deltas, [opacus.get_epsilon(delta) for delta in deltas], "--", color=ORANGE, label='Opacus "gdp"'
    )
    panel.set(xscale="log", xlabel="δ", ylabel="ε", title=f"σ_eff = {sigma:.3f}")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The same as a table at σ_eff = 1.5/√8, for δ = 10⁻⁵. The paper's μ is for other neighbours (replace one sample) and another way of drawing
# (fixed mini-sets without replacement), so it stands next to the exact value for those.

# %%
sigma = 1.5 / 8**0.5
poisson, fixed, gdp = FDPAccountant(), FDPAccountant(), GaussianAccountant()
poisson.history = [(sigma, RUN["sample_rate"], RUN["steps"], "poisson")]
fixed.history = [(sigma, RUN["sample_rate"], RUN["steps"], "partition")]
gdp.history = [(sigma, RUN["sample_rate"], RUN["steps"])]
clt = TradeOffCurve.gaussian(fixed.get_mu_clt())
print(f"{'':46}{'δ = 1e-5':>16}{'δ = 1e-10':>16}")
for name, values in {
    "Poisson, add/remove one: exact": [poisson.get_epsilon_bounds(delta) for delta in (1e-5, 1e-10)],
    'Opacus "gdp" for it': [(gdp.get_epsilon(delta),) for delta in (1e-5, 1e-10)],
    "fixed mini-sets, replace one: exact": [fixed.get_epsilon_bounds(delta) for delta in (1e-5, 1e-10)],
    "the paper's limit for it": [(clt.epsilon(delta),) for delta in (1e-5, 1e-10)],
}.items():
    words = [" to ".join(f"{v:.2f}" for v in value) for value in values]
    print(f"{name:46}{words[0]:>16}{words[1]:>16}")

# %% [markdown]
# ## What the loader does decides
#
# Subsampling amplifies privacy only if samples are really drawn at random. An ordinary shuffled loader shows each sample once a pass; nothing
# proves that this is as good as Poisson sampling, so it is accounted without amplification. Opacus accounts it as Poisson.
#
# **Look at** how far the three are apart at the same σ and T.

# %%
for sampling in ("poisson", "partition", "shuffle"):
    value = accounting.epsilon(
        noise_multiplier=2.5, delta=1e-5, layers=8, sampling=sampling, passes=50, **RUN
    )
    print(f"{sampling:10} ε = {value:6.2f}")

# %% [markdown]
# ## Calibration
#
# The other way round: which σ for a given budget? The target may be (ε, δ), a Gaussian μ, or a true positive rate that no attacker may
# exceed. `make_private_with_epsilon` does the first for you, with L, sampling and reserved releases included.
#
# **Look at** how flat the curve is on the right: strong privacy is bought with σ, and the price rises quickly as ε falls.

# %%
targets = np.logspace(-0.5, 1.5, POINTS)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for L, colour in ((1, GREEN), (8, BLUE), (16, ORANGE)):
    sigmas = [
        accounting.noise_multiplier(target_epsilon=t, target_delta=1e-5, layers=L, **RUN) for t in targets
    ]
    axes.loglog(targets, sigmas, "o-", markersize=3, color=colour, label=f"L = {L}")
axes.set(xlabel="target ε at δ = 1e-5", ylabel="σ of each group")
axes.legend(frameon=False)
plt.show()

sigma = accounting.noise_multiplier(target_tpr=0.02, at_fpr=0.01, layers=8, **RUN)
print(f"at most 2 % true positives at 1 % false positives: σ = {sigma:.3f}")
print(
    f"which is ε = {accounting.epsilon(noise_multiplier=sigma, delta=1e-5, layers=8, **RUN):.3f} at δ = 1e-5"
)

# %% [markdown]
# ## What to take home
#
# - Report σ_eff, q, T and the sampling; everything else follows. `engine.statement(delta)` does.
# - `accountant="fdp"` (the default) is exact up to a certified interval, and an upper bound. `"gdp"` is neither.
# - ε assumes that T and all schedules were fixed in advance, and that nobody knows a seed.

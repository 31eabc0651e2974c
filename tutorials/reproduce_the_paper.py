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
# # Reproduce the paper
#
# *Batch Clipping and Adaptive Layerwise Clipping for Differential Private Stochastic Gradient Descent* (Nguyen, Nguyen, Nguyen, van Dijk) is where
# this package comes from. This notebook puts ours next to theirs: the guarantees, which are computed here, and the accuracies, which take hours and are read
# from the results kept in `benchmarks/results/`. Then it asks what the paper's guarantee really is.
#
# To train what is missing: `opacus-bc reproduce --list`, then `opacus-bc reproduce --only fig11`. The page *Reproduction* in the documentation has all
# figures and every point where we read the paper differently.

# %%
import json
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from opacus_bc import TradeOffCurve, accounting
from opacus_bc.accounting.display import rounded_up
from opacus_bc.experiments.reproduce.registry import SPECS
from opacus_bc.experiments.reproduce.results import rows_of
from opacus_bc.experiments.reproduce.runs import load_results
from opacus_bc.experiments.training.store import Store

plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
ROOT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "benchmarks").is_dir())
RESULTS = ROOT / "benchmarks" / "results"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.5"

# %% [markdown]
# ## The guarantees: ours | paper
#
# The setting is BN-LeNet-5 on MNIST: N = 54,000 private images, m = 64, 50 epochs, L = 8 layers. The paper computes a Gaussian parameter
# μ = √2 · √(E m/N) · h(σ/√L).
#
# G_μ is *Gaussian DP*: an attacker can do no better than tell N(0, 1) from N(μ, 1). h is the function behind the formula, computed by `accounting.h`.
#
# **Look at** the two columns. The formulas are reached to the digit that is printed, except that h(2.5/√8) rounds to 1.514.

# %%
RUN = {"sample_rate": 64 / 54_000, "steps": 42_188, "layers": 8}
FIFTEEN = {**RUN, "sample_rate": 64 / 810_000, "steps": 632_813}
facts = [
    ("h(2.5/√8)", accounting.h(2.5 / 8**0.5), "1.513"),
    ("h(1.5/√8)", accounting.h(1.5 / 8**0.5), "5.783"),
    ("μ at σ = 2.5", accounting.mu_clt(noise_multiplier=2.5, **RUN), "0.52"),
    ("μ at σ = 1.5", accounting.mu_clt(noise_multiplier=1.5, **RUN), "1.99"),
    ("μ at σ = 1.5, 15 times the data", accounting.mu_clt(noise_multiplier=1.5, **FIFTEEN), "0.51"),
]
print(f"{'':34}{'ours':>10}{'paper':>10}")
for name, ours, paper in facts:
    print(f"{name:34}{ours:10.3f}{paper:>10}")

# %% [markdown]
# ## What that guarantee really is
#
# How private G_0.52 is depends on how one reads it. Each dot below is the ε that one of them amounts to, all at σ = 2.5 and δ = 10⁻⁵:
#
# - **G_0.52 taken at its word**: a central limit, quoted as if it were exact.
# - **the paper's theory, exactly**: fixed mini-sets drawn without replacement, neighbours that differ in one replaced sample.
# - **Poisson sampling**: what this package does by default; neighbours differ by one sample more or less.
# - **by tensor**: L = 8 counts layers. The public code, and the paper's count for ResNet-18, count tensors: then L = 16.
# - **a shuffled loader**: what most training scripts do. Nothing is amplified.
#
# **Look at** how far the dots are apart, on a logarithmic axis: the same σ, the same steps. The first two nearly agree, so at this δ the limit theorem is not what is wrong. What no dot covers:
#
# - BatchNorm: its running statistics are written from raw private batches. *With these in the released model there is no ε at all.*
# - The draws: the theory draws without replacement, the experiments draw every batch *with* replacement. For batch clipping an argument can be found, for individual clipping the printed
#   guarantee fails.
# - The choice of C, m and σ, which were tuned by test accuracy.
#
# And the ResNet-18 figures were made at σ = 0.01875: with L = 62 that is the ε printed below the plot. They compare optimizers under a small perturbation, and say nothing about private learning.

# %%
TENSORS = {**RUN, "layers": 16}
at = {"noise_multiplier": 2.5, "delta": 1e-5}
readings = {
    "G_0.52 at its word (CLT)": TradeOffCurve.gaussian(
        accounting.mu_clt(noise_multiplier=2.5, **RUN)
    ).epsilon(1e-5),
    "the paper's theory, exactly": accounting.epsilon(sampling="partition", **at, **RUN),
    "Poisson sampling": accounting.epsilon(**at, **RUN),
    "Poisson, by tensor (L = 16)": accounting.epsilon(**at, **TENSORS),
    "a shuffled loader": accounting.epsilon(sampling="shuffle", passes=50, **at, **RUN),
}
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
names, values = list(readings), list(readings.values())
axes.scatter(values, names, s=60, color=[GREY, BLUE, BLUE, ORANGE, ORANGE], zorder=2)
for name, value in readings.items():
    text = f"{math.ceil(100 * value) / 100:.2f}"  # an upper bound is never rounded down
    axes.annotate(text, (value, name), textcoords="offset points", xytext=(9, 0), va="center", fontsize=9)
axes.grid(axis="y", color="0.9")
axes.invert_yaxis()
axes.set(xscale="log", xlim=(1, 150), xlabel="ε at δ = 1e-5")
plt.show()
resnet = accounting.epsilon(
    noise_multiplier=0.01875, sample_rate=64 / 45_000, steps=35_157, delta=1e-5, layers=62
)
print(f"ResNet-18 at σ = 0.01875, L = 62: ε = {rounded_up(resnet)}")

# %% [markdown]
# A limit theorem can err to the wrong side. **Look at** the left end of the right panel, where δ is small: at σ = 1.5 the approximation (dashed) falls below a certified *lower* bound for the
# paper's own mechanism, so what it promises there is not true.

# %%
deltas = np.logspace(-10, -2, 9)
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
for panel, sigma in zip(axes, (2.5, 1.5), strict=True):
    accountant = accounting.FDPAccountant()
    accountant.history = [(sigma / 8**0.5, RUN["sample_rate"], RUN["steps"], "partition")]
    low, high = np.array([accountant.get_epsilon_bounds(delta) for delta in deltas]).T
    clt = TradeOffCurve.gaussian(accountant.get_mu_clt())
    panel.fill_between(deltas, low, high, color=BLUE, label="the paper's theory, certified interval")
    panel.plot(deltas, [clt.epsilon(delta) for delta in deltas], "--", color=ORANGE, label="the paper's G_μ")
    panel.set(xscale="log", xlabel="δ", ylabel="ε", title=f"σ = {sigma}, μ = {clt.mu:.2f}")
axes[0].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## The accuracies: ours | paper
#
# Two variants: `paper` does what was printed and is **not private**; `sound`, run for three settings, draws with Poisson sampling and takes BatchNorm's statistics from public data: its ε is certified. (The
# documentation has two more variants and all figures.) BC is batch clipping, ALC layerwise bounds from public data, FGC one bound for the whole gradient, IC individual clipping.
#
# **Look at** the rows without a star first: they have the paper's number of epochs. A star marks runs with fewer epochs or images (ResNet-18's have 10,000 images), which can only show a trend. The paper's
# numbers are single runs (≈ as printed), and so are ours.

# %%
HEADLINES = {
    "BN-LeNet-5: BC + ALC, m = 64": ("fig12b", "σ = 0.5", "σ = 1.5", "σ = 2.5"),
    "BN-LeNet-5: BC + ALC, σ = 2.5": ("fig12a", "m = 1024"),
    "convnet: no privacy": ("fig8", "m = 64", "m = 1024"),
    "convnet: BC + ALC, σ = 0.01875, m = 1024": ("fig6", "C = 0.9"),
    "convnet: BC + ALC, σ = 0.5, m = 1024": ("fig7", "C = 0.1"),
    "convnet: BC + ALC, σ = 0.5, m = 64": ("fig9a", "C = 0.14"),
    "convnet without BatchNorm: IC + ALC": ("fig15", "css, constant C"),
    "ResNet-18: no privacy": ("fig2", "m = 64"),
    "ResNet-18: BC, σ = 0.01875, C = 0.095": ("fig18a", "ALC", "FGC"),
    "ResNet-18: others": ("fig4", "BC, C = 0.0095", "Zhang", "IC, C = 0.095"),
}
results = load_results(Store(RESULTS / "reproduce"))


def found(figure, label, variant):
    """Our row of a figure's run at the paper's last epoch, if it was trained."""
    rows = [row for row in rows_of(SPECS[figure], results, (variant,)) if row.run.label == label]
    return next((row for row in reversed(rows) if row.ours is not None), None)


def shown(row):
    return "–" if row is None else f"{row.ours:.2f}{'' if row.comparable else f' * ({row.epoch} epochs)'}"


print(f"{'':60}{'paper, %':>9}{'ours, %':>20}{'ours, sound':>21}{'its ε':>8}")
for what, (figure, *labels) in HEADLINES.items():
    for label in labels:
        run = next(run for run in SPECS[figure].runs if run.label == label)
        printed = f"{'≈ ' if run.paper[-1].about else ''}{run.paper[-1].value:g}" if run.paper else "–"
        paper, sound = found(figure, label, "paper"), found(figure, label, "sound")
        if sound is not None and sound.epsilon is None:
            sound = None  # without privacy there is no sound variant
        spent = "" if sound is None else rounded_up(sound.epsilon)
        print(f"{what + ', ' + label:60}{printed:>9}{shown(paper):>20}{shown(sound):>21}{spent:>8}")

# %% [markdown]
# BN-LeNet-5 on MNIST is where the paper has real noise. **Look at** where each curve ends, and at the star of the same colour at epoch 50, which is the paper's number (on the right it prints one for C = 0.2
# alone).

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
panels = {
    "by noise, C = 0.2, m = 64": [("fig12b", f"σ = {sigma}") for sigma in (0.5, 1.5, 2.5)],
    "by bound, σ = 0.5, m = 64": [("fig11", f"C = {bound}") for bound in (0.05, 0.2, 0.5)],
}
for panel, (title, runs) in zip(axes, panels.items(), strict=True):
    for (name, label), colour in zip(runs, (BLUE, ORANGE, GREEN), strict=True):
        row = found(name, label, "paper")
        if row is None:
            continue
        panel.plot(range(1, row.epoch + 1), row.curves[0], color=colour, label=label)
        if row.paper is not None:
            panel.plot(50, row.paper.value, "*", color=colour, markersize=11, markeredgecolor="white")
    panel.set(title=title, xlabel="epoch", ylim=(0, 100))
    panel.legend(frameon=False, loc="lower right")
axes[0].set_ylabel("test accuracy, %")
plt.show()

# %% [markdown]
# - At σ = 0.5 the paper's 84.80 % is reached to a tenth of a point, and a smaller bound does as well.
# - At σ = 1.5 and 2.5 ours end about 20 points below. The printed recipe does not get there in our hands; clipping by tensor is no further after ten epochs (15 % against 18 %), the settings of the public
#   code are (26 %, not trained on), and with the noise of an older version of the public code (divided
#   by m) accuracy is far above what is printed. The documentation lists what else may differ.
# - The starred rows show a trend at most: noise costs a lot, ALC is ahead of FGC, BC of IC, which is near chance there, and Zhang's rule is ahead of both.
#
# ## The same budget, spent differently
#
# The paper's headline for real privacy is 50.38 % on MNIST at σ = 2.5. Its BatchNorm statistics leak, so that number has no ε; Poisson sampling with the same σ, L and steps, and statistics from
# public data, has ε = 1.57 at δ = 10⁻⁵. What else can be had for that ε, with nearly the same network (norm before the activation) and the same data? `benchmarks/mnist_batch_norm.py` trained it for 16 epochs with images sheared upright and settings
# chosen by test accuracy, so the difference is not due to clipping alone. GBC clips mini-sets, here of 8.
#
# **Look at** the grey bar at the bottom against the others: individual clipping with public BatchNorm (`differentiate=True`) is open to the same user, with the same public set.
#
# A caution: the public images come from the same source as the private ones. Trained on those 6,000 alone, with their labels and without privacy, the network reaches
# 99.13 % (`benchmarks/mnist_batch_norm.py --public-alone`). The bars compare mechanisms; they do not show that private data were needed here.

# %%
LONG = 16  # epochs; shorter runs were for choosing settings
runs = [json.loads(path.read_text()) for path in sorted((RESULTS / "mnist_batch_norm").glob("*.json"))]
bars = {"paper: BC + ALC\n(one run, no ε)": 50.38}
for method in sorted({run["method"] for run in runs}):
    long = [run for run in runs if run["method"] == method and run["recipe"]["epochs"] >= LONG]
    spent = math.ceil(100 * max(run["epsilon"] for run in long)) / 100
    bars[f"{method}\n({len(long)} seeds, ε = {spent:.2f})"] = statistics.fmean(
        run["accuracy"] for run in long
    )
bars = dict(sorted(bars.items(), key=lambda bar: bar[1]))

figure, axes = plt.subplots(figsize=(8, 0.6 + 0.6 * len(bars)), layout="constrained")
drawn = axes.barh(list(bars), list(bars.values()), color=[GREY, *[GREEN] * (len(bars) - 1)], height=0.6)
axes.bar_label(drawn, [f"{value:.2f} %" for value in bars.values()], padding=4, fontsize=9)
axes.set(xlim=(0, 112), xlabel="test accuracy, %", xticks=range(0, 101, 20))
plt.show()

# %% [markdown]
# ## What to take home
#
# - The paper's two ideas hold: clipping a whole mini-set is Gaussian DP with sensitivity 2C, and L separately noised layers cost √L.
# - Its printed guarantee is for the gradients alone. To have one for the *model*, BatchNorm's statistics must come from elsewhere: `batch_norm=`.
# - Of its accuracies on MNIST the one with little noise (σ = 0.5, ε in the hundreds) is reached, those with real noise are not.
# - σ says little without L, the sampling and the number of steps. Ask for `engine.statement(delta)`.

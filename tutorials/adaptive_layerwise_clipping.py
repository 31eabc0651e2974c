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
# # Adaptive layerwise clipping
#
# One clip bound C for the whole gradient treats all layers alike, but their gradients differ in size. Adaptive layerwise clipping
# (ALC) measures each layer's gradient norm on *public* data and derives a bound for every layer from it. Public data and released
# weights are all it looks at, so the bounds cost no privacy. What costs privacy is clipping L groups separately: **√L**.
#
# This notebook shows the norms, what groups cost, what the factors do, and where the noise goes. At the end five settings are
# trained at one ε. `keep_your_batchnorm` explains the way of clipping that all of them use: **GBC**, general
# batch clipping. Each drawn sample falls into one of k *mini-sets* at random, about s in each, and the gradient of a mini-set is clipped as one vector.

# %%
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import ALC, PrivacyEngine

# Cryptographic noise is not for a notebook; Opacus's hooks see inputs without gradients.
warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
EPOCHS, SEEDS = (1, range(1)) if QUICK else (10, range(3))

# %% [markdown]
# The data are scikit-learn's 8 × 8 digits, the model a small convolutional network with five layers that have weights.

# %%
digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
data = TensorDataset(images, torch.tensor(digits.target))
private, public, test = random_split(data, [1344, 156, 297], torch.Generator().manual_seed(0))
x_test, y_test = test[:]
public_loader = DataLoader(public, batch_size=52)


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


NAMES = {"0": "conv 1", "1": "norm 1", "4": "conv 2", "5": "norm 2", "9": "linear"}

# %% [markdown]
# ## Layer norms
#
# `alc=public_loader` is all that is needed, or `alc=ALC(public_loader, ...)` with options. This is the call for the whole notebook: mini-sets of 8,
# 84 of them in a draw of 672 samples.


# %%
def private_run(alc, *, max_grad_norm=0.1, epsilon=8.0, lr=0.8, epochs=EPOCHS):
    model = make_model()
    engine = PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        data_loader=DataLoader(private, batch_size=672, shuffle=True),
        target_epsilon=epsilon,
        target_delta=1e-4,
        epochs=epochs,
        max_grad_norm=max_grad_norm,
        clipping="batch",
        mini_batch_size=8,
        batch_norm=public_loader,
        alc=alc,
    )
    return engine, *made


# %% [markdown]
# The loop is the usual one. The loader delivers one mini-set after the other; `step()` clips what the mini-set left in `.grad` and adds it up, and
# moves the weights once a draw, at its last mini-set. `zero_grad()` clears the gradient between mini-sets and leaves that sum alone. So
# `len(loader)` counts mini-sets, and `loader.steps_per_epoch` counts steps.


# %%
def train(model, optimizer, loader) -> None:
    for _ in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


torch.manual_seed(0)
engine, model, optimizer, loader = private_run(public_loader, epsilon=30.0, lr=0.5)  # a generous budget
train(model, optimizer, loader)
report = engine.layer_report()
print(f"{len(loader)} mini-sets an epoch, {loader.steps_per_epoch} steps")

# %% [markdown]
# `engine.layer_report()` holds what ALC did; `report.table()` prints it. Its columns, and one more:
#
# - **e_h**: the mean gradient norm of layer h, over public mini-sets of 8, since mini-sets of 8 are what is clipped. It is estimated anew at every epoch
#   (`refresh="epoch"`, the default).
# - **C_h = C · e_h / max e**: the layer's clip bound. The layer with the largest norm gets C = 0.1, `max_grad_norm`.
# - **m_h = C / C_h**: the paper's multiplication factor; clipping layer h to C_h is clipping m_h times its gradient to C.
# - **noise std**: of an entry of the released sum of 84 clipped vectors.
# - **noise/signal**: the expected norm of the layer's noise, over the largest signal that its bound lets through, 84 · min(e_h, C_h).
#
# **Look at** e_h next to C_h: every norm is some 30 times its bound, so practically everything is clipped.

# %%
print(f"{'':10}{'entries':>8}{'e_h':>8}{'C_h':>9}{'m_h':>7}{'noise std':>11}{'noise/signal':>14}")
for row in report.rows:
    factor = 0.1 / row.clip_bound
    print(
        f"{NAMES[row.layer]:10}{row.entries:8}{row.norm:8.3f}{row.clip_bound:9.4f}{factor:7.2f}"
        f"{row.noise_std:11.4f}{row.noise_to_signal:14.2f}"
    )

# %% [markdown]
# **Look at** the distance between the lines on the left, on a logarithmic axis: with one bound for all, the largest layer decides how much of the
# smallest one is left. Then at the right panel, which is what the rule uses: only ratios to the largest norm count. Most norms fall, not all
# alike, and the ratios move little: within ten epochs none has doubled (the range of each is printed below). A refresh can follow more than there was to follow here.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
steps = [step for step, _ in report.history]
largest = [max(norms.values()) for _, norms in report.history]
for layer in sorted(NAMES, key=lambda layer: -report.history[-1][1][layer]):  # from the top line down
    norms = np.array([norms[layer] for _, norms in report.history])
    axes[0].plot(steps, norms, marker="o", markersize=3, label=NAMES[layer])
    axes[1].plot(steps, norms / largest, marker="o", markersize=3)
axes[0].set(title="mean gradient norm e_h", xlabel="step", yscale="log", xticks=steps)
axes[0].set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
axes[1].set(title="C_h / C = e_h / max e", xlabel="step", yscale="log", xticks=steps)
axes[1].set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["0.05", "0.1", "0.2", "0.5", "1"])
for panel in axes:
    panel.minorticks_off()
figure.legend(frameon=False, loc="outside right center")
plt.show()
for layer, name in NAMES.items():
    ratios = [norms[layer] / top for (_, norms), top in zip(report.history, largest, strict=True)]
    print(f"{name}: C_h/C between {min(ratios):.3f} and {max(ratios):.3f}")

# %% [markdown]
# ## Groups and what they cost
#
# With L groups, each noised for its own bound with multiplier σ, an adversary sees L noisy values at once. The accountant therefore
# gets **σ_eff = σ/√L**. Turned around: for one budget, σ must grow with √L.
#
# `apply="scale"` multiplies each layer by its m_h instead, clips the whole vector once, and divides by m_h after the noise: one group, no √L
# in σ. But now all layers share one ball.
#
# **Look at** the column σ for ε = 8: it is 1.402 times √L.

# %%
CHOICES = {
    "no ALC": None,
    'layers="module"': ALC(public_loader),
    'layers="parameter"': ALC(public_loader, layers="parameter"),
    "layers=2": ALC(public_loader, layers=2),
    "patterns": ALC(public_loader, layers={"features": ["0.*", "1.*", "4.*", "5.*"], "head": "9.*"}),
    'apply="scale"': ALC(public_loader, apply="scale"),
}
print(f"{'':20}{'L':>4}{'σ for ε = 8':>14}{'σ_eff':>8}")
for name, alc in CHOICES.items():
    _, _, optimizer, _ = private_run(alc, epochs=10)
    sigma, effective = optimizer.noise_multiplier, optimizer.effective_noise_multiplier
    print(f"{name:20}{len(optimizer.blocks()):4}{sigma:14.3f}{effective:8.3f}")

# %% [markdown]
# ## Where the noise goes
#
# σ_eff fixes Σ(Δ_h/τ_h)²; how the noise is split among the groups is free. `noise="proportional"` gives every group noise in proportion to its
# bound (the paper's choice), `"isotropic"` the same noise everywhere (as Opacus's `per_layer`), `"optimal"` the split with the least total
# noise power among groups that are clipped separately. All have the same σ_eff, hence the same ε. `apply="scale"` gets the bound C√5, so that every layer
# carries the noise of `"proportional"`: that is what makes the two comparable.
#
# What is the signal? Take a mini-set whose layers have just the public norms e_h, and clip it as `optimizer.blocks()` says: a block is what is
# clipped together, with its bound, its noise and its factors.

# %%
SETTINGS = {
    "no ALC": {"alc": None},
    "proportional": {"alc": ALC(public_loader)},
    "isotropic": {"alc": ALC(public_loader, noise="isotropic")},
    "optimal": {"alc": ALC(public_loader, noise="optimal")},
    "scale": {"alc": ALC(public_loader, apply="scale"), "max_grad_norm": 0.1 * 5**0.5},
}
COLOURS = dict(zip(SETTINGS, ("0.4", "#0072b2", "#56b4e9", "#009e73", "#d55e00"), strict=True))
torch.manual_seed(0)
engine, model, *_ = private_run(public_loader)
e = {row.layer: row.norm for row in engine.layer_report().rows}
entries = {row.layer: row.entries for row in engine.layer_report().rows}

noise, signal = {}, {}
for name, settings in SETTINGS.items():
    torch.manual_seed(0)  # the same first weights
    _, _, optimizer, _ = private_run(**settings, epochs=10)
    for block in optimizer.blocks():
        m = {tensor.split(".")[0]: factor for tensor, factor in zip(block.names, block.factors, strict=True)}
        norm = np.linalg.norm([m[layer] * e[layer] for layer in m])
        for layer in m:
            noise[name, layer] = block.noise_std / m[layer]
            signal[name, layer] = e[layer] * min(1, block.clip_bound / norm)

# %% [markdown]
# **Look at** the left panel for the noise itself, and at the right one for what matters: the norm of a layer's noise over the signal of 84 mini-sets
# that all pull the same way. This is one step, at the first weights: momentum and further steps average noise away, so a layer above 1 is not lost.
#
# - *Proportional* noise helps the small layers and hurts the large ones, which have most of the weights.
# - *Scale* and *proportional* coincide: with all layers clipped, the five share one ball, each gets 1/√5 of its radius, and what σ saves the signal loses.
#   (The column noise/signal of `layer_report()` does not know that: for `apply="scale"` it is too small by up to √L.)
# - *Isotropic* has the ratios of *no ALC*: where everything is clipped it is one bound for all again, about a third larger, so noise and signal both grow.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for place, name in enumerate(SETTINGS):
    position = np.arange(len(NAMES)) + 0.14 * (place - 2)
    style = {"marker": "xosD^"[place], "linestyle": "", "color": COLOURS[name]}
    axes[0].plot(position, [noise[name, i] for i in NAMES], label=name, **style)
    ratio = [noise[name, i] * entries[i] ** 0.5 / (84 * signal[name, i]) for i in NAMES]
    axes[1].plot(position, ratio, **style)
axes[0].set(title="noise on an entry of the sum", ylabel="standard deviation", yscale="log")
axes[0].set_yticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
axes[1].set(title="noise over signal, one step", ylabel="ratio of norms", yscale="log")
axes[1].set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
for panel in axes:
    panel.set_xticks(range(len(NAMES)), NAMES.values())
    panel.minorticks_off()
    panel.grid(axis="y", color="0.9")
figure.legend(frameon=False, loc="outside lower center", ncols=5)
plt.show()
for name in SETTINGS:
    power = sum(entries[i] * noise[name, i] ** 2 for i in NAMES)
    print(f"{name:14} norm of the noise on the whole sum {power**0.5:5.1f}")

# %% [markdown]
# ## Does it pay? All five at ε = 8
#
# Batch size, learning rate and C = 0.1 are those that `keep_your_batchnorm` chose by hand for GBC *without* ALC, on these very images.
# So the first column is tuned, and ALC is not.
#
# **Look at** the spread before the mean: dots are seeds. *Proportional* and *scale* are the same up to seeds, as the panels above say, and lose: they put the most noise on conv 2 and linear,
# which have most of the weights. The other three differ by less than their seeds do.

# %%
accuracy = {name: [] for name in SETTINGS}
for name, values in accuracy.items():
    for seed in SEEDS:
        torch.manual_seed(seed)
        engine, model, optimizer, loader = private_run(**SETTINGS[name])
        train(model, optimizer, loader)
        assert engine.get_epsilon(1e-4) <= 8.0
        released = engine.finalize(model).eval()
        with torch.no_grad():
            values.append(100 * float((released(x_test).argmax(1) == y_test).float().mean()))

# %%
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
for place, (name, values) in enumerate(accuracy.items()):
    axes.plot([place] * len(values), values, "o", color=COLOURS[name], alpha=0.6)
    axes.plot([place - 0.2, place + 0.2], [np.mean(values)] * 2, color=COLOURS[name], linewidth=2)
axes.set_xticks(range(len(accuracy)), accuracy)
axes.set(ylabel="test accuracy, %", ylim=(0 if QUICK else 60, 100))
plt.show()
for name, values in accuracy.items():
    print(f"{name:14} mean {np.mean(values):.1f} %")

# %% [markdown]
# ## What to take home
#
# - ALC moves noise and clipping to where public data say that they hurt least. It does not make privacy cheaper: clipping by layer
#   pays √L, and at a fixed budget that is √L times the noise multiplier.
# - `apply="scale"` has no √L in σ. Where all layers are clipped, as here, L layers share one ball, and the *signal* pays √L instead. We expect it to win where
#   little is clipped (not shown here); where one layer's gradient explodes it shrinks all of them.
# - Few groups (`layers=2`, `layers=4`) lie between. σ_eff is fixed before training; no refresh moves it.
# - On small networks at tight budgets a single bound is hard to beat. Compare at one ε, as here, before you use it.

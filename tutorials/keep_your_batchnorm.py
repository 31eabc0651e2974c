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
# # Keep your BatchNorm: three ways, one ε
#
# DP-SGD clips the gradient of *one sample*. BatchNorm mixes the samples of a batch, so no such gradient exists, and Opacus asks
# you to replace it by GroupNorm. Here we keep it, in three ways, and compare them with stock Opacus at the same budget:
#
# | | what is clipped | BatchNorm in training | sensitivity |
# |---|---|---|---|
# | stock Opacus | one sample's gradient | replaced by GroupNorm | C |
# | **IC**, individual clipping | one sample's gradient | statistics of a public batch | C |
# | **GBC**, mini-sets of s | the gradient of s samples | statistics of the mini-set | 2C |
# | **BC**, the whole batch | the gradient of m samples | statistics of the batch | 2C |
#
# In all three, evaluation uses running statistics of public data. The data are scikit-learn's 8 × 8 digits.

# %%
import copy
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
import opacus
import torch
from opacus.validators import ModuleValidator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import PrivacyEngine

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook|Optimal order")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
EPSILON, DELTA, EPOCHS, SEEDS = 8.0, 1e-4, 10, range(3)
if QUICK:
    EPOCHS, SEEDS = 1, range(1)

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
data = TensorDataset(images, torch.tensor(digits.target))
private, public, test = random_split(data, [1344, 156, 297], torch.Generator().manual_seed(0))
x_test, y_test = test[:]

# %% [markdown]
# ## The leak that is easy to forget
#
# A forward pass in training mode writes the batch's mean and variance into `running_mean` and `running_var`. These buffers ship
# with the model, and no noise is ever added to them: clipping gradients does not help. Below, one batch goes through a BatchNorm
# layer twice, the second time without one of its samples.
#
# **Look at** how far the buffers move. Every bar should be hidden by noise if the model were private. Nothing hides it, so whoever
# knows the other samples can compute the missing one.

# %%
batch = images[:32].flatten(1)
with_sample, without = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
with_sample(batch)
without(batch[1:])
moved = (with_sample.running_mean - without.running_mean).numpy()

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained", width_ratios=[3, 1])
axes[0].bar(range(64), moved, color="#d55e00")
axes[0].set(xlabel="pixel", ylabel="difference", title="running_mean with the sample, minus without")
# Undo the average by hand: momentum 0.1, 32 samples against 31.
recovered = 32 * (10 * with_sample.running_mean - 31 / 32 * 10 * without.running_mean)
axes[1].imshow(recovered.reshape(8, 8).numpy(), cmap="gray_r")
axes[1].set(title="computed from the buffers")
axes[1].axis("off")
plt.show()
print("recovered up to", float((recovered - batch[0]).abs().max()))


# %% [markdown]
# So `make_private` refuses a model with BatchNorm until you say what happens to these buffers. The message lists the choices:


# %%
def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


model = make_model()
try:
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(private, batch_size=64),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
except ValueError as error:
    print(error)

# %% [markdown]
# ## Three ways and stock Opacus at ε = 8
#
# Each way is one call. Batch size, learning rate and clip bound were chosen by hand for each way, on these very images: read
# differences of a point or two as nothing. `mini_batch_size` is s.

# %%
public_loader = DataLoader(public, batch_size=156)
WAYS = {
    "stock Opacus, GroupNorm": {"batch_size": 256, "lr": 0.7, "max_grad_norm": 1.0},
    "IC, public BatchNorm": {"batch_size": 256, "lr": 0.7, "max_grad_norm": 1.0, "batch_norm": public_loader},
    "GBC, mini-sets of 8": {
        "batch_size": 672, "lr": 0.8, "max_grad_norm": 0.1, "batch_norm": public_loader,
        "clipping": "batch", "mini_batch_size": 8,
    },
    "BC, whole batch": {
        "batch_size": 32, "lr": 0.007, "max_grad_norm": 0.1, "batch_norm": public_loader, "clipping": "batch",
    },
}  # fmt: skip


def train(way: str, seed: int) -> dict[str, object]:
    """Train one way; returns test accuracy and spent epsilon after every epoch, and what the noise was."""
    torch.manual_seed(seed)
    settings = copy.copy(WAYS[way])
    batch_size, lr = settings.pop("batch_size"), settings.pop("lr")
    stock = way.startswith("stock")
    model = ModuleValidator.fix(make_model()) if stock else make_model()
    engine = opacus.PrivacyEngine(accountant="prv") if stock else PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        data_loader=DataLoader(private, batch_size=batch_size, shuffle=True),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        **settings,
    )
    curve = []
    for _ in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            curve.append(float((model(x_test).argmax(1) == y_test).float().mean()))
    bound, sigma = settings["max_grad_norm"], optimizer.noise_multiplier
    vectors = batch_size // settings.get("mini_batch_size", batch_size if "clipping" in settings else 1)
    sensitivity = 2 * bound if "clipping" in settings else bound
    return {
        "accuracy": curve,
        "epsilon": engine.get_epsilon(DELTA),
        "noise/C": sigma * sensitivity / vectors / bound,
    }


runs = {way: [train(way, seed) for seed in SEEDS] for way in WAYS}

# %% [markdown]
# **Look at** two things. First the ε in the legend: the three ways and stock Opacus spent the same budget. Then how far apart the curves are: the line is
# the mean over three seeds, the band their range.

# %%
COLOURS = ["0.35", "#0072b2", "#009e73", "#d55e00"]
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (way, results), colour in zip(runs.items(), COLOURS, strict=True):
    curves = 100 * np.array([result["accuracy"] for result in results])
    epochs = np.arange(1, EPOCHS + 1)
    label = f"{way} (ε = {results[0]['epsilon']:.2f})"
    axes.plot(
        epochs, curves.mean(0), color=colour, label=label, linestyle="--" if way.startswith("stock") else "-"
    )
    axes.fill_between(epochs, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
axes.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100), xticks=epochs)
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

# %% [markdown]
# ## What batch clipping costs
#
# The noise multiplier σ is noise over *sensitivity*. Individual clipping adds m vectors of norm at most C, so the mean has noise
# σC/m. A mini-set of s counts as *one* vector, and one sample can turn it around, which is a sensitivity of 2C: the mean of m/s
# vectors has noise 2sσC/m. At equal C, σ and m that is **2s times** the noise.
#
# **Look at** the last column: the noise on every weight of the mean update, over the clip bound, which is the length of the longest signal that
# the update can carry. The settings differ in m and σ, so the ratios are not exactly 2s.

# %%
print(f"{'':26}{'accuracy':>10}{'noise per entry / C':>22}")
for way, results in runs.items():
    final = [100 * result["accuracy"][-1] for result in results]
    print(f"{way:26}{np.mean(final):8.1f} %{results[0]['noise/C']:22.4f}")

# %% [markdown]
# ## What to take home
#
# - **IC with public BatchNorm** keeps the model and pays no more noise than stock Opacus. It needs per-sample gradients and a public
#   set. Use it if you can.
# - **GBC** needs neither hooks nor per-sample gradients, and its BatchNorm sees private statistics, which clipping covers. It pays 2s
#   in noise: keep s small and m large.
# - **BC** costs one ordinary backward. With 2m times the noise it is for large budgets, or for functions of a batch that have no
#   per-sample gradient.
# - No public data? `batch_norm="private"` releases noised statistics with BC and GBC and counts them in ε.

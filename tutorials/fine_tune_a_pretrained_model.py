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
# # Fine-tune a pretrained model, with its BatchNorm in place
#
# Most private models should not start from nothing: a network that was pretrained on public images already knows edges and strokes, and your private images only have to tell it what is new. Such networks have
# BatchNorm, and Opacus asks you to replace it. This notebook shows what that replacement costs, and what to do instead:
#
# 1. pretrain a small network on public images (or load a file: `OPACUS_BC_WEIGHTS=weights.pth`),
# 2. see what `ModuleValidator.fix` does to it, before any private step,
# 3. fine-tune it privately in four ways at the same ε,
# 4. find a learning rate without touching private images,
# 5. release it as an ordinary model.
#
# The data are scikit-learn's 8 × 8 digits. The digits 0 to 4 are the public world; **the digits 5 to 9 are private**. With real weights the same lines are in `examples/finetune_timm.py`.

# %%
import math
import os
import warnings

import matplotlib.pyplot as plt
import torch
from opacus.validators import ModuleValidator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.accounting import noise_multiplier

# Cryptographic noise is not for a notebook; Opacus's hooks see inputs without gradients.
warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook|Optimal order")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
PRETRAINING, EPOCHS, SEEDS = (1, 1, range(1)) if QUICK else (12, 8, range(2))

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
images, labels = images[order], labels[order]
old, new = labels < 5, labels >= 5
world = TensorDataset(images[old], labels[old])
mine = TensorDataset(images[new], labels[new] - 5)
private, public, test = (
    TensorDataset(*mine[start:end]) for start, end in ((0, 640), (640, 720), (720, None))
)
print(
    f"{len(world)} images to pretrain with; {len(private)} private, {len(public)} public and {len(test)} test images"
)


# %% [markdown]
# ## 1. A pretrained network
#
# Six convolutions with BatchNorm and a head. The head belongs to the old classes, so a new one is put in its place.


# %%
def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 5),
    )  # fmt: skip


def accuracy(model: nn.Module, part: TensorDataset) -> float:
    x, y = part.tensors
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    model.train()
    return 100 * float(right)


torch.manual_seed(0)
model = make_model()
if "OPACUS_BC_WEIGHTS" in os.environ:
    model.load_state_dict(torch.load(os.environ["OPACUS_BC_WEIGHTS"], weights_only=True))
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(PRETRAINING):
        for x, y in DataLoader(world, batch_size=64, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
weights = model.state_dict()
print(f"digits 0 to 4, seen in pretraining: {accuracy(model, world):.1f} % right")


def pretrained(seed: int = 0) -> nn.Sequential:
    model = make_model()
    model.load_state_dict(weights)
    torch.manual_seed(seed)
    model[-1] = nn.Linear(256, 5)
    return model


# %% [markdown]
# ## 2. What the swap destroys
#
# `ModuleValidator.fix` puts fresh GroupNorms where BatchNorm was. The convolutions still hold what they have learned, but they get other inputs than they were trained with. To isolate the damage we take the features before the
# head, without any private step, and fit a head to them **without privacy**. Whatever the difference is, the swap alone made it.
#
# **Look at** the gap between the two bars. Digits are easy and six layers are few, so it is small here: a head finds its way even in spoiled features when no noise disturbs it. On EfficientNet-Lite0, 49 BatchNorm layers with
# ImageNet weights, the same experiment gives 78 % against 40 % (4,000 CIFAR-10 images of 96 pixels).


# %%
def probe(model: nn.Module) -> float:
    """Fit a head to the features of a model, without privacy, and test it."""
    body, head = model[:-1].eval(), nn.Linear(256, 5)
    with torch.no_grad():
        known, asked = body(private.tensors[0]), body(test.tensors[0])
    mean, std = known.mean(0), known.std(0) + 1e-3
    known, asked = (known - mean) / std, (asked - mean) / std
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01, weight_decay=1e-2)
    for _ in range(10 if QUICK else 200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(known), private.tensors[1]).backward()
        optimizer.step()
    return accuracy(head, TensorDataset(asked, test.tensors[1]))


damage = {
    "BatchNorm in place": probe(pretrained()),
    "after ModuleValidator.fix": probe(ModuleValidator.fix(pretrained())),
}
figure, axes = plt.subplots(figsize=(5.5, 1.8), layout="constrained")
bars = axes.barh(list(damage), list(damage.values()), color=["#0072b2", "#d55e00"])
axes.bar_label(bars, fmt="%.1f %%", padding=3)
axes.set(xlim=(0, 110), xlabel="linear probe without privacy, test accuracy in %")
plt.show()


# %% [markdown]
# ## 3. Four ways to fine-tune at ε = 1
#
# Which parameters move is up to you: the optimizer holds them, and everything outside it costs nothing, neither gradients nor noise. `batch_norm="frozen"` leaves the running statistics at what pretraining found, so nothing private
# enters them, and a sample's gradient exists because no batch is mixed.
#
# | | BatchNorm | the optimizer holds |
# |---|---|---|
# | swap | GroupNorm in its place | everything |
# | head | frozen | the head |
# | norm + head | statistics frozen, weights and biases trained | BatchNorm's weights and biases, and the head |
# | all | statistics frozen, weights and biases trained | everything |
#
# Noise goes to every parameter that moves, so fewer of them mean less noise in total; more of them can learn more. The swap leaves no choice: its fresh GroupNorms must be trained, and every layer after them has to follow.

# %%
EPSILON, DELTA = 1.0, 1e-4


def moving(model: nn.Sequential, which: str) -> list[nn.Parameter]:
    if which in ("all", "swap"):
        return list(model.parameters())
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    layers = [model[-1], *(norms if which == "norm + head" else [])]
    return [p for layer in layers for p in layer.parameters()]


def fine_tune(
    which: str, *, lr: float = 0.3, clip: float = 1.0, seed: int = 0, images=private, epochs=EPOCHS
):
    """Train, and return the engine, the module and the test accuracy after each epoch."""
    model = pretrained(seed)
    if which == "swap":
        model = ModuleValidator.fix(model)
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(moving(model, which), lr=lr, momentum=0.9),
        data_loader=DataLoader(images, batch_size=max(16, len(images) // 5), shuffle=True),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=clip,
        clipping="flat",
        batch_norm=None if which == "swap" else "frozen",
    )
    module.train()
    curve = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        curve.append(accuracy(model, test))
    return engine, module, curve


WAYS = ("swap", "head", "norm + head", "all")
curves = {way: [fine_tune(way, seed=seed)[2] for seed in SEEDS] for way in WAYS}
for way, found in curves.items():
    ends = torch.tensor([curve[-1] for curve in found])
    size = sum(p.numel() for p in moving(pretrained(), way))
    spread = f" ± {float(ends.std()):.1f}" if len(ends) > 1 else ""
    print(f"{way:12} {size:6} parameters move: {float(ends.mean()):5.1f}{spread} %")

# %% [markdown]
# **Look at** how far the grey and the blue line are above the red one: with few private images and a small ε it pays to move few parameters, and only a network that kept its BatchNorm can do that. Training *all* parameters (green) drowns in
# noise here; it needs tens of thousands of images. The bands are one standard deviation over seeds. The setting was chosen so that the damage shows: with ε = 8 and three layers instead of six the swapped network came out ahead on these easy digits.

# %%
figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
for way, colour in zip(WAYS, ("#d55e00", "#999999", "#0072b2", "#009e73"), strict=True):
    values = torch.tensor(curves[way])
    epochs = range(1, values.shape[1] + 1)
    axes.plot(epochs, values.mean(0), color=colour, marker="o", markersize=3, label=way)
    if len(values) > 1:
        low, high = values.mean(0) - values.std(0), values.mean(0) + values.std(0)
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
axes.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100), title="ε = 1, δ = 1e-4")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 4. A learning rate that costs nothing
#
# Every run on private images is a release, so a search over them spends budget or lies about it. Search on public images instead. A trial is the run in small: the same noise in an update, public images in the place of private ones. Here
# half of the public images train and the other half judges. `opacus-bc compare --weights ... --tune` does the same.
#
# **Look at** where a curve is highest, and how the curve of the smaller bound has its height at a larger rate: as long as almost every gradient is clipped, it is the *product* lr · C that counts. Forty images judge here, so a difference of a
# few points is nothing.

# %%
half = TensorDataset(*public[:40]), TensorDataset(*public[40:])
real, small = len(private) // 5, 16  # batch sizes of the run and of a trial
sigma = noise_multiplier(target_epsilon=EPSILON, target_delta=DELTA, sample_rate=1 / 5, steps=5 * EPOCHS)
RATES = (0.02, 0.1, 0.5, 2.5)


def trial(lr: float, clip: float) -> float:
    """A short run on public images with the noise that an update of the private run has."""
    model, engine = pretrained(), PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(moving(model, "norm + head"), lr=lr, momentum=0.9),
        data_loader=DataLoader(half[0], batch_size=small, shuffle=True),
        noise_multiplier=sigma * small / real,
        max_grad_norm=clip,
        clipping="flat",
        batch_norm="frozen",
    )
    module.train()
    for _ in range(1 if QUICK else 10):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return accuracy(model, half[1])


figure, axes = plt.subplots(figsize=(5.5, 3), layout="constrained")
for clip, colour in ((0.2, "#56b4e9"), (1.0, "#0072b2")):
    axes.plot(RATES, [trial(lr, clip) for lr in RATES], marker="o", color=colour, label=f"C = {clip:g}")
axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy on public images, %", ylim=(0, 100))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 5. Release
#
# `finalize` gives the plain module back: the same layers, the same keys, the running statistics of pretraining. It loads strictly into a network that knows nothing of this package.

# %%
engine, module, curve = fine_tune("norm + head")
released = engine.finalize(module)
fresh = make_model()
fresh.load_state_dict(released.state_dict(), strict=True)
unchanged = all(
    torch.equal(a.running_mean, b.running_mean)
    for a, b in zip(fresh.modules(), pretrained().modules(), strict=True)
    if isinstance(a, nn.BatchNorm2d)
)
print(f"test accuracy of the released weights in a plain network: {accuracy(fresh, test):.1f} %")
print(f"running statistics are those of pretraining: {unchanged}")
print(f"epsilon {math.ceil(1000 * engine.get_epsilon(DELTA)) / 1000:.3f} at delta {DELTA:g}")

# %% [markdown]
# ## What to take with you
#
# - **Keep BatchNorm, freeze its statistics** (`batch_norm="frozen"`). With a few hundred public images of your own task, `batch_norm=public_loader` moves the statistics to where your images are.
# - **Move few parameters when images are few or ε is small**: the head, or BatchNorm's weights and biases and the head. Move more of them with tens of thousands of private images.
# - **C = 1, SGD with momentum, a learning rate of 0.2 to 0.5**, found on public images; lr · C is what counts.
# - **Large batches, few epochs**: a fifth of the data a step is not too much for a small data set.
# - `benchmarks/README.md` has the same comparison with real ImageNet weights.

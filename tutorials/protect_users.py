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
# # Protect users, not samples
#
# ε of DP-SGD is about *one sample*. A person who has twenty samples in the data is not protected by it: all twenty may push the model into one
# direction. `make_private(unit=ids)` makes the person the unit. A step draws *users*, each with probability q, and each drawn user is **one clipped vector**:
#
# | what is protected | a step draws | one clipped vector | sensitivity (add or remove one) |
# |---|---|---|---|
# | one sample, individual clipping | samples | one sample | C |
# | one sample, mini-sets (GBC) | samples | s samples of s people | 2C: one sample can turn the vector around |
# | **one user** | users | one user's samples, at most s of them | C: the vector comes or goes as a whole |
#
# In the last row anything may happen *inside* a user: batch statistics, several local steps, a loss over pairs. The noise does not grow with s.
#
# The data are scikit-learn's 8 × 8 digits. They have no owners, so we deal them out to 150 **made-up** users: how many and which digits a user has
# comes from a Dirichlet draw, as is usual in studies of federated learning. Nothing here says how real people write.

# %%
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import PrivacyEngine, local_update

# Cryptographic noise is not for a notebook; Opacus's hooks see inputs without gradients.
warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook|Optimal order")
torch.set_num_threads(1)
plt.rcParams.update(
    {"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
)
QUICK = "OPACUS_BC_QUICK" in os.environ  # the tests run a short version of this notebook
EPOCHS, SEEDS, CAPS = (1, range(1), (2, 4)) if QUICK else (12, range(3), (1, 2, 4, 8, 16))
EPSILON, DELTA = 8.0, 5e-4
USERS, USERS_A_STEP, CAP = 150, 50, 8

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
data = TensorDataset(images, torch.tensor(digits.target))
private, public, test = random_split(data, [1344, 156, 297], torch.Generator().manual_seed(0))
x_test, y_test = test[:]

# %% [markdown]
# ## Who owns what
#
# Every class is dealt out with weights of its own, so users differ in how many digits they have and in which. **Look at** how uneven the users are:
# a guarantee for samples would protect the largest one least.

# %%
rng = np.random.default_rng(0)
labels = private[:][1].numpy()
ids = np.empty(len(private), dtype=int)
for digit in range(10):
    own = np.flatnonzero(labels == digit)
    ids[own] = rng.choice(USERS, size=len(own), p=rng.dirichlet(np.full(USERS, 0.7)))
ids[rng.permutation(len(private))[:USERS]] = np.arange(USERS)  # nobody is left without a sample
sizes = np.bincount(ids)

figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", width_ratios=[1, 1.4])
axes[0].hist(sizes, bins=range(1, sizes.max() + 2), color="#0072b2")
axes[0].axvline(CAP, color="black", linestyle=":", label=f"cap s = {CAP}")
axes[0].set(xlabel="samples of a user", ylabel="users")
axes[0].legend(frameon=False)
shown = np.argsort(sizes)[-12:]
mixture = np.array([np.bincount(labels[ids == user], minlength=10) for user in shown])
axes[1].imshow(mixture, aspect="auto", cmap="Blues")
axes[1].set(xlabel="digit", ylabel="the 12 largest users", xticks=range(10), yticks=[])
plt.show()
print(
    f"{USERS} users with {sizes.min()} to {sizes.max()} samples, {np.mean(sizes > CAP):.0%} of them above the cap"
)

# %% [markdown]
# ## Four ways, one ε
#
# All four train a small network with BatchNorm for the same number of passes at ε = 8, δ = 5·10⁻⁴. The first protects *samples*; its ε is about something else and stands
# here for what it costs. The others protect users:
#
# - **flat**: the mean gradient of a user's rows is clipped, all users in one backward. BatchNorm has statistics of public digits.
# - **GBC**: the loader delivers user after user, and BatchNorm uses the statistics of that user's own samples (who has one sample counts as zero).
# - **DP-FedAvg**: GBC where a user's vector is how far three local steps move the weights.


# %%
def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return 100 * float((model(x_test).argmax(1) == y_test).float().mean())


def train(
    seed: int, *, lr: float, batch_size: int, local_steps: int = 0, **how
) -> tuple[float, PrivacyEngine]:
    torch.manual_seed(seed)
    model, engine = make_model(), PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5),
        data_loader=DataLoader(private, batch_size=batch_size, generator=torch.Generator().manual_seed(seed)),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        noise_generator=torch.Generator().manual_seed(seed),  # known seeds: only to repeat this notebook
        batch_norm=DataLoader(public, batch_size=156),
        **how,
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = lambda x=x, y=y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
            if local_steps:
                local_update(model, lambda params: torch.optim.SGD(params, lr=0.2), [loss] * local_steps)
            else:
                loss().backward()
            optimizer.step()
    return accuracy(engine.finalize(model)), engine


users = {"unit": ids, "mini_batch_size": CAP, "batch_size": USERS_A_STEP}
WAYS = {
    "GBC, samples": {
        "clipping": "batch", "mini_batch_size": CAP, "batch_size": 448, "max_grad_norm": 0.5, "lr": 0.3
    },
    "flat, users": {"clipping": "flat", **users, "grad_sample_mode": "bk", "max_grad_norm": 0.5, "lr": 0.6},
    "GBC, users": {"clipping": "batch", **users, "max_grad_norm": 0.5, "lr": 0.6},
    "DP-FedAvg, users": {"clipping": "batch", **users, "max_grad_norm": 0.5, "lr": 0.6, "local_steps": 3},
}  # fmt: skip
results = {name: [train(seed, **how) for seed in SEEDS] for name, how in WAYS.items()}

# %% [markdown]
# **Look at** the first two bars. Mini-sets of samples carry 2s = 16 times the noise of individual clipping; where the mini-set is the user, the factor is gone, and
# ε is about the whole user.

# %%
names = list(WAYS)
found = [[value for value, _ in results[name]] for name in names]
figure, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
axes.bar(names, [np.mean(values) for values in found], color=["#999999", "#0072b2", "#0072b2", "#009e73"])
for place, values in enumerate(found):
    axes.plot([place] * len(values), values, "o", color="black", markersize=3)
axes.set(ylabel="test accuracy, %", title=f"at ε = {EPSILON:g}; the points are seeds")
plt.show()
for name in names:
    engine = results[name][0][1]
    print(f"{name:18} {np.mean([v for v, _ in results[name]]):5.1f} %   {engine.accountant.adjacency}")

# %% [markdown]
# ## What the cap costs
#
# `mini_batch_size` is the most samples of one user that a step uses; of a larger user so many are chosen anew each time. ε does not depend on it: a user is one vector at every
# cap. A larger cap makes each vector a better estimate, and each step slower. **Look at** where the curve flattens.

# %%
curve = [
    [train(seed, **{**WAYS["flat, users"], "mini_batch_size": cap})[0] for seed in SEEDS] for cap in CAPS
]
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(CAPS, [np.mean(values) for values in curve], color="#0072b2")
for cap, values in zip(CAPS, curve, strict=True):
    axes.plot([cap] * len(values), values, "o", color="#0072b2", markersize=3)
axes.set_xscale("log", base=2)
axes.set(xlabel="most samples of a user in a step", ylabel="test accuracy, %", xticks=CAPS, xticklabels=CAPS)
plt.show()

# %% [markdown]
# ## The same on MNIST, with 1,000 users
#
# Digits of 8 × 8 pixels are small, and so are 150 users. `opacus-bc compare` deals the 54,000 private images of MNIST out to 1,000 users, also made up by a Dirichlet draw, and trains
# BN-LeNet-5 at ε = 8, δ = 10⁻⁵ for three epochs. It needs MNIST and some minutes, so this notebook quotes the report in `benchmarks/results/compare/mnist-users`, which comes from
#
#     opacus-bc compare --dataset mnist --data DIR --epsilon 8 --delta 1e-5 --epochs 3 --methods users --seeds 1 --no-costs
#
# | | protected | cap | test accuracy |
# |---|---|---|---|
# | GBC, mini-sets of 8 samples | one image | – | 94.8 % |
# | flat, users | one user | 8 | 86.6 % |
# | GBC, users | one user | 8 | 87.9 % |
# | DP-FedAvg, 3 local steps, users | one user | 8 | 88.3 % |
# | flat, users | one user | 32 | 89.0 % |
# | GBC, users | one user | 32 | 90.4 % |
#
# One seed: differences of a point or two are hints. **Look at** the second column first: the ε of the first row promises something to one image, and a user has 54 of them on average.

# %% [markdown]
# ## What may be said
#
# The statement names the unit. Sample rate, δ and the number of steps are about users: δ must be well below 1/150, not below one over the number of samples.

# %%
print(results["flat, users"][0][1].statement(DELTA))

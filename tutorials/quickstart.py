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
# # Quickstart: a private model with its BatchNorm in place
#
# You have a PyTorch model with BatchNorm, private data, and a little public data of the same kind. Three lines change:
# make the engine, call `make_private_with_epsilon`, and take the result out with `finalize`. The training loop stays.

# %%
import math
import textwrap

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import PrivacyEngine

torch.manual_seed(0)  # the same first weights; draws and noise are seeded by the operating system
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
data = TensorDataset(images, torch.tensor(digits.target))
private, public, test = random_split(data, [1300, 197, 300], torch.Generator().manual_seed(0))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip

# %% [markdown]
# The engine finds the noise for a budget, here ε = 8 at δ = 10⁻⁴ after 10 epochs:
#
# - **ε** limits what anybody learns about one sample: with or without it, no outcome is more than e^ε times as likely.
# - **δ** is, roughly, the probability with which ε may fail to hold; it must lie well below 1/1300, one over the number of private samples.
# - **`max_grad_norm`** is the length to which each sample's gradient is clipped, so that no sample counts for more.
# - **The noise multiplier** is the noise on the sum of clipped gradients, over the most that one sample can change that sum.
#
# The shuffled loader becomes Poisson sampling, which is what the accountant counts on: every sample is in a batch with probability 1/10, and 130 is the
# *expected* batch size. BatchNorm normalises with statistics of the public images, so every private sample's gradient is its own and the noise is that of
# stock Opacus. One ordinary backward clips them all (`grad_sample_mode="bk"`, the default where `batch_norm=` answers for
# BatchNorm), and the model stays the object that you made. The split has a seed: another one after a restart would make private samples public.

# %%
EPOCHS = 10
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
    data_loader=DataLoader(private, batch_size=130, shuffle=True),
    target_epsilon=8.0,
    target_delta=1e-4,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    batch_norm=DataLoader(public, batch_size=197),
    # clipping="batch", mini_batch_size=8,  # clip mini-sets of 8 instead of samples; "Keep your BatchNorm" says when
)
print(f"noise multiplier {optimizer.noise_multiplier:.3f}")

# %% [markdown]
# The loop is the one you have. `engine.get_epsilon` may be asked at any time; it is an upper bound, so we print it rounded up.

# %%
x_test, y_test = next(iter(DataLoader(test, batch_size=300)))
accuracies, epsilons = [], []
for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracies.append(100 * float((model(x_test).argmax(1) == y_test).float().mean()))
    epsilons.append(math.ceil(1000 * engine.get_epsilon(1e-4)) / 1000)
    print(f"epoch {epoch + 1:2}: test accuracy {accuracies[-1]:.1f} %, epsilon {epsilons[-1]:.3f}")

# %% [markdown]
# **Look at** how the two curves bend: the first epochs bring most of the accuracy. ε starts high, grows with every epoch, and ends just below the budget (dashed).

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for panel, values, label in zip(
    axes, (accuracies, epsilons), ("test accuracy, %", "ε at δ = 1e-4"), strict=True
):
    panel.plot(range(1, EPOCHS + 1), values, "o-", color="#0072b2")
    panel.set(xlabel="epoch", ylabel=label, xticks=range(1, EPOCHS + 1))
    panel.spines[["top", "right"]].set_visible(False)
axes[0].set_ylim(0, 100)
axes[1].axhline(8, color="0.5", linestyle="--")
axes[1].set_ylim(0, 9)
plt.show()

# %% [markdown]
# `finalize` gives a plain module with ordinary BatchNorm layers and keys. `statement` is the paragraph for whoever has to
# sign it off (`format="markdown"` and `"json"` exist too).

# %%
released = engine.finalize(model)
print(type(released).__name__, [name for name in released.state_dict() if name.startswith("1.")])
for line in engine.statement(1e-4).splitlines():
    print(textwrap.fill(line, 110, subsequent_indent="    "))

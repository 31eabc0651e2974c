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
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_bc import PrivacyEngine

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None], torch.tensor(digits.target)
)
private, public, test = random_split(data, [1300, 197, 300])

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip

# %% [markdown]
# The engine finds the noise for the budget: ε = 8 at δ = 10⁻⁴ after 10 epochs (δ must lie well below 1/1300, the private samples). BatchNorm normalises with statistics of
# the public images, so every private sample's gradient is its own and the noise is that of stock Opacus.

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
)
print(f"noise multiplier {optimizer.noise_multiplier:.3f}")

# %% [markdown]
# The loop is the one you have. Look at ε: it grows with every epoch and ends below the budget.

# %%
x_test, y_test = next(iter(DataLoader(test, batch_size=300)))
for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if epoch % 3 == 0 or epoch == EPOCHS - 1:
        model.eval()
        with torch.no_grad():
            accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
        print(f"epoch {epoch + 1:2}: test accuracy {accuracy:.1%}, epsilon {engine.get_epsilon(1e-4):.2f}")

# %% [markdown]
# `finalize` gives a plain module with ordinary BatchNorm layers and keys; `statement` is the paragraph for whoever has to
# sign it off.

# %%
released = engine.finalize(model)
print(type(released).__name__, [name for name in released.state_dict() if name.startswith("1.")])
print(engine.statement(1e-4))

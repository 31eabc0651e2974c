"""Local updates as the function of a mini-set that is clipped."""

from __future__ import annotations

import pytest
import torch
from support import blobs, cross_entropy, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import local_update

DATA = blobs(400)


def momentum(params):
    return optim.SGD(params, lr=0.2, momentum=0.9)


def test_gradient_is_the_way_from_the_weights_to_the_local_model():
    model, reference = mlp(), mlp()
    x, y = DATA[:16]
    local_update(model, momentum, [lambda: cross_entropy(model, x, y)] * 3)
    plain = momentum(reference.parameters())
    for _ in range(3):
        plain.zero_grad()
        cross_entropy(reference, x, y).backward()
        plain.step()
    assert torch.equal(weights(model), weights(mlp()))
    grads = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(model) - grads, weights(reference), rtol=1e-5, atol=1e-6)


def test_weights_buffers_and_random_state_are_put_back_even_after_an_error():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = DATA[:16]
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def fails():
        cross_entropy(model, x, y)
        raise ArithmeticError

    local_update(model, momentum, [lambda: cross_entropy(model, x, y)])
    with pytest.raises(ArithmeticError):
        local_update(model, momentum, [lambda: cross_entropy(model, x, y), fails])
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for p in model.parameters())


class Replacing(nn.Module):
    """Puts a new tensor in its buffer's place instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = self.seen + x.mean(0)
        return self.linear(x - self.seen)


def test_buffers_that_a_forward_replaces_are_put_back_too():
    model = Replacing()
    held = model.seen
    x, y = DATA[:16]
    local_update(model, momentum, [lambda: cross_entropy(model, x, y)] * 2)
    assert model.seen is held
    assert torch.equal(held, torch.zeros(4))


def test_momentum_does_not_travel_from_one_mini_set_to_the_next():
    model = mlp()
    x, y = DATA[:16]
    results = []
    for _ in range(2):
        local_update(model, momentum, [lambda: cross_entropy(model, x, y)] * 2)
        results.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_no_local_step_is_refused():
    with pytest.raises(ValueError, match="losses is empty"):
        local_update(mlp(), momentum, [])


def test_general_batch_clipping_trains_with_local_momentum():
    torch.manual_seed(0)
    model = mlp()
    model, optimizer, loader = engine(accountant="prv").make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(DATA, batch_size=80),
        noise_multiplier=0.05,
        max_grad_norm=1.0,
        clipping="batch",
        mini_batch_size=20,
        noise_generator=torch.Generator().manual_seed(0),
    )
    for _ in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            local_update(model, momentum, [lambda x=x, y=y: cross_entropy(model, x, y)] * 3)
            optimizer.step()
    x, y = DATA[:]
    assert float((model(x).argmax(1) == y).float().mean()) > 0.9

"""What the tests of book-keeping share: a delivered batch without a loader, and the oracle of ten lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opacus_bc.draws.ledger import Delivery, DrawLedger
from opacus_bc.gradients.book_keeping.attached import BookKeeping
from opacus_bc.gradients.book_keeping.book import Book
from opacus_bc.gradients.book_keeping.products import Entry

Loss = Callable[[Any], Tensor]


def squares(output: Tensor) -> Tensor:
    """A loss that every entry of the output counts in, differently."""
    places = torch.arange(output[0].numel(), dtype=output.dtype).view(output[0].shape)
    return (output.square() * (1 + places % 5)).sum() + (output * (places % 3 - 1)).sum()


class Kept:
    """A model that book-keeping is hung on, and a ledger that delivers batches of any size.

    The check of the first forwards is off: it would run the model more often than the test says.
    """

    def __init__(self, model: nn.Module, trained: Callable[[], Any] | None = None) -> None:
        self.model, self.ledger = model, DrawLedger()
        self.names = {p: name for name, p in model.named_parameters()}
        self.book = Book(self.names, trained or (lambda: list(self.names)), self.ledger, quiet=True)
        self.recording = BookKeeping(model, self.book, self.names)
        self.recording._checks_left = 0
        self._serial = 0

    def deliver(self, rows: int) -> None:
        """A batch of so many samples reaches the loop; what was delivered before is used up."""
        self.book.forget()
        self.ledger.begin_pass()
        self._serial += 1
        self.ledger.plan(
            Delivery(
                serial=self._serial,
                pass_index=self.ledger.pass_index,
                size=rows,
                set_size=rows,
                ends_set=True,
                ends_draw=True,
                placeholder=False,
            )
        )
        self.ledger.deliver(self.ledger.pass_index)

    def read(self) -> dict[str, Entry]:
        """The entries by parameter name."""
        wanted = [p for p in self.names if p.requires_grad]
        return {self.names[p]: entry for p, entry in self.book.read(wanted).items()}

    def entries(self, x: Tensor, loss: Loss = squares) -> dict[str, Entry]:
        """What one delivered batch and one backward leave in the book."""
        self.deliver(len(x))
        loss(self.model(x.clone())).backward()
        return self.read()


def entries_of(model: nn.Module, x: Tensor, loss: Loss = squares) -> dict[str, Entry]:
    """What the book says of a batch; the model is left as it was."""
    kept = Kept(model)
    try:
        return kept.entries(x, loss)
    finally:
        kept.recording.remove()


def oracle(model: nn.Module, x: Tensor, loss: Loss = squares) -> dict[str, Tensor]:
    """Every sample's gradient by plain autograd, one sample at a time."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(len(x)):
        grads = torch.autograd.grad(
            loss(model(x[i : i + 1].clone())), list(named.values()), allow_unused=True
        )
        for (name, p), grad in zip(named.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad)
    return {name: torch.stack(found) for name, found in rows.items()}


def norms_of(rows: Tensor) -> Tensor:
    """Every row's norm in float64."""
    return rows.double().reshape(len(rows), -1).norm(dim=1)


def assert_exact(found: Mapping[str, Entry], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Rows, weighted sums and norms are the oracle's; norms are not below it, and above by their margin."""
    above = 1 + 1e-9 if tolerance < 1e-8 else 1.01
    weights = torch.linspace(0.1, 2.0, len(next(iter(expected.values()))), dtype=torch.float64)
    largest = max(float(norms_of(rows).max()) for rows in expected.values())
    for name, rows in expected.items():
        lengths = norms_of(rows)
        if name not in found:
            assert float(lengths.max()) == 0, f"{name} has no entry"
            continue
        # Some gradients vanish (of a bias that softmax cannot see), and only the rounding of terms is left.
        rounding = 8 * torch.finfo(rows.dtype).eps * largest
        entry, scale = found[name], max(tolerance * float(lengths.max()), rounding)
        assert entry.rows().shape == rows.shape, name
        assert float(norms_of(entry.rows() - rows).max()) <= scale, name
        total = torch.einsum("i,i...->...", weights, rows.double())
        assert float((entry.weighted_sum(weights) - total).norm()) <= scale * float(weights.sum()), name
        norms = entry.norms()
        assert bool((norms >= lengths * (1 - 2e-6) - scale).all()), name
        assert bool((norms <= lengths * above + scale).all()), name

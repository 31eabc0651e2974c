"""The optimizer of individual clipping in one backward: it reads every sample's gradient out of the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc.draws.ledger import Delivery
from opacus_bc.gradients.book_keeping.book import Book
from opacus_bc.gradients.book_keeping.products import Entry, Joined, Rows
from opacus_bc.gradients.book_keeping.units import summable, unit_norms
from opacus_bc.mechanism.clipping import accumulation_dtype, coefficients_of_norms
from opacus_bc.mechanism.segments import owners
from opacus_bc.optimizers.clipped_sum import ClippedSumOptimizer, zeros_for
from opacus_bc.optimizers.private import OpenDraw

Counts = tuple[int, ...] | None  # rows of each unit; None: every row is one
_SMALL = 2048  # entries of a parameter up to which calls cost more than arithmetic


class BookKeepingOptimizer(ClippedSumOptimizer):
    """Clips every sample's gradient block by block, float rounding included, without forming all of them.

    Backward leaves in the book, parameter by parameter, what every sample's gradient is made of. A step asks
    it for the samples' norms, turns these into clip coefficients and asks for the weighted sums.

    **Formal guarantee**: one step releases, for every block h, the sum of the samples' clipped vectors plus
    ``N(0, tau_h^2)``, which given the draw is ``G_mu``-DP with ``mu = 1 / effective_noise_multiplier``.
    Proof: norms and sums are those of the same entries, the norms are never too small, and a sample is one
    row of every entry; so it adds one vector of norm at most C_h to block h. Where the delivery says that
    rows make up units (a user, or a sample's views), a unit adds the mean of its rows, clipped once.

    **Edge cases**: a sample with a gradient that is not finite in any block counts as zero in all of them; a
    trainable parameter that backward did not reach counts as zero and is noised.

    Args:
        optimizer: The user's optimizer.
        book: What backward writes.
        **kwargs: For :class:`ClippedSumOptimizer`.
    """

    def __init__(self, optimizer: Optimizer, *, book: Book, **kwargs: Any) -> None:
        self._book = book
        self._entries: dict[nn.Parameter, Entry] = {}
        super().__init__(optimizer, **kwargs)

    def before_delivery(self) -> None:
        """Forget all gradients, and what the book says of the batch."""
        super().before_delivery()
        self._entries = {}
        self._book.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those in the book; what has been clipped of the current draw stays."""
        super().zero_grad(set_to_none)
        self._book.clear()

    def _check_gradients(self, draw: OpenDraw, delivery: Delivery) -> None:
        if set(self.params) != set(draw.params):
            raise RuntimeError(THAWED)
        self._refuse_half_precision_of_a_mean(self._book.dtypes)
        self._entries = self._book.read(draw.params)

    def _accumulate(self, draw: OpenDraw, delivery: Delivery) -> None:
        if not delivery.placeholder:
            self._clip_and_add(
                draw, delivery.size, delivery.counts, whole=draw.clipped_sum is None and delivery.ends_draw
            )
        if delivery.ends_draw and draw.clipped_sum is not None:
            draw.clipped_sum = [
                total.to(accumulation_dtype(p.dtype))
                for total, p in zip(draw.clipped_sum, draw.params, strict=True)
            ]
        self.before_delivery()

    @torch.no_grad()
    def _clip_and_add(self, draw: OpenDraw, rows: int, counts: Counts, *, whole: bool) -> None:
        # The mean of the batch's losses has 1/rows of a sample's gradient.
        scale: float | Tensor = (rows if self.loss_reduction == "mean" else 1.0) / self.loss_scale
        entries = [self._entry(name, p) for name, p in zip(draw.names, draw.params, strict=True)]
        self._entries = {}
        if counts is not None:  # the mean of a unit's rows is clipped
            entries = [entry and summable(entry) for entry in entries]
            scale = scale / torch.tensor(counts, dtype=torch.float64, device=draw.params[0].device)
        joined = _join_small(entries, draw)
        norms = _norms(entries, joined, draw, rows, counts)
        coefficients, finite = coefficients_of_norms(norms, draw.blocks, scale=scale)
        if counts is not None:  # every row has its unit's
            owner = owners(counts, finite.device)
            coefficients, finite = [c[owner] for c in coefficients], finite[owner]
        if not bool(finite.all()):  # zero times infinity is not zero
            entries = [entry and entry.only(finite) for entry in entries]
            joined = {places: members.only(finite) for places, members in joined.items()}
            coefficients = [c[finite] for c in coefficients]
        sums = _weighted_sums(entries, joined, draw, coefficients)
        if not whole:  # float32 would round the sum of thousands of samples once for every chunk
            sums = [value.double() for value in sums]
        if draw.clipped_sum is None:
            draw.clipped_sum = sums
        else:
            torch._foreach_add_(draw.clipped_sum, sums)

    def _entry(self, name: str, p: nn.Parameter) -> Entry | None:
        """All samples' gradients of a parameter, without its frozen entries."""
        entry, frozen = self._entries.get(p), self._frozen(name)
        if entry is None or frozen is None:
            return entry
        return Rows(entry.rows().masked_fill(frozen, 0.0))

    def _frozen(self, name: str) -> Tensor | None:
        return None if self.adaptive is None else self.adaptive.frozen.get(name)


def _join_small(entries: list[Entry | None], draw: OpenDraw) -> dict[tuple[int, ...], Joined]:
    """Take small instantiated entries that are clipped together as they are, on one device, out of the list.

    Returns:
        Their places, and what they are side by side.
    """
    found: dict[tuple[int, ...], Joined] = {}
    start = 0
    for block in draw.blocks:
        small: dict[torch.device, dict[int, Rows]] = {}
        for place, factor in enumerate(block.factors, start):
            entry = entries[place]
            if factor == 1.0 and isinstance(entry, Rows) and draw.params[place].numel() <= _SMALL:
                small.setdefault(entry.values.device, {})[place] = entry
        for members in small.values():
            if len(members) > 1:
                found[tuple(members)] = Joined.of(list(members.values()))
                for place in members:
                    entries[place] = None
        start += len(block.names)
    return found


def _norms(
    entries: Sequence[Entry | None],
    joined: Mapping[tuple[int, ...], Joined],
    draw: OpenDraw,
    rows: int,
    counts: Counts,
) -> list[Tensor]:
    """Every unit's norm of every parameter; those of small ones together stand at the first one's place."""

    def norms_of(entry: Entry) -> Tensor:
        return entry.norms() if counts is None else unit_norms(entry, counts)

    units = rows if counts is None else len(counts)
    nothing = torch.zeros(units, dtype=torch.float64, device=draw.params[0].device)
    norms = [nothing if entry is None else norms_of(entry) for entry in entries]
    for places, members in joined.items():
        norms[places[0]] = norms_of(members.entry)
    return norms


def _weighted_sums(
    entries: list[Entry | None],
    joined: Mapping[tuple[int, ...], Joined],
    draw: OpenDraw,
    coefficients: Sequence[Tensor],
) -> list[Tensor]:
    """Every parameter's clipped sum; entries are taken out of the list, so that each is free to go."""
    sums: list[Tensor | None] = [None] * len(entries)
    for places, members in joined.items():
        weights = coefficients[places[0]].to(members.entry.values.device)
        for i, value in zip(places, members.weighted_sums(weights), strict=True):
            sums[i] = value
    bounds = [block.clip_bound / factor for block in draw.blocks for factor in block.factors]
    for i, p in enumerate(draw.params):
        entry, entries[i] = entries[i], None
        if entry is not None:
            sums[i] = entry.weighted_sum(coefficients[i].to(p.device), bounds[i])
    return [zeros_for(p) if found is None else found for p, found in zip(draw.params, sums, strict=True)]


THAWED = (
    "parameters were frozen, thawed or added within a draw, whose clip bounds cover others: do that between "
    "draws, or start again with iter(loader)"
)

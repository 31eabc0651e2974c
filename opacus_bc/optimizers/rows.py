"""Rows that are samples: individual clipping bounds a row, the accountant counts a sample."""

from __future__ import annotations

from collections.abc import Mapping

from opacus_bc.draws.ledger import Delivery


class RowsAreNotSamplesError(RuntimeError):
    """A layer saw more or fewer rows than the delivered batch has samples."""


def check_rows(rows: Mapping[str, int], delivery: Delivery) -> None:
    """Refuse per-sample gradients of which there are not as many as samples were delivered; changes nothing.

    Every row is clipped to C by itself. A sample with K rows moves the sum by K times C, and a row in which
    all samples have a part is moved by each of them.

    Args:
        rows: The number of rows of every parameter's per-sample gradients, by the parameter's name.
        delivery: What the loader has handed out.

    Raises:
        RowsAreNotSamplesError: Names the first parameter whose rows are not the samples.
    """
    for name, count in rows.items():
        if count != delivery.size:
            raise RowsAreNotSamplesError(
                f"the loader delivered {delivery.size} samples, and {name} has per-sample gradients of "
                f"{count} rows: {_cause(count, delivery.size)}. Nothing was released. One row must be one "
                "sample at the input of every layer with trainable parameters; clipping='batch' does not "
                "need that"
            )


def _cause(rows: int, samples: int) -> str:
    if rows == 1:
        return (
            "its layer ran once for the whole batch (a position embedding or a prompt that is spread over "
            "the samples), so all samples share one row; expand its input to one row a sample"
        )
    if rows and samples and rows % samples == 0:
        return (
            f"each sample has {rows // samples} of them (several views or frames of a sample, or tokens "
            "folded into the batch), and each would be clipped by itself. make_private(views=...) delivers "
            "a sample several times and clips the mean"
        )
    return (
        "rows were left out, added or folded on the way (a collate function that filters, a mixture of "
        "experts, position embeddings, x[:n] in the loop)"
    )

"""The words of the analysis: what is clipped, how steps are drawn, what neighbouring data sets are."""

from __future__ import annotations

from typing import Literal, get_args

Unit = Literal["sample", "mini-set"]
Adjacency = Literal["add/remove one", "replace one"]
Sampling = Literal["poisson", "partition", "shuffle"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)


def adjacency_of(sampling: Sampling) -> Adjacency:
    """The neighbouring relation under which a sampling is analysed: the only place that says so.

    >>> adjacency_of("poisson"), adjacency_of("shuffle")
    ('add/remove one', 'replace one')
    """
    return "add/remove one" if sampling == "poisson" else "replace one"

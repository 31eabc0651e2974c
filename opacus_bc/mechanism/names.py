"""The words of the analysis: what is clipped, how steps are drawn, what neighbouring data sets are."""

from __future__ import annotations

import sys
from typing import Literal, get_args

# What a clipped vector belongs to. A sample (all its views) and a user (all their samples) are protected as a
# whole; of a mini-set every single sample is.
Unit = Literal["sample", "user", "mini-set"]
Adjacency = Literal["add/remove one", "replace one"]
Sampling = Literal["poisson", "partition", "shuffle"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)


def adjacency_of(sampling: Sampling) -> Adjacency:
    """The neighbouring relation under which a sampling is analysed: the only place that says so.

    >>> adjacency_of("poisson"), adjacency_of("shuffle")
    ('add/remove one', 'replace one')
    """
    return "add/remove one" if sampling == "poisson" else "replace one"


def neighbours(adjacency: Adjacency, unit: Unit) -> str:
    """The adjacency with the name of who is protected; samples are what is meant where nothing is said.

    >>> neighbours("add/remove one", "user"), neighbours("replace one", "mini-set")
    ('add/remove one user', 'replace one')
    """
    return f"{adjacency} user" if unit == "user" else adjacency


OVER_USERS = " over users"


def event_kind(name: str, unit: Unit) -> str:
    """The name of a sampling, or of a release, in an accountant's history.

    >>> event_kind("poisson", "user"), event_kind("poisson", "sample")
    ('poisson over users', 'poisson')
    """
    return name + OVER_USERS if unit == "user" else name


def type_name(value: object) -> str:
    """What a message calls the type of ``value``: with the package that it is imported from.

    A layer that obeys a BatchNorm policy (``plain_type``) is called what the user made it as.

    >>> from torch import nn
    >>> type_name(nn.BatchNorm1d(2)), type_name([1])
    ('torch.nn.BatchNorm1d', 'list')
    """
    kind: type = getattr(type(value), "plain_type", type(value))
    packages = kind.__module__.split(".")
    for depth in range(1, len(packages)):
        above = ".".join(packages[:depth])
        if getattr(sys.modules.get(above), "__dict__", {}).get(kind.__name__) is kind:
            return f"{above}.{kind.__name__}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

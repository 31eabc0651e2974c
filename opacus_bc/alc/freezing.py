"""Converged entries are fixed to their mean: the paper's sparsification, with a stated error rate.

An update adds noise of known standard deviation s = eta * tau / k to every entry. Where the loss does not
pull back, an entry performs a random walk and is s * sqrt(window) away after a window; where it does pull
back, the entry hovers around an equilibrium. The variance over the window tells the two apart: an entry is
frozen when its variance is smaller than a random walk's would be but for the stated false-freeze rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor
from torch.optim import SGD, Optimizer

from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.types import State


@lru_cache(maxsize=64)
def hover_threshold(window: int, false_freeze_rate: float) -> float:
    """Largest variance over a window, in units of the squared noise step, that counts as hovering.

    **Formal guarantee**: let w_0..w_n be an entry at the ends of n = ``window`` rounds and
    ``V = mean_t (w_t - mean w)^2``. If the rounds add independent N(0, s_t^2) with s_t >= s, plus any path
    that does not depend on that noise (a drift, another entry's pull, nothing at all), then
    ``P(V <= threshold * s^2) <= false_freeze_rate``.

    Proof: without the path and with s_t = s, the centred walk has the covariance ``s^2 L^+``, L the Laplacian
    of the path graph on N = n + 1 nodes, so ``N V / s^2 = sum_k z_k^2 / (4 sin^2(k pi / 2N))`` with standard
    normal z_k; the Chernoff bound ``P(Q <= c) <= e^(t c) prod_k (1 + 2 t lambda_k)^(-1/2)``, valid for every
    t, is solved for c at its best t. A larger s_t or a path shifts a Gaussian out of the symmetric convex set
    {V <= c}: Anderson's inequality says that this only lowers its probability.

    **Edge cases**: the bound is not tight; the true rate of a pure random walk is a quarter to a tenth of it.
    """
    nodes = window + 1
    walk = 1.0 / (4.0 * np.sin(np.arange(1, nodes) * (math.pi / (2 * nodes))) ** 2)

    def log_bound(log_c: float) -> float:
        """Log of the best Chernoff bound at ``Q <= exp(log_c)``; falls with c."""
        c = math.exp(log_c)

        def exponent(log_t: float) -> float:
            t = math.exp(log_t)
            return t * c - 0.5 * float(np.log1p(2 * t * walk).sum())

        low, high = math.log(1e-3 / walk[0]), math.log(window / c) + 1.0  # beyond these it cannot be best
        return float(minimize_scalar(exponent, bounds=(low, high), method="bounded").fun)

    target = math.log(false_freeze_rate)
    top = math.log(float(walk.sum()))  # at the mean the bound is 1
    bottom = top
    while log_bound(bottom) > target:
        bottom -= 2.0
    return math.exp(float(brentq(lambda v: log_bound(v) - target, bottom, top))) / nodes


@dataclass(frozen=True, kw_only=True)
class FreezeConverged:
    """Fix entries that hover to their mean; they get no noise, no update and leave every norm.

    **Formal guarantee**: the decision is a function of released weights and of noise scales that come from
    public data, so it is post-processing and costs no privacy; sigma_eff stays at its schedule. An entry that
    does not react to the noise is frozen by a given window with probability at most ``false_freeze_rate``
    (see :func:`hover_threshold`); windows do not overlap, so w windows freeze it with at most w times that.

    What is recognised: an entry whose pull back is ``eta * lambda`` a round hovers with variance
    ``s^2 / (2 eta lambda)``. At the default rate 95 of 100 such entries are recognised in a window with
    ``window * eta * lambda = 50``; weaker pulls look like random walks and are left alone.

    **Edge cases**: needs plain SGD without momentum, whose update is the noised release times the learning
    rate. An entry that weight decay alone holds at an equilibrium counts as converged. Without noise
    nothing is ever frozen. Entries never thaw.

    Args:
        window: Rounds (optimizer steps) that are looked at together, at least 10.
        false_freeze_rate: Bound on the probability of freezing an entry that does not hover, for each entry
            and window.
    """

    window: int = 500
    false_freeze_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_count("window", self.window, least=10)
        rate = self.false_freeze_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1e-12 <= rate <= 0.5:
            raise ValueError(f"false_freeze_rate must lie between 1e-12 and 0.5, got {rate!r}")


def check_freezable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose update is not the noised release times the learning rate: all but plain SGD."""
    if type(optimizer) is not SGD:
        raise ValueError(
            f"FreezeConverged knows the noise of an update for torch.optim.SGD only, got "
            f"{type_name(optimizer)}"
        )
    momenta = [group["momentum"] for group in optimizer.param_groups if group["momentum"]]
    if momenta:
        raise ValueError(
            f"FreezeConverged needs SGD without momentum, got momentum={momenta[0]}: with momentum a walk is "
            "smooth for a while and looks like hovering"
        )


class HoverWatch:
    """Collects one window of released weights and says which entries hover."""

    def __init__(self, config: FreezeConverged) -> None:
        self.config = config
        self.points = 0
        self.origin: dict[str, Tensor] = {}
        self.total: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self.smallest_step: dict[str, float] = {}

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Begin a window at these weights, its first point."""
        self.points = 1
        self.origin = {name: w.detach().clone() for name, w in weights.items()}
        # Float64: a drift of 1e4 noise steps would drown the variance in float32's rounding.
        for sums in (self.total, self.squares):
            sums.update((name, torch.zeros_like(w, dtype=torch.float64)) for name, w in self.origin.items())
        self.smallest_step = dict.fromkeys(weights, math.inf)

    def observe(
        self, weights: Mapping[str, Tensor], noise_steps: Mapping[str, float]
    ) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Take in the weights after a round, and the deviation of the noise that it added to each entry.

        The end of a window returns, by name, a mask of the entries that hover and their means.
        """
        if self.points == 0:
            raise RuntimeError("observe() before start(): a window needs its first point")
        self.points += 1
        for name, w in weights.items():
            moved = (w.detach() - self.origin[name]).double()
            self.total[name] += moved
            self.squares[name].addcmul_(moved, moved)
            self.smallest_step[name] = min(self.smallest_step[name], noise_steps[name])
        if self.points <= self.config.window:
            return None
        threshold = hover_threshold(self.config.window, self.config.false_freeze_rate)
        found = {}
        for name in weights:
            mean = self.total[name] / self.points
            variance = self.squares[name] / self.points - mean * mean
            limit = threshold * self.smallest_step[name] ** 2
            found[name] = (
                (variance <= limit) & (limit > 0),
                (self.origin[name] + mean).to(self.origin[name].dtype),
            )
        self.start(weights)
        return found

    def state_dict(self) -> State:
        """The window under way."""
        sums = {"origin": self.origin, "total": self.total, "squares": self.squares}
        held = {key: {name: t.clone() for name, t in tensors.items()} for key, tensors in sums.items()}
        return {"points": self.points, "smallest_step": dict(self.smallest_step), **held}

    def load_state_dict(self, state: State) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.points = state["points"]
        self.smallest_step = dict(state["smallest_step"])
        self.origin, self.total, self.squares = (dict(state[key]) for key in ("origin", "total", "squares"))

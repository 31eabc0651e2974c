"""The paper's central-limit approximation. Not a bound: it can promise more privacy than there is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from scipy.special import ndtr

from opacus_bc.accounting.events import RELEASES, Entry, base_kind, check_count, check_number, check_sigma
from opacus_bc.mechanism.blocks import over_layers


def h(sigma: float) -> float:
    """h(sigma) = sqrt(e^(sigma^-2) Phi(3/(2 sigma)) + 3 Phi(-1/(2 sigma)) - 2), Dong, Roth & Su's corollary
    5.4.

    **Edge cases.** inf where the square overflows (sigma below about 0.038); 0 at sigma = inf. The leading
    terms are cancelled by hand, so that large sigma keeps its digits: h(sigma) ~ 1/(sigma sqrt 2).

    >>> round(h(2.5 / 8**0.5), 3), round(h(1.5 / 8**0.5), 3)
    (1.514, 5.783)
    """
    sigma = check_sigma(sigma, "sigma")
    if sigma < 0.0376:
        return math.inf
    a = 1.0 / sigma
    root = math.sqrt(0.5)
    square = (
        math.expm1(a * a) * float(ndtr(1.5 * a))
        + 0.5 * math.erf(1.5 * a * root)
        - 1.5 * math.erf(0.5 * a * root)
    )
    return math.sqrt(max(0.0, square))


def mu_clt(*, noise_multiplier: float, sample_rate: float, steps: int, layers: int = 1) -> float:
    """The paper's approximate Gaussian parameter sqrt(2) q sqrt(T) h(sigma/sqrt(L)), with q sqrt(T) = sqrt(E
    m/N).

    An approximation, which can be optimistic; use `epsilon` for a guarantee.

    >>> round(mu_clt(noise_multiplier=2.5, sample_rate=64 / 54000, steps=42188, layers=8), 2)
    0.52
    >>> round(mu_clt(noise_multiplier=1.5, sample_rate=64 / 54000, steps=42188, layers=8), 2)
    1.99
    """
    sigma = over_layers(check_sigma(noise_multiplier), check_count("layers", layers, 1))
    rate = check_number("sample_rate", sample_rate, 0, 1)
    return mu_clt_of([(sigma, rate, check_count("steps", steps), "poisson")])


def mu_clt_of(entries: Iterable[Entry]) -> float:
    """The approximation for a history; unsampled releases enter with their exact parameter."""
    square = 0.0
    for sigma, rate, steps, kind in entries:
        if base_kind(kind) in ("shuffle", *RELEASES):
            square += (1.0 / sigma if sigma > 1e-150 else math.inf) ** 2
        elif steps and rate:
            square += 2 * steps * rate * rate * h(sigma) ** 2
    return math.sqrt(square)

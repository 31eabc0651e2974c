"""Certified f-DP accounting: what a training run, or a planned one, costs in privacy."""

from opacus_bc.accounting.accountant import FDPAccountant, register
from opacus_bc.accounting.calibration import epsilon, noise_multiplier, tradeoff
from opacus_bc.accounting.clt import h, mu_clt
from opacus_bc.accounting.tradeoff import TradeOffCurve

__all__ = [
    "FDPAccountant",
    "TradeOffCurve",
    "epsilon",
    "h",
    "mu_clt",
    "noise_multiplier",
    "register",
    "tradeoff",
]

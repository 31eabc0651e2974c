"""Audits: empirical lower bounds on what the mechanisms of this package give away.

``opacus-bc audit`` runs them all. To audit a run of your own:

* :func:`audit_training` runs a training function of yours many times with and without a canary,
* :func:`audit_scores` takes scores that you have collected already,
* :func:`audit_one_run` takes one run with many canaries.

Their docstrings say what each assumes.
"""

from opacus_bc.audit.bounds import Scores
from opacus_bc.audit.claims import AuditResult, Claim, audit_scores
from opacus_bc.audit.one_run import audit_one_run
from opacus_bc.audit.toys import Toy
from opacus_bc.audit.training import audit_training
from opacus_bc.audit.worst_case import audit_worst_case

__all__ = [
    "AuditResult",
    "Claim",
    "Scores",
    "Toy",
    "audit_one_run",
    "audit_scores",
    "audit_training",
    "audit_worst_case",
]

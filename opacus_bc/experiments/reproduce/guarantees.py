"""The paper's guarantees (section B.1), as it computes them and as certified bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from opacus_bc import accounting
from opacus_bc.accounting.gaussian import epsilon as gaussian_epsilon
from opacus_bc.experiments.reproduce.facts import Fact, Sheet, Value
from opacus_bc.experiments.reproduce.specs import DELTA
from opacus_bc.mechanism.blocks import noise_against_individual_clipping
from opacus_bc.mechanism.names import Sampling


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training run as the accountant sees it, with the paper's own counting: q = m/N, T = E N/m steps."""

    sigma: float
    layers: int
    batch_size: int = 64
    size: int = 54_000
    epochs: int = 50

    @property
    def rate(self) -> float:
        """The sample rate q."""
        return self.batch_size / self.size

    @property
    def steps(self) -> int:
        """T, rounded up."""
        return math.ceil(self.epochs * self.size / self.batch_size)

    def h(self) -> float:
        """The paper's h at sigma / sqrt(L)."""
        return accounting.h(self.sigma / math.sqrt(self.layers))

    def mu(self) -> float:
        """The paper's central-limit approximation of the Gaussian parameter."""
        return accounting.mu_clt(
            noise_multiplier=self.sigma, sample_rate=self.rate, steps=self.steps, layers=self.layers
        )

    def epsilon_of_mu(self, delta: float = DELTA) -> float:
        """What G_mu with that mu would mean."""
        return gaussian_epsilon(self.mu(), delta)

    def epsilon(self, sampling: Sampling = "poisson") -> float:
        """The certified upper bound."""
        return accounting.epsilon(
            noise_multiplier=self.sigma,
            sample_rate=self.rate,
            steps=self.steps,
            delta=DELTA,
            layers=self.layers,
            sampling=sampling,
            passes=self.epochs,
        )

    def epsilon_of_theory(self, delta: float) -> float:
        """A certified lower bound on the epsilon of the paper's own trade-off function C_q(G)^T."""
        accountant = accounting.FDPAccountant()
        accountant.history = [(self.sigma / math.sqrt(self.layers), self.rate, self.steps, "partition")]
        return accountant.get_epsilon_bounds(delta)[0]


_Row = tuple[str, str, Value | None, Callable[[], Value]]
_AT = f"certified ε({DELTA:g})"
_CQ = "C_q of the paper's theory"


def _lenet_rows() -> tuple[_Row, ...]:
    high, low = Setting(sigma=2.5, layers=8), Setting(sigma=1.5, layers=8)
    tensors = Setting(sigma=2.5, layers=16)
    whole = Setting(sigma=2.5, layers=1)
    return (
        ("h_2.5", "h(2.5/√8)", 1.513, high.h),
        ("mu_2.5", "σ = 2.5, L = 8, m = 64, N = 54,000, E = 50: μ (CLT)", 0.52, high.mu),
        ("h_1.5", "h(1.5/√8)", 5.783, low.h),
        ("mu_1.5", "σ = 1.5: μ (CLT)", 1.99, low.mu),
        ("mu_15", "σ = 1.5, 15 times the data: μ (CLT)", 0.51, Setting(sigma=1.5, layers=8, size=810_000).mu),
        ("claimed_2.5", f"σ = 2.5: ε({DELTA:g}) of that G_μ", None, high.epsilon_of_mu),
        ("eps_2.5", f"σ = 2.5: {_AT}, Poisson", None, high.epsilon),
        ("eps_2.5_partition", f"σ = 2.5: {_AT}, {_CQ}", None, partial(high.epsilon, "partition")),
        ("eps_2.5_shuffle", f"σ = 2.5: {_AT}, shuffled loader", None, partial(high.epsilon, "shuffle")),
        ("claimed_1.5", f"σ = 1.5: ε({DELTA:g}) of that G_μ", None, low.epsilon_of_mu),
        ("eps_1.5", f"σ = 1.5: {_AT}, Poisson", None, low.epsilon),
        ("eps_1.5_partition", f"σ = 1.5: {_AT}, {_CQ}", None, partial(low.epsilon, "partition")),
        ("claimed_small", "σ = 1.5: ε(1e-10) of that G_μ", None, partial(low.epsilon_of_mu, 1e-10)),
        ("theory_small", f"σ = 1.5: ε(1e-10) of {_CQ}, at least", None,
         partial(low.epsilon_of_theory, 1e-10)),
        ("eps_0.5", f"σ = 0.5: {_AT}, Poisson", None, Setting(sigma=0.5, layers=8).epsilon),
        ("eps_1024", f"σ = 2.5, m = 1024: {_AT}, Poisson", None,
         Setting(sigma=2.5, layers=8, batch_size=1024).epsilon),
        ("mu_tensor", "σ = 2.5, L = 16 by tensor: μ (CLT)", None, tensors.mu),
        ("eps_tensor", f"σ = 2.5, L = 16 by tensor: {_AT}, Poisson", None, tensors.epsilon),
        ("eps_whole", f"σ = 2.5, L = 1 (FGC, multiplication factors): {_AT}, Poisson", None, whole.epsilon),
    )  # fmt: skip


def _cifar_rows() -> tuple[_Row, ...]:
    at = partial(Setting, size=45_000)
    return (
        ("eps_convnet", f"convnet, σ = 0.5, L = 18 by tensor: {_AT}", None, at(sigma=0.5, layers=18).epsilon),
        ("eps_convnet_module", f"convnet, σ = 0.5, L = 9 by module: {_AT}", None,
         at(sigma=0.5, layers=9).epsilon),
        ("eps_resnet", f"ResNet-18, σ = 0.01875, L = 62: {_AT}", "no useful guarantee",
         at(sigma=0.01875, layers=62).epsilon),
        ("eps_resnet_module", f"ResNet-18, σ = 0.01875, L = 41 by module: {_AT}", None,
         at(sigma=0.01875, layers=41).epsilon),
        ("eps_resnet_groups", f"ResNet-18, σ = 0.01875, 4 groups: {_AT}", None,
         at(sigma=0.01875, layers=4).epsilon),
        ("h_resnet_half", "ResNet-18, σ = 0.5: h(0.5/√62)", "prohibitively large",
         at(sigma=0.5, layers=62).h),
        ("eps_resnet_half", f"ResNet-18, σ = 0.5, L = 62: {_AT}", None,
         at(sigma=0.5, layers=62).epsilon),
    )  # fmt: skip


def _other_rows() -> tuple[_Row, ...]:
    one_layer = Setting(sigma=2.5, layers=1, epochs=8 * 50)
    ratio = partial(noise_against_individual_clipping, 64)
    return (
        ("mu_one_layer", "one random layer a sample, σ = 2.5, 8 times the epochs: μ (CLT)", "no improvement",
         one_layer.mu),
        ("eps_one_layer", f"the same: {_AT}, Poisson", None, one_layer.epsilon),
        ("noise_replace", "noise of BC's update over IC's at equal C, σ and m = 64, replace one", None,
         partial(ratio, adjacency="replace one")),
        ("noise_add", "the same, add/remove one (Poisson)", None, partial(ratio, adjacency="add/remove one")),
    )  # fmt: skip


GUARANTEES = Sheet(
    id="guarantees",
    title="The guarantees",
    where="section B.1",
    facts=tuple(
        Fact(key=key, name=name, paper=paper, ours=ours)
        for key, name, paper, ours in (*_lenet_rows(), *_cifar_rows(), *_other_rows())
    ),
)

"""What a call of ``make_private`` asks for: one frozen record of its arguments, checked at once."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc._opacus import AbstractGradSampleModule, DPOptimizer, StockPrivacyEngine, get_optimizer_class
from opacus_bc.alc.choice import check_alc
from opacus_bc.alc.config import ALC, as_alc
from opacus_bc.batch_norm.choices import resolve, statistics_modules
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.draws.datasets import check_distinct
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import (
    SamplingPlan,
    check_data_loader,
    check_loader,
    individual_plan,
    make_plan,
    resolve_sampling,
    users_plan,
)
from opacus_bc.draws.units import UserIndex, as_units, check_views
from opacus_bc.gradients.book_keeping.recording import COMPILED, SCRIPTED
from opacus_bc.gradients.layers import check_layers
from opacus_bc.mechanism.names import Sampling, Unit, adjacency_of, type_name
from opacus_bc.mechanism.numbers import check_count, check_positive
from opacus_bc.optimizers.private import check_optimizer
from opacus_bc.parallel.shards import fully_sharded, reshard
from opacus_bc.parallel.wrappers import bare, data_parallel, is_compiled, is_distributed, is_scripted
from opacus_bc.public.contents import check_contents

CLIPPINGS = ("batch", "flat", "per_layer", "adaptive")
PER_SAMPLE_MODES = ("bk", "hooks", "ew", "functorch")
# Whether book-keeping instantiates samples' gradients for their norms; None: where that is cheaper.
BOOK_KEEPING: Mapping[str | None, bool | None] = {"bk": None, "bk-ghost": False, "bk-rows": True}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of :meth:`opacus_bc.PrivacyEngine.make_private`, as they were given.

    **Formal guarantee**: a request that was made has passed every check that needs neither the accountant nor
    a step of set-up, and nothing was changed.
    """

    module: nn.Module
    optimizer: optim.Optimizer
    criterion: Any = None
    data_loader: DataLoader[Any]
    noise_multiplier: float
    max_grad_norm: float | list[float]
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str | None = None
    wrap_model: bool = True
    rand_on_empty: bool = False
    mini_batch_size: int | None = None
    sampling: str | None = None
    batch_norm: Any = None
    batch_norm_refresh: int = 1
    alc: ALC | DataLoader[Any] | None = None
    compare_public: bool = True
    unit: Any = None
    views: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Request:
        """The request of these keyword arguments; those that it does not know are Opacus's ``extra`` ones."""
        known = {name: value for name, value in arguments.items() if name in cls.__dataclass_fields__}
        return cls(**known, extra={name: arguments[name] for name in arguments if name not in known})

    def __post_init__(self) -> None:
        if self.clipping not in CLIPPINGS:
            known = ", ".join(map(repr, CLIPPINGS[:-1]))
            raise ValueError(f"clipping must be {known} or {CLIPPINGS[-1]!r}, got {self.clipping!r}")
        assert self.kind  # names an unknown or contradictory sampling now
        check_positive("noise_multiplier", self.noise_multiplier, zero_allowed=True)
        check_data_loader(self.data_loader)
        if isinstance(self.data_loader, PrivateDataLoader):
            raise ValueError(
                "data_loader is private already, and several optimizers cannot share its draws: pass the "
                "DataLoader that you made, not the one that make_private returned"
            )
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}")
        reshard(self.module)
        if not self.batch and fully_sharded(self.module):
            raise ValueError(
                f"clipping={self.clipping!r} needs per-sample gradients, not supported with fully_shard: "
                "use clipping='batch', or Opacus's DifferentiallyPrivateDistributedDataParallel"
            )
        check_layers(self.module, grad_sample_mode=None if self.batch else self.mode, trained=self.held)
        check_optimizer(self.inner_optimizer)
        self._check_units()
        self._check_keywords()
        self._check_alc()
        self._check_data()

    @property
    def batch(self) -> bool:
        """Whether mini-sets are clipped, and not single samples."""
        return self.clipping == "batch"

    @property
    def book_keeping(self) -> bool:
        """Whether single samples are clipped in one backward."""
        return not self.batch and self.mode == "bk"

    @property
    def instantiate(self) -> bool | None:
        """Whether book-keeping instantiates samples' gradients for their norms; None: where it is cheaper."""
        return BOOK_KEEPING.get(self.grad_sample_mode)

    @cached_property
    def mode(self) -> str:
        """How per-sample gradients are made, under individual clipping.

        What was given; otherwise in one backward where ``batch_norm=`` or ``alc=`` answers for the model's
        BatchNorm, which stock Opacus does not train at all, and Opacus's hooks wherever these are promised
        (``noise_generator=``, ``wrap_model=False``) or book-keeping is not built.
        """
        if self.grad_sample_mode is not None:
            return "bk" if self.grad_sample_mode in BOOK_KEEPING else self.grad_sample_mode
        hooks_promised = self.noise_generator is not None or not self.wrap_model
        ours = self.clipping in ("flat", "per_layer") and self.policy is not None and not hooks_promised
        if not ours or why_not_recorded(self.module) is not None or not self.batch_first:
            return "hooks"
        if self.distributed and self.kind == "shuffle":  # each rank's own order, which Opacus alone takes
            return "hooks"
        return "bk" if statistics_modules(bare(self.module), individual=True) else "hooks"

    @property
    def clipped(self) -> Unit:
        """What is clipped by itself."""
        if self.unit is not None:
            return "user"
        return "mini-set" if self.batch else "sample"

    @property
    def several_rows(self) -> bool:
        """Whether rows of one batch are averaged before they are clipped: those of a user, or of a sample."""
        return not self.batch and (self.unit is not None or self.views > 1)

    @cached_property
    def users(self) -> UserIndex | None:
        """Whose samples are which, if users are protected."""
        return None if self.unit is None else as_units(self.unit).index(check_loader(self.data_loader))

    @property
    def distributed(self) -> bool:
        """Whether several processes train the model."""
        return is_distributed(self.module)

    @property
    def inner_optimizer(self) -> optim.Optimizer:
        """The torch optimizer, also where the user passed a private one."""
        optimizer = self.optimizer
        return optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer

    @property
    def held(self) -> frozenset[nn.Parameter]:
        """The parameters that the optimizer holds, trainable or not."""
        return frozenset(p for group in self.inner_optimizer.param_groups for p in group["params"])

    @cached_property
    def kind(self) -> Sampling:
        """How steps are drawn."""
        return resolve_sampling(self.sampling, poisson_sampling=self.poisson_sampling)

    @cached_property
    def config(self) -> ALC | None:
        """ALC's configuration, if it is asked for."""
        return as_alc(self.alc)

    @property
    def owners(self) -> str | None:
        """A fingerprint of who owns which samples; processes that train together must agree on it."""
        return None if self.users is None else self.users.fingerprint()

    @cached_property
    def plan(self) -> SamplingPlan:
        """The public constants of the draws."""
        if self.users is not None and self.mini_batch_size is not None:
            return users_plan(
                self.data_loader,
                self.users,
                sampling=self.kind,
                cap=self.mini_batch_size,
                individual=not self.batch,
                views=self.views,
            )
        if self.batch:
            return make_plan(self.data_loader, sampling=self.kind, mini_batch_size=self.mini_batch_size)
        return individual_plan(self.data_loader, sampling=self.kind, views=self.views)

    @property
    def policy(self) -> Any:
        """What was passed as ``batch_norm=``; ALC's public loader serves BatchNorm too."""
        if self.batch_norm is None and self.config is not None:
            return self.config.public_loader
        return self.batch_norm

    @property
    def own_arithmetic(self) -> bool:
        """Whether this package clips single samples, with a bound that holds in floats and any noise source.

        Opacus's optimizer clips them, bit for bit as in stock Opacus, where ``noise_generator=`` is given.
        """
        if self.clipping in ("batch", "adaptive") or not self._per_sample:
            return False
        ours = self.config is not None or self.book_keeping or self.several_rows
        return ours or self.noise_generator is None

    @property
    def _per_sample(self) -> bool:
        together = not self.distributed or self.mode == "bk"
        return together and self.mode in PER_SAMPLE_MODES

    def _check_units(self) -> None:
        """Refuse units that cannot be clipped as one vector, or of which nobody knows who they are."""
        check_views(self.views)
        if self.batch and self.views > 1:
            raise ValueError(
                f"views={self.views} goes with individual clipping, where the views of a sample are averaged "
                "and clipped: use clipping='flat', or let the data set return several views as one sample"
            )
        if self.unit is not None:
            self._check_users()
        if not self.several_rows:
            return
        what = "unit=" if self.unit is not None else f"views={self.views}"
        known = ("flat",) if self.unit is not None else ("flat", "per_layer")
        if self.clipping not in known:
            raise ValueError(f"{what} goes with clipping='batch' or 'flat', got {self.clipping!r}")
        if not self._per_sample:
            raise ValueError(
                f"{what} needs per-sample gradients that can be averaged before they are clipped: "
                f"grad_sample_mode must be one of {', '.join(map(repr, PER_SAMPLE_MODES))} in one "
                f"process, or 'bk' with torch's DistributedDataParallel, got {self.mode!r} for a "
                f"{type_name(self.module)}"
            )

    def _check_users(self) -> None:
        if self.mini_batch_size is None:
            raise ValueError(
                "unit= needs mini_batch_size=, the most samples of one user that a step uses (a larger user "
                "is represented by a fresh random choice of so many)"
            )
        check_count("mini_batch_size", self.mini_batch_size)
        if self.batch and self.mini_batch_size == 1:
            raise ValueError(
                "mini_batch_size=1 with unit= takes one sample of each user, which makes no mini-set: use "
                "clipping='flat', which clips it in one backward with all others"
            )
        if fully_sharded(self.module):
            raise NotImplementedError(
                "unit= is not built for fully_shard, which splits a mini-set over the ranks: use "
                "DistributedDataParallel"
            )
        assert self.plan  # names bad ids now

    def _check_keywords(self) -> None:
        if not self.batch:
            if (size := self.mini_batch_size) is not None and self.unit is None:
                raise ValueError(f"mini_batch_size={size} goes with clipping='batch', got {self.clipping!r}")
            if self.book_keeping:
                self._check_book_keeping()
                return
            stock = get_optimizer_class(self.clipping, self.distributed, self.mode)
            _refuse_unknown(set(self.extra) - set(inspect.signature(stock).parameters))
            return
        if self.batch_norm_refresh != 1:
            raise ValueError(
                f"batch_norm_refresh={self.batch_norm_refresh!r} says how often individual clipping takes "
                "new public statistics; clipping='batch' takes them when they are read: leave it out"
            )
        _refuse_unknown(self.extra)
        if self.grad_sample_mode not in (None, "hooks") or not self.wrap_model:
            raise ValueError(
                f"grad_sample_mode={self.grad_sample_mode!r} and wrap_model={self.wrap_model} say how "
                "per-sample gradients are made; clipping='batch' makes none: leave them out"
            )

    def _check_book_keeping(self) -> None:
        _refuse_unknown(self.extra)
        if self.clipping == "adaptive":
            raise ValueError("clipping='adaptive' is Opacus's own: use grad_sample_mode='hooks', or 'flat'")
        if not self.batch_first:
            raise ValueError(
                "grad_sample_mode='bk' needs the samples in the first dimension: batch_first=True"
            )
        if (reason := why_not_recorded(self.module)) is not None:
            raise ValueError(reason)
        check_held(self.module, self.inner_optimizer)

    def _check_alc(self) -> None:
        if self.config is None:
            return
        if self.clipping not in ("batch", "flat"):
            raise ValueError(f"alc= goes with clipping='batch' or 'flat', got clipping={self.clipping!r}")
        if not self.batch and not self._per_sample:
            raise ValueError(
                "alc= with clipping='flat' needs per-sample gradients in one process (ghost clipping never "
                f"forms them): grad_sample_mode must be one of {', '.join(map(repr, PER_SAMPLE_MODES))}, got "
                f"{self.mode!r} for a {type_name(self.module)}"
            )
        if isinstance(self.module, AbstractGradSampleModule):
            raise ValueError("alc= needs the plain nn.Module; this one is wrapped for per-sample gradients")
        module = bare(self.module) if self.batch or self.book_keeping else self.module
        adjacency = adjacency_of(self.kind)
        check_alc(
            self.config,
            module,
            self.inner_optimizer,
            self.data_loader,
            unit=self.clipped,
            adjacency=adjacency,
        )

    def _check_data(self) -> None:
        """Refuse private data with repetitions, and public data that are private ones."""
        if hasattr(self.data_loader.dataset, "__len__"):
            check_distinct(self.data_loader.dataset)
        config = None if isinstance(self.policy, str) else resolve(self.policy)
        public = [] if self.config is None else [self.config.public_loader]
        if isinstance(config, PublicStatistics) and config.loader not in public:
            public.append(config.loader)
        for loader in public if self.compare_public else ():
            check_contents(loader, self.data_loader)


def why_not_recorded(module: nn.Module) -> str | None:
    """Why book-keeping cannot watch this module's forward pass, or None."""
    if isinstance(module, AbstractGradSampleModule):
        return "module is wrapped for per-sample gradients: pass the plain nn.Module"
    if is_distributed(module) and data_parallel(module) is None:
        return (
            f"grad_sample_mode='bk' does not support {type_name(module)}: use torch's DistributedDataParallel"
        )
    if is_scripted(module):
        return SCRIPTED
    return COMPILED if is_compiled(module) else None


def check_held(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer over another model's parameters, or over a head that was replaced since."""
    own = set(module.parameters())
    if any(p not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer holds parameters that are not module's: build it on module.parameters(), after layers "
            "were replaced"
        )


def _refuse_unknown(unknown: Iterable[str]) -> None:
    if unknown:
        raise unexpected_keywords(unknown)


def unexpected_keywords(unknown: Iterable[str]) -> TypeError:
    """What to raise for keywords that nobody takes, with the one that each of them resembles.

    >>> str(unexpected_keywords(["max_gradient_norm", "batchnorm"]))
    'unexpected keyword arguments: batchnorm (batch_norm?), max_gradient_norm (max_grad_norm?)'
    """
    stock = inspect.signature(StockPrivacyEngine.make_private).parameters
    known = sorted({*stock, *Request.__dataclass_fields__} - {"extra"})
    close = {name: difflib.get_close_matches(name, known, 1) for name in sorted(unknown)}
    words = [f"{name} ({found[0]}?)" if found else name for name, found in close.items()]
    return TypeError(f"unexpected keyword arguments: {', '.join(words)}")

"""``engine.layer_report(public_loader)``: norms and noise of every layer, without ALC and without a trace."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from support import blobs, engine
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, IterableDataset

from opacus_bc import ALC, PublicDataError
from opacus_bc.alc.drowning import DROWNED, warn_of_drowning

PRIVATE, PUBLIC = blobs(64), blobs(40, seed=1)
C, SIGMA = 0.3, 1.0


def loader(data: Any = PUBLIC, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, **kwargs)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2, bias=False)
    )


def private(model: nn.Module | None = None, **kwargs: Any) -> Any:
    model = network() if model is None else model
    made = engine()
    given: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C, "batch_norm": loader()}
    return made, *made.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(PRIVATE, batch_size=16),
        **{**given, **kwargs},
    )


BATCH = {"clipping": "batch"}
MODES: dict[str, dict[str, Any]] = {
    "bk": {},
    "hooks": {"grad_sample_mode": "hooks"},
    "ghost": {"grad_sample_mode": "ghost"},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [0.1, 0.2, 0.3, 0.1, 0.2]},
    "views": {"views": 2},
    "bc": BATCH,
    "gbc": {**BATCH, "mini_batch_size": 4},
    "alc": {**BATCH, "mini_batch_size": 4, "alc": ALC(loader(), layers="parameter")},
    "users": {**BATCH, "unit": torch.arange(64) // 4, "mini_batch_size": 4},
}
VECTORS = {"bc": 1, "gbc": 4, "alc": 4}


@pytest.mark.parametrize("mode", MODES)
def test_the_report_leaves_no_trace(mode: str) -> None:
    made, module, optimizer, *rest = private(**MODES[mode])
    batches, criterion = rest[-1], rest[0] if len(rest) > 1 else nn.functional.cross_entropy
    for _ in range(4):  # the checks of the first forwards take themselves off
        for x, y in batches:
            criterion(module(x), y).backward()
            if optimizer.steps_taken >= 3 and not optimizer._draw:
                break  # in the middle of a step
            optimizer.step()
    steps = optimizer.steps_taken

    def state() -> list[Any]:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
        tensors += [
            p.grad_sample for p in module.parameters() if isinstance(getattr(p, "grad_sample", 0), Tensor)
        ]
        hooks = [
            (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks), m.training)
            for m in module.modules()
        ]
        numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        return [[t.detach().clone() for t in tensors], hooks, numbers, list(made.accountant.history)]

    before = state()
    report = made.layer_report(loader(shuffle=True))
    after = state()
    assert before[1:] == after[1:]
    assert len(before[0]) == len(after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
    assert all(row.norm > 0 for row in report.rows)
    optimizer.step()  # the batch that was delivered before is still the one that counts
    assert optimizer.steps_taken - steps == (0 if mode in ("gbc", "alc", "users") else 1)


def public_vectors(model: nn.Module, size: int) -> list[dict[str, Tensor]]:
    """The oracle: gradients of disjoint mini-sets of the public data, with plain autograd."""
    found = []
    order = np.random.default_rng(0).permutation(len(PUBLIC)).tolist()
    for j in range(len(order) // size):
        x, y = PUBLIC[order[j * size : (j + 1) * size]]
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        found.append(dict(zip(dict(model.named_parameters()), grads, strict=True)))
    return found


@pytest.mark.parametrize(
    ("mode", "size", "vectors", "doubled"), [("bk", 1, 16, 1), ("gbc", 4, 4, 2), ("bc", 16, 1, 2)]
)
def test_norms_and_noise_are_those_of_what_is_clipped(
    mode: str, size: int, vectors: int, doubled: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    grads = public_vectors(model, size)
    made, *_ = private(model, batch_norm=None, **MODES[mode])
    report = made.layer_report(loader())
    wholes = [math.hypot(*(float(g.norm()) for g in each.values())) for each in grads]
    for row, names in zip(report.rows, (("0.weight", "0.bias"), ("2.weight", "2.bias")), strict=True):
        norms = [math.hypot(*(float(each[name].norm()) for name in names)) for each in grads]
        kept = [norm * min(1.0, C / whole) for norm, whole in zip(norms, wholes, strict=True)]
        assert row.layer == names[0].split(".")[0]
        assert row.group == "all"
        assert row.norm == pytest.approx(sum(norms) / len(norms), rel=1e-5)
        assert row.clip_bound == C
        assert row.noise_std == pytest.approx(doubled * SIGMA * C)
        assert row.signal == pytest.approx(vectors * sum(kept) / len(kept), rel=1e-5)
        assert row.noise_to_signal == pytest.approx(doubled * SIGMA * C * math.sqrt(row.entries) / row.signal)
    whole = doubled * SIGMA * C * math.sqrt(58) / math.hypot(*(row.signal for row in report.rows))
    assert report.noise_to_signal == pytest.approx(whole)
    assert len(report.table().splitlines()) == 3
    assert [step for step, _ in report.history] == [0]


def test_bounds_of_single_tensors_add_up_to_those_of_their_layer() -> None:
    made, *_ = private(**MODES["per layer"])
    rows = made.layer_report(loader()).rows
    assert [row.clip_bound for row in rows] == pytest.approx(
        [math.hypot(0.1, 0.2), math.hypot(0.3, 0.1), 0.2]
    )
    assert [row.noise_std for row in rows] == pytest.approx([SIGMA * math.hypot(0.1, 0.2, 0.3, 0.1, 0.2)] * 3)


def test_private_data_useless_data_and_missing_data_are_refused() -> None:
    made, module, *_ = private()
    with pytest.raises(ValueError, match="pass a public loader to it, or pass alc="):
        made.layer_report()
    with pytest.raises(ValueError, match="call make_private first"):
        engine().layer_report(loader())
    with pytest.raises(PublicDataError, match="belong to the private data"):
        made.layer_report(loader(PRIVATE))
    copied = [(x.clone(), y) for x, y in PRIVATE]
    with pytest.raises(PublicDataError, match="are equal to private ones"):
        made.layer_report(loader(copied))
    assert made.layer_report(loader(copied), compare_public=False).rows
    with pytest.raises(PublicDataError, match="batch_size=None"):
        made.layer_report(DataLoader(PUBLIC, batch_size=None))
    with pytest.raises(PublicDataError, match="all zero or not finite"):
        made.layer_report(loader(), criterion=lambda output, _: 0 * output.sum())

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(PUBLIC)

    with pytest.raises(PublicDataError, match="needs an index"):
        made.layer_report(loader(Stream()))
    made.finalize(module)
    with pytest.raises(ValueError, match="after finalize"):
        made.layer_report(loader())


def test_other_losses_and_other_batches_have_their_say() -> None:
    made, *_ = private()
    plain, scaled = (
        made.layer_report(loader(), criterion=lambda o, y, f=f: f * nn.functional.cross_entropy(o, y))
        for f in (1.0, 3.0)
    )
    assert [row.norm for row in scaled.rows] == pytest.approx([3 * row.norm for row in plain.rows], rel=1e-4)
    inputs = [x for x, _ in PUBLIC]
    report = made.layer_report(loader(inputs), gradient=lambda m, x: m(x).square().sum().backward())
    assert all(row.norm > 0 for row in report.rows)


# ---------------------------------------------------------------- drowned signals

WIDE = {**BATCH, "batch_norm": None, "noise_multiplier": 4.0}


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 2))


def test_the_report_warns_where_noise_drowns_the_signal() -> None:
    made, *_ = private(wide(), **WIDE)
    with pytest.warns(
        UserWarning, match=r"at least 4\d\d times the norm of its signal.*clip samples instead"
    ) as all_:
        report = made.layer_report(loader())
    assert f"{report.noise_to_signal:.3g} times" in str(all_[0].message)
    assert all_[0].filename == __file__
    assert report.noise_to_signal > DROWNED


@pytest.mark.filterwarnings("error:the noise of an update")
def test_alc_warns_at_make_private_and_nothing_is_left_if_that_is_an_error() -> None:
    model = wide()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(UserWarning, match="times the norm of its signal"):
        private(model, alc=loader(), **WIDE)
    assert [type(m) for m in model.modules()] == kinds
    private(model, alc=loader(), **{**WIDE, "noise_multiplier": 0.1})  # no warning


@pytest.mark.filterwarnings("error:the noise of an update")
def test_remedies_go_by_what_is_clipped_and_little_noise_is_not_warned_of() -> None:
    warn_of_drowning(DROWNED, "sample")
    for unit, words in (("sample", "take a larger batch"), ("user", "draw more users"), ("mini-set", "flat")):
        with pytest.warns(UserWarning, match=f"{words}.*smaller max_grad_norm does not help"):
            warn_of_drowning(2 * DROWNED, unit)  # type: ignore[arg-type]

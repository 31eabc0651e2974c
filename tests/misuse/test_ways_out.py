"""What practitioners stumble over: the message names the thing and the way out, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from opacus_bc import ALC, PrivateStatistics
from opacus_bc.public.data import PublicDataError

DATA, PUBLIC = blobs(32), blobs(40, seed=5)
both = pytest.mark.parametrize("clipping", ["batch", "flat"])


def make(
    model: nn.Module | None = None, loader: Any = None, method: str = "make_private", **kwargs: Any
) -> Any:
    model = mlp() if model is None else model
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **kwargs}
    return getattr(engine(), method)(
        module=model,
        optimizer=given.pop("optimizer", None) or optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=8) if loader is None else loader,
        **{name: value for name, value in given.items() if value is not None},
    )


def train(
    module: Any, optimizer: Any, loader: Any, *, unpack: Callable[[Any], Any] = lambda batch: batch
) -> None:
    for batch in loader:
        x, y = unpack(batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


# --- the two methods ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("noise", [None, 1.0])
@pytest.mark.parametrize("given", ["target_epsilon", "target_delta", "epochs"])
def test_a_budget_given_to_make_private_points_to_make_private_with_epsilon(
    given: str, noise: float | None, clipping: str
) -> None:
    words = rf"make_private\(\) got {given}=: .*make_private_with_epsilon\(\) finds the noise_multiplier"
    with pytest.raises(TypeError, match=words):
        make(clipping=clipping, noise_multiplier=noise, **{given: 3})


@pytest.mark.parametrize("budget", [{}, {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}])
def test_a_noise_multiplier_given_to_make_private_with_epsilon_points_to_make_private(
    budget: dict[str, Any],
) -> None:
    words = r"make_private_with_epsilon\(\) got noise_multiplier=.*make_private\(\) takes one"
    with pytest.raises(TypeError, match=words):
        make(method="make_private_with_epsilon", **budget)


# --- loaders -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


@both
@pytest.mark.parametrize("poisson", [True, False])
def test_an_iterable_data_set_is_named_with_the_way_out(poisson: bool, clipping: str) -> None:
    words = r"IterableDataset \(test_ways_out\.Stream\).*DataLoader\(list\(dataset\).*__len__ and __getitem__"
    with pytest.raises(ValueError, match=words):
        make(loader=DataLoader(Stream(), batch_size=8), clipping=clipping, poisson_sampling=poisson)
    make(loader=DataLoader(list(Stream()), batch_size=8), clipping=clipping, poisson_sampling=poisson)


def test_public_data_of_alc_that_are_a_stream_are_named_with_the_way_out() -> None:
    stream = DataLoader(Stream(), batch_size=8)
    with pytest.raises(PublicDataError, match=r"got test_ways_out\.Stream: .*DataLoader\(list\(dataset\)"):
        ALC(stream)


@both
def test_a_private_loader_given_to_make_private_is_told_to_be_the_original_one(clipping: str) -> None:
    _, _, loader = make(clipping=clipping)
    with pytest.raises(ValueError, match="pass the DataLoader that you made, not the one that make_private"):
        make(loader=loader, clipping=clipping)


MODES: dict[str, dict[str, Any]] = {
    "BC": {"clipping": "batch"},
    "GBC": {"clipping": "batch", "mini_batch_size": 4},
    "hooks": {"clipping": "flat"},
    "bk": {"clipping": "flat", "grad_sample_mode": "bk"},
}
every = pytest.mark.parametrize("mode", MODES)


@every
def test_a_loop_over_the_old_loader_is_told_which_one_to_iterate_over(mode: str) -> None:
    model = mlp()
    module, optimizer, _ = make(model, **MODES[mode])
    before = weights(model)
    words = (
        r"loader that make_private returned: .* Iterate over that loader, not over the one that you passed"
    )
    with pytest.raises(RuntimeError, match=words):
        train(module, optimizer, DataLoader(DATA, batch_size=8))
    assert torch.equal(weights(model), before)


@every
def test_an_attempt_to_accumulate_names_the_memory_manager(mode: str) -> None:
    module, optimizer, loader = make(**MODES[mode])
    batches = iter(loader)
    for _ in range(2):
        x, y = next(batches)
        nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(RuntimeError, match=r"To accumulate .* opacus_bc\.BatchMemoryManager"):
        optimizer.step()


# --- qualified names ---------------------------------------------------------------------------------------


class Rows:
    """No sampler of torch's."""

    def __iter__(self) -> Any:
        return iter(range(32))

    def __len__(self) -> int:
        return 32


class NoOptimizer:
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


def weighted() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler([1.0] * 32, 32))


NAMED: dict[str, Callable[[], Any]] = {
    r"draws with torch\.utils\.data\.WeightedRandomSampler": lambda: make(loader=weighted()),
    r"draws with test_ways_out\.Rows": lambda: make(
        loader=DataLoader(DATA, batch_size=8, sampler=Rows())  # type: ignore[arg-type]
    ),
    r"test_ways_out\.NoOptimizer has no step hooks": lambda: make(optimizer=NoOptimizer(mlp().parameters())),
    r"in 1 \(torch\.nn\.BatchNorm1d\)": lambda: make(mlp(norm=True)),
    r"0 \(torch\.nn\.Embedding\): max_norm": lambda: make(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))),
}


@pytest.mark.parametrize("words", NAMED)
def test_refused_modules_samplers_and_optimizers_have_their_qualified_names(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NAMED[words]()


# --- public batches ----------------------------------------------------------------------------------------


class Records(Dataset[Any]):
    """Samples as dictionaries."""

    def __init__(self, data: TensorDataset) -> None:
        self.samples = data

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return {"x": x, "labels": y}


class Inputs(nn.Module):
    """BatchNorm, with a forward that takes just ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Labelled(Inputs):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x)


def records(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(Records(data), batch_size=8)


@both
def test_a_mapping_from_the_public_loader_is_said_to_become_keywords(clipping: str) -> None:
    words = r"called as model\(\*\*batch\) with the keys 'x', 'labels' .*all that the model's forward takes"
    with pytest.raises(PublicDataError, match=words):
        make(Inputs(), records(DATA), batch_norm=records(PUBLIC), clipping=clipping)
    made = make(Labelled(), records(DATA), batch_norm=records(PUBLIC), clipping=clipping)
    train(*made, unpack=lambda batch: (batch["x"], batch["labels"]))


class Detector(Inputs):
    """Takes a list with one tensor for each sample, as torchvision's detection models do."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(torch.stack(x))


def lists(samples: list[Any]) -> Any:
    return [x for x, _ in samples], torch.stack([y for _, y in samples])


def listed(data: TensorDataset, collate: Any = lists) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, collate_fn=collate)


def test_lists_with_a_tensor_for_each_sample_give_the_statistics_of_their_stack() -> None:
    eng, model, stacked = engine(), Detector(), Inputs()
    for each, private, public in (
        (model, listed(DATA), listed(PUBLIC)),
        (stacked, DataLoader(DATA, batch_size=8), DataLoader(PUBLIC, batch_size=8)),
    ):
        module, optimizer, loader = eng.make_private(
            module=each,
            optimizer=optim.SGD(each.parameters(), lr=0.1),
            data_loader=private,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            mini_batch_size=4,
            batch_norm=public,
        )
        if each is model:
            train(module, optimizer, loader)
            stacked.load_state_dict(model.state_dict())
        eng.finalize(each)
    assert torch.equal(model.net[1].running_mean, stacked.net[1].running_mean)  # type: ignore[index]
    assert not torch.equal(model.net[1].running_mean, torch.zeros(8))  # type: ignore[index]


def test_lists_with_a_tensor_for_each_sample_point_to_batch_clipping() -> None:
    with pytest.raises(PublicDataError, match=r"lists with a tensor for each sample.*clipping='batch'"):
        make(Detector(), listed(DATA), batch_norm=listed(PUBLIC))


class Gray(Detector):
    def forward(self, x: Any) -> Tensor:
        return super().forward([image[0] for image in x])


def test_lists_do_not_go_with_private_statistics() -> None:
    gray = TensorDataset(DATA.tensors[0][:, None], DATA.tensors[1])  # one channel looks like one row
    words = r"batch_norm='private' needs .*a row for each sample, and gets a list"
    with pytest.raises(ValueError, match=words):
        make(Gray(), listed(gray), clipping="batch", batch_norm=PrivateStatistics(noise_multiplier=0.001))


@both
def test_batches_that_nobody_can_read_are_named(clipping: str) -> None:
    public = listed(PUBLIC, collate=lambda samples: (frozenset(range(len(samples))), 0))
    with pytest.raises(PublicDataError, match=r"is a frozenset\. It must be a tensor .*model\(\*\*batch\)"):
        make(mlp(norm=True), batch_norm=public, clipping=clipping)


class Outputs(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.net, self.aux, self.kind = mlp(), nn.Linear(4, 2), kind

    def forward(self, x: Tensor) -> Any:
        found = {"out": self.net(x), "aux": self.aux(x)}
        return found if self.kind is dict else tuple(found.values())


@both
@pytest.mark.parametrize("kind", [tuple, dict])
def test_alc_on_a_model_with_several_outputs_points_to_criterion(kind: type, clipping: str) -> None:
    public = DataLoader(PUBLIC, batch_size=10)
    with pytest.raises(PublicDataError, match=rf"returns {kind.__name__} .*make_private\(criterion=f\)"):
        make(Outputs(kind), alc=public, clipping=clipping)

    def criterion(output: Any, y: Tensor) -> Tensor:
        main, aux = output.values() if kind is dict else output
        return nn.functional.cross_entropy(main, y) + nn.functional.cross_entropy(aux, y)

    _, optimizer, _ = make(Outputs(kind), alc=public, clipping=clipping, criterion=criterion)
    assert all(row.norm > 0 for row in optimizer.layer_report().rows)


def test_alc_on_targets_that_are_no_tensors_points_to_criterion() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), [y for _, y in samples]

    with pytest.raises(PublicDataError, match=r"y is list; .*make_private\(criterion=f\)"):
        make(mlp(), alc=listed(PUBLIC, collate), clipping="batch")

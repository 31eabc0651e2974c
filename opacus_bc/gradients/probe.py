"""Whether the samples of a batch meet in the forward pass: tried out in the first training forwards.

Individual clipping bounds row i of every layer as the share of sample i. A forward pass that centres over the
batch, attends from one sample to another, mixes them or takes another dimension for the batch lets a sample
into the rows of others, and the bound with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opacus_bc._opacus import DPRNNBase, RNNLinear
from opacus_bc.mechanism.randomness import generators_within, put_streams, take_streams
from opacus_bc.mechanism.types import Memo, State
from opacus_bc.public.row_tests import Rows, Run, first_difference, nested_tensors, row_count
from opacus_bc.public.running import untouched_buffers

FORWARDS = 3
_LARGEST = 5  # rows of the first probe; the next ones have fewer, so that no constant of the model fits all
_FACTORS = (1.0, -10.0)  # an ordinary input in the row's place, and an extreme one
_ROUNDING = 1e-5  # of forwards that are not repeatable to the bit
OUTPUT = "the model"
_ADVICE = (
    "Individual clipping bounds each row as the share of one sample, and that is no bound here. Let every "
    "sample pass through the model by itself (no statistics, attention, mixing or distances over the batch; "
    "the batch in the dimension that batch_first= says), or use clipping='batch'. Nothing was released"
)


class CoupledSamplesError(RuntimeError):
    """One sample of a batch reaches the rows of another one in the forward pass."""


class CouplingProbe:
    """Hangs on a model and tries its first training forwards out on a few rows; then it takes itself off.

    Each time it runs the forward pass again, with equal random streams, on the first rows of the batch: to
    back-propagate one output row, which must reach no other row of any layer with trainable parameters nor of
    the input; and with another input row replaced, which must leave all other rows of these layers as they
    were.

    **Formal guarantee**: random streams, buffers, gradients and per-sample gradients are left as they were.
    It raises inside the forward pass, so before anything is released.

    **Edge cases**: a pass is evidence and no proof. Couplings that depend on the data, or on more rows than
    five, may be missed. Forwards that fail on a few rows, have no tensor with rows, or are not repeatable
    are not judged. Python attributes that a forward writes are written by the probe too.

    Args:
        module: The model; the probe runs its ``forward`` without the model's own hooks.
        batch_first: Opacus's: whether the batch is the first dimension or the second.
        paused: A context in which no per-sample gradients are recorded.
        where: The module to hang on, if it is not the model itself.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        paused: Callable[[], AbstractContextManager[Any]],
        where: nn.Module | None = None,
    ) -> None:
        self._module, self._paused = module, paused
        self._batch_dim = 0 if batch_first else 1
        self._left = FORWARDS
        self._generators = generators_within(module)
        # Before the forward itself: attributes that a forward leaves for its backward are then its own.
        self._hung = module if where is None else where
        self._handles = [self._hung.register_forward_pre_hook(self._try_out, with_kwargs=True)]

    def __deepcopy__(self, memo: Memo) -> CouplingProbe:
        return self  # a copy of the model is probed by the same counter

    def __getstate__(self) -> State:
        return {
            **self.__dict__,
            "_handles": [],
            "_left": 0,
            "_paused": None,
            "_generators": [],
        }

    def restart(self) -> None:
        """Look at the next forward passes again: layers are trained that were not."""
        self._left = FORWARDS
        if not self._handles:
            self._handles = [self._hung.register_forward_pre_hook(self._try_out, with_kwargs=True)]

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def _try_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count = row_count((args, kwargs), self._batch_dim)
        if self._left <= 0 or not module.training or not torch.is_grad_enabled() or count < 2:
            return
        number = FORWARDS - self._left
        self._left -= 1
        if self._left == 0:
            self.remove()
        rows = Rows(count=min(count, max(2, _LARGEST - number)), batch_dim=self._batch_dim)
        few = Rows(count=count, batch_dim=self._batch_dim).first((args, kwargs), rows.count)
        streams = take_streams(self._generators)
        with ExitStack() as stack:
            stack.callback(put_streams, streams, self._generators)
            stack.enter_context(self._paused())
            stack.enter_context(untouched_buffers(self._module))
            reason = self._coupling(few, rows, streams, number)
        if reason is not None:
            raise CoupledSamplesError(f"{reason}. {_ADVICE}")

    def _coupling(self, inputs: Any, rows: Rows, streams: State, number: int) -> str | None:
        try:
            with torch.enable_grad():
                leaves, run = self._run(inputs, rows, streams, with_gradient=True)
            if not run.finite:
                return None
            reason = _other_rows(run, rows) or _reached(leaves, run, rows, number % rows.count)
            if reason is not None:
                return reason
            row = rows.count - 1 - number % (rows.count - 1)
            with torch.no_grad():
                found = self._changed(inputs, rows, streams, row)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
            return None  # the forward does not work on these rows: the real one is not disturbed
        if found is None:
            return None
        return f"replacing the input of one sample changes what {found} computes for other samples"

    def _changed(self, inputs: Any, rows: Rows, streams: State, row: int) -> str | None:
        """The first layer in which another row changes with ``row`` of the input."""
        _, plain = self._run(inputs, rows, streams)
        for factor in _FACTORS:
            _, changed = self._run(rows.replaced(inputs, row, factor), rows, streams)
            if first_difference(plain, changed, rows, row) is not None:
                _, again = self._run(inputs, rows, streams)  # a forward may differ from itself as much
                return _beyond_rounding(plain, again, changed, rows, row)
        return None

    def _run(
        self, inputs: Any, rows: Rows, streams: State, *, with_gradient: bool = False
    ) -> tuple[list[Tensor], Run]:
        """The layers' and the model's outputs on these inputs, and the inputs that ask for a gradient."""
        put_streams(streams, self._generators)
        leaves: list[Tensor] = []
        if with_gradient:
            inputs = rows.map(inputs, lambda tensor, _: _leaf(tensor, leaves))
        else:
            inputs = rows.map(inputs, lambda tensor, _: tensor.clone())  # the model may write into it
        args, kwargs = inputs
        with recorded(self._module) as run:
            run.add(OUTPUT, self._module.forward(*args, **kwargs))
        return leaves, run


def _leaf(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """A copy through which a gradient comes back, and which the model may overwrite."""
    if not tensor.is_floating_point():
        return tensor.clone()
    leaves.append(tensor.clone().requires_grad_())
    return leaves[-1].clone()


def _other_rows(run: Run, rows: Rows) -> str | None:
    """Whether a layer has other rows than the samples."""
    for name, tensor in run.seen:
        if name != OUTPUT and rows.dim(tensor) is None:
            return (
                f"{name} makes an output of shape {tuple(tensor.shape)} of {rows.count} samples, so its rows "
                "are not the samples"
            )
    return None


def _beyond_rounding(plain: Run, again: Run, changed: Run, rows: Rows, row: int) -> str | None:
    """The layer that differs by more than the same forward does when it is repeated."""
    if first_difference(plain, again, rows, row) is None:
        return first_difference(plain, changed, rows, row)
    if first_difference(plain, again, rows, row, tolerance=_ROUNDING) is None:
        return first_difference(plain, changed, rows, row, tolerance=100 * _ROUNDING)
    return None  # other random numbers each time: nothing can be told


def _reached(leaves: list[Tensor], run: Run, rows: Rows, row: int) -> str | None:
    """Whether back-propagating output ``row`` reaches another row of an input or of a layer."""
    outputs = [t for name, t in run.seen if name == OUTPUT and t.requires_grad and rows.dim(t) is not None]
    inner = [(name, t) for name, t in run.seen if name != OUTPUT and t.requires_grad]
    targets = [("the input", leaf) for leaf in leaves] + inner
    if not outputs or not targets:
        return None
    chosen: list[Tensor] = []
    for output in outputs:
        dim = rows.dim(output)
        assert dim is not None  # the others were left out
        chosen.append(output.select(dim, row).flatten())
    total = torch.cat([part.float() for part in chosen])
    weights = torch.linspace(1.0, 2.0, len(total), dtype=total.dtype, device=total.device)
    grads = torch.autograd.grad((total * weights).sum(), [t for _, t in targets], allow_unused=True)
    for (name, _), grad in zip(targets, grads, strict=True):
        others = None if grad is None else rows.others(grad, row)
        if others is not None and bool((others != 0).any()) and bool(others.isfinite().all()):
            return f"the output of one sample depends on the rows of other samples in {name}"
    return None


@contextmanager
def recorded(module: nn.Module) -> Iterator[Run]:
    """While it is open, the outputs of all layers with trainable parameters are noted."""
    run = Run()
    handles = []
    for name, layer in module.named_modules():
        # Recurrent layers run on fewer rows at the end of packed sequences, and have a batch dimension of
        # their own.
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if name and trained and not isinstance(layer, (RNNLinear, DPRNNBase)):

            def note(_layer: nn.Module, _inputs: Any, output: Any, *, name: str = name) -> None:
                run.add(name, next(nested_tensors(output), ()))  # its first tensor

            handles.append(layer.register_forward_hook(note))
    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()

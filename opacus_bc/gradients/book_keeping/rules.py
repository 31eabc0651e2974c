"""Per-sample gradients of torch's functions: one rule for each, and one for everything else.

A rule computes the function without the parameters' gradients and tells the book what backward has to write
down. It is found by the function that a layer calls, not by the layer's type, so that subclasses, padding
modes and layers that use several parameters need no rules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

from opacus_bc.batch_norm.gradients import (
    Upstream,
    affine_gradients,
    constant_batch_norm,
    input_gradient,
    positions,
    statistics_gradients,
)
from opacus_bc.gradients.book_keeping.book import Book, BookKeepingError
from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    Entry,
    LinearProduct,
    OwnRows,
    Product,
    Rows,
)
from opacus_bc.mechanism.clipping import accumulation_dtype

Rule = Callable[..., Tensor]
_KEEP = 4  # a weight is instantiated for every sample if it has at most so many times T² entries


def linear(book: Book, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` over any number of positions."""
    _refuse_single(book, input, 1)
    flat = input.reshape(-1, input.shape[-1])  # in one piece, which may be overwritten afterwards
    output = F.linear(flat, book.plain(weight), book.plain(bias))
    rows = len(input)

    def note(grad: Tensor, *held: Tensor) -> None:
        b = _wide(grad).reshape(rows, -1, grad.shape[-1])
        if book.wants(weight):
            product = LinearProduct(_wide(held[0]).reshape(rows, -1, held[0].shape[-1]), b, weight.shape)
            book.add(weight, _kept_or_not(book, product, weight.numel(), b.shape[1]))
        if bias is not None and book.wants(bias):
            book.add(bias, Rows(b.sum(1)))

    saved = (flat,) if book.wants(weight) else ()
    return book.tap(output, note, *saved, shape=(*input.shape[:-1], output.shape[-1]))


def _refuse_single(book: Book, input: Tensor, dimensions: int) -> None:
    """A layer that got one sample without a dimension for the batch would show something else as rows."""
    if input.dim() <= dimensions:
        raise BookKeepingError(
            f"a layer got a tensor of shape {tuple(input.shape)}, which has no dimension for the samples: "
            "individual clipping needs one row for each sample in every layer"
        )


def _kept_or_not(book: Book, product: Product, entries: int, positions: int, groups: int = 1) -> Entry:
    """Instantiate now where that is cheaper than Gram matrices; the inputs are then free to go."""
    cheaper = positions > 1 and entries <= _KEEP * groups * positions**2
    if cheaper if book.instantiate is None else book.instantiate:
        return Rows(product.rows())
    return product


def convolution(
    book: Book,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``F.conv1d``, ``F.conv2d`` and ``F.conv3d``."""
    n = weight.dim() - 2
    _refuse_single(book, input, n + 1)
    kernel = tuple(weight.shape[2:])
    stride, dilation = _tuple(stride, n), _tuple(dilation, n)
    if isinstance(padding, str):
        input, padding = _padded_as_named(input, padding, kernel, dilation)
    shape = Convolution(
        kernel=kernel, stride=stride, padding=_tuple(padding, n), dilation=dilation, groups=groups
    )
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    output = function(input, book.plain(weight), book.plain(bias), stride, shape.padding, dilation, groups)

    def note(grad: Tensor, *held: Tensor) -> None:
        b = _wide(grad)
        if book.wants(weight):
            book.add(weight, _convolution_entry(book, shape, _wide(held[0]), b, _wide(weight.detach())))
        if bias is not None and book.wants(bias):
            book.add(bias, Rows(b.flatten(2).sum(2)))

    return book.tap(output, note, *((input,) if book.wants(weight) else ()))


def _convolution_entry(book: Book, shape: Convolution, x: Tensor, grad: Tensor, weight: Tensor) -> Entry:
    places = math.prod(grad.shape[2:])
    if places == 1 and shape.groups == 1:  # a linear layer on the only window
        window = shape.windows(shape.padded(x), grad.shape[2:]).reshape(len(x), 1, weight[0].numel())
        linear = LinearProduct(window, grad.reshape(len(x), 1, -1), weight.shape)
        return _kept_or_not(book, linear, weight.numel(), 1)
    product = ConvolutionProduct(shape, x, grad, weight)
    return _kept_or_not(book, product, weight.numel(), places, shape.groups)


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (int(value),)
    return values * n if len(values) == 1 else values


def _padded_as_named(
    x: Tensor, padding: str, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, int]:
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        x = F.pad(x, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])
    return x, 0


def layer_norm(
    book: Book,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm``."""
    _refuse_single(book, input, len(normalized_shape))
    output = F.layer_norm(input, normalized_shape, book.plain(weight), book.plain(bias), eps)
    last = len(normalized_shape)
    return _affine(
        book, output, input, weight, bias, lambda x: F.layer_norm(x, normalized_shape, eps=eps), last
    )


def rms_norm(
    book: Book, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``F.rms_norm``."""
    _refuse_single(book, input, len(normalized_shape))
    output = F.rms_norm(input, normalized_shape, book.plain(weight), eps)
    last = len(normalized_shape)
    return _affine(
        book, output, input, weight, None, lambda x: F.rms_norm(x, normalized_shape, eps=eps), last
    )


def group_norm(
    book: Book,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.group_norm``."""
    output = F.group_norm(input, num_groups, book.plain(weight), book.plain(bias), eps)
    return _affine(book, output, input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps), None)


def instance_norm(
    book: Book,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm``."""
    statistics = (running_mean, running_var)

    def normalised(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        return F.instance_norm(x, *statistics, w, b, use_input_stats, momentum, eps)

    return _affine(
        book, normalised(input, book.plain(weight), book.plain(bias)), input, weight, bias, normalised, None
    )


def batch_norm(
    book: Book,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` with given statistics; those of the batch would mix its samples."""
    if training or running_mean is None or running_var is None:
        raise BookKeepingError(
            "BatchNorm normalised with the statistics of the private batch, which mixes its samples: give "
            "make_private a batch_norm= policy"
        )
    return constants(book, None, input, weight, bias, running_mean, running_var, eps)


def constants(
    book: Book,
    layer: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> Tensor:
    """BatchNorm with constants in the place of statistics."""
    w, b = book.plain(weight), book.plain(bias)
    inverse, dtype = torch.rsqrt(var + eps), input.dtype  # a function that held the input would keep it alive
    upstream: tuple[Upstream, ...] = () if layer is None else layer.upstream

    def normalised(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)

    version = None if w is None else w._version

    def backward(grad: Tensor) -> Tensor:
        if w is not None and w._version != version:
            raise BookKeepingError("the weight of a BatchNorm was changed between forward and backward pass")
        return input_gradient(grad, w, inverse).to(dtype)

    def note(grad: Tensor, *held: Tensor) -> None:
        into_weight = None
        if held:
            into_weight, into_bias = affine_gradients(_wide(held[0]), _wide(grad), mean, inverse)
        else:
            into_bias = positions(_wide(grad)).sum(2)
        if weight is not None and book.wants(weight) and into_weight is not None:
            book.add(weight, Rows(into_weight))
        if bias is not None and book.wants(bias):
            book.add(bias, Rows(into_bias))
        if upstream and into_weight is not None:
            into = statistics_gradients(layer, inverse, into_weight, into_bias)
            for entry in upstream:
                _follow(book, entry, *into)

    saved = (input,) if book.wants(weight) or upstream else ()
    return book.tap_of(input, normalised, backward, note, *saved)


def _follow(book: Book, entry: Upstream, into_mean: Tensor, into_var: Tensor) -> None:
    """What samples add to the gradients of a layer that feeds a BatchNorm, through its statistics."""
    factors = entry.of_rows(into_mean), entry.of_rows(into_var)
    for parameter, directions in (
        (entry.layer.weight, (entry.weight_mean, entry.weight_var)),
        (entry.layer.bias, (entry.bias_mean, entry.bias_var)),
    ):
        if not isinstance(parameter, Tensor) or not book.wants(parameter):
            continue
        for factor, direction in zip(factors, directions, strict=True):
            if direction is not None:
                book.add_term(parameter, factor, _wide(direction))


def _affine(
    book: Book,
    output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalised: Callable[[Tensor], Tensor],
    last: int | None,
) -> Tensor:
    """Weight and bias of a normalisation: along the last dimensions, or along the channels (None)."""

    def per_sample(values: Tensor) -> Tensor:
        if last is None:
            return positions(values).sum(2)
        return values.flatten(1, -last - 1).sum(1) if values.dim() > last + 1 else values

    def note(grad: Tensor, *held: Tensor) -> None:
        b = _wide(grad)
        if weight is not None and book.wants(weight):
            book.add(weight, Rows(per_sample(normalised(_wide(held[0])) * b)))
        if bias is not None and book.wants(bias):
            book.add(bias, Rows(per_sample(b)))

    return book.tap(output, note, *((input,) if book.wants(weight) else ()))


def embedding(
    book: Book, input: Tensor, weight: Tensor, padding_idx: int | None = None, *options: Any, **named: Any
) -> Tensor:
    """``F.embedding``."""
    output = F.embedding(input, book.plain(weight), padding_idx)

    def note(grad: Tensor, *held: Tensor) -> None:
        rows = len(grad)
        index = held[0].reshape(rows, -1)
        b = _wide(grad).reshape(rows, index.shape[1], -1)
        if padding_idx is not None:
            b = b.masked_fill((index == padding_idx % len(weight))[..., None], 0.0)
        found = b.new_zeros((rows, *weight.shape))
        found.scatter_add_(1, index[..., None].expand_as(b), b)
        book.add(weight, Rows(found))

    return book.tap(output, note, *((input,) if book.wants(weight) else ()))


def add(book: Book, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """A parameter that is added to every sample, as position embeddings are."""
    output = torch.add(book.plain(input), book.plain(other), alpha=alpha)
    return _added(book, output, input, other, alpha)


def add_(book: Book, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """The same in place, where nothing else looks at the same memory."""
    if book.is_parameter(input) or input._is_view():
        raise _no_rule("add_", book, input if book.is_parameter(input) else other)
    return _added(book, input.add_(book.plain(other), alpha=alpha), input, other, alpha)


def _added(book: Book, output: Tensor, input: Any, other: Any, alpha: float) -> Tensor:
    input, other = (_broadcast(book, value, output) for value in (input, other))

    def note(grad: Tensor) -> None:
        for value, factor in ((input, 1.0), (other, alpha)):
            if book.wants(value):
                book.add(value, _spread(_wide(grad) * factor, value))

    return book.tap(output, note)


def multiply(book: Book, input: Any, other: Any) -> Tensor:
    """A parameter that every sample is multiplied with, as layer scales are."""
    output = torch.mul(book.plain(input), book.plain(other))
    parameter, value = (input, other) if book.is_parameter(input) else (other, input)
    parameter = _broadcast(book, parameter, output)

    def note(grad: Tensor, *held: Tensor) -> None:
        if held:
            book.add(parameter, _spread(_wide(grad) * held[0], parameter))

    return book.tap(output, note, *((value,) if book.wants(parameter) else ()))


def join(book: Book, tensors: Any, dim: int = 0) -> Tensor:
    """``torch.cat``: parameters beside the samples, as class tokens are."""
    output = torch.cat([book.plain(each) for each in tensors], dim)
    sizes = [each.shape[dim] for each in tensors]
    return _joined(book, output, tensors, dim, lambda grad: torch.split(grad, sizes, dim))


def stack(book: Book, tensors: Any, dim: int = 0) -> Tensor:
    """``torch.stack``."""
    output = torch.stack([book.plain(each) for each in tensors], dim)
    return _joined(book, output, tensors, dim, lambda grad: grad.unbind(dim))


def _joined(
    book: Book, output: Tensor, tensors: Any, dim: int, apart: Callable[[Tensor], Sequence[Tensor]]
) -> Tensor:
    if dim % output.dim() == 0:  # what was a sample's row is another one's now
        raise _no_rule("cat", book, *filter(book.is_parameter, tensors))
    values = [_broadcast(book, each, each) for each in tensors]

    def note(grad: Tensor) -> None:
        for value, part in zip(values, apart(_wide(grad)), strict=True):
            if book.wants(value):
                book.add(value, _spread(part, value))

    return book.tap(output, note)


def expand_as(book: Book, input: Tensor, other: Tensor) -> Tensor:
    """A parameter in the shape of a sample's tensor, of which nothing but the shape is used."""
    expanded: Tensor = book.derive(book.twin(input).expand(other.shape))
    return expanded


def _spread(grad: Tensor, value: Tensor) -> Entry:
    """Every sample's gradient of a value that was broadcast to all of them, or has a row for each."""
    if value.dim() == grad.dim() and len(value) == len(grad) != 1:
        return OwnRows(_reduced(grad, value[0]))
    return Rows(_reduced(grad, value))


def _reduced(grad: Tensor, value: Tensor) -> Tensor:
    """Sum a gradient over what was broadcast, but for the samples."""
    shape = (1,) * (grad.dim() - value.dim()) + tuple(value.shape)
    over = [d for d in range(1, grad.dim()) if shape[d] == 1 and grad.shape[d] != 1]
    return (grad.sum(over) if over else grad).reshape(len(grad), *value.shape)


def _broadcast(book: Book, value: Any, output: Tensor) -> Any:
    """A parameter as every sample meets it; anything else as it is.

    One that was expanded to a row for each sample has the same row for all: the first one is taken. A
    function of parameters may have rows that differ; every sample meets its own.

    Raises:
        BookKeepingError: It is a parameter of the model with several rows: which one is whose would depend on
            the order of the batch.
    """
    if not book.is_parameter(value) or value.dim() < max(1, output.dim()) or len(value) == 1:
        return value
    if value.stride(0) == 0:
        return book.derive(book.twin(value)[:1])
    if not book.is_own(value):
        return value  # the book looks whether its rows are alike
    raise BookKeepingError(
        f"{book.name_of(value)} has {len(value)} rows and meets the batch's: which sample meets which row "
        "depends on the order of the batch. Let it have one row, or use clipping='batch'"
    )


def row_by_row(
    book: Book, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> Tensor:
    """Any other function, differentiated for each sample by itself; slow and exact where rows are samples.

    Raises:
        BookKeepingError: The function changes its arguments, or its results are not rows of samples.
    """
    name = getattr(function, "__name__", str(function))
    flat = [*args, *named.values()]
    used = [value for value in flat if book.is_parameter(value)]
    batched = [i for i, value in enumerate(flat) if book.is_sample(value)]
    if name.endswith("_") and not name.endswith("__"):
        raise _no_rule(name, book, used[0])
    if len(used) == 0 or not batched or any(flat[i].dim() == 0 or len(flat[i]) != book.rows for i in batched):
        raise _no_rule(name, book, *used)

    def call(parameters: list[Tensor], samples: list[Tensor]) -> Any:
        values = list(flat)
        for i, value in enumerate(flat):
            for place, parameter in enumerate(used):
                if value is parameter:
                    values[i] = parameters[place]
        for i, value in zip(batched, samples, strict=True):
            values[i] = value
        return function(*values[: len(args)], **dict(zip(named, values[len(args) :], strict=True)))

    plain = [value.detach() for value in used]
    output = call(plain, [flat[i] for i in batched])
    if not isinstance(output, Tensor):
        raise _no_rule(name, book, *used)
    book.tell_of_rows(name, used[0])

    def note(grad: Tensor, *held: Tensor) -> None:
        def one(g: Tensor, *row: Tensor) -> Any:
            return vjp(lambda *p: call(list(p), [r[None] for r in row]), *plain)[1](g[None])

        for value, found in zip(used, vmap(one)(grad, *held), strict=True):
            if book.wants(value):
                book.add(value, Rows(_wide(found)))

    return book.tap(output, note, *(flat[i] for i in batched))


def _no_rule(name: str, book: Book, *parameters: Tensor) -> BookKeepingError:
    who = book.name_of(parameters[0]) if parameters else "a parameter"
    return BookKeepingError(
        f"{who} meets the batch in {name}, of which no per-sample gradient is known in one backward: use "
        "grad_sample_mode='hooks' (for torch's recurrent layers and attention opacus_bc.fix), freeze the "
        "parameter, or use clipping='batch'"
    )


def _wide(x: Tensor) -> Tensor:
    """In the precision in which norms and sums are computed."""
    return x.to(accumulation_dtype(x.dtype))


RULES: dict[Any, Rule] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    constant_batch_norm: constants,
    F.embedding: embedding,
    torch.add: add,
    Tensor.add: add,
    Tensor.__add__: add,
    Tensor.__radd__: add,
    Tensor.add_: add_,
    Tensor.__iadd__: add_,
    torch.mul: multiply,
    Tensor.mul: multiply,
    Tensor.__mul__: multiply,
    Tensor.__rmul__: multiply,
    torch.cat: join,
    torch.concat: join,
    torch.concatenate: join,
    torch.stack: stack,
    Tensor.expand_as: expand_as,
}

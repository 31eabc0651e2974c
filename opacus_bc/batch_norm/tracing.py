"""Which layers feed a BatchNorm channel by channel, found by tracing one forward on public data.

While a trace is open, every linear and convolution layer hands its output on as a fresh start of the autograd
graph, and every other layer with weights hands its output on without a graph. In front of a BatchNorm the
graph then reaches exactly the layers that feed it with nothing trained in between, and one forward holds all
these local pieces. Whether a piece acts channel by channel is measured and not read off names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as conv_grads
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from opacus_bc.batch_norm.gradients import Upstream

# Channel c of their output depends on row c of their weight and bias alone, groups or not.
_CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: conv_grads.conv1d_weight,
    nn.Conv2d: conv_grads.conv2d_weight,
    nn.Conv3d: conv_grads.conv3d_weight,
}
ROW_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_ENOUGH = 16  # samples that show which channels a layer feeds, if each row moves anything there


@dataclass(frozen=True)
class _Use:
    """One use of a linear or convolution layer in the forward that is traced."""

    layer: Any
    x: Tensor  # its input
    output: GradientEdge  # in-place operations do not move an edge
    axis: int  # where the output has the rows of the weight
    version: int  # of the input

    @property
    def overwritten(self) -> bool:
        """Whether the input is no longer what the layer saw."""
        return bool(self.x._version != self.version)

    def rows_first(self, grad: Tensor) -> Tensor:
        """A gradient with respect to the output in shape (rows of the weight, everything else)."""
        return grad.movedim(self.axis, 0).flatten(1)

    def fed_channels(
        self, into_mean: Tensor, into_var: Tensor, marked: Tensor, marks: Tensor
    ) -> Tensor | None:
        """See the function of this name: of some samples if these show it, of all otherwise."""
        plain = self.rows_first(into_mean[:_ENOUGH] + into_var[:_ENOUGH])
        if bool(plain.any(1).all()):
            return fed_channels(plain, self.rows_first(marked[:_ENOUGH]), marks)
        return fed_channels(self.rows_first(into_mean + into_var), self.rows_first(marked), marks)

    def weight_grad(self, grad: Tensor) -> Tensor:
        """The gradient of the weight, given the one of the output."""
        layer, x = self.layer, self.x
        if isinstance(layer, nn.Linear):
            return grad.flatten(0, -2).T @ x.flatten(0, -2)
        padding = layer.padding
        if isinstance(padding, str) or layer.padding_mode != "zeros":
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
        of_weight = _CONVOLUTIONS[type(layer)]
        result: Tensor = of_weight(
            x, layer.weight.shape, grad, layer.stride, padding, layer.dilation, layer.groups
        )
        return result

    def directly_before(self, into_mean: Tensor, into_var: Tensor) -> Upstream:
        """:meth:`upstream` with nothing in between: all rows of an ungrouped layer move their means alike."""
        found = self.upstream(into_mean, into_var, None)
        if getattr(self.layer, "groups", 1) != 1:
            return found
        return replace(found, weight_mean=found.weight_mean[:1].clone().expand_as(found.weight_mean))

    def upstream(self, into_mean: Tensor, into_var: Tensor, channels: Tensor | None) -> Upstream:
        """The entry of a BatchNorm, given its statistics' gradients with respect to the output."""
        biased, others = self.layer.bias is not None, [d for d in range(into_var.dim()) if d != self.axis]
        return Upstream(
            layer=self.layer,
            weight_mean=self.weight_grad(into_mean),
            weight_var=self.weight_grad(into_var),
            bias_mean=into_mean.sum(others) if biased else None,
            bias_var=into_var.sum(others) if biased else None,
            channels=channels,
        )


@dataclass
class Trace:
    """What a forward has shown: for every BatchNorm that it reached the layers to follow, or why none.

    **Formal guarantee**: an entry ``found[norm]`` holds the exact derivatives of mean_c and var_c of what
    ``norm`` normalised, with respect to row k of the entry's weight and bias, with the input of that layer
    held fixed; c is the only channel of ``norm`` that row k moves.

    **Edge cases**: a layer of which some row moves several channels of a BatchNorm, or another number of
    samples, is left out there. A BatchNorm that is used twice, or has nothing to train (then no clipping
    sees its backward), follows none.
    """

    found: dict[nn.Module, tuple[Upstream, ...]] = field(default_factory=dict)
    reasons: dict[nn.Module, str] = field(default_factory=dict)
    _uses: list[_Use] = field(default_factory=list)

    def produced(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Forward hook of a linear or convolution layer."""
        x = args[0] if args else kwargs["input"]
        if not torch.is_grad_enabled():
            return None
        handed = output.detach().requires_grad_().clone()  # a leaf could not be overwritten in place
        batched = isinstance(layer, nn.Linear) or output.dim() == layer.weight.dim()
        if batched and any(p.requires_grad for p in layer.parameters(recurse=False)):
            axis = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
            self._uses.append(_Use(layer, x.detach(), get_gradient_edge(handed), axis, x._version))
        return handed

    def consumed(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a BatchNorm."""
        again, self.found[norm] = norm in self.found, ()
        if again:
            self.reasons[norm] = "it is used more than once"
        elif not any(p.requires_grad for p in norm.parameters(recurse=False)):
            self.reasons[norm] = "it has nothing to train"
        else:
            x = args[0] if args else kwargs["input"]
            self.found[norm] = _follow(x, self._uses) if torch.is_grad_enabled() else ()
            if not self.found[norm]:
                self.reasons[norm] = "no linear or convolution layer feeds it channel by channel"


@contextmanager
def tracing(root: nn.Module, norms: Collection[nn.Module]) -> Iterator[Trace]:
    """While it is open, a forward of ``root`` with gradients enabled fills the trace for ``norms``."""
    trace, handles = Trace(), []
    try:
        for module in root.modules() if norms else ():
            if type(module) in ROW_LAYERS:
                handles.append(
                    module.register_forward_hook(
                        trace.produced,
                        prepend=True,  # so that what other hooks make of the output comes after the edge
                        with_kwargs=True,
                    )
                )
            elif any(True for _ in module.parameters(recurse=False)) or module in norms:
                if module in norms:
                    handles.append(module.register_forward_pre_hook(trace.consumed, with_kwargs=True))
                handles.append(module.register_forward_hook(_cut))
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _cut(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: hand the output on without its graph (Opacus's backward hooks would find no record)."""
    return _without_graph(output)


def _without_graph(output: Any) -> Any:
    if type(output) in (tuple, list):
        return type(output)(map(_without_graph, output))
    return output.detach() if isinstance(output, Tensor) else output


def _follow(x: Tensor, uses: list[_Use]) -> tuple[Upstream, ...]:
    """The layers whose rows each move one channel of ``x``, and how they move its mean and variance."""
    uses = [use for use in uses if not use.overwritten]
    if not uses or not x.requires_grad:
        return ()
    count, by_channel = x.numel() // x.shape[1], [-1 if d == 1 else 1 for d in range(x.dim())]
    with torch.no_grad():  # how mean and variance depend on x
        dims = [d for d in range(x.dim()) if d != 1]
        dmean = x.new_full((), 1 / count).expand_as(x)
        dvar = (x - x.mean(dims, keepdim=True)).mul_(2 / (count - 1))
    for use in uses:
        if x.grad_fn is use.output.node and use.axis == 1:  # nothing in between
            return (use.directly_before(dmean, dvar),)
    with torch.no_grad():
        marks = _marks(x.shape[1]).to(x)
        dmarked = (dvar + dmean).mul_(marks.view(by_channel))
    edges = [use.output for use in uses]
    means, variances, marked = (
        torch.autograd.grad(x, edges, of_x, retain_graph=True, allow_unused=True)
        for of_x in (dmean, dvar, dmarked)
    )
    found = []
    for use, into_mean, into_var, into_marked in zip(uses, means, variances, marked, strict=True):
        if into_mean is None or len(into_mean) != len(x):
            continue
        channels = use.fed_channels(into_mean, into_var, into_marked, marks)
        if channels is not None:
            same = channels.equal(torch.arange(len(marks), device=channels.device))
            found.append(use.upstream(into_mean, into_var, None if same else channels))
    return tuple(found)


def _marks(channels: int) -> Tensor:
    """A different number between 1 and 2 for each channel, not evenly spaced; always the same ones."""
    generator = torch.Generator().manual_seed(channels)
    jitter = torch.rand(channels, generator=generator, dtype=torch.float64) / 2
    return 1 + (torch.randperm(channels, generator=generator) + jitter) / channels


def fed_channels(plain: Tensor, marked: Tensor, marks: Tensor) -> Tensor | None:
    """The channel that each row moves, or None if some row moves several.

    Args:
        plain: Row k is the gradient of the sum of all channels' values with respect to output row k.
        marked: The same for the sum with weights ``marks``; where row k moves channel c alone, it is
            ``marks[c]`` times the former, entry by entry.
        marks: A different number for each channel.

    **Edge cases**: a row without a gradient, or with one so small that its digits are lost, moves nothing;
    its channel is its own number, or the last one. Half precision has too few digits to tell channels apart.
    """
    information = torch.finfo(plain.dtype)
    size = plain.abs().amax(1, keepdim=True)
    floor = 1e6 * information.tiny
    scale = size.clamp_min(floor)
    plain, marked = plain / scale, marked / scale
    ratios = (plain * marked).sum(1) / plain.square().sum(1).clamp_min(information.tiny)
    channels = (ratios[:, None] - marks).abs().argmin(1)
    error = marked.addcmul_(marks[channels, None], plain, value=-1).abs_().max()
    if not bool(error <= min(1e-3, 1e3 * information.eps)):  # not a number is not equal either
        return None
    own = torch.arange(len(channels), device=channels.device).clamp_max(len(marks) - 1)
    return torch.where(size[:, 0] > floor, channels, own)

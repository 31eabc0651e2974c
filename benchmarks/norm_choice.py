"""Claim: the rule that chooses how a layer's norms are computed costs little more than the best choice.

    python benchmarks/norm_choice.py [--rounds 9]

In one backward a convolution's per-sample gradients are either formed and kept until the clipped sum, or only
their norms are computed from Gram matrices and the weight gradient is computed once, with the clip factors
folded in. The rule (``opacus_bc/gradients/book_keeping/rules.py``) keeps a weight of at most 4 T^2 entries at
T output positions. Both ways are timed on layers of the networks of ``performance.py`` at batch 64, in turns,
one thread, by CPU time, over the layer's ordinary weight gradient. The last line says how much longer all
layers together take by the rule than by the better way for each. Results: ``results/norm_choice.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.products import ConvolutionProduct, Rows
from opacus_bc.gradients.book_keeping.rules import _KEEP

RESULTS = Path(__file__).parent / "results" / "norm_choice.json"
BATCH = 64
LAYERS = (  # name, channels in, channels out, kernel, image, stride, groups
    ("bn_lenet5, 1st", 1, 6, 5, 28, 1, 1),
    ("bn_lenet5, 2nd", 6, 16, 5, 14, 1, 1),
    ("convnet, 1st", 3, 32, 3, 32, 1, 1),
    ("convnet, 2nd", 32, 32, 3, 32, 1, 1),
    ("convnet, 3rd", 32, 64, 3, 16, 1, 1),
    ("ResNet-18, stem", 3, 64, 3, 32, 1, 1),
    ("ResNet-18, stage 1", 64, 64, 3, 32, 1, 1),
    ("ResNet-18, stage 2, stride 2", 64, 128, 3, 32, 2, 1),
    ("ResNet-18, stage 2", 128, 128, 3, 16, 1, 1),
    ("ResNet-18, stage 3, stride 2", 128, 256, 3, 16, 2, 1),
    ("ResNet-18, stage 3", 256, 256, 3, 8, 1, 1),
    ("ResNet-18, stage 4", 512, 512, 3, 4, 1, 1),
    ("depthwise, 96 channels", 96, 96, 3, 24, 1, 96),
    ("pointwise, 96 to 24 channels", 96, 24, 1, 24, 1, 1),
)


def ways(layer: tuple[str, int, int, int, int, int, int]) -> tuple[dict[str, Callable[[], object]], bool]:
    """The layer's weight gradient, both ways to clip it, and whether the rule keeps rows."""
    _, into, out, kernel, image, stride, groups = layer
    torch.manual_seed(0)
    shape = Convolution(
        kernel=(kernel,) * 2, stride=(stride,) * 2, padding=(kernel // 2,) * 2, dilation=(1, 1), groups=groups
    )
    x, weight = torch.randn(BATCH, into, image, image), torch.randn(out, into // groups, kernel, kernel)
    grad = torch.randn_like(shape.forward(x, weight))
    factors, product = torch.rand(BATCH, dtype=torch.float64), ConvolutionProduct(shape, x, grad, weight)

    def keep() -> None:
        rows = Rows(product.rows())
        rows.norms()
        rows.weighted_sum(factors)

    def ghost() -> None:
        product.norms()
        product.weighted_sum(factors)

    kept = weight.numel() <= _KEEP * groups * (grad.shape[2] * grad.shape[3]) ** 2
    return {"plain": lambda: shape.weight_gradient(x, grad, weight), "keep": keep, "ghost": ghost}, kept


def seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, chosen, best = [], 0.0, 0.0
    print(f"{'layer':32}{'keep':>8}{'Gram':>8}   rule (over the plain weight gradient)")
    for layer in LAYERS:
        functions, kept = ways(layer)
        for function in functions.values():
            function()
        spent = {
            name: statistics.median(seconds(f) for _ in range(given.rounds)) for name, f in functions.items()
        }
        chosen += spent["keep" if kept else "ghost"]
        best += min(spent["keep"], spent["ghost"])
        row = {"layer": layer[0], "rule": "keep" if kept else "ghost"}
        rows.append(row | {name: round(spent[name] / spent["plain"], 3) for name in ("keep", "ghost")})
        print(f"{layer[0]:32}{rows[-1]['keep']:8.2f}{rows[-1]['ghost']:8.2f}   {row['rule']}", flush=True)
    print(f"all layers by the rule over the better way for each: {chosen / best:.3f}")
    RESULTS.write_text(
        json.dumps({"rounds": given.rounds, "rule_over_best": chosen / best, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

"""Claim: pretrained-style CNNs with BatchNorm train privately as they are, in every mode.

    nice -n 5 python benchmarks/zoo.py [--networks "timm resnet10t" ...] [--methods BC ...] [--again failed]
                                       [--page]

For every network of ``zoo_models.py``: one private step in each mode on four random images (of 32, 64, 96 or
256 pixels, the smallest that the plain network takes), ``finalize``, a strict load of the released weights
into a plain network, and equal outputs. "oracle" compares the release of individual clipping with frozen
statistics, without noise and in float64, with gradients of single samples from plain autograd, for the
networks of ``zoo_models.WITH_ORACLE`` (or those that ``--networks`` names with ``--methods oracle``). Stock
Opacus steps after its own ``ModuleValidator.fix``. Each network runs in a process of its own with a time
limit. Results are kept in ``results/zoo.json`` as they come, and what is there is not run again; ``--page``
only writes docs/zoo.md from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zoo_models
import zoo_steps
from zoo_page import write_page

RESULTS = Path(__file__).parent / "results" / "zoo.json"
ORACLES = ["oracle", "oracle of one backward"]
METHODS = ["BC", "GBC", "IC public", "IC frozen", "IC one backward", "stock Opacus", *ORACLES]
LIMIT, TOLERANCE = 420.0, 1e-4  # seconds for a method; relative distance of a release from the oracle's


def _oracle(build: zoo_steps.Build, pixels: int, mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        distance = zoo_steps.oracle_distance(lambda: build().double(), pixels, mode)
    finally:
        torch.set_default_dtype(torch.float32)
    if not distance < TOLERANCE:
        raise AssertionError(f"the release is {distance:.1e} away from the oracle's")


def methods(network: str) -> dict[str, Callable[[], None]]:
    """What is tried, by its column's name; the network is built once and copied."""
    model = zoo_models.build(network, zoo_steps.CLASSES)
    build = partial(copy.deepcopy, model)
    pixels = zoo_steps.smallest_images(build)
    ours = partial(zoo_steps.released, build, pixels)
    public = partial(zoo_steps.public, pixels)
    return {
        "BC": lambda: ours(clipping="batch", batch_norm=public()),
        "GBC": lambda: ours(clipping="batch", mini_batch_size=2, batch_norm=public()),
        "IC public": lambda: ours(clipping="flat", batch_norm=public(), grad_sample_mode="hooks"),
        "IC frozen": lambda: ours(clipping="flat", batch_norm="frozen", grad_sample_mode="hooks"),
        "IC one backward": lambda: ours(clipping="flat", batch_norm=public(), grad_sample_mode="bk"),
        "stock Opacus": lambda: zoo_steps.stock(build, pixels),
        "oracle": lambda: _oracle(build, pixels, "hooks"),
        "oracle of one backward": lambda: _oracle(build, pixels, "bk"),
    }


def _try(network: str, wanted: list[str], answers: Any) -> None:
    torch.set_num_threads(1)
    tried = methods(network)
    for method in wanted:
        try:
            tried[method]()
            answers.send("ok")
        except BaseException as error:
            answers.send(f"{type(error).__name__}: {error}"[:600])


def attempts(network: str, wanted: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outcomes of methods, from a process of their own: "ok", or the error."""
    context = multiprocessing.get_context("fork")
    while wanted:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_try, args=(network, wanted, there))
        process.start()
        there.close()
        for place, method in enumerate(wanted):
            started, ended = time.monotonic(), False
            try:
                ended = not here.poll(LIMIT)
                outcome = f"TimeoutError: more than {LIMIT:.0f} seconds" if ended else here.recv()
            except EOFError:
                outcome, ended = "the process ended without an answer (memory?)", True
            yield method, {"outcome": outcome, "seconds": round(time.monotonic() - started, 1)}
            if ended or method == wanted[-1]:
                wanted = wanted[place + 1 :]
                break
        process.kill()
        process.join()


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=zoo_models.names())
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--again", choices=("nothing", "failed", "all"), default="nothing")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for network in () if options.page else options.networks:
        row = kept.setdefault(network, {})
        old = {method: row.get(method, {}).get("outcome") for method in options.methods}
        keep = {
            "nothing": [m for m in old if old[m]],
            "failed": [m for m in old if old[m] == "ok"],
            "all": [],
        }
        wanted = [method for method in options.methods if method not in keep[options.again]]
        if options.methods == METHODS and network not in zoo_models.with_oracle():
            wanted = [method for method in wanted if method not in ORACLES]
        for method, answer in attempts(network, wanted):
            row[method] = answer
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(network, *(f"{method}: {answer['outcome'][:150]}" for method, answer in row.items()), sep=" | ")
    write_page(kept)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

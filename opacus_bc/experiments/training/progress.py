"""How far a long command is: a bar on a terminal, a line a finished item elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


class Bar:
    """A progress bar on a terminal, a line a cell elsewhere; always on standard error."""

    def __init__(self, what: str, amounts: Sequence[int], kept: int = 0) -> None:
        from tqdm import tqdm

        self.what, self.amounts = what, list(amounts)
        self.done = [0] * len(self.amounts)
        self.count = 0
        note = f" ({kept} kept)" if kept else ""
        self.tty = sys.stderr.isatty()
        make: Callable[..., Any] = tqdm
        self.bar = make(
            total=sum(self.amounts), desc=what + note, unit="epoch", file=sys.stderr,
            disable=not self.tty or not self.amounts,
        )  # fmt: skip

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def report(self, index: int, amount: int) -> None:
        self.bar.update(amount - self.done[index])
        self.done[index] = amount

    def finished(self, name: str, result: Any) -> None:
        self.count += 1
        if not self.tty:
            words = (
                f"failed: {result}" if isinstance(result, Exception) else f"{result['accuracies'][-1]:.1f} %"
            )
            line = f"{self.what} {self.count}/{len(self.amounts)}: {name}: {words}"
            print(line.splitlines()[0], file=sys.stderr, flush=True)

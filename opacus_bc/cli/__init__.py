"""The command line: `opacus-bc epsilon`, `opacus-bc calibrate`, ...

Every command is a function in `COMMANDS`: its keyword arguments become options, its docstring the help text,
its return value the exit code. A ValueError becomes one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence

from opacus_bc.audit.command import audit
from opacus_bc.cli.budget import calibrate, epsilon
from opacus_bc.cli.help import as_tyro_reads_it
from opacus_bc.cli.mistakes import in_one_line, mistyped
from opacus_bc.experiments.compare.command import compare
from opacus_bc.experiments.reproduce.command import reproduce
from opacus_bc.experiments.training.methods import listing

EXTRA = "the command line needs tyro and rich: pip install 'opacus-bc[experiments]'"
COMMANDS: dict[str, Callable[..., int]] = {
    "epsilon": epsilon,
    "calibrate": calibrate,
    "compare": compare,
    "reproduce": reproduce,
    "audit": audit,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        import rich  # noqa: F401 (commands need it later)
        import tyro
    except ImportError:
        print(EXTRA, file=sys.stderr)
        return 2
    words = list(sys.argv[1:] if arguments is None else arguments)
    mistake = mistyped(words, COMMANDS)
    if mistake is not None:
        print(f"opacus-bc: {mistake}", file=sys.stderr)
        return 2
    more = {"compare": {"methods": listing()}}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command = tyro.extras.subcommand_cli_from_dict(
                {name: as_tyro_reads_it(made, more.get(name, {})) for name, made in COMMANDS.items()},
                prog="opacus-bc",
                description="Batch clipping for Opacus: accounting, comparison, audits.",
                args=words,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        print(f"opacus-bc: {in_one_line(said.getvalue())}. --help lists what there is.", file=sys.stderr)
        return 2
    try:
        return int(command())
    except (ValueError, OSError, ImportError) as error:
        print(f"opacus-bc: {error}", file=sys.stderr)
        return 2

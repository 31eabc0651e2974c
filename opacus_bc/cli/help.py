"""What `--help` shows of a command: its docstring, without the line breaks of the source."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

_ARGUMENT = re.compile(r"^(\w+): ")


def texts(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of a command, and of each argument in its section ``Args``; one line each.

    >>> texts('''Counts.
    ...
    ...     Args:
    ...         size: how many, and
    ...             of what.
    ...     ''')
    ('Counts.', {'size': 'how many, and of what.'})
    """
    about, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(section).splitlines():
        start = _ARGUMENT.match(line)
        if start is not None:
            name = start[1]
            found[name] = line[start.end() :]
        elif name:
            found[name] += " " + line.strip()
    return about.strip(), found


def as_tyro_reads_it(
    command: Callable[..., int], more: Mapping[str, str]
) -> Callable[..., Callable[[], int]]:
    """The command with the same options, which does nothing yet but remember them.

    A switch that is off by default has one name; one that is on has two, ``--costs`` and ``--no-costs``.
    Where the text itself says what the default is, ``None`` is not shown beside it.

    Args:
        command: A function with a docstring in Google's style.
        more: Lines to put below the text of an argument, by its name.
    """
    import tyro

    @functools.wraps(command)
    def remember(**options: Any) -> Callable[[], int]:
        return functools.partial(command, **options)

    about, said = texts(command.__doc__ or "")
    hints = get_type_hints(command)
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        text = "\n".join([said[name], *([more[name]] if name in more else [])])
        default = "" if "Default:" in text else None
        kind: Any = Annotated[hints[name], tyro.conf.arg(help=text, help_behavior_hint=default)]
        if parameter.default is False:
            kind = Annotated[kind, tyro.conf.FlagCreatePairsOff]
        parameters.append(parameter.replace(annotation=kind))
    vars(remember).pop("__wrapped__")
    remember.__doc__ = about
    remember.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    remember.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect looks for
    return remember

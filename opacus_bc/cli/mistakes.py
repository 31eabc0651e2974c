"""One line for a command or an option that does not exist, with the one that was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

# What other tools and papers call it, and arguments of Python by the names that they have there.
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "--sigma": "--noise-multiplier",
        "--noise": "--noise-multiplier",
        "--noise-scale": "--noise-multiplier",
        "--eps": "--epsilon",
        "--target-epsilon": "--epsilon",
        "--budget": "--epsilon",
        "--target-delta": "--delta",
        "--target-mu": "--mu",
        "--target-tpr": "--tpr",
        "--at-fpr": "--fpr",
        "--q": "--sample-rate",
        "--rate": "--sample-rate",
        "--sampling-rate": "--sample-rate",
        "--lot-size": "--batch-size",
        "--n": "--dataset-size",
        "--num-samples": "--dataset-size",
        "--groups": "--layers",
        "--label": "--target",
        "--output": "--out",
        "--workers": "--jobs",
        "--num-workers": "--jobs",
        "--pretrained": "--weights",
    }
)
_HELP = ("-h", "--help")


def options(command: Callable[..., int]) -> set[str]:
    """What a command takes; a switch that is on by default has a second name that turns it off."""
    found = set()
    for parameter in inspect.signature(command).parameters.values():
        name = parameter.name.replace("_", "-")
        found |= {f"--{name}", f"--no-{name}"} if parameter.default is True else {f"--{name}"}
    return found


def mistyped(words: Sequence[str], commands: Mapping[str, Callable[..., int]]) -> str | None:
    """A sentence about the first word that is no command, or no option of its command; None if all exist.

    What values are worth is for tyro to say. No option takes a value that begins with two dashes.

    >>> def count(*, size: int = 3) -> int: ...
    >>> mistyped(["count", "--sise", "4"], {"count": count})
    '--sise: count has no such option; did you mean --size? opacus-bc count --help lists all.'
    """
    if not words or words[0] in _HELP:
        return None
    chosen = words[0]
    if chosen not in commands:
        if chosen.startswith("-"):
            return f"{chosen}: name a command first: {', '.join(commands)}."
        guess = get_close_matches(chosen, commands, n=1)
        return f"{chosen}: no such command; {_meant(guess, ', '.join(commands))}."
    known = options(commands[chosen])
    for word in words[1:]:
        option = word.partition("=")[0].replace("_", "-")
        if not option.startswith("--") or option in known or option in _HELP:
            continue
        return f"{option}: {chosen} has no such option; {_guess(option, chosen, known, commands)}"
    return None


def _guess(option: str, chosen: str, known: set[str], commands: Mapping[str, Callable[..., int]]) -> str:
    near = [name for name in (_OTHER_NAMES.get(option),) if name in known]
    near = near or [name for name in sorted(known) if name.startswith(option)][:1]
    elsewhere = [name for name, command in commands.items() if option in options(command)]
    if elsewhere and not near:
        return f"{' and '.join(elsewhere)} {'have' if len(elsewhere) > 1 else 'has'} it."
    near = near or get_close_matches(option, sorted(known), n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]}? opacus-bc {chosen} --help lists all."
    return f"opacus-bc {chosen} --help lists all."


def _meant(guess: Sequence[str], all_of_them: str) -> str:
    return f"did you mean {guess[0]}? There are {all_of_them}" if guess else f"there are {all_of_them}"


def in_one_line(box: str) -> str:
    """What tyro says first inside its frame of several lines."""
    said: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│╭╮╰╯─| ")
        if text:
            said.append(text)
        elif said and not said[-1].endswith(":"):
            break
    return " ".join(said).rstrip(".") or "these options make no sense"

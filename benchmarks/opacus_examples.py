"""Claim: Opacus's examples run on this package's engine when one line, the import, is changed.

    pip download --no-binary opacus --no-deps opacus==1.6.0 && tar xf opacus-1.6.0.tar.gz
    python benchmarks/opacus_examples.py opacus-1.6.0/examples --data DIR

Runs copies of mnist, cifar10, char-lstm-classification, dcgan and imdb on the CPU with small settings, and
prints for each how many lines were changed and what it printed last. `--stock` changes nothing, `--only`
chooses. DIR holds torchvision's MNIST and CIFAR-10 as cifar10.npz (its first 2,000 images are used). Names
for char-lstm, and texts, `datasets` and `transformers` for imdb, are made up in the format that they read.
"""

from __future__ import annotations

import argparse
import difflib
import random
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.datasets
from PIL import Image

OLD, NEW = "from opacus import PrivacyEngine\n", "from opacus_bc import PrivacyEngine\n"
IMAGES, TEXTS = 2000, 200
CPU = ("--device", "cpu")
# Settings that end within a minute; {data} and {names} are folders.
MNIST = ("mnist.py", *CPU, "--data-root", "{data}", "-b", "2048", "-n", "1")
CIFAR = (
    "cifar10.py",
    *CPU,
    "--data-root",
    "{data}",
    "--batch-size",
    "256",
    "--epochs",
    "1",
    "--workers",
    "0",
)
NAMES = ("char-lstm-classification.py", *CPU, "--data-root", "{names}", "-b", "64", "--epochs", "2")
EXAMPLES: dict[str, tuple[str, ...]] = {
    "mnist": MNIST,
    "mnist --secure-rng": (*MNIST, "--secure-rng"),
    "cifar10": CIFAR,
    "cifar10 --clip_per_layer": (*CIFAR, "--clip_per_layer"),
    "cifar10 --grad_sample_mode no_op": (*CIFAR, "--grad_sample_mode", "no_op"),
    "char-lstm": NAMES,
    "char-lstm --mode gru": (*NAMES, "--mode", "gru"),
    "dcgan": (
        *("dcgan.py", *CPU, "--data-root", "{data}", "--batch-size", "512", "--epochs", "1"),
        *("--ngf", "8", "--ndf", "8", "--workers", "2"),
    ),
    "imdb": ("imdb.py", *CPU, "-b", "32", "-n", "2"),
}


def cifar10(folder: Path) -> type:
    """A data set of the first images of cifar10.npz, with torchvision's arguments."""
    arrays = np.load(folder / "cifar10.npz")

    class FirstImages(torch.utils.data.Dataset[Any]):
        def __init__(self, root: str, train: bool, transform: Any, download: bool) -> None:
            part = "train" if train else "test"
            images, labels = (next(arrays[key] for key in _keys(arrays, part, what)) for what in "xy")
            self.images, self.labels, self.transform = images[:IMAGES], labels[:IMAGES], transform

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])

    return FirstImages


def _keys(arrays: Any, part: str, what: str) -> list[str]:
    named = {"x": ("x", "images", "data"), "y": ("y", "labels", "targets")}[what]
    return [key for key in arrays if part in key and any(word in key.split("_") for word in named)]


def words(rng: random.Random, alphabet: str) -> str:
    """A made-up word."""
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 9)))


def write_names(folder: Path) -> None:
    """Two languages, a file each, a name a line."""
    rng = random.Random(0)
    for language, alphabet in (("vowels", "aeioumn"), ("consonants", "bcdfgkrst")):
        lines = [words(rng, alphabet) for _ in range(TEXTS)]
        (folder / f"{language}.txt").write_text("\n".join(lines), encoding="utf-8")


class Texts(torch.utils.data.Dataset[Any]):
    """Token numbers of unequal length and a label, as ``datasets`` gives them after ``set_format``."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(5, 40, (TEXTS,), generator=rng).tolist()
        self.labels = torch.randint(0, 2, (TEXTS,), generator=rng)
        self.tokens = [
            torch.randint(1, 50, (n,), generator=rng) + 50 * y
            for n, y in zip(lengths, self.labels, strict=True)
        ]

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "label": self.labels[index]}


class Splits(dict[str, Texts]):
    """What ``load_dataset`` returns; the texts are token numbers already."""

    def map(self, tokenize: Any, batched: bool) -> Splits:
        """Nothing to do."""
        return self

    def set_format(self, **how: Any) -> None:
        """Nothing to do."""


class Tokenizer:
    """Has a size, and nothing to do."""

    def __len__(self) -> int:
        return 100


def stand_in(name: str, **attributes: Any) -> None:
    """Put a module in the place of a package that is not there."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def run_here(script: str, arguments: list[str], data: Path) -> None:
    """Run an example in this process, its data in place."""
    torchvision.datasets.CIFAR10 = cifar10(data)
    stand_in("datasets", load_dataset=lambda *_, **__: Splits(train=Texts(0), test=Texts(1)))
    bert = type("BertTokenizerFast", (), {"from_pretrained": staticmethod(lambda name: Tokenizer())})
    stand_in("transformers", BertTokenizerFast=bert)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def changed_lines(before: str, after: str) -> int:
    """Lines of ``after`` that are not in ``before``."""
    diff = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in diff)


def run_example(folder: Path, name: str, data: Path, *, stock: bool) -> tuple[int, bool, str]:
    """Changed lines, whether the example ended well, and what it said of epsilon, or its error."""
    script, *arguments = EXAMPLES[name]
    before = (folder / script).read_text(encoding="utf-8")
    after = before if stock else before.replace(OLD, NEW)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / script).write_text(after, encoding="utf-8")
        names = Path(place) / "names"
        names.mkdir()
        write_names(names)
        filled = [word.format(data=data.resolve(), names=names) for word in arguments]
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--run",
            script,
            "--data",
            str(data.resolve()),
        ]
        done = subprocess.run(
            [*command, "--", *filled], cwd=place, capture_output=True, text=True, check=False
        )
    lines = [
        line.strip() for text in (done.stderr, done.stdout) for line in text.replace("\r", "\n").split("\n")
    ]
    told = [line for line in lines if ("ε = " in line if done.returncode == 0 else "Error" in line)]
    return changed_lines(before, after), done.returncode == 0, (told or lines)[-1]


def main() -> int:
    """Print a table; the exit code is the number of examples that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("examples", type=Path, nargs="?", help="the folder examples of Opacus's sdist")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--stock", action="store_true", help="change nothing")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen = parser.parse_args(sys.argv[1:split])
    if chosen.run:
        run_here(chosen.run, sys.argv[split + 1 :], chosen.data)
        return 0
    if chosen.examples is None:
        parser.error("say where the examples are")
    failed = 0
    for name in chosen.only:
        lines, well, said = run_example(chosen.examples, name, chosen.data, stock=chosen.stock)
        failed += not well
        print(f"| `{name}` | {lines} | {'runs' if well else 'fails'} | {said} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

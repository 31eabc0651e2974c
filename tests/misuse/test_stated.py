"""What cannot be seen is said: by the statement's assumptions and by SECURITY.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

SECURITY = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8"))

# What breaks epsilon unseen: words of the statement, words of SECURITY.md.
UNSEEN = {
    "MixUp in a collate function": ("MixUp", "builds row i from several samples (MixUp, CutMix)"),
    "padding to the longest sample": (
        "padding to a batch's longest sample",
        "padding to the batch's longest",
    ),
    "weighted means": ("weighted means", "the mean of `cross_entropy(..., weight=w)`"),
    "ignore_index": ("ignore_index", "with `ignore_index`"),
    "a mean that is declared a sum": (
        "mean or sum as loss_reduction says",
        "one more moved the release by 1.95 C",
    ),
    "contrastive losses": ("contrastive losses", "contrastive losses"),
    "couplings that begin later": ("evidence, no proof", "Not seen are couplings that begin later"),
    "half precision of the loss itself": (
        "as loss_reduction says",
        "half precision of the loss itself",
    ),
    "state outside of buffers": (
        "in plain attributes",
        "from one training forward to the next in plain attributes",
    ),
    "another hand on the weights": (
        "nothing but the private optimizer moves trained parameters",
        "A second torch optimizer over the same parameters",
    ),
    "several samples of one person": (
        "one person is one sample",
        "several samples of one person, cannot be seen",
    ),
    "pickles between backward and step": (
        "pickles of a model between backward and step",
        "between `backward()` and `step()` writes per-sample gradients",
    ),
    "public data that are changed private data": (
        "public data, the data set's size and the hyper-parameters are public",
        'Private samples that were changed before they went into a "public" file',
    ),
    "known seeds": ("nobody learns the random seeds", "ε is void for whoever knows a seed"),
    "known seeds of dropout": (
        "nor those of dropout and augmentation",
        "one sample more changes which random numbers all others get",
    ),
    "a choice by results": (
        "fixed without looking at the private data",
        "early stopping or a choice between runs",
    ),
}


def statement(**kwargs: Any) -> str:
    model = mlp()
    eng = engine()
    module, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(16), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **kwargs,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return re.sub(r"\s+", " ", eng.statement(1e-3))


@pytest.fixture(scope="module", params=["hooks", "bk"])
def stated(request: Any) -> str:
    return statement(grad_sample_mode=request.param)


@pytest.mark.parametrize("hole", UNSEEN)
def test_what_cannot_be_seen_is_stated_and_in_the_security_page(hole: str, stated: str) -> None:
    words, said = UNSEEN[hole]
    assert words in stated
    assert said in SECURITY


def test_batch_clipping_assumes_nothing_about_rows() -> None:
    assert "one row of a batch is one sample" not in statement(clipping="batch")


def test_padding_to_the_longest_sample_couples_samples_where_it_is_not_masked() -> None:
    """Why it is named: a mean over places is another one when a long sample joins, a masked mean is not."""
    short, long = torch.ones(3), torch.ones(9)

    def mean(*samples: Tensor) -> Tensor:
        return pad_sequence(list(samples), batch_first=True).mean(1)[0]

    assert mean(short, short) != mean(short, long)


def test_a_weighted_mean_lets_one_label_change_the_gradients_of_all() -> None:
    """Why it is named: the other samples' gradients are not the same when one label is another."""
    x, weight = torch.eye(4), torch.tensor([1.0, 50.0])

    def of_the_others(label: int) -> Tensor:
        logits = x[:, :2].clone().requires_grad_()
        labels = torch.tensor([0, 0, 0, label])
        nn.functional.cross_entropy(logits, labels, weight=weight).backward()
        assert logits.grad is not None
        return logits.grad[:3]

    assert not torch.allclose(of_the_others(0), of_the_others(1))


def test_known_masks_of_dropout_change_for_all_samples_when_one_joins() -> None:
    """Why it is named: the second layer's masks begin where the first one's end."""
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))

    def masks(samples: int) -> Tensor:
        torch.manual_seed(0)
        return layers(torch.ones(samples, 8))[:8]

    assert not torch.equal(masks(8), masks(9))

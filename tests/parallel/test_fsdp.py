"""FSDP2: shards on several processes release what one process would, each with noise of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.sharded import REPLICATED_RUNS, RUNS, STEPS, memory, norm_oracle, results, run
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.skipif(
    not all(hasattr(FSDPModule, name) for name in ("set_custom_reduce_scatter", "reset_iter_state")),
    reason="this torch's FSDP2 cannot keep mini-sets apart; make_private refuses its modules",
)
MESHES = {"pair": (0, 1), "square": (0, 1, 2, 3)}  # (replicas, shards) of the second: ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four processes found in every scenario."""
    return results(tmp_path_factory.mktemp("sharded"))


def of(ranks: list[Any], mesh: str, scenario: str) -> list[Any]:
    return [ranks[r][mesh][scenario] for r in MESHES[mesh]]


@pytest.mark.parametrize(
    ("mesh", "name"), [*(("pair", n) for n in RUNS), *(("square", n) for n in REPLICATED_RUNS)]
)
def test_shards_clip_what_one_process_clips(name: str, mesh: str, ranks: list[Any]) -> None:
    alone = run(name, None).steps(STEPS).found()
    tolerance = 1e-6 if "float32" in name else 1e-12
    for found in of(ranks, mesh, "compare"):
        assert len(found[name]["sums"]) == STEPS
        for together, single in zip(found[name]["sums"], alone["sums"], strict=True):
            assert (together - single).norm() <= tolerance * single.norm()
        assert found[name]["stds"] == pytest.approx(alone["stds"], rel=tolerance)
        assert found[name]["history"] == alone["history"]  # a step is counted once
        assert found[name]["epsilon"] == alone["epsilon"]
        assert (found[name]["weights"] - alone["weights"]).norm() <= 10 * tolerance * alone["weights"].norm()


def test_some_ranks_had_nothing_to_do(ranks: list[Any]) -> None:
    # What the test above rests on: placeholders did occur, and the third layer leaves ranks without a row.
    for name in ("bc, small batches", "gbc, small mini-sets"):
        assert sum(found[name]["empty"] for found in of(ranks, "pair", "compare")) > 1


@pytest.mark.parametrize("mesh", MESHES)
def test_batch_norm_uses_the_statistics_of_each_ranks_part_of_a_mini_set(mesh: str, ranks: list[Any]) -> None:
    for name, size in {"bc": None, "gbc": 6}.items():
        expected = norm_oracle(len(MESHES[mesh]), size)
        for found in of(ranks, mesh, "batch_norm"):
            assert (found[name] - expected).norm() <= 1e-12 * expected.norm()
            assert torch.equal(found["frozen"], torch.zeros(7, dtype=torch.float64))


KINDS = ("torch", "secure", "resumed")
# Two-sided tails of all assertions below together: at most 100 of them at 6.5 standard deviations each, 8e-9.
DEVIATIONS = 6.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_noise_has_the_right_variance_and_is_uncorrelated_across_shards(
    mesh: str, kind: str, ranks: list[Any]
) -> None:
    first, second = (ranks[r][mesh]["noise"][kind]["noise"] for r in (0, 1))
    assert first.numel() > 4000
    for noise in (first, second):
        n = noise.numel()
        assert abs(float(noise.mean())) <= DEVIATIONS / math.sqrt(n)
        assert abs(float(noise.var()) - 1) <= DEVIATIONS * math.sqrt(2 / n)
    n = min(first.shape[1], second.shape[1])
    for a in first:
        for b in second:
            assert abs(float(a[:n] @ b[:n]) / n) <= DEVIATIONS / math.sqrt(n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_no_two_shards_and_no_two_steps_share_a_single_noise_value(
    mesh: str, kind: str, ranks: list[Any]
) -> None:
    drawn = torch.cat([ranks[r][mesh]["noise"][kind]["noise"].flatten() for r in (0, 1)])
    # A shared stream would show however far it is shifted. By chance two of 2 * 10^4 values that differ in
    # steps of 2^-49 are equal with probability 1e-6.
    assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_add_the_same_noise(kind: str, ranks: list[Any]) -> None:
    found = [rank["square"]["noise"][kind]["noise"] for rank in ranks]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_agree_after_fifty_steps_with_streams_of_their_own(mesh: str, ranks: list[Any]) -> None:
    first, *others = of(ranks, mesh, "own_streams")
    assert first["steps"] == 50
    for other in others:
        assert torch.equal(first["weights"], other["weights"])
        assert (first["epsilon"], first["steps"]) == (other["epsilon"], other["steps"])
        assert first["bounds"] == other["bounds"]  # ALC's, estimated together
    assert sum(other["empty"] for other in others) > 0


@pytest.mark.parametrize("mesh", MESHES)
def test_a_gradient_that_is_not_finite_on_one_rank_makes_its_mini_set_zero_on_all(
    mesh: str, ranks: list[Any]
) -> None:
    size = len(MESHES[mesh])
    spoiled = run("gbc, small mini-sets", None)
    expected = spoiled.steps(4, lambda d: float("nan") if d.size // 2 >= size else 1.0).sums()
    assert any(total.norm() > 0 for total in expected)
    for found in of(ranks, mesh, "bad_data"):
        assert all(torch.equal(total, torch.zeros_like(total)) for total in found["bc"])
        # Mini-sets of which the last rank has no part are finite and count.
        for total, whole in zip(found["gbc, small mini-sets"], expected, strict=True):
            assert (total - whole).norm() <= 1e-12 * whole.norm()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["bc", "gbc, small mini-sets"])
def test_what_placeholders_compute_does_not_matter(name: str, mesh: str, ranks: list[Any]) -> None:
    for rank in MESHES[mesh]:
        found = ranks[rank][mesh]
        spoiled, plain = found["bad_data"][f"{name}, placeholders"], found["compare"][name]["sums"]
        assert all(torch.equal(a, b) for a, b in zip(spoiled, plain, strict=True))


def test_what_a_rank_holds_shrinks_with_the_number_of_shards(ranks: list[Any]) -> None:
    alone = memory(None)
    assert alone["held"] == alone["whole"] > 0
    for rank, mesh in ((0, "pair"), (1, "pair"), (3, "square")):
        found = ranks[rank][mesh]["memory"]
        assert found["whole"] == alone["whole"]
        assert found["held"] <= alone["held"] / 2
    assert sum(ranks[r]["pair"]["memory"]["held"] for r in (0, 1)) == alone["held"]


def test_a_step_makes_no_tensor_larger_than_a_shard(ranks: list[Any]) -> None:
    for rank in (0, 1):
        found = ranks[rank]["pair"]["memory"]
        assert found["own"] == 512 * 4 // 2
        # FSDP2 reduces a layer's gradients, weight and bias, into one tensor (whole weight: 2048).
        assert found["largest"] <= (512 * 4 + 512) // 2


def test_what_cannot_be_shown_to_be_private_is_refused(ranks: list[Any]) -> None:
    expected = {
        "root not sharded": "ValueError: a part of this module",
        "built before": "ValueError: optimizer holds parameters",
        "divide factor": "ValueError: this module has a reduction",
        "individual": "ValueError: clipping='flat' needs per-sample gradients",
        "shuffle": "ValueError: sampling='shuffle'",
        "public statistics": "NotImplementedError: batch_norm='public'",
        "private statistics": "NotImplementedError: batch_norm='private'",
        "unprotected": "NotImplementedError: batch_norm='unprotected'",
        "synchronised": "ValueError: 1 is a SyncBatchNorm",
        "unsynchronised": "RuntimeError: something changed how FSDP2 reduces",
        "other reduction": "RuntimeError: something changed how FSDP2 reduces",
        "assigned": "RuntimeError: the gradient of this batch was not reduced",
        "around": "RuntimeError: a loss term uses sharded parameters",
        "chunks": "ValueError: ranks would make different numbers of backwards",
        "local update": "NotImplementedError: local_update of a fully_shard model",
        "checkpoint": "NotImplementedError: checkpoints of fully_shard models",
        "different": "ValueError: make_private's arguments must be the same",
    }
    for found in of(ranks, "pair", "refusals"):
        assert found.keys() == expected.keys()
        for name, message in expected.items():
            assert found[name].startswith(message), (name, found[name])


def test_replicas_that_differ_in_direction_only_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "differ from rank to rank" in rank["square"]["replicas_differ"]["message"]


def test_a_gradient_that_fsdp_held_back_does_not_reach_the_next_draw(ranks: list[Any]) -> None:
    (alone,) = run("bc", None).steps(1).sums()
    for found in of(ranks, "pair", "held_back"):
        assert (found["sums"][0] - alone).norm() <= 1e-12 * alone.norm()


def test_a_finished_model_has_its_own_reduction_back(ranks: list[Any]) -> None:
    assert all(found["plain"] for found in of(ranks, "pair", "finished"))

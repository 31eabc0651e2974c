"""The statement says what was done, what it costs and what it leaves out, and never more than is true."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support import engine
from support.batch_norm import BACKWARD_HOOK_REMARK, PER_LAYER, images, make_private, network, public, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.accounting.display import rounded_up
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.engine.statement import Facts, render, verdict
from opacus_bc.public.data import describe

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
PUBLIC = public()


def facts(**changes: object) -> Facts:
    given = {
        "runs": (),
        "accountant": "fdp",
        "steps": 10,
        "delta": 1e-5,
        "epsilon": 1.0,
        "certified_epsilon": None,
        "mu": 0.3,
        "step_noise": (1.0, 1.0),
        "releases": (),
        "secure_noise": False,
    }
    return Facts(**{**given, **changes})  # type: ignore[arg-type]


def test_the_statement_of_batch_clipping_names_every_part() -> None:
    eng, module, *rest = make_private(network(), batch_norm=PUBLIC, mini_batch_size=8, max_grad_norm=0.5)
    train(module, *rest)
    text = eng.statement(1e-5)
    for part in (
        f"({rounded_up(eng.get_epsilon(1e-5))}, 1e-05)-differential privacy",
        "batch clipping of 2 mini-sets of 8 samples in expectation a step",
        "1 clip group",
        "add/remove one",
        "L2-sensitivity 1; noise multiplier now 1, effective 1",
        "poisson, rate 0.333333, 48 private samples",
        "re-estimated on public data",
        f"40 samples, sha256 {describe(PUBLIC).sha256[:16]}",
        "3 steps with sigma_eff 1, accountant 'fdp'",
        f"mu = {rounded_up(eng.accountant.get_mu(1e-5))}",
        "not cryptographic",
        "the number of steps and every noise",
        "Not covered",
        "validation or early stopping",
    ):
        assert part in text, part


def test_json_and_markdown_say_the_same() -> None:
    eng, module, *rest = make_private(network(), batch_norm=PUBLIC)
    train(module, *rest)
    data = json.loads(eng.statement(1e-5, format="json"))
    assert data["epsilon"] == eng.get_epsilon(1e-5)
    assert data["steps"] == 3
    run = data["runs"][0]
    assert run["public_data"][0]["size"] == 40
    assert run["adjacency"] == "add/remove one"
    assert run["effective_noise_multiplier"] == pytest.approx(1.0)
    markdown = eng.statement(1e-5, format="markdown")
    assert markdown.startswith("## Privacy statement\n\n| | |\n|---|---|\n| Guarantee | ")
    assert data["verdict"] in markdown
    titles = [line.split(": ")[0] for line in eng.statement(1e-5).splitlines()]
    rows = markdown.splitlines()[4:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == titles
    assert all(row.count(" | ") == 1 and row.endswith(" |") for row in rows)
    with pytest.raises(ValueError, match="format must be one of 'text', 'markdown', 'json', got 'html'"):
        eng.statement(1e-5, format="html")


def test_individual_clipping_states_its_own_sensitivity() -> None:
    eng, module, *rest = make_private(network(), batch_norm=PUBLIC, clipping="flat", max_grad_norm=0.5)
    train(module, *rest)
    text = eng.statement(1e-5)
    assert "individual clipping ('flat')" in text
    assert "L2-sensitivity 0.5" in text
    assert "every sample's gradient is its own" in text
    eng, *_ = make_private(network(), batch_norm=PUBLIC, **PER_LAYER)
    assert f"L2-sensitivity {math.sqrt(10):g}" in eng.statement(1e-5)


def test_shuffled_data_state_replace_one_and_half_the_noise_for_individual_clipping() -> None:
    eng, *_ = make_private(network(), batch_norm=PUBLIC, clipping="flat", poisson_sampling=False)
    text = eng.statement(1e-5)
    assert "one sample (replace one); L2-sensitivity 2; noise multiplier now 1, effective 0.5" in text
    assert "shuffle" in text


def test_no_epsilon_is_rounded_down() -> None:
    text = render(facts(epsilon=7.9954901, mu=1.00001))
    assert "(7.996, 1e-05)-differential privacy" in text
    assert "7.9955 at delta" in text
    assert "mu = 1.001" in text
    assert "99.13" in verdict(facts(epsilon=99.121))


def test_statistics_that_are_not_released_yet_are_not_said_to_be_counted() -> None:
    eng, module, *rest = make_private(network(), batch_norm="private")
    train(module, *rest)
    before = eng.get_epsilon(1e-5)
    assert "not released yet" in eng.statement(1e-5)
    eng.recalibrate_batch_norm()
    assert "counted in epsilon" in eng.statement(1e-5)
    assert eng.get_epsilon(1e-5) > before
    train(module, *rest)
    assert "not released yet" in eng.statement(1e-5)  # those that were released are of earlier weights
    eng.finalize(module)
    assert "counted in epsilon" in eng.statement(1e-5)


def test_releases_of_running_statistics_are_listed_and_are_no_steps() -> None:
    eng, module, *rest = make_private(network(), batch_norm="private")
    train(module, *rest)
    eng.recalibrate_batch_norm(noise_multiplier=20.0)
    text = eng.statement(1e-5)
    assert (
        f"3 steps with sigma_eff 1 and 1 release of running statistics (sigma_eff {20 / math.sqrt(2):g})"
        in text
    )


def test_a_noise_schedule_is_stated_as_what_was_used() -> None:
    eng, module, optimizer, criterion, loader = make_private(network(), batch_norm=PUBLIC)
    for sigma in (2.0, 1.5, 3.0):
        optimizer.noise_multiplier = sigma
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    assert "9 steps with sigma_eff 1.5 to 3, accountant" in eng.statement(1e-5)


def test_gradients_through_public_statistics_are_stated() -> None:
    eng, *_ = make_private(network(), clipping="flat", batch_norm=PUBLIC)
    assert "follows these statistics into the last layers that feed them by channel" in eng.statement(1e-5)
    config = PublicStatistics(loader=PUBLIC, differentiate=False)
    eng, *_ = make_private(network(), clipping="flat", batch_norm=config)
    assert "feed them by channel" not in eng.statement(1e-5)


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_an_approximate_accountant_is_shown_beside_the_certified_value() -> None:
    with pytest.warns(UserWarning, match="central-limit"):
        eng = engine(accountant="gdp")
    _, module, *rest = make_private(network(), batch_norm="batch", eng=eng)
    train(module, *rest)
    data = json.loads(eng.statement(1e-5, format="json"))
    assert data["certified_epsilon"] > data["epsilon"]
    assert f"({rounded_up(data['certified_epsilon'])}, 1e-05)" in data["verdict"]
    assert "an approximation, no bound" in eng.statement(1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 49.0}, "(49, 1e-05)-differential privacy"),
        ({"epsilon": 51.0}, "no meaningful protection"),
        ({"epsilon": math.inf}, "no protection"),
        ({"epsilon": 3.0, "certified_epsilon": 60.0}, "no meaningful protection"),
    ],
)
def test_the_verdict_does_not_call_a_useless_epsilon_protection(
    changes: dict[str, float], words: str
) -> None:
    assert words in verdict(facts(**changes))
    assert words in render(facts(**changes))


def test_a_run_without_noise_has_no_protection() -> None:
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        eng, module, *rest = make_private(network(), batch_norm="batch", noise_multiplier=0.0)
    train(module, *rest)
    assert "no protection" in eng.statement(1e-5)


def test_before_the_first_step_nothing_is_spent() -> None:
    eng, *_ = make_private(network(), batch_norm="frozen")
    assert json.loads(eng.statement(1e-5, format="json"))["epsilon"] == 0.0


def test_public_data_of_adaptive_clipping_is_listed_once() -> None:
    eng, *_ = make_private(network(), alc=PUBLIC)
    assert eng.statement(1e-5).count("sha256") == 1
    other = public(24)
    eng, *_ = make_private(network(), alc=PUBLIC, batch_norm=other)
    assert eng.statement(1e-5).count("sha256") == 2


def test_a_model_without_batch_norm_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    eng, *_ = make_private(model, images())
    assert "keeps no running statistics" in eng.statement(1e-5)


def test_the_trade_off_curve_comes_from_the_fdp_accountant_only() -> None:
    eng, module, *rest = make_private(network(), batch_norm="batch")
    train(module, *rest)
    assert eng.get_tradeoff().epsilon(1e-5) == pytest.approx(eng.get_epsilon(1e-5), rel=1e-2)
    eng, *_ = make_private(network(), batch_norm="batch", accountant="rdp")
    with pytest.raises(ValueError, match="accountant='rdp' has no trade-off curve"):
        eng.get_tradeoff()


def test_before_the_first_step_the_statement_claims_nothing() -> None:
    eng, *_ = make_private(network(), batch_norm=PUBLIC)
    assert "nothing was released yet" in eng.statement(1e-5)
    assert "differential privacy" not in verdict(facts(steps=0, epsilon=0.0))
    assert "differential privacy" in verdict(facts(steps=0, releases=(2.0,)))


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)])
def test_a_statement_says_where_opacus_own_rounding_is_not_covered(generator):
    maker = engine()
    model = nn.Linear(4, 2)
    maker.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=generator,
    )
    assert ("float32 norms" in maker.statement(1e-3)) == (generator is not None)

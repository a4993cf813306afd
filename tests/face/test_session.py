"""A script's own loop on three unequal workers computes what it computes on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput
from hetopt.core.events.log import read_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.step_samples import Configuration, parse_line
from hetopt.trainer.session import session
from tests.forks import all_end_well

from .session_program import ALONE, EXCHANGES, SCRIPTS, Points, Script, network, train

WORKERS = 3

Crew = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """What each worker of the program came to, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("session")
    program = ("-m", "tests.face.session_program")
    all_end_well(*([*program, str(rank), str(WORKERS), str(folder)] for rank in range(WORKERS)))
    return folder, [torch.load(folder / f"results-{rank}.pt", weights_only=True) for rank in range(WORKERS)]


AVERAGED = Script(drop_last=True)
"""Where workers average after every step: a sum of gradients, to rounding, whatever the shares.

The optimizer is linear in the gradient.
"""


@pytest.mark.parametrize(
    ("name", "script", "tolerance"),
    [
        *(pytest.param(name, script, 2e-6, id=name) for name, script in SCRIPTS.items()),
        *(pytest.param(name, AVERAGED, 1e-5, id=name) for name in ("local-sgd(1)", "selsync(0,vote_lag=0)")),
    ],
)
def test_three_unequal_workers_compute_what_one_machine_does(
    name: str, script: Script, tolerance: float, crew: Crew
) -> None:
    losses, parameters = train(script, None)
    for told in crew[1]:
        assert told[name][0] == pytest.approx(losses, rel=tolerance, abs=tolerance)
        assert torch.allclose(told[name][1], parameters, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*EXCHANGES, *ALONE, "overflow", "skipped alone"])
def test_whatever_is_sent_workers_end_alike_and_have_learned(name: str, crew: Crew) -> None:
    losses = crew[1][0][name][0]
    assert sum(losses[-7:]) < 0.75 * sum(losses[:7])
    assert all(torch.equal(told[name][1], crew[1][0][name][1]) for told in crew[1])


def test_workers_that_train_for_themselves_do_not_do_the_same(crew: Crew) -> None:
    """Guards the comparison above: fewer averages give another model."""
    assert not torch.allclose(crew[1][0]["local-sgd(4)"][1], crew[1][0]["local-sgd(1)"][1], rtol=1e-3)


@pytest.mark.parametrize("name", ["auto", "warm_up"])
def test_what_is_sent_is_decided_alike_on_the_way(name: str, crew: Crew) -> None:
    assert all(torch.equal(told[name], crew[1][0][name]) for told in crew[1])
    events = read_events(crew[0] / name / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    if name == "auto":
        assert steps[0]["steps"] < RunSpec.model_fields["control_period_steps"].default, "the first look is early"
        return
    ratios = [event["exchange"]["ratio"] for event in steps]
    changes = [event for event in events if event["event"] == "exchange_changed"]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > ratios[-1] == 0.01
    assert [change["after"] for change in changes][-1] == steps[-1]["exchange"]["way"]


def test_a_slow_worker_gets_a_smaller_share(crew: Crew) -> None:
    shares = crew[1][0]["shares"]
    assert sum(shares) == 48
    assert all(told["shares"] == shares for told in crew[1])
    assert shares[2] <= 9 < 16 <= min(shares[:2])


def test_a_session_leaves_events_and_step_times_behind(crew: Crew) -> None:
    folder = crew[0] / "record"
    events = read_events(folder / "events.jsonl")
    names = [event["event"] for event in events]
    assert names[:2] == ["run_started", "training_started"]
    assert {"step", "shares_changed", "session_finished"} <= set(names)
    steps = [event for event in events if event["event"] == "step"]
    assert steps[-1]["exchange"]["dense_bytes"] == 4 * sum(p.numel() for p in network().parameters())
    lines = (folder / "steps.jsonl").read_text().splitlines()
    assert len(lines) == len(steps)
    assert parse_line(Configuration, lines[0]).workers == WORKERS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compression": "topkk"}, "topkk"),
        ({"compression": "topk:lots"}, "compression: ratio must be a fraction, got 'lots'"),
        ({"sync": "asp"}, "no synchronisation called 'asp'"),
        ({"sync": "local-sgd(0)"}, "sync: every must be greater than 0"),
        ({"sync": "local-sgd(8,stretch=1.5)"}, "sets its own learning rates"),
        ({"compression": "auto:0.1"}, "no ratio"),
        ({"spec": "no-such-file.json"}, "no-such-file.json"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(change: dict[str, Any], said: str) -> None:
    model = network()
    with pytest.raises(BadInput, match=said):
        session(model, torch.optim.SGD(model.parameters(), lr=0.1), **change)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = network()
    with session(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        (batch,) = [next(iter(run.loader(DataLoader(Points(), batch_size=8))))]
        with pytest.raises(BadInput, match="scalar"):
            run.backward(model(batch[0]))

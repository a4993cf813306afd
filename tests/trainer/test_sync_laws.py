"""Laws of training by workers that average parameters, see parts of the data, and hand samples on."""

from __future__ import annotations

import pytest
import torch

from hetopt.core.run_spec import Injection, Partition
from hetopt.trainer.checkpoints.folder import rank_file, unpack
from hetopt.trainer.data.cursor import make_parts
from hetopt.trainer.steps.local_batch import drawn_samples, given_samples

from .scenarios import (
    HALF_STEPS,
    LONG_STEPS,
    SCENARIOS,
    SHARES,
    SHORT_STEPS,
    STEPS,
    SYNC_SCENARIOS,
    WORLD_SIZE,
    Crew,
    run_crew,
)
from .toy_task import TRAINING_SAMPLES


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """What three workers left behind that trained all of these one after another."""
    dense = next(each for each in SCENARIOS if each["name"] == "dense")
    return run_crew(tmp_path_factory.mktemp("sync"), [dense, *SYNC_SCENARIOS], splits=[])


MODEL_BYTES = 4 * (6 * 16 + 16 + 16 + 1)


def told(crew: Crew, name: str, key: str) -> float:
    return sum(event["sync"][key] for event in crew.events(name, "step") if "sync" in event)


@pytest.mark.parametrize("name", ["selsync-0", "local-sgd-1"])
def test_averaging_after_every_step_is_bsp_to_rounding(crew: Crew, name: str) -> None:
    """SGD with momentum is linear in the gradient; the toy's batches have three unequal shares."""
    own, dense = crew.state(name)["model"], crew.state("dense")["model"]
    for key, value in dense.items():
        torch.testing.assert_close(own[key], value, rtol=2e-4, atol=2e-5)
    assert told(crew, name, "synchronised") == STEPS
    assert crew.stream(name) == crew.stream("dense")


def test_a_delta_that_is_never_reached_sends_nothing_but_votes(crew: Crew) -> None:
    assert told(crew, "selsync-never", "synchronised") == 0
    assert told(crew, "selsync-never", "local") == SHORT_STEPS
    assert told(crew, "selsync-never", "sent_bytes") == SHORT_STEPS * 8
    assert crew.finished("selsync-never")["metrics"]["mse"] < 0.3


def test_parameters_travel_only_where_models_are_averaged(crew: Crew) -> None:
    for name, vote_bytes in (("fedavg", 0), ("selsync-auto", 8), ("selsync", 8)):
        times = told(crew, name, "synchronised")
        assert 0 < times < STEPS
        assert told(crew, name, "sent_bytes") == STEPS * vote_bytes + times * (MODEL_BYTES + 4)
    assert (
        told(crew, "selsync-auto", "synchronised") <= 0.45 * STEPS
    )  # a quarter was wished, and the first five are given


def test_averages_that_begin_and_end_leave_replicas_that_are_hashed_alike(crew: Crew) -> None:
    """Every step on summed gradients compares the bits of all parameters; what was held back is sent before."""
    turns = [(event["before"], event["after"]) for event in crew.events("turns", "exchange_changed")]
    assert [("every 3 steps" in before, "every 3 steps" in after) for before, after in turns[-3:]] == [
        (False, True), (True, False), (False, True)
    ]  # fmt: skip
    told = [("sync" in event, "exchange" in event) for event in crew.events("turns", "step")]
    assert {(True, False), (False, True)} <= set(told)


@pytest.mark.parametrize("name", ["selsync", "local-buffers", "outer", "turns"])
def test_a_resumed_run_of_local_steps_ends_where_an_uninterrupted_one_does_to_the_bit(crew: Crew, name: str) -> None:
    whole, resumed = crew.finished(name), crew.finished(f"{name}-resumed")
    assert [event["resumed_step"] for event in crew.events(f"{name}-resumed", "run_started")] == [0, HALF_STEPS]
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert resumed["metrics"] == whole["metrics"]


def test_shares_follow_the_speeds_of_workers_that_train_for_themselves(crew: Crew) -> None:
    """The third takes eight times as long a sample; nobody waits for anybody in most steps."""
    last = crew.events("local-uneven", "step")[-1]["local_batch_sizes"]
    assert last[2] < last[0] / 3
    assert sum(last) == 60


def test_averages_may_be_rounded_and_what_rounding_left_goes_with_the_next(crew: Crew) -> None:
    """The same averages as in fp32, in less than half of the bytes even of a model of a hundred parameters."""
    assert told(crew, "rounded", "synchronised") == told(crew, "local-buffers", "synchronised") == LONG_STEPS // 7
    assert told(crew, "rounded", "sent_bytes") < told(crew, "local-buffers", "sent_bytes") / 2
    rounded, whole = (crew.finished(name)["metrics"]["mse"] for name in ("rounded", "local-buffers"))
    assert rounded == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("name", ["shards", "seldp"])
def test_every_worker_trains_on_its_own_stream_across_an_interruption(crew: Crew, name: str) -> None:
    parts = make_parts(Partition(name=name), size=TRAINING_SAMPLES, weights=SHARES, seed=0)
    assert parts is not None
    for rank, share in enumerate(SHARES):
        seen = crew.samples(name, rank)
        stream: list[int] = []
        turn = 0
        while len(stream) < len(seen):
            stream += parts(rank, turn).tolist()
            turn += 1
        assert seen == stream[: len(seen)]
        assert len(seen) == share * (SHORT_STEPS if name == "shards" else STEPS)


def test_workers_train_on_what_others_hand_them_and_the_bytes_are_counted(crew: Crew) -> None:
    injection = Injection(workers=0.5, samples=0.5)
    parts = make_parts(Partition(name="shards"), size=TRAINING_SAMPLES, weights=SHARES, seed=0)
    assert parts is not None
    own = [set(parts(rank, 0).tolist()) for rank in range(WORLD_SIZE)]
    drawn = drawn_samples(injection, SHARES)
    gifts = [given_samples(injection, drawn, seed=0, position=step * sum(drawn)) for step in range(SHORT_STEPS)]
    for rank in range(WORLD_SIZE):
        received = sum(sum(given) - given[rank] for given in gifts)
        seen = crew.samples("injection", rank)
        assert len(seen) == SHORT_STEPS * drawn[rank] + received
        assert sum(index not in own[rank] for index in seen) == received
    events = [event["injection"] for event in crew.events("injection", "step") if "injection" in event]
    handed = sum(2 * sum(given) for given in gifts)
    assert sum(event["samples"] for event in events) == handed
    assert sum(event["sent_bytes"] for event in events) == handed * (6 * 4 + 4 + 8)  # inputs, target, index


def test_a_checkpoint_holds_the_average_and_each_workers_own(crew: Crew) -> None:
    folder = crew.folder / "local-buffers" / "checkpoint"
    latest = folder / (folder / "LATEST").read_text().strip()
    owns = [unpack((latest / rank_file(rank)).read_bytes())["local"] for rank in range(WORLD_SIZE)]
    assert not torch.equal(owns[0]["own"], owns[1]["own"])
    samples = owns[0]["samples"]
    mean = sum(own["own"].double() * count for own, count in zip(owns, samples, strict=True)) / sum(samples)
    model = crew.state("local-buffers")["model"]
    weight = next(iter(model.values())).reshape(-1)
    torch.testing.assert_close(mean[: len(weight)].float(), weight, rtol=1e-4, atol=1e-6)

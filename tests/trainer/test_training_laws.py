"""Laws of training runs by three unequal workers, read off what their processes left behind."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetopt.core.run_folder import MODEL_FILE, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.trainer import worker
from hetopt.trainer.data.cursor import SampleCursor

from . import toy_task
from .scenarios import CRITICAL_EPOCHS, HALF_STEPS, SPLITS, STEERED_RUNS, TOPK, WORLD_SIZE, Crew, toy_spec


def big_batch_gradient(
    samples: int, loss: Callable[..., torch.Tensor] | None = None, *, of: tuple[int, int] | None = None
) -> torch.Tensor:
    """The gradient of one machine with the whole first global batch, or a part of it, in double precision."""
    torch.manual_seed(0)
    task = toy_task.wide()
    model = task.model().double()
    indices = SampleCursor(toy_task.TRAINING_SAMPLES, 0).take([samples]).slice(0).tolist()[slice(*of or (None,))]
    inputs, targets, chosen = task.data(None).train.gather(indices)
    (loss or task.loss)(model, (inputs.double(), targets.double(), chosen)).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("form", ["bucketed", "fused"])
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_any_split_gives_the_gradient_of_the_whole_batch(crew: Crew, form: str, shares: list[int]) -> None:
    expected = big_batch_gradient(sum(shares))
    for rank in range(WORLD_SIZE):
        gradient = torch.load(crew.folder / f"gradients-{rank}.pt", weights_only=True)[f"{form} {shares}"]
        assert (gradient.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("form", ["bucketed", "fused"])
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_norms_are_those_of_a_worker_s_part_and_of_the_sum(crew: Crew, form: str, shares: list[int]) -> None:
    for rank, share in enumerate(shares):
        norms = json.loads((crew.folder / f"norms-{rank}.json").read_text())[f"{form} {shares}"]
        part = big_batch_gradient(sum(shares), of=(sum(shares[:rank]), sum(shares[: rank + 1]))) if share else None
        own = 0.0 if part is None else float((share / sum(shares) * part).square().sum())
        assert norms[:2] == pytest.approx([own, float(big_batch_gradient(sum(shares)).square().sum())], rel=1e-5)


@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_any_split_gives_the_mean_over_what_a_loss_counts(crew: Crew, shares: list[int]) -> None:
    """A sum and its count: over some of the samples, unequally many on the workers."""
    expected = big_batch_gradient(sum(shares), toy_task.mean_of_chosen)
    for rank in range(WORLD_SIZE):
        gradient = torch.load(crew.folder / f"gradients-{rank}.pt", weights_only=True)[f"counted {shares}"]
        assert (gradient.double() - expected).norm() <= 1e-6 * expected.norm()


def test_numbers_that_travel_beside_gradients_arrive_whole_and_alike(crew: Crew) -> None:
    gathered = [json.loads((crew.folder / f"gathered-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    assert repr(gathered[0]) == repr(gathered[1]) == repr(gathered[2])
    for step, rows in enumerate(gathered[0]):
        expected = [[rank, step, math.nan if step % 7 == rank else 0.1 * step] for rank in range(WORLD_SIZE)]
        assert repr(rows) == repr([[float(value) for value in row] for row in expected])


FUSED_RUNS = ["dense", "topk", "unused", "bf16-precision", "fp16-precision", "paced", "buffers", "ahead"]
BUCKETED_RUNS = ["wide", "wide-fp16"]


@pytest.mark.parametrize(
    "name", [*FUSED_RUNS, *BUCKETED_RUNS, *STEERED_RUNS, "dgc", "bf16", "qsgd_maxnorm", "critical"]
)
def test_replicas_are_bit_identical_whenever_they_evaluate(crew: Crew, name: str) -> None:
    replicas = [(crew.folder / name / f"fingerprints-{rank}").read_text().splitlines() for rank in range(WORLD_SIZE)]
    assert len(replicas[0]) > 3
    assert replicas[0] == replicas[1] == replicas[2]
    assert len(set(replicas[0])) > 3, "the model does not change"


@pytest.mark.parametrize("name", ["dense", "topk", "buffers", "wide", "warm_up", "qsgd_maxnorm"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does_to_the_bit(crew: Crew, name: str) -> None:
    whole, resumed = crew.finished(name), crew.finished(f"{name}-resumed")
    assert [event["resumed_step"] for event in crew.events(f"{name}-resumed", "run_started")] in (
        [0, HALF_STEPS],
        [0, 17],
    )
    assert resumed["step"] == whole["step"]
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert crew.stream(f"{name}-resumed") == crew.stream(name)


@pytest.mark.parametrize("name", ["dense", "dense-resumed", "topk-resumed", "paced", "ahead"])
def test_every_sample_is_computed_exactly_once_an_epoch(crew: Crew, name: str) -> None:
    stream = crew.stream(name)
    assert len(stream) == crew.finished(name)["step"] * crew.events(name, "run_started")[0]["global_batch_size"]
    size = toy_task.TRAINING_SAMPLES
    epochs = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    assert len(epochs) > 6
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "epochs are shuffled alike"


def assert_same_but_for_rounding(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in one)


@pytest.mark.parametrize(("whole", "cut"), [("dense", "micro"), ("wide-memory", "wide-micro")])
def test_micro_batches_change_nothing_but_rounding(crew: Crew, whole: str, cut: str) -> None:
    assert_same_but_for_rounding(crew.state(whole)["model"], crew.state(cut)["model"])


def test_reading_ahead_changes_nothing(crew: Crew) -> None:
    assert crew.finished("ahead-fixed")["parameters_sha256"] == crew.finished("dense")["parameters_sha256"]
    assert crew.stream("ahead-fixed") == crew.stream("dense")
    changes = crew.events("ahead", "shares_changed")
    assert changes, "shares did not change"


@pytest.mark.parametrize("form", ["", "buffers-", "wide-"])
def test_running_out_of_memory_is_as_being_told_the_bound(crew: Crew, form: str) -> None:
    """What was computed until then leaves no trace: no gradient, no running statistic, no random number."""
    found, told = crew.finished(f"{form}memory"), crew.finished(f"{form}memory-told")
    assert found["parameters_sha256"] == told["parameters_sha256"]
    learned = crew.events(f"{form}memory", "memory_bound_learned")
    assert [(event["rank"], event["samples"]) for event in learned] == [(0, 4)]
    assert crew.state(f"{form}memory")["memory_bounds"] == (4, 0, 0)
    assert not crew.events(f"{form}memory-told", "memory_bound_learned")


@pytest.mark.parametrize("name", ["memory", "memory-later"])
def test_no_sample_is_lost_or_counted_twice_where_memory_runs_out(crew: Crew, name: str) -> None:
    for rank in range(WORLD_SIZE):
        assert crew.samples(name, rank) == crew.samples("dense", rank)


@pytest.mark.parametrize(("later", "never"), [("memory-later", "dense"), ("wide-memory-later", "wide-memory")])
def test_memory_that_runs_out_later_changes_nothing_but_rounding(crew: Crew, later: str, never: str) -> None:
    learned = crew.events(later, "memory_bound_learned")
    assert [(event["rank"], event["samples"]) for event in learned] == [(0, 4)]
    assert learned[0]["step"] > 10
    assert_same_but_for_rounding(crew.state(later)["model"], crew.state(never)["model"])


def test_a_parameter_that_is_not_used_stays_as_it_was(crew: Crew) -> None:
    torch.manual_seed(0)
    initial = toy_task.partly_unused().model().state_dict()
    final = crew.state("unused")["model"]
    for name, before in initial.items():
        assert torch.equal(final[name], before) == name.startswith("unused"), name


def test_a_run_ends_at_its_target(crew: Crew) -> None:
    last = crew.finished("target")
    assert last["reason"] == "target"
    assert last["metrics"]["mse"] <= 0.05
    assert last["epoch"] < 50
    assert all(event["metrics"]["mse"] > 0.05 for event in crew.events("target", "evaluated")[:-1])


def test_a_loss_that_is_not_finite_ends_the_run_with_one_sentence(crew: Crew) -> None:
    failures = crew.events("diverging", "run_failed")
    assert len(failures) == WORLD_SIZE, "workers disagree"
    for failure in failures:
        assert "the loss is" in failure["reason"] or "no longer finite" in failure["reason"]
        assert "\n" not in failure["reason"]
    assert not crew.events("diverging", "training_finished")
    assert all(math.isfinite(event["loss"]) for event in crew.events("diverging", "step"))


@pytest.mark.parametrize("name", ["drifting_rate", "drifting_model"])
def test_a_worker_that_drifts_away_is_named_within_a_period(crew: Crew, name: str) -> None:
    failures = crew.events(name, "run_failed")
    assert len(failures) == WORLD_SIZE, "workers disagree"
    for failure in failures:
        assert "worker 0 has other values of its parameters" in failure["reason"]
    assert not crew.events(name, "training_finished")


def test_sparse_gradients_are_summed_as_dense_ones(crew: Crew) -> None:
    assert_same_but_for_rounding(crew.state("sparse")["model"], crew.state("rows")["model"])


def test_the_controller_evens_out_paces(crew: Crew) -> None:
    """A sample takes the workers 1, 1 and 8 ms, so the ideal shares of 60 are 28, 28 and 4, or nearly."""
    changes = crew.events("paced", "shares_changed")
    assert changes
    assert all(sum(change["after"]) == 60 for change in changes)
    assert changes[0]["step"] <= 30, "two looks at the statistics should do"
    last = crew.state("paced")["shares"]
    assert 2 <= last[2] <= 6
    assert min(last[:2]) >= 24
    steps = crew.events("paced", "step")
    before_s = [max(step["wait_s"]) for step in steps if step["step"] <= changes[0]["step"]]
    after_s = [max(step["wait_s"]) for step in steps if step["step"] > changes[-1]["step"]]
    assert statistics.median(after_s) < statistics.median(before_s)


def test_a_batch_that_follows_the_noise_ends_where_the_planned_one_would_and_goes_on_as_it_was(crew: Crew) -> None:
    """Whether it grows is a matter of times, which are this machine's."""
    steps, size = crew.events("critical", "step"), toy_task.TRAINING_SAMPLES
    ends = [event["planned_step"] for event in steps if event["step"] == crew.finished("critical")["step"]]
    planned = CRITICAL_EPOCHS[-1] * size / 16
    assert planned <= ends[-1] < planned + steps[-1]["worth"]
    for before, after in itertools.pairwise(steps):
        gained = after["planned_step"] - before["planned_step"]
        assert gained <= after["steps"] * max(before["worth"], after["worth"]) + 0.02
        assert after["learning_rate_scale"] == pytest.approx(0.2 * after["worth"], rel=1e-3)
    stream = crew.stream("critical")
    assert sorted(stream[size : 2 * size]) == list(range(size))
    assert len(stream) == round(crew.finished("critical")["epoch"] * size)


def test_the_model_is_left_in_the_run_folder(crew: Crew) -> None:
    model = toy_task.plain().model()
    model.load_state_dict(load_file(crew.folder / "dense" / MODEL_FILE))
    evaluation = toy_task.plain().data(None).evaluation
    with torch.no_grad():
        square = float((model(evaluation.inputs) - evaluation.targets).square().mean())
    assert square == pytest.approx(crew.finished("dense")["metrics"]["mse"], rel=1e-4)


def test_a_run_of_three_workers_can_go_on_with_one(
    crew: Crew, tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, run_dir = Crew(tmp_path), tmp_path / "run"
    shutil.copytree(crew.folder / "topk-half", run_dir)
    monkeypatch.setenv("TOY_RECORD", str(tmp_path / "record"))
    spec = toy_spec(shares=(16,), compression=TOPK, stop={"max_steps": HALF_STEPS + 17})
    write_spec(run_dir, RunSpec.model_validate_json(json.dumps(spec)))
    assert worker.main([str(run_dir)]) == 0
    assert alone.events("run", "run_started")[-1]["resumed_step"] == HALF_STEPS
    assert (alone.finished("run")["step"], alone.finished("run")["reason"]) == (HALF_STEPS + 17, "steps")
    samples = [int(index) for index in (tmp_path / "record").read_text().split()]  # behind those that it warms up with
    assert samples[-17 * 16 :] == crew.stream("topk")[HALF_STEPS * 16 : (HALF_STEPS + 17) * 16], (
        "the data goes on where it stood"
    )


def test_nothing_is_lost_on_the_way_from_one_exchange_to_another(crew: Crew) -> None:
    """The model stands still, so what was sent in all must be the gradient as often as there were steps.

    Buckets in bf16 lose their rounding, in six of them.
    """
    sent = [torch.load(crew.folder / f"switched-{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    for other in sent[1:]:
        assert torch.equal(sent[0], other)
    dense = sent[0][0].double()
    total = sent[0].double().sum(0)
    assert (total - len(sent[0]) * dense).norm() <= (1e-5 * len(sent[0]) + 6 * 2**-9) * dense.norm()
    torch.testing.assert_close(sent[0][-1].double(), dense, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sent[0][3].double(), dense), "a thin exchange does not send everything"


@pytest.mark.parametrize("name", STEERED_RUNS)
def test_every_change_is_told_with_its_reason(crew: Crew, name: str) -> None:
    seen = [event["exchange"]["way"] for event in crew.events(name, "step") if "exchange" in event]
    for change in crew.events(name, "exchange_changed"):
        assert change["before"] != change["after"]
        assert change["reason"]
    changed_to = {change["after"] for change in crew.events(name, "exchange_changed")}
    first = seen[0]
    assert set(seen) <= {first} | changed_to


def test_events_tell_what_was_sent(crew: Crew) -> None:
    for name in ("cheapest", "wide", "dgc", "bf16"):
        events = [event["exchange"] for event in crew.events(name, "step") if "exchange" in event]
        assert events
        for event in events:
            assert 0 < event["gain"] <= 1
            assert event["sent_bytes"] > 0
            assert event["sync_s"] > 0
        assert {event["sent_bytes"] < event["dense_bytes"] for event in events} == {name != "wide"}
    network, *_ = crew.events("cheapest", "network_measured")  # a busy machine measures again
    assert {timing["collective"] for timing in network["timings"]} == {"all_reduce", "all_gather", "broadcast"}


def test_the_momentum_is_kept_by_the_workers(crew: Crew) -> None:
    """The optimizer has none left, and training goes on all the same."""
    state = crew.state("dgc")
    assert [group["momentum"] for group in state["optimizer"]["param_groups"]] == [0.0]
    losses = [event["loss"] for event in crew.events("dgc", "step")]
    assert losses[-1] < 0.5 * losses[0]

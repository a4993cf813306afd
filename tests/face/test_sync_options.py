"""What a person types about synchronisation, partition and injection, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetopt.api.changes import into_plan, synchronized
from hetopt.api.options import Changes
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.core.synchronization import Injection, Partition, Synchronization, spell_partition, spell_sync
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.local_steps import communication, exposed_s
from tests.face.conftest import RECORDED

pytestmark = pytest.mark.usefixtures("small_catalogue")

WORKER = WorkerSpec(host="a", type="local", local_batch_size=32)
RUN = RunSpec(task="digits", workers=(WORKER,) * 4, stop=StopRule(max_steps=10))

SPELLED = {
    "bsp": Synchronization(),
    "local-sgd(16)": Synchronization(name="local-sgd", every_steps=16),
    "fedavg(0.5, 0.125)": Synchronization(name="fedavg", participants=0.5, every_epochs=0.125),
    "ssp(7)": Synchronization(name="ssp", staleness=7),
    "selsync(0.3)": Synchronization(name="selsync"),
    "selsync(never)": Synchronization(name="selsync", delta="never"),
    "selsync(auto, share=0.2, votes=majority, max_local=50, vote_lag=0)": Synchronization(
        name="selsync", delta="auto", synchronised_share=0.2, votes="majority", max_local_steps=50, vote_lag=0
    ),
    "selsync(auto, share=0.2, stretch=1.25)": Synchronization(
        name="selsync", delta="auto", synchronised_share=0.2, stretch=1.25
    ),
    "local-sgd(8, fragments=4)": Synchronization(name="local-sgd", fragments=4),
    "local-sgd(8, momentum=average, buffers=keep)": Synchronization(
        name="local-sgd", momentum="average", buffers="keep"
    ),
}


@pytest.mark.parametrize("text", SPELLED)
def test_what_is_spelled_is_read_and_the_other_way_round(text: str) -> None:
    assert Changes(sync=text).sync == SPELLED[text]
    assert spell_sync(SPELLED[text]) == text


def test_partitions_and_injection_are_read() -> None:
    changes = Changes(partition="labels(2)", inject="0.5, 0.25")
    assert changes.partition == Partition(name="labels", labels=2)
    assert changes.inject == Injection(workers=0.5, samples=0.25)
    assert spell_partition(Partition(name="dirichlet", alpha=0.1)) == "dirichlet(0.1)"
    assert spell_partition(Partition(name="seldp")) == "seldp"
    assert Changes(sync=" selsync( auto , share = 0.2 ) ").sync == Synchronization(
        name="selsync", delta="auto", synchronised_share=0.2
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("selsnyc(0.3)", None, None), "no synchronisation called 'selsnyc'"),
        (("selsync(0.3", None, None), "a name with its values in parentheses"),
        (("selsync(0.3,0.4)", None, None), "a value too many: '0.4'"),
        (("selsync(0.3,delta=0.4)", None, None), "says twice what delta is"),
        (("local-sgd(0)", None, None), "every must be greater than 0, got '0'"),
        (("local-sgd(8,delta=1)", None, None), "no option of local-sgd called 'delta'"),
        (("local-sgd(8,fragments=3)", None, None), "3 fragments cannot leave one after the other in 8 steps"),
        (("selsync(-1)", None, None), "delta must be greater than or equal to 0 or 'auto' or 'never', got '-1'"),
        (("bsp(3)", None, None), "a value too many"),
        ((None, "labels(none)", None), "labels must be a valid integer, got 'none'"),
        ((None, "dirichlet(0)", None), "alpha must be greater than 0, got '0'"),
        ((None, None, "0.5"), "two fractions"),
        ((None, None, "0.5,1.5"), "samples must be less than or equal to 1, got '1.5'"),
        ((None, None, "0,0.5"), "workers must be greater than 0, got '0'"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(options, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        Changes(**dict(zip(("sync", "partition", "inject"), options, strict=True)))
    assert said in str(caught.value)


def test_a_plans_compression_gives_way_to_local_steps_but_not_one_that_was_asked_for() -> None:
    planned = RUN.model_copy(
        update={"compression": Compression(name="topk", ratio=0.01), "ratio_policy": "auto"},
    )
    run = synchronized(Changes(sync="selsync(0.3)"), planned)
    assert run.is_local
    assert (run.compression, run.ratio_policy) == (Compression(), "fixed")
    assert not run.steers_exchange
    with pytest.raises(BadInput, match="leave most"):
        synchronized(Changes(sync="selsync(0.3)", ratio_policy="auto"), planned)
    rounded = planned.model_copy(update={"compression": Compression(name="int8"), "ratio_policy": "fixed"})
    asked = Changes(sync="selsync(0.3)", compression="int8")
    assert synchronized(asked, rounded).compression.name == "int8"
    assert synchronized(Changes(partition="shards"), planned).compression.name == "topk"


def test_what_was_typed_is_launched_and_predicted(hetopt, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = hetopt("recommend", RECORDED / "digits.json", "--budget", 2, "--epochs", 100, "-o", plan, "--sync", "bsp")
    assert made.code == 0, made.err
    asked = ("launch", plan, "--on", "local", "--slowdown", "1,2", "--dry-run")
    options = ("--sync", "selsync(auto,share=0.2)", "--partition", "labels(2)", "--data-injection", "0.5,0.25")
    record = json.loads(hetopt(*asked, "--json", *options).out)
    assert record["spec"]["sync"]["synchronised_share"] == 0.2
    assert record["spec"]["partition"]["labels"] == 2
    assert record["plan"]["run"]["sync"]["name"] == "bsp", "the plan is kept as it was made"
    assert any("averaged in 0.2 of the steps" in note for note in record["notes"])
    plain = json.loads(hetopt(*asked, "--json").out)
    assert record["prediction"]["communication_s"] < plain["prediction"]["communication_s"]
    shown = " ".join(hetopt(*asked, *options).out.split())
    assert "sync selsync(auto, share=0.2), batch policy model, partition labels(2)" in shown
    assert "50 % of the workers hand on 25 % of their samples" in shown
    shown = " ".join(hetopt(*asked, "--sync", "local-sgd(8,stretch=1.5)", "--compression", "int8").out.split())
    assert "sync local-sgd(8, stretch=1.5), averages in int8, batch policy model" in shown
    slow = ("launch", plan, "--on", "rehearsal", "--hosts", "rate=10mbit x2", "--dry-run", "--json")
    rounded = json.loads(hetopt(*slow, "--sync", "local-sgd(8)", "--compression", "int8").out)
    whole = json.loads(hetopt(*slow, "--sync", "local-sgd(8)").out)
    assert any("What int8 costs a worker was not profiled" in note for note in rounded["notes"])
    assert rounded["prediction"]["communication_s"] < whole["prediction"]["communication_s"]
    refused = hetopt(*asked, "--sync", "ssp(2)", "--compression", "topk:0.01")
    assert refused.code == 2
    assert "nothing to act on" in refused.err


def test_a_plan_can_say_how_its_workers_synchronise(hetopt, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    asked = ("--budget", 2, "--epochs", 9, "-o", plan, "--sync", "selsync(0.3,max_local=9)")
    made = hetopt("recommend", RECORDED / "digits.json", *asked)
    assert made.code == 0, made.err
    told = json.loads(plan.read_text())
    assert told["run"]["sync"] == {"name": "selsync", "max_local_steps": 9}
    made_plan = Plan.load(plan)
    alone = len(made_plan.run.workers) == 1
    together = made_plan.model_copy(update={"run": RUN, "explanation": ()})
    sync = Changes(sync="selsync(auto,share=0.1)").sync
    assert "averaged in 0.1 of the steps" in into_plan(sync, together).explanation[0]
    assert "communicates in every step" in into_plan(sync, together).explanation[0]
    assert ("one worker" in into_plan(sync, made_plan).explanation[-1]) == alone


def test_a_prediction_counts_the_steps_that_communicate() -> None:
    def mean_s(text: str, *, exchange_s: float = 1.0, compute_s: float = 2.0) -> float:
        sync = SPELLED[text] if text in SPELLED else Changes(sync=text).sync
        assert sync is not None
        told = communication(sync, dataset_size=1024, global_batch_size=128)
        return exposed_s(sync, told, exchange_s=exchange_s, compute_s=compute_s)

    assert mean_s("local-sgd(16)") == 1 / 16
    assert mean_s("fedavg(1,0.5)") == 1 / 4
    assert mean_s("selsync(auto,share=0.2)") == 0.2
    assert mean_s("selsync(never)") == 0
    assert mean_s("selsync(never,max_local=9)") == 0.1
    assert mean_s("selsync(0)") == mean_s("local-sgd(1)") == 1
    assert mean_s("ssp(3)") == 0
    assert mean_s("ssp(0)") == 1
    assert mean_s("ssp(3)", exchange_s=5.0) == 3
    assert mean_s("local-sgd(8,fragments=4)") == 0
    assert mean_s("local-sgd(8,fragments=4)", exchange_s=10.0) == 1 / 4
    assert mean_s("local-sgd(4,fragments=4)", exchange_s=10.0) == 1 / 2
    assert 0.03 < mean_s("selsync(0.3)") < 0.28  # what was published
    known = communication(SPELLED["local-sgd(16)"], dataset_size=10, global_batch_size=1)
    prior = communication(SPELLED["selsync(0.3)"], dataset_size=10, global_batch_size=1)
    assert known.log_sd < prior.log_sd

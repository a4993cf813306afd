"""What a person types about synchronisation, partition and injection, and what becomes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.api.changes import exchanged, synchronized
from hetopt.api.options import Changes
from hetopt.core.comm.composition import (
    CODINGS,
    COLLECTIVES,
    MEMORIES,
    METHODS,
    Combination,
    why_not,
    why_not_controlled,
)
from hetopt.core.comm.compression_text import USUAL_RATIO, parse_compression, spell
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import CONTROLLERS
from hetopt.core.run_spec import WEIGHS_WAYS, Compression, RunSpec, StopRule, Synchronization, WorkerSpec
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.local_options import communication
from tests.face.conftest import RECORDED, Answer

pytestmark = pytest.mark.usefixtures("small_catalogue")

WORKER = WorkerSpec(host="a", type="local", local_batch_size=32)
RUN = RunSpec(task="digits", workers=(WORKER,) * 4, stop=StopRule(max_steps=10))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("selsnyc(0.3)", None, None), "no synchronisation called 'selsnyc'"),
        (("selsync(0.3", None, None), "a name with its values in parentheses"),
        (("selsync(0.3,0.4)", None, None), "a value too many: '0.4'"),
        (("selsync(0.3,delta=0.4)", None, None), "says twice what delta is"),
        (("local-sgd(0)", None, None), "every must be greater than 0, got '0'"),
        (("local-sgd(8,delta=1)", None, None), "no option of local-sgd called 'delta'"),
        (("selsync(-1)", None, None), "delta must be greater than or equal to 0 or 'auto' or 'never', got '-1'"),
        (("bsp(3)", None, None), "a value too many"),
        ((None, "labels(none)", None), "labels must be a valid integer, got 'none'"),
        ((None, None, "0.5"), "samples is missing"),
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
    assert synchronized(Changes(sync="local-sgd(8)", ratio_policy="auto"), planned).may_average


def test_what_was_typed_is_launched_and_predicted(hetopt, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = hetopt("recommend", RECORDED / "digits.json", "--budget", 2, "--epochs", 100, "-o", plan, "--sync", "bsp")
    assert made.code == 0, made.err
    asked = ("launch", plan, "--on", "rehearsal", "--hosts", "rate=10mbit x2", "--dry-run", "--json")

    def launched(*options: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(hetopt(*asked, *options).out)
        assert record["plan"]["run"]["sync"]["name"] == "bsp", "the plan is kept as it was made"
        return record

    record = launched("--sync", "selsync(auto,share=0.2)", "--partition", "labels(2)", "--data-injection", "0.5,0.25")
    assert record["spec"]["sync"]["synchronised_share"] == 0.2
    assert record["spec"]["partition"]["labels"] == 2
    assert record["spec"]["injection"] == {"workers": 0.5, "samples": 0.25}
    each_s = [
        one["prediction"]["communication_s"]
        for one in (launched("--sync", "local-sgd(8)", "--compression", "int8"), launched("--sync", "local-sgd(8)"))
    ]
    assert each_s[0] < each_s[1] < launched()["prediction"]["communication_s"]


def test_a_plan_can_say_how_its_workers_synchronise(hetopt, tmp_path: Path) -> None:
    asked = ("--budget", 2, "--epochs", 9, "-o", tmp_path / "plan.json", "--sync", "selsync(0.3,max_local=9)")
    made = hetopt("recommend", RECORDED / "digits.json", *asked)
    assert made.code == 0, made.err
    assert Plan.load(tmp_path / "plan.json").run.sync == Synchronization(name="selsync", max_local_steps=9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local-sgd(16)", 1 / 16),
        ("fedavg(1,0.5)", 1 / 4),
        ("selsync(auto,share=0.2)", 0.2),
        ("selsync(never)", 0),
        ("selsync(never,max_local=9)", 0.1),
        ("selsync(0)", 1),
        ("local-sgd(1)", 1),
        ("selsync(0.3)", pytest.approx(0.15, abs=0.125)),  # what was published
    ],
)
def test_a_prediction_counts_the_steps_that_communicate(text: str, expected: float) -> None:
    sync = Changes(sync=text).sync
    assert sync is not None
    told = communication(sync, dataset_size=1024, global_batch_size=128)
    assert told.share == expected


# What a person types about the exchange of gradients becomes what the run is told, or one sentence.

ratios = st.floats(1e-6, 1.0)
whole = st.one_of(st.none(), st.integers(1, 2**20))


@st.composite
def compressions(draw: st.DrawFn) -> Compression:
    """Any compression that can be written down, whether its parts go together or not."""
    name = draw(st.sampled_from(sorted(METHODS)))
    return Compression(
        name=name,
        ratio=draw(ratios) if METHODS[name].by_ratio else 1.0,
        collective=draw(st.sampled_from(["auto", *COLLECTIVES])),
        memory=draw(st.sampled_from(["auto", "none", "error_feedback", "momentum_correction"])),
        bits=draw(whole),
        levels=draw(whole),
        rank=draw(whole),
        floor_ratio=draw(st.one_of(st.none(), ratios)),
        coding=draw(st.one_of(st.none(), st.sampled_from(sorted(CODINGS)))),
        momentum=draw(st.one_of(st.none(), st.floats(0, 1, exclude_max=True))),
        clip_norm=draw(st.one_of(st.none(), st.floats(1e-6, 1e6))),
    )


def run_of(**told: object) -> RunSpec:
    worker = WorkerSpec(host="a", type="local", local_batch_size=1)
    return RunSpec.model_validate({"task": "digits", "workers": (worker,), "stop": StopRule(max_steps=1), **told})


def decided(run: RunSpec, **typed: str) -> RunSpec:
    return exchanged(Changes(**typed), run)


@given(compressions())
def test_what_is_spelt_is_read_back(compression: Compression) -> None:
    assert parse_compression(spell(compression)) == compression


@given(st.integers(1, 10**6), st.sampled_from(sorted(name for name in METHODS if METHODS[name].by_ratio)))
def test_how_many_times_less_is_a_fraction_too(factor: int, name: str) -> None:
    assert parse_compression(f"{name}:{factor}x") == Compression(name=name, ratio=1 / factor)
    assert parse_compression(f" {name} : {factor} x ") == Compression(name=name, ratio=1 / factor)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topk:0.01", Compression(name="topk", ratio=0.01)),
        ("topk,ratio=0.01", Compression(name="topk", ratio=0.01)),
        ("topk", Compression(name="topk", ratio=USUAL_RATIO)),
        ("dense", Compression()),
        ("none", Compression()),
        ("identity", Compression()),
        ("dgc:0.001,momentum=0.9", Compression(name="dgc", ratio=0.001, momentum=0.9)),
        ("powersgd,rank=2", Compression(name="powersgd", rank=2)),
        ("qsgd_maxnorm, bits=8", Compression(name="qsgd_maxnorm", bits=8)),
        ("topk:1000x,floor_ratio=10x", Compression(name="topk", ratio=0.001, floor_ratio=0.1)),
        (
            "mstopk:5e-3,collective=ar_topk_var,coding=packed",
            Compression(name="mstopk", ratio=0.005, collective="ar_topk_var", coding="packed"),
        ),
    ],
)
def test_compressions_as_people_write_them(text: str, expected: Compression) -> None:
    assert parse_compression(text) == expected


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("tpok:0.01", "no compressor called 'tpok'", "did you mean 'topk'"),
        ("", "no compressor called ''", "choose one of"),
        ("densee", "no compressor called 'densee'", "did you mean 'dense'"),
        ("auto:0.1", "auto takes no ratio", "auto alone"),
        ("topk:0", "ratio must be greater than 0, got '0'", "correct"),
        ("topk:1.5", "ratio must be less than or equal to 1, got '1.5'", "correct"),
        ("topk:-0.1", "ratio must be greater than 0, got '-0.1'", "correct"),
        ("topk:nan", "ratio must be a fraction, got 'nan'", "0.01, 1% or 100x"),
        ("topk:0x", "ratio must be a fraction, got '0x'", "100x"),
        ("topk:0.5x", "ratio must be less than or equal to 1, got '0.5x'", "correct"),
        ("topk:", "must be a name with its values in parentheses, got 'topk:'", "NAME(VALUE"),
        ("topk:lots", "ratio must be a fraction, got 'lots'", "100x"),
        ("powersgd,rnak=2", "no option of powersgd called 'rnak'", "did you mean 'rank'"),
        ("powersgd,rank", "does not say what rank is", "rank=VALUE"),
        ("powersgd,rank=", "does not say what rank is", "rank=VALUE"),
        ("powersgd,rank=0", "rank must be greater than 0, got '0'", "correct"),
        ("powersgd,rank=two", "rank must be a valid integer, got 'two'", "correct"),
        ("powersgd,rank=2,rank=3", "says twice what rank is", "once"),
        ("topk:0.1,ratio=0.1", "says twice what ratio is", "once"),
        ("dgc:0.1,momentum=1", "momentum must be less than 1, got '1'", "correct"),
        ("powersgd,name=topk", "no option of powersgd called 'name'", "choose one of"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, said: str, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_compression(text)
    assert said in caught.value.message
    assert caught.value.message.endswith(".")
    assert hint in str(caught.value.hint)


THIN = Compression(name="topk", ratio=0.1)
TIED = Compression(name="topk", ratio=0.1, collective="ar_topk")
BY_THE_RUN = {"ratio_policy": "auto", "collective_policy": "cheapest"}


@pytest.mark.parametrize(
    ("planned", "typed", "expected"),
    [
        ({"compression": THIN}, {"compression": "auto"}, {"compression": THIN, **BY_THE_RUN}),
        ({"compression": THIN}, {"ratio_policy": "auto"}, {"compression": THIN, **BY_THE_RUN}),
        ({}, {"compression": "auto"}, BY_THE_RUN),
        (
            {},
            {"compression": "redsync:0.001", "ratio_policy": "auto"},
            {"compression": Compression(name="redsync", ratio=0.001), **BY_THE_RUN},
        ),
        (
            {"compression": THIN},
            {"compression": "auto", "collective": "ar_topk"},
            {"compression": TIED, "ratio_policy": "auto", "collective_policy": "fixed"},
        ),
        (
            BY_THE_RUN,
            {"compression": "topk:0.1"},
            {"compression": THIN, "ratio_policy": "fixed", "collective_policy": "cheapest"},
        ),
        (
            {},
            {"compression": "topk:0.1", "ratio_policy": "warm_up"},
            {"compression": THIN, "ratio_policy": "warm_up", "collective_policy": "fixed"},
        ),
        (
            BY_THE_RUN,
            {"compression": "dense", "collective": "all_reduce"},
            {
                "compression": Compression(collective="all_reduce"),
                "ratio_policy": "fixed",
                "collective_policy": "fixed",
            },
        ),
        ({"compression": THIN}, {"collective": "auto"}, {"compression": THIN, "collective_policy": "cheapest"}),
        ({"compression": THIN}, {"collective": "ar_topk"}, {"compression": TIED, "collective_policy": "fixed"}),
        (
            {"compression": THIN},
            {"compression": "topk:0.1,collective=ar_topk"},
            {"compression": TIED, "collective_policy": "fixed"},
        ),
        (
            {"compression": THIN},
            {"compression": "topk:0.1,collective=ar_topk", "collective": "auto"},
            {"compression": TIED, "collective_policy": "cheapest"},
        ),
    ],
)
def test_a_run_decides_what_nobody_fixed(
    planned: dict[str, object], typed: dict[str, str], expected: dict[str, object]
) -> None:
    assert decided(run_of(**planned), **typed) == run_of(**{**planned, **expected})


@pytest.mark.parametrize("policy", sorted(CONTROLLERS))
def test_every_combination_is_taken_or_refused_as_the_matrix_says(policy: str) -> None:
    matrix = (
        Combination(name=each[0], collective=each[1], memory=each[2])
        for each in itertools.product(METHODS, COLLECTIVES, MEMORIES)
    )
    for combination in (each for each in matrix if why_not(each.name, each.memory, each.collective) is None):
        ratio = ":0.01" if combination.method.by_ratio else ""
        typed = f"{combination.name}{ratio},memory={combination.memory},collective={combination.collective}"
        reason = why_not_controlled(combination.name, policy, combination.collective)
        if reason is None or (combination.name == "identity" and policy in WEIGHS_WAYS):
            told = decided(run_of(), compression=typed, ratio_policy=policy)
            assert (told.compression.name, told.ratio_policy) == (combination.name, policy)
        else:
            with pytest.raises(BadInput) as caught:
                decided(run_of(), compression=typed, ratio_policy=policy)
            assert caught.value.message == reason, typed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"compression": "auto", "ratio_policy": "accordion"}, '`compression="auto"` decides the ratio itself'),
        ({"ratio_policy": "gravca"}, "no ratio policy called 'gravca'"),
        ({"collective": "all-gather"}, "no collective called 'all-gather'"),
        ({"compression": "topk:0.1,collective=ar_topk", "collective": "all_gather"}, "and `collective` for all_gather"),
        ({"compression": "topk:0.1", "collective": "all_reduce"}, "topk sends does not travel by all_reduce"),
        ({"compression": "powersgd", "ratio_policy": "accordion"}, "same amount at every ratio"),
        ({"compression": "global_randomk_maxnorm:0.1", "ratio_policy": "gravac"}, "selects from a selection"),
        ({"compression": "topk:0.1", "ratio_policy": "gravac", "collective": "ar_topk"}, "one worker selects for all"),
        ({"compression": "qsgd_maxnorm:0.1"}, "the ratio of qsgd_maxnorm must be 1"),
        ({"compression": "topk:0.1,bits=8"}, "has no option bits"),
        ({"compression": "topk:0.1,coding=zip"}, "no coding called 'zip'"),
        ({"compression": "topk:0.1,memory=none"}, "does not go with the gradient memory none"),
        (
            {"compression": "topk:1", "ratio_policy": "accordion"},
            "the ratio of accordion must be above 0 and below 1, got 1",
        ),
        ({"ratio_policy": "threshold"}, "same amount at every ratio"),
    ],
)
def test_what_does_not_go_together_is_refused(typed: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        decided(run_of(), **typed)
    assert said in caught.value.message
    assert caught.value.hint


# `hetopt launch --stream`: what would run, and what is refused.


Hetopt = Callable[..., Answer]


@pytest.fixture
def plan(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> Path:
    made = tmp_path / "plan.json"
    answer = hetopt("recommend", digits_profile, "--budget", 5, "--steps", 200, "-o", made)
    assert answer.code == 0, answer.err
    return made


def test_a_plan_runs_on_streams(hetopt: Hetopt, plan: Path) -> None:
    asked = ("launch", plan, "--on", "local", "--slowdown", "1,2", "--dry-run", "--json")
    spec = json.loads(hetopt(*asked, "--stream", "replay(40/80,factor=2,buffer=truncation)").out)["spec"]
    assert spec["stream"]["rates"] == [80.0, 160.0]
    assert spec["batch_policy"] == "rate"
    spec = json.loads(hetopt(*asked, "--stream", "replay(4/8)", "--batch-policy", "static").out)["spec"]
    assert spec["batch_policy"] == "static"
    shown = hetopt(*asked[:-1], "--stream", "replay(4/8)")
    assert "wait for samples to arrive is not predicted" in " ".join((shown.out + shown.err).split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--on", "local", "--batch-policy", "rate"), "follows streams, and there is none"),
        (("--on", "local", "--slowdown", "1,1", "--stream", "replay(4/8/16)"), "3 rates of streams for 2 workers"),
        (("--on", "local", "--stream", "kafka"), "must be a replay of the task"),
        (("--on", "ec2", "--stream", "replay(4)"), "--stream is for --on local"),
    ],
)
def test_streams_that_do_not_suit_are_refused(hetopt: Hetopt, plan: Path, options: tuple[str, ...], said: str) -> None:
    answer = hetopt("launch", plan, *options, "--dry-run")
    assert answer.code == 2
    assert said in " ".join(answer.err.split())

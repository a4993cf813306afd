"""`hetopt profile --from-samples` and `hetopt predict` as a person or a program runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import hetopt
import hetopt as library
from hetopt.api.step_times import StepTimes
from hetopt.core.comm.composition import AR_TOPK
from hetopt.core.errors import BadInput
from hetopt.core.profile import Link, Profile
from hetopt.core.step_samples import Compression as Sent, Configuration, Node, StepSample, parse_line
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import load_catalog, offers
from hetopt.optimizer.plan import Candidate, NetworkSource
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.search.search_space import machine_options
from hetopt.optimizer.step_time.links import NETWORK_LOG_SD, Network, network_of
from hetopt.optimizer.step_time.model import learned_shape, sampled_machines
from hetopt.optimizer.step_time.transfer import reference_host
from hetopt.reports import html, plan_document
from tests.face.conftest import Answer
from tests.optimizer.profiles import make_profile

Hetopt = Callable[..., Answer]
COMMAND = (sys.executable, "-m", "hetopt.cli.main")


def row(layout: tuple[int, ...], batch: int, *, type_: str = "gpu", **more: object) -> dict[str, object]:
    return {"nodes": [{"type": type_, "workers": workers} for workers in layout], "local_batch_size": batch, **more}


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def measured(type_: str = "gpu") -> list[dict[str, object]]:
    """Computing 20 ms and 1 ms a sample; exchanging by a ring of 100 ms between nodes, 30 ms inside."""
    found = []
    for layout in ((1,), (2,), (4,), (1, 1), (2, 2)):
        workers = sum(layout)
        exchange = (0.1 if len(layout) > 1 else 0.03) * 2 * (workers - 1) / workers
        for batch in (8, 32, 128):
            compute = 0.02 + 0.001 * batch
            step = 0.3 * compute + ((0.7 * compute) ** 4 + exchange**4) ** 0.25
            found.append(row(layout, batch, type_=type_, step_time_s=step))
    return found


@pytest.fixture
def profile(hetopt: Hetopt, tmp_path: Path) -> Path:
    samples, path = tmp_path / "samples.jsonl", tmp_path / "p.json"
    samples.write_text(lines(measured()))
    answer = hetopt("profile", "--from-samples", samples, "-o", path)
    assert answer.code == 0, answer.err
    assert "15 step times of 5 layouts" in answer.out
    return path


def refused(answer: Answer, said: str) -> None:
    error = " ".join(answer.err.split())
    assert answer.code == 2
    assert said in error
    assert "→" in error
    assert "Traceback" not in error


def test_every_line_comes_back_in_its_place_with_an_interval(hetopt: Hetopt, profile: Path, tmp_path: Path) -> None:
    asked = [row((2,) * nodes, batch, id=f"{nodes}-{batch}") for nodes in (4, 1, 2) for batch in (64, 16)]
    queries = tmp_path / "q.jsonl"
    queries.write_text(lines(asked))
    answer = hetopt("predict", profile, queries)
    assert answer.code == 0
    found = [json.loads(text) for text in answer.out.splitlines()]
    for one, was in zip(found, asked, strict=True):
        assert {name: one[name] for name in was} == was
        assert 0 < one["step_time_low_s"] < one["step_time_s"] < one["step_time_high_s"]
        assert one["evidence"] == "measured"


def test_probes_are_marked_in_order_with_reasons(hetopt: Hetopt, profile: Path, tmp_path: Path) -> None:
    queries = tmp_path / "q.jsonl"
    queries.write_text(lines([row((2,) * nodes, batch) for nodes in (2, 3, 8) for batch in (16, 64)]))
    answer = hetopt("predict", profile, queries, "--suggest-probes", 2)
    found = [json.loads(text) for text in answer.out.splitlines()]
    marked = sorted((one for one in found if "suggested_probe" in one), key=lambda one: one["suggested_probe"])
    assert [one["suggested_probe"] for one in marked] == [1, 2]
    assert len(marked[0]["nodes"]) > 2
    assert all("uncertainty" in one["reason"] and "probe_cost_usd" not in one for one in marked)


def test_probes_of_catalogue_types_are_priced(hetopt: Hetopt, tmp_path: Path) -> None:
    samples, path, queries = (tmp_path / name for name in ("s.jsonl", "p.json", "q.jsonl"))
    samples.write_text(lines(measured("g4dn.12xlarge")))
    hetopt("profile", "--from-samples", samples, "-o", path)
    queries.write_text(lines([row((2,) * nodes, 64, type_="g4dn.12xlarge") for nodes in (3, 16)]))
    answer = hetopt("predict", path, queries, "--suggest-probes", 1, "--market", "on-demand")
    found = [json.loads(text) for text in answer.out.splitlines()]
    cost = next(one["probe_cost_usd"] for one in found if "suggested_probe" in one)
    assert 0.1 < cost < 10


def test_lines_that_cannot_be_predicted_keep_their_place_and_say_why(
    hetopt: Hetopt, profile: Path, tmp_path: Path
) -> None:
    queries = tmp_path / "q.jsonl"
    good, unknown = row((1,), 8), row((1,), 8, type_="abacus")
    queries.write_text(lines([good, unknown]) + 'nonsense\n\n{"nodes": [{"type": "gpu", "wor')
    answer = hetopt("predict", profile, queries)
    refused(answer, "3 of 4 queries could not be predicted; line 2: the type 'abacus' was not measured (gpu was)")
    found = [json.loads(text) for text in answer.out.splitlines()]
    assert ["error" in one for one in found] == [False, True, True, True]
    assert found[1]["nodes"] == unknown["nodes"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"compresion": {"name": "topk"}}, "'compresion' (did you mean 'compression'?)"),
        ({"Precision": "bf16"}, "'Precision' (did you mean 'precision'?)"),
        ({"nodes": [{"type": "gpu", "workers": 1, "zone": "x"}]}, None),
        ({"nodes": [{"type": "gpu", "worker": 1}]}, "'worker' (did you mean 'workers'?)"),
        ({"id": 1, "note": "mine", "step_time_low_s": 1, "syncs": 3, "sync": "bsp"}, None),
    ],
)
def test_a_misspelt_field_is_named_and_a_field_of_others_is_theirs(
    hetopt: Hetopt, profile: Path, tmp_path: Path, line: dict[str, object], said: str | None
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"nodes": [{"type": "gpu", "workers": 1}], "local_batch_size": 8, **line}))
    answer = hetopt("predict", profile, queries)
    told = json.loads(answer.out)
    assert (answer.code, told.get("error", "")[-2:]) == ((0, "") if said is None else (2, ")."))
    assert said is None or said in told["error"]
    samples = tmp_path / "samples.jsonl"
    samples.write_text(queries.read_text()[:-1] + ', "step_time_s": 0.2}')
    assert hetopt("profile", "--from-samples", samples, "--json").code == answer.code


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("profile -o new.json --from-samples cut.jsonl", "line 15, the last, where the file stops"),
        ("profile -o new.json digits --from-samples cut.jsonl", "line 15, the last"),
        ("profile -o new.json digits --explore", "belong together"),
        ("profile -o new.json", "name the task to measure"),
        ("recommend p.json --budget 5", "holds step times alone"),
        ("predict p.json empty", "there are no queries"),
    ],
)
def test_bad_files(
    hetopt: Hetopt, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.jsonl").write_text(lines(measured())[:-30])
    (tmp_path / "empty").write_text("\n")
    refused(hetopt(*typed.split()), said)
    assert not (tmp_path / "new.json").exists()


def test_samples_come_through_a_pipe_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "profile", "--from-samples", "-", "--json"],
        input=lines(measured()),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["kind"] == "step-samples"
    assert not list(tmp_path.iterdir())


# `hetopt predict` answers with the planner's numbers, for whatever a plan could rent.

RECORDED = Path(__file__).parent.parent / "recorded" / "digits.json"


def asked(candidate: Candidate) -> Configuration:
    """A plan's cluster as a query."""
    way = candidate.compression
    return Configuration(
        nodes=tuple(
            Node(type=group.instance_type, workers=group.workers_per_machine)
            for group in candidate.groups
            for _ in range(group.machines)
        ),
        local_batch_size=tuple(size for group in candidate.groups for size in group.local_batch_sizes),
        compression=None if way.name == "identity" else Sent(name=way.name, ratio=way.ratio),
    )


@pytest.fixture(scope="module")
def times() -> StepTimes:
    return StepTimes.of(RECORDED)


@pytest.mark.parametrize("wish", [{"types": "c7i.*,c7a.*"}, {"types": "g5.*,g6.*"}, {"types": "c7i.large"}])
def test_the_step_of_a_plan_is_the_plans(times: StepTimes, wish: dict[str, str]) -> None:
    plan = hetopt.recommend(RECORDED, budget_usd=20, epochs=40, max_workers=8, trials=0, **wish)  # type: ignore[arg-type]
    # A query names a method and a ratio, and has its usual collective and coding.
    usual = [one for one in (plan.chosen, *plan.pareto) if one.compression.coding is None and one.collective != AR_TOPK]
    found = [one for one in usual if not one.sync.is_local]
    assert found
    answers = times.predict([asked(one) for one in found])
    for candidate, answer in zip(found, answers, strict=True):
        assert not isinstance(answer, str)
        told = candidate.prediction.step_time_s
        assert (answer.step_time_s, answer.step_time_low_s, answer.step_time_high_s) == pytest.approx(
            (told.value, told.low, told.high)
        ), candidate.in_words


def test_every_type_that_plans_can_have_is_predicted(times: StepTimes) -> None:
    profile, catalog = Profile.load(RECORDED), load_catalog()
    model = fit(profile)
    options, _ = machine_options(
        model,
        offers(catalog),
        reference_host(model, catalog.instance_types.values()),
        learned_shape(model),
        sampled_machines(profile, catalog.instance_types),
    )
    names = {option.name: option.worker.workers for option in options}
    assert len(names) > 500
    queries = [
        Configuration(nodes=(Node(type=name, workers=workers),), local_batch_size=4) for name, workers in names.items()
    ]
    answers = dict(zip(names, times.predict(queries), strict=True))
    assert {name: answer for name, answer in answers.items() if isinstance(answer, str)} == {}


def test_a_type_that_no_plan_can_have_is_refused_with_the_reason(times: StepTimes) -> None:
    query = Configuration(nodes=(Node(type="t3.large", workers=1),), local_batch_size=4)
    [answer] = times.predict([query])
    assert answer == "t3.large cannot be planned with: burstable (its speed depends on credits)."


def test_all_that_is_wrong_with_a_line_is_said_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        parse_line(Configuration, json.dumps({"nodes": [{"workers": 0}], "precision": "int3"}))
    for part in (
        "nodes.0.type is missing",
        "nodes.0.workers must be greater than 0, got 0",
        "local_batch_size is missing",
        "precision must be",
    ):
        assert part in refused.value.message


# What network a profile knows: the plan, its explanation and page, and `predict` with its breakdown say the same.

ASKED = "g5.xlarge"
EXCHANGE_S = 0.3
PLAIN = make_profile(parameters=25_000_000, per_sample_s=0.02)


def sampled(name: str, *nodes: int) -> Profile:
    """With whole steps of a type: alone, and with as many nodes, whose exchange takes 0.3 s."""
    samples = tuple(
        StepSample(
            nodes=(Node(type=name, workers=1),) * count,
            local_batch_size=size,
            step_time_s=0.01 + 0.001 * size + (EXCHANGE_S if count > 1 else 0.0),
            sync_time_s=EXCHANGE_S if count > 1 else 0.0,
        )
        for count in nodes
        for size in (8, 16, 32, 64, 128)
    )
    return PLAIN.model_copy(update={"samples": samples})


def timed() -> Profile:
    """With collectives that were timed between hosts."""
    network = tuple(
        Link(**{**link.model_dump(), "scope": "network", "bytes_per_s": link.bytes_per_s / 2}) for link in PLAIN.links
    )
    return PLAIN.model_copy(update={"links": (*PLAIN.links, *network)})


CASES: Mapping[str, tuple[Profile, NetworkSource]] = {
    "nothing": (PLAIN, "catalogue"),
    "one machine": (sampled(ASKED, 1), "catalogue"),
    "two machines": (sampled(ASKED, 1, 2), "samples"),
    "two of another size": (sampled("g5.2xlarge", 1, 2), "samples"),
    "two processors": (sampled("c7i.xlarge", 1, 2), "catalogue"),
    "two workers of this machine": (sampled("local", 1, 2), "catalogue"),
    "collectives between hosts": (timed(), "profile"),
}


@pytest.mark.parametrize("case", CASES)
def test_everybody_who_speaks_of_the_network_says_the_same(
    hetopt: Callable[..., Answer], tmp_path: Path, case: str
) -> None:
    known, source = CASES[case]
    profile = tmp_path / "p.json"
    known.save(profile)
    plan = library.recommend(
        profile,
        budget_usd=500,
        epochs=40,
        types=ASKED,
        objective="fastest",
        max_workers=8,
        mixed_types=1,
        batch_size=512,
        trials=0,
    )
    (group,) = plan.chosen.groups
    assert group.machines > 1
    assert group.network == source
    unmeasured = f"The network between machines of {ASKED} was not measured"
    assert (unmeasured in " ".join(plan.explanation)) == (source == "catalogue")
    assert (unmeasured in html.page(plan_document.page(plan))) == (source == "catalogue")

    sizes = list(group.local_batch_sizes)
    way = {"name": plan.chosen.compression.name, "ratio": plan.chosen.compression.ratio}
    sent = {} if way["name"] == "identity" else {"compression": way}
    queries = tmp_path / "q.jsonl"
    nodes = [{"type": ASKED, "workers": 1}] * group.machines
    queries.write_text(json.dumps({"nodes": nodes, "local_batch_size": sizes, **sent}) + "\n")
    predicted: dict[str, Any] = json.loads(hetopt("predict", profile, queries).out)
    step_s = plan.chosen.prediction.step_time_s
    figures = [predicted[f"step_time_{end}s"] for end in ("", "low_", "high_")]
    assert figures == pytest.approx([step_s.value, step_s.low, step_s.high])


def network(case: str) -> Network:
    known, catalog = CASES[case][0], load_catalog()
    plans = AskedSteps.of(known, catalog)
    seen = None if plans.sampled is None else plans.sampled.machine(ASKED)
    return network_of(plans.model, catalog.instance_types[ASKED], plans.shape, seen)


def test_links_are_known_as_well_as_what_is_nearest_to_them_was_measured() -> None:
    """Steps of two processors say nothing of the links of GPUs, and those of a relative less than its own."""
    own, relative, stranger = (network(case) for case in ("two machines", "two of another size", "two processors"))
    assert own.log_sd < relative.log_sd
    assert stranger.log_sd == network("nothing").log_sd == NETWORK_LOG_SD

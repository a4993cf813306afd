"""What network a profile knows: the plan, its explanation and page, and `predict` with its breakdown say the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import hetopt as library
from hetopt.core.profile import Link, Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import NetworkSource
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, RunOnType
from hetopt.optimizer.step_time.links import NETWORK_LOG_SD, Network
from hetopt.reports import html, plan_document
from tests.face.conftest import Answer
from tests.optimizer.profiles import make_profile

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
    told: dict[str, Any] = json.loads(hetopt("predict", profile, queries, "--explain", 1, "--json").out)["explanation"]
    step_s = plan.chosen.prediction.step_time_s
    for found in (predicted, told["predicted"]):
        figures = [found[f"step_time_{end}s"] for end in ("", "low_", "high_")]
        assert figures == pytest.approx([step_s.value, step_s.low, step_s.high])
    assert any(unmeasured in line for line in told["priors"]) == (source == "catalogue")
    assert told["compute_s"] == pytest.approx(plan.chosen.prediction.compute_s)
    assert told["exposed_s"] + told["compress_s"] == pytest.approx(plan.chosen.prediction.communication_s)


def network(case: str, earlier: EarlierRuns | None = None) -> Network:
    known, catalog = CASES[case][0], load_catalog()
    return AskedSteps.of(known, catalog, earlier).network(ASKED)


def test_links_are_known_as_well_as_what_is_nearest_to_them_was_measured() -> None:
    """Steps of two processors say nothing of the links of GPUs, and those of a relative less than its own."""
    own, relative, stranger = (network(case) for case in ("two machines", "two of another size", "two processors"))
    assert own.log_sd < relative.log_sd
    assert stranger.log_sd == network("nothing").log_sd == NETWORK_LOG_SD


def test_runs_narrow_what_is_known_of_links_and_widen_it_where_they_contradict_each_other() -> None:
    def found(*factors: float) -> EarlierRuns:
        return EarlierRuns(
            runs=tuple(
                RunOnType(run=f"{n}", job=f"{n}", instance_type=ASKED, link_log_factor=factor, day="2026-11-20")
                for n, factor in enumerate(factors)
            )
        )

    alike, torn = (network("nothing", found(*factors)) for factors in ((0.5, 0.5, 0.5), (-2.0, 2.0)))
    assert alike.log_sd < NETWORK_LOG_SD < torn.log_sd
    before, after = (one.links["all_reduce"].bytes_per_s for one in (network("nothing"), alike))
    assert after < before


def test_machines_with_idle_gpus_have_the_network_that_plans_take(
    hetopt: Callable[..., Answer], tmp_path: Path
) -> None:
    """Which no plan has, so that the model of what was measured answers."""
    profile, queries = tmp_path / "p.json", tmp_path / "q.jsonl"
    sampled("g4dn.12xlarge", 1).save(profile)
    nodes = [{"type": "g4dn.12xlarge", "workers": 1}] * 2
    queries.write_text(json.dumps({"nodes": nodes, "local_batch_size": 1}) + "\n")
    told = json.loads(hetopt("predict", profile, queries, "--explain", 1, "--json").out)["explanation"]
    rate = 0.8 * 50e9 / 8  # of its sustained 50 Gbit/s
    assert math.log(told["exchange_s"] / (PLAIN.job.gradient_bytes / rate)) == pytest.approx(0, abs=0.2)

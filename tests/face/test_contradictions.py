"""Steps that cannot all be true, typed by hand: each is one sentence with its next step, and counts for what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetopt.core.step_samples import Node, StepSample
from tests.face.described import BERT

GOAL = ("--budget", 20, "--epochs", 2, "--types", "g5.*,g6.*,g4dn.*")


def planned(hetopt: Callable[..., Any], tmp_path: Path, **changes: object) -> Any:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(BERT.to_json()), **changes}), encoding="utf-8")
    return hetopt("recommend", path, *GOAL)


def rows(type_: str, times: Mapping[int, tuple[float, ...]]) -> list[dict[str, Any]]:
    return [
        StepSample(nodes=(Node(type=type_, workers=1),), local_batch_size=size, step_time_s=time_s).model_dump()
        for size, several in times.items()
        for time_s in several
    ]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (rows("g5.xlarge", {8: (0.2, 0.9)}), "4.5 times apart: neither is believed fully. Measure again"),
        (rows("g5.xlarge", {4: (0.9,), 8: (0.3,)}), "took 3.0 times longer for 4 samples than for 8"),
        (rows("g5.xlarge", {4: (5.0,), 8: (9.0,)}), "times longer than g4dn.xlarge foretells. A power limit"),
        (rows("p9.xlarge", {4: (0.2,), 8: (0.4,)}), "p9.xlarge is not in the catalogue"),
    ],
)
def test_a_plan_says_which_of_its_steps_contradict_each_other(
    samples: list[dict[str, Any]], words: str, hetopt: Callable[..., Any], tmp_path: Path
) -> None:
    answer = planned(hetopt, tmp_path, samples=samples)
    assert answer.code in (0, 3)
    assert words in " ".join(answer.err.split())
    alone = planned(hetopt, tmp_path)
    assert words not in " ".join(alone.err.split())


def test_a_throttled_gpu_is_said_where_nothing_else_was_measured(hetopt: Callable[..., Any], tmp_path: Path) -> None:
    device = json.loads(BERT.to_json())["devices"][0]
    slow = [
        {
            **point,
            **{name: 60 * point[name] for name in ("step_time_s", "forward_s", "backward_s", "optimizer_s")},
            "samples_s": [60 * one for one in point["samples_s"]],
        }
        for point in device["step_times"]
    ]
    job = {**json.loads(BERT.to_json())["job"], "model_kind": "transformer"}
    answer = planned(hetopt, tmp_path, devices=[{**device, "step_times": slow}], job=job)
    assert "of its GPU's peak rate, where such jobs reach" in " ".join(answer.err.split())
    assert "peak rate" not in planned(hetopt, tmp_path, job=job).err


def test_a_profile_of_before_that_names_no_precision_is_planned_and_one_on_an_unknown_gpu_is_refused(
    hetopt: Callable[..., Any], tmp_path: Path
) -> None:
    device = json.loads(BERT.to_json())["devices"][0]
    old = {key: value for key, value in device.items() if key != "precision"}
    assert planned(hetopt, tmp_path, devices=[old]).code == 0
    refused = planned(hetopt, tmp_path, devices=[{**device, "type": "my-box"}])
    assert refused.code == 2
    told = " ".join(refused.err.split())
    assert "my-box" in told
    assert "accelerators.csv" in told

"""The peak of a worker's tensors is predicted within a tenth, at batch sizes that were counted and at others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetopt.profiler.script.order import ORDER_FILE, ScriptOrder
from tests.forks import all_end_well

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.profiler.worker_memory_program"

SCRIPTS = {f"{ROOT}/examples/script/train.py": f"{ROOT}/examples/script/train_hetopt.py"}
EXAMPLES = {name: f"{ROOT}/examples/{name}.py:task" for name in ("diabetes", "transformer", "vision", "characters")}
COUNTED, TRAINED = [4, 16, 64], [4, 12, 48, 128]
DENSE: dict[str, Any] = {"name": "identity"}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "topk", "ratio": 0.01}, {}),
    ({"name": "int8"}, {}),
    (DENSE, {"name": "local-sgd", "every_steps": 2}),
    ({"name": "topk", "ratio": 0.1}, {}),
    ({"name": "powersgd", "rank": 2}, {}),
]


def cases(tasks: list[str], others: int, scripted: int, trained: list[int]) -> list[dict[str, Any]]:
    """Tasks that sum gradients as they are; scripts; one whose gradient weighs much, by other exchanges."""
    dense = [{"task": task, "compression": DENSE, "sync": {}, "counted": COUNTED, "trained": trained} for task in tasks]
    scripts = [
        {"script": script, "session": session, "compression": one, "sync": {}, "trained": trained}
        for script, session in SCRIPTS.items()
        for one in (DENSE, OTHERS[0][0])
    ]
    return (
        dense
        + scripts[:scripted]
        + [
            {"task": EXAMPLES["transformer"], "compression": one, "sync": sync, "counted": COUNTED, "trained": [12]}
            for one, sync in OTHERS[:others]
        ]
    )


def off(folder: Path, planned: list[dict[str, Any]]) -> dict[str, float]:
    """By job, exchange and batch size: predicted peak over measured peak, less one."""
    for number, script in enumerate(dict.fromkeys(case["script"] for case in planned if "script" in case)):
        place = folder / f"profile-{number}"
        place.mkdir()
        order = ScriptOrder(script=script, warmup_steps=1, timed_steps=2, time_limit_s=60.0)
        (place / ORDER_FILE).write_text(order.model_dump_json())
        all_end_well(["-m", "hetopt.profiler.script.child", str(place), "0"], environment={"LOCAL_RANK": "0"})
        planned = [case | ({"profile": str(place)} if case.get("script") == script else {}) for case in planned]
    (folder / "cases.json").write_text(json.dumps(planned))
    all_end_well(*(["-m", PROGRAM, str(rank), str(folder)] for rank in range(2)))
    told = json.loads((folder / "told.json").read_text())
    assert len(told) == sum(len(case["trained"]) for case in planned)
    named = [
        " ".join(map(str, (Path(job).name, *one["compression"].values(), *one["sync"].values(), one["samples"])))
        for one in told
        for job in [one.get("task") or one["session"]]
    ]
    return {name: one["predicted"] / one["measured"] - 1 for name, one in zip(named, told, strict=True)}


def test_peaks_are_predicted_within_a_tenth(tmp_path: Path) -> None:
    found = off(tmp_path, cases([EXAMPLES["transformer"]], others=1, scripted=1, trained=[4, 48]))
    assert {name: value for name, value in found.items() if abs(value) > 0.1} == {}


@pytest.mark.slow
def test_peaks_of_all_examples_and_more_exchanges_are_too(tmp_path: Path) -> None:
    found = off(tmp_path, cases([*EXAMPLES.values(), "digits"], others=len(OTHERS), scripted=2, trained=TRAINED))
    assert {name: value for name, value in found.items() if abs(value) > 0.1} == {}

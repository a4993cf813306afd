"""What happens when a micro-batch does not fit into memory: it is cut, and nothing else is different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetopt.core.errors import RunFailed
from hetopt.core.events.log import Event, read_events
from hetopt.core.run_folder import MODEL_FILE, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.trainer import worker
from tests.forks import all_end_well

from . import memory_program
from .scenarios import toy_spec

CPU = torch.device("cpu")
STEPS = 3


def test_a_worker_without_memory_for_one_sample_says_so(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_MEMORY_SAMPLES", "0")
    write_spec(tmp_path, RunSpec.model_validate_json(json.dumps(toy_spec(shares=(6,)))))
    assert worker.main([str(tmp_path)]) == RunFailed.exit_code
    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (last["event"], last["reason"]) == ("run_failed", "worker 0 has too little memory for a single sample.")


def runs(folder: Path) -> dict[str, list[Event]]:
    """Both forms of step, with memory for everything, for some samples, and told for how many."""
    plan = []
    for form, allowed_bytes in (("fused", 10 << 20), ("bucketed", 20 << 20)):
        for kind, allowed in (("rich", None), ("poor", allowed_bytes)):
            run_dir = folder / f"{form}-{kind}"
            run_dir.mkdir()
            spec = toy_spec(shares=(60, 8), stop={"max_steps": STEPS}, prefetch="off")
            spec["task"] = f"{memory_program.__file__}:{form}"
            write_spec(run_dir, RunSpec.model_validate_json(json.dumps(spec)))
            plan.append({"folder": str(run_dir), "allowed_bytes": allowed})
    (folder / "runs.json").write_text(json.dumps(plan))
    program = "tests.trainer.memory_program"
    all_end_well(*(["-m", program, str(rank), str(folder)] for rank in range(memory_program.WORLD_SIZE)))
    return {Path(run["folder"]).name: read_events(Path(run["folder"]) / "events.jsonl") for run in plan}


def test_a_run_whose_allocations_fail_finds_its_bound_and_ends_where_others_do(tmp_path: Path) -> None:
    logs = runs(tmp_path)
    for form in ("fused", "bucketed"):
        rich, poor = logs[f"{form}-rich"], logs[f"{form}-poor"]
        assert not [event for event in rich if event["event"] == "memory_bound_learned"]
        learned = [event for event in poor if event["event"] == "memory_bound_learned"]
        assert learned, f"{form}: memory was enough"
        assert {event["rank"] for event in learned} == {0}
        assert 1 <= learned[-1]["samples"] <= 30
        losses = [[event["loss"] for event in log if event["event"] == "step"] for log in (rich, poor)]
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
        models = [load_file(tmp_path / f"{form}-{kind}" / MODEL_FILE) for kind in ("rich", "poor")]
        for name, value in models[0].items():
            torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-6)

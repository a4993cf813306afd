"""How far a dense gradient travels through our own code: from the step, or a script's backward, to the collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from tests.forks import all_end_well

from .dense_path_program import STEPS, WIDE

MOST_FRAMES = 6

Calls = list[dict[str, Any]]


def calls_of(way: str, folder: Path) -> list[Calls]:
    """Every collective that each of two workers began."""
    program = ("-m", "tests.trainer.dense_path_program", way)
    all_end_well(*([*program, str(rank), "2", str(folder)] for rank in range(2)))
    return [json.loads((folder / f"stacks-{rank}.json").read_text()) for rank in range(2)]


def frames(call: dict[str, Any], first: str) -> list[str]:
    """Of ours, from one to the collective."""
    path: list[str] = call["stack"][call["stack"].index(first) :]
    assert len(path) <= MOST_FRAMES, " > ".join([*path, call["collective"]])
    return path


def test_a_dense_gradient_crosses_at_most_six_of_our_frames(tmp_path: Path) -> None:
    workers = [{"host": "here", "type": "local", "local_batch_size": 16}] * 2
    spec = {"task": "digits", "workers": workers, "batch_policy": "static", "stop": {"max_steps": STEPS}}
    write_spec(tmp_path, RunSpec.model_validate_json(json.dumps(spec)))
    for calls in calls_of("task", tmp_path):
        inside = [call for call in calls if "training.py:train_step" in call["stack"]]
        largest = max(call["elements"] for call in inside)
        gradients = [call for call in inside if call["elements"] == largest]
        assert len(gradients) == STEPS, "one collective a step carries the gradient"
        for call in gradients:
            path = frames(call, "training.py:train_step")
            assert path[-1].startswith("channel.py:"), "the last frame of ours calls torch's collective"


def test_so_do_those_of_a_script_and_a_small_one_is_one_collective(tmp_path: Path) -> None:
    for calls in calls_of("session", tmp_path):
        inside = [call for call in calls if "flow.py:backward" in call["stack"]]
        numbers = (2 * (WIDE + 1) + 8 * WIDE + WIDE**2, 16 * (8 + 16 + 3) + 1)
        of_last_layers, rest = WIDE * (WIDE + 2) + 1, 9 * WIDE
        parts = [call for call in inside if call["elements"] in (of_last_layers, rest + 8)]
        assert len(parts) == 2 * STEPS, "a bucket of the last layers, and the rest with its marks"
        for call in parts:
            is_early = "buckets.py:_note_made" in frames(call, "flow.py:backward")
            assert is_early == (call["elements"] == of_last_layers)
        small = [call for call in inside if call not in parts and call["elements"] >= numbers[1] / 2]
        assert len(small) == STEPS, "one message has the gradient and the word"
        assert all(frames(call, "flow.py:backward") for call in small)

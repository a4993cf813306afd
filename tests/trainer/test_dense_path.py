"""How far a dense gradient travels through our own code: from the training step to torch's collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from tests.disturbance import PATIENCE_S

PROGRAM = Path(__file__).with_name("dense_path_program.py")
STEPS, MOST_FRAMES = 4, 6


def test_a_dense_gradient_crosses_at_most_six_of_our_frames(tmp_path: Path) -> None:
    workers = [{"host": "here", "type": "local", "local_batch_size": 16}] * 2
    spec = {"task": "digits", "workers": workers, "batch_policy": "static", "stop": {"max_steps": STEPS}}
    write_spec(tmp_path, RunSpec.model_validate_json(json.dumps(spec)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), "2", str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(2):
        calls = json.loads((tmp_path / f"stacks-{rank}.json").read_text())
        inside = [call for call in calls if "engine.py:train_step" in call["stack"]]
        largest = max(call["elements"] for call in inside)
        gradients = [call for call in inside if call["elements"] == largest]
        assert len(gradients) == STEPS, "one collective a step carries the gradient"
        for call in gradients:
            path = call["stack"][call["stack"].index("engine.py:train_step") :]
            assert path[-1].startswith("channel.py:"), "the last frame of ours calls torch's collective"
            assert len(path) <= MOST_FRAMES, " > ".join([*path, call["collective"]])

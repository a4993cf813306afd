"""torchrun's agent forks its workers, and starts them as it always does where a fork would not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import api

from hetopt.trainer.host.agent import fork_from, forked_workers
from hetopt.trainer.host.forks import ForkedProcess, ForkServer
from tests.disturbance import PATIENCE_S


def test_the_agent_forks_its_workers_and_starts_them_itself_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(api, "get_subprocess_handler", api.get_subprocess_handler)  # put back afterwards
    server = ForkServer.importing(("json",), os.environ)
    fork_from(server)
    kinds = []
    for number in range(2):
        worker = api.get_subprocess_handler(
            entrypoint=sys.executable,
            args=("-u", "-m", "timeit", "-n1", "-r1", "import os; print(os.environ['RANK'])"),
            env={"RANK": "7"},
            stdout=str(tmp_path / f"out-{number}"),
            stderr=str(tmp_path / f"err-{number}"),
            local_rank_id=0,
            numa_options=None,
        )
        kinds.append(type(worker.proc))
        assert worker.proc.wait(PATIENCE_S) == 0
        for output in (worker._stdout, worker._stderr):
            output.close()  # as the worker's own `close` does, which also wants somebody to kill
        assert (tmp_path / f"out-{number}").read_text().splitlines()[0] == "7"
        server.close()
    assert kinds == [ForkedProcess, subprocess.Popen]


def test_nobody_forks_a_process_that_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = api.get_subprocess_handler
    with forked_workers():
        assert api.get_subprocess_handler is before
    assert "uses a GPU" in capsys.readouterr().err

"""How hosts find each other, and which worker a file of output belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetopt.api.run import log_files
from hetopt.backends.emulation.namespaces import host_address
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import Node, RunSpec, StopRule, WorkerSpec, first_rank, host_names, workers_on
from hetopt.trainer.host.agent import torchrun_arguments

HOSTS = [f"h{n}" for n in range(12)]
SPEC = RunSpec(
    task="toy",
    workers=tuple(
        WorkerSpec(host=host, type="toy", local_batch_size=1) for n, host in enumerate(HOSTS) for _ in range(1 + n % 2)
    ),
    stop=StopRule(max_steps=1),
)


def node(place: int) -> Node:
    return Node(host=HOSTS[place], address=host_address(place), meeting=f"{host_address(0)}:29400")


def test_twelve_hosts_meet_at_the_first_and_start_their_own_workers(tmp_path: Path) -> None:
    lines = [torchrun_arguments(SPEC, tmp_path, node(place)) for place in range(12)]
    assert all("--nnodes=12" in line for line in lines)
    assert [f"--nproc-per-node={1 + n % 2}" in line for n, line in enumerate(lines)] == [True] * 12
    # Machines that are rented are ranked by their addresses as text; workers of one host follow each other.
    assert sorted(range(12), key=host_address) == list(range(12))
    assert [first_rank(SPEC, host) for host in HOSTS] == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]
    assert host_names(SPEC) == HOSTS
    assert workers_on(SPEC, "h1") == 2


def test_a_single_machine_still_meets_itself(tmp_path: Path) -> None:
    line = torchrun_arguments(SPEC, tmp_path)
    assert "--nnodes=1" in line
    assert "--nproc-per-node=18" in line


def test_a_node_survives_its_command_line() -> None:
    assert Node.of_arguments(node(3).to_arguments()) == node(3)
    assert Node.of_arguments([]) is None
    for arguments in (["--host"], ["--host", "h1"], ["--host", "h1", "--host", "h1", "--meeting", "x"]):
        with pytest.raises(BadInput, match="describes no node"):
            Node.of_arguments(arguments)


def test_output_is_labelled_by_rank_in_the_run(tmp_path: Path) -> None:
    write_spec(tmp_path, SPEC)
    for relative in (
        "conductor.log",
        "h0/host.log",
        "h0/run_a/attempt_0/0/stderr.log",
        "h3/run_b/attempt_0/0/stderr.log",
        "h3/run_b/attempt_0/1/stderr.log",
        "h3/run_b/attempt_1/1/stdout.log",
        "h3/run_c/attempt_0/1/stderr.log",
        "h3/run_d/attempt_0/1/stderr.log",
        "h3/run_e/attempt_0/1/stderr.log",
    ):
        path = tmp_path / "log" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line\n")
    labels = {label: path.relative_to(tmp_path / "log").as_posix() for label, path in log_files(tmp_path).items()}
    assert labels == {
        "conductor": "conductor.log",
        "host h0": "h0/host.log",
        "worker 0": "h0/run_a/attempt_0/0/stderr.log",
        "worker 4": "h3/run_b/attempt_0/0/stderr.log",
        "worker 5": "h3/run_b/attempt_0/1/stderr.log",
        "worker 5 restart 1": "h3/run_b/attempt_1/1/stdout.log",
        "worker 5 stderr": "h3/run_c/attempt_0/1/stderr.log",
        "worker 5 stderr 2": "h3/run_d/attempt_0/1/stderr.log",
        "worker 5 stderr 3": "h3/run_e/attempt_0/1/stderr.log",
    }
    assert set(log_files(tmp_path, 5)) == set(labels) - {"conductor", "host h0", "worker 0", "worker 4"}

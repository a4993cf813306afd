"""Nodes of a Slurm cluster: what its commands say, as recorded from Slurm 22.05, and runs on real daemons."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

import hetopt
from hetopt.api.hosts import of_slurm, runs_left_in_slurm
from hetopt.backends.asked import holding_script
from hetopt.backends.options import Slurm
from hetopt.backends.slurm.jobs import (
    SlurmLink,
    device_of,
    left_of,
    read_jobs,
    read_nodes,
)
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.hosts import Host, read_hosts
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.api.test_backends import Stories, goes_on, plan, until_step
from tests.face.conftest import until
from tests.slurm.cluster import Cluster, cluster, why_no_slurm
from tests.ssh.test_backend import started_with

__all__ = ["plan"]

SINFO = """fast|2|4000|(null)|10.77.0.101|idle|none
fast|2|4000|(null)|10.77.0.101|idle|none
mid|1|2000|(null)|10.77.0.102|drained|disk is being changed
slow|1|2000|gpu:a100:2|10.77.0.103|idle|none
"""
SQUEUE = """5|limit|PENDING|16:39:00|PartitionTimeLimit
6|mid|PENDING|1:00:00|ReqNodeNotAvail, UnavailableNodes:mid
4|fast|COMPLETING|59:55|None
7|fast|RUNNING|59:57|None
8|fast|PENDING|1:00:00|BeginTime
9|slow|RUNNING|1:29|None
"""
FAST = Host(name="fast", address="fast", cpus=2, memory_gib=3.9)
SLOW = Host(name="slow", address="slow", devices=("A100", "A100"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that say what Slurm's said; it is all that is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, said in (("sinfo", SINFO), ("squeue", SQUEUE)):
        command(tmp_path / name, stdout=said)
    return tmp_path


def command(path: Path, *, stdout: str = "", stderr: str = "", code: int = 0) -> None:
    said = "".join(f"cat >&{number} <<'END'\n{text}END\n" for number, text in ((1, stdout), (2, stderr)) if text)
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{said}exit {code}\n")
    path.chmod(0o755)


def test_the_nodes_of_a_cluster_are_an_inventory(says: Path) -> None:
    path = says / "nodes.toml"
    path.write_text("network_mbit = 10000\n" + of_slurm())
    fast, mid, slow = read_hosts(path)
    assert (fast.name, fast.cpus, fast.memory_gib, fast.devices) == ("fast", 2, 3.9, ("cpu",))
    assert (mid.network_mbit, slow.devices) == (10_000, ("A100", "A100"))
    assert {name: node.trouble for name, node in read_nodes(SINFO).items()} == {
        "fast": None, "mid": "drained, disk is being changed", "slow": None,
    }  # fmt: skip
    command(says / "sinfo")
    with pytest.raises(BadInput, match="no node in a partition 'nope'"):
        of_slurm("nope")


def test_a_queue_that_does_not_answer_is_no_empty_queue(says: Path) -> None:
    command(says / "squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(RunFailed, match=r"lists no jobs: .*Unable to contact slurm controller"):
        runs_left_in_slurm(remove=True)


@pytest.mark.parametrize(
    ("kind", "device"),
    [("a100", "A100"), ("tesla_v100-sxm2-32gb", "V100"), ("rtx_2080_ti", "RTX 2080 Ti"), ("nvidia_l4", "L4"),
     ("geforce_rtx_3090", "RTX 3090"), ("l40s", "L40S"), ("l4x", None), ("", None)],
)  # fmt: skip
def test_a_kind_of_gpu_is_one_of_the_registry(kind: str, device: str | None) -> None:
    assert device_of(kind) == device


@given(days=st.integers(0, 400), hours=st.integers(0, 23), minutes=st.integers(0, 59), seconds=st.integers(0, 59))
def test_times_are_read_as_slurm_writes_them(days: int, hours: int, minutes: int, seconds: int) -> None:
    """Days and hours are left out where they are none (squeue(1), `%L`)."""
    parts = f"{days}-" if days else "", f"{hours:02}:" if days else f"{hours}:" if hours else ""
    text = f"{parts[0]}{parts[1]}{minutes:02}:{seconds:02}"
    assert left_of(text) == 86_400 * days + 3_600 * hours + 60 * minutes + seconds
    assert left_of("UNLIMITED") == left_of("INVALID") == math.inf


def test_a_host_has_the_job_that_runs_and_leaves_it_before_its_end(says: Path) -> None:
    assert {host: job.number for host, job in read_jobs(SQUEUE).items()} == {
        "limit": "5", "mid": "6", "fast": "7", "slow": "9",
    }  # fmt: skip
    link = SlurmLink(run="r", options=Slurm())
    assert link.argv(FAST, "true")[2] == "--jobid=7"
    assert [link.may_be_used(host) for host in (FAST, SLOW)] == [True, False]
    with pytest.raises(RunFailed, match=r"mid waits for its job in Slurm's queue \(6, pending: ReqNodeNotAvail, Un"):
        link.argv(Host(name="mid", address="mid"), "true")
    command(says / "sbatch", stderr="sbatch: error: Batch job submission failed: Invalid qos specification\n", code=1)
    with pytest.raises(RunFailed, match="Slurm takes no job on new: Invalid qos specification") as refused:
        link.argv(Host(name="new", address="new"), "true")
    assert "`qos`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("complaint", "says"),
    [
        ("srun: error: Unable to confirm allocation for job 77: Invalid job id specified", "Invalid job id specified."),
        ("srun: error: Unable to create step for job 2: Requested node configuration is not available", "create step"),
        ("slurmstepd-fast: error: *** STEP 3.0 ON fast CANCELLED AT 2026-11-30T03:21:25 DUE TO PREEMPTION ***\nsrun: e",
         "to another job."),
        ("slurmstepd-fast: error: *** STEP 2.1 ON fast CANCELLED AT 2026-11-30T03:21:19 ***\nsrun: error: fast: task 0:"
         " Terminated", "its job was cancelled."),
        ("slurmstepd: error: *** JOB 5 ON fast CANCELLED AT 2026-11-30T03:21:19 DUE TO TIME LIMIT ***", "time limit."),
        ("slurmstepd-fast: error: execve(): /x: No such file or directory\nsrun: error: fast: task 0: Exited with exit "
         "code 2", ""),
    ],
)  # fmt: skip
def test_each_complaint_of_srun_is_one_sentence(complaint: str, says: str) -> None:
    """Or the program's own: that it has ended tells nothing."""
    link = SlurmLink(run="r", options=Slurm())
    why = link.why_unreached(FAST, 1, complaint)
    assert (why is None) == (not says)
    assert why is None or (says in why.message and why.message.startswith("fast is not reached: "))
    assert why is not None or link.host_lines(complaint) == ["execve(): /x: No such file or directory"]


@given(text=st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and text.isprintable()))
def test_no_text_is_an_option_of_sbatch(text: str) -> None:
    order = SlurmLink(run="r", options=Slurm(account=text, slurm_partition=text, time_limit="90m"))
    first, *words = order.sbatch_command(SLOW)
    assert first == "sbatch"
    assert all(word.startswith("--") for word in words)
    assert {f"--account={text}", f"--partition={text}", "--time=90", "--gres=gpu:2", "--exclusive"} <= {*words}
    assert {"--cpus-per-task=2", "--mem=3993M", "--nodelist=fast", "--requeue"} <= {*order.sbatch_command(FAST)}


@pytest.mark.parametrize(
    ("complaint", "told", "hint"),
    [
        ("sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
         "no job on fast: Invalid partition name specified.", "slurm_partition"),
        ("allocation failure: Requested node configuration is not available\n", "configuration is not", "inventory"),
        ("allocation failure: Invalid feature specification\n", "Invalid feature specification.", "constraint"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
         "Invalid account or account/partition combination specified.", "`account`"),
    ],
)  # fmt: skip
def test_what_slurm_would_refuse_is_refused_first(says: Path, complaint: str, told: str, hint: str) -> None:
    command(says / "sbatch", stderr=complaint, code=1)
    order = SlurmLink(run="r", options=Slurm())
    with pytest.raises(BadInput, match=told) as refused:
        order.check([FAST, SLOW], read_nodes(SINFO))
    assert hint in (refused.value.hint or "")
    with pytest.raises(BadInput, match="no node can be had: mid is drained, disk is being changed"):
        order.check([Host(name="mid", address="mid")], read_nodes(SINFO))
    (says / "sbatch").unlink()
    with pytest.raises(BadInput, match="there is no Slurm here: `sbatch` does not start"):
        order.check([FAST], read_nodes(SINFO))


def test_a_job_ends_a_while_after_the_last_process_of_its_run(tmp_path: Path) -> None:
    """Its program, with a `sleep` that is short: it goes on as long as a process of the run is there."""
    command(tmp_path / "sleep", stdout="")
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.01\n")
    (tmp_path / "hold").write_text(holding_script("r", FAST.name))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    node = subprocess.Popen([sys.executable, "-c", "input()", f"{tmp_path}/runs/r/fast"], stdin=subprocess.PIPE)
    held = subprocess.Popen(["sh", tmp_path / "hold"], env=environment)
    with pytest.raises(subprocess.TimeoutExpired):
        held.wait(4)
    node.communicate(b"\n")
    assert held.wait(60) == 0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three unequal nodes."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    nodes = {"fast": "CPUs=2 RealMemory=4000", "mid": "CPUs=1 RealMemory=2000", "slow": "CPUs=1 RealMemory=1000"}
    with cluster(tmp_path_factory.mktemp("slurm"), nodes, ["main Nodes=ALL Default=YES MaxTime=60 State=UP"]) as made:
        yield made


@pytest.fixture
def inventory(here: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The nodes, each with a disk of its own; when the test ends neither a job nor a file of a run is left."""
    monkeypatch.setenv("PATH", f"{here.folder}/bin:{os.environ['PATH']}")
    told = f'python = "{sys.executable}"\nusd_per_hour = 0.1\nnetwork_mbit = 10000\n\n{of_slurm()}'
    path = here.folder / "nodes.toml"
    path.write_text(re.sub(r"(?m)^\[(\w+)\]", rf'\g<0>\nfolder = "{here.folder}/disk-\1"', told))
    yield path
    until(lambda: not here.jobs())
    assert list(here.folder.glob("disk-*")) == []


def events_of(run: hetopt.Run) -> list[dict[str, Any]]:
    path = run.folder / EVENTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_node_whose_job_is_cancelled_comes_back_and_no_sample_is_lost(
    plan: Plan, inventory: Path, here: Cluster
) -> None:
    run = hetopt.launch(plan, on=Slurm(inventory=inventory), steps=100_000)
    until_step(run, 5)
    jobs = dict(line.split("|") for line in here.ask("squeue", "-h", "-o", "%k|%i").split())
    assert {*jobs} == {"fast", "mid", "slow"}
    here.ask("scancel", jobs["mid"])
    until(lambda: started_with(run) == [3, 2, 3], lambda: goes_on(run))
    until_step(run, run.record().progress.step + 5)
    assert run.stop().state is RunState.STOPPED
    lost = [event["reason"] for event in events_of(run) if event.get("dies")]
    assert lost == ["its job was cancelled; the run goes on without it"]
    done = 0
    for event in events_of(run):
        if event["event"] == "run_started":
            done = event["resumed_step"]
        elif event["event"] == "step":
            assert event["step"] - event["steps"] == done
            done = event["step"]
            assert event["samples_seen"] == 64 * done
            assert sum(event["local_batch_sizes"]) == 64
    assert [event["from"] for event in events_of(run) if event["event"] == "workers_changed"] == ["memory", "memory"]
    assert run.model is not None
    assert {worker.host for worker in run.report().workers} == {"fast", "mid", "slow"}


def test_jobs_of_a_run_whose_conductor_was_killed_are_found(plan: Plan, inventory: Path, here: Cluster) -> None:
    run = hetopt.launch(plan, on=Slurm(inventory=inventory), steps=100_000)
    until(here.jobs, lambda: goes_on(run))
    assert runs_left_in_slurm(remove=True) == []
    psutil.Process(json.loads((run.folder / "process.json").read_text())["pid"]).kill()
    until(lambda: not goes_on(run))
    assert runs_left_in_slurm(remove=True) == [run.name]
    until(lambda: not here.jobs())


def test_what_cannot_be_is_said_before_anything_is_asked_for(plan: Plan, inventory: Path, here: Cluster) -> None:
    def refused(**options: object) -> str:
        with pytest.raises(BadInput) as told:
            hetopt.launch(plan, on=Slurm(**{"inventory": inventory, **options}))
        assert told.value.hint
        return told.value.message

    assert refused(inventory=None) == "a launch on Slurm needs to know which nodes: `inventory`."
    assert refused(slurm_partition="nope") == "Slurm takes no job on fast: Invalid partition name specified."
    assert refused(constraint="gold") == "Slurm takes no job on fast: Invalid feature specification."
    text = inventory.read_text()
    inventory.write_text(text + "[nobody]\n")
    assert refused() == "Slurm knows no node nobody."
    inventory.write_text(text[: text.index("[mid]")])
    here.ask("scontrol", "update", "nodename=fast", "state=drain", "reason=its disk is full")
    try:
        assert refused() == "no node can be had: fast is drained, its disk is full."
    finally:
        here.ask("scontrol", "update", "nodename=fast", "state=resume")
    assert not (Path(os.environ["HETOPT_HOME"])).exists()


@pytest.mark.slow  # the tests above tell most of each story
class TestSlurm(Stories):
    @pytest.fixture(autouse=True)
    def on_these(self, inventory: Path) -> None:
        text = inventory.read_text()
        inventory.write_text(text[: text.index("[slow]")])
        self.here = Slurm(inventory=inventory)

"""The contract of a backend: the same stories on each that runs here. `tests/ec2` tells them of rented machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import hetopt
from hetopt.api import hosts
from hetopt.api.backends import backend
from hetopt.backends.emulation.namespaces import find_leftovers, why_not
from hetopt.backends.on_this_machine import SshBackend
from hetopt.backends.options import Local, Machines, Rehearsal, Ssh
from hetopt.backends.processes import PROCESS_FILE, ProcessLauncher
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import checkpoint_step
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.face.conftest import until

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two workers on one type, for a few hundred steps."""
    return hetopt.recommend(RECORDED, budget_usd=2, epochs=20, types="c7i.large", max_workers=2, trials=0)


def test_hosts_of_ones_own_are_named_by_a_file_or_a_text_and_not_by_both(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("[box1]\n[box2]\n")
    assert hosts.inventory(tmp_path / "hosts.toml") == hosts.inventory(hosts="box1,box2")
    with pytest.raises(BadInput, match="both name hosts"):
        hosts.check(tmp_path / "hosts.toml", "box1")


def test_a_run_whose_own_process_is_frozen_ends_when_its_workers_have(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    monkeypatch.setattr("hetopt.api.run.LONGEST_ENDING_S", 1.0)
    run = hetopt.launch(plan, on="local", steps=12)
    until_step(run, 1)
    os.kill(json.loads((run.folder / PROCESS_FILE).read_text())["pid"], signal.SIGSTOP)
    assert run.wait().state is RunState.FINISHED
    assert run.model is not None


def goes_on(run: hetopt.Run) -> bool:
    return not run.status().state.is_over


def until_step(run: hetopt.Run, step: int) -> None:
    """A run that goes on has taken so many steps."""
    until(lambda: run.record().progress.step >= step, lambda: goes_on(run))


class Stories:
    """What every backend does. A subclass names it and describes two workers there."""

    here: Machines

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
        return tmp_path

    def launched(self, plan: Plan, **more: object) -> hetopt.Run:
        return hetopt.launch(plan, on=self.here, **more)

    def workers(self, run: hetopt.Run) -> list[psutil.Process]:
        """The processes of a run's workers."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "hetopt.trainer.worker" in (process.info["cmdline"] or [])
            and any(run.name in word for word in process.info["cmdline"])
        ]

    def test_preparing_starts_nothing(self, plan: Plan, home: Path) -> None:
        prepared = backend(self.here.PLACE).prepare(plan, plan, self.here)
        assert prepared.launch.on == self.here.PLACE
        assert prepared.launch.prediction.total_s.value > 0
        assert not list(home.iterdir())

    def test_a_run_ends_and_is_held_against_its_prediction(self, plan: Plan) -> None:
        run = self.launched(plan, steps=12)
        assert run.wait().state is RunState.FINISHED
        report = run.report()
        assert report.on == self.here.PLACE
        assert len(report.workers) == 2
        assert run.model is not None
        log = (run.folder / "events.jsonl").read_bytes()
        assert hetopt.resume(run).name == run.name, "which is finished"
        assert (run.folder / "events.jsonl").read_bytes() == log

    def test_a_run_is_stopped_and_goes_on(self, plan: Plan) -> None:
        run = self.launched(plan, steps=4_000)
        with pytest.raises(BadInput, match=f"{run.name} is still"):
            hetopt.resume(run)
        until_step(run, 8)
        assert run.stop().state is RunState.STOPPED
        reached = run.record().progress.step
        again = hetopt.resume(run.name)
        until_step(again, reached + 3)
        assert again.stop().state is RunState.STOPPED
        interrupted = again.report().interrupted
        assert interrupted is not None
        assert interrupted.sessions == 2

    def test_a_run_whose_worker_dies_has_failed_says_why_and_begins_anew_where_nothing_was_saved(
        self, plan: Plan
    ) -> None:
        run = self.launched(plan, steps=4_000)
        until_step(run, 5)
        self.workers(run)[-1].kill()
        status = run.wait()
        assert status.state is RunState.FAILED
        assert "was killed" in (status.reason or "")
        assert checkpoint_step(run.folder) is None
        again = hetopt.resume(run.name)
        until_step(again, 2)
        assert again.stop().state is RunState.STOPPED

    def test_a_damaged_log_hides_no_run(self, plan: Plan) -> None:
        run = self.launched(plan, steps=12)
        run.wait()
        log = run.folder / "events.jsonl"
        log.write_text('{"event": "step", "step": \n' + json.dumps({"event": 5}) + "\n" + log.read_text())
        assert hetopt.Run.find(run.name).status().state is RunState.FINISHED
        assert hetopt.report(run.name).unread_lines == 2


@pytest.mark.parametrize("here", [Local(), Ssh(hosts="alice@box1,box2")])
def test_a_start_that_is_refused_leaves_nothing_that_looks_like_a_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Machines
) -> None:
    def refuse(*_: object) -> None:
        raise BadInput("it cannot be started.", hint="try again")

    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    monkeypatch.setattr(ProcessLauncher, "start", refuse)
    monkeypatch.setattr(SshBackend, "asked", lambda self, prepared: prepared)
    with pytest.raises(BadInput, match="cannot be started"):
        hetopt.launch(plan, on=here)
    assert list((tmp_path / "runs").iterdir()) == []


class TestLocal(Stories):
    here = Local(slowdowns=(1.0, 2.0))


@pytest.mark.slow  # tests/rehearsal tells each of these stories of it as well
@pytest.mark.skipif(why_not() is not None, reason="needs root and iproute2")
class TestRehearsal(Stories):
    here = Rehearsal(hosts="speed=1,rate=200mbit; speed=0.5,rate=200mbit")

    @pytest.fixture(autouse=True)
    def nothing_stays(self) -> object:
        yield
        assert find_leftovers() == []

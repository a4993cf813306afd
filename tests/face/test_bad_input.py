"""The table of bad input: one clear sentence, what to do next, the documented exit code, and nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.profile import Profile
from hetopt.core.run_folder import write_spec
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.face.conftest import RECORDED, Answer

pytestmark = pytest.mark.usefixtures("small_catalogue")

Hetopt = Callable[..., Answer]


def _unwrapped(text: str) -> str:
    return " ".join(text.split())


def _refused(answer: Answer, code: int, said: str) -> None:
    error = _unwrapped(answer.err)
    assert answer.code == code, error
    assert said in error
    assert "error:" in error
    assert "→" in error, "an error says what to do next"
    assert "Traceback" not in error
    assert answer.out == ""


def _edited(profile: Path, folder: Path, **changes: object) -> Path:
    data = json.loads(profile.read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
    edited = folder / "edited.json"
    edited.write_text(json.dumps(data))
    return edited


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 99}, "written with profile schema 99"),
        ({"kind": "plan"}, "holds a plan, not a profile"),
        ({"job__dataset_size": -5}, "job.dataset_size must be greater than 0, got -5"),
        ({"job__gradient_bytes": "much"}, "job.gradient_bytes must be a valid integer, got 'much'"),
        ({"devices__0__step_times__0__step_time_s": float("nan")}, "devices.0.step_times.0.step_time_s"),
        ({"devices__0__step_times__0__step_time_s": -1.0}, "devices.0.step_times.0.step_time_s"),
        ({"devices": []}, "devices must have at least 1 item, got 0"),
        ({"extra": 1}, "extra is no field of it"),
    ],
)
def test_an_edited_profile(
    hetopt: Hetopt, digits_profile: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    edited = _edited(digits_profile, tmp_path, **changes)
    _refused(hetopt("recommend", edited, "--budget", 5, "-o", tmp_path / "plan.json"), 2, said)
    assert not (tmp_path / "plan.json").exists()


def test_a_truncated_profile(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(digits_profile.read_text()[:5000])
    _refused(hetopt("recommend", cut, "--budget", 5), 2, "is not complete JSON")


def test_a_profile_that_is_not_there(hetopt: Hetopt, tmp_path: Path) -> None:
    _refused(hetopt("recommend", tmp_path / "none.json", "--budget", 5), 2, "does not exist")


def test_a_folder_instead_of_a_profile(hetopt: Hetopt, tmp_path: Path) -> None:
    _refused(hetopt("recommend", tmp_path, "--budget", 5), 2, "cannot be read: Is a directory")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "nan"], "--budget must be an amount in USD, got"),
        (["--budget", "-1"], "--budget must be a positive number of USD"),
        (["--budget", "0"], "--budget must be a positive number of USD"),
        (["--budget", "inf"], "--budget must be an amount in USD, got"),
        ([], "give --budget, --deadline or both"),
        (["--deadline", "soon"], "--deadline must be a length of time"),
        (["--budget", "5", "--target", "accuracy"], "--target must be METRIC=VALUE"),
        (["--budget", "5", "--target", "bleu=30"], "was profiled for accuracy, not bleu"),
        (["--budget", "5", "--epochs", "nan"], "--epochs must be a number"),
        (["--budget", "5", "--epochs", "3", "--steps", "9"], "exclude each other"),
        (["--budget", "5", "--steps", "0"], "--steps must be at least 1"),
        (["--budget", "5", "--steps", "9" * 30], "--steps must be at most 1,000,000,000,000, got 999"),
        (["--budget", "5", "--epochs", "1e300"], "--epochs must be at most 1,000,000,000.0, got 1e+300"),
        (["--budget", "5", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--budget", "5", "--seed", "9" * 30], "--seed must be at most 9,223,372,036,854,775,807, got 999"),
        (["--deadline", "2026-12-01"], "write 6h or 1h30m, not a date"),
        (["--deadline", "6"], "--deadline needs a unit, got '6'"),
        (["--deadline", "1e300"], "--deadline needs a unit, got '1e300'"),
        (["--deadline", "1e300h"], "--deadline must be at most 36525d, got '1e300h'"),
        (["--budget", "5", "--disk", "-4"], "--disk must be 1 to 16,384 GB, got -4"),
        (["--budget", "5", "--provisioning", "x"], "--provisioning must be a length of time, got 'x'"),
        (["--budget", "5", "-o", "-"], "- is no file to write to"),
        (["--budget", "5", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["--budget", "5", "--max-machines", "0"], "--max-machines must be 1 to 4096, got 0"),
        (["--budget", "5", "--market", "black"], "There is no market called 'black'"),
        (["--budget", "5", "--region", "mars-1"], "mars-1"),
        (["--budget", "5", "--types", "g5.xlagre"], "g5.xlagre"),
        (["--budget", "5", "--types", ""], "--types must name at least one, got ''"),
        (["--budget", "5", "--gpus", " , "], "--gpus must name at least one, got ' , '"),
        (["--budget", "5", "--weights", "time=0,cost=0"], "one of them above 0"),
        (["--budget", "5", "--catalog", "/nowhere"], "/nowhere"),
        (["--budget", "5", "--lr-rule", "cubic"], "no learning rate rule called 'cubic'"),
    ],
)
def test_bad_options_of_recommend(hetopt: Hetopt, digits_profile: Path, options: list[str], said: str) -> None:
    _refused(hetopt("recommend", digits_profile, *options), 2, said)


def test_a_budget_that_nothing_fits_names_the_cheapest_plan_that_would(
    hetopt: Hetopt, digits_profile: Path, tmp_path: Path
) -> None:
    few = ("--types", "c7i.*,g6.*", "--max-workers", 8)
    answer = hetopt("recommend", digits_profile, "--budget", 0.0001, *few, "-o", tmp_path / "plan.json")
    _refused(answer, 3, "the cheapest plan is")
    assert not (tmp_path / "plan.json").exists()


def test_a_deadline_that_nothing_meets_names_the_quickest_plan(hetopt: Hetopt, digits_profile: Path) -> None:
    few = ("--types", "c7i.*,g6.*", "--max-workers", 8)
    _refused(hetopt("recommend", digits_profile, "--deadline", "1s", *few), 3, "the quickest plan is")


def test_an_output_that_exists(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("mine")
    _refused(hetopt("recommend", digits_profile, "--budget", 5, "-o", plan), 2, "exists already")
    assert plan.read_text() == "mine"


def test_an_output_in_no_folder(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    answer = hetopt("recommend", digits_profile, "--budget", 5, "-o", tmp_path / "no" / "plan.json")
    _refused(answer, 2, "there is no folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_read_only_output_folder(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    answer = hetopt("recommend", digits_profile, "--budget", 5, "-o", tmp_path / "plan.json")
    _refused(answer, 2, "permission denied")


def test_a_pipe_is_no_output(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    answer = hetopt("recommend", digits_profile, "--budget", 5, "-o", tmp_path / "plan.json")
    _refused(answer, 2, "is no file to write to")


def test_data_that_is_not_there_is_said_before_anything_starts(hetopt: Hetopt, plan: Path) -> None:
    _refused(hetopt("launch", plan, "--on", "local", "--dry-run", "--data", "nope"), 2, "there is no data folder nope")


def test_an_output_on_a_file_system_that_is_read_only(hetopt: Hetopt, digits_profile: Path) -> None:
    # /proc refuses new files even to root.
    _refused(hetopt("recommend", digits_profile, "--budget", 5, "-o", "/proc/plan.json"), 2, "cannot be written")


def test_an_unknown_task(hetopt: Hetopt, tmp_path: Path) -> None:
    answer = hetopt("profile", "digit", "-o", tmp_path / "p.json")
    _refused(answer, 2, "digit")
    assert "digits" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_missing_data_files(hetopt: Hetopt, tmp_path: Path) -> None:
    answer = hetopt("profile", "resnet20-cifar10", "--data", tmp_path)
    _refused(answer, 2, "data_batch_1.bin")
    assert "cs.toronto.edu" in _unwrapped(answer.err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch"], "no plan was named"),
        (["launch", "--on", "local"], "no plan was named"),
        (["launch", "--on", "moon", "plan.json"], "cannot launch on 'moon'"),
        (["launch", "--on", "local", "none.json"], "does not exist"),
        (["launch", "--on", "local", "--slowdown", "0.5", "none.json"], "--slowdown must be numbers from 1"),
        (
            ["launch", "--on", "local", "--max-restarts", "9" * 30, "none.json"],
            "must be a number from 0 to 1,000,000",
        ),
        (["launch", "--on", "ec2", "--image", "nope", "none.json"], "--image must be KIND=AMI, got 'nope'"),
        (["predict", "none.json", "--suggest-probes=-3"], "greater than or equal to 0, got '-3'"),
        (["profile", "--", "none.py"], "there is no script none.py"),
        (["profile", "/etc/passwd"], "neither a bundled task nor a Python script"),
        (["launch", "--on", "local", "--resume", "nothing"], "no runs in"),
        (["launch", "--on", "local", "--hosts", "speed=1", "none.json"], "--hosts is for --on rehearsal"),
        (["launch", "--on", "local", "--schedule", "s.txt", "none.json"], "--schedule is for --on rehearsal"),
        (["launch", "--on", "rehearsal", "--slowdown", "1,2", "none.json"], "--slowdown is for --on local"),
        (["launch", "--on", "rehearsal", "--batch-policy", "best", "none.json"], "no batch policy called 'best'"),
        (["launch", "--on", "rehearsal", "--steps", "0", "none.json"], "--steps must be at least 1"),
        (["launch", "--on", "local", "--compression", "tokp:0.1", "none.json"], "no compressor called 'tokp'"),
        (
            ["launch", "--on", "local", "--compression", "topk:2", "none.json"],
            "equal to 1, got '2'",
        ),
        (["launch", "--on", "local", "--ratio-policy", "best", "none.json"], "no ratio policy called 'best'"),
        (["launch", "--on", "local", "--collective", "ring", "none.json"], "no collective called 'ring'"),
        (["launch", "--on", "local", "--resume", "r", "--compression", "auto"], "--resume goes on with a run as it"),
        (["launch", "--on", "local", "--resume", "r", "--collective", "auto"], "--resume goes on with a run as it"),
        (["launch", "--on", "rehearsal", "--resume", "r", "--steps", "5"], "--resume goes on with a run as it was"),
        (["launch", "--on", "rehearsal"], "no plan was named"),
        (["inject", "nothing", "h0 dies"], "no runs in"),
        (["report"], "no runs in"),
        (["status", "nothing"], "no runs in"),
        (["logs"], "no runs in"),
        (["stop"], "no runs in"),
        (["catalog", "show", "g5.xlagre"], "g5.xlagre"),
    ],
)
def test_commands_without_what_they_need(
    hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    _refused(hetopt(*arguments), 2, said)


def test_a_plan_is_no_profile_and_a_profile_is_no_plan(hetopt: Hetopt, digits_profile: Path) -> None:
    _refused(hetopt("launch", "--on", "local", digits_profile), 2, "holds a profile, not a plan")


def test_a_run_folder_that_cannot_be_made(
    hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, digits_profile: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert hetopt("recommend", digits_profile, "--budget", 5, "--epochs", 1, "-o", plan).code == 0
    monkeypatch.setenv("HETOPT_HOME", "/proc/nowhere")
    answer = hetopt("launch", plan, "--on", "local", "--yes", "--json")
    _refused(answer, 2, "set HETOPT_HOME")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = Profile.load(RECORDED / "digits.json")
    goal = Goal(budget_usd=2.0, ends="epochs", amount=10.0)
    made = recommend(
        PlanRequest(profile, load_catalog(), goal, Options(batch_size=64)),
        seed=0,
        now=datetime(2026, 11, 20, tzinfo=UTC),
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made.save(path)
    return path


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("", "names no host"),
        ("speed=0", "must be greater than 0"),
        ("speed=-1", "must be greater than 0"),
        ("speed=fast", "must be a number"),
        ("speed=1,rate=0mbit", "must be greater than 0"),
        ("speed=1,rate=-5mbit", "must be greater than 0"),
        ("speed=1,rate=5mbps", "must be a link rate"),
        ("speed=1,colour=red", "called 'colour'"),
        ("speed=1 x0", "asks for no host"),
        ("speed=1 x5000", "at most 154 hosts"),
        ("speed=1 x65", "the global batch size must be at least 65, one sample a worker, got 64"),
        ("speed=1; speed=0.0001", "would be less than one sample"),
        ("cpu=1; speed=1", "Some hosts have a CPU quota"),
        ("cpu=900", "cores together, but this machine has"),
    ],
)
def test_hosts_that_cannot_be_rehearsed(hetopt: Hetopt, plan: Path, hosts: str, said: str) -> None:
    _refused(hetopt("launch", plan, "--on", "rehearsal", "--hosts", hosts, "--dry-run"), 2, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--compression", "powersgd:0.1"], "the ratio of powersgd must be 1"),
        (["--compression", "powersgd", "--ratio-policy", "gravac"], "nothing for gravac to decide"),
        (["--compression", "topk", "--collective", "all_reduce"], "Every worker selects other elements in topk"),
        (["--ratio-policy", "accordion"], "nothing for accordion to decide"),
        (["--compression", "qsgd_maxnorm,bits=8,levels=64"], "overflow"),
    ],
)
def test_exchanges_that_cannot_be(hetopt: Hetopt, plan: Path, options: list[str], said: str) -> None:
    for place in (["--on", "local", "--slowdown", "1,2"], ["--on", "rehearsal", "--hosts", "speed=1 x2"]):
        _refused(hetopt("launch", plan, *place, "--dry-run", *options), 2, said)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("30s h9 speed=0.5", "names the host 'h9'"),
        ("h1 speed=0.5", "does not say when"),
        ("step 5 h1 speed=0", "must be greater than 0"),
        ("# a comment\nstep five h1 dies", "line 2"),
    ],
)
def test_schedules_that_cannot_be_followed(
    hetopt: Hetopt, plan: Path, tmp_path: Path, schedule: str, said: str
) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(schedule)
    asked = ("launch", plan, "--on", "rehearsal", "--hosts", "speed=1 x2", "--dry-run", "--schedule")
    _refused(hetopt(*asked, path), 2, said)
    _refused(hetopt(*asked, tmp_path / "none.txt"), 2, "does not exist")
    _refused(hetopt(*asked, tmp_path), 2, "cannot be read: Is a directory")


def test_a_plan_that_does_not_know_how_fast_its_machines_are(hetopt: Hetopt, plan: Path, tmp_path: Path) -> None:
    old = json.loads(plan.read_text())
    del old["chosen"]["groups"][0]["assumed"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    _refused(hetopt("launch", path, "--on", "rehearsal", "--dry-run"), 2, "does not say how fast its machines")


def test_only_a_rehearsal_can_be_disturbed(hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, plan: Path) -> None:
    home = plan.parent / "home"
    monkeypatch.setenv("HETOPT_HOME", str(home))
    run = home / "runs" / "20261120-000000-digits-0000"
    run.mkdir(parents=True)
    write_spec(run, predict_on_local(Plan.load(plan), (1.0, 1.0)).run)
    _refused(hetopt("inject", run.name, "h0 dies"), 2, "is no rehearsal")
    described = rehearse(Plan.load(plan), ThisMachine(processors=2, operating_system=""), parse_hosts("speed=1 x2"))
    write_spec(run, described.run)
    _refused(hetopt("inject", run.name, "h7 dies"), 2, "names the host 'h7'")
    _refused(hetopt("inject", run.name, "h0 rate=0mbit"), 2, "must be greater than 0")
    _refused(hetopt("inject", run.name, "h0 dies"), 2, "is over")


@pytest.mark.parametrize(
    "command",
    ["profile", "recommend", "launch", "status", "logs", "stop", "report", "inject", "gc", "catalog"],
)
def test_every_command_explains_itself(hetopt: Hetopt, command: str) -> None:
    answer = hetopt(command, "--help")
    assert answer.code == 0
    assert "Usage: hetopt" in answer.out
    assert len(answer.out.splitlines()) > 8


def test_an_unknown_option_is_a_usage_error(hetopt: Hetopt) -> None:
    assert hetopt("recommend", "--bugdet", "5").code == 2

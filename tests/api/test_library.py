"""The library as a script or a notebook meets it: names, start-up, and the whole way from a profile to a report."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hetopt
from hetopt.api.backends import Machines, backend, options_at
from hetopt.api.launching import prepare_resumed
from hetopt.api.run import Run
from hetopt.backends.options import Ec2, Local, Rehearsal, Ssh
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.core.option import changed
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.region_cities import CITIES

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"


def test_every_name_is_there_documented_and_typed() -> None:
    for name in hetopt.__all__:
        value = getattr(hetopt, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            assert all(one.annotation is not inspect.Parameter.empty for one in parameters), name
    assert set(hetopt.__all__) <= set(dir(hetopt))
    assert sorted(hetopt.__all__) == sorted([*hetopt._HOMES, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hetopt.nonsense


def test_help_is_there_without_torch() -> None:
    """`help(hetopt)` looks at every name that is offered: none may need what is not installed."""
    code = (
        "import importlib.util, inspect, sys, hetopt\n"
        "sys.modules['torch'] = None\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else found(name, *more)\n"
        "names = dict(inspect.getmembers(hetopt))\n"
        "print('recommend' in names, 'Task' in names, 'import_module' in names)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False", "False"]


def test_an_estimate_is_read_in_three_lines() -> None:
    made = hetopt.estimate(params="110M", samples="3M", tokens=128, types="g5.xlarge", max_workers=1)
    assert str(made).startswith("110 M parameters, 3,000,000 samples, 2.5e+17 FLOPs\n1 × g5.xlarge (spot): ")
    assert "Assumed: 256 samples a step" in str(made)
    assert "<table>" in made._repr_html_()
    assert len(repr(made)) < 250


def test_names_stay_functions_whatever_is_imported() -> None:
    """A room of the same name would hide a function as soon as one of its modules is imported."""
    rooms = {one.name for one in pkgutil.iter_modules(hetopt.__path__)}
    assert rooms >= {"core", "api", "optimizer", "trainer"}
    assert not rooms & set(hetopt.__all__)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, hetopt\n"
        "assert not [name for name in sys.modules if name.startswith('hetopt.')], 'nothing is imported yet'\n"
        f"plan = hetopt.recommend({str(RECORDED)!r}, budget_usd=2, epochs=10, types='c7i.*', max_workers=4, trials=0)\n"
        "print(plan.chosen.prediction.cost_usd.value > 0, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False"]


def test_a_plan_runs_is_followed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    plan = hetopt.recommend(RECORDED, budget_usd=2, epochs=4, types="c7i.*", max_workers=4, trials=0)
    said: list[str] = []
    kinds: list[str] = []
    run = hetopt.launch(plan, on=Local(slowdowns=(1, 2)))
    status = run.wait(
        on_event=lambda event: kinds.append(type(event).__name__),
        reporter=Reporter(progress=lambda text, done: said.append(text)),
    )
    assert status.state.value == "finished"
    assert {"RunStarted", "StepsLogged", "TrainingFinished"} <= set(kinds)
    assert any(text.startswith("step ") and " samples/s" in text and "straggler wait" in text for text in said)
    told = [line.text for line in run.logs() if line.source == "run"]
    assert "digits starts on 2 workers" in told[0]
    assert any("accuracy" in line for line in told)
    assert "all its epochs done" in told[-1]
    assert run.model is not None
    assert run.model.name == "model.safetensors"
    assert hetopt.Run.find(run.name).folder == run.folder
    report = hetopt.report(run)
    assert {one.name for one in report.compared} >= {"run time"}
    assert report == hetopt.report(run.name)
    lines = str(report).splitlines()
    at = next(number for number, line in enumerate(lines) if "predicted" in line and "measured" in line)
    head, *rows = lines[at : at + 1 + len(report.compared)]
    ends = [head.index(name) + len(name) for name in ("predicted", "measured")]
    assert all(row[end - 1] != " " == row[end] for row in rows for end in ends), "figures end below their names"
    assert plan.advice is not None
    assert str(plan).endswith(plan.advice), "a job of seconds needs nothing that is rented"
    assert "</table>" in report._repr_html_()
    assert "<table" in plan._repr_html_()
    (run.folder / "log" / "witness.log").write_text("one\ntwo\n")
    assert [line.text for line in run.logs() if line.source == "witness"] == ["one", "two"]
    with pytest.raises(BadInput, match="no run is called"):
        hetopt.resume(run.name + "-not-there")


def test_what_is_printed_is_a_line() -> None:
    profile = hetopt.Profile.load(RECORDED)
    plan = hetopt.recommend(profile, budget_usd=2, epochs=4, types="c7i.large", max_workers=2, trials=0)
    for one in (profile, plan.chosen, *plan.choices, *hetopt.gpus()):
        assert "\n" not in str(one)
        assert len(str(one)) < 160
        assert str(one) in repr(one)
    assert profile.job.task in str(profile)
    assert "c7i.large" in str(plan.chosen)


def test_a_task_is_a_name() -> None:
    with pytest.raises(BadInput, match="`task` must be the name of a task or script, got 3"):
        hetopt.profile(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"on": "moon"}, "cannot launch on 'moon'"),
        ({"on": "local", "steps": 0}, r"`steps` must be at least 1, got 0"),
        ({"on": "local", "steps": "many"}, r"`steps` must be a number, got 'many'"),
        ({"on": "local", "steps": 10**30}, r"`steps` must be at most 1,000,000,000,000, got 1000"),
        ({"on": "local", "batch_policy": "rate"}, "follows streams"),
        ({"on": "ec2", "stream": "replay(40)"}, '`stream` is for `on="local"`'),
    ],
)
def test_what_cannot_be_is_said_in_the_library_s_words(arguments: dict[str, object], said: str) -> None:
    plan = hetopt.recommend(RECORDED, budget_usd=2, epochs=4, types="c7i.large", max_workers=2, trials=0)
    with pytest.raises(BadInput, match=said) as refused:
        hetopt.launch(plan, **arguments)  # type: ignore[arg-type]  # what a script may write
    assert "--" not in str(refused.value)


def test_a_search_without_limits_and_a_target_of_another_metric_are_refused() -> None:
    with pytest.raises(BadInput, match="give `budget_usd`, `deadline` or both"):
        hetopt.recommend(RECORDED)
    with pytest.raises(BadInput, match="was profiled for accuracy, not loss"):
        hetopt.recommend(RECORDED, budget_usd=2, target="loss=1")
    with pytest.raises(BadInput, match="`deadline` must be a length of time, got 'soon'"):
        hetopt.recommend(RECORDED, deadline="soon")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"objective": "best"}, "There is no objective called 'best'"),
        ({"architecture": "sparc"}, "There is no architecture called 'sparc'"),
        ({"learning_rate_rule": "cubic"}, "There is no learning rate rule called 'cubic'"),
        ({"market": "black"}, "There is no market called 'black'"),
    ],
)
def test_a_name_that_is_none_is_refused_before_the_profile_is_read(named: dict[str, str], told: str) -> None:
    with pytest.raises(BadInput) as refused:
        hetopt.recommend("not-there.json", budget_usd=2, **named)  # type: ignore[arg-type]  # on purpose
    assert told in str(refused.value)


def test_a_batch_policy_that_is_none_is_refused_before_the_plan_is_read() -> None:
    with pytest.raises(BadInput, match="There is no batch policy called 'best'"):
        hetopt.launch("not-there.json", on="local", batch_policy="best")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        (Local, {"slowdowns": 2}, r"`slowdowns` must be a factor for each worker, got 2"),
        (Local, {"slowdowns": ("a",)}, r"`slowdowns` must be numbers from 1 to 1,000,000, got a"),
        (Local, {"restarts": -1}, r"`restarts` must be a number from 0 to 1,000,000, got -1"),
        (Ec2, {"budget_usd": [5]}, r"`budget_usd` must be an amount in USD, got \[5\]"),
        (Ec2, {"substitutes": ["c7i.large"]}, r"`substitutes` must be TYPE=OTHER"),
        (Ec2, {"images": ["x86_64-cpu"]}, r"`images` must be KIND=AMI"),
    ],
)
def test_a_value_that_cannot_be_is_refused_as_soon_as_it_is_given(
    record: type, options: dict[str, object], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        record(**options)


@pytest.mark.parametrize(
    ("place", "option", "said"),
    [
        ("local", "hosts", '`hosts` is for `on="rehearsal"` or `on="ssh"`'),
        ("local", "budget_usd", '`budget_usd` is for `on="ec2"`'),
        ("rehearsal", "slowdowns", '`slowdowns` is for `on="local"`'),
        ("ec2", "restarts", '`restarts` is for `on="local"`'),
    ],
)
def test_an_option_of_another_place_is_refused(place: Place, option: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        options_at(place, {option: "1"})


@pytest.mark.parametrize(
    "on",
    [Local(slowdowns=(1, 2)), Local(data="x"), Rehearsal(hosts="speed=1"), Rehearsal(stand_in=True), Ssh(hosts="h")],
)
def test_a_run_that_goes_on_is_the_run_that_it_was(on: Machines, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"`{changed(on)[0]}` cannot change"):
        prepare_resumed(Run.in_folder(tmp_path), backend(on.PLACE), on)


def test_a_run_tells_what_its_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    assert hetopt.Run.all() == []
    told = (Path(__file__).resolve().parents[1] / "recorded" / "runs" / "resumed.jsonl").read_text(encoding="utf-8")
    for number in (1, 2):
        folder = tmp_path / "runs" / f"20261126-00000{number}-digits-000{number}"
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text(told, encoding="utf-8")
    older, newer = hetopt.Run.all()
    assert (older.name[-4:], newer, hetopt.Run.find("0001")) == ("0001", hetopt.Run.find(), older)
    assert newer.last_known() == (newer.status(), True)
    assert [line.text for line in newer.logs(events=True)] == told.splitlines()
    assert {line.source for line in newer.logs()} == {"run"}
    with pytest.raises(BadInput, match="no output of worker 7"):
        list(newer.logs(worker=7))
    with pytest.raises(BadInput, match="no model yet"):
        newer.fetch_model()
    (newer.folder / "model.safetensors").touch()
    assert newer.fetch_model() == (newer.folder / "model.safetensors", None)
    assert newer.record().progress.sessions == 2


def test_a_notebook_shows_a_table_of_each_answer() -> None:
    made = hetopt.estimate(params="110M", samples="3M", tokens=128, budget_usd=200)
    plan = made.plan
    for shown in (plan, plan.profile, plan.chosen, *plan.choices, hetopt.gpus()):
        page = shown._repr_html_()
        assert page.count("</tr>") >= 2, "a head and a row"
        assert "None" not in page
        assert page.count("<td>") % page.count("<th>") == 0, "a cell in each column"
    here = hetopt.recommend(RECORDED, budget_usd=2, epochs=50).choices[0]
    assert here.candidate is None
    assert "<td>this machine</td>" in here._repr_html_()


def test_gpus_are_printed_a_line_each() -> None:
    found = hetopt.gpus()
    assert str(found).splitlines() == [str(gpu) for gpu in found]
    assert "L4" in hetopt.gpus("L4")._repr_html_()


def test_a_city_names_its_region() -> None:
    with pytest.raises(BadInput, match="Frankfurt is eu-central-1"):
        hetopt.gpus(region="frankfurt")


def test_every_region_of_the_catalogue_has_a_city() -> None:
    assert set(load_catalog().regions) <= CITIES.keys()


def test_the_name_of_a_gpu_is_no_type_and_says_which_have_it() -> None:
    with pytest.raises(BadInput, match=r"catalog list --gpu l4"):
        load_catalog().instance_type("l4")


def test_a_printed_plan_says_what_is_rented() -> None:
    made = hetopt.estimate(params="110M", samples="3M", tokens=128, types="g6f.2xlarge", max_workers=1)
    assert "(spot): " in str(made.plan)
    assert made.plan.chosen.hardware_in_words == "1/4 L4 6 GiB"


def test_a_script_in_place_of_a_profile_is_to_be_profiled(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    with pytest.raises(BadInput, match=r"profile it first: `hetopt profile -- .*train\.py`"):
        hetopt.recommend(script, budget_usd=2, epochs=1)

"""The library as a script or a notebook meets it: names, start-up, and the whole way from a profile to a report.

Prices of one's own: reserved machines and contracts.
"""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

import hetopt
from hetopt.api.backends import Machines, backend, options_at
from hetopt.api.launching import prepare_resumed
from hetopt.api.run import Run
from hetopt.backends.options import Ec2, Local, Rehearsal, Ssh
from hetopt.core.errors import BadInput
from hetopt.core.option import changed
from hetopt.optimizer.market.catalog import CITIES, load_catalog
from hetopt.optimizer.plan import Plan

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"


def test_every_name_is_there_documented() -> None:
    """And no room of the same name would hide it as soon as one of its modules is imported."""
    names = sorted({*hetopt.__all__} - {"__version__"})
    assert names == sorted(hetopt._HOMES)
    assert [name for name in names if not inspect.getdoc(getattr(hetopt, name))] == []
    assert not {one.name for one in pkgutil.iter_modules(hetopt.__path__)} & set(names)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hetopt.nonsense


def test_help_is_there_without_torch() -> None:
    """`help(hetopt)` looks at every name that is offered: none may need what is not installed."""
    code = (
        "import importlib.util, inspect, sys, hetopt\n"
        "assert not [name for name in sys.modules if name.startswith('hetopt.')], 'nothing is imported yet'\n"
        "sys.modules['torch'] = None\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else found(name, *more)\n"
        "names = dict(inspect.getmembers(hetopt))\n"
        "print('recommend' in names, 'Task' in names, 'import_module' in names)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False", "False"]


def test_what_is_printed_is_a_line(small: Plan) -> None:
    for one in (small.profile, small.chosen, *small.choices, *hetopt.gpus()):
        assert "\n" not in str(one)
        assert len(str(one)) < 160
        assert str(one) in repr(one)


@pytest.fixture(scope="module")
def small() -> Plan:
    return hetopt.recommend(RECORDED, budget_usd=2, epochs=4, types="c7i.large", max_workers=2, trials=0)


TWO = hetopt.Local(slowdowns=(1, 1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda _: hetopt.profile(3), "`task` must be the name of a task or script, got 3"),
        (
            lambda _: hetopt.profile("digits", probe_budget_usd=0.1, explore_on="ssh"),
            '`inventory` names the hosts that `explore_on="ssh"` explores',
        ),
        (lambda plan: hetopt.launch(plan, on="moon"), "cannot launch on 'moon'"),
        (lambda plan: hetopt.launch(plan, on="local", steps=0), "`steps` must be at least 1, got 0"),
        (lambda plan: hetopt.launch(plan, on="local", steps="many"), "`steps` must be a whole number, got 'many'"),
        (lambda plan: hetopt.launch(plan, on="local", steps=10**30), "`steps` must be at most 1,000,000,000,000, got"),
        (lambda plan: hetopt.launch(plan, on="local", batch_policy="rate"), "follows streams"),
        (
            lambda plan: hetopt.launch(plan, on=TWO, batch_policy="critical", sync="local-sgd(8)"),
            "sums of whole gradients",
        ),
        (lambda plan: hetopt.launch(plan, on="ec2", stream="replay(40)"), '`stream` is for `on="local"`'),
        # Before a file is read.
        (lambda _: hetopt.launch("none.json", on="local", batch_policy="best"), "no batch policy called 'best'"),
        (lambda _: hetopt.recommend("none.json", budget_usd=2, objective="best"), "no objective called 'best'"),
        (lambda _: hetopt.recommend("none.json", budget_usd=2, architecture="sparc"), "no architecture called 'sparc'"),
        (lambda _: hetopt.recommend("none.json", budget_usd=2, learning_rate_rule="x"), "no learning rate rule called"),
        (lambda _: hetopt.recommend("none.json", budget_usd=2, market="black"), "no market called 'black'"),
        (lambda _: hetopt.recommend(RECORDED), "give `budget_usd`, `deadline` or both"),
        (lambda _: hetopt.recommend(RECORDED, budget_usd=2, target="loss=1"), "was profiled for accuracy, not loss"),
        (lambda _: hetopt.recommend(RECORDED, deadline="soon"), "`deadline` must be a length of time, got 'soon'"),
        (lambda _: hetopt.recommend(__file__, budget_usd=2, epochs=1), "profile it first: `hetopt profile -- .*py`"),
        (lambda _: hetopt.gpus(region="frankfurt"), "Frankfurt is eu-central-1"),
        (lambda _: Local(slowdowns=2), "`slowdowns` must be a factor for each worker, got 2"),
        (lambda _: Local(restarts=-1), "`restarts` must be at least 0, got -1"),
        (lambda _: Ec2(budget_usd=[5]), r"`budget_usd` must be an amount in USD, got '\[5\]'"),
        (lambda _: Ec2(images=["x86_64-cpu"]), "`images` must be KIND=AMI"),
        (lambda _: options_at("local", {"hosts": "1"}), '`hosts` is for `on="rehearsal"` or `on="ssh"`'),
        (lambda _: options_at("rehearsal", {"slowdowns": "1"}), '`slowdowns` is for `on="local"`'),
        (lambda _: options_at("ec2", {"restarts": "1"}), '`restarts` is for `on="local"`'),
    ],
)
def test_what_cannot_be_is_said_in_the_librarys_words(call: Callable[[Plan], object], said: str, small: Plan) -> None:
    with pytest.raises(BadInput, match=said):
        call(small)


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
    assert ("Backend" in repr(newer), "epoch" in newer._repr_html_()) == (False, True)
    assert [line.text for line in newer.logs(events=True)] == told.splitlines()
    with pytest.raises(BadInput, match="no output of worker 7"):
        list(newer.logs(worker=7))
    with pytest.raises(BadInput, match="no model yet"):
        newer.fetch_model()
    (newer.folder / "model.safetensors").touch()
    assert newer.fetch_model() == (newer.folder / "model.safetensors", None)


def test_a_notebook_shows_the_page_of_each_answer() -> None:
    """In a frame that may neither reach the notebook nor load anything."""
    made = hetopt.estimate(params="110M", samples="3M", tokens=128, budget_usd=200)
    for shown in (made, made.plan, made.plan.profile):
        frame = shown._repr_html_()
        page = unescape(frame)
        assert frame.count("<") == 2, "the frame and its end"
        assert 'sandbox="allow-scripts"' in frame
        assert "</section>" in page
        assert "None" not in page


def test_every_region_of_the_catalogue_has_a_city() -> None:
    assert set(load_catalog().regions) <= CITIES.keys()


def test_the_name_of_a_gpu_is_no_type_and_says_which_have_it() -> None:
    with pytest.raises(BadInput, match=r"catalog list --gpus l4"):
        load_catalog().instance_type("l4")


def test_a_price_of_ones_own_takes_the_place_of_the_list_price() -> None:
    job = {"params": "1B", "samples": "500k", "gpus": "A100", "types": ("p4d.24xlarge",), "market": "on-demand"}
    usual = hetopt.estimate(**job).plan
    own = hetopt.estimate(**job, prices="p4d.24xlarge=9.5", quotas="p=96").plan
    group = own.chosen.groups[0]
    assert (group.price_usd_per_hour, group.price_source) == (9.5, "your own")
    assert own.chosen.prediction.cost_usd.value < 0.6 * usual.chosen.prediction.cost_usd.value


@pytest.mark.parametrize("given", ["p4d.24xlarge=0", "p4d.24xlarge=9,5", "p4d.24xlarge=nan", "=3", "x", "no.such=1"])
def test_what_is_no_price_is_refused(given: str) -> None:
    with pytest.raises(BadInput) as refused:
        hetopt.estimate(params="1B", samples="500k", prices=(given,))
    assert refused.value.hint

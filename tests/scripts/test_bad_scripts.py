"""Scripts that cannot be profiled are named with their line, in one sentence with the next step; nothing hangs.

The processes are forked from one that has imported torch, so that a case costs what its script does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import pytest

from hetopt.api.script_text import read_script, resumes, several_workers
from hetopt.backends.host.bundle import make_bundle, user_code
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.plain_text import typed_script
from hetopt.core.search_path import INSTALLED_ONLY, code_folder
from hetopt.profiler.script.order import ORDER_FILE, ScriptOrder
from tests.disturbance import PATIENCE_S
from tests.forks import Forked

HEAD = """import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
"""
FOREVER = HEAD + "import itertools\nfor (x,) in itertools.chain.from_iterable(itertools.repeat(loader)):\n"


def profiled(folder: Path, text: str, *arguments: str, startup_s: float = 600.0) -> tuple[int | None, Event | None]:
    """Profile a script alone; the exit code, and what was told where it failed."""
    script = folder / "train.py"
    script.write_text(text)
    order = ScriptOrder(
        script=str(script),
        arguments=arguments,
        timed_steps=3,
        time_limit_s=1.0,
        training_s=0.1,
        startup_s=startup_s,
    )
    (folder / ORDER_FILE).write_text(order.model_dump_json())
    with Forked(["-m", "hetopt.profiler.script.child", str(folder), "0"], os.environ) as process:
        process.communicate(PATIENCE_S)
    failed = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "run_failed"]
    return process.returncode, failed[0] if failed else None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        pytest.param(
            HEAD + "for (x,) in loader:\n    model(x)\n",
            0,
            "No backward is called, and no optimizer of torch steps",
            id="no backward",
        ),
        pytest.param(
            HEAD + "for (x,) in loader:\n" + STEP + "    raise SystemExit(3)\n",
            10,
            "exits here after 0 measured",
            id="exits",
        ),
    ],
)
def test_what_cannot_be_profiled_is_named_with_its_line(text: str, line: int, said: str, tmp_path: Path) -> None:
    code, told = profiled(tmp_path, text, "--foo")
    assert code == BadInput.exit_code
    assert told is not None
    assert told["hint"]
    assert not line or f"train.py, line {line}" in told["reason"]
    assert re.search(said, told["reason"])


def test_a_script_of_a_stream_is_profiled_without_an_epoch(tmp_path: Path) -> None:
    stream = "class Endless(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
    loop = "        while True:\n            yield torch.ones(4)\nfor x in DataLoader(Endless(), 4):\n"
    assert profiled(tmp_path, HEAD.replace("loader = ", "# ") + stream + loop + STEP) == (0, None)
    (job,) = [event for event in read_events(tmp_path / EVENTS_FILE) if event["event"] == "job_facts"]
    assert job["counts_epochs"] is False


def test_a_script_that_never_steps_is_named_where_it_is(tmp_path: Path) -> None:
    text = "try:\n    import time\n    time.sleep(1000)\nexcept Exception:\n    time.sleep(1000)\n"
    code, told = profiled(tmp_path, text, startup_s=1.0)
    assert code == RunFailed.exit_code
    assert told is not None
    assert re.search("train.py, line 3: here the script still was after 1 s", told["reason"])


def test_a_script_that_fails_by_itself_has_failed_and_its_own_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import torch\n\n\ndef load():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    code, told = profiled(tmp_path, "import helper\nhelper.load()\n")
    assert code == RunFailed.exit_code
    assert told is not None
    assert told["reason"].startswith("helper.py, line 5: RuntimeError")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("OneCycleLR(opt, 0.1, total_steps=4)", None),
        ("LambdaLR(opt, lambda epoch: int(epoch < 1 or 'many'))", "line 7: ValueError: .*'many'"),
    ],
)
def test_only_the_end_of_a_schedule_is_passed_over(schedule: str, said: str | None, tmp_path: Path) -> None:
    """OneCycleLR refuses to go on, and measuring does more steps than the script would. What else fails is an error."""
    text = FOREVER.replace("import itertools", f"import itertools\nschedule = torch.optim.lr_scheduler.{schedule}")
    code, told = profiled(tmp_path, text + STEP + "    schedule.step()\n")
    assert code == (0 if said is None else RunFailed.exit_code)
    assert (told is None) == (said is None)
    assert told is None or re.search(said or "", told["reason"])


def test_a_session_is_found_in_a_module_beside_the_script_and_not_in_its_words(tmp_path: Path) -> None:
    script, package = tmp_path / "main.py", tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("from .loop import train\n")
    script.write_text("from lib import train\n# session(model, opt)\nprint('session(')\ntrain()\n")
    (package / "loop.py").write_text("import db\n\n\ndef train():\n    db.session(1)\n")
    files = read_script(script)
    assert [one.name for one in files] == ["main.py", "lib/__init__.py", "lib/loop.py"]
    assert not several_workers(files)
    for text in (
        "from hetopt import session as begin\n\n\ndef train():\n    begin(1, 2)\n",
        "import hetopt\n\n\ndef train():\n    hetopt.session(1, 2)\n",
        "from hetopt.trainer.session import session\n\n\ndef train():\n    with session(1, 2):\n        pass\n",
    ):
        (package / "loop.py").write_text(text)
        assert several_workers(read_script(script)) == "a session"


# What is read off a script's text: whether it has a session, and goes on from checkpoints.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for epoch in range(run.resume(), 3):\n    run.checkpoint()\n", True),
        ("first = loader.run.resume(extra)\ndef save():\n    loader.run.checkpoint(extra)\n", True),
        ("run.checkpoint()\n", False),
        ("run.resume()\ntorch.utils.checkpoint.checkpoint(block, x)\n", False),
        ("# run.resume() and run.checkpoint()\nwandb.init(resume=True)\n", False),
    ],
)
def test_it_goes_on_where_it_saves_and_resumes(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import loops\n")
    (tmp_path / "loops.py").write_text(text)
    assert resumes(read_script(tmp_path / "train.py")) is expected


# A script in a package runs, is read and travels as `python -m` has it; any other as a file does.

BESIDE, WHOLE, RELATIVE = "import helper", "from app.helper import VALUE", "from .helper import VALUE"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """``app/sub/train.py`` and the modules that it may import, in packages with and without a file of their own."""
    for name in ("app/__init__.py", "app/helper.py", "app/sub/helper.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if path.stem == "__init__" else "import os\n\nVALUE = 3\n")
    return tmp_path


def script(folder: Path, text: str, name: str = "app/sub/train.py") -> Path:
    path = folder / name
    path.write_text(f"{text}\nprint(__name__, __package__ or '-')\n")
    return path


@pytest.mark.parametrize(
    ("text", "root", "said"),
    [
        (BESIDE, "app/sub", "__main__ -"),
        (WHOLE, "", "__main__ app.sub"),
        (RELATIVE, "", "__main__ app.sub"),
        (f"{BESIDE}\n{WHOLE}", "", "__main__ app.sub"),
        ("from ..helper import VALUE", "", "__main__ app.sub"),
        ("import json", "app/sub", "__main__ -"),
    ],
)
def test_it_runs_where_its_imports_are_found(package: Path, text: str, root: str, said: str) -> None:
    path = script(package, text)
    (package / "app/sub/__init__.py").touch()
    assert code_folder(path) == package / root
    run = f"from hetopt.core.search_path import run_script; run_script({str(path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", run], env=INSTALLED_ONLY, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == said, done.stderr


def test_a_checkout_that_is_called_as_what_is_installed_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "hetopt/examples").mkdir(parents=True)
    path = script(tmp_path, "from hetopt import session", "hetopt/examples/train.py")
    assert code_folder(path) == path.parent


def test_all_of_its_package_is_read_and_travels(package: Path) -> None:
    path = script(package, f"{WHOLE}\nfrom . import helper as other", "app/train.py")
    (package / "app/helper.py").write_text("from app.sub import helper\nVALUE = 3\n")
    assert [one.name for one in read_script(path)] == ["train.py", "app/helper.py", "app/sub/helper.py"]
    files = [name for name, _ in user_code(path, provided=frozenset())]
    assert files == ["app/__init__.py", "app/helper.py", "app/sub/helper.py", "app/train.py"]
    assert make_bundle("app", (str(path), "--lr", "0.1")).script == ("task/app/train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["-m", "app.sub.train", "--lr", "1"], ("app/sub/train.py", "--lr", "1")),
        (["python", "-m", "app.sub.train"], ("app/sub/train.py",)),
        (["python3", "train.py", "-m", "x"], ("train.py", "-m", "x")),
        (["-m", "app"], ("app/__main__.py",)),
        ([], ()),
    ],
)
def test_people_start_scripts_in_several_ways(package: Path, typed: Sequence[str], meant: tuple[str, ...]) -> None:
    for name in ("app/sub/train.py", "app/__main__.py"):
        script(package, BESIDE, name)
    with chdir(package):
        assert typed_script(typed) == meant


@pytest.mark.parametrize("typed", [["-m", "app.none"], ["-m"], ["-m", "app..sub"]])
def test_a_module_that_is_not_there_is_named(package: Path, typed: Sequence[str]) -> None:
    with chdir(package), pytest.raises(BadInput, match="there is no module"):
        typed_script(typed)

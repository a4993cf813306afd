"""Scripts that cannot be profiled are named with their line, in one sentence with the next step; nothing hangs.

The processes are forked from one that has imported torch, so that a case costs what its script does.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hetopt.api.script_text import read_script, several_workers, sharded_by
from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.profiler.records import JOB_FACTS
from hetopt.profiler.script.order import FAILED_FILE, ORDER_FILE, Failure, ScriptOrder

from .warm import FORKS

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
PATIENCE_S = 120.0


def _alone(folder: str, script: str) -> None:
    """What `hetopt profile` starts, in a process that has torch already."""
    from hetopt.profiler.script.child import main

    said = os.open(Path(folder, "said"), os.O_WRONLY | os.O_CREAT)
    nobody = os.open(os.devnull, os.O_RDONLY)
    for of, to in ((nobody, 0), (said, 1), (said, 2)):
        os.dup2(of, to)
    sys.stdin = os.fdopen(0)
    os.environ.pop("DISPLAY", None)
    code = main([folder, "0"])
    os._exit(code)


def profiled(folder: Path, text: str, *arguments: str, startup_s: float = 600.0) -> tuple[int | None, Failure | None]:
    """Profile a script alone; the exit code, and what was told where it failed."""
    script = folder / "train.py"
    script.write_text(text)
    order = ScriptOrder(
        script=str(script),
        arguments=arguments,
        timed_steps=3,
        sweep_s=1.0,
        training_s=0.1,
        startup_s=startup_s,
    )
    (folder / ORDER_FILE).write_text(order.model_dump_json())
    process = FORKS.Process(target=_alone, args=(str(folder), str(script)))
    process.start()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
    failed = folder / FAILED_FILE.format(rank=0)
    return process.exitcode, read_record(Failure, failed, hint="") if failed.exists() else None


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
            FOREVER + "    model(x).sum().backward()\n",
            8,
            "1,000 times, and no optimizer of torch steps",
            id="by hand",
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
    assert told.hint
    assert not line or f"train.py, line {line}" in told.message
    assert re.search(said, told.message)


def test_a_script_of_a_stream_is_profiled_without_an_epoch(tmp_path: Path) -> None:
    stream = "class Endless(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
    loop = "        while True:\n            yield torch.ones(4)\nfor x in DataLoader(Endless(), 4):\n"
    assert profiled(tmp_path, HEAD.replace("loader = ", "# ") + stream + loop + STEP) == (0, None)
    (job,) = [event for event in read_events(tmp_path / EVENTS_FILE) if event["event"] == JOB_FACTS]
    assert job["counts_epochs"] is False


def test_a_script_that_never_steps_is_named_where_it_is(tmp_path: Path) -> None:
    text = "try:\n    import time\n    time.sleep(1000)\nexcept Exception:\n    time.sleep(1000)\n"
    code, told = profiled(tmp_path, text, startup_s=1.0)
    assert code == RunFailed.exit_code
    assert told is not None
    assert re.search("train.py, line 3: here the script still was after 1 s", told.message)


def test_a_script_that_fails_by_itself_has_failed_and_its_own_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import torch\n\n\ndef load():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    code, told = profiled(tmp_path, "import helper\nhelper.load()\n")
    assert code == RunFailed.exit_code
    assert told is not None
    assert told.message.startswith("helper.py, line 5: RuntimeError")


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
    assert told is None or re.search(said or "", told.message)


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


@pytest.mark.parametrize(
    ("text", "sharder"),
    [
        ("import deepspeed\n", "DeepSpeed"),
        ("from torch.distributed.fsdp import fully_shard\n", "fully_shard"),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n", "FSDP"),
        ("import torch.distributed  # deepspeed\n", ""),
    ],
)
def test_a_script_that_shards_its_model_is_known_by_its_imports(text: str, sharder: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert sharded_by(read_script(script)) == sharder

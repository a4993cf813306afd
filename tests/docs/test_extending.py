"""The pages on extending hetopt hold code that runs, through the public registry and no other way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from hetopt.api.backends import options_at, register as register_backend
from hetopt.backends.on_this_machine import LocalBackend
from hetopt.backends.options import Local
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.run_spec import BATCH_POLICIES, RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.trainer.policies.policy import POLICIES, KeepShares, choose_policy, register as register_policy
from tests.api.test_backends import Stories, plan  # noqa: F401  # a fixture
from tests.disturbance import PATIENCE_S
from tests.forks import Forked
from tests.sources import REPOSITORY

PAGES = REPOSITORY / "docs" / "extending"
NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
MOST_LINES = 40

LAWS = """
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.composition import combinations, why_not
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange

asked = parse_compression("signed_topk(0.25)")
assert asked.name == "signed_topk"
assert [each.memory for each in combinations() if each.name == "signed_topk"] == ["error_feedback"]
assert why_not("signed_topk", "error_feedback", "ar_topk") is not None
assert wire_bytes("signed_topk", 8, 0.25) == 16

exchange, brought, received = Exchange(asked, 8), torch.zeros(8), torch.zeros(8)
for step in range(40):
    flat = torch.randn(8, generator=torch.Generator().manual_seed(step))
    brought += flat
    stats = exchange.run(flat)
    assert stats.sent_bytes == 16
    assert flat.count_nonzero() == 2
    received += flat
torch.testing.assert_close(received + exchange.state()["residual"], brought)

try:
    register("topk", Method(about="", collectives=(GATHER,), memories=(FEEDBACK,)), lambda asked: SignedTopK(1.0))
except ValueError as error:
    assert "topk" in str(error)
else:
    raise AssertionError("a second method of the same name must be refused")
print("sent", stats.sent_bytes)
"""


def page(name: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_short_example(name: str) -> None:
    assert len([line for line in page(name).splitlines() if line.strip()]) < MOST_LINES


def test_the_compressor_of_the_page_obeys_the_laws(tmp_path: Path) -> None:
    program = tmp_path / "laws.py"
    program.write_text(f"import warnings\nwarnings.simplefilter('error')\n{page('compressor')}{LAWS}", encoding="utf-8")
    with Forked([str(program)], os.environ) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "sent 16\n"), err


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> type[LocalBackend]:
    """The backend of the page, registered in this process."""
    file = tmp_path_factory.mktemp("background") / "background.py"
    file.write_text(page("backend"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("hetopt_page_background", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    found: type[LocalBackend] = module.Background
    return found


@pytest.fixture(scope="module")
def run(background: type[LocalBackend], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all three: the task of its page, shared by the policy, in the background."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "shares.py").write_text(page("policy"), encoding="utf-8")
    (folder / "adding.py").write_text("import shares\n" + page("task"), encoding="utf-8")
    workers = [{"host": "localhost", "type": "local", "local_batch_size": 32, "slowdown": each} for each in (1.0, 4.0)]
    spec = RunSpec.model_validate_json(
        json.dumps(
            {
                "task": f"{folder / 'adding.py'}:task",
                "workers": workers,
                "batch_policy": "one-at-a-time",
                "control_period_steps": 5,
                "stop": {"max_steps": 60},
            }
        )
    )
    (folder / "run").mkdir()
    here = background()
    handle = here.start(spec, folder / "run", {})
    deadline = time.monotonic() + PATIENCE_S
    lowest = 0
    while not here.poll(handle).state.is_over:
        assert time.monotonic() < deadline
        lowest = max([lowest, *priorities(folder / "run")])
        time.sleep(0.05)
    status = here.poll(handle)
    assert status.state is RunState.FINISHED, status
    assert lowest == LOWEST_PRIORITY
    return folder / "run"


LOWEST_PRIORITY = 19


def priorities(folder: Path) -> list[int]:
    """Of the processes of a run that live."""
    found = []
    for process in psutil.process_iter(["cmdline", "nice"]):
        if str(folder) in (process.info["cmdline"] or []) and "hetopt.trainer.worker" in process.info["cmdline"]:
            found.append(process.info["nice"])
    return found


def test_a_run_trains_the_task_of_the_page(run: Path) -> None:
    losses = [event["loss"] for event in read_events(run / EVENTS_FILE) if event["event"] == "step"]
    assert losses[-1] < 0.5 * losses[0]


def test_the_policy_of_the_page_moves_samples_to_the_faster_worker(run: Path) -> None:
    shares = [event["local_batch_sizes"] for event in read_events(run / EVENTS_FILE) if event["event"] == "step"]
    assert shares[0] == [32, 32]
    assert all(sum(each) == 64 for each in shares)
    assert all(abs(after[0] - before[0]) <= 1 for before, after in pairwise(shares))
    assert shares[-1][0] > 36


def test_a_policy_is_registered_once_and_a_run_asks_for_one_that_is() -> None:
    assert list(POLICIES)[: len(BATCH_POLICIES)] == list(BATCH_POLICIES)
    with pytest.raises(ValueError, match="batch policy 'model' already"):
        register_policy("model", "", lambda spec, minimum: KeepShares())
    worker = WorkerSpec(host="a", type="local", local_batch_size=4)
    spec = RunSpec(task="digits", workers=(worker,), batch_policy="modle", stop=StopRule(max_steps=1))
    with pytest.raises(BadInput) as refused:
        choose_policy(spec, minimum=1)
    assert "'model'" in (refused.value.hint or "")


def test_a_backend_takes_the_options_that_it_names(background: type[LocalBackend]) -> None:
    options = options_at("background", {"slowdowns": "1,2"})
    assert isinstance(options, Local)
    assert (options.PLACE, options.slowdowns) == ("background", (1.0, 2.0))
    with pytest.raises(BadInput, match='`bucket` is for `on="ec2"`'):
        options_at("background", {"bucket": "mine"})
    with pytest.raises(ValueError, match="backend 'background' already"):
        register_backend(type(options), lambda reporter: background())


def test_an_installed_package_brings_a_backend(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(page("backend"), encoding="utf-8")
    info = tmp_path / "quiet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hetopt.backends]\nbackground = quiet\n")
    program = tmp_path / "program.py"
    program.write_text(
        "from hetopt.api.backends import backend\nprint(type(backend('background')).__name__)\n", encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Background\n"), done.stderr


@pytest.mark.slow  # the run above is its short form
class TestBackground(Stories):
    """The contract of every backend, of the one on the page."""

    @pytest.fixture(autouse=True)
    def registered(self, background: type[LocalBackend]) -> None:
        """By the page."""
        self.here = options_at("background", {"slowdowns": (1.0, 2.0)})

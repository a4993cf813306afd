"""A person's files beside a script may have the names of modules that hetopt needs: they are the script's, not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetopt.backends.emulation.namespaces import why_not
from tests.disturbance import PATIENCE_S
from tests.strangers import SAID, script_among_strangers
from tests.thinned import few

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "script"

WAIT = """
import time
handle = launcher.start(spec, run_dir, {})
while not launcher.poll(handle).state.is_over:
    time.sleep(0.1)
print(launcher.poll(handle).state.value)
"""
RUN = """
from pathlib import Path
from hetopt.core.run_spec import RunSpec
run_dir = Path("run")
run_dir.mkdir()
spec = RunSpec.model_validate_json('''{"task": "train.py", "script": ["train.py", "--epochs", "1"], "workers": [
    {"host": "h0", "type": "local", "local_batch_size": 16}, {"host": "h1", "type": "local", "local_batch_size": 16}],
    "stop": {"max_epochs": 1}, "batch_policy": "static"%s}''')
"""
RECORD = """
from pathlib import Path
from hetopt.api.exactness import _record
_record(Path(), %s, patience_s=600)
print("recorded")
"""
MINIATURE = ', "miniature": {"hosts": [{"name": "h0"}, {"name": "h1"}]}'

STARTERS = {
    "profile": "from pathlib import Path\nfrom hetopt.api.profiling_script import profile_script\n"
    "from hetopt.core.interruption import Reporter\n"
    "print(profile_script(Path('before.py'), dataset_size=None, workers=1, accelerators=0, time_budget_s=1.0, seed=0,"
    " machine_type='local', reporter=Reporter()).job.parameters)",
    "exactness alone": RECORD % "'alone', Path('before.py'), (), {}",
    "local": RUN % "" + "from hetopt.backends.processes import LocalLauncher\nlauncher = LocalLauncher()" + WAIT,
    "rehearsal": RUN % MINIATURE
    + "from hetopt.backends.emulation.conductor import RehearsalLauncher\nlauncher = RehearsalLauncher()"
    + WAIT,
    "exactness": RECORD % "'shared', Path('after.py'), (), {}, workers=2",
}
DIGITS = "from sklearn.datasets import load_digits\n"
AS_LARGE = """from types import SimpleNamespace as Digits
load_digits = lambda: Digits(images=torch.rand(1797, 8, 8).numpy(), target=(torch.arange(1797) % 10).numpy())
"""
"""To import scikit-learn takes each process a second."""

PRINTED = {"profile": "38282", "local": "finished", "rehearsal": "finished"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a module of its own, and strangers beside both."""
    for name, source in (("before", EXAMPLES / "train.py"), ("after", EXAMPLES / "train_hetopt.py")):
        text = source.read_text(encoding="utf-8")
        assert DIGITS in text
        (tmp_path / f"{name}.py").write_text(text.replace(DIGITS, AS_LARGE), encoding="utf-8")
    script_among_strangers(tmp_path)
    return tmp_path


@pytest.mark.parametrize("starter", few(3, STARTERS))
def test_no_stranger_is_imported_for_a_module_of_ours(starter: str, folder: Path) -> None:
    if starter == "rehearsal" and (reason := why_not()) is not None:
        pytest.skip(reason)
    program = [sys.executable, "-P", "-c", STARTERS[starter]]
    ended = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = "\n".join([ended.stderr, *(log.read_text() for log in folder.glob("run/log/**/*.log"))])
    assert SAID not in said
    assert ended.stdout.split()[-1:] == [PRINTED.get(starter, "recorded")], said

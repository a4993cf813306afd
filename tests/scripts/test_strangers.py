"""A person's files beside a script may have the names of modules that hetopt needs: they are the script's, not ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetopt.backends.emulation.namespaces import why_not
from tests.disturbance import PATIENCE_S
from tests.strangers import SAID, script_among_strangers

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
MINIATURE = ', "miniature": {"hosts": [{"name": "h0"}, {"name": "h1"}]}'

STARTERS = {
    "profile": "import hetopt; print(hetopt.profile('before.py', time_budget_s=5, workers=1).job.parameters)",
    "exactness": "from pathlib import Path\nfrom hetopt.api.exactness import _record\n"
    "_record(Path(), 'shared', Path('after.py'), (), {}, workers=2, patience_s=600)\n"
    "_record(Path(), 'alone', Path('before.py'), (), {}, patience_s=600)\nprint('recorded')",
    "local": RUN % "" + "from hetopt.backends.processes import LocalLauncher\nlauncher = LocalLauncher()" + WAIT,
    "rehearsal": RUN % MINIATURE
    + "from hetopt.backends.emulation.conductor import RehearsalLauncher\nlauncher = RehearsalLauncher()"
    + WAIT,
}
PRINTED = {"profile": "38282", "exactness": "recorded", "local": "finished", "rehearsal": "finished"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a module of its own, and strangers beside both."""
    for name, source in (("before", EXAMPLES / "train.py"), ("after", EXAMPLES / "train_hetopt.py")):
        shutil.copy(source, tmp_path / f"{name}.py")
    script_among_strangers(tmp_path)
    return tmp_path


@pytest.mark.parametrize("starter", STARTERS)
def test_no_stranger_is_imported_for_a_module_of_ours(starter: str, folder: Path) -> None:
    if starter == "rehearsal" and (reason := why_not()) is not None:
        pytest.skip(reason)
    program = [sys.executable, "-P", "-c", STARTERS[starter]]
    ended = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = "\n".join([ended.stderr, *(log.read_text() for log in folder.glob("run/log/**/*.log"))])
    assert SAID not in said
    assert ended.stdout.split()[-1:] == [PRINTED[starter]], said

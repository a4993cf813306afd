"""What is read off a script's text: whether it has a session, and goes on from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetopt.api.script_text import read_script, resumes


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

"""The example that fine-tunes a sharded model: what it does on unequal machines, and after one was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_unchanged_scripts import EXAMPLES, trained

SCRIPT = EXAMPLES.parent / "finetune" / "finetune.py"
SHORT = ("--batch-size", "32", "--samples", "256", "--epochs", "1", "--layers", "2", "--width", "32")


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--lora", "4"), marks=pytest.mark.slow)], ids=["all weights", "an adapter"]
)
def test_another_number_of_devices_goes_on_from_its_checkpoints(more: tuple[str, ...], tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", "plain", SCRIPT, *SHORT, *more, ranks=1, HETOPT_OUTPUT=str(tmp_path / "a"))
    begun = {"SHARES": "a:12,a:12,b:4,b:4", "HETOPT_OUTPUT": str(tmp_path / "b")}
    trained(tmp_path / "begun", "shares", SCRIPT, *SHORT, *more, "--save-every", "3", ranks=4, **begun)
    checkpoints = tmp_path / "b" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-6"]
    (checkpoints / "step-6" / ".metadata").unlink()  # as of a run that was killed while it wrote
    ended, _ = trained(tmp_path / "ended", "shares", SCRIPT, *SHORT, *more, ranks=2, **{**begun, "SHARES": "a:20,b:12"})
    apart = float((ended[0][-1] - whole[0][-1]).norm() / whole[0][-1].norm())
    assert apart < 1e-3, "as one process that was never stopped"

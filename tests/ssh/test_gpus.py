"""Which GPU of a box each worker takes: by the names of its inventory, whatever the order of its slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ssh.gpus import environment, places

KINDS = {
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "RTX 3090 Ti": "NVIDIA GeForce RTX 3090 Ti",
    "GTX 1080 Ti": "NVIDIA GeForce GTX 1080 Ti",
    "A100": "NVIDIA A100-SXM4-80GB",
    "T4": "Tesla T4",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "V100": "Tesla V100-SXM2-16GB",
}


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8), st.data())
def test_each_worker_has_the_gpu_that_was_named(slots: list[str], data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(slots))[: data.draw(st.integers(1, len(slots)))]
    found = places(wanted, [KINDS[slot] for slot in slots])
    assert found is not None
    assert len(set(found)) == len(wanted), "one each"
    assert [slots[place] for place in found] == wanted


@pytest.mark.parametrize(
    ("wanted", "there"),
    [(["T4", "T4"], ["T4"]), (["A10"], ["A100"]), (["L4"], ["L40S"]), (["RTX 3090 Ti"], ["RTX 3090"]), (["T4"], [])],
)
def test_a_gpu_that_is_not_there_is_not_taken_for_another(wanted: list[str], there: list[str]) -> None:
    assert places(wanted, [KINDS[name] for name in there]) is None


def test_workers_are_told_by_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in the place of the driver's."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'Tesla T4\\nNVIDIA L4\\nTesla T4\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = environment(["L4", "T4"])
    assert told == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert environment(["cpu"]) == {}
    assert environment(["A100"]) == {}
    smi.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert environment(["L4"]) == {}

"""What a script finds around it on a machine: one device, and a local rank that goes with it."""

from __future__ import annotations

import pytest

from hetopt.trainer.script_worker import surroundings


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({"LOCAL_RANK": "1"}, "cpu", {"CUDA_VISIBLE_DEVICES": ""}),
        ({"LOCAL_RANK": "1"}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "6", "LOCAL_RANK": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1a", "LOCAL_RANK": "0"}),
    ],
)
def test_a_worker_sees_its_own_device_as_the_first(
    environment: dict[str, str], device: str, expected: dict[str, str]
) -> None:
    """`cuda`, `cuda:0` and the device of its local rank are the same one; without one its local rank is torchrun's."""
    assert surroundings(environment, device) == {**expected, "MPLBACKEND": "Agg"}

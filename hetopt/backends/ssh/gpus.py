"""The GPUs of a host that its inventory names, in that order: a worker takes each.

CUDA numbers GPUs from the fastest on unless it is told to go by their slots, as `nvidia-smi` does.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from hetopt.core.hosts import CPU

_ASK = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_WITHIN_S = 20


def places(wanted: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return the slot (from 0) in ``names`` of each GPU in ``wanted``, in that order; None if any of them is missing.

    Args:
        wanted: names in an inventory: ``RTX 3090`` is a ``NVIDIA GeForce RTX 3090`` sooner than one with ``Ti``.
        names: names by the driver, in the order of their slots.
    """
    slots: dict[int, int] = {}
    for place in sorted(range(len(wanted)), key=lambda place: -len(_words(wanted[place]))):
        # The wanted words stand in the name, one after the other.
        words = f" {' '.join(_words(wanted[place]))} "
        fits = [
            (len(_words(name)), other)
            for other, name in enumerate(names)
            if other not in slots.values() and words in f" {' '.join(_words(name))} "
        ]
        if not fits:
            return None
        slots[place] = min(fits)[1]
    return [slots[place] for place in range(len(wanted))]


def _words(name: str) -> list[str]:
    """Return the words of a GPU's name, without the memory at its end, which drivers write in other places."""
    return re.findall(r"[a-z0-9]+", re.sub(r"[\s-]\d+\s*gi?b$", "", name.casefold()))


def environment(devices: Sequence[str]) -> dict[str, str]:
    """Return CUDA's variables that number a host's GPUs as in ``devices``.

    Empty: the devices are CPUs, no driver answers, or the host lacks such GPUs. In a Slurm job, whose own GPUs alone
    are visible, only their order is set.

    Args:
        devices: names of GPUs as an inventory has them, one for each worker, or ``cpu``.
    """
    if CPU in devices:
        return {}
    if "SLURM_STEP_GPUS" in os.environ:  # what is visible is the job's own already
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(
            _ASK, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WITHIN_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}  # without the driver's word, CUDA's own order is all there is
    slots = places(devices, done.stdout.strip().splitlines())
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots or ()))}
    return order if slots is not None else {}

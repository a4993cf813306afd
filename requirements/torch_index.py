"""Prints pip's option for the build of torch without CUDA, where this machine has no GPU and that index answers.

The build with CUDA is what PyPI has: gigabytes that a machine without a GPU never uses.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"
WITHIN_S = 2.0
"""So that nobody waits for a network that is not there."""


def has_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU is here."""
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def answers(index: str) -> bool:
    """Return whether a package index has torch and answers within `WITHIN_S`."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=WITHIN_S):
            return True
    except (OSError, urllib.error.URLError):
        return False


def option(index: str) -> str:
    """Return pip's option for the index of torch without CUDA; empty where the default index is right."""
    if has_gpu():
        return ""
    if not answers(index):
        print(f"      {index} does not answer: the default build of torch it is, which is larger", file=sys.stderr)
        return ""
    print(f"      no GPU here: torch without CUDA, from {index}", file=sys.stderr)
    return f"--extra-index-url {index}"


if __name__ == "__main__":
    print(option(INDEX))

"""Memory that a step frees stays with the process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from tests.disturbance import PATIENCE_S

STEPS, PAGE_BYTES = 20, 4096
PROGRAM = """
import json, resource, sys
import torch
from hetopt.trainer.worker import keep_freed_memory

torch.set_num_threads(1)

def step():
    # What forward takes and backward frees: blocks of some MB, all of them given back at the end.
    return sum(block.sum() for block in [torch.ones(2 * 2**20) for _ in range(4)])

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(int(sys.argv[1])):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([faults(), keep_freed_memory(), faults()]))
"""


# What glibc begins with. Left alone it moves both up, up to what happens to be freed in which order.
AS_GLIBC_BEGINS = {"MALLOC_TRIM_THRESHOLD_": str(128 * 2**10), "MALLOC_MMAP_THRESHOLD_": str(128 * 2**10)}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such option")
def test_steps_get_the_pages_that_the_step_before_has_freed():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(STEPS)],
        env={**os.environ, **AS_GLIBC_BEGINS},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    many, kept, few = json.loads(done.stdout)
    assert kept is True
    pages = 4 * 8 * 2**20 // PAGE_BYTES
    assert many > STEPS * pages / 2, "this is what the option is for"
    assert few <= 2 * pages, "the heap may still grow, once or twice; not in every step"

"""Memory that a step frees stays with the process."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from tests.forks import ended

STEPS, PAGE_BYTES = 20, 4096
PROGRAM = """
import ctypes, json, resource, sys
import torch
from hetopt.trainer.worker import keep_freed_memory

torch.set_num_threads(1)
for option in (-1, -3):  # <malloc.h>: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, as glibc begins; else it moves both up
    ctypes.CDLL(None).mallopt(option, 128 * 2**10)

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such option")
def test_steps_get_the_pages_that_the_step_before_has_freed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (done,) = ended([str(tmp_path / "program.py"), str(STEPS)])
    assert done.returncode == 0, done.stdout
    many, kept, few = json.loads(done.stdout)
    assert kept is True
    pages = 4 * 8 * 2**20 // PAGE_BYTES
    assert many > STEPS * pages / 2, "this is what the option is for"
    assert few <= 2 * pages, "the heap may still grow, once or twice; not in every step"

"""The pages on extending hetopt hold code that runs, through the public registry and no other way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.sources import REPOSITORY

PAGE = REPOSITORY / "docs" / "extending" / "compressor.md"

LAWS = """
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.composition import combinations, why_not
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange

asked = parse_compression("signed_topk:0.25")
assert asked.name == "signed_topk"
assert [each.memory for each in combinations() if each.name == "signed_topk"] == ["error_feedback"]
assert why_not("signed_topk", "error_feedback", "ar_topk") is not None
assert wire_bytes("signed_topk", 8, 0.25) == 16

exchange, brought, received = Exchange(asked, 8), torch.zeros(8), torch.zeros(8)
for step in range(40):
    flat = torch.randn(8, generator=torch.Generator().manual_seed(step))
    brought += flat
    stats = exchange.run(flat)
    assert stats.sent_bytes == 16
    assert flat.count_nonzero() == 2
    received += flat
torch.testing.assert_close(received + exchange.state()["residual"], brought)

try:
    register("topk", Method(about="", collectives=(GATHER,), memories=(FEEDBACK,)), lambda asked: SignedTopK(1.0))
except ValueError as error:
    assert "topk" in str(error)
else:
    raise AssertionError("a second method of the same name must be refused")
print("sent", stats.sent_bytes)
"""


def test_the_compressor_of_the_page_works_through_the_registry(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    program = tmp_path / "own_compressor.py"
    program.write_text(code + LAWS, encoding="utf-8")
    environment = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "sent 16\n"), done.stderr

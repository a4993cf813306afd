"""The pages on extending hetopt hold code that runs, through the public registry and no other way."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.disturbance import PATIENCE_S
from tests.sources import REPOSITORY

PAGE = REPOSITORY / "docs" / "extending" / "compressor.md"

LAWS = """
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.composition import combinations, why_not
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange

asked = parse_compression("signed_topk(0.25)")
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

SCRIPT = """
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetopt.trainer.session import session

torch.manual_seed(0)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with session(model, optimizer, compression="signed_topk(0.25)") as run:
    loader = run.loader(DataLoader(data, batch_size=32))
    for epoch in range(30):
        for given, wanted in loader:
            optimizer.zero_grad()
            run.backward(nn.functional.mse_loss(model(given), wanted))
            optimizer.step()
print("weights", [round(weight, 6) for weight in model.weight.flatten().tolist()])
"""


def page() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


def start(program: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program)],
        cwd=program.parent,
        env={**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_compressor_of_the_page_obeys_the_laws(tmp_path: Path) -> None:
    assert len([line for line in page().splitlines() if line.strip()]) < 40
    program = tmp_path / "laws.py"
    program.write_text(page() + LAWS, encoding="utf-8")
    process = start(program)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "sent 16\n"), err


def test_two_workers_of_a_session_train_with_it(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text(page() + SCRIPT, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    running = [start(program, RANK=str(rank), LOCAL_RANK=str(rank), **meeting) for rank in range(2)]
    told = [process.communicate(timeout=PATIENCE_S) for process in running]
    assert [process.returncode for process in running] == [0, 0], [err for _, err in told]
    (one, _), (other, _) = told
    assert one == other
    weights = [float(number) for number in re.findall(r"-?\d+\.\d+", one)]
    assert len(weights) == 8
    assert all(abs(weight - 1) < 0.1 for weight in weights), "all weights are 1 where the sum is learned"

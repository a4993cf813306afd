"""A session is written into a script as a person would write it, or it is said in a sentence why not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hetopt.api.converting import convert, convert_text
from hetopt.core.errors import BadInput

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "script"

HEAD = """import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
"""
LOADER = "loader = DataLoader(data, batch_size=4)\n"
OPTIMIZER = "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
BODY = """    opt.zero_grad()
    loss = model(x).sum()
    loss.backward()
    opt.step()
"""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_example_of_the_documentation_is_what_comes_out() -> None:
    converted = convert(EXAMPLES / "before.py")
    ours = lines(converted.text.replace("from hetopt import session", "from hetopt.trainer.session import session"))
    assert sorted(ours[1:]) == sorted(lines((EXAMPLES / "after.py").read_text())[1:])
    assert converted.diff.startswith("--- a/before.py\n+++ b/before.py\n")


@pytest.mark.parametrize(
    "loop",
    ["for (x,) in loader:\n", "for i, (x,) in enumerate(loader):\n", "for (x,) in tqdm(loader, desc='train'):\n"],
)
def test_loops_are_found_through_what_people_wrap_around_loaders(loop: str) -> None:
    text = convert_text(HEAD + LOADER + OPTIMIZER + loop + BODY).text
    ast.parse(text)
    assert "with session(model, opt) as run:\n    loader = run.loader(loader)\n    " + loop in text
    assert "        run.backward(loss)\n" in text


def test_gradient_accumulation_is_told_to_the_session() -> None:
    body = """    loss = model(x).sum() / k
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        opt.step()
"""
    text = convert_text(HEAD + "k = 2\n" + LOADER + OPTIMIZER + "for i, (x,) in enumerate(loader):\n" + body).text
    assert "with session(model, opt, accumulate=k) as run:" in text


def test_a_scaled_loss_and_options_of_backward_stay() -> None:
    body = "    scaler.scale(model(x).sum()).backward(retain_graph=True)\n    opt.step()\n"
    text = convert_text(HEAD + LOADER + OPTIMIZER + "for (x,) in loader:\n" + body).text
    assert "run.backward(scaler.scale(model(x).sum()), retain_graph=True)" in text


def test_strings_of_several_lines_keep_what_is_in_them() -> None:
    body = 'for (x,) in loader:\n    text = """a\n  b"""\n' + BODY
    text = convert_text(HEAD + LOADER + OPTIMIZER + body).text
    spaces: dict[str, str] = {}
    exec('text = """a\n  b"""', spaces)
    assert 'text = """a\n  b"""' in text
    ast.parse(text)


def test_distributed_data_parallel_is_taken_out() -> None:
    converted = convert_text(
        """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    sampler = torch.utils.data.distributed.DistributedSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(
        data,
        sampler=sampler,
        shuffle=(sampler is None),  # it shuffles
        batch_size=4,
    )
    model = DDP(torch.nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in loader:
            model(x).sum().backward()
            opt.step()
        dist.barrier()
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()
"""
    )
    text = converted.text
    ast.parse(text)
    for gone in (
        "init_process_group",
        "destroy_process_group",
        "DistributedSampler",
        "set_epoch",
        "barrier",
        ".module",
    ):
        assert gone not in text.replace("import DistributedDataParallel", ""), gone
    assert "model = torch.nn.Linear(4, 2)\n" in text
    assert "shuffle=True" in text
    assert 'int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))' in text
    assert "run.backward(model(x).sum())" in text
    assert "that of all workers together" in " ".join(converted.remarks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 1", "no Python"),
        (HEAD + LOADER + "for (x,) in loader:\n" + BODY, "makes no optimizer"),
        (
            HEAD + LOADER + OPTIMIZER + OPTIMIZER.replace("opt", "other") + "for (x,) in loader:\n" + BODY,
            "2 optimizers",
        ),
        (HEAD + OPTIMIZER + "while True:\n    x = batch()\n" + BODY, "not in one `for` loop"),
        (HEAD + LOADER + OPTIMIZER, "calls `backward` nowhere"),
        ("import accelerate\n" + HEAD + LOADER + OPTIMIZER + "for (x,) in loader:\n" + BODY, "Accelerator"),
        (HEAD + LOADER + OPTIMIZER + "session(model, opt)\n", "a session already"),
    ],
)
def test_other_forms_are_refused_with_what_was_looked_for(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        convert_text(text)

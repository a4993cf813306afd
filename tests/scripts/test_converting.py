"""A session is written into a script as a person would write it, or it is said in a sentence why not.

The forms of scripts are run before and after, alone and on two workers, in forks of a process that has torch.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from textwrap import indent

import pytest
import torch
import torch.distributed as dist

from hetopt.api.converting import convert, convert_text
from hetopt.api.exactness import EXACT, Exactness, Precision, unequal
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import SPEC_VARIABLE
from hetopt.profiler.script import gradients
from hetopt.trainer.session.begin import BatchNormWay

from .forms import FORMS
from .warm import FORKS

PATIENCE_S = 120.0

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


def test_the_example_of_distributed_data_parallel_is_what_comes_out() -> None:
    """To make it again: the text of `convert` with the first line of the example that is there."""
    after = (EXAMPLES / "ddp_train_hetopt.py").read_text()
    converted = convert(EXAMPLES / "ddp_train.py")
    assert converted.text.splitlines()[1:] == after.splitlines()[1:]
    batch, lost = converted.remarks
    assert "batch size" in batch
    assert lost.startswith("ddp_train.py, line 53 writes a file that a rented machine loses")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_example_of_the_documentation_is_what_comes_out() -> None:
    converted = convert(EXAMPLES / "train.py")
    ours = lines(converted.text.replace("from hetopt import session", "from hetopt.trainer.session import session"))
    assert sorted(ours[1:]) == sorted(lines((EXAMPLES / "train_hetopt.py").read_text())[1:])
    assert converted.diff.startswith("--- a/train.py\n+++ b/train.py\n")


@pytest.mark.parametrize(
    "loop",
    ["for (x,) in loader:\n", "for i, (x,) in enumerate(loader):\n", "for (x,) in tqdm(loader, desc='train'):\n"],
)
def test_loops_are_found_through_what_people_wrap_around_loaders(loop: str) -> None:
    text = convert_text(HEAD + LOADER + OPTIMIZER + loop + BODY).text
    ast.parse(text)
    assert "with session(model, opt) as run:\n    loader = run.loader(loader)\n    " + loop in text
    assert "        run.backward(loss)\n" in text


@pytest.mark.parametrize(
    "loop",
    [
        "for epoch in range(2):\n    bar = tqdm(enumerate(loader), total=2)\n    for i, (x,) in bar:\n",
        "for epoch in range(2):\n    with tqdm(loader, unit='batch') as bar:\n        for (x,) in bar:\n",
        "bar = tqdm(loader)\nfor (x,) in bar:\n",
        "with tqdm(loader) as bar:\n    for (x,) in bar:\n",
        "for i, (x,) in zip(range(9), loader):\n",
    ],
)
def test_a_loader_is_found_where_what_is_around_it_has_a_name(loop: str) -> None:
    margin = " " * (len(loop.splitlines()[-1]) - len(loop.splitlines()[-1].lstrip()))
    text = convert_text(HEAD + LOADER + OPTIMIZER + loop + indent(BODY, margin)).text
    ast.parse(text)
    assert "with session(model, opt) as run:\n    loader = run.loader(loader)\n" + indent(loop, " " * 4) in text


def test_data_parallel_is_taken_out_and_its_batch_is_of_all_already() -> None:
    converted = convert_text(
        HEAD + LOADER + "model = nn.DataParallel(model)\n" + OPTIMIZER + "for (x,) in loader:\n" + BODY
    )
    assert "DataParallel" not in converted.text
    assert not converted.remarks


def test_lines_end_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes((HEAD + LOADER + OPTIMIZER + "for (x,) in loader:\n" + BODY).replace("\n", "\r\n").encode())
    text = convert(path).text
    assert text.count("\r\n") == text.count("\n") > 0


def test_of_two_loaders_the_one_of_training_is_followed() -> None:
    epoch = "def epoch(train):\n    batches = train_dl if train else valid_dl\n    for (x,) in batches:\n" + indent(
        BODY, "    "
    )
    loaders = LOADER.replace("loader", "train_dl") + LOADER.replace("loader", "valid_dl")
    text = convert_text(
        HEAD + loaders + OPTIMIZER + epoch + "for _ in range(3):\n    epoch(True)\n    epoch(False)\n"
    ).text
    assert "with session(model, opt) as run:\n    train_dl = run.loader(train_dl)\n    for _ in range(3):\n" in text


def test_workers_judge_their_parts_and_what_sampled_through_options_still_does() -> None:
    converted = convert_text(FORMS["one test set in parts"])
    place = 'int(os.environ.get("{}", "{}"))'
    world, rank = place.format("WORLD_SIZE", "1"), place.format("RANK", "0")
    assert (
        "train_sampler, test_sampler = torch.utils.data.RandomSampler(samples()), DistributedSampler(" in converted.text
    )
    assert f"DistributedSampler(samples(), shuffle=False, num_replicas={world}, rank={rank})" in converted.text
    assert "lr=0.1)" in converted.text
    told = " ".join(converted.remarks)
    assert "scaled the learning rate by the workers, and no longer does" in told
    assert "seeds by the worker's number" in told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lr = 0.1 * world", "lr = 0.1"),
        ("scaled_lr = args.lr * args.batch_size * world / 512.0", "scaled_lr = args.lr * args.batch_size / 512.0"),
        ("args.lr *= world", ""),
        ("args.batch_size //= world", ""),
        ("whole = args.batch_size * 4 * world", "whole = args.batch_size * 4"),
        ("per_worker = int(args.batch_size / world)", "per_worker = int(args.batch_size)"),
        ("other = DataLoader(data, batch_size=32 // world)", "other = DataLoader(data, batch_size=32)"),
        ("steps = 10 * world", "steps = 10 * world"),
        ("mean = total / (batches * world)", "mean = total / (batches * world)"),
    ],
)
def test_batch_and_learning_rate_no_longer_follow_the_workers(before: str, after: str) -> None:
    text = HEAD + LOADER + OPTIMIZER + "import os\nworld = int(os.environ['WORLD_SIZE'])\n" + before + "\n"
    told = convert_text(text + "for (x,) in loader:\n" + BODY)
    assert after in lines(told.text) or not after
    assert (before in told.text) == (before == after)
    assert any("no longer does" in one for one in told.remarks) == (before != after)


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
            HEAD + LOADER + OPTIMIZER + "opt_b = theirs.make()\nfor (x,) in loader:\n" + BODY + "    opt_b.step()\n",
            "steps 2 optimizers, opt and opt_b, and what they are of cannot be followed",
        ),
        (HEAD + OPTIMIZER + "while True:\n    x = batch()\n" + BODY, "not in one `for` loop .* makes no DataLoader"),
        (HEAD + LOADER + OPTIMIZER + "for i in range(9):\n    x = next(it)\n" + BODY, "not in one `for` loop"),
        (HEAD + OPTIMIZER + "for x in DataLoader(data, 4):\n" + BODY, "line 8: the loop makes its DataLoader anew"),
        (HEAD + LOADER + OPTIMIZER + "for x, y in zip(loader, loader):\n" + BODY, "several loaders side by side"),
        (
            HEAD
            + LOADER
            + "for fold in range(5):\n    model = nn.Linear(4, 2)\n    opt = torch.optim.SGD(model.parameters())\n"
            + "    for (x,) in loader:\n        model(x).sum().backward()\n        opt.step()\n",
            "line 9: the loop has another model each time",
        ),
        (
            HEAD
            + LOADER
            + "def fit(model):\n    opt = torch.optim.SGD(model.parameters())\n    for (x,) in loader:\n"
            + "        model(x).sum().backward()\n        opt.step()\nfor seed in range(3):\n    fit(model)\n",
            "line 14: fit is called in a loop, and where its `opt` comes from",
        ),
        (HEAD + LOADER + OPTIMIZER + "model = FSDP(model)\nfor (x,) in loader:\n" + BODY, "FSDP spreads the model"),
        (
            HEAD
            + LOADER
            + OPTIMIZER
            + "import os\nmine = data[int(os.environ['RANK']) :: 2]\nfor (x,) in loader:\n"
            + BODY,
            "line 10: the script takes a part of its data",
        ),
        (
            HEAD
            + LOADER
            + OPTIMIZER
            + "def train(rank):\n    for (x,) in loader:\n"
            + indent(BODY, "    ")
            + "for rank in range(2):\n    mp.Process(target=train, args=(rank,)).start()\n",
            "line 16: the script trains in processes that it starts",
        ),
        (
            HEAD + LOADER + OPTIMIZER + "for (x,) in loader:\n    torch.autograd.grad(model(x).sum(), model.weight)\n",
            "calls `backward` nowhere.*gradients of line 10",
        ),
        (
            HEAD
            + LOADER
            + "opts = {'a': torch.optim.SGD(model.parameters())}\nfor (x,) in loader:\n"
            + BODY.replace("opt.", "opts['a']."),
            "no step of an optimizer that has a name",
        ),
        (
            HEAD
            + OPTIMIZER
            + "def epoch():\n    loader, other = made()\n    for (x,) in loader:\n"
            + indent(BODY, "    ")
            + "for _ in range(3):\n    epoch()\n",
            "line 16: epoch is called in a loop, and where its `loader` comes from cannot be followed",
        ),
        ("from transformers import Trainer\n" + HEAD, "transformers' Trainer owns the loop"),
        (HEAD + LOADER + OPTIMIZER, "calls `backward` nowhere"),
        (
            "import accelerate\n" + HEAD + LOADER + OPTIMIZER + "for (x,) in loader:\n" + BODY,
            "Accelerate owns the loop",
        ),
        (HEAD + LOADER + OPTIMIZER + "import hetopt\nhetopt.session(model, opt)\n", "a session already"),
    ],
)
def test_other_forms_are_refused_with_what_was_looked_for(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        convert_text(text)


TWO = HEAD.replace("model = nn.Linear(4, 2)\n", "model, head = nn.Linear(4, 2), nn.Linear(2, 2)\n") + LOADER


@pytest.mark.parametrize(
    ("made", "models"),
    [
        ("[*model.parameters(), *head.parameters()]", "(model, head)"),
        ("itertools.chain(model.parameters(), head.parameters())", "(model, head)"),
        ("[{'params': model.a.parameters()}, {'params': model.b.parameters(), 'lr': 1}]", "model"),
        ("[*net.body.a.parameters(), *net.body.b.parameters()]", "net.body"),
        ("model.parameters()", "model"),
        ("list(model.parameters()) + list(head.parameters())", "(model, head)"),
        ("params", "(head, model)"),
        ("grown", "(model, head)"),
    ],
)
def test_all_that_an_optimizer_trains_is_in_the_session(made: str, models: str) -> None:
    lists = """whole = list(model.parameters())
params = [{"params": whole}, {"params": [*head.parameters()], "lr": 1}]
grown = list(model.parameters())
grown += head.parameters()
"""
    text = TWO + lists + OPTIMIZER.replace("model.parameters()", made) + "for (x,) in loader:\n" + BODY
    assert f"with session({models}, opt) as run:" in convert_text(text).text


def test_all_that_several_optimizers_train_is_as_well() -> None:
    text = (
        TWO
        + "third = nn.Linear(2, 2)\n"
        + OPTIMIZER.replace("model.parameters()", "[*model.parameters(), *head.parameters()]")
        + OPTIMIZER.replace("opt", "other_opt").replace("model", "third").replace("torch.other_optim", "torch.optim")
        + "for (x,) in loader:\n"
        + BODY
        + "    other_opt.step()\n"
    )
    assert "with session((model, head, third), (opt, other_opt)) as run:" in convert_text(text).text


@pytest.mark.parametrize(
    ("test", "said"),
    [("(i + 1) % every == 0", "every"), ("not every or (i + 1) % every == 0", "every or 1")],
)
def test_accumulation_that_may_be_off_is_of_one_pass(test: str, said: str) -> None:
    body = BODY.replace("    opt.step()\n", f"    if {test}:\n        opt.step()\n")
    text = HEAD + LOADER + OPTIMIZER + "every = 0\nfor i, (x,) in enumerate(loader):\n" + body
    assert f"with session(model, opt, accumulate={said}) as run:" in convert_text(text).text


def _recorded(folder: Path, name: str, precision: Precision, script: Path, rank: int, workers: int) -> None:
    """One process of a script whose gradients are kept."""
    said = os.open(folder / f"{name}-{rank}.said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(folder)
    os.environ.update({one: str(rank) for one in ("RANK", "LOCAL_RANK")}, WORLD_SIZE=str(workers))
    if workers > 1:
        os.environ[SPEC_VARIABLE] = str(folder / "spec.json")
        store = dist.FileStore(str(folder / "store"), workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    torch.seed()  # as processes begin
    gradients.main([str(folder), name, precision, str(script)])


def _differences(
    tmp_path: Path, text: str, batch_norm: BatchNormWay = "own", precision: Precision = "float32"
) -> gradients.Differences:
    """Of a script and what is made of it."""
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(text)
    after.write_text(convert(before, batch_norm=batch_norm).text)
    (tmp_path / "spec.json").write_text(unequal().model_dump_json())
    started = [
        FORKS.Process(target=_recorded, args=(tmp_path, label, precision, script, rank, workers))
        for label, script, workers in (("before", before, 1), ("alone", after, 1), ("shared", after, 2))
        for rank in range(workers)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join(PATIENCE_S)
    said = "".join(path.read_text() for path in tmp_path.glob("*.said"))
    assert [one.exitcode for one in started] == [0] * len(started), said
    return gradients.differences(tmp_path, "before", ("alone", "shared"))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_script_computes_what_it_did(name: str, tmp_path: Path) -> None:
    found = _differences(tmp_path, FORMS[name])
    assert found.steps == gradients.STEPS
    assert not found.normalises
    assert found.largest[0] == 0.0
    assert found.largest[1] <= EXACT
    assert not found.zero


def test_batch_norm_is_found_and_synchronized_computes_what_it_did(tmp_path: Path) -> None:
    text = (
        HEAD.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()")
        .replace("torch.zeros(8, 4)", "torch.randn(64, 4).double()")
        .replace("\nmodel", "\ntorch.manual_seed(0)\nmodel")
    )
    body = BODY.replace("model(x).sum()", "model(x).square().mean()")
    text += "loader = DataLoader(data, batch_size=16)\n" + OPTIMIZER + "for (x,) in loader:\n" + body
    ways: tuple[BatchNormWay, ...] = ("own", "synchronized")
    for way in ways:
        (tmp_path / way).mkdir()
    own, synchronized = (_differences(tmp_path / way, text, way) for way in ways)
    assert own.largest[1] > EXACT >= max(synchronized.largest)
    assert own.normalises
    assert Exactness(alone=own.largest[0], shared=own.largest[1], steps=3, normalises=True).is_of_batch_norm


DEEP = """import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
layers = [part for _ in range(8) for part in (nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(16, 1))
values = np.random.default_rng(0).normal(size=(64, 17)).astype(np.float32)
data = TensorDataset(torch.from_numpy(values[:, :16]), torch.from_numpy(values[:, 16:]))
loader = DataLoader(data, batch_size=16)
opt = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=NARROW):
        loss = nn.functional.mse_loss(model(x.float()).to(torch.float32), y.to(dtype=torch.float32))
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("narrow", [False, True])
def test_float64_tells_amplified_rounding_from_a_mistake(narrow: bool, tmp_path: Path) -> None:
    """A deep network with BatchNorm amplifies rounding within three steps; mixed precision rounds more coarsely."""
    ways: dict[str, tuple[BatchNormWay, Precision]] = {
        "rounded": ("synchronized", "float32"),
        "exact": ("synchronized", "float64"),
        "mistaken": ("own", "float64"),
    }
    for name in ways:
        (tmp_path / name).mkdir()
    text = DEEP.replace("NARROW", str(narrow))
    off = {name: max(_differences(tmp_path / name, text, *way).largest) for name, way in ways.items()}
    assert off["rounded"] > EXACT > 1e-9 > off["exact"]
    assert off["mistaken"] > EXACT


def test_nothing_is_compared_where_gradients_are_zero(tmp_path: Path) -> None:
    """A warm-up that begins at nothing: scripts that differ would agree."""
    zeros = [[torch.zeros(3), torch.ones(3)]]
    for name in ("before", "alone", "shared"):
        torch.save(zeros, tmp_path / gradients.FILE.format(name=name, rank=0))
    found = gradients.differences(tmp_path, "before", ("alone", "shared"))
    assert found.zero == 1


def test_training_in_a_module_beside_the_script_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("def fit(loss):\n    loss.backward()\n")
    (tmp_path / "main.py").write_text("import trainer\n")
    with pytest.raises(BadInput, match=r"main\.py calls `backward` nowhere; trainer\.py does"):
        convert(tmp_path / "main.py")


def test_what_one_worker_does_is_its_number_among_all_and_a_plateau_is_everybodys() -> None:
    """Each worker may be the first of its machine, and each may be judged by other samples."""
    text = convert_text(
        HEAD
        + LOADER
        + OPTIMIZER
        + "import os\nimport torch.distributed as dist\nlocal = int(os.environ['LOCAL_RANK'])\n"
        + "master = local == 0\nplateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)\n"
        + "with open('log.txt', 'w') as log:\n    pass\n"
        + "for (x,) in loader:\n"
        + BODY
        + "    dist.all_reduce(loss, op=dist.ReduceOp.AVG)\n    plateau.step(loss)\n"
        + "    if local != 0:\n        continue\n    if dist.get_rank() == 0:\n        print(loss)\n"
        + "with open('end.txt', 'w') as end:\n    end.write('x')\n"
    )
    for said in (
        "local = int(os.environ.get('LOCAL_RANK', '0'))\n",
        'master = int(os.environ.get("RANK", "0")) == 0',
        "    loss.fill_(run.mean(loss))",
        "    plateau.step(run.mean(loss))",
        "    if not run.is_leader:",
        "    if run.is_leader:\n            print(loss)",
        "    if run.is_leader:\n        with open('end.txt', 'w') as end:\n            end.write('x')\n",
    ):
        assert said in text.text, text.text
    assert any("writes the same file" in one and "Line 14" in one for one in text.remarks)

"""Scripts that cannot be profiled are named with their line, in one sentence with the next step; nothing hangs.

The processes are forked from one that has imported torch, so that a case costs what its script does.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hetopt.api.script_text import (
    SourceFile,
    has_session,
    lost_files,
    on_several_workers,
    own_sharding,
    read_script,
    shared_files,
)
from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput, RunFailed
from hetopt.profiler.script.order import FAILED_FILE, ORDER_FILE, Failure, ScriptOrder

from .warm import FORKS

HEAD = """import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
"""
FOREVER = HEAD + "import itertools\nfor (x,) in itertools.chain.from_iterable(itertools.repeat(loader)):\n"
SESSION = """from hetopt import session
with session(model, opt) as run:
    theirs = run.loader(loader)
    for (x,) in BATCHES:
        opt.zero_grad()
        BACKWARD
        opt.step()
"""
PATIENCE_S = 120.0


def _alone(folder: str, script: str) -> None:
    """What `hetopt profile` starts, in a process that has torch already."""
    from hetopt.profiler.script.child import main

    said = os.open(Path(folder, "said"), os.O_WRONLY | os.O_CREAT)
    nobody = os.open(os.devnull, os.O_RDONLY)
    for of, to in ((nobody, 0), (said, 1), (said, 2)):
        os.dup2(of, to)
    sys.stdin = os.fdopen(0)
    os.environ.pop("DISPLAY", None)
    code = main([folder, "0"])
    os._exit(code)


def profiled(folder: Path, text: str, *arguments: str, startup_s: float = 600.0) -> tuple[int | None, Failure | None]:
    """Profile a script alone; the exit code, and what was told where it failed."""
    script = folder / "train.py"
    script.write_text(text)
    order = ScriptOrder(
        script=str(script),
        arguments=arguments,
        timed_steps=3,
        sweep_s=1.0,
        training_s=0.1,
        startup_s=startup_s,
    )
    (folder / ORDER_FILE).write_text(order.model_dump_json())
    process = FORKS.Process(target=_alone, args=(str(folder), str(script)))
    process.start()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
    failed = folder / FAILED_FILE.format(rank=0)
    return process.exitcode, read_record(Failure, failed, hint="") if failed.exists() else None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        pytest.param(
            HEAD + "x = torch.randn(8, 4)\nwhile True:\n" + STEP,
            10,
            "one is made in .*line 4, and nothing reads it",
            id="loader is not read",
        ),
        pytest.param(
            HEAD + "for (x,) in loader:\n    model(x)\n",
            5,
            "calls no backward pass",
            id="no backward",
        ),
        pytest.param(
            FOREVER + "    model(x).sum().backward()\n",
            8,
            "1,000 times, and no optimizer of torch steps",
            id="by hand",
        ),
        pytest.param(
            HEAD + "for (x,) in loader:\n" + STEP + "    raise SystemExit(3)\n",
            10,
            r"exits here \(3\) after 0 measured",
            id="exits",
        ),
        pytest.param(
            f"import itertools\n{HEAD}class Endless(torch.utils.data.IterableDataset):\n"
            "    def __iter__(self):\n        return itertools.repeat(torch.ones(4))\n"
            "for x in torch.utils.data.DataLoader(Endless(), 4):\n" + STEP,
            0,
            "nothing tells how many samples an epoch",
            id="no epoch",
        ),
        pytest.param(HEAD + "raise SystemExit\n", 6, "exits here .* without a step", id="exits at once"),
        pytest.param(
            "import argparse\nargparse.ArgumentParser().parse_args()\n",
            2,
            "unrecognized arguments: --foo",
            id="arguments",
        ),
        pytest.param(
            "import os\nos.environ['LOCAL_RANK']\n", 2, "written for torchrun, and reads LOCAL_RANK", id="torchrun"
        ),
        pytest.param(
            HEAD + SESSION.replace("BATCHES", "theirs").replace("BACKWARD", "model(x).sum().backward()"),
            11,
            "calls backward itself",
            id="plain backward",
        ),
        pytest.param(
            HEAD + SESSION.replace("BATCHES", "loader").replace("BACKWARD", "run.backward(model(x).sum())"),
            11,
            "before any batch of the session's loader",
            id="session's loader is not read",
        ),
        pytest.param(
            "try:\n    import time\n    time.sleep(1000)\nexcept Exception:\n    time.sleep(1000)\n",
            3,
            "here the script still was after 1 s",
            id="no step for ever",
        ),
    ],
)
def test_what_cannot_be_profiled_is_named_with_its_line(text: str, line: int, said: str, tmp_path: Path) -> None:
    code, told = profiled(tmp_path, text, "--foo", startup_s=1.0 if "1 s" in said else 600.0)
    assert code == BadInput.exit_code
    assert told is not None
    assert told.hint
    assert not line or f"train.py, line {line}" in told.message
    assert re.search(said, told.message)


def test_a_script_that_fails_by_itself_has_failed_and_its_own_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import torch\n\n\ndef load():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    code, told = profiled(tmp_path, "import helper\nhelper.load()\n")
    assert code == RunFailed.exit_code
    assert told is not None
    assert told.message.startswith("helper.py, line 5: RuntimeError")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("OneCycleLR(opt, 0.1, total_steps=4)", None),
        ("LambdaLR(opt, lambda epoch: int(epoch < 1 or 'many'))", "line 7: ValueError: .*'many'"),
    ],
)
def test_only_the_end_of_a_schedule_is_passed_over(schedule: str, said: str | None, tmp_path: Path) -> None:
    """OneCycleLR refuses to go on, and measuring does more steps than the script would. What else fails is an error."""
    text = FOREVER.replace("import itertools", f"import itertools\nschedule = torch.optim.lr_scheduler.{schedule}")
    code, told = profiled(tmp_path, text + STEP + "    schedule.step()\n")
    assert code == (0 if said is None else RunFailed.exit_code)
    assert (told is None) == (said is None)
    assert told is None or re.search(said or "", told.message)


SHARDED = 'import os\nrank = int(os.environ.get("RANK", 0))\nworld = int(os.environ.get("WORLD_SIZE", 1))\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mine = data[rank::world]\n", 4),
        ("part = len(data) // world\nmine = data[rank * part : (rank + 1) * part]\n", 5),
        ("mine = Subset(data, range(rank, len(data), world))\n", 4),
        ("mine = data.shard(num_shards=world, index=rank)\n", 4),
        ("for i, x in enumerate(data):\n    if i % world == rank:\n        train(x)\n", 5),
        ("def read(data, r, w):\n    return data[r::w]\n\n\nread(data, rank, world)\n", 5),
        ("parts = np.array_split(data, world)\nmine = parts[rank]\n", 5),
        ("mine = torch.tensor_split(data, world)[rank]\n", 4),
        ("name = os.environ['NAMES'].split(',')[rank]\n", None),
        ("sampler = DistributedSampler(data, num_replicas=world, rank=rank)\n", None),
        ('device = f"cuda:{rank}"\nname = devices[rank]\nbatch = 64 // world\nhead = data[:10]\n', None),
        ("if rank == 0:\n    print(data[1:3])\n", None),
    ],
)
def test_a_part_of_the_data_by_the_workers_number_is_found(text: str, line: int | None) -> None:
    found = own_sharding(SourceFile.of(SHARDED + text, "train.py"))
    assert (None if found is None else found.place) == (None if line is None else f"train.py, line {line}")
    assert own_sharding(SourceFile.of(text, "train.py")) is None  # nobody asked for a place


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("torch.save(m, 'm.pt')\nopen('a', 'w')\nopen('a')\nPath('a').open('wb')\nopen(a, mode='a')\n", [1, 2, 4, 5]),
        ("logging.FileHandler('a.log')\nwith gzip.open('a', 'wt') as f:\n    pass\ngzip.open('a')\n", [1, 2]),
        ("cv2.imwrite('a.png', x)\nplt.imsave('a.png', x)\nnp.savez_compressed('a', x)\n", [1, 2, 3]),
        ("joblib.dump(m, 'a.joblib')\npickle.dump(m, f)\nshutil.copy(a, b)\nos.replace(a, b)\n", [1, 3, 4]),
        ("logging.basicConfig(filename='a.log')\nlogging.basicConfig(level=1)\nnp.save('a', x)\n", [1, 3]),
        ("df.to_pickle('a')\nh5py.File('a', 'w')\nh5py.File('a')\ntarfile.open(a, 'w:gz')\n", [1, 2, 4]),
        ("Image.open(x).save('a.png')\nrun.save(x)\nOmegaConf.save(c, 'a.yaml')\ndump(m, f'{n}.bin')\n", [1, 3, 4]),
        ("if rank == 0:\n    torch.save(model, 'm.pt')\nelse:\n    pass\n", []),
        ("if not args.spawned or (args.spawned and run.is_leader):\n    torch.save(m, 'm.pt')\n", [2]),
        ("if not dist.is_initialized() or dist.get_rank() == 0:\n    torch.save(m, 'm.pt')\n", []),
        ("if run.is_leader and good:\n    model.save_pretrained('m')\n", []),
        ("torch.save(model, f'm-{rank}.pt')\ntorch.save(model, tempfile.mktemp())\n", []),
        ("def save():\n    torch.save(m, 'm.pt')\n\n\ndef train():\n    if self.gpu_id == 0:\n        save()\n", []),
        ("def save():\n    torch.save(m, 'm.pt')\n\n\nif is_main:\n    save()\nsave()\n", [2]),
        ("def save(rank):\n    if rank != 0:\n        return\n    torch.save(m, 'm.pt')\n", []),
    ],
)  # fmt: skip
def test_files_that_every_worker_writes_are_found(text: str, lines: list[int]) -> None:
    assert [one.lineno for one in shared_files(SourceFile.of(text, "train.py"))] == lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("class C:\n    place = int(os.environ['RANK'])\n\n\nxs = xs[C.place :: C.number]\n", 5),
        ("@dataclass\nclass C:\n    place: int = 0\n\n\nc = C(place=int(os.environ['RANK']))\nxs[c.place :: 4]\n", 7),
        ("p.add_argument('--place', default=int(os.environ['RANK']))\na = p.parse()\nxs[a.place :]\n", 3),
        ("c = {'place': int(os.environ['RANK'])}\nxs[c['place'] :: 2]\n", 2),
        ("c = Namespace(rank=int(os.environ['RANK']))\n\n\nclass A:\n    def f(self):\n        w[: self.rank]\n", None),
    ],
)  # fmt: skip
def test_a_workers_number_is_followed_through_attributes_and_keys(text: str, line: int | None) -> None:
    found = own_sharding(SourceFile.of(text, "train.py"))
    assert (None if found is None else found.place) == (None if line is None else f"train.py, line {line}")


def test_an_end_on_some_workers_alone_is_named() -> None:
    text = "rank = int(os.environ['RANK'])\nif bad:\n    sys.exit(1)\nif rank != 0:\n    sys.exit()\n"
    (told,) = on_several_workers([SourceFile.of(text, "train.py")])
    assert told.startswith("train.py, line 5 ends the script on some workers alone (sys.exit())")


def test_a_session_is_found_in_a_module_beside_the_script_and_not_in_its_words(tmp_path: Path) -> None:
    script, package = tmp_path / "main.py", tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("from .loop import train\n")
    script.write_text("from lib import train\n# session(model, opt)\nprint('session(')\ntrain()\n")
    (package / "loop.py").write_text("import db\n\n\ndef train():\n    db.session(1)\n")
    files = read_script(script)
    assert [one.name for one in files] == ["main.py", "lib/__init__.py", "lib/loop.py"]
    assert not has_session(files)
    for text in (
        "from hetopt import session as begin\n\n\ndef train():\n    begin(1, 2)\n",
        "import hetopt\n\n\ndef train():\n    hetopt.session(1, 2)\n",
        "from hetopt.trainer.session import session\n\n\ndef train():\n    with session(1, 2):\n        pass\n",
    ):
        (package / "loop.py").write_text(text)
        assert has_session(read_script(script))


WRITERS = """
import os, torch
from pathlib import Path
OUT = Path(os.environ.get("HETOPT_OUTPUT", "."))
def save(model, path):
    torch.save(model, path)
class Trainer:
    def __init__(self, run, folder):
        self.pictures = run.outputs / "pictures"
        self.folder = folder
    def draw(self, figure):
        figure.savefig(self.pictures / "a.png")
        figure.savefig(self.folder / "b.png")
def main(run, model, outputs):
    save(model, OUT / "model.pt")
    with open(os.path.join(OUT, "log.txt"), "w") as log:
        log.write("kept")
    with open("lost.txt", "w") as log:
        log.write("lost")
    torch.save(outputs, "lost.pt")
    torch.save(outputs, run.outputs / "kept.pt")
"""


def test_files_that_go_with_a_rented_machine_are_named() -> None:
    told = lost_files((SourceFile.of(WRITERS, "train.py"),))
    lines = [int(one.split("line ")[1].split()[0]) for one in told]
    assert sorted(lines) == [13, 18, 20]
    assert all("run.outputs" in one for one in told)

"""A plan in the words of other launchers: the commands are torchrun's own, and start what was planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.optimizer.plan import Group, Plan
from hetopt.reports.exports import schemas, skypilot_task, torchrun_script
from tests.disturbance import PATIENCE_S
from tests.listeners import watched

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMAS = REPOSITORY / "docs" / "schemas"

WHEEL = "hetopt-0.1.0-py3-none-any.whl"
SECRET = "5ec4e7" + 58 * "0"
SCRIPT = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from hetopt.trainer.session import session
model = torch.nn.Linear(3, 1)
with session(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    loader = run.loader(DataLoader(TensorDataset(torch.zeros(32, 3)), batch_size=32))
    own = [len(batch[0]) for batch in loader]
    # In one piece: the workers of a machine write to the same pipe.
    told = f"worker {run.rank} of {run.world_size} takes {own[0]} of {sum(run.shares)}"
    print(told + chr(10), end="", flush=True)
"""


@pytest.fixture
def mixed(plan: Plan) -> Plan:
    """A machine of one worker and one of two: a half, and two quarters."""

    def group(name: str, machines: int, workers: int, shares: tuple[int, ...]) -> Group:
        change = {"instance_type": name, "machines": machines, "workers_per_machine": workers}
        return plan.chosen.groups[0].model_copy(update={**change, "local_batch_sizes": shares})

    shares = (128, 64, 64)
    groups = (group("g5.xlarge", 1, 1, shares[:1]), group("g4dn.12xlarge", 1, 2, shares[1:]))
    names = ("a", "b", "b")
    workers = tuple(
        WorkerSpec(host=name, type="local", local_batch_size=share) for name, share in zip(names, shares, strict=True)
    )
    chosen = plan.chosen.model_copy(update={"groups": groups, "global_batch_size": 256})
    return plan.model_copy(update={"chosen": chosen, "run": plan.run.model_copy(update={"workers": workers})})


def test_text_of_a_torchrun_script(mixed: Plan, golden: Callable[[str, str], None]) -> None:
    golden("run.sh", torchrun_script(mixed, WHEEL, SECRET))


def test_text_of_a_skypilot_task(plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("skypilot.yaml", skypilot_task(plan, WHEEL, SECRET))


HOSTILE = "x\ntouch {0} #\rtouch {0}\u2028touch {0}\u0085\x1b`touch {0}`$(touch {0})'\"\nHETOPT_END\ntouch {0}\n"


def hostile(plan: Plan, made: Path, *, told: str) -> Plan:
    """A plan whose texts would run commands, made past the checks that a file has to pass."""
    text = HOSTILE.format(made)
    groups = tuple(group.model_copy(update={"instance_type": text}) for group in plan.chosen.groups)
    changes = {
        "task": {"run": plan.run.model_copy(update={"task": text, "data_dir": text})},
        "instance_type": {"chosen": plan.chosen.model_copy(update={"groups": groups})},
        "hetopt_version": {"hetopt_version": text},
    }
    return plan.model_copy(update=changes[told])


@pytest.mark.parametrize("told", ["task", "instance_type", "hetopt_version"])
def test_no_text_of_a_plan_is_a_command_of_the_script(told: str, plan: Plan, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "run.sh").write_text(torchrun_script(hostile(plan, made, told=told), WHEEL, SECRET))
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for arguments in ((), ("0", "127.0.0.1")):
        subprocess.run(["sh", "run.sh", *arguments], cwd=tmp_path, env=environment, check=False, capture_output=True)
    assert not made.exists()


@pytest.mark.parametrize("told", ["task", "instance_type", "hetopt_version"])
def test_no_text_of_a_plan_is_a_command_of_the_task_file(told: str, plan: Plan, tmp_path: Path) -> None:
    made = tmp_path / "made"
    plain, changed = skypilot_task(plan, WHEEL, SECRET), skypilot_task(hostile(plan, made, told=told), WHEEL, SECRET)
    assert changed.isascii() or all(letter.isprintable() or letter == "\n" for letter in changed)
    assert len(changed.splitlines()) == len(plain.splitlines()), "a text has begun a line of its own"
    told_lines = changed.splitlines()
    run = [line.removeprefix("  ") for line in told_lines[told_lines.index("run: |") + 1 :]]
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    environment = {
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    subprocess.run(["sh", "-c", "\n".join(run)], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert not made.exists()
    kept = RunSpec.model_construct(**json.loads((tmp_path / "hetopt-run" / "spec.json").read_text()))
    assert kept.task == (HOSTILE.format(made) if told == "task" else plan.run.task)


def test_skypilot_cannot_mix(mixed: Plan) -> None:
    with pytest.raises(BadInput, match=r"1 × g5.xlarge \+ 1 × g4dn.12xlarge"):
        skypilot_task(mixed, WHEEL, SECRET)


@pytest.mark.parametrize(("number", "workers"), [(0, 1), (1, 2)])
def test_the_commands_are_torchruns(number: int, workers: int, mixed: Plan, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(torchrun_script(mixed, WHEEL, SECRET))
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["sh", str(tmp_path / "run.sh"), str(number), "10.0.0.1"]
    told = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    option, program, *rest = told.splitlines()
    assert (option, program) == ("-m", "hetopt.trainer.torchrun")
    arguments = parse_args(rest)
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", number, str(workers))
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 29400)
    assert (arguments.module, arguments.training_script) == (True, "hetopt.trainer.worker")
    assert arguments.training_script_args == [str(tmp_path)]


@pytest.mark.slow
def test_a_script_gets_the_plans_shares(mixed: Plan, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    """Two machines, both of them this one: three workers, whose shares of the script's batch are the plan's."""
    mixed.save(tmp_path / "plan.json")
    assert hetopt("export", tmp_path / "plan.json", "--torchrun", tmp_path / "cluster").code == 0
    assert RunSpec.model_validate_json((tmp_path / "cluster" / "spec.json").read_bytes()) == mixed.run
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("GLOO_SOCKET_IFNAME", None)
    machines = [
        subprocess.Popen(
            ["sh", str(tmp_path / "cluster" / "run.sh"), str(number), "127.0.0.1", str(tmp_path / "train.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    with watched(os.getpid()) as listeners:
        told = [machine.communicate(timeout=PATIENCE_S) for machine in machines]
    assert listeners.seen
    assert not listeners.outside_of("127."), "not on the address that the machines know each other by"
    assert [machine.returncode for machine in machines] == [0, 0], [err for _, err in told]
    lines = sorted(line for out, _ in told for line in out.splitlines() if line.startswith("worker"))
    shares = (16, 8, 8)
    assert lines == [f"worker {rank} of 3 takes {share} of 32" for rank, share in enumerate(shares)]


@pytest.mark.parametrize("arguments", [[], ["plan.json"], ["--torchrun", "x"], ["plan.json", "--schemas", "x"]])
def test_half_a_wish_is_refused(arguments: list[str], hetopt: Callable[..., Any]) -> None:
    answer = hetopt("export", *arguments)
    assert answer.code == 2
    assert "name a plan" in answer.err


def test_the_schemas_are_those_of_the_records(recording: bool) -> None:
    made = schemas()
    for name, text in made.items() if recording else ():
        (SCHEMAS / name).write_text(text, encoding="utf-8")
    kept = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.iterdir()}
    assert kept == made, "write them again with --record"


def test_every_artifact_has_a_schema() -> None:
    from hetopt.core.artifact import Artifact

    known = {json.loads(text)["properties"].get("kind", {}).get("const") for text in schemas().values()}
    # What only hetopt's own parts on one machine or in one bucket exchange is no file for others.
    internal = {
        "seen",
        "order",
        "observed-losses",
        "account-quotas",
        "manifest",
        "checkpoint",
        "inventory",
    }
    kinds = {one.KIND for one in Artifact.__subclasses__() if one.__module__.startswith("hetopt")}
    assert {kind for kind in kinds if kind not in internal} <= known

"""A plan in the words of other launchers: their fields are those they know, and torchrun starts what was planned."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch.distributed.run import parse_args

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.optimizer.plan import Group, Plan
from hetopt.reports.exports import dstack_task, jobset, schemas, skypilot_task, torchrun_script
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


def a_jobset(plan: Plan, wheel: str, secret: str) -> str:
    """Its wheel is in two parts."""
    return jobset(plan, (wheel, b"x" * 700_001), secret)


def test_text_of_every_other_file(plan: Plan, mixed: Plan, golden: Callable[[str, str], None]) -> None:
    golden("jobset.yaml", jobset(mixed, (WHEEL, b"a wheel"), SECRET))
    golden("skypilot.yaml", skypilot_task(plan, WHEEL, SECRET))
    golden("jobgroup.yaml", skypilot_task(mixed, WHEEL, SECRET))
    golden("run.dstack.yml", dstack_task(plan, WHEEL, SECRET))


WORDS = {"": str}
POD = {
    "restartPolicy": str,
    "nodeSelector": WORDS,
    "tolerations": [{"key": str, "operator": str}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": str, "labelSelector": {"matchLabels": WORDS}}
            ]
        }
    },
    "containers": [
        {
            "name": str,
            "image": str,
            "workingDir": str,
            "command": [str],
            "resources": {"limits": {"": int}},
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [
        {
            "name": str,
            "projected": {"sources": [{"secret": {"name": str}, "configMap": {"name": str}}]},
            "persistentVolumeClaim": {"claimName": str},
            "emptyDir": {"medium": str},
        }
    ],
}
JOB = {"parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int, "template": {"spec": POD}}
OBJECT = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
JOBSET = {"failurePolicy": {"maxRestarts": int}, "replicatedJobs": [{"name": str, "template": {"spec": JOB}}]}
SKYPILOT = {"name": str, "workdir": str, "num_nodes": int, "setup": str, "run": str}
FIELDS: dict[str, Any] = {
    "Secret": {**OBJECT, "stringData": WORDS},
    "ConfigMap": {**OBJECT, "binaryData": WORDS},
    "PersistentVolumeClaim": {
        **OBJECT,
        "spec": {"accessModes": [str], "resources": {"requests": {"storage": str}}},
    },
    "JobSet": {**OBJECT, "spec": JOBSET},
    "group": {"name": str, "execution": str},
    "on a cloud": {**SKYPILOT, "resources": {"infra": str, "instance_type": str, "use_spot": bool}},
    "on nodes": {
        **SKYPILOT,
        "resources": {"infra": str, "accelerators": str},
        "config": {"kubernetes": {"pod_config": {"spec": {"nodeSelector": WORDS}}}},
    },
    "dstack": {
        "type": str,
        "name": str,
        "nodes": int,
        "python": str,
        "spot_policy": str,
        **{key: [str] for key in ("backends", "regions", "instance_types", "files", "commands")},
        "resources": {"cpu": str, "memory": str, "gpu": str, "shm_size": str},
    },
}
"""The fields that these launchers know, of those that are written: copied by hand from the types of JobSet v1alpha2 and
of Kubernetes' batch/v1 and v1, from SkyPilot's YAML specification and job groups, and from dstack's configurations."""


def fits(value: Any, known: Any) -> None:
    if isinstance(known, type):
        assert isinstance(value, known)
    for item in value if isinstance(known, list) else ():
        fits(item, known[0])
    for name, field in value.items() if isinstance(known, dict) else ():
        fits(field, known.get("") or known[name])


def test_every_field_is_one_that_its_launcher_knows(plan: Plan, mixed: Plan) -> None:
    for document in yaml.safe_load_all(a_jobset(mixed, WHEEL, SECRET)):
        fits(document, FIELDS[document["kind"]])
    parts = yaml.safe_load_all(skypilot_task(mixed, WHEEL, SECRET))
    for document, kind in zip(parts, ("group", "on nodes", "on nodes"), strict=True):
        fits(document, FIELDS[kind])
    fits(yaml.safe_load(skypilot_task(plan, WHEEL, SECRET)), FIELDS["on a cloud"])
    fits(yaml.safe_load(dstack_task(plan, WHEEL, SECRET)), FIELDS["dstack"])


def test_pods_find_what_lies_beside_their_jobset(mixed: Plan) -> None:
    *beside, pods = yaml.safe_load_all(a_jobset(mixed, WHEEL, SECRET))
    for job in pods["spec"]["replicatedJobs"]:
        files, run, _ = job["template"]["spec"]["template"]["spec"]["volumes"]
        used = [each["name"] for source in files["projected"]["sources"] for each in source.values()]
        names = [document["metadata"]["name"] for document in beside]
        assert [*used, run["persistentVolumeClaim"]["claimName"]] == names
    parts = [part for document in beside for part in document.get("binaryData", {}).values()]
    assert b"".join(map(base64.b64decode, parts)) == b"x" * 700_001


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


def commands(text: str) -> str:
    """What a machine runs, of the file of any launcher; of a job group, the last task's."""
    document = list(yaml.safe_load_all(text))
    if "stringData" in document[0]:
        return "\n".join(document[0]["stringData"]["start.sh"].splitlines()[2:])  # that it installs comes before
    return str(document[-1]["run"] if "run" in document[-1] else document[-1]["commands"][-1])


def started(script: str, folder: Path, *arguments: str, **variables: str) -> tuple[str, list[str]]:
    """Run a machine's commands; return the host that it asked the address of, and torchrun's arguments."""
    (folder / "python3").write_text(
        '#!/bin/sh\nif [ "$1" = -c ]; then echo "$3" > asked; echo 10.0.0.1; else printf "%s\\n" "$@"; fi\n'
    )
    (folder / "python3").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = ["sh", "-ec", script, "start.sh", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    option, program, *rest = ended.stdout.splitlines()
    assert (option, program) == ("-m", "hetopt.trainer.torchrun")
    return (folder / "asked").read_text().strip() if (folder / "asked").exists() else "", rest


FORMATS: dict[str, tuple[Callable[[Plan, str, str], str], tuple[str, ...], dict[str, str], str]] = {
    "skypilot": (skypilot_task, (), {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3"}, "10.0.0.2"),
    "dstack": (dstack_task, (), {"DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "10.0.0.2"}, "10.0.0.2"),
    "jobset": (a_jobset, ("0", "1"), {"JOB_COMPLETION_INDEX": "0"}, "hetopt-digits-group0-0-0.hetopt-digits"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("told", ["task", "instance_type", "hetopt_version"])
def test_no_text_of_a_plan_is_a_command_of_a_file(told: str, kind: str, plan: Plan, tmp_path: Path) -> None:
    made = tmp_path / "made"
    write, arguments, variables, head = FORMATS[kind]
    plain, changed = write(plan, WHEEL, SECRET), write(hostile(plan, made, told=told), WHEEL, SECRET)
    assert changed.isascii() or all(letter.isprintable() or letter == "\n" for letter in changed)
    assert len(changed.splitlines()) == len(plain.splitlines()), "a text has begun a line of its own"
    asked, rest = started(commands(changed), tmp_path, *arguments, **variables)
    read = parse_args(rest)
    assert asked == head or told == "task", "whose name is the file's"
    assert (read.nnodes, read.node_rank, read.nproc_per_node, read.master_addr) == ("1", 0, "1", "10.0.0.1")
    assert (read.training_script, read.training_script_args) == ("hetopt.trainer.worker", ["hetopt-run"])
    assert not made.exists()
    kept = RunSpec.model_construct(**json.loads((tmp_path / "hetopt-run" / "spec.json").read_text()))
    assert kept.task == (HOSTILE.format(made) if told == "task" else plan.run.task)


@pytest.mark.parametrize("kind", ["skypilot", "jobset"])
def test_the_second_type_of_a_mixture_has_the_ranks_after_the_first(kind: str, mixed: Plan, tmp_path: Path) -> None:
    write, _, variables, _ = FORMATS[kind]
    text = write(mixed, WHEEL, SECRET)
    arguments = [word for words in re.findall(r'start.sh, "(.+)", "(.+)"', text)[-1:] for word in words]
    asked, rest = started(commands(text), tmp_path, *arguments, **variables)
    assert asked == {"skypilot": "group0-0.hetopt-digits", "jobset": "hetopt-digits-group0-0-0.hetopt-digits"}[kind]
    read = parse_args(rest)
    assert (read.nnodes, read.node_rank, read.nproc_per_node) == ("2", 1, "2")


def test_what_a_launcher_cannot_is_refused(plan: Plan, mixed: Plan) -> None:
    with pytest.raises(BadInput, match=r"1 × g5.xlarge \+ 1 × g4dn.12xlarge"):
        dstack_task(mixed, WHEEL, SECRET)
    run = plan.run.model_copy(update={"script": ("train.py",)})
    for write in (dstack_task, a_jobset):
        with pytest.raises(BadInput, match=r"trains 'train.py'"):
            write(plan.model_copy(update={"run": run}), WHEEL, SECRET)


@pytest.mark.parametrize(("number", "workers"), [(0, 1), (1, 2)])
def test_the_commands_are_torchruns(number: int, workers: int, mixed: Plan, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(torchrun_script(mixed, WHEEL, SECRET))
    _, rest = started(f". {tmp_path}/run.sh", tmp_path, str(number), "10.0.0.1")
    arguments = parse_args(rest)
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", number, str(workers))
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 29400)
    assert (arguments.module, arguments.training_script) == (True, "hetopt.trainer.worker")


@pytest.mark.slow
def test_a_script_gets_the_plans_shares(mixed: Plan, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    """Two machines, both of them this one: three workers, whose shares of the script's batch are the plan's."""
    # A script keeps its own learning rate.
    mixed = mixed.model_copy(update={"run": mixed.run.model_copy(update={"learning_rate_scale": 1.0})})
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

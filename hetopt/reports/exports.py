"""What other programs read: a plan for torchrun, SkyPilot, dstack or Kubernetes, hetopt's wheel, JSON Schemas.

Each launcher gives a machine a number in its own words and tells it where the first one is; what the machine does then
is the same for all of them. None of them is on this machine: their files are held against what they document.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import re
import shlex
import textwrap
import zipfile
from glob import glob
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import hetopt.core
from hetopt.core import formatting
from hetopt.core.artifact import Artifact
from hetopt.core.errors import BadInput
from hetopt.core.listening import SECRET_VARIABLE
from hetopt.core.plain_text import one_line
from hetopt.core.profile import Profile
from hetopt.core.run_folder import SPEC_FILE
from hetopt.core.run_spec import MEETING_PORT, RunSpec
from hetopt.core.step_samples import StepSample, StepSamples
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Group, Plan, cloud_of
from hetopt.reports.report import Report

SCRIPT_FILE = "run.sh"

_EARLIEST = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: hetopt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

_KEEP = "# Whoever knows the secret below can join the run: keep it to yourself.\n"

MOST_PART_BYTES = 700_000
"""Most bytes of the wheel in one ConfigMap: Kubernetes takes 1 MiB, and etcd 1.5 MiB for a whole object."""


def torchrun_script(plan: Plan, wheel: str, secret: str) -> str:
    """Return a shell script that starts any one machine of a plan; `SPEC_FILE` and the wheel of hetopt lie beside it.

    A machine's number decides its workers' ranks, and with them their shares.

    Args:
        plan: plan of any cluster.
        wheel: file name of hetopt's wheel.
        secret: text by which the machines know each other; of several, it is in the script (see
            `hetopt.core.listening`).
    """
    machines = [
        (group, group.local_batch_sizes[place : place + group.workers_per_machine])
        for group in plan.chosen.groups
        for place in range(0, len(group.local_batch_sizes), group.workers_per_machine)
    ]
    listed = "\n".join(
        f"#   {number}  {one_line(group.instance_type)}, {formatting.count(group.workers_per_machine)} "
        f"{'worker' if group.workers_per_machine == 1 else 'workers'}, {'+'.join(map(str, samples))} samples of a step"
        for number, (group, samples) in enumerate(machines)
    )
    cases = "\n".join(
        f"  {number}) workers={group.workers_per_machine} ;;" for number, (group, _) in enumerate(machines)
    )
    last = len(machines) - 1
    return f"""#!/bin/sh
{_title(plan)}
# On each machine, in a copy of this folder:
#   pip install './{wheel}[train]'
#   sh {SCRIPT_FILE} NUMBER ADDRESS            trains the plan's task
#   sh {SCRIPT_FILE} NUMBER ADDRESS train.py   trains a script of your own that opens hetopt.trainer.session
# NUMBER is the machine's own, ADDRESS that of machine 0 in the network of the machines:
{listed}
{_KEEP if last else ""}set -eu
if [ $# -lt 2 ]; then echo "usage: sh $0 NUMBER ADDRESS [SCRIPT ...]" >&2; exit 2; fi
number=$1 address=$2
shift 2
case $number in
{cases}
  *) echo "NUMBER must be 0 to {last}, not $number" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
export HETOPT_SPEC="$here/{SPEC_FILE}"{f" {SECRET_VARIABLE}={secret}" if last else ""}
if [ $# -eq 0 ]; then set -- --module hetopt.trainer.worker "$here"; fi
exec {_workers(plan)} "$@"
"""


def skypilot_task(plan: Plan, wheel: str, secret: str) -> str:
    """Return a SkyPilot task (YAML) that trains on the plan's machines; of several types: a group on one Kubernetes.

    A task has machines of one type. Where the plan mixes types it is a job group with a task for each, which finds its
    machines on one Kubernetes cluster: elsewhere the tasks of a job group do not know each other's addresses.

    Args:
        plan: plan of any cluster.
        wheel: file name of hetopt's wheel, which lies beside the task.
        secret: text by which the machines know each other; of several, it is in the task (see `hetopt.core.listening`).
    """
    name, heading, tasks = _name(plan), _heading(plan, "SkyPilot"), []
    is_mixed = len(plan.chosen.groups) > 1
    as_group = (
        "# Types are mixed: `sky jobs launch` runs this job group on one Kubernetes cluster.\n"
        f"name: {name}\nexecution: parallel\n---\n"
    )
    for place, first, group in _groups(plan):
        task: dict[str, Any] = {
            "name": name,
            "workdir": ".",
            "num_nodes": group.machines,
            "resources": {
                "infra": "/".join((cloud_of(group.region), group.region.rpartition(":")[2])),
                "instance_type": group.instance_type,
                "use_spot": group.market == "spot",
            },
        }
        if is_mixed:
            gpus, node = _gpus(group), {"node.kubernetes.io/instance-type": group.instance_type}
            task |= {
                "name": f"group{place}",
                "resources": {"infra": "kubernetes", **({"accelerators": gpus} if gpus else {})},
                "config": {"kubernetes": {"pod_config": {"spec": {"nodeSelector": node}}}},
            }
        start = _start(
            plan,
            secret,
            number=f"SKYPILOT_NODE_RANK + {first}",
            workers=group.workers_per_machine,
            head=f"group0-0.{name}" if is_mixed else '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        )
        fields = "\n".join(f"{key}: {json.dumps(value)}" for key, value in task.items())
        tasks.append(f"{fields}\nsetup: |\n  pip install './{wheel}[train]'\nrun: |\n{textwrap.indent(start, '  ')}")
    return heading + as_group * is_mixed + "---\n".join(tasks)


def dstack_task(plan: Plan, wheel: str, secret: str) -> str:
    """Return a dstack task (YAML) that rents the plan's machines and trains; the wheel of hetopt lies beside it.

    Args:
        plan: plan of machines of one type.
        wheel: file name of hetopt's wheel.
        secret: text by which the machines know each other; of several, it is in the task (see `hetopt.core.listening`).

    Raises:
        BadInput: the plan mixes machine types, which a dstack task cannot, or trains a script.
    """
    (_, _, group), *others = _groups(plan)
    [(_, stand_ins), *_] = plan.with_stand_ins
    if others:
        raise BadInput(
            f"The plan mixes machine types ({plan.chosen.in_words}), and a dstack task has one.",
            hint="plan one type with `hetopt recommend --types TYPE`, or export a JobSet, or for torchrun",
        )
    start = _start(
        plan,
        secret,
        number="DSTACK_NODE_RANK",
        workers=group.workers_per_machine,
        head="$DSTACK_MASTER_NODE_IP",
        takes_scripts=False,
    )
    return f"""{_heading(plan, "dstack")}type: task
name: {_name(plan)}
nodes: {group.machines}
python: "3.12"
backends: [{json.dumps(cloud_of(group.region))}]
regions: [{json.dumps(group.region.rpartition(":")[2])}]
instance_types: {json.dumps([group.instance_type, *stand_ins])}
spot_policy: {group.market}
resources:
  cpu: 1..
  memory: 1GB..
{f"  gpu: {group.workers_per_machine}..{chr(10)}" if _gpus(group) else ""}  shm_size: 8GB
files:
- {wheel}
commands:
- pip install './{wheel}[train]'
- |
{textwrap.indent(start, "  ")}"""


def jobset(plan: Plan, wheel: tuple[str, bytes], secret: str) -> str:
    """Return a JobSet (YAML) that trains a task's plan on Kubernetes, with the wheel and the secret text in it.

    A replicated job has the machines of one type, a pod each. They meet at the host name of the first, keep the run in
    a volume, and go on from its newest checkpoint where one of them was lost.

    Args:
        plan: plan of any cluster.
        wheel: file name and bytes of hetopt's wheel.
        secret: text by which the machines know each other; of several, it is in a Secret (see `hetopt.core.listening`).

    Raises:
        BadInput: the plan trains a script.
    """
    name, (file, content) = _name(plan), wheel
    start = _start(
        plan,
        secret,
        number="JOB_COMPLETION_INDEX + $1",
        workers="$2",
        head=f"{name}-group0-0-0.{name}",
        takes_scripts=False,
    )
    parts = [content[at : at + MOST_PART_BYTES] for at in range(0, len(content), MOST_PART_BYTES)]
    maps = "".join(
        f"""---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-wheel-{number}
binaryData:
  part-{number}: {base64.b64encode(part).decode()}
"""
        for number, part in enumerate(parts)
    )
    sources = "\n".join(f"- configMap: {{name: {name}-wheel-{number}}}" for number in range(len(parts)))
    jobs = ""
    for place, first, group in _groups(plan):
        gpus = f"{{nvidia.com/gpu: {group.workers_per_machine}}}" if _gpus(group) else "{}"
        jobs += f"""  - name: group{place}
    template:
      spec:
        parallelism: {group.machines}
        completions: {group.machines}
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            nodeSelector:
              node.kubernetes.io/instance-type: {json.dumps(group.instance_type)}
            tolerations:
            - {{key: nvidia.com/gpu, operator: Exists}}
            affinity:
              podAntiAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                - topologyKey: kubernetes.io/hostname
                  labelSelector:
                    matchLabels:
                      jobset.sigs.k8s.io/jobset-name: {name}
            containers:
            - name: hetopt
              image: python:3.12
              workingDir: /train
              command: [sh, -e, /hetopt/start.sh, "{first}", "{group.workers_per_machine}"]
              resources: {{limits: {gpus}}}
              volumeMounts:
              - {{name: hetopt, mountPath: /hetopt}}
              - {{name: run, mountPath: /train/{_FOLDER}}}
              - {{name: memory, mountPath: /dev/shm}}
            volumes:
            - name: hetopt
              projected:
                sources:
                - secret: {{name: {name}}}
{textwrap.indent(sources, " " * 16)}
            - name: run
              persistentVolumeClaim: {{claimName: {name}}}
            - name: memory
              emptyDir: {{medium: Memory}}
"""
    return f"""{_heading(plan, "Kubernetes")}# `kubectl create -f FILE` starts it on a cluster that has JobSet.
apiVersion: v1
kind: Secret
metadata:
  name: {name}
stringData:
  start.sh: |
    cat /hetopt/part-* > '/tmp/{file}'
    pip install '/tmp/{file}[train]'
{textwrap.indent(start, "    ")}{maps}---
# The model, its checkpoints and the log. Of several machines it has to be one that all nodes can write.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}
spec:
  accessModes: [{"ReadWriteOnce" if _machines(plan) == 1 else "ReadWriteMany"}]
  resources:
    requests:
      storage: 20Gi
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
{jobs}"""


_FOLDER = "hetopt-run"


def _start(plan: Plan, secret: str, *, number: str, workers: object, head: str, takes_scripts: bool = True) -> str:
    """Return the shell lines that train a plan on one of its machines.

    Args:
        plan: plan of any cluster.
        secret: secret of the run.
        number: number of the machine among all, as the shell adds it up.
        workers: workers of the machine, as the shell reads it.
        head: the first machine's host name or address, as the shell reads it; they wait until it is known.
        takes_scripts: whether a script of the person's own is there.

    Raises:
        BadInput: the plan trains a script, and there is none.
    """
    if plan.run.script and not takes_scripts:
        raise BadInput(
            f"The plan trains {plan.run.script[0]!r}, and its machines would get hetopt alone.",
            hint="export it for torchrun, or for SkyPilot, which takes the folder of its task along",
        )
    # One line of ASCII that begins with a brace: it can end neither a block of YAML nor the here-document. Machines may
    # share the folder: none reads half a file of another.
    spec = json.dumps(plan.run.model_dump(mode="json", exclude_defaults=True), separators=(",", ":"))
    return f"""number=$(({number})) workers={workers}
mkdir -p {_FOLDER}
cat > {_FOLDER}/{SPEC_FILE}.$number <<'HETOPT_END'
{spec}
HETOPT_END
mv {_FOLDER}/{SPEC_FILE}.$number {_FOLDER}/{SPEC_FILE}
until address=$(python3 -c 'import socket, sys; print(socket.gethostbyname(sys.argv[1]))' \\
    "{head}" 2> /dev/null); do sleep 1; done
{f"{SECRET_VARIABLE}={secret} " if _machines(plan) > 1 else ""}{_workers(plan)} --module hetopt.trainer.worker {_FOLDER}
"""


def _workers(plan: Plan) -> str:
    """Return the shell command that starts `$workers` workers on the machine `$number`; `$address` is machine 0's."""
    return (
        f'python3 -m hetopt.trainer.torchrun --nnodes={_machines(plan)} --node-rank="$number" '
        f'--nproc-per-node="$workers" \\\n    --master-addr="$address" --master-port={MEETING_PORT}'
    )


def _machines(plan: Plan) -> int:
    return sum(group.machines for group in plan.chosen.groups)


def _groups(plan: Plan) -> list[tuple[int, int, Group]]:
    """Return each group of alike machines with its place, and the number of its first machine among all."""
    groups = plan.chosen.groups
    return [(place, sum(each.machines for each in groups[:place]), group) for place, group in enumerate(groups)]


def _gpus(group: Group) -> str | None:
    """Return GPU and number of a machine in SkyPilot's words, such as 'A100-80GB:8'; None: it has none."""
    has = group.hardware
    if has is None or has.gpu is None:
        return None
    return f"{has.gpu}{'-80GB' * (has.gpu == 'A100' and has.gpu_memory_gib == 80)}:{group.workers_per_machine}"


def _name(plan: Plan) -> str:
    """Return a name that all launchers take: at most 40 lower-case letters, digits and hyphens."""
    task = re.sub("[^a-z0-9]+", "-", plan.run.task.rpartition("/")[2].lower())
    return f"hetopt-{task}"[:40].strip("-")


def _heading(plan: Plan, launcher: str) -> str:
    """Return comments on what is planned, what is predicted, and what ``launcher`` does not look after."""
    predicted = plan.chosen.prediction
    return (
        f"{_title(plan)}\n"
        f"# Predicted: {formatting.duration(predicted.total_s.value)}, {formatting.usd(predicted.cost_usd.value)}. "
        f"{launcher} keeps neither budget nor deadline.\n"
        f"{_KEEP if _machines(plan) > 1 else ''}"
    )


def _title(plan: Plan) -> str:
    """Return a line that a shell and YAML pass over, whatever the texts: it stays one line, and nothing in it acts."""
    return "# " + one_line(
        f"{shlex.quote(plan.run.task)} on {plan.chosen.in_words}, as hetopt {plan.hetopt_version} planned it."
    )


def own_wheel() -> tuple[str, bytes]:
    """Return file name and bytes of hetopt as it is here, as a wheel that machines of other launchers can install.

    What was planned with one version has to run with that version, and no index may have it: a plan that is exported
    takes the wheel along. It is made from the installed files (or the checkout behind an editable install) without a
    build step; the same files give the same bytes.

    Raises:
        PackageNotFoundError: hetopt is not installed.
    """
    installed = importlib.metadata.distribution("hetopt")
    stem = f"hetopt-{installed.version}"
    info = f"{stem}.dist-info"
    here = Path(next(iter(hetopt.core.__path__))).parent
    files = {
        **{
            f"hetopt/{name}": (here / name).read_bytes()
            for name in sorted(glob("**", root_dir=here, recursive=True, include_hidden=True))
            if (here / name).is_file() and "__pycache__" not in name
        },
        # In a checkout that was installed for editing, what describes it has its older name.
        f"{info}/METADATA": (installed.read_text("METADATA") or installed.read_text("PKG-INFO") or "").encode(),
        f"{info}/entry_points.txt": (installed.read_text("entry_points.txt") or "").encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
    }
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return f"{stem}-py3-none-any.whl", packed.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


DIALECT = "https://json-schema.org/draft/2020-12/schema"

_FILES: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "step-sample": StepSample,
    "step-samples": StepSamples,
    "plan": Plan,
    "run-spec": RunSpec,
    "launch": Launch,
    "report": Report,
}


def schemas() -> dict[str, str]:
    """Return the JSON Schema of each kind of file, as text, by the schema file's name."""
    return {f"{name}.schema.json": _text(name, record) for name, record in _FILES.items()}


def _text(name: str, record: type[BaseModel]) -> str:
    """Return the JSON Schema of a record as text.

    Of an artifact with its kind, version and the command that makes it.
    """
    schema: dict[str, Any] = {"$schema": DIALECT, **record.model_json_schema(), "title": name}
    if issubclass(record, Artifact):
        schema["properties"]["kind"] = {"const": record.KIND}
        schema["properties"]["schema_version"] = {"const": record.VERSION}
        schema["required"] = ["kind", "schema_version", *schema.get("required", [])]
        schema["description"] = f"{schema.get('description', '')} Made by `{record.MADE_BY}`.".strip()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"

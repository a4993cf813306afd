"""What other programs read: a plan as torchrun's commands or SkyPilot's task, the wheel they install, JSON Schemas."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import os
import shlex
import zipfile
from collections.abc import Iterator
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
from hetopt.core.run_spec import MEETING_PORT, RunSpec
from hetopt.core.step_samples import StepSample, StepSamples
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Group, Plan, cloud_of
from hetopt.reports.report import Report

SPEC_FILE = "spec.json"
SCRIPT_FILE = "run.sh"

_EARLIEST = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: hetopt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

_SKYPILOT_RANK = '"$SKYPILOT_NODE_RANK"'
_SKYPILOT_HEAD = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'


def torchrun_script(plan: Plan, wheel: str, secret: str) -> str:
    """Return a shell script that starts any one machine of a plan; `SPEC_FILE` and the wheel of hetopt lie beside it.

    A machine's number decides its workers' ranks, and with them their shares.

    Args:
        plan: of any cluster.
        wheel: its file name.
        secret: by which the machines know each other; it is in the script (see `hetopt.core.listening`).
    """
    machines = list(_machines(plan))
    listed = "\n".join(
        f"#   {number}  {one_line(group.instance_type)}, {formatting.count(group.workers_per_machine)} "
        f"{'worker' if group.workers_per_machine == 1 else 'workers'}, {'+'.join(map(str, samples))} samples of a step"
        for number, (group, samples) in enumerate(machines)
    )
    cases = "\n".join(
        f"  {number}) workers={group.workers_per_machine} ;;" for number, (group, _) in enumerate(machines)
    )
    last = len(machines) - 1
    keep = knows = ""
    if last > 0:
        keep = "# Whoever knows the secret below can join the run: keep this folder to yourself.\n"
        knows = f" {SECRET_VARIABLE}={secret}"
    return f"""#!/bin/sh
{_comment(_title(plan))}
# On each machine, in a copy of this folder:
#   pip install './{wheel}[train]'
#   sh {SCRIPT_FILE} NUMBER ADDRESS            trains the plan's task
#   sh {SCRIPT_FILE} NUMBER ADDRESS train.py   trains a script of your own that opens hetopt.trainer.session
# NUMBER is the machine's own, ADDRESS that of machine 0 in the network of the machines:
{listed}
{keep}set -eu
if [ $# -lt 2 ]; then echo "usage: sh $0 NUMBER ADDRESS [SCRIPT ...]" >&2; exit 2; fi
number=$1 address=$2
shift 2
case $number in
{cases}
  *) echo "NUMBER must be 0 to {last}, not $number" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
export HETOPT_SPEC="$here/{SPEC_FILE}"{knows}
if [ $# -eq 0 ]; then set -- --module hetopt.trainer.worker "$here"; fi
exec python3 -m hetopt.trainer.torchrun --nnodes={len(machines)} --node-rank="$number" --nproc-per-node="$workers" \\
    --master-addr="$address" --master-port={MEETING_PORT} "$@"
"""


def skypilot_task(plan: Plan, wheel: str, secret: str) -> str:
    """Return a SkyPilot task (YAML) that rents the plan's machines and trains; the wheel of hetopt lies beside it.

    Args:
        plan: of machines of one type.
        wheel: its file name.
        secret: by which the machines know each other; it is in the task (see `hetopt.core.listening`).

    Raises:
        BadInput: the plan mixes machine types, which a SkyPilot task cannot.
    """
    groups = plan.chosen.groups
    if len(groups) != 1:
        mixed = formatting.cluster((group.machines, group.instance_type) for group in groups)
        raise BadInput(
            f"The plan mixes machine types ({mixed}), and a SkyPilot task has one.",
            hint="plan one type with `hetopt recommend --types TYPE`, or export for torchrun",
        )
    (group,) = groups
    name = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in plan.run.task.rpartition("/")[2]
    ).strip("-")
    # One line of ASCII that begins with a brace: it can end neither the block of YAML nor the here-document.
    spec = json.dumps(plan.run.model_dump(mode="json", exclude_defaults=True), separators=(",", ":"))
    knows = f"{SECRET_VARIABLE}={secret} " if group.machines > 1 else ""
    run = [
        "mkdir -p hetopt-run",
        f"cat > hetopt-run/{SPEC_FILE} <<'HETOPT_END'",
        spec,
        "HETOPT_END",
        f"{knows}python3 -m hetopt.trainer.torchrun "
        f"--nnodes={group.machines} --node-rank={_SKYPILOT_RANK} "
        f"--nproc-per-node={group.workers_per_machine} --master-addr={_SKYPILOT_HEAD} --master-port={MEETING_PORT} "
        "--module hetopt.trainer.worker hetopt-run",
    ]
    lines = [
        _comment(_title(plan)),
        f"# Predicted: {formatting.duration(plan.chosen.prediction.total_s.value)}, "
        f"{formatting.usd(plan.chosen.prediction.cost_usd.value)}. SkyPilot keeps neither budget nor deadline.",
        f"name: {json.dumps(name or 'hetopt')}",
        "workdir: .",
        f"num_nodes: {group.machines}",
        "resources:",
        f"  infra: {json.dumps('/'.join((cloud_of(group.region), group.region.rpartition(':')[2])))}",
        f"  instance_type: {json.dumps(group.instance_type)}",
        f"  use_spot: {json.dumps(group.market == 'spot')}",
        "setup: |",
        f"  pip install './{wheel}[train]'",
        "run: |",
        *(f"  {line}" for line in run),
    ]
    return "\n".join(lines) + "\n"


def _machines(plan: Plan) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Yield each machine with the shares of its workers, in rank order."""
    for group in plan.chosen.groups:
        each = group.workers_per_machine
        for machine in range(group.machines):
            yield group, group.local_batch_sizes[machine * each : (machine + 1) * each]


def _comment(text: str) -> str:
    """Return a line that a shell and YAML pass over, whatever the text: it stays one line, and nothing in it acts."""
    return f"# {one_line(text)}"


def _title(plan: Plan) -> str:
    cluster = formatting.cluster(
        (group.machines, f"{group.instance_type} {group.terms}") for group in plan.chosen.groups
    )
    return f"{shlex.quote(plan.run.task)} on {cluster}, as hetopt {plan.hetopt_version} planned it."


def own_wheel() -> tuple[str, bytes]:
    """Return file name and bytes of hetopt as it is here, as a wheel that machines of other launchers can install.

    What was planned with one version has to run with that version, and no index may have it: a plan that is exported
    takes the wheel along. It is made from the installed files (or the checkout behind an editable install) without a
    build step; the same files give the same bytes.
    """
    installed = importlib.metadata.distribution("hetopt")
    stem = f"hetopt-{installed.version}"
    info = f"{stem}.dist-info"
    files = dict(sorted(_sources()))
    # In a checkout that was installed for editing, what describes it has its older name.
    description = installed.read_text("METADATA") or installed.read_text("PKG-INFO")
    files[f"{info}/METADATA"] = (description or "").encode()
    files[f"{info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return f"{stem}-py3-none-any.whl", packed.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    here = Path(next(iter(hetopt.core.__path__))).parent
    for folder, folders, files in os.walk(here, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in files:
            path = Path(folder) / file
            yield f"hetopt/{path.relative_to(here).as_posix()}", path.read_bytes()


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
    """Return the text of each schema by its file's name."""
    return {f"{name}.schema.json": _text(name, record) for name, record in _FILES.items()}


def _text(name: str, record: type[BaseModel]) -> str:
    schema: dict[str, Any] = {"$schema": DIALECT, **record.model_json_schema(), "title": name}
    if issubclass(record, Artifact):
        schema["properties"]["kind"] = {"const": record.KIND}
        schema["properties"]["schema_version"] = {"const": record.VERSION}
        schema["required"] = ["kind", "schema_version", *schema.get("required", [])]
        schema["description"] = f"{schema.get('description', '')} Made by `{record.MADE_BY}`.".strip()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"

"""The script that a rented machine runs when it boots: a timer that ends it first, then everything that may fail.

Pure text. What varies is a JSON file inside a quoted here-document and a few values that can hold nothing but letters,
digits and dashes, so nothing that a user typed is ever read by the shell. No credentials are in it, as machines have a
role; the secret by which the run's machines know each other is. ``HETOPT_ROOT`` says where
to install, and programs are looked up, so that it also runs where a machine is only imitated.

Three units in ``/etc/systemd/system`` end the machine, and outlive every process and every reboot (systemd.timer and
systemd.time of systemd 252, which Amazon Linux 2023 has):

    hetopt-end.service     shuts the machine down
    hetopt-end.timer       starts that at an absolute time; written anew with each lease
    hetopt-again.service   shuts the machine down at any boot but the first: its agent is gone, so it has nothing to do
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from hetopt.backends.ec2 import facts
from hetopt.backends.host.protocol import Digest, Terms
from hetopt.core.artifact import RunName, write_atomically
from hetopt.core.paths import BUCKET_PATTERN, PROXY_PATTERN, REGION_PATTERN
from hetopt.core.search_path import CPU_INDEX

UNITS_FOLDER = "/etc/systemd/system"
UNITS_VARIABLE = "HETOPT_UNITS"
"""Environment variable with the folder of systemd's units, on what only imitates a machine."""

END_SERVICE = "hetopt-end.service"
END_TIMER = "hetopt-end.timer"
AGAIN_SERVICE = "hetopt-again.service"

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SOONEST_S = 1.0
"""A timer whose time has passed when it is set never elapses."""


END_UNIT = """\
[Unit]
Description=hetopt: ends this machine

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'exec shutdown -h now'
"""
"""The unit that shuts the machine down."""


TIMER_UNIT = """\
[Unit]
Description=hetopt: when this machine ends

[Timer]
OnCalendar=@{moment}
AccuracySec=1s
Persistent=true

[Install]
WantedBy=timers.target
"""
"""The timer unit that starts END_SERVICE at ``{moment}``: whole seconds since the epoch, or a shell variable that holds
them."""

AGAIN_UNIT = f"""\
[Unit]
Description=hetopt: ends this machine if it boots again

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'grep -qx $(cat {BOOT_ID}) {BOOT_ID} || exec shutdown -h now'

[Install]
WantedBy=multi-user.target
"""
"""The unit that shuts the machine down at any boot but that in which a shell has read the kernel's id of it."""


def set_timer(
    end_s: float, *, run: Callable[[list[str]], bool], units: Path, clock: Callable[[], float] = time.time
) -> None:
    """Set this machine's shutdown timer to ``end_s``, seconds since the epoch, in place of the time set before.

    A time that is past shuts the machine down in a second. Where systemd refuses the timer, ``shutdown`` is scheduled
    instead.

    Args:
        end_s: when to shut down, in seconds since the epoch.
        run: carries out a command; returns whether that succeeded.
        units: folder of the system's units.
        clock: returns seconds since the epoch.

    Raises:
        BadInput: the timer's file cannot be written.
    """
    now_s = clock()
    write_atomically(units / END_TIMER, TIMER_UNIT.format(moment=math.floor(max(end_s, now_s + _SOONEST_S))))
    reloaded = run(["systemctl", "daemon-reload"])
    if not (run(["systemctl", "restart", END_TIMER]) and reloaded):
        # Without the timer, the other way that systems have to end at a time.
        run(["shutdown", "-h", f"+{max(1, math.floor((end_s - now_s) / 60))}"])


CONFIG_FILE = "node.json"

WHEELS_FOLDER = "wheels"
"""Folder of the bucket where machines leave the packages that they have installed, for those that boot later."""


class NodeConfig(Terms):
    """The configuration that a rented machine boots with; each value is a single word to a shell.

    Attributes:
        run_id: name of the run.
        region: AWS region of the machine.
        bucket: S3 bucket of the run.
        account_id: number of the account that must own the bucket.
        bundle_sha256: hash and name of the code in the bucket.
        has_gpu: whether the machine needs torch with CUDA.
        version: version of hetopt.
        proxy: address of a proxy to reach S3 and packages; empty: directly.
    """

    run_id: RunName
    region: Annotated[str, StringConstraints(pattern=REGION_PATTERN)]
    bucket: Annotated[str, StringConstraints(pattern=BUCKET_PATTERN)]
    account_id: Annotated[str, StringConstraints(pattern=r"^[0-9]{12}$")]
    bundle_sha256: Digest
    has_gpu: bool
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+-]{1,40}$")]
    proxy: Annotated[str, StringConstraints(pattern=rf"^({PROXY_PATTERN.strip('^$')})?$")] = ""

    @property
    def prefix(self) -> str:
        """The prefix of the run's objects in the bucket, ``runs/RUN``."""
        return f"runs/{self.run_id}"


_PROXIED = (
    "export HTTP_PROXY={proxy} HTTPS_PROXY={proxy} "
    f"NO_PROXY={facts.METADATA_ENDPOINT.removeprefix('http://')},localhost,127.0.0.1\n"
    "export http_proxy=$HTTP_PROXY https_proxy=$HTTPS_PROXY no_proxy=$NO_PROXY\n"
)
"""The lines that send all programs through a proxy, but for addresses of the machine itself."""


def user_data(config: NodeConfig) -> str:
    """Return the script that a rented machine runs as root when it boots (EC2 user data)."""
    # torch for CPUs has an index of its own, which is asked for nothing else; PyPI's needs gigabytes of CUDA, which a
    # CPU machine would only download.
    torch = f'\n        PIP_INDEX_URL={CPU_INDEX} "$@" --requirement "$locks-torch.txt" &&'
    python = facts.PYTHON
    return f"""#!/bin/bash
# hetopt {config.version}: a machine of run {config.run_id}

# The end comes first: from here on nothing can make this machine outlive its budget, not even a reboot.
end={math.floor(config.end_s)}
soonest=$(($(date +%s) + 60))
[ "$end" -ge "$soonest" ] || end=$soonest
export {UNITS_VARIABLE}="${{{UNITS_VARIABLE}:-{UNITS_FOLDER}}}"
mkdir -p "${UNITS_VARIABLE}"
cat >"${UNITS_VARIABLE}/{END_SERVICE}" <<'HETOPT'
{END_UNIT}HETOPT
cat >"${UNITS_VARIABLE}/{END_TIMER}" <<HETOPT
{TIMER_UNIT.format(moment="$end")}HETOPT
cat >"${UNITS_VARIABLE}/{AGAIN_SERVICE}" <<HETOPT
{AGAIN_UNIT}HETOPT
systemctl daemon-reload
systemctl enable {AGAIN_SERVICE} {END_TIMER}
systemctl restart {END_TIMER} || shutdown -h "+$(((end - $(date +%s)) / 60))"

root="${{HETOPT_ROOT:-/opt/hetopt}}"
log="$root/boot.log"
# Where /tmp is memory, as on Amazon Linux 2023, it is too small to unpack torch in.
export TMPDIR="$root/tmp"
mkdir -p "$root/code" "$root/data" "$root/run" "$TMPDIR"
exec >>"$log" 2>&1
set -Eeuo pipefail
export AWS_DEFAULT_REGION={config.region}
{_PROXIED.format(proxy=config.proxy) if config.proxy else ""}
object() {{ # get KEY FILE, or put KEY --body FILE
    aws s3api "$1-object" --bucket {config.bucket} --expected-bucket-owner {config.account_id} \\
        --key "${{@:2}}" >/dev/null
}}

# A machine that cannot join is of no use: it leaves its log and ends, and the others are told by its absence.
failed() {{
    trap - ERR
    echo "boot failed in line $1"
    object put "{config.prefix}/boot/$(hostname).log" --body "$log" || true
    shutdown -h now
    exit 1
}}
trap 'failed $LINENO' ERR

cat >"$root/{CONFIG_FILE}" <<'HETOPT'
{config.model_dump_json(indent=2)}
HETOPT

object get code/{config.bundle_sha256}.tar.gz "$root/code.tar.gz"
echo "{config.bundle_sha256}  $root/code.tar.gz" | sha256sum --check --quiet
tar --extract --gzip --no-same-owner --directory "$root/code" --file "$root/code.tar.gz"

# A type's own disk, which is gone with the machine: for data, which can be fetched again, and for the run, whose
# checkpoints go to the bucket. Images with NVIDIA's driver mount it themselves.
own_disk() {{
    local place={facts.DRIVER_IMAGES_DISK} disk
    if [ ! -d "${{place%/*}}" ]; then
        place="$root/disk"
        mkdir -p "$place"
        for disk in {facts.OWN_DISKS}*; do
            [ -e "$disk" ] && mkfs.xfs -q -K "$disk" && mount "$disk" "$place" && break
        done
    fi
    mountpoint --quiet "$place" || return 0
    for disk in data run; do
        mkdir -p "$place/hetopt/$disk" && mount --bind "$place/hetopt/$disk" "$root/$disk" || return 0
    done
    echo "data and checkpoints are on the machine's own disk"
}}
own_disk || true

command -v {python} >/dev/null || dnf --quiet --assumeyes install {python}
{python} -m venv "$root/venv"
locks="$root/code/locks/$(uname -m)-{"gpu" if config.has_gpu else "cpu"}"
own="$root/code/task/requirements.txt"
[ -f "$own" ] || own=/dev/null
wheels="$root/wheels"
pip=("$root/venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir)
locked=(--quiet --no-deps --only-binary :all: --require-hashes)
each() {{ # COMMAND, of each lock and of what the task brings
    "$@" --requirement "$locks.txt" &&{"" if config.has_gpu else torch}
        {{ [ ! -s "$own" ] || "$@" --requirement "$own"; }}
}}
# uv, which is in each lock itself, takes a third of pip's time, on every processor. Compiling all of torch takes longer
# than unpacking it, and a machine imports a part.
install() {{
    local here=("${{locked[@]}}" --no-index --find-links "$wheels")
    sed -n '/^uv==/,/[0-9a-f]$/p' "$locks.txt" >"$root/uv.txt"
    "${{pip[@]}}" install "${{here[@]}}" --requirement "$root/uv.txt" || return
    each "$root/venv/bin/python" -m uv pip install "${{here[@]}}" --offline --cache-dir "$TMPDIR/uv" ||
        each "${{pip[@]}}" install "${{here[@]}}" --no-compile || return
    rm -rf "$TMPDIR/uv"
}}

# What a machine before this one has left in the bucket, under the hash of what is wanted: then no index is needed. It
# is not trusted; nothing is installed whose hash is not in the lock. `s3 cp` reads several parts at a time.
left="{WHEELS_FOLDER}/$(cat "$locks"*.txt "$own" | sha256sum | cut -c-64).tar"
mkdir -p "$wheels"
if aws s3 cp --only-show-errors "s3://{config.bucket}/$left" "$wheels.tar" 2>/dev/null &&
    tar --extract --no-same-owner --directory "$wheels" --file "$wheels.tar" &&
    install; then
    rm -r "$wheels" "$wheels.tar"
else
    echo "no wheels in the bucket: they come from their index"
    rm -rf "$wheels" "$wheels.tar"
    each "${{pip[@]}}" download "${{locked[@]}}" --dest "$wheels"
    install
    leave() {{
        tar --create --directory "$wheels" --file "$wheels.tar" . && object put "$left" --body "$wheels.tar" ||
            echo "the next machine finds no wheels in the bucket"
        rm -rf "$wheels" "$wheels.tar"
    }}
    leave </dev/null & # while the machine waits for its place
fi

trap - ERR
cd "$root/code"
status=0
PYTHONPATH="$root/code" "$root/venv/bin/python" -m hetopt.backends.ec2.node.agent "$root" || status=$?
echo "the agent ended with $status"
shutdown -h now
"""

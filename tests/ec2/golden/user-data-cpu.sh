#!/bin/bash
# hetopt 0.1.0: a machine of run 20261120-120000-digits-ab12

# The end comes first: from here on nothing can make this machine outlive its budget, not even a reboot.
end=1800000000
soonest=$(($(date +%s) + 60))
[ "$end" -ge "$soonest" ] || end=$soonest
export HETOPT_UNITS="${HETOPT_UNITS:-/etc/systemd/system}"
mkdir -p "$HETOPT_UNITS"
cat >"$HETOPT_UNITS/hetopt-end.service" <<'HETOPT'
[Unit]
Description=hetopt: ends this machine

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'exec shutdown -h now'
HETOPT
cat >"$HETOPT_UNITS/hetopt-end.timer" <<HETOPT
[Unit]
Description=hetopt: when this machine ends

[Timer]
OnCalendar=@$end
AccuracySec=1s
Persistent=true

[Install]
WantedBy=timers.target
HETOPT
cat >"$HETOPT_UNITS/hetopt-again.service" <<HETOPT
[Unit]
Description=hetopt: ends this machine if it boots again

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'grep -qx $(cat /proc/sys/kernel/random/boot_id) /proc/sys/kernel/random/boot_id || exec shutdown -h now'

[Install]
WantedBy=multi-user.target
HETOPT
systemctl daemon-reload
systemctl enable hetopt-again.service hetopt-end.timer
systemctl restart hetopt-end.timer || shutdown -h "+$(((end - $(date +%s)) / 60))"

root="${HETOPT_ROOT:-/opt/hetopt}"
log="$root/boot.log"
# Where /tmp is memory, as on Amazon Linux 2023, it is too small to unpack torch in.
export TMPDIR="$root/tmp"
mkdir -p "$root/code" "$root/data" "$root/run" "$TMPDIR"
exec >>"$log" 2>&1
set -Eeuo pipefail
export AWS_DEFAULT_REGION=us-east-1

object() { # get KEY FILE, or put KEY --body FILE
    aws s3api "$1-object" --bucket hetopt-123456789012-us-east-1 --expected-bucket-owner 123456789012 \
        --key "${@:2}" >/dev/null
}

# A machine that cannot join is of no use: it leaves its log and ends, and the others are told by its absence.
failed() {
    trap - ERR
    echo "boot failed in line $1"
    object put "runs/20261120-120000-digits-ab12/boot/$(hostname).log" --body "$log" || true
    shutdown -h now
    exit 1
}
trap 'failed $LINENO' ERR

cat >"$root/node.json" <<'HETOPT'
{
  "spec_sha256": "1111111111111111111111111111111111111111111111111111111111111111",
  "group_secret": "5ec4e70000000000000000000000000000000000000000000000000000000000",
  "end_s": 1800000000.9,
  "latest_end_s": 1900000000.0,
  "run_id": "20261120-120000-digits-ab12",
  "region": "us-east-1",
  "bucket": "hetopt-123456789012-us-east-1",
  "account_id": "123456789012",
  "bundle_sha256": "0000000000000000000000000000000000000000000000000000000000000000",
  "has_gpu": false,
  "version": "0.1.0",
  "proxy": ""
}
HETOPT

object get code/0000000000000000000000000000000000000000000000000000000000000000.tar.gz "$root/code.tar.gz"
echo "0000000000000000000000000000000000000000000000000000000000000000  $root/code.tar.gz" | sha256sum --check --quiet
tar --extract --gzip --no-same-owner --directory "$root/code" --file "$root/code.tar.gz"

# A type's own disk, which is gone with the machine: for data, which can be fetched again, and for the run, whose
# checkpoints go to the bucket. Images with NVIDIA's driver mount it themselves.
own_disk() {
    local place=/opt/dlami/nvme disk
    if [ ! -d "${place%/*}" ]; then
        place="$root/disk"
        mkdir -p "$place"
        for disk in /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
            [ -e "$disk" ] && mkfs.xfs -q -K "$disk" && mount "$disk" "$place" && break
        done
    fi
    mountpoint --quiet "$place" || return 0
    for disk in data run; do
        mkdir -p "$place/hetopt/$disk" && mount --bind "$place/hetopt/$disk" "$root/$disk" || return 0
    done
    echo "data and checkpoints are on the machine's own disk"
}
own_disk || true

command -v python3.12 >/dev/null || dnf --quiet --assumeyes install python3.12
python3.12 -m venv "$root/venv"
locks="$root/code/locks/$(uname -m)-cpu"
own="$root/code/task/requirements.txt"
[ -f "$own" ] || own=/dev/null
wheels="$root/wheels"
pip=("$root/venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir)
locked=(--quiet --no-deps --only-binary :all: --require-hashes)
each() { # COMMAND, of each lock and of what the task brings
    "$@" --requirement "$locks.txt" &&
        PIP_INDEX_URL=https://download.pytorch.org/whl/cpu "$@" --requirement "$locks-torch.txt" &&
        { [ ! -s "$own" ] || "$@" --requirement "$own"; }
}
# uv, which is in each lock itself, takes a third of pip's time, on every processor. Compiling all of torch takes longer
# than unpacking it, and a machine imports a part.
install() {
    local here=("${locked[@]}" --no-index --find-links "$wheels")
    sed -n '/^uv==/,/[0-9a-f]$/p' "$locks.txt" >"$root/uv.txt"
    "${pip[@]}" install "${here[@]}" --requirement "$root/uv.txt" || return
    each "$root/venv/bin/python" -m uv pip install "${here[@]}" --offline --cache-dir "$TMPDIR/uv" ||
        each "${pip[@]}" install "${here[@]}" --no-compile || return
    rm -rf "$TMPDIR/uv"
}

# What a machine before this one has left in the bucket, under the hash of what is wanted: then no index is needed. It
# is not trusted; nothing is installed whose hash is not in the lock. `s3 cp` reads several parts at a time.
left="wheels/$(cat "$locks"*.txt "$own" | sha256sum | cut -c-64).tar"
mkdir -p "$wheels"
if aws s3 cp --only-show-errors "s3://hetopt-123456789012-us-east-1/$left" "$wheels.tar" 2>/dev/null &&
    tar --extract --no-same-owner --directory "$wheels" --file "$wheels.tar" &&
    install; then
    rm -r "$wheels" "$wheels.tar"
else
    echo "no wheels in the bucket: they come from their index"
    rm -rf "$wheels" "$wheels.tar"
    each "${pip[@]}" download "${locked[@]}" --dest "$wheels"
    install
    leave() {
        tar --create --directory "$wheels" --file "$wheels.tar" . && object put "$left" --body "$wheels.tar" ||
            echo "the next machine finds no wheels in the bucket"
        rm -rf "$wheels" "$wheels.tar"
    }
    leave </dev/null & # while the machine waits for its place
fi

trap - ERR
cd "$root/code"
status=0
PYTHONPATH="$root/code" "$root/venv/bin/python" -m hetopt.backends.ec2.node.agent "$root" || status=$?
echo "the agent ended with $status"
shutdown -h now

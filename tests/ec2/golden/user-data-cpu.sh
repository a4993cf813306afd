#!/bin/bash
# hetopt 0.1.0: a machine of run 20261120-120000-digits-ab12

# The end comes first: from here on nothing can make this machine outlive its budget.
left=$((1800000000 - $(date +%s)))
[ "$left" -ge 60 ] || left=60
systemd-run --unit=hetopt-lifetime --on-active="$left" shutdown -h now || shutdown -h "+$((left / 60))"

root="${HETOPT_ROOT:-/opt/hetopt}"
log="$root/boot.log"
mkdir -p "$root/code" "$root/run"
exec >>"$log" 2>&1
set -Eeuo pipefail
export AWS_DEFAULT_REGION=us-east-1

# A machine that cannot join is of no use: it leaves its log and ends, and the others are told by its absence.
failed() {
    trap - ERR
    echo "boot failed in line $1"
    aws s3api put-object --bucket hetopt-123456789012-us-east-1 --key "runs/20261120-120000-digits-ab12/boot/$(hostname).log" \
        --expected-bucket-owner 123456789012 --body "$log" || true
    shutdown -h now
    exit 1
}
trap 'failed $LINENO' ERR

cat >"$root/node.json" <<'HETOPT'
{
  "run_id": "20261120-120000-digits-ab12",
  "region": "us-east-1",
  "bucket": "hetopt-123456789012-us-east-1",
  "account_id": "123456789012",
  "bundle_sha256": "0000000000000000000000000000000000000000000000000000000000000000",
  "end_s": 1800000000.9,
  "has_gpu": false,
  "version": "0.1.0",
  "group_secret": "5ec4e70000000000000000000000000000000000000000000000000000000000"
}
HETOPT

aws s3api get-object --bucket hetopt-123456789012-us-east-1 --key code/0000000000000000000000000000000000000000000000000000000000000000.tar.gz \
    --expected-bucket-owner 123456789012 "$root/code.tar.gz" >/dev/null
echo "0000000000000000000000000000000000000000000000000000000000000000  $root/code.tar.gz" | sha256sum --check --quiet
tar --extract --gzip --no-same-owner --directory "$root/code" --file "$root/code.tar.gz"

command -v python3.12 >/dev/null || dnf --quiet --assumeyes install python3.12
python3.12 -m venv "$root/venv"
"$root/venv/bin/python" -m pip install --quiet --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu \
    --requirement "$root/code/requirements.txt"

trap - ERR
cd "$root/code"
status=0
PYTHONPATH="$root/code" "$root/venv/bin/python" -m hetopt.trainer.launch.ec2.agent "$root" || status=$?
echo "the agent ended with $status"
shutdown -h now

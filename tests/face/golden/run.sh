#!/bin/sh
# digits on 1 × g5.xlarge + 1 × g4dn.12xlarge (spot), as hetopt 0.1.0 planned it.
# On each machine, in a copy of this folder:
#   pip install './hetopt-0.1.0-py3-none-any.whl[train]'
#   sh run.sh NUMBER ADDRESS            trains the plan's task
#   sh run.sh NUMBER ADDRESS train.py   trains a script of your own that opens hetopt.trainer.session
# NUMBER is the machine's own, ADDRESS that of machine 0 in the network of the machines:
#   0  g5.xlarge, 1 worker, 128 samples of a step
#   1  g4dn.12xlarge, 2 workers, 64+64 samples of a step
# Whoever knows the secret below can join the run: keep it to yourself.
set -eu
if [ $# -lt 2 ]; then echo "usage: sh $0 NUMBER ADDRESS [SCRIPT ...]" >&2; exit 2; fi
number=$1 address=$2
shift 2
case $number in
  0) workers=1 ;;
  1) workers=2 ;;
  *) echo "NUMBER must be 0 to 1, not $number" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
export HETOPT_SPEC="$here/spec.json" HETOPT_GROUP_SECRET=5ec4e70000000000000000000000000000000000000000000000000000000000
if [ $# -eq 0 ]; then set -- --module hetopt.trainer.worker "$here"; fi
exec python3 -m hetopt.trainer.torchrun --nnodes=2 --node-rank="$number" --nproc-per-node="$workers" \
    --master-addr="$address" --master-port=29400 "$@"

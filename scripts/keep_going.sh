#!/usr/bin/env bash
# Restarts a training that has died from its last checkpoint, on the remaining ranks; see --help.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

readonly USAGE_ERROR=2 # the exit code for invalid arguments: a restart would fail again
readonly KILLED=137 # the exit code of a process that SIGKILL has killed
readonly TERMINATED=143 # the exit code of a program that SIGTERM has ended before its training was complete
readonly LOCK_SECONDS=30
readonly TICK_SECONDS=0.2
readonly LOOKS=3 # a host that has not answered so many times in a row is lost
readonly REST_SECONDS=10 # how long the ranks of other hosts have after the ranks of this host, which SIGTERM has ended

usage() {
    cat <<'TEXT'
Usage: keep_going.sh [OPTION...] -- PROGRAM [ARGUMENT...]

Runs PROGRAM on several ranks. When the job dies (a killed rank, a failed host, an exception), it is restarted from its
last checkpoint on the remaining ranks, until it succeeds. For jobs without ULFM, and for failures that ULFM can't
survive; `mpirun --with-ft ulfm python -m trainers --on-failure continue` loses less where it works.

  --ranks N           the number of ranks at first (default: the slots of the hostfile, or else 4)
  --least N           the least number of ranks with which to restart (default: 1)
  --same-ranks        restart with as many ranks as before; by default with one rank less each time
  --hostfile FILE     one host a line, "name slots=4" or "name:4". A host that does not answer is left out from then on,
                      with all of its ranks; if the hosts are the same, one rank is left out. A script (its first line
                      begins with #!) prints such lines; if its exit code is not 0, the hosts stay as they were
  --grow SECONDS      look at the hostfile and its hosts every SECONDS. When it has more slots than before, or a host
                      answers again, the job gets SIGTERM, writes a checkpoint, ends with a code other than 0 (fit: 143), and
                      continues on as many ranks as there are slots
  --attempts N        give up after N starts in a row without a new checkpoint (default: 3)
  --progress PATH     the folder (or file) of the checkpoints (default: PROGRAM's own --checkpoint PATH)
  --launcher COMMAND  mpirun, mpiexec or srun with its options, such as "mpirun --bind-to core"
                      (default: the mpirun, or else the mpiexec or srun, that is on PATH or in this checkout's .venv)
  --reach COMMAND     tests whether a host is alive, by `COMMAND HOST true`
                      (default: ssh -o BatchMode=yes -o ConnectTimeout=10; under srun, srun itself)

PROGRAM must resume from its checkpoints by itself: `python -m trainers --checkpoint DIR --resume` does, on any number
of ranks, and so does `fit(..., checkpoint=DIR, resume=True)`. Only the steps since the last checkpoint are lost.

Examples:
  bash scripts/keep_going.sh --ranks 4 -- python -m trainers --data digits --checkpoint run --resume
  bash scripts/keep_going.sh --hostfile hosts --least 8 -- python train.py --checkpoint run
  bash scripts/keep_going.sh --hostfile hosts --grow 10 -- python -m trainers --data digits --checkpoint run --resume
  bash scripts/keep_going.sh --launcher "mpiexec" --progress run -- python mine.py
  sbatch scripts/slurm/keep_going.sbatch python -m trainers --data digits --checkpoint run --resume    # on Slurm

After a restart of a program with `fit` it prints the seconds without training.

SIGTERM and SIGINT (Ctrl-C) are passed to the job, and it is not restarted. Neither is a job with exit code 2, which
means invalid arguments. The exit code is the job's last one; 2 also means that these options are invalid.
TEXT
}

refuse() {
    printf 'keep_going.sh: %s\n' "$*" >&2
    exit $USAGE_ERROR
}

say() { printf 'keep_going.sh: %s\n' "$*" >&2; }

# ---- Options ----

ranks='' least=1 attempts=3 same='' hostfile='' grow='' progress='' launcher=() reach=() program=()

read_options() {
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) usage && exit ;;
            --same-ranks) same=1 && shift ;;
            --) shift && program=("$@") && break ;;
            --ranks | --least | --attempts | --grow | --hostfile | --progress | --launcher | --reach)
                [ $# -gt 1 ] || refuse "$1 needs a value; --help shows all options"
                set_option "$1" "$2"
                shift 2
                ;;
            *) refuse "\"$1\" is not an option; put -- before the program (--help shows all options)" ;;
        esac
    done
    [ -z "$grow" ] || [ -n "$hostfile" ] || refuse "--grow $grow: give the hosts by --hostfile FILE"
    [ ${#program[@]} -gt 0 ] || refuse "give the program after --, as in: keep_going.sh --ranks 4 -- python train.py"
}

set_option() {
    case $1 in
        --ranks | --least | --attempts | --grow)
            [[ $2 =~ ^[1-9][0-9]{0,6}$ ]] || refuse "$1 $2: give a number of at least 1"
            printf -v "${1#--}" %s "$2"
            ;;
        --hostfile)
            [ -r "$2" ] && [ -f "$2" ] || refuse "--hostfile $2: there is no such file that can be read"
            hostfile=$2
            [[ $2 == */* ]] || hostfile=./$2
            [ -x "$2" ] || ! is_script || refuse "--hostfile $2: it begins with #!, and can't be run: chmod +x $2"
            ;;
        --progress) progress=$2 ;;
        --launcher) read -ra launcher <<<"$2" ;;
        --reach) read -ra reach <<<"$2" ;;
    esac
}

find_progress() { # the folder of the checkpoints, from the arguments of the program
    local index resumes=''
    for index in "${!program[@]}"; do
        case ${program[index]} in
            --checkpoint) progress=${progress:-${program[index + 1]-}} ;;
            --checkpoint=*) progress=${progress:-${program[index]#*=}} ;;
            --resume) resumes=1 ;;
        esac
    done
    [ -n "$progress" ] || refuse "the program has no --checkpoint DIR: give the path of its checkpoints by --progress PATH"
    [ -n "$resumes" ] || [[ " ${program[*]} " != *" -m trainers "* ]] ||
        refuse "add --resume after --checkpoint $progress; without it the program refuses the second start"
}

find_launcher() { # sets $launcher, $kind and $reach
    local name
    if [ ${#launcher[@]} -eq 0 ]; then
        command -v mpirun >/dev/null || command -v srun >/dev/null || PATH=$checkout/.venv/bin:$PATH
        for name in mpirun mpiexec srun; do
            command -v "$name" >/dev/null && launcher=("$name") && break
        done
    fi
    [ ${#launcher[@]} -gt 0 ] && command -v "${launcher[0]}" >/dev/null ||
        refuse "there is no ${launcher[0]-mpirun}; activate an environment with an MPI, or give --launcher COMMAND"
    case $("${launcher[0]}" --version 2>&1 || true) in
        *"Open MPI"* | *OpenRTE* | *PRRTE*) kind=openmpi ;;
        slurm*) kind=slurm ;; # MPICH's mpiexec names slurm too, as a launcher that it can use
        *) kind=hydra ;; # MPICH, and others that take its options
    esac
    if [ ${#reach[@]} -eq 0 ]; then
        reach=(ssh -o BatchMode=yes -o ConnectTimeout=10)
        [ $kind != slurm ] || reach=(timeout 60 srun --overlap -N 1 -n 1 -w)
    fi
}

# ---- Hosts ----

hosts=() # lines of the hostfile, without those of failed hosts
room=0   # their slots when the job was started

is_script() { [ "$(head -c 2 "$hostfile")" = '#!' ]; }

list_hosts() { # prints the lines of the hostfile, or of the script in its place
    local line
    if is_script; then "$hostfile" </dev/null; else cat "$hostfile"; fi |
        while read -r line || [ -n "$line" ]; do
            [ -z "${line%%#*}" ] || printf '%s\n' "${line%%#*}"
        done
}

read_hosts() { # sets $hosts; they stay if no host is listed, as in a file that is being written, or if the script fails
    local found
    [ -n "$hostfile" ] || return 0
    ! found=$(list_hosts) || [ -z "$found" ] || mapfile -t hosts <<<"$found"
    [ ${#hosts[@]} -gt 0 ] || refuse "--hostfile $hostfile: it names no host, or it is a script that fails"
}

names_of() { # names_of LINE...: the hosts that lines of a hostfile name
    printf '%s\n' "${@%%[:[:space:]]*}"
}

slots() { # the number of ranks for which the hosts have slots
    local line sum=0
    for line in "${hosts[@]}"; do
        if [[ $line =~ (slots=|:)([0-9]+) ]]; then sum=$((sum + 10#${BASH_REMATCH[2]})); else sum=$((sum + 1)); fi
    done
    echo $sum
}

answers() { # answers NAME: whether this host is alive
    [ "$1" = localhost ] || [ "$1" = "$(uname -n)" ] || "${reach[@]}" "$1" true </dev/null >&2
}

leave_out_lost_hosts() {
    local line name alive=()
    for line in "${hosts[@]}"; do
        name=$(names_of "$line")
        if answers "$name"; then alive+=("$line"); else say "host $name does not answer: it is left out"; fi
    done
    hosts=(${alive[@]+"${alive[@]}"})
}

# ---- The job ----

command_line() { # sets $line to the command that starts the job
    local names nodes=${#hosts[@]}
    line=("${launcher[@]}" -n "$ranks")
    if [ -n "$hostfile" ]; then
        printf '%s\n' "${hosts[@]}" >"$scratch/hosts"
        [ "$nodes" -le "$ranks" ] || nodes=$ranks
        names=$(names_of "${hosts[@]:0:nodes}" | paste -sd,)
        case $kind in
            openmpi) line+=(--hostfile "$scratch/hosts") ;;
            hydra) line+=(-f "$scratch/hosts") ;;
            slurm) line+=(-N $nodes -w "$names") ;;
        esac
    elif [ $kind = openmpi ] && [ "$ranks" -gt "$(cores)" ]; then
        line+=(--oversubscribe)
    fi
    line+=("${program[@]}")
}

newest() { # prints the newest file with its time, which changes when a checkpoint is written
    find "$progress" -type f -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 || true # there may be none yet
}

# The job has its own process group (set -m). So Ctrl-C reaches it once, through this shell; in the group of a script,
# background processes ignore Ctrl-C. The job reads nothing from a terminal.
run_job() { # sets $status
    local input=/dev/stdin
    [ ! -t 0 ] || input=/dev/null
    printf '+' >&2
    printf ' %q' "${line[@]}" >&2
    printf '\n' >&2
    : >"$ALLREDUCE_JOB_LOG"
    set -m
    "${line[@]}" <$input &
    child=$!
    watch_job >&2 </dev/null &
    watcher=$!
    set +m
    asked=''
    # Not `wait`, and no work in a trap: bash 5.2 can lose the signal that a child has ended, or the rest of the trap.
    while read -rt $TICK_SECONDS -u $nothing || kill -0 "$child" 2>/dev/null; do
        [ -n "$stopped" ] || [ ! -e "$scratch/grow" ] || make_it_grow
        [ -z "$passes" ] || { passes='' && ask_to_end "$stopped" && asked=1; }
    done
    status=0
    wait "$child" || status=$?
    kill -KILL -- -$watcher 2>/dev/null || true # SIGTERM could still run the trap of EXIT in it
    wait $watcher 2>/dev/null || true
}

watch_job() { # in the background: reports the first step after a restart, and tells this shell that the job can grow
    local now before=$room fewer=0
    [ -z "$since" ] || report_first_step &
    [ -n "$grow" ] || { wait && return; }
    while sleep "$grow"; do
        kill -0 $$ || return
        now=$({ read_hosts && leave_out_lost_hosts && slots; } 2>/dev/null)
        [ "$now" -le "$before" ] || break
        # A look may fail, and only with ULFM a job can have lost a host.
        [[ ${launcher[*]} == *ulfm* ]] && [ "$now" -lt "$before" ] && fewer=$((fewer + 1)) || fewer=0
        [ $fewer -lt $LOOKS ] || before=$now
    done
    say "the hosts have slots for $now ranks: the job writes a checkpoint and ends, to continue on these"
    : >"$scratch/grow"
    wait
}

report_first_step() {
    local now
    until grep -q ': has taken its first step$' "$ALLREDUCE_JOB_LOG"; do sleep 0.05; done
    now=$(($(milliseconds) - since))
    say "trains on $ranks ranks: $(printf '%d.%02d' $((now / 1000)) $((now % 1000 / 10))) s without training"
}

milliseconds() { date +%s%3N; }

# With ULFM, Open MPI's mpirun returns 0 also when all ranks were killed. Ranks note in $ALLREDUCE_JOB_LOG when their
# program begins and when it ends by itself.
all_were_killed() {
    [ "$status" = 0 ] && [ $kind = openmpi ] && grep -q ': began as ' "$ALLREDUCE_JOB_LOG" 2>/dev/null &&
        ! grep -q ': ended$' "$ALLREDUCE_JOB_LOG" &&
        say "all ranks of this host were killed or have crashed, though $launcher returned 0"
}

watcher='' stopped='' passes='' asked='' grows='' since=''
stop() { # stop SIGNAL: to pass on to the job
    stopped=$1 passes=1
}

make_it_grow() {
    rm "$scratch/grow"
    grows=1 since=$(milliseconds)
    ask_to_end TERM
}

# SIGTERM goes to the ranks of this host, which tell the others: Open MPI's mpirun kills its ranks a second after it gets
# SIGTERM, and some take longer to write a checkpoint. A second SIGTERM goes to mpirun. srun would kill its tasks.
ask_to_end() { # ask_to_end SIGNAL
    local ranks_here=()
    [ $kind = slurm ] && [ -n "${SLURM_JOB_ID-}" ] && scancel --quiet --signal="$1" "$SLURM_JOB_ID" && return
    [ "$1$asked" != TERM ] || mapfile -t ranks_here < <(list_ranks)
    if [ ${#ranks_here[@]} -gt 0 ] && kill -s TERM "${ranks_here[@]}"; then
        end_rest "${ranks_here[@]}" >/dev/null 2>&1 </dev/null &
    else
        kill -s "$1" "$child" || true
    fi 2>/dev/null
}

list_ranks() { # prints the processes of the ranks that run on this host
    local pid
    sed -n 's/^rank .*: began as process \([0-9]*\)$/\1/p' "$ALLREDUCE_JOB_LOG" | while read -r pid; do
        ! grep -qzsxF "ALLREDUCE_JOB_LOG=$ALLREDUCE_JOB_LOG" "/proc/$pid/environ" || echo "$pid"
    done
}

end_rest() { # end_rest PROCESS...: end the launcher, if it does not end after these ranks: with ULFM, others may go on
    while kill -0 "$@"; do sleep 0.1; done
    sleep $REST_SECONDS
    kill -s TERM "$child"
}

next_ranks() { # sets $ranks for the next start
    local before room_before=$room
    if [ -n "$hostfile" ]; then
        before=$(names_of "${hosts[@]}" | sort)
        [ -z "$grow" ] || read_hosts
        leave_out_lost_hosts
        [ ${#hosts[@]} -gt 0 ] || give_up "no host answers"
        room=$(slots)
        if [ "$room" -gt "$room_before" ] || { [ "$room" -lt "$room_before" ] && [ "$room" -lt "$ranks" ]; }; then
            ranks=$room
            return
        fi
        [ "$(names_of "${hosts[@]}" | sort)" = "$before" ] || return 0
    fi
    [ -n "$same$grows" ] || [ "$ranks" -le "$least" ] || ranks=$((ranks - 1))
}

give_up() {
    say "$1: giving up (exit code $status)"
    exit "$status"
}

keep_going() {
    local before failures=0
    while :; do
        before=$(newest)
        command_line
        run_job
        ! all_were_killed || status=$KILLED
        if [ "$status" = 0 ]; then
            [ -n "$grows" ] || exit 0
            status=$TERMINATED
            give_up "the program ended with 0 after it was asked to continue on more ranks; end with $TERMINATED after SIGTERM"
        fi
        repeat_error
        [ -z "$stopped" ] || give_up "stopped by SIG$stopped"
        [ "$status" -ne $USAGE_ERROR ] || give_up "the program refuses its arguments"
        [ -n "$grows" ] || since=$(milliseconds)
        failures=$((failures + 1))
        [ -z "$grows" ] && [ "$(newest)" = "$before" ] || failures=0
        [ "$failures" -lt "$attempts" ] || give_up "$failures starts in a row have written no checkpoint"
        next_ranks
        [ "$ranks" -ge "$least" ] || give_up "$ranks ranks are left, fewer than --least $least"
        if [ -n "$grows" ]; then
            say "the job continues from the last checkpoint on $ranks ranks"
        else
            say "the job died with exit code $status; it restarts from the last checkpoint on $ranks ranks"
        fi
        grows=''
        rm -f "$scratch/grow"
        # processes of the dead job may hold the folder for a moment
        [ ! -d "$progress" ] || ! command -v flock >/dev/null || flock -w $LOCK_SECONDS "$progress" true || true
        [ -z "$stopped" ] || give_up "stopped by SIG$stopped"
    done
}

read_options "$@"
find_progress
find_launcher
read_hosts
room=$(slots)
if [ -z "$ranks" ]; then
    ranks=4
    [ -z "$hostfile" ] || ranks=$room
fi
[ "$least" -le "$ranks" ] || refuse "--least $least: the job begins with $ranks ranks, which are fewer"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
scratch=$(mktemp -d)
export ALLREDUCE_JOB_LOG=$scratch/job.log
mkfifo "$scratch/nothing"
exec {nothing}<>"$scratch/nothing" # from which nothing is ever read
trap 'rm -rf "$scratch"' EXIT
trap 'stop TERM' TERM
trap 'stop INT' INT
status=0
keep_going

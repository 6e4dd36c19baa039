#!/usr/bin/env bash
# Runs a command in a Slurm of this machine alone, with two nodes; see --help.
set -euo pipefail

readonly WAIT_SECONDS=30

usage() {
    cat <<'TEXT'
Usage: try_here.sh [--nodes N] [--cores N] COMMAND [ARGUMENT...]

Starts a real Slurm on this one machine (munged, slurmctld, and a slurmd for each node n1, n2 ...), runs COMMAND in it,
and ends it again. In COMMAND, sbatch, srun, squeue, scontrol and scancel talk to this Slurm alone. A Slurm that this
machine belongs to is not touched. So you can try a batch script, and see it stopped and requeued, without a cluster.

  --nodes N    the number of nodes (default: 2); all of them are this machine
  --cores N    the cores that each node offers to Slurm, whatever the machine has (default: 4)

Examples, with an environment of this library on PATH:
  bash scripts/slurm/try_here.sh sbatch --wait --ntasks-per-node 1 scripts/slurm/keep_going.sbatch \
      python -m trainers --data digits --checkpoint run --resume      # writes slurm-1.out
  bash scripts/slurm/try_here.sh srun --mpi=list                      # which plugins this Slurm has
  bash scripts/slurm/try_here.sh bash                                 # a shell; exit ends Slurm
  python -m pytest tests/elastic/test_slurm.py                        # requeues jobs under each launcher, compares bits

In the shell, to see a job stopped before its time limit, as Slurm does it, and at once:
  sbatch --time 2 --signal B:USR1@60 ... scripts/slurm/keep_going.sbatch ...
  scancel --batch --signal USR1 1
  scontrol requeue 1
  scontrol update JobId=1 StartTime=now    # a requeued job waits for two minutes, or 10 seconds before this

The launcher of keep_going.sbatch is $KEEP_GOING_SRUN: "srun --mpi=pmix" (the default) or "mpirun --bind-to none" with Open
MPI, "srun --mpi=pmi2" or "mpiexec" with MPICH.

It needs root, and Slurm: apt-get install slurmctld slurmd slurm-client munge (Debian 12 has Slurm 22.05), and
libpmix-dev for --mpi=pmix. When COMMAND ends, and when this script is stopped or killed, it cancels the jobs that are left, ends the
daemons, and removes its files, which are all in one temporary folder. The exit status is that of COMMAND; 2 means that
Slurm could not be started.
TEXT
}

refuse() {
    printf 'try_here.sh: %s\n' "$*" >&2
    exit 2
}

nodes=2 cores=4
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit ;;
        --nodes | --cores)
            [[ ${2-} =~ ^[1-9][0-9]{0,2}$ ]] || refuse "$1 ${2-}: give a number from 1 to 999"
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        --) shift && break ;;
        -*) refuse "\"$1\" is not an option; --help shows all options" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || refuse "give a command to run, such as bash; --help shows examples"
[ "$(id -u)" = 0 ] || refuse "slurmd needs root; run it with sudo, or as root in a container"
for tool in munged slurmctld slurmd sbatch srun; do
    command -v "$tool" >/dev/null ||
        refuse "$tool is not installed (Debian: apt-get install slurmctld slurmd slurm-client munge)"
done

# ---- The end ----

# Another process of this script ends Slurm when this one has ended, also by SIGKILL: it reads from a pipe that only this
# one can write to.
folder=${TRY_HERE_FOLDER:-$(mktemp -d)}
export SLURM_CONF=$folder/slurm.conf

ours() { # prints the processes of this Slurm: daemons, steps and ranks, all of which have $SLURM_CONF
    local environment pid
    for environment in /proc/[0-9]*/environ; do
        pid=${environment//[^0-9]/}
        [ "$pid" != $$ ] && [ "$pid" != "$BASHPID" ] || continue
        ! grep -zqxF "SLURM_CONF=$SLURM_CONF" "$environment" 2>/dev/null || echo "$pid"
    done
}

end() {
    local signal pid
    timeout 10 scancel --user=root 2>/dev/null || true
    for ((second = 0; second < 10; second++)); do
        [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
        sleep 1
    done
    for signal in TERM KILL KILL; do
        for pid in $(ours); do kill -s $signal "$pid" 2>/dev/null || true; done
        for ((tenth = 0; tenth < 50; tenth++)); do
            [ -n "$(ours)" ] || break 2
            sleep 0.1
        done
    done
    rm -rf "$folder"
}

if [ -n "${TRY_HERE_FOLDER-}" ]; then
    trap '' INT TERM HUP
    cat >/dev/null
    end
    exit
fi
mkfifo "$folder/life"
TRY_HERE_FOLDER=$folder setsid bash "${BASH_SOURCE[0]}" true <"$folder/life" &
ender=$!
exec {life}>"$folder/life"

finish() {
    trap '' INT TERM
    exec {life}>&-
    wait $ender
}

# ---- Slurm ----

free_ports() { # free_ports NUMBER: prints ports on which nothing listens
    local port=$((20000 + RANDOM % 10000)) found=0
    while [ $found -lt "$1" ]; do
        port=$((port + 1))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo $port && found=$((found + 1)); }
    done
}

configure() {
    local host ports node
    host=$(uname -n)
    host=${host%%.*}
    mapfile -t ports < <(free_ports $((nodes + 1)))
    cat <<TEXT
ClusterName=here
SlurmctldHost=$host
SlurmctldPort=${ports[0]}
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmdSpoolDir=$folder/%n
TmpFS=$folder/%n/tmp
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
SwitchType=switch/none
MpiDefault=none
CommunicationParameters=EnableIPv6
ReturnToService=2
SlurmdParameters=config_overrides
PartitionName=all Nodes=n[1-$nodes] Default=YES State=UP MaxTime=INFINITE
TEXT
    for ((node = 1; node <= nodes; node++)); do
        echo "NodeName=n$node NodeHostname=$host Port=${ports[node]} CPUs=$cores"
    done
}

start() {
    local node
    mkdir "$folder"/{munge,state}
    chmod 711 "$folder" "$folder/munge" # munged refuses a socket that others can't reach
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
    configure >"$SLURM_CONF"
    setsid munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
        --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
        2>"$folder/munged.log" {life}>&- &
    for ((tenth = 0; tenth < 50; tenth++)); do
        [ ! -S "$folder/munge/socket" ] || break
        sleep 0.1
    done
    setsid slurmctld -D 2>/dev/null {life}>&- & # setsid: Ctrl-C ends COMMAND first
    controller=$!
    for ((node = 1; node <= nodes; node++)); do
        mkdir -p "$folder/n$node/tmp"
        setsid slurmd -D -N "n$node" 2>/dev/null {life}>&- &
    done
    SECONDS=0
    while [ $SECONDS -lt $WAIT_SECONDS ] && kill -0 $controller 2>/dev/null; do
        [ "$(timeout 5 sinfo --noheader --Node --format=%T 2>/dev/null | grep -c idle)" != "$nodes" ] || return 0
        sleep 0.1
    done
    tail -n 5 "$folder"/*.log >&2
    refuse "the nodes of Slurm did not come up within $WAIT_SECONDS seconds; the ends of its logs stand above"
}

trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start </dev/null
status=0
# Bash runs a trap only after a command in the foreground has ended; one in the background would ignore Ctrl-C.
env --default-signal=INT,QUIT "$@" <&0 {life}>&- &
wait $! || status=$?
exit $status

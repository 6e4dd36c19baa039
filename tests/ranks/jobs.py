"""In which jobs a file of tests on ranks runs: in those of its folder, or of a line `JOBS = "openmpi 1 2 5"` in it.

Many processes take long on the two cores that CI has: above all with PyTorch, which is installed beside Open MPI alone,
and under MPICH, whose every message takes longer there. 2 ranks of Open MPI run all files. The other jobs run those
that depend on the MPI or on the number of ranks: those whose code takes branches on 3 ranks that it takes neither on 1
nor on 2. pairs.py chooses the cases of their tests. "quick 2" is the job of `scripts/test.sh --quick` on 2 ranks.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = {
    "apps": "openmpi 1 2 5",  # parts of ranks: these have all cases
    "collectives": "openmpi 1 2 3 5, mpich 2",
    "frameworks": "openmpi 2",
    "pytorch": "openmpi 1 2 3",
    "torch_backend": "openmpi 1 2 3",
    "training": "openmpi 1 2 3",
}
LINE = re.compile(r'^JOBS = "(.*)"', re.MULTILINE)


def jobs(path: Path) -> dict[str, set[int]]:
    """Return the numbers of ranks on which a file runs, by MPI."""
    line = LINE.search(path.read_text())  # not imported, because that takes long where it does not run
    words = [part.split() for part in (line[1] if line else FOLDERS[path.parent.name]).split(", ")]
    return {mpi: set(map(int, ranks)) for mpi, *ranks in words}


def files(mpi: str, ranks: int) -> list[Path]:
    """Return the files that run in a job. mpi: "openmpi", "mpich", "quick"."""
    return [path for path in sorted(HERE.glob("*/test_*.py")) if ranks in jobs(path).get(mpi, ())]

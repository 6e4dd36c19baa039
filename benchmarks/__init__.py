"""Benchmarks of the AllReduce backends and trainers: a command for each question; README.md lists them.

mpirun -n 4 python -m benchmarks.bandwidth   which backend is fastest at which size, and by how much?
python -m benchmarks.compare a.json b.json   did a change make anything slower?
mpirun -n 4 python -m benchmarks.tune        measure once, so that "auto" decides by measurement
"""

import allreduce  # noqa: F401  # first: it says what to install where there is no MPI

"""Benchmarks of the AllReduce backends and trainers, one command each; README.md lists them.

mpirun -n 4 python -m benchmarks.bandwidth   which backend is fastest at which size, and by how much?
python -m benchmarks.compare a.json b.json   did a change make anything slower?
mpirun -n 4 python -m benchmarks.tune        write the constants by which "auto" selects
"""

import allreduce  # noqa: F401  # first: without MPI its error says what to install

"""The names by which a program on top of the trainers works with its ranks. Besides these, trainers/apps uses Topology,
errors, Exchange and meet of allreduce, and nothing else.

- Agree: `together` (a step, whose error all ranks raise), `root_value`, `all_values`, `on_all`.
- Errors: `raise_together`, `on_all_ranks` (mark an error that all ranks raise), `everywhere` (whether they do).
- Failures: `retry` and `recover` (repeat an action with the ranks that are left), `lost`, `survives`.
- Which ranks: `world_ranks`, and `chunk` and `segments`, by which ranks divide work.
- `waiting`: a context manager that names a wait in the report of a stall.
"""

from allreduce.arrays.chunks import chunk, segments
from allreduce.arrays.gpu import choose_device
from allreduce.elastic.retry import recover, retry
from allreduce.transport.control import (
    all_values,
    everywhere,
    on_all,
    on_all_ranks,
    raise_together,
    root_value,
    together,
)
from allreduce.transport.processes import world_ranks
from allreduce.transport.ulfm import in_force as survives
from allreduce.transport.ulfm import lost
from allreduce.transport.wait import waiting

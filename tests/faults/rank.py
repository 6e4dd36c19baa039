"""The program of one rank of a run; the driver starts it under mpirun.

    mpirun --with-ft ulfm -n 3 python -m tests.faults.rank FOLDER

FOLDER holds the plan, plan.json. Every rank writes its notes there, and at the end its parameters.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from allreduce import Topology, algorithms
from tests.backends import ON_CPU
from tests.faults import points
from tests.faults.notes import Notes
from tests.faults.plans import Plan


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the driver asks a rank that hangs where it is
    plan = Plan.of_dict(json.loads((folder / "plan.json").read_text()))
    if plan.torch:
        importlib.import_module("tests.without_dynamo")  # in the ranks alone: the driver's process may compile
    topology = Topology(ranks_per_node=plan.nodes or None)
    notes = Notes(folder, topology.rank)
    for name in ON_CPU:  # so that all classes are there when points are patched
        algorithms.class_of(name)
    program = importlib.import_module(f"{points.PROGRAMS}.{plan.kind.module}")
    points.install(plan, notes)
    notes.add("pid", pid=os.getpid())
    topology.world.Barrier()  # touches MPI's own shared memory, before a fault leaves no page for it
    points.begin(plan, notes)
    topology.world.Barrier()
    program.run(plan, notes, folder, topology)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

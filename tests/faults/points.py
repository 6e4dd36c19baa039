"""Named places in the library's code at which a rank of a run is lost. The library knows nothing of them.

They are made by patching, in the process that is to be lost alone.
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from tests.faults.notes import Notes
from tests.faults.plans import START, Fault, Plan

PROGRAMS = f"{__package__}.programs"
# The owner of a method or function, and its name. Of a class also the same method of those that inherit from it.
PLACES = {
    "compute": [
        ("trainers.trainer:Trainer", "_compute"),
        ("trainers.parameter_server:ParameterServerTrainer", "_compute_part"),
        ("trainers.spare_replicas:SpareReplicasTrainer", "_compute_part"),
        (f"{PROGRAMS}.loop", "forward"),
    ],
    "backward": [(f"{PROGRAMS}.loop", "backward")],
    "push": [("trainers.strategies.servers.worker:Client", "push")],
    "reply": [("trainers.strategies.servers.server:Desk", "reply")],
    "call": [("allreduce.engine.engine:Engine", "run")],
    "reduce": [("allreduce.engine.engine:Engine", "run")],  # inside of a call, when the ranks have met
    "middle of a reduction": [("allreduce.backend:TwoPhase", "_all_gather")],
    "update": [("trainers.replica:Replica", "update"), ("trainers.pytorch.optimizer:MirroredOptimizer", "step")],
    "end of a step": [(f"{__package__}.notes:Notes", "step")],
    "evaluate": [("trainers.trainer", "evaluated")],
    "predict": [("trainers.trainer", "predicted")],
    "mirror": [("trainers.trainer:Trainer", "_mirror")],
    "edit": [(f"{PROGRAMS}.training", "shift")],
    "checkpoint": [("trainers.fit.checkpointing:Saver", "save"), (f"{PROGRAMS}.loop:Loop", "save")],
    "finished": [("allreduce.topology:Topology", "finished")],
    "survivors": [("allreduce.topology:Topology", "survivors")],
    "rebuild": [("allreduce.backend:AllReduce", "_connect")],
}
Come = Callable[[bool, tuple[Any, ...]], None]
CUT = "cut"  # the file that scripts/cluster_sim.sh waits for


class InjectedError(Exception):
    """The exception of a run that has one."""


def install(plan: Plan, notes: Notes) -> None:
    """Have this rank's faults happen to it, at the points that it comes to. Local; before the training."""
    for number, fault in enumerate(plan.faults):
        if fault.rank == notes.rank and fault.point in PLACES:
            _install(number, fault, notes)


def begin(plan: Plan, notes: Notes) -> None:
    """Have those happen that come before the training. Local."""
    for number, fault in enumerate(plan.faults):
        if fault.rank == notes.rank and fault.point == START:
            notes.add("fault", number=number)
            happen(fault, notes, ())


def _install(number: int, fault: Fault, notes: Notes) -> None:
    lock, turns = threading.Lock(), [0]

    def come(after: bool, arguments: tuple[Any, ...]) -> None:
        if after != fault.after:
            return
        with lock:
            turns[0] += 1
            here = turns[0] == fault.turn or fault.kind == "slow"
        if here:
            notes.add("fault", number=number)
            happen(fault, notes, arguments)

    for owner, name in PLACES[fault.point]:
        for holder in _holders(owner, name):
            wrap = _wrapped_inside if fault.point == "reduce" else _wrapped
            setattr(holder, name, wrap(getattr(holder, name), come))


def _wrapped(action: Callable[..., Any], come: Come) -> Callable[..., Any]:
    @wraps(action)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        come(False, arguments)
        result = action(*arguments, **options)
        come(True, arguments)
        return result

    return wrapped


def _wrapped_inside(run: Callable[..., Any], come: Come) -> Callable[..., Any]:
    @wraps(run)
    def wrapped(calls: Any, call: Any, reduce: Callable[..., Any], flat: Any) -> Any:
        return run(calls, call, _wrapped(reduce, come), flat)

    return wrapped


def _holders(owner: str, name: str) -> list[Any]:
    """The module, or the classes that define a method: where this one has it from, and all that inherit from it."""
    module, _, kind = owner.partition(":")
    if module not in sys.modules:  # of another program
        return []
    holder: Any = importlib.import_module(module)
    if not kind:
        return [holder]
    found: list[Any] = []
    left = [next(one for one in getattr(holder, kind).__mro__ if name in vars(one))]
    while left:
        here = left.pop()
        left += here.__subclasses__()
        found += [here] if name in vars(here) and here not in found else []
    return found


def happen(fault: Fault, notes: Notes, arguments: tuple[Any, ...]) -> None:
    """The fault itself, in the thread that has come to it. arguments: of what is called at the point."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise InjectedError("on purpose")
    if fault.kind == "exit":
        sys.exit(0)
    if fault.kind == "slow":
        time.sleep(fault.delay)
    if fault.kind == "nan":
        arguments[0].buffer[0] = float("nan")
    if fault.kind == "spoil":
        next(array for array in arguments if isinstance(array, np.ndarray))[0] += 1
    if fault.kind == "revoke":
        arguments[0].topology.revoke()
    if fault.kind == "cut":
        (notes.folder / CUT).touch()
    if fault.kind == "shm":
        _fill("/dev/shm")


def _fill(folder: str) -> None:
    """Leave no room in a folder's file system, which is this job's own."""
    with open(os.path.join(folder, "full"), "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))

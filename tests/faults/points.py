"""Named points in the library's code, and the actions that a rank can do when it reaches one.

This is the only way in which tests end, stop or disturb a rank at a point inside of the library, which knows nothing of
it: `at` patches the functions of POINTS in its own process only.
"""

import contextlib
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from tests.faults.notes import Notes
from tests.faults.plans import START, Fault, Plan

PROGRAMS = f"{__package__}.programs"
# The owner of a method or function, and its name. Of a class also the same method of those that inherit from it.
POINTS = {
    "compute": [
        ("trainers.strategies.step:Step", "compute"),
        ("trainers.strategies.servers.asynchronous:AsynchronousServers", "_compute_part"),
        ("trainers.strategies.spare_replicas:SpareReplicas", "_compute_part"),
        ("trainers.strategies.local_sgd:LocalMirrored", "_update_alone"),
        (f"{PROGRAMS}.loop", "forward"),
    ],
    "backward": [(f"{PROGRAMS}.model", "backward")],
    "push": [("trainers.strategies.servers.mailbox:Client", "push")],
    "reply": [
        ("trainers.strategies.servers.mailbox:Mailbox", "reply"),
        ("trainers.strategies.servers.service:ServerStrategy", "share_parameters"),
    ],
    "call": [("allreduce.call.executor:Executor", "prepare")],  # what it returns
    "reduce": [("allreduce.call.executor:Executor", "prepare")],  # inside of a call, when the ranks have met
    "middle of a reduction": [("allreduce.algorithm:Algorithm", "all_gather")],
    "update": [("trainers.replica:Replica", "update"), ("trainers.pytorch.optimizer:MirroredOptimizer", "step")],
    "end of a step": [(f"{__package__}.notes:Notes", "step")],
    "evaluate": [("trainers.fit.evaluation", "evaluate_rows")],
    "predict": [("trainers.trainer", "predict_chunk")],
    "mirror": [
        ("trainers.trainer", "mirror"),
        ("trainers.strategies.mirrored", "mirror"),
        ("trainers.strategies.servers.service", "mirror"),
        ("trainers.fit.checkpointing", "adopt_whole"),
    ],
    "edit": [(f"{PROGRAMS}.training", "halve")],
    "end of an epoch": [(f"{PROGRAMS}.training:Steps", "on_epoch_end")],
    "checkpoint": [("trainers.fit.checkpointing:Saver", "save")],
    "finished": [("allreduce.topology:Topology", "finished")],
    "survivors": [("allreduce.topology:Topology", "survivors")],
    "rebuild": [("allreduce.backend:AllReduce", "_connect")],
    "agree in a call": [("allreduce.call.executor", "agree")],
    "gather": [("allreduce.transport.chunked", "spread")],
    "part": [("allreduce.topology:Topology", "split")],
    "close": [("allreduce.algorithm:Algorithm", "close")],
    "make a communicator": [("allreduce.topology:Topology", "private")],
    "meet": [("trainers.recovery.recovery:Recovery", "_meet")],  # in a recovery
    "go back": [("trainers.fit.loop:Fit", "go_back")],
    "back up": [("trainers.state.backup:Backup", "keep")],
    "back up an array": [("allreduce.transport.chunked", "pieces")],
    "wait for a backup": [("allreduce.transport.chunked", "wait_for")],
    "share slices": [("trainers.state.sharded:ShardedParameters", "share")],
}
CUT = "cut"  # the file that scripts/cluster_sim.sh waits for
Action = Callable[..., object]


class InjectedError(Exception):
    """The exception that ends a rank."""


class WrongResultError(Exception):
    """A call returned other numbers than the sum of the ranks' own."""


def die(*_: Any, **__: Any) -> None:
    """End this process as a failed rank ends: at once, without a message."""
    os.kill(os.getpid(), signal.SIGKILL)


def at(point: str, action: Action, turn: int = 1, after: bool = False, always: bool = False) -> None:
    """Call `action` when this process reaches a point for the `turn`-th time from now, or always. Local.

    action: gets the arguments of the function that is called at the point. after: call it after that function has
    returned, not before.
    """
    lock, turns = threading.Lock(), itertools.count(1)

    def come(*arguments: Any) -> None:
        with lock:
            here = next(turns) == turn or always
        if here:
            action(*arguments)

    for owner, name in POINTS[point]:
        for holder in _holders(owner, name):
            wrap = {"call": _wrapped_result, "reduce": _wrapped_work}.get(point, _wrapped)
            setattr(holder, name, wrap(getattr(holder, name), come, after))


def install(plan: Plan, notes: Notes) -> None:
    """Inject the faults that a plan has for this rank at points in the code. Local; call it before the training."""
    for number, fault in enumerate(plan.faults):
        if fault.rank == notes.rank and fault.point in POINTS:
            action = partial(_happen_noted, number, fault, notes)
            at(fault.point, action, fault.turn, fault.after, always=fault.kind == "slow")


def begin(plan: Plan, notes: Notes) -> None:
    """Inject the faults that happen before the training. Local."""
    for number, fault in enumerate(plan.faults):
        if fault.rank == notes.rank and fault.point == START:
            _happen_noted(number, fault, notes)


def _wrapped(call: Action, come: Action, after: bool) -> Action:
    @wraps(call)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not after:
            come(*arguments)
        result = call(*arguments, **options)
        if after:
            come(*arguments)
        return result

    return wrapped


def _wrapped_result(make: Action, come: Action, after: bool) -> Action:
    """Wrap each function that `make` returns."""

    @wraps(make)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return _wrapped(make(*arguments, **options), come, after)  # type: ignore[arg-type]

    return wrapped


def _wrapped_work(prepare: Action, come: Action, after: bool) -> Action:
    """Wrap the work of each call that an executor prepares."""

    @wraps(prepare)
    def wrapped(executor: Any, prepared: Any, *bound: Any) -> Any:
        work = prepared.work._replace(run=_wrapped(prepared.work.run, come, after))
        return prepare(executor, prepared._replace(work=work), *bound)

    return wrapped


def _holders(owner: str, name: str) -> list[Any]:
    """Return the module, or the classes that define a method: the class that this one inherits it from, and all classes
    that override it."""
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


def _happen_noted(number: int, fault: Fault, notes: Notes, *arguments: Any) -> None:
    notes.add("fault", number=number)
    happen(fault, notes, arguments)


def happen(fault: Fault, notes: Notes, arguments: tuple[Any, ...]) -> None:
    """Do the fault, in the thread that has reached the point. arguments: of the function that is called there."""
    if fault.kind == "kill":
        die()
    if fault.kind == "raise":
        raise InjectedError("on purpose")
    if fault.kind == "exit":
        sys.exit(0)
    if fault.kind == "slow":
        time.sleep(fault.delay)
    if fault.kind == "spoil":
        buffers = [each[0] if isinstance(each, list) else each for each in arguments]  # of [buffer, count, datatype]
        buffer = next(each for each in buffers if isinstance(each, np.ndarray | memoryview))
        np.asarray(buffer)[0] += 1
    if fault.kind == "revoke":
        owner = arguments[0]  # a step has its backend, others have their group
        (getattr(owner, "group", None) or getattr(owner, "backend", owner)).topology.revoke()
    if fault.kind == "cut":
        (notes.folder / CUT).touch()
    if fault.kind == "shm":
        _fill("/dev/shm")


def _fill(folder: str) -> None:
    """Fill a folder's file system, which belongs to this job alone."""
    with open(os.path.join(folder, "full"), "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))

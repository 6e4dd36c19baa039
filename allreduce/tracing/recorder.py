"""Records the calls of a backend in a trace: an observer, which can't change a result.

Calls exchange no extra messages. When the trace is written, calls are matched by sequence number; their start times
show which rank was last.
"""

import os
from typing import Any

from allreduce.backend import AllReduce
from allreduce.call.call import REDUCING, Call
from allreduce.health.dump import Entry
from allreduce.tracing import trace as tracing
from allreduce.tracing.merging import WAITED
from allreduce.tracing.trace import Trace


class Recorder:
    """The observer. The calls of the backend are a series of the trace.

    trace: see `record`; its owner closes it. For GPU arrays the recorded time is the host's; the GPU may finish later
    (NCCL).
    """

    def __init__(self, backend: AllReduce, trace: Trace) -> None:
        self.trace, self._backend = trace, backend
        self._series, self._count = trace.add_series(backend.name), 0
        self._arrived = 0
        self._descriptions: dict[Call, tuple[str, dict[str, Any]]] = {}

    def __call__(self, event: Entry) -> None:
        _, _, call, begin, end = event
        if isinstance(call, Call) and end:  # it is no agreement, and has not failed
            shown = self._descriptions.get(call)
            if shown is None:  # equal calls share the details
                shown = self._descriptions[call] = self._describe(call)
            times = int(begin * 1e9), int(end * 1e9)
            arrived, self._arrived = self._arrived or times[0], 0
            self._count += 1
            self.trace.add_call(self._series, self._count - 1, shown[0], (arrived, *times), shown[1])

    def came(self, at: int) -> None:
        """Set the time at which this rank submitted the next call, for calls that run later in a worker thread."""
        self._arrived = at

    def waited(self, begin: int) -> None:
        """Record that this rank only waited, from `begin` to now, for the last call."""
        self.trace.note(f"{WAITED} {self._series} {self._count - 1}", begin)

    def _describe(self, call: Call) -> tuple[str, dict[str, Any]]:
        backend = self._backend.chosen(call)
        about: dict[str, Any] = {"bytes": call.length * call.dtype.itemsize, "dtype": str(call.dtype)}
        about["backend"] = backend
        return f"{call.kind}, {backend}", {**about, "op": call.op} if call.kind in REDUCING else about


def record(backend: AllReduce, trace: "str | os.PathLike[str] | Trace") -> Recorder:
    """Record the calls of `backend` from now on, until `backend.observers.remove(recorder)`. Collective if `trace` is a
    path: then `close` of the backend writes the file."""
    given, owned = tracing.of(trace, backend.topology)
    recorder = Recorder(backend, given)
    backend.observers.append(recorder)
    if owned:
        backend.cleanup.append(lambda together: given.close() if together else given.abandon())
    return recorder

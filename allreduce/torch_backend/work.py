"""What an asynchronous operation returns: the Work that is waited for, and its Future.

torch.distributed.Work and torch.futures.Future are PyTorch's own classes, so DDP's C++ reducer, comm
hooks and `dist.batch_isend_irecv` take these for any backend's.
"""

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allreduce.torch_backend import events
from allreduce.torch_backend.untraced import untraced

# Raised by work.wait() when an operation took too long; a RuntimeError, like all errors of torch.distributed.
TimedOut = dist.DistBackendError


def seconds(timeout: timedelta | float | None, default: float) -> float:
    """A timeout of PyTorch's in seconds; none, zero and the negative "unset" of its options mean `default`."""
    given = 0.0 if timeout is None else exact_seconds(timeout)
    return given if given > 0 else default


def exact_seconds(timeout: timedelta | float) -> float:
    """A timeout of PyTorch's in seconds, zero too."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def counted(tensors: Sequence[torch.Tensor]) -> str:
    """How many elements of which dtype: " of 3 elements of torch.float32", " of 3, 4 elements ..." of several."""
    lengths = ", ".join(str(tensor.numel()) for tensor in tensors)
    return f" of {lengths} elements of {tensors[0].dtype}" if tensors else ""


@untraced
class Work(dist.Work):
    """One operation of a group, from its submission to its end.

    name: what it is, for messages. result: the tensors that it writes. limit: seconds that it may take.
    alike: what of its arguments must be the same on all ranks, in words that follow the name.
    """

    def __init__(self, name: str, result: Sequence[torch.Tensor], limit: float, alike: str = "") -> None:
        super().__init__()
        self.name = name
        self.described = name + alike
        self.limit = limit
        self.given_up = False  # whether somebody has waited for it in vain
        self._result = list(result)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        self._chained: torch.futures.Future | None = None  # what others get; ends after `_future`, in the same thread
        self._event = events.begin(name)
        self._lock = threading.Lock()

    # What PyTorch calls

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end of the operation, and raise the error that it ended with.

        Raises DistBackendError after `timeout`, while the operation goes on. Without one it is the
        executor that ends an operation after its own limit.
        """
        limit = seconds(timeout, 0.0)
        if not self._ended.wait(limit or None):
            self.given_up = True
            raise TimedOut(f"{self.name} was not done within {limit:g} s: another rank is late, or never called it")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation has written. Waits for it."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A Future of the list of written tensors; of a RuntimeError that names the error where there is one."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=_gpus(self._result))
                # An exception that is set is to C++ (DDP's reducer) a result, which it takes for tensors: the process
                # crashes. What a callback raises is an error there too.
                self._chained = self._future.then(_value)
                if self._ended.is_set():
                    self._settle(self._future)
            assert self._chained is not None
            return self._chained

    # What the executor calls

    def end(self, error: Exception | None = None) -> None:
        """Mark the operation as ended. What was chained to the future runs now, in the calling thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            if self._event is not None:
                self._event.set_result(None)  # before anybody who waits can end the profile
            self._ended.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)


@untraced
class Several(Work):
    """What other works do, which may be messages: one rank may have them and another not."""

    def __init__(self, name: str, members: Sequence[Work], limit: float) -> None:
        super().__init__(name, [], limit)
        self._members = list(members)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for each of them, and raise the first error."""
        for member in self._members:
            member.wait(timeout)
        self.end()
        return True

    def is_completed(self) -> bool:
        return all(member.is_completed() for member in self._members)


def keep_what_the_reducer_holds() -> None:
    """Keep the Work that DDP's `join` hands to its reducer in C++, for as long as the reducer may ask it.

    A class of PyTorch's that Python has subclassed loses the methods that Python gave it when Python lets go of
    it, though C++ still holds it. PyTorch sees to this where C++ gets a Work from a group, but not there.
    """
    reducers: Any = dist.Reducer
    original = reducers._set_forward_pass_work_handle
    if getattr(original, "keeps", False):
        return

    def keeping(reducer: Any, work: Any, use_static_world_size: bool) -> None:
        _held[reducer] = work  # one at a time
        original(reducer, work, use_static_world_size)

    keeping.keeps = True  # type: ignore[attr-defined]
    reducers._set_forward_pass_work_handle = keeping


_held: Any = weakref.WeakKeyDictionary()


def _value(future: torch.futures.Future) -> Any:
    return future.value()


def _gpus(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return list({tensor.device for tensor in tensors if tensor.is_cuda})

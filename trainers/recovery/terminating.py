"""SIGTERM, which clusters send before the time of a job runs out: the trainer writes a checkpoint, and the job ends.

A rank of a fit that gets the signal asks all ranks to stop after the step, by the flag that is sent with the gradients.
They write a checkpoint, where `fit` writes some, and end with exit code 143 (128 + 15), so that a script sees that the
training is not complete. Outside of a fit, and where the program has a handler of its own, nothing changes.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.health import abort
from allreduce.transport import processes
from allreduce.transport.control import combine
from trainers.watching.callback import Callback, Logs

CODE = 128 + signal.SIGTERM
P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_open: list["Terminating"] = []  # the blocks in which SIGTERM is caught: our handler is installed while there is one
_came: list[int] = []  # signals of open blocks, and of a block that an error has ended, to which no call has reacted
_quiet: list[bool] = []  # the open blocks that are quiet


class Terminated(SystemExit):
    """SIGTERM has asked the job to end, and all ranks know it. Uncaught, it ends the program with exit code 143.

    ranks: as of errors.TrainerError.
    """

    ranks: tuple[int, ...] | None = None

    def __init__(self, text: str) -> None:
        super().__init__(CODE)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Terminating(Callback):
    """Context manager: in its block SIGTERM does not end the program; `here` and `asked` report it. Local; works in the
    main thread only.

    comm: a communicator of the ranks that train together, for `asked`, for example `topology.world`. quiet: trainings
    in this block do not print that SIGTERM has ended them.

        with Terminating(topology.world) as sigterm:
            for x, y in batches:
                ...
                if sigterm.asked():  # on any rank
                    save()
                    sys.exit(143)  # as after SIGTERM

    As a callback it ends the fit of a trainer; `fit` has one already.
    """

    collective = True  # all ranks of a fit have one
    reads_batches = reads_model = False

    def __init__(self, comm: MPI.Intracomm | None = None, quiet: bool = False) -> None:
        self._comm, self._quiet = comm, quiet
        self.agreed = False  # all ranks know that a rank has received the signal
        self._stepped = False

    @property
    def active(self) -> bool:
        """Whether SIGTERM is caught now: in the block, unless the program has a handler of its own. Local."""
        return self in _open

    @property
    def here(self) -> bool:
        """Whether this rank has received the signal in this block. Local."""
        return self.active and bool(_came)

    def asked(self) -> bool:
        """Whether any rank has received the signal. Collective: an all-reduce of one number."""
        comm = self.trainer.group.comm if self._comm is None else self._comm
        self.agreed = bool(combine(comm, np.array([self.here], np.int64), "learn of SIGTERM", MPI.MAX)[0])
        return self.agreed

    def __enter__(self) -> "Terminating":
        free = bool(_open) or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if free and threading.current_thread() is threading.main_thread():
            _open.append(self)
            signal.signal(signal.SIGTERM, _note)
        _quiet.extend([True] * self._quiet)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._quiet:
            _quiet.pop()
        if not self.active:
            return
        _open.remove(self)
        if _open:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _came and not self.agreed:  # the program has not called `asked` since
            if kind is not None:
                return  # the error comes first; if the program catches it, the next block reports the signal
            os.kill(os.getpid(), signal.SIGTERM)
        _came.clear()

    def _end_fit(self, *_: Any, **__: Any) -> None:
        if self.here:
            self.trainer.stop_training = True

    on_train_begin = on_epoch_end = _end_fit

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if not self._stepped:
            self._stepped = True
            abort.log_job("has taken its first step")  # for scripts/keep_going.sh
        self._end_fit()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.asked()


def _note(number: int, frame: object) -> None:
    _came.append(number)


# A forked child is not a rank. A closing Pool sends it SIGTERM and waits for its end, so the child must not have our
# handler. The signal is blocked until the child has removed the handler; otherwise Python would lose it.


def _block_signal() -> None:
    if _open:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_signal() -> None:
    if _open:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _remove_handler() -> None:
    if _open:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _unblock_signal()


os.register_at_fork(before=_block_signal, after_in_parent=_unblock_signal, after_in_child=_remove_handler)


def stops_at_sigterm(fit: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Decorates a trainer's `fit`: after SIGTERM all ranks write the checkpoint and raise Terminated."""

    @functools.wraps(fit)
    def stopping(*args: P.args, **options: P.kwargs) -> ResultT:
        users: Any = options.get("callbacks", ())
        with Terminating() as sigterm:
            if isinstance(users, Iterable) and not isinstance(users, str):  # else the fit refuses them
                options["callbacks"] = (sigterm, *users)  # first, so that an error in another callback does not skip it
            result = fit(*args, **options)
            if sigterm.agreed:
                trainer: Any = args[0]
                folder: Any = getattr(options.get("checkpoint"), "folder", options.get("checkpoint"))
                kept = "there is no checkpoint of it; fit(..., checkpoint=...) writes one (--checkpoint)"
                if folder is not None:
                    kept = f"its newest checkpoint is in {folder}; resume=True (--resume) continues from there"
                raise terminated(f"SIGTERM: the training has been stopped; {kept}", trainer.group.comm)
        return result

    return stopping


def terminated(text: str, comm: MPI.Intracomm) -> Terminated:
    """Return the error that all ranks of `comm` raise. Rank 0 prints it, unless a quiet block is open. Local."""
    error = Terminated(text)
    error.ranks = processes.world_ranks(comm)
    if comm.rank == 0 and not _quiet:
        print(error, file=sys.stderr, flush=True)
        abort.log_job(str(error))
    return error

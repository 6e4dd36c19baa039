"""The status dump: at SIGUSR1 a rank prints where it waits and the stacks of its threads, and continues.

- faulthandler prints the stack of the main thread at once, also while C code holds the GIL.
- A thread, which a byte from Python's own signal handler wakes, prints where the rank waits, and the stacks of all
  threads. It holds the GIL, because stacks that change while they are read would crash the program.
- Both work while the main thread is inside MPI. A handler that the program has set, or sets later, stays.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
from typing import TextIO

from allreduce.health import abort
from allreduce.health.stall import status, write_flight
from allreduce.process import children

_installed: list[int] = []  # both ends of a pair of sockets, open until exit


def install() -> None:
    """Make uncaught errors end the job (`abort`), and SIGUSR1 print where this rank waits. Local.

    A handler that the program has for the signal stays.
    """
    abort.record_lifetime()
    abort.install()
    free = hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    main = threading.current_thread() is threading.main_thread()
    stderr = sys.__stderr__
    if _installed or not free or not main or stderr is None:
        return
    try:
        stderr.fileno()
    except (OSError, ValueError):  # closed
        return
    reader, writer = (end.detach() for end in socket.socketpair())
    os.set_blocking(writer, False)
    _installed.extend((reader, writer))
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous != -1:  # an asyncio loop, say, receives all signals: then only faulthandler prints
        signal.set_wakeup_fd(previous)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=False, chain=True)
    threading.Thread(target=_listen, args=(reader, stderr), name="allreduce signals", daemon=True).start()
    os.register_at_fork(after_in_child=_detach_in_child)


def _listen(reader: int, stderr: TextIO) -> None:
    while received := os.read(reader, 64):
        if signal.SIGUSR1 in received and not children.forked():
            abort.print_error(f"process {os.getpid()} on {socket.gethostname()}:\n  {status()}\n")
            faulthandler.dump_traceback(stderr)
            write_flight("SIGUSR1")


def _detach_in_child() -> None:
    """In a forked child: remove the wakeup descriptor, which would wake the parent's thread."""
    previous = signal.set_wakeup_fd(-1)
    if previous not in (-1, _installed[1]):
        signal.set_wakeup_fd(previous)

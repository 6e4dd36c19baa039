"""Notes: what the ranks of a topology tell each other of themselves when a wait is long.

A rank that has waited for a second sends every other rank a note that says where it is; who has sent none is not
waiting. So every rank that waits knows where all of them are, without any of them having to answer.

A loss revokes what the notes travel on. Where ranks may be lost, those that leave say so on a communicator that no loss
revokes: the others agree then who is left (`Topology.finished`), and nothing but the arrival of all would end that.
"""

import re
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from allreduce import ending
from allreduce.errors import AllReduceError, CollectiveTimeoutError, RankLeftError

HEAD_BYTES, TEXT_BYTES = 32, 512
WAITING, WENT_ON, LEFT, STALLED, ENDED = range(5)
NOT_COME = "has not come: it computes, is stopped, or waits for something else"


class Call(Protocol):
    """What a rank has called: its text for people, and a word that is alike on ranks that called the same."""

    @property
    def word(self) -> int: ...

    def __str__(self) -> str: ...


class Said(NamedTuple):
    """A call that is known by its text."""

    text: str
    word: int = 0

    def __str__(self) -> str:
        return self.text


class Wait:
    """A place where a thread of this rank waits for others: the calls of a backend, a lane, a communicator.

    number: alike on all ranks. call: under way now, None when there is none; count: of calls so far. Setting these
    two is all that a call costs. error: what the watch has found, to be raised by who waits.
    raises: whoever waits here looks at `error`; otherwise it is inside of MPI.
    """

    def __init__(self, number: int, raises: bool = False) -> None:
        self.number, self.raises = number, raises
        self.count = 0
        self.call: Call | None = None
        self.error: AllReduceError | None = None
        self._seen: tuple[int, Call | None] = (0, None)
        self.last: Call | None = None  # that was seen by a look, which most calls are not
        self.since = 0.0
        self.noted = self.warned = False

    def begin(self, call: Call) -> None:
        """This rank comes to `call`."""
        self.count += 1
        self.error = None
        self.call = call

    def end(self) -> None:
        """It is done, or given up."""
        self.call = None

    def __str__(self) -> str:
        return f"{self.call}, call {self.count} there"

    def new(self, now: float) -> bool:
        """True when this is another call than at the last look."""
        if self._seen == (self.count, self.call) and self.call is not None:
            return False
        self._seen = (self.count, self.call)
        self.last = self.call or self.last
        self.since, self.warned = now, False
        return True


class Note(NamedTuple):
    """What a rank has told of itself, and when this one heard of it."""

    kind: int
    number: int
    turn: int
    word: int
    text: str
    heard: float


class Notes:
    """The notes of one topology's ranks.

    comm: a communicator of their own.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.heard: dict[tuple[int, int], Note] = {}  # the last of each rank and place
        # Ranks that wait for nobody any more, in one place, or, as number 0, in any.
        self.left: dict[tuple[int, int], Note] = {}
        self.stalled: dict[int, Note] = {}  # the ranks that ask for everybody's stacks
        self.ended: int | None = None  # the exit code of a rank that ends the job
        self._partings: MPI.Intracomm | None = None
        self._finish = Wait(-1)
        self._sent: list[tuple[MPI.Request, bytearray]] = []

    def part_on(self, comm: MPI.Intracomm, finish: Wait) -> None:
        """Have ranks that leave say so on `comm`, which no loss revokes. Local.

        finish: where ranks agree on what is done. Who has left after an agreement is not missed in it.
        """
        self._partings, self._finish = comm, finish

    def tell(self, kind: int, wait: Wait, text: str) -> None:
        """Send a note to all other ranks."""
        message = self._written(kind, wait, text)
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((self.comm.Isend([message, MPI.BYTE], rank), message))

    def _written(self, kind: int, wait: Wait, text: str) -> bytearray:
        head = np.array([kind, wait.number, wait.count, 0 if wait.call is None else wait.call.word], np.int64)
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        return bytearray(head.tobytes() + text.encode()[:TEXT_BYTES])

    def listen(self) -> None:
        """Take the notes that have arrived."""
        self._take(self.comm)
        self.hear_who_leaves()

    def hear_who_leaves(self) -> None:
        """Take the notes of ranks that have left, also when others were lost."""
        if self._partings is not None:
            with suppress(MPI.Exception):  # another one is lost just now; so they are taken the next time
                self._partings.Ack_failed()
                self._take(self._partings)

    def _take(self, comm: MPI.Intracomm) -> None:
        status = MPI.Status()
        while (message := comm.Improbe(status=status)) is not None:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([buffer, MPI.BYTE])
            if not HEAD_BYTES <= len(buffer) <= HEAD_BYTES + TEXT_BYTES:
                continue  # of no rank that runs this version
            kind, number, turn, word = np.frombuffer(buffer[:HEAD_BYTES], np.int64).tolist()
            text = "".join(filter(str.isprintable, buffer[HEAD_BYTES:].decode(errors="replace")))
            note = Note(kind, number, turn, word, text, time.monotonic())
            if kind == LEFT:
                self.left[status.source, number] = note
            elif kind == ENDED:
                self.ended = int(text) if re.fullmatch("-?[0-9]{1,9}", text) else 1
            elif kind == STALLED:
                self.stalled[status.source] = note
            elif kind == WAITING:
                self.heard[status.source, number] = note
            else:
                self.heard.pop((status.source, number), None)

    def tell_left(self, why: str, wait: Wait | None) -> None:
        """Send a note that this rank waits for nobody any more: in one place, or, as its program ends, in any."""
        if wait is not None:
            self.tell(LEFT, wait, why)
            return
        wait = Wait(0)
        wait.count = ending.exit_code()
        wait.call = Said(why, word=self._finish.count - (self._finish.call is not None))
        if self._partings is None:
            self.tell(LEFT, wait, why)
            return
        message = self._written(LEFT, wait, why)
        for rank in range(self.size):
            with suppress(MPI.Exception):  # it is lost
                if rank != self.rank:
                    self._sent.append((self._partings.Isend([message, MPI.BYTE], rank), message))

    def gone(self, wait: Wait, before: float, call: Call) -> RankLeftError | None:
        """The error of `call`, to whose place a rank comes no more, as was heard before a time, by time.monotonic()."""
        for (rank, place), note in list(self.left.items()):
            has_come = wait is self._finish and place == 0 and note.word >= wait.count
            if place in (0, wait.number) and note.heard < before and not has_come:
                error = RankLeftError(f"rank {rank} has left: {note.text}, while this rank waits for it in {call}")
                error.job_code = (note.turn if place == 0 else 0) or 1
                return error
        return None

    def look_at_end(self, call: Call) -> None:
        """Raise what ends `call`, in which ranks agree on what is done, also after a loss. Costs little."""
        error = self._finish.error or self.gone(self._finish, time.monotonic(), call)
        if error is not None:
            raise error

    def probe(self) -> bool:
        """Let MPI go on; it raises when a rank has died, or when another one says so. True: a note has come."""
        return self.comm.Iprobe() or (self._partings is not None and self._partings.Iprobe())

    def drain(self, limit: float) -> None:
        """Take all notes, so that the communicator can be freed. Collective.

        limit: seconds after which a CollectiveTimeoutError is raised, when ranks don't come.
        """
        request, deadline = self.comm.Ibarrier(), time.monotonic() + limit  # all have been sent when it is done
        while not request.Test():
            self.listen()
            if time.monotonic() > deadline:
                self._sent.append((request, bytearray()))
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks to close a topology")
            time.sleep(1e-5)
        self.listen()
        for sent, _ in self._sent:
            sent.Wait()

    def table(self, call: Call) -> str:
        """Where all ranks are, as far as this one knows, which is in `call`."""
        lines = []
        for rank in range(self.size):
            waits = [note.text for (other, _), note in self.heard.items() if other == rank]
            if rank == self.rank:
                where = f"waits in {call}"
            elif (rank, 0) in self.left:
                where = f"has left: {self.left[rank, 0].text}"
            else:
                where = f"waits in {' and in '.join(waits)}" if waits else NOT_COME
            lines.append(f"  rank {rank}: {where}")
        return "\n".join(lines)

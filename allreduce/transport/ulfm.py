"""ULFM, MPI's user-level failure mitigation: the job survives failed ranks. No other module calls it.

Without `mpirun --with-ft ulfm` no MPI function is called here: a rank that dies ends the job.
"""

import contextlib
import ctypes
import functools
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence

from mpi4py import MPI

from allreduce.errors import CommunicationError, RankLostError
from allreduce.notices import log
from allreduce.process.start import ULFM
from allreduce.transport import processes
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import SMALL, Pause, wait_until

POLL_SECONDS = 0.005  # interval at which the watchdog asks MPI for failed ranks
PATIENCE_SECONDS = 0.1  # longest wait for a local step
MARK = 0b110  # bits that every rank sets in an agreement; a result without them was garbled
MARK_BITS, CODES = 3, 0xFF
LOST = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED  # classes of errors

# Held while the watchdog communicates, and while a thread begins an agreement. If one thread receives a message of an
# agreement while another thread begins it, Open MPI (5.0.11 and before, era_cb_fn) replaces the rank's value by an
# address. So "all ok" silently became "not all ok", once in a thousand times. No address has the bits of MARK.
alone = threading.RLock()


@contextlib.contextmanager
def alone_for_now() -> Iterator[None]:
    """Hold `alone`; continue without it after PATIENCE_SECONDS, because the watchdog must not wait for other ranks."""
    held = alone.acquire(timeout=PATIENCE_SECONDS)
    try:
        yield
    finally:
        if held:
            alone.release()


@functools.cache
def in_force() -> bool:
    """Return whether the job survives failed ranks: Open MPI's ULFM is on, with MPI_THREAD_MULTIPLE. Local."""
    if os.environ.get(ULFM, "").lower() not in ("1", "true", "yes", "on", "enabled"):
        return False
    if MPI.get_vendor()[0] != "Open MPI" or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return False
    try:
        MPI.COMM_SELF.Get_failed().Free()
    except (MPI.Exception, NotImplementedError):  # an Open MPI that was built without it
        return False
    return True


def finalize_without_barrier() -> None:
    """Make MPI_Finalize on this rank skip the launcher's barrier of all ranks. Local.

    Open MPI's launcher may not notice a rank that failed shortly before, and the others would hang.
    """
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        ctypes.c_bool.in_dll(library, "ompi_async_mpi_finalize").value = True
    except (OSError, ValueError):  # another Open MPI
        log.debug("no ompi_async_mpi_finalize")


class _Name(ctypes.Structure):
    """Open MPI's name of a process, opal_process_name_t."""

    _fields_ = (("job", ctypes.c_uint32), ("rank", ctypes.c_uint32))


@functools.cache
def name_in_job() -> tuple[int, int] | None:
    """Return Open MPI's name of this process, for `declare_failed`; None if unknown. Local."""
    if not in_force():
        return None
    try:
        own = _Name.in_dll(ctypes.CDLL("libopen-pal.so.80", mode=os.RTLD_NOLOAD | os.RTLD_NOW), "opal_process_info")
    except (OSError, ValueError):  # another Open MPI
        return None
    return (own.job, own.rank) if os.environ.get("PMIX_RANK") == str(own.rank) else None


def declare_failed(name: Sequence[int]) -> bool:
    """Report a process that has ended as failed to MPI, which tells all ranks. False if this MPI can't do that. Local.

    Open MPI's launcher reports a process that a signal has ended, or that exits with 0 before MPI_Finalize. It does not
    report one that exits with another code: the other ranks would wait for it for ever. name: its `name_in_job`.
    """
    if not in_force():
        return False
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        find, fail = library.ompi_proc_for_name, library.ompi_errhandler_proc_failed_internal
    except (OSError, AttributeError):  # another Open MPI
        return False
    find.argtypes, find.restype = [_Name], ctypes.c_void_p
    fail.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_bool]
    process = find(_Name(*name))
    if not process:
        return False
    fail(process, MPI.ERR_PROC_FAILED, True)
    return True


def lost(error: BaseException | None) -> RankLostError | None:
    """Return the RankLostError among an error and its causes, or a new one for such an error of MPI, or None. Local."""
    if not in_force():
        return None
    for cause in _causes(error):
        if isinstance(cause, RankLostError):
            return cause
        if isinstance(cause, MPI.Exception) and cause.Get_error_class() in LOST:
            return RankLostError(f"a rank was lost ({cause}); Topology.survivors() continues with the other ranks")
    return None


def may_be_failure(error: BaseException | None) -> bool:
    """Return whether `error` may be caused by a failed rank that MPI will report later. Local.

    Some Open MPI calls report a failed rank as "error in status" or "other".
    """
    return any(isinstance(cause, CommunicationError | MPI.Exception) for cause in _causes(error))


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, each once: `raise error from error` makes an error its own cause."""
    causes: list[BaseException] = []
    while error is not None and not any(error is cause for cause in causes):
        causes.append(error)
        error = error.__cause__
    return causes


def loss(comm: MPI.Comm | None) -> RankLostError:
    """Create the RankLostError that names the failed ranks of `comm`. None: the topology is already closed. Local."""
    if comm is None:
        return RankLostError("a rank was lost while this rank closed a topology that contains both")
    lost = failed(comm)
    ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "a rank"
    be = "were" if len(lost) > 1 else "was"
    error = RankLostError(f"{ranks} of {comm.size} {be} lost; Topology.survivors() continues with the other ranks")
    error.lost = lost
    world = processes.world_ranks(comm)
    error.reporter = min(world[rank] for rank in range(comm.size) if rank not in lost)
    return error


def check(comm: MPI.Comm) -> None:
    """Raise RankLostError if this rank knows that a rank of `comm` has failed, or that `comm` is revoked. Local.

    Called after MPI_Allgatherv: Open MPI's (5.0.11 and before, allgatherv_intra_basic_default) gathers on rank 0, then
    broadcasts, and ignores an error of the broadcast. It returns success, and has received nothing.
    """
    if in_force() and (comm.Is_revoked() or failed(comm)):
        raise loss(comm)


def again(error: RankLostError) -> RankLostError:
    """Return a copy of the error, to be raised again, maybe in another thread."""
    other = RankLostError(*error.args)
    other.lost, other.reporter = error.lost, error.reporter
    return other


def failed(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks of a communicator that this rank knows to have failed. Local."""
    return tuple(sorted(processes.translate(comm.Get_failed(), comm)))


def acknowledge(comm: MPI.Comm) -> None:
    """Acknowledge the failed ranks of `comm`, so that receiving from MPI.ANY_SOURCE works again. Local."""
    comm.Ack_failed()


def revoke(comm: MPI.Comm) -> None:
    """Revoke a communicator: running and later calls on it fail on all ranks. Local."""
    comm.Revoke()


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the living ranks of `comm`, which may be revoked. Collective over these."""
    unblock_comm_creation()
    with alone:  # Shrink begins with an agreement
        left = comm.Shrink()
    assert isinstance(left, MPI.Intracomm)
    return left


def unblock_comm_creation() -> None:
    """Allow communicators to be created again after a failed rank has interrupted a creation. Local.

    Open MPI 5 numbers one new communicator at a time, the one with the oldest parent first. An interrupted creation
    does not pass the turn on, so all others would wait for ever. COMM_SELF is the oldest parent after COMM_WORLD.
    """
    comm, request = MPI.COMM_SELF.Idup()
    if wait_until(request.Test, PATIENCE_SECONDS):
        comm.Free()


def agree(comm: MPI.Comm, ok: bool, meanwhile: Callable[[], object] = bool) -> bool:
    """Return whether all living ranks of `comm` pass ok=True. All get the same result, even if ranks fail meanwhile.
    Collective.

    `comm` may be revoked. The call ends only when all living ranks have reached it, or with an error of `meanwhile`,
    which is called repeatedly.
    """
    return bool(_common_bits(comm, int(ok), meanwhile))


def agree_on_end(comm: MPI.Comm, code: int, meanwhile: Callable[[], object]) -> int:
    """Return the exit code of the job: 0 if all living ranks pass 0. Each rank calls it when its program ends.

    A rank that waits for the others here hears of a rank that ends the job; one that waits in MPI_Finalize does not.
    comm: of all ranks of the job. meanwhile: as in `agree`.
    """
    return CODES & ~_common_bits(comm, CODES & ~code, meanwhile)


def _common_bits(comm: MPI.Comm, bits: int, meanwhile: Callable[[], object]) -> int:
    """Return the bits that all living ranks of `comm` pass. Collective."""
    while True:
        comm.Ack_failed()
        try:
            common = _agreed(comm, MARK | bits << MARK_BITS, meanwhile)
        except MPI.Exception as error:  # on all ranks: some rank had not acknowledged a failed one
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
        else:
            if common & MARK == MARK:
                return common >> MARK_BITS
            log.debug("an agreement was garbled, and is repeated")


def _agreed(comm: MPI.Comm, flags: int, meanwhile: Callable[[], object]) -> int:
    bits = array("i", [flags])
    with alone_for_now():
        request = comm.Iagree(bits)
    try:
        wait_until(request.Test, meanwhile=meanwhile, pause=Pause(*SMALL))
    except BaseException:
        free_later((request, bits))
        raise
    return bits[0]

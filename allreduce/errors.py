"""Named errors. No MPI here: `transport.control` raises them on every rank, `health.abort` ends the job.

An error on one rank only is the classic hang of collective code: that rank leaves, the others wait for it. So a rank
that finds an error does not raise it at once; it tells the others, and all ranks raise the same error.
"""


class AllReduceError(Exception):
    """Base of all errors that this library raises.

    ranks: the ranks of MPI.COMM_WORLD that all raised this same error, so that one report of it is enough;
        None when only this rank raises it.
    reporter: the rank of MPI.COMM_WORLD that reports it if it is not caught; None: the lowest of `ranks`.
    """

    ranks: tuple[int, ...] | None = None
    reporter: int | None = None


class DisagreementError(AllReduceError):
    """The ranks called the same collective with different lengths, dtypes, operations or memory."""


class DivergenceError(DisagreementError):
    """Replicas that must be equal on all ranks are not."""


class CollectiveTimeoutError(AllReduceError, TimeoutError):
    """The other ranks did not reach a collective in time."""


class RankLeftError(AllReduceError, RuntimeError):
    """A rank has ended its program, or its process has died, while others wait for it.

    job_code: the exit code of a job that this error ends: the exit code of the rank's program if it is not 0, else 1.
    """

    job_code = 1


class RankLostError(AllReduceError, RuntimeError):
    """A rank has failed, and the others can continue (ULFM) on the topology from `Topology.survivors()`.

    lost: the failed ranks, numbered as in the topology in use; empty on a rank that has learned of the failure from
        another rank.
    """

    lost: tuple[int, ...] = ()


class BrokenError(AllReduceError, RuntimeError):
    """A backend or queue was used again after a call that failed part-way: its ranks may be in different calls."""


class CommunicationError(AllReduceError, RuntimeError):
    """MPI itself reported an error in the middle of a call."""


class NotAnArrayError(AllReduceError, TypeError):
    """Something other than a writable NumPy or CuPy array was passed."""


class NotContiguousError(AllReduceError, ValueError):
    """The array has gaps between its elements, so it can't be reduced in place."""


class UnsupportedDtypeError(AllReduceError, TypeError):
    """The backend can't reduce elements of this dtype."""


class UnsupportedOpError(AllReduceError, ValueError):
    """The operation is unknown, or has no meaning for this dtype (the mean of integers)."""


class ClosedError(AllReduceError, RuntimeError):
    """The backend or topology was used after `close()`."""


class UnknownBackendError(AllReduceError, ValueError):
    """No backend has this name."""


class UnavailableError(AllReduceError, RuntimeError):
    """The backend can't work here; the message names what is missing."""


class OptionError(AllReduceError, ValueError):
    """An option of a backend or a topology has a value that makes no sense."""


class LauncherError(AllReduceError, RuntimeError):
    """A launcher has started several processes, and MPI treats each of them as a job of one rank."""


class CopyError(AllReduceError, TypeError):
    """A topology or backend, which belongs to its process, was copied or pickled."""


class ChildError(AllReduceError, RuntimeError):
    """A child process, which is not a rank, made a call that needs MPI."""

"""Why a job has ended that should have gone on: in classes, from what it has printed."""

import re

# Defects of Open MPI's own (5.0.11). The second comes of calls that wait for several requests, of which one fails: see
# allreduce.transport.wait. No call of ours does so, but MPI's collectives may.
OF_MPI = {
    "a rank died inside of MPI_Comm_dup or split": r"ompi_comm_revoke_local|ompi_comm_activate",
    "Send error after request freed": r"Send error after request freed",
    "MPI aborts by itself": r"\*\*\* An error occurred in|PMIx ABORT|OPAL ERROR|mca_btl_",
}
NAMED = re.compile(r"\b(\w+(?:Error|Exception|Interrupt)): (.{0,100})")


def of_mpi(printed: str) -> str:
    """Which of MPI's own defects it was; "" for none that is known."""
    return next((reason for reason, words in OF_MPI.items() if re.search(words, printed)), "")


def reason(printed: str) -> str:
    """The last named error, or how the processes have ended."""
    named = NAMED.findall(printed)
    if named:
        return ": ".join(named[-1])
    signals = re.findall(r"Signal: (.*)|exited on (signal .*)", printed)
    return next((word for pair in signals for word in pair if word), "without a word")

"""Tables of the ranks: a few lines however many ranks there are."""

from mpi4py import MPI

from allreduce.errors import DisagreementError
from allreduce.transport.control import disagreement
from allreduce.transport.tables import LINES, table
from trainers.group import explain_collective


def test_a_disagreement_of_8000_ranks_has_at_most_20_lines() -> None:
    texts = ["all_reduce: length 10"] * 8000
    texts[7] = "all_reduce: length 11"
    lines = str(disagreement(MPI.COMM_SELF, texts)).splitlines()
    assert lines[1:] == ["  ranks 0-6, 8-7999: all_reduce: length 10", "  rank 7: all_reduce: length 11"]
    different = str(disagreement(MPI.COMM_SELF, [f"all_reduce: length {rank // 2}" for rank in range(8000)]))
    lines = different.splitlines()
    assert len(lines) <= 20
    assert lines[-1].endswith(f": {4000 - LINES} other texts")
    assert max(map(len, lines)) < 200
    assert len(str(disagreement(MPI.COMM_SELF, ["a", "b"] * 4000))) < 400


def test_the_rare_texts_and_the_usual_one_are_shown() -> None:
    texts = [f"usual {rank % 40}" for rank in range(4000)] + ["most"] * 4000 + ["odd"]
    shown = table(texts)
    assert "  rank 8000: odd" in shown
    assert "  ranks 4000-7999: most" in shown
    assert table(["a"] * 8).splitlines() == [f"  rank {rank}: a" for rank in range(8)]  # of a small job, each one


def test_the_calls_of_grouped_ranks_are_explained() -> None:
    error = DisagreementError(f"the ranks disagree:\n{table(['evaluate: x'] * 9 + ['fit: x'])}")
    explain_collective(error, "fit: x")
    assert str(error).endswith(
        "evaluate and fit are collective: every rank calls them, in one order, without an `if rank == 0`"
    )

"""The backup of pieces, and the newest state that ranks make of them."""

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from trainers.state.adopt import Piece, newest
from trainers.state.backup import Backup, holders

LENGTH = 3  # elements that a rank owns


def piece(rank: int, step: int, names: tuple[str, ...]) -> Piece:
    start = rank * LENGTH
    sliced = {name: np.arange(start, start + LENGTH) + 100.0 * step for name in names}
    return Piece(step, step, start, start + LENGTH, sliced, {"steps": np.array(step)})


@pytest.fixture
def several(flat: allreduce.Topology, world: MPI.Intracomm) -> MPI.Intracomm:
    if world.size == 1:
        pytest.skip("one rank has nobody who could hold its backup")
    return world


def test_a_backup_has_the_pieces_of_two_steps_of_two_ranks(several: MPI.Intracomm) -> None:
    """Also where an optimizer has got more state after the first step."""
    rank, size = several.rank, several.size
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    common = {"parameters": np.arange(size * LENGTH) + 200.0}
    other = holders([0] * size).index(rank)
    for step, names in enumerate([("parameters",), ("parameters", "momentum"), ("parameters", "momentum")]):
        backup.keep(step, [piece(rank, step, names)], common if step == 2 else {})
    backup.extend(3)
    held = {(each.first, each.last, each.start // LENGTH): each for each in backup.pieces()}
    assert set(held) == {(2, 3, rank), (2, 3, other), (1, 1, rank), (1, 1, other)}
    for (first, _, owner), each in held.items():
        wanted = piece(owner, first, ("parameters", "momentum"))
        assert each.rest["steps"] == first
        for name, array in wanted.sliced.items():
            np.testing.assert_array_equal(each.sliced[name], array)


def test_the_newest_whole_state_is_on_all_ranks(several: MPI.Intracomm) -> None:
    """Rank 0 has come one step further, alone; a backup of rank 0's piece stands in for it."""
    rank, size = several.rank, several.size
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    backup.keep(4, [piece(rank, 4, ("parameters",))])
    own = [piece(0, 5, ("parameters",))] if rank == 0 else backup.pieces()
    found = newest(several, own, size * LENGTH)
    assert found is not None
    assert found.step == 4
    np.testing.assert_array_equal(found.state["parameters"], np.arange(size * LENGTH) + 400.0)
    assert newest(several, own if rank == 0 else [], size * LENGTH) is None

"""The backup of pieces, and the newest state that the ranks assemble from pieces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import CommunicationError, RankLostError
from trainers import MirroredTrainer, NumpyNetwork, Sharded
from trainers.group import broadcast_arrays
from trainers.recovery import recovery
from trainers.replica import copied, snapshot_of
from trainers.state import adopt
from trainers.state.adopt import Arrays, Piece, adopt_whole, copy_state, newest
from trainers.state.backup import Backup, holders
from trainers.strategies import mirrored
from trainers.strategies import step as step_module

JOBS = "openmpi 1 2 3 5"

LENGTH = 3  # elements that a rank owns


def piece(rank: int, step: int, names: tuple[str, ...]) -> Piece:
    start = rank * LENGTH
    sliced = {name: np.arange(start, start + LENGTH) + 100.0 * step for name in names}
    return Piece(step, step, start, start + LENGTH, sliced, {"steps": np.array(step)})


def given(pieces: list[Piece]) -> Callable[[Arrays], list[Piece]]:
    return lambda memory: pieces


@pytest.fixture
def several(flat: allreduce.Topology, world: MPI.Intracomm) -> MPI.Intracomm:
    if world.size == 1:
        pytest.skip("one rank has nobody who could hold its backup")
    return world


def test_a_backup_has_the_pieces_of_two_steps_of_two_ranks(several: MPI.Intracomm) -> None:
    """Also after an optimizer has created more state in the first step."""
    rank, size = several.rank, several.size
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    common = {"parameters": np.arange(size * LENGTH) + 200.0}
    other = holders([0] * size).index(rank)
    for step, names in enumerate([("parameters",), ("parameters", "momentum"), ("parameters", "momentum")]):
        backup.keep(step, given([piece(rank, step, names)]), common if step == 2 else {})
    backup.extend(3)
    held = {(each.first, each.last, each.start // LENGTH): each for each in backup.pieces()}
    assert set(held) == {(2, 3, rank), (2, 3, other), (1, 1, rank), (1, 1, other)}
    for (first, _, owner), each in held.items():
        wanted = piece(owner, first, ("parameters", "momentum"))
        assert each.rest["steps"] == first
        for name, array in wanted.sliced.items():
            np.testing.assert_array_equal(each.sliced[name], array)


def test_a_backup_that_is_made_again_at_the_same_step_is_not_mixed_with_the_one_before(
    several: MPI.Intracomm,
) -> None:
    """A state was loaded, and a failure interrupts the ranks when only some of them have the new backup."""
    rank, size = several.rank, several.size
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    backup.keep(4, given([piece(rank, 4, ("parameters",))]))
    loaded = piece(rank, 5, ("parameters",))._replace(first=4, last=4)
    backup.keep(4, given([loaded]))
    if rank:
        backup._now.first = -1  # as a failure in the middle of `keep` leaves it
    found = newest(several, backup.pieces(), size * LENGTH)
    assert found is not None
    assert found.step == 4
    hundreds = set((found.state["parameters"] - np.arange(size * LENGTH)).tolist())
    assert hundreds == {500.0 if size == 2 else 400.0}  # of two ranks the one has all


@pytest.mark.parametrize("lacks", ["memory for a backup", "its own piece"])
def test_what_one_rank_lacks_for_a_backup(lacks: str, several: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise its error, where the others would wait for its pieces, and the backup before it stays."""
    rank = several.rank
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    own: Any = given([piece(rank, 2, ("parameters",))])
    if lacks == "its own piece":
        backup.keep(1, given([piece(rank, 1, ("parameters",))]))
        own = lacking if rank == 1 else own
    with monkeypatch.context() as patch:
        if rank == 1 and lacks == "memory for a backup":
            patch.setattr("trainers.state.backup.np.empty", lacking)
        with pytest.raises(MemoryError, match="rank 1: no room"):
            backup.keep(2, own)
    if lacks == "memory for a backup":
        backup.keep(1, given([piece(rank, 1, ("parameters",))]))
    assert [each.first for each in backup.pieces()] == [1, 1]


def test_a_backup_copies_no_piece_a_second_time(several: MPI.Intracomm) -> None:
    rank = several.rank
    backup = Backup(several, 0, [(rank * LENGTH, (rank + 1) * LENGTH)])
    copies = []

    def own(memory: Arrays) -> list[Piece]:
        copies.append(copied({"parameters": np.full(LENGTH, 1.0 * len(copies))}, memory)["parameters"])
        return [Piece(0, 0, rank * LENGTH, (rank + 1) * LENGTH, {"parameters": copies[-1]}, {})]

    for step in range(4):
        backup.keep(step, own)
    assert [copies[step] is copies[step - 2] for step in (2, 3)] == [True, True]
    held = {each.first: each.sliced["parameters"] for each in backup.pieces() if each.start == rank * LENGTH}
    assert [held[step] is copies[step] for step in (2, 3)] == [True, True]


def test_the_state_from_before_an_edit_outlives_its_backups(
    several: MPI.Intracomm, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that a failure ends is undone from it; by then two backups of the edited state were made."""
    for module in (mirrored, recovery):  # as under ULFM, without which there are no backups
        monkeypatch.setattr(module, "outlives_ranks", lambda strategy: True)
    with MirroredTrainer(NumpyNetwork([4, 3]), topology=flat, update=Sharded(copies=2)) as trainer:
        strategy = trainer.strategy
        parameters = trainer.replica.state()["parameters"].copy()
        monkeypatch.setattr(trainer.topology, "finished", lambda ok: False)
        with pytest.raises(RankLostError, match="before all ranks had made the change"):
            strategy.edit(lambda: trainer.replica.parameters.fill(9.0))
        assert strategy.saved is not None
        own = strategy.saved if several.rank else []  # without rank 0, which has failed
        found = newest(several, own, len(strategy.core.buffer))
        assert found is not None
        np.testing.assert_array_equal(found.state["parameters"][: parameters.size], parameters)


@pytest.mark.parametrize("place", ["the state of all", "a gathered state"])
def test_memory_that_one_rank_lacks(
    place: str, several: MPI.Intracomm, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 allocates the state of all between two messages, in which the others would wait for it."""
    empty = np.empty

    def lacking_floats(shape: Any, dtype: Any = None) -> np.ndarray:
        return lacking() if dtype == np.float32 else empty(shape, dtype)

    network = NumpyNetwork([4, 3], optimizer="adam")
    with MirroredTrainer(network, topology=flat, update="sharded") as trainer:
        owners, state = trainer.strategy.owners, network.state()
        call, names = partial(owners.gather_state, state), set(state)
        target, lack, lacks = "trainers.group.np.empty", lacking_floats, 1
        if place == "the state of all":
            call, names = partial(owners.snapshot, {}, trainer.rank == 0), set(state) if trainer.rank == 0 else set()
            target, lack, lacks = "trainers.strategies.sharded.reserved", lacking, 0
        with monkeypatch.context() as patch:
            if several.rank == lacks:
                patch.setattr(target, lack)
            with pytest.raises(MemoryError, match=f"rank {lacks}: no room"):
                call()
        assert set(call()) == names


def test_a_load_that_finds_no_state_leaves_the_live_pieces(
    several: MPI.Intracomm, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank with the state has failed, say: the ranks continue, and the next failure finds all pieces of the live
    state."""
    for module in (mirrored, recovery):  # as under ULFM, without which there are no backups
        monkeypatch.setattr(module, "outlives_ranks", lambda strategy: True)
    with MirroredTrainer(NumpyNetwork([4, 3]), topology=flat, update=Sharded(copies=2)) as trainer:
        before = len(trainer.strategy.pieces())
        assert not adopt_whole(trainer.strategy, None)
        after = trainer.strategy.pieces()
        # and backups of two states, of which there was one before
        assert len([each for each in after if each.serial == after[0].serial]) == before


def lacking(*_: object) -> Any:
    raise MemoryError("no room")


@pytest.mark.parametrize("on_all", [False, True])
def test_a_copy_of_the_state_is_made_once(
    on_all: bool, flat: allreduce.Topology, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EarlyStopping keeps one: it is what `snapshot_of` has copied, and not a copy of that."""
    network, made = NumpyNetwork([4, 3], optimizer="adam"), list[Arrays]()
    monkeypatch.setattr(step_module, "snapshot_of", lambda *given: made.append(snapshot_of(*given)) or made[-1])
    monkeypatch.setattr(adopt, "snapshot_of", step_module.snapshot_of)
    with MirroredTrainer(network, topology=flat) as trainer:
        made.clear()
        state = copy_state(trainer.strategy, on_all)
        copies = list(made)
    assert len(copies) == (1 if on_all or world.rank == 0 else 0)
    assert state.keys() == (copies[0].keys() if copies else set())
    assert all(state[name] is array for each in copies for name, array in each.items())


@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_arrays_have_the_dtypes_and_shapes_of_the_root(world: MPI.Intracomm, root: int) -> None:
    """Also bfloat16, which is not among NumPy's own dtypes, raw bytes, and the other byte order."""
    state = {"halves": np.ones(3, ml_dtypes.bfloat16), "bytes": np.zeros(2, "V2"), "big": np.ones((2, 1), ">f4")}
    root %= world.size
    came = broadcast_arrays(world, state if world.rank == root else {}, root, "a test")
    assert list(came) == list(state)
    for name, array in state.items():
        assert (came[name].dtype, came[name].shape) == (array.dtype, array.shape)
        assert came[name].tobytes() == array.tobytes()
    objects = {"objects": np.array([None])} if world.rank == root else {}
    with pytest.raises(CommunicationError, match=f"a test: objects of rank {root} has Python objects"):
        broadcast_arrays(world, objects, root, "a test")

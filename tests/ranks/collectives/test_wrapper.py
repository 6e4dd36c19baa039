"""A wrapper behaves as the backend inside of it, for every backend."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.arrays.memory_kinds import ALLOCATED
from allreduce.backend import AllReduce, TwoPhase
from allreduce.backends.ring import Ring
from allreduce.wrappers.background import Background
from allreduce.wrappers.wrapper import Wrapper
from tests.ranks.grid import run_grid
from tests.ranks.together import raised_everywhere, usable

SIZE = MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")
LENGTHS = (0, 1, 1000)


@pytest.fixture(scope="module", params=allreduce.NAMES)
def inner(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    made = usable(request.param, topology_of(None))
    yield made
    made.close()


@pytest.fixture
def wrapper(inner: AllReduce) -> Generator[Wrapper]:
    with Wrapper(inner.topology, inner=inner) as made:
        yield made


def test_it_reduces_as_the_backend(wrapper: Wrapper, world: MPI.Intracomm) -> None:
    assert run_grid(wrapper, "float32", world, LENGTHS) >= 3 * 2 * 3 * 2


def test_a_slice_of_allocated_memory_is_reduced_in_place(wrapper: Wrapper) -> None:
    array = wrapper.allocate(1000)
    part = array[100:900]
    part[:] = wrapper.rank
    assert wrapper.hooks.memory(part) == wrapper.inner.hooks.memory(part)
    if wrapper.name in ("shared", "auto", "hierarchical_copy"):
        assert wrapper.hooks.memory(part) == ALLOCATED
    wrapper(part, "max")
    assert (part == SIZE - 1).all()
    assert not array[:100].any()


def test_phases(wrapper: Wrapper, inner: AllReduce) -> None:
    assert isinstance(wrapper, TwoPhase) == isinstance(inner, TwoPhase)
    if not isinstance(wrapper, TwoPhase):
        with pytest.raises(errors.OptionError, match="has no reduce_scatter"):
            wrapper.reduce_scatter(np.ones(10))
        return
    for dtype in ("float32", "float16"):
        array = wrapper.allocate(101, dtype)
        array[:] = wrapper.rank + 1
        part = wrapper.reduce_scatter(array, "sum")
        assert part.base is not None
        assert part.size == len(range(*wrapper.owned(101).indices(101)))
        wrapper.all_gather(array)
        assert (array == SIZE * (SIZE + 1) / 2).all()


def test_what_it_says_of_itself(wrapper: Wrapper, inner: AllReduce) -> None:
    assert (wrapper.name, wrapper.rank, wrapper.size) == (inner.name, inner.rank, inner.size)
    assert (wrapper.sums_half, wrapper.check) == (inner.sums_half, inner.check)
    assert (wrapper.topology, wrapper.workspace) == (inner.topology, inner.workspace)
    assert repr(inner) in repr(wrapper)
    if inner.name == "auto":
        assert wrapper.choice(1000) == inner.choice(1000)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such"):
        wrapper.no_such  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_is_left_to_the_base() -> None:
    """Methods that backends get later must be forwarded too, or they would use state that the wrapper does not have."""
    own = {"close", "abandon", "__init__", "__enter__", "__exit__"}  # those that end or begin the wrapper
    own |= {"cost"}  # of an algorithm; no wrapper is selected by it
    # Called in the backend by methods that are forwarded.
    inside = {
        "_connect",
        "_connect_together",
        "_add_part",
        "_close",
        "_close_together",
        "_release",
        "_forget",
        "_memory_kind",
        "_say_copies",
    }
    inside |= {
        "_function",
        "_run_phase",
        "_work",
        "_scatter_work_for",
        "_gather_work_for",
        "_spread_owned",
        "_owned_slices",
    }
    inside |= {"_admit_rows", "_add_rows"}
    inside |= {"_scatter_gpu", "_gather_gpu", "_stage", "_scatter_rounded", "_reduce_gpu"}
    inside |= {"_allocate", "_memory", "_locate", "_route", "_locator_for", "tag"}  # and by way of `hooks`
    # Made of other methods of the wrapper's.
    inside |= {
        "_admit",
        "_agree_on",
        "_admit_tree",
        "reduce_tree",
        "reduced",
        "check_dtype",
    }
    for kind in (TwoPhase, AllReduce):
        methods = {name for name, value in vars(kind).items() if callable(value)} - own - inside
        assert {name for name in methods if not name.startswith("__")} <= set(vars(Wrapper)), kind


def test_made_again_by_its_config(wrapper: Wrapper) -> None:
    assert wrapper.config is not None
    with allreduce.create(wrapper.config.name, wrapper.topology, **wrapper.config.options) as again:
        assert type(again) is type(wrapper.inner)


@several
def test_ranks_that_disagree(wrapper: Wrapper, world: MPI.Intracomm) -> None:
    """The error comes before anything is changed, also in calls that were made before, and the backend stays usable."""
    arrays = [np.ones(10), np.ones(12)]
    for array in arrays:
        wrapper(array, "max")
    text = raised_everywhere(world, errors.DisagreementError, lambda: wrapper(arrays[world.rank % 2], "max"))
    assert "rank 1: all_reduce: length 12" in text
    raised_everywhere(world, errors.DisagreementError, lambda: wrapper.allocate(5 + world.rank))
    raised_everywhere(world, errors.DisagreementError, lambda: wrapper.broadcast(arrays[0], world.rank % 2))
    raised_everywhere(world, errors.NotContiguousError, lambda: wrapper(np.ones(10)[::2], "max"))
    wrapper(arrays[0], "sum")
    assert (arrays[0] == SIZE).all()


def test_it_is_closed_before_the_backend(inner: AllReduce) -> None:
    wrapper = Wrapper(inner.topology, inner=inner)
    wrapper.close()
    wrapper.close()
    assert wrapper.closed
    assert not inner.closed
    array = np.ones(3)
    with pytest.raises(errors.ClosedError):
        wrapper(array, "sum")
    inner(array, "sum")


@pytest.mark.parametrize("name", ["ring", "auto"])
def test_a_call_that_failed_half_way(
    name: str, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, topology_of: Callable[..., allreduce.Topology]
) -> None:
    topology = allreduce.Topology(world)
    inner = allreduce.create(name, topology)
    wrapper = Wrapper(topology, inner=inner)
    array = np.ones(7)

    def half_way(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(inner, "_route", lambda signature: half_way)
    with pytest.raises(RuntimeError, match="on purpose"):
        wrapper(array, "sum")
    with pytest.raises(errors.BrokenError, match="on purpose"):
        wrapper(array, "sum")
    world.Barrier()
    wrapper.close()
    topology.abandon()


@pytest.mark.skipif(SIZE not in (2, 4), reason="two nodes of equal size")
def test_messages_have_the_tags_of_the_backend_it_is_a_part_of(
    topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    tags: list[int] = []
    walk = Ring._walk

    def noting(self: Ring, *rest: Any) -> None:
        tags.append(self.tag())
        walk(self, *rest)

    monkeypatch.setattr(Ring, "_walk", noting)
    with allreduce.create("hierarchical_copy", topology_of(SIZE // 2)) as reduce:
        reduce._cross = Wrapper(reduce._cross.topology, inner=reduce._cross)  # type: ignore[attr-defined]
        monkeypatch.setattr(reduce, "tag", lambda: 4711)
        array = np.full(1000, float(reduce.rank))
        reduce(array, "sum")
    assert (array == SIZE * (SIZE - 1) / 2).all()
    assert set(tags) == {4711}


@pytest.mark.parametrize("name", ["shared", "native"])
def test_in_the_background(name: str, topology_of: Callable[..., allreduce.Topology], world: MPI.Intracomm) -> None:
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    topology = allreduce.Topology(world)
    with allreduce.create(name, topology) as inner, Background(topology, inner=inner) as background:
        run_grid(background, "float32", world, (1, 1000))
        array = background.allocate(10)
        array[:] = 1
        if isinstance(background, TwoPhase):
            background.reduce_scatter(array, "sum")
            background.all_gather(array)
        else:
            background(array, "sum")
        assert (array == SIZE).all()
    with pytest.raises(errors.ClosedError):
        background(array, "sum")
    topology.close()

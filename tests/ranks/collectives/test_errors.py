"""Invalid use raises the same named error on every rank: no hang, no wrong sums, no unnamed internal error."""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Algorithm, Context, errors
from allreduce.algorithms.ring import Ring
from allreduce.algorithms.shared import Shared
from allreduce.backend import AllReduce
from allreduce.transport.control import on_all_ranks
from tests.backends import ON_CPU
from tests.ranks.together import raised_everywhere, usable
from trainers.strategies.central import Central

JOBS = "quick 1 2 3, openmpi 1 2 3 4 5, mpich 1 2 3"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


@pytest.fixture(scope="module", params=allreduce.NAMES)
def reduce(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    made = usable(request.param, topology_of(None))
    yield made
    made.close()


@several
def test_memory_differs(reduce: AllReduce) -> None:
    """It is an error where it matters whose memory an array is in. Elsewhere the call works."""
    allocated = reduce.allocate(18, "float64")
    allocated[:] = WORLD.rank
    array = np.full(18, float(WORLD.rank)) if WORLD.rank else allocated
    if reduce._allocations.memory_of(allocated) == reduce._allocations.memory_of(np.zeros(18)):
        reduce(array, "max")
        assert np.all(array == SIZE - 1)
        return
    text = raised_everywhere(WORLD, errors.DisagreementError, lambda: reduce(array, "max"))
    assert 'rank 0: all_reduce: length 18, dtype float64, op "max", memory from allocate()' in text
    assert "ordinary memory" in text


def _tensor() -> object:
    if SIZE > 3:
        pytest.skip("many ranks take long to import PyTorch")
    return pytest.importorskip("torch").zeros(3)


class JaxLike:
    """An object with the properties of a JAX array: NumPy can copy it, and nothing can write to it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.zeros(3, dtype)


def _read_only() -> np.ndarray:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


BAD_ARRAYS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [1.0, 2.0], errors.NotAnArrayError, "not builtins.float"),
    "float": (lambda: 1.5, errors.NotAnArrayError, "not builtins.float"),
    "tensor": (_tensor, errors.NotAnArrayError, r"tensor.detach().numpy(): it shares a CPU tensor's memory"),
    "JAX array": (
        JaxLike,
        errors.NotAnArrayError,
        "JaxLike; it can't be changed in place: pass a copy, numpy.array(x)",
    ),
    "read only": (_read_only, errors.NotAnArrayError, "read-only"),
    "gaps": (lambda: np.zeros((4, 4))[:, :2], errors.NotContiguousError, "ascontiguousarray"),
    "reversed": (lambda: np.zeros(4)[::-1], errors.NotContiguousError, "not contiguous"),
    "complex": (lambda: np.zeros(3, complex), errors.UnsupportedDtypeError, "complex128"),
    "int16": (lambda: np.zeros(3, np.int16), errors.UnsupportedDtypeError, "use one of float32"),
    "object": (lambda: np.zeros(3, object), errors.UnsupportedDtypeError, "object"),
    "byte order": (lambda: np.zeros(3, ">f4"), errors.UnsupportedDtypeError, "byte order"),
    "not aligned": (lambda: np.zeros(33, np.uint8)[1:].view("f8"), errors.NotAnArrayError, "aligned"),
}
BAD_ALLOCATIONS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((-1, "float32"), errors.OptionError, "got -1"),
    ((2.5, "float32"), errors.OptionError, "got 2.5"),
    (("many", "float32"), errors.OptionError, "got 'many'"),
    ((3, "float31"), errors.UnsupportedDtypeError, "dtype float31 can't be reduced; use one of float32,"),
    ((3, [1]), errors.UnsupportedDtypeError, "use one of"),
    ((3, ">f8"), errors.UnsupportedDtypeError, "byte order"),
    ((3, "float32", "tpu"), errors.OptionError, "device='tpu'"),
]


@pytest.mark.parametrize("bad", BAD_ARRAYS)
def test_bad_array(reduce: AllReduce, bad: str) -> None:
    make, kind, words = BAD_ARRAYS[bad]
    array = make()
    assert words in raised_everywhere(WORLD, kind, lambda: reduce(array, "sum"))


def test_bad_op_or_allocation(reduce: AllReduce) -> None:
    for op in ("avg", "SUM", "", None, 3, np.add, ["sum"]):
        text = raised_everywhere(WORLD, errors.UnsupportedOpError, partial(reduce, np.zeros(3), op))
        assert "use one of sum, mean, max, min, prod" in text
    for dtype in ("int32", "int64"):
        array = np.full(5, 3, dtype)
        text = raised_everywhere(WORLD, errors.UnsupportedOpError, partial(reduce, array, "mean"))
        assert f"not defined for {dtype}" in text
        assert np.all(array == 3)
    for arguments, kind, words in BAD_ALLOCATIONS:
        assert words in raised_everywhere(WORLD, kind, partial(reduce.allocate, *arguments))
    array = np.zeros(38)[::2] if WORLD.rank == SIZE - 1 else np.zeros(19)
    text = raised_everywhere(WORLD, errors.NotContiguousError, lambda: reduce(array, "sum"))
    assert SIZE == 1 or text.startswith(f"rank {SIZE - 1}: ")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_native_refuses_halves_by_name(flat: allreduce.Topology, dtype: str) -> None:
    with allreduce.create("native", flat) as native, allreduce.create("ring", flat) as half:
        text = raised_everywhere(WORLD, errors.UnsupportedDtypeError, lambda: native.allocate(4, dtype))
        assert f"native does not reduce {dtype}" in text.replace("Native", "native")
        array = half.allocate(4, dtype)
        raised_everywhere(WORLD, errors.UnsupportedDtypeError, lambda: native(array, "sum"))


@pytest.mark.parametrize("end", ["close", "close the topology", "abandon the topology"])
def test_closed(reduce: AllReduce, end: str) -> None:
    """Locally if it was abandoned; other users of MPI can continue."""
    topology = allreduce.Topology()
    closed = allreduce.create(reduce.name, topology)
    array = closed.allocate(1000)
    bound = closed.bind(array, "sum")
    closed(array, "sum")
    for _ in range(2):
        (topology.abandon if "abandon" in end else topology.close if "topology" in end else closed.close)()
    assert closed.closed
    calls = [bound, partial(closed, array), partial(closed.bind, array, "sum"), partial(closed.allocate, 3)]
    if "topology" in end:
        calls += [topology.private, partial(allreduce.create, reduce.name, topology)]
    for call in calls:
        assert "is closed" in raised_everywhere(WORLD, errors.ClosedError, call)
    closed.close()
    array += 1  # its memory is still there
    with allreduce.Topology() as another, allreduce.create(reduce.name, another) as again:
        again(np.ones(1000), "sum")
    topology.close()


@several
def test_one_node_compares_calls_without_a_check_too(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, check=False) as loose:
        raised_everywhere(WORLD, errors.DisagreementError, lambda: loose(np.zeros(8 + WORLD.rank), "sum"))


# create


CREATIONS: list[tuple[Any, dict[str, Any], str]] = [
    ("rinng", {}, "did you mean 'ring'?"),
    ("halving-doubling", {}, "did you mean 'halving_doubling'?"),
    ("natve", {}, "did you mean 'native'?"),
    ("zzz", {}, "The backends are: ring, halving_doubling"),
    (None, {}, "no backend is called None"),
    ("ring", {"root": 0}, "backend 'ring' has no option 'root'"),
    ("ring", {"check": "sometimes"}, "use True or False"),
    ("reduce_to_one", {"root": 99}, "got 99"),
    ("reduce_to_one", {"root": -1}, "got -1"),
    ("reduce_to_one", {"root": "zero"}, "got 'zero'"),
    ("hierarchical_copy", {"node": "native"}, "node='native' can't be used inside nodes"),
    ("hierarchical_copy", {"make": None}, "has no option 'make'"),
    ("auto", {"measure": "sometimes"}, "measure must be True or False, got 'sometimes'"),
]


def test_bad_name_or_option(flat: allreduce.Topology) -> None:
    for name, options, words in CREATIONS:
        kind = errors.OptionError if options else errors.UnknownBackendError
        create = partial(allreduce.create, name, flat, **options)
        assert words in raised_everywhere(WORLD, kind, create)


@several
def test_creations_differ(flat: allreduce.Topology) -> None:
    for sides in (("ring", {}), ("native", {})), (("reduce_to_one", {"root": 0}), ("reduce_to_one", {"root": 1})):
        name, options = sides[WORLD.rank % 2]
        create: Any = partial(allreduce.create, name, flat, **options)  # type: ignore[arg-type]
        text = raised_everywhere(WORLD, errors.DisagreementError, create)
        for rank, (name, options) in enumerate(sides):
            assert f"rank {rank}: create('{name}'" in text
            assert all(f"{key}={value}" in text for key, value in options.items())


def test_bad_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [("ranks_per_node", each) for each in (0, -2, (1, 99), (), (SIZE, 0), "two", 1.5)]
    bad += [("timeout", each) for each in (0, -1, "soon", float("nan"))]
    for name, given in bad:
        make: Any = partial(allreduce.Topology, **{name: given})  # type: ignore[arg-type]
        text = raised_everywhere(WORLD, errors.OptionError, make)
        assert f"{name}={given!r}" in text.replace("timeout must be a number of seconds > 0, got ", "timeout=")
    if SIZE > 1:
        with pytest.raises(errors.DisagreementError, match="ranks_per_node"):
            allreduce.Topology(ranks_per_node=1 if WORLD.rank == 0 else None)
        with pytest.raises(errors.OptionError, match="ranks_per_node"):
            allreduce.Topology(ranks_per_node=0 if WORLD.rank == 0 else 1)
    for variable, seconds in itertools.product(("STALL", "TIMEOUT"), ("abc", "nan")):
        with monkeypatch.context() as patch:
            patch.setenv(f"ALLREDUCE_{variable}_SECONDS", seconds)
            text = raised_everywhere(WORLD, errors.OptionError, allreduce.Topology)
        assert f"ALLREDUCE_{variable}_SECONDS must be a number of seconds such as" in text
        assert f"got '{seconds}'" in text


def test_what_is_no_communicator() -> None:
    """Refused before anything is sent, so alike on all ranks without communication."""
    freed = MPI.COMM_SELF.Dup()
    freed.Free()
    given: list[tuple[Any, str]] = [
        ("world", "not str"),
        (MPI.COMM_NULL, "MPI.COMM_NULL|not Comm"),
        (freed, "MPI.COMM_NULL"),
        (WORLD.Get_group(), "not Group"),
    ]
    if SIZE > 1:
        half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        given.append((half.Create_intercomm(0, WORLD, 1 - WORLD.rank % 2), "an intercommunicator"))
    for each, words in given:
        with pytest.raises(errors.OptionError, match=words):
            allreduce.Topology(each)
    for ranks in ([], [0, 0], [-1], [10_000], ["a"], [0.5]):
        with pytest.raises(errors.OptionError, match="give some ranks of MPI, each of them once"):
            allreduce.Topology.of_ranks(ranks, "test")  # type: ignore[arg-type]
    if SIZE > 1:
        given[-1][0].Free()
        half.Free()


def test_a_communicator_in_place_of_a_topology() -> None:
    remedy = r"create\('auto', topology=allreduce\.Topology\(comm\)\)"
    with pytest.raises(errors.OptionError, match=rf"takes an allreduce\.Topology, not Intracomm: {remedy}"):
        allreduce.create("auto", WORLD)  # type: ignore[arg-type]
    if WORLD.rank == 0:  # alone: it makes no topology of all ranks, for which it would wait
        with pytest.raises(errors.OptionError, match=rf"takes an allreduce\.Topology, not comm=: {remedy}"):
            allreduce.create("auto", comm=MPI.COMM_SELF)


@pytest.mark.parametrize("name", ["ring", "shared", "auto"])
@pytest.mark.parametrize("length", [2**62, 2**39, -1])
def test_lengths_that_no_machine_has(name: str, length: int, flat: allreduce.Topology) -> None:
    with allreduce.create(name, flat) as reduce:
        kind = errors.UnavailableError if length == 2**39 else errors.OptionError
        raised_everywhere(WORLD, kind, lambda: reduce.allocate(length, "float64"))
        reduce(np.ones(3), "sum")  # and nothing is lost


def test_options_in_another_order(flat: allreduce.Topology) -> None:
    options = {"node": "shared", "cross": "ring"}
    order = sorted(options, reverse=flat.rank % 2 == 1)
    with allreduce.create("hierarchical_copy", flat, **{key: options[key] for key in order}) as reduce:
        assert reduce.config is not None
        assert options.items() <= reduce.config.options.items()


MADE: dict[str, tuple[type[Algorithm], Callable[[allreduce.Topology], AllReduce]]] = {
    "ring": (Ring, lambda topology: allreduce.create("ring", topology)),
    "node": (Shared, lambda topology: allreduce.create("hierarchical_copy", topology)),
    "cross": (Ring, lambda topology: allreduce.create("hierarchical_copy", topology)),
    "central": (Central, lambda topology: allreduce.create(Central, topology, roots=[SIZE - 1])),
}


@several
@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_fails_while_a_backend_is_made(case: str, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise its error, no part of the backend is left, and the next backend can be created."""
    kind, make = MADE[case]
    if case == "cross" and failing:
        pytest.skip("the lowest rank of each node crosses")
    with allreduce.Topology(ranks_per_node=2, timeout=20) as topology:
        before, make_it = len(topology._owned), kind.__init__

        @functools.wraps(make_it)
        def make_all_but_one(self: Algorithm, context: Context, **options: Any) -> None:
            make_it(self, context, **options)  # type: ignore[misc]
            if WORLD.rank == failing and (case != "cross" or context.size < SIZE):
                raise MemoryError("this rank alone")

        with monkeypatch.context() as patched:
            patched.setattr(kind, "__init__", make_all_but_one)
            assert "this rank alone" in raised_everywhere(WORLD, MemoryError, lambda: make(topology))
        assert len(topology._owned) == before
        assert all(child.closed for child in topology._children)
        with make(topology) as reduce:
            array = np.ones(3)
            reduce(array, "sum")
            assert array.tolist() == [SIZE] * 3


def test_an_error_before_a_backend_has_anything(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(topology: allreduce.Topology, *_: object) -> None:
        raise on_all_ranks(errors.UnavailableError("nothing here"), topology.world)

    monkeypatch.setattr("allreduce.backend.Executor", refuse)
    assert raised_everywhere(WORLD, errors.UnavailableError, lambda: allreduce.create("ring", flat)) == "nothing here"


def test_parts_of_a_topology_are_on_their_own() -> None:
    """An error that all ranks of one part raise does not affect the other part."""
    with allreduce.Topology() as topology:
        with topology.split(topology.rank % 2) as part, allreduce.create("ring", part) as reduce:
            assert part.size == len(range(topology.rank % 2, topology.size, 2))
            values = np.full(10, float(topology.rank))
            if topology.rank % 2:
                with pytest.raises(errors.UnsupportedOpError):
                    reduce(values, "median")
            reduce(values, "sum")
            assert (values == sum(range(topology.rank % 2, topology.size, 2))).all()
        with pytest.raises(errors.OptionError, match=r"colour must be an integer >= 0, .* got -1"):
            topology.split(-1)
        with pytest.raises(errors.OptionError, match="on_error='rank' is unknown"):
            topology.split(0, on_error="rank" if topology.rank == SIZE - 1 else "part")
        if SIZE > 1:
            with pytest.raises(errors.DisagreementError, match="on_error='part'"):
                topology.split(0, on_error="part" if topology.rank else "job")


RAISED: dict[str, tuple[Callable[[], BaseException], type[BaseException]]] = {
    "interrupt": (KeyboardInterrupt, KeyboardInterrupt),
    "mpi": (partial(MPI.Exception, MPI.ERR_TRUNCATE), errors.CommunicationError),
}


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("name", ["ring", "native"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_call_that_failed_half_way_is_the_last(
    kind: str, name: str, op: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may be at different points, so the next call raises an error, `close` is local, and a new backend
    works. The array lives on: other ranks, and messages that are still under way, may write to its memory."""
    raised, seen = RAISED[kind]

    def fail(*_: Any) -> None:
        raise raised()

    with allreduce.Topology() as topology:
        reduce = allreduce.create(name, topology)
        reduce(np.ones(11), "sum")
        monkeypatch.setattr(reduce._algorithm, "work", lambda *_: allreduce.Work(fail))
        monkeypatch.setattr("allreduce.backend.do_nothing", fail)  # of one rank
        array = np.ones(10)
        alive = weakref.ref(array)
        call = reduce.bind(array, op) if bound else partial(reduce, array, op)
        with pytest.raises(seen):
            call()
        with pytest.raises(errors.BrokenError, match="failed part-way"):
            call()
        reduce.close()
        del array, reduce, call
        gc.collect()
        assert alive() is not None
        WORLD.Barrier()


NUMERIC = (*ON_CPU, "adasum")
OPS = ("sum", "mean", "prod", "max")
EXTREME = {3e38: ("sum", "prod"), 1e-44: ("mean", "prod"), -np.inf: ("sum", "mean"), np.nan: ("sum", "max")}


@pytest.mark.skipif(SIZE > 3, reason="what happens on three ranks happens on more")
@pytest.mark.parametrize("compress", [None, "float16"])
@pytest.mark.parametrize("name", NUMERIC)
def test_numpy_told_to_raise_after_the_first_call(
    name: str, compress: str | None, topology_of: Callable[..., allreduce.Topology]
) -> None:
    """Overflow, underflow and invalid values are not errors on any rank, whenever np.seterr was called."""
    if compress and name in ("native", "adasum"):
        pytest.skip("it sums no 16-bit floats, or rounds them by itself")
    for ranks_per_node in {None, 1}:
        if name == "shared" and ranks_per_node:
            continue
        reduce = allreduce.create(name, topology_of(ranks_per_node), compress=compress)
        half = np.ones(300, np.float16) if name != "native" else np.ones(300)
        arrays = [reduce.allocate(3000, "float32"), np.ones(3000, np.float32), np.ones((3, 2), np.float32), half]
        _reduce_all(reduce, arrays, 1.0, OPS)
        with np.errstate(all="raise"):
            for value, ops in EXTREME.items():
                _reduce_all(reduce, arrays, value, ops)
        reduce.close()


def _reduce_all(reduce: AllReduce, arrays: list[np.ndarray], value: float, ops: tuple[str, ...]) -> None:
    """Make every kind of call that computes, on arrays of one value."""

    def filled(array: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            array[...] = value
        return array

    for op in ("adasum",) if reduce.name == "adasum" else ops:
        for array in arrays:
            reduce(filled(array), op)
        reduce([filled(array) for array in arrays], op)
        if reduce.two_phase:
            reduce.reduce_scatter(filled(arrays[1]), op)
    if reduce.name != "adasum":
        reduce.sparse(np.array([1, 1, 0]), filled(arrays[2]), 5, "sum")

"""Compares our stand-ins of CuPy, NCCL and PyTorch's streams with the real packages. Needs no GPU.

CuPy and NCCL are 490 MB, too large for CI: `scripts/gpu_test.sh drift` installs them and runs this file on any machine.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from allreduce.algorithms import nccl as backend
from allreduce.arrays import dtypes, ops
from tests.gpu import fake_cupy, fake_gpu


def found(name: str) -> Any:
    """Return the object of this dotted name; raises AttributeError with the name if there is none."""
    parts = name.split(".")
    thing = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:at]))
            except ImportError:
                raise AttributeError(f"there is no {'.'.join(parts[:at])}") from None
        thing = getattr(thing, part)
    return thing


def signature(thing: Any) -> inspect.Signature | None:
    """Return the signature of a Python function, or of a Cython function by the first line of its docstring; None if
    unknown."""
    try:
        signed = inspect.signature(thing)
    except (ValueError, TypeError):
        match = re.match(r"[\w.]+\((.*?)\)(?:\s|$)", (thing.__doc__ or "").split("\n")[0])
        signed = inspect.Signature(list(_parameters(match[1]))) if match else None
    if signed is None or any(each.name in ("args", "kwargs") for each in signed.parameters.values()):
        return None
    return signed.replace(parameters=[each for each in signed.parameters.values() if each.name not in ("self", "cls")])


def _parameters(text: str) -> Iterator[inspect.Parameter]:
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for each in filter(None, map(str.strip, text.replace("\\*", "*").split(","))):
        name, equals, _ = each.partition("=")
        name = name.split()[-1]
        if name == "/":
            continue
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        variable = name.startswith("*")
        this = inspect.Parameter.VAR_POSITIONAL if variable else kind
        kind = inspect.Parameter.KEYWORD_ONLY if variable else kind
        default = None if equals else inspect.Parameter.empty
        yield inspect.Parameter(name.lstrip("*"), this, default=default)


def standins(cupy: Any, cuda: Any) -> Iterator[tuple[str, Any]]:
    """Return all public names of a stand-in, by their real names."""
    for name, value in vars(cupy).items():
        if not name.startswith("_") and name not in ("cuda", "counters", "gpu", "ndarray"):
            yield f"cupy.{name}", value
    for name, value in vars(cuda).items():
        if not name.startswith("_") and name not in ("runtime", "nccl"):
            yield f"cupy.cuda.{name}", value
    for part in ("runtime", "nccl"):
        for name, value in vars(getattr(cuda, part)).items():
            yield f"cupy.cuda.{part}.{name}", value


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for key, value in vars(kind).items():
        if not key.startswith("_") or key in ("__dlpack__", "__dlpack_device__"):
            yield f"{name}.{key}", value


@pytest.fixture
def pair() -> tuple[Any, Any]:
    from mpi4py import MPI

    cupy = fake_cupy.make(comm=MPI.COMM_SELF)
    return cupy, cupy.cuda


real = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed; scripts/gpu_test.sh drift installs it"
)


@real
def test_stand_in_has_nothing_of_its_own(pair: tuple[Any, Any]) -> None:
    """Every name in the stand-in is CuPy's, with the same names and order of arguments."""
    cupy, cuda = pair
    things = list(standins(cupy, cuda))
    for name, kind in (
        ("cupy.ndarray", cupy.ndarray),
        ("cupy.cuda.Stream", cuda.Stream),
        ("cupy.cuda.Event", cuda.Event),
        ("cupy.cuda.Device", cuda.Device),
        ("cupy.cuda.nccl.NcclCommunicator", cuda.nccl.NcclCommunicator),
    ):
        things += members(name, kind)
    compare(things, least=40)


def compare(things: list[tuple[str, Any]], least: int) -> None:
    """Compare the stand-ins `things` with the objects of their real names."""
    wrong, compared = [], 0
    for name, value in things:
        try:
            thing = found(name)
        except AttributeError as error:
            wrong.append(str(error))
            continue
        if not isinstance(value, Callable) or isinstance(value, type(pytest)):  # type: ignore[arg-type]
            continue
        theirs, ours = signature(thing), signature(value)
        if theirs is None or ours is None:
            continue
        compared += 1
        names = [list(each.parameters) for each in (ours, theirs)]
        if names[0] != names[1][: len(names[0])]:
            wrong.append(f"{name} of the stand-in takes {names[0]}, and the real one {names[1]}")
    assert not wrong
    assert len(things) >= least
    assert compared >= least // 4


@real
def test_numbers_of_nccl() -> None:
    from cupy.cuda import nccl

    types = {"float32": "FLOAT32", "float64": "FLOAT64", "int32": "INT32", "int64": "INT64", "float16": "FLOAT16"}
    types |= {"bfloat16": "BFLOAT16", "uint8": "UINT8", "int8": "INT8", "bool": "UINT8"}
    for dtype, name in types.items():
        assert dtypes.TYPES[dtypes.parse(dtype)].nccl == getattr(nccl, f"NCCL_{name}"), dtype
    for op, name in {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}.items():
        assert ops.OPS[op].nccl == getattr(nccl, f"NCCL_{name}"), op
    assert backend.AVERAGE == nccl.NCCL_AVG
    assert len(bytes(nccl.get_unique_id())) == 128


@real
def test_what_we_rely_on() -> None:
    """Behaviour of CuPy that our code relies on."""
    import cupy

    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)  # as `allocate` has it
    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # there is no GPU; a dtype that is not known is a ValueError
        cupy.zeros(2, dtypes.BFLOAT16)


@real
def test_unique_id_is_what_the_communicator_takes() -> None:
    """CuPy 14 returns it as bytes; we send it to the other ranks as numbers."""
    import cupy
    from cupy.cuda import nccl

    given = nccl.get_unique_id()
    again = backend._as_cupy_takes_it(cupy, list(given))
    assert again == given
    assert type(again) is type(given)


def test_stand_in_for_pytorchs_streams() -> None:
    """`torch.cuda` can be inspected without a GPU, also in PyTorch's CPU builds."""
    pytest.importorskip("torch")
    cuda = fake_gpu.TorchCuda(fake_gpu.Gpu())
    used = ("current_stream", "synchronize", "get_rng_state", "set_rng_state")
    things = [(f"torch.cuda.{name}", getattr(cuda, name)) for name in used]
    things += members("torch.cuda.Stream", cuda.Stream)
    compare([*things, ("torch.cuda.stream", None), ("torch.cuda.device", None)], least=5)

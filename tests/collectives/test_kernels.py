"""The C library has the bits of NumPy: sums and casts of 16-bit floats, and codes of 8 bits."""

import contextlib
import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from allreduce import kernels
from allreduce.arrays import casts, ops, quantize
from allreduce.arrays.workspace import Workspace
from allreduce.call import rendezvous
from tests import launch

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
EVERY_HALF = np.arange(2**16, dtype=np.uint16)
LENGTHS = [0, 1, 7, 8, 2047, 2048, 2049, 100_003]
needs_c = pytest.mark.skipif(kernels.status() != "C", reason=f"arrays are computed by {kernels.status()}")


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and the rest of the test is computed by NumPy."""
    if kernels.status() != "C":
        pytest.skip(f"arrays are computed by {kernels.status()}")

    def switch() -> None:
        monkeypatch.setenv(kernels.SWITCH, "0")
        clear_caches()
        assert kernels.status().startswith("NumPy")

    yield switch
    monkeypatch.undo()
    clear_caches()


def clear_caches() -> None:
    for cached in (kernels._switched_off, kernels._loaded, kernels._function):
        cached.cache_clear()


def hostile(length: int, seed: int) -> np.ndarray:
    """float32 of all exponents, and NaNs, infinities, subnormals and zeros of both signs."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 2**32, length, dtype=np.uint32).view(np.float32)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, 65519, 65520], np.float32)
    chosen = generator.random(length) < 0.1
    values[chosen] = generator.choice(special, chosen.sum())
    return values


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), wanted.view(f"u{found.itemsize}"))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_casts_of_every_16_bit_float(half: np.dtype, by_numpy: Callable[[], None]) -> None:
    found = np.empty(2**16, np.float32)
    assert kernels.cast(EVERY_HALF.view(half), found)
    same_bits(found, EVERY_HALF.view(half).astype(np.float32))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("lower", [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_casts_of_float32_of_all_upper_bits(half: np.dtype, lower: int, by_numpy: Callable[[], None]) -> None:
    values = (np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(lower)).view(np.float32)
    found = np.empty(2**16, half)
    assert kernels.cast(values, found)
    with np.errstate(all="ignore"):
        same_bits(found, values.astype(half))
    by_numpy()
    with np.errstate(all="ignore"):
        casts.cast(values, found)
        same_bits(found, values.astype(half))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums(half: np.dtype, op: str, ranks: int, by_numpy: Callable[[], None]) -> None:
    """Pairs of all 16-bit floats, and lengths about those of the loops; in place, with several outputs."""
    resolved = ops.resolve(op, half, ranks)
    wanted = []
    cases = [[EVERY_HALF.view(half), *(np.roll(EVERY_HALF * 5 + each, each).view(half) for each in range(1, ranks))]]
    with np.errstate(all="ignore"):
        cases += [[hostile(size, seed).astype(half) for seed in range(ranks)] for size in LENGTHS]
    for parts in cases:
        given = [part.copy() for part in parts]
        assert kernels.sum_arrays(given, given[:2], resolved.scale)
        same_bits(given[0], given[1])
        with np.errstate(all="ignore"):
            wide = [part.astype(np.float32) for part in parts]
            for each in wide[1:]:
                wide[0] += each
            wanted.append((wide[0] * np.float32(resolved.scale or 1)).astype(half))
        same_numbers(given[0], wanted[-1])
    by_numpy()
    for parts, right in zip(cases, wanted, strict=True):
        parts[0].flags.writeable = False
        with np.errstate(all="ignore"):
            casts.combine(parts, parts[1], resolved, Workspace())
        same_numbers(parts[1], right)


def same_numbers(found: np.ndarray, wanted: np.ndarray) -> None:
    """The bits of a NaN are those of either one where two are added."""
    with np.errstate(all="ignore"):
        number = ~np.isnan(wanted)
        assert (np.isnan(found) == ~number).all()
    same_bits(found[number], wanted[number])


def test_subnormal_numbers_stay_where_a_thread_flushes_them(by_numpy: Callable[[], None]) -> None:
    torch = pytest.importorskip("torch")
    given = np.array([1e-5, -3e-5, 6e-5, -0.0, 1e-3], np.float32)
    wanted, small, wide = given.astype(np.float16), np.empty(5, np.float16), np.empty(5, np.float32)
    for switch in (lambda: None, by_numpy):
        switch()
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush subnormal numbers")
        try:
            casts.cast(given, small)
            casts.cast(wanted, wide)
        finally:
            torch.set_flush_denormal(False)
        same_bits(small, wanted)
        same_bits(wide, wanted.astype(np.float32))


@needs_c
@pytest.mark.parametrize("block", [8, 256, 3000])
def test_codes_of_8_bits(block: int) -> None:
    """Codes, errors, and what is decoded have NumPy's bits, in blocks that have a finite scale."""
    generator = np.random.default_rng(block)
    cases = [generator.standard_normal(size).astype(np.float32) for size in LENGTHS]
    cases += [hostile(size, size) for size in LENGTHS] + [np.zeros(5000, np.float32), np.full(5000, 1e-42, np.float32)]
    for values in cases:
        starts, blocks = np.arange(0, values.size, block), np.arange(values.size) // block
        scales = np.empty(starts.size, np.float32)
        kernels.block_magnitudes(values, block, scales)
        bits = np.maximum.reduceat(np.abs(values).view(np.int32), starts) if values.size else np.empty(0, np.int32)
        same_bits(scales, bits.view(np.float32))
        finite = (scales <= quantize.LARGEST)[blocks]
        scales[~(scales <= quantize.LARGEST)] = 1
        scales = np.maximum(scales, quantize.LEAST) / quantize.LARGEST_CODE
        inverses, random = 1 / scales, generator.random(values.size, np.float32)
        codes, found, wide = np.empty(values.size, np.int8), np.empty_like(values), np.empty_like(values)
        kernels.encode(values, block, scales, inverses, random, codes, found)
        with np.errstate(all="ignore"):
            rounded = np.floor(values * inverses[blocks] + random)
            error = values - rounded * scales[blocks]
        np.testing.assert_array_equal(codes[finite], rounded[finite])
        same_bits(found[finite], error[finite])
        kernels.decode(codes, block, scales, wide)
        same_bits(wide, codes * scales[blocks])
        kernels.decode(codes, block, scales, found, adds=True)
        same_bits(found[finite], (error + wide)[finite])


@pytest.mark.parametrize("spin", [0.0, 1e-4, -1e-4])
def test_ranks_meet(spin: float, by_numpy: Callable[[], None]) -> None:
    """A rank writes its fingerprint, and learns whether the others have written the same."""

    def run() -> list[object]:
        words = np.zeros((2, 3), np.int64)
        nothing = memoryview(np.zeros(3, np.int64))
        even, odd = (rendezvous.Row(memoryview(row), nothing, nothing) for row in words)
        meet = rendezvous.Slot(0, 0, (even, odd), 1).meeting(fingerprint, spin)
        found: list[object] = []
        for number, others in ((1, 1), (1, 2), (2, 2), (5, 5), (7, 3), (7, 5)):
            words[number % 2, ::2] = fingerprint | others & 3
            found += [meet(number, None), words.tolist()]
        words[1, 0] = fingerprint ^ 8
        return [*found, meet(7, None)]

    fingerprint = (1 << 61) + 4
    found = run()
    assert found[::2] == [True, False, True, True, True, False, False]
    by_numpy()
    assert run() == found


@needs_c
def test_threads_make_functions_of_one_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads the definition in each call of the function, so one that a thread has lost is never freed."""
    both, made, cast = threading.Barrier(2), [], ctypes.cast

    def cast_together(*given: Any) -> Any:
        both.wait(60)
        return cast(*given)

    monkeypatch.setattr(ctypes, "cast", cast_together)
    threads = [threading.Thread(target=lambda: made.append(kernels._definition("sum_float64"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made[0] is made[1] is kernels._definitions["sum_float64"]


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_call_of_mpi_in_the_rendezvous(dtype: str, length: int) -> None:
    """The mean has the bits of NumPy, a sum is left as MPI has made it, and an error of MPI is raised."""
    words, seen, codes = np.zeros((2, 1), np.int64), [], [0, 0, MPI.ERR_OP]
    arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_ssize_t] * 3]

    @ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
    def all_reduce(*found: int) -> int:
        seen.append(found)
        return codes[len(seen) - 1]

    nothing = memoryview(np.zeros(1, np.int64))
    even, odd = (rendezvous.Row(memoryview(row), nothing, nothing) for row in words)
    slot = rendezvous.Slot(0, 0, (even, odd), 0)
    address = ctypes.cast(all_reduce, ctypes.c_void_p).value
    with np.errstate(all="ignore"):
        array = hostile(length, 1).astype(dtype)
    before = array.copy()
    for number, scale in enumerate([None, 1 / 3, 1 / 3]):
        made = [address, -1, length, array.itemsize, 3, 4, 5, rendezvous.double_word(scale), id(MPI.Exception)]
        meet = slot.meeting(1 << 2, 0.0, rendezvous.CWork("meet_and_reduce", made))
        if codes[number]:
            with pytest.raises(MPI.Exception) as caught:
                meet(number, array)
            assert caught.value.Get_error_code() == MPI.ERR_OP
        else:
            assert meet(number, array)
        with np.errstate(all="ignore"):
            same_bits(array, before * array.dtype.type(1 / 3) if number else before)
    whole = 2**64 - 1, array.ctypes.data or None, length, 3, 4, 5
    assert seen == [whole] * 3


def test_the_switch_and_an_older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from allreduce import kernels; print(kernels.status())"
    monkeypatch.setenv(kernels.SWITCH, "0")
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "NumPy (ALLREDUCE_KERNELS=0)\n"
    here = kernels.status()
    monkeypatch.setenv(kernels.SWITCH, "1" if kernels._switched_off() else "0")
    assert kernels.status() == here  # as the functions, which read it once
    monkeypatch.delenv(kernels.SWITCH)
    monkeypatch.setattr(kernels, "VERSION", -1)
    clear_caches()
    assert kernels.status().startswith("NumPy (no C library" if not kernels._files() else "NumPy (library")
    monkeypatch.undo()
    clear_caches()


# Arguments that C must never see


MAKERS = {  # all functions on arrays, with arguments that are right: 20 elements, in blocks of 8
    "sum_arrays": lambda: ([np.ones(20, np.float16)] * 3, [np.ones(20, np.float16)]),
    "cast": lambda: (*floats(20), np.ones(20, np.float16)),
    "block_magnitudes": lambda: (*floats(20), 8, np.ones(3, np.float32)),
    "encode": lambda: (*floats(20), 8, *floats(3, 3, 20), np.zeros(20, np.int8), *floats(20)),
    "decode": lambda: (np.zeros(20, np.int8), 8, *floats(3, 20)),
    "exponents": lambda: (floats(20, 20), np.array([0, 8, 20]), np.zeros(2, np.uint8)),
    "add_integers": lambda: (floats(20, 20), np.array([0, 8, 20]), np.ones(2), np.ones(2), np.ones(20)),
    "finish": lambda: (np.ones(20), np.array([0, 8, 20]), np.ones(2), 3, *floats(20)),
    "sum_fixed": lambda: (floats(20, 20), floats(20), np.array([0, 8, 20]), 51, 1),
}


def floats(*sizes: int) -> list[np.ndarray]:
    return [np.full(size, 2, np.float32) for size in sizes]


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("how", ["right", "short", "dtype", "2-D", "read-only", "unaligned", "every second"])
def test_arguments_that_c_must_not_see(name: str, how: str) -> None:
    """Each array in turn, and the first one of each list: an error, or False, and NumPy does it."""
    for place, given in enumerate(MAKERS[name]()):
        arguments = list(MAKERS[name]())
        if isinstance(given, list):
            holder, at = arguments[place], 0
        elif isinstance(given, np.ndarray):
            holder, at = arguments, place
        else:
            continue
        array, memory = holder[at], np.ones(2 * holder[at].nbytes + 64, np.uint8)
        locked = array.copy()
        locked.flags.writeable = False
        holder[at] = {
            "right": array,
            "short": array[:-8],
            "dtype": array.astype(np.int16),
            "2-D": array.reshape(1, -1),
            "read-only": locked,
            "unaligned": memory[1 : 1 + array.nbytes].view(array.dtype),
            "every second": memory[: 2 * array.nbytes].view(array.dtype)[::2],
        }[how]
        before, done = holder[at].copy(), False
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            done = getattr(kernels, name)(*arguments) is not False
        if how == "right" or (how, array.itemsize) == ("unaligned", 1):
            assert done == (kernels.status() == "C")
        else:
            assert not done or how == "read-only"
            assert (holder[at] == before).all()


@pytest.mark.parametrize("edges", [[0, 0, 20], [0, 12, 8], [-1, 8, 20], [0, 8, 21], [0, 8, 2**62]])
def test_wrong_edges(edges: list[int]) -> None:
    for name in ("exponents", "add_integers", "finish", "sum_fixed"):
        arguments = [np.array(edges) if getattr(each, "dtype", None) == np.int64 else each for each in MAKERS[name]()]
        if kernels.status() == "C":
            with pytest.raises(ValueError, match="edges"):
                getattr(kernels, name)(*arguments)


def test_the_library_computes_before_and_after_mpi() -> None:
    done = launch.child(
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "from allreduce.arrays import casts\n"
        "def cast(): out = np.empty(3, np.float16); casts.cast(np.ones(3, np.float32), out); return float(out.sum())\n"
        "before = cast(); MPI.Init(); during = cast(); MPI.Finalize(); print(before, during, cast())\n"
    )
    assert (done.returncode, done.stdout) == (0, "3.0 3.0 3.0\n"), done.stdout + done.stderr

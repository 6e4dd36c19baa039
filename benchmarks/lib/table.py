"""The tables of a run. The long one has a line for each size and backend: nccl-tests' columns, the backend, min and
p99. The short one has a line for each size: the fastest backend, and the times of auto and native."""

from collections.abc import Callable, Sequence

from benchmarks.lib.advice import BARE, BASELINE, CHOOSER
from benchmarks.lib.columns import columns
from benchmarks.lib.limits import in_words, limit_of
from benchmarks.lib.results import MEMORIES, TITLES, Result, Run
from benchmarks.lib.sizes import show

_TYPES = {"float32": "float", "float64": "double", "float16": "half"}
_HEAD = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_SIDE = "{:>7}  {:>6}  {:>6} {:>6}"
_TAIL = "{:<17} {:>7}  {:>7}  {:>7}  {:>7}"
SIDES = MEMORIES[::-1]  # in the columns out-of-place and in-place of nccl-tests
_GAP = "  "
_SHORT = "{:<17} {:>8} {:>7} {:>6}"  # the fastest backend, its time, its busbw, its part of the limit
_BESIDE = " {:>8}"


def header(run: Run) -> str:
    """Return the lines above the rows."""
    lines = [
        _place(run),
        "# All in place. time: median over the iterations of the slowest rank's time; min and p99 to the right",
        *(f"# without {name}: {why}" for name, why in run.skipped.items()),
        "#",
        "#"
        + " " * 54
        + "{:^32}{:^32}".format("foreign array", "allocated")
        + f"{'':22}{'foreign':^18}{'allocated':^18}",
    ]
    names = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    spread, spread_units = ("backend", "min", "p99", "min", "p99"), ("", *["(us)"] * 4)
    for first, side, tail in (
        (("size", "count", "type", "redop", "root"), names, spread),
        (("(B)", "(elements)", "", "", ""), units, spread_units),
    ):
        row = _row(_HEAD.format(*first), [_SIDE.format(*side)] * 2, _TAIL.format(*tail))
        lines.append("#" + row[1:])
    return "\n".join(lines)


def row(run: Run, results: Sequence[Result]) -> str:
    """Return one row: the times of one backend for one size, with foreign and allocated arrays."""
    some = results[0]
    kind = _TYPES.get(run.dtype, run.dtype)
    head = _HEAD.format(some.size, some.count, kind, "avg" if run.op == "mean" else run.op, -1)
    by_memory = {result.memory: result for result in results}
    sides = [_side(by_memory.get(memory)) for memory in SIDES]
    spread = []
    for memory in SIDES:
        found = by_memory.get(memory)
        spread += [_time(found.min_us), _time(found.p99_us)] if found else ["N/A", "N/A"]
    return _row(head, sides, _TAIL.format(some.backend, *spread))


def short_header(run: Run, backends: Sequence[str]) -> str:
    """Return the lines above the short rows. backends: those that are measured."""
    beside = _beside(backends)
    head = _SHORT.format("fastest", "us", "GB/s", "limit") + "".join(_BESIDE.format(name) for name in beside)
    titles = "  ".join(f"{TITLES[memory]:<{len(head)}}" for memory in MEMORIES)
    units = f"; {' and '.join(beside)} in us" if beside else ""
    return "\n".join(
        [
            _place(run),
            f"# {run.dtype}, {run.op}, in place; us: median of the slowest rank's times; GB/s: bus bandwidth{units}",
            *(f"# {line}" for line in in_words(run)),
            *([f"# without {', '.join(run.skipped)} (--verbose says why)"] if run.skipped else []),
            f"#{'':>9}  {titles}".rstrip(),
            f"#{'size':>9}  {head}  {head}".rstrip(),
        ]
    )


def short_row(run: Run, results: Sequence[Result]) -> str:
    """Return one line with the results of one size."""
    limit = limit_of(run)
    wrong = {each.backend: None for each in results if each.wrong}
    beside = _beside([each.backend for each in results])
    sides = []
    for memory in MEMORIES:
        here = {each.backend: each for each in results if each.memory == memory}
        rivals = [each for name, each in here.items() if name not in wrong and name not in (CHOOSER, BARE)]
        best = min(rivals or here.values(), key=lambda each: each.time_us, default=None)
        part = f"{best.busbw / limit.busbw:.0%}" if best and limit else ""
        texts = (best.backend, _time(best.time_us), f"{best.busbw:.2f}", part) if best else ("-", "", "", "")
        side = _SHORT.format(*texts)
        sides.append(
            side + "".join(_BESIDE.format(_time(here[name].time_us) if name in here else "-") for name in beside)
        )
    warning = f"  WRONG: {', '.join(wrong)}" if wrong else ""
    return f"{show(results[0].size):>10}  {'  '.join(sides)}{warning}".rstrip()


def comparison(run: Run) -> list[str]:
    """Return three tables of all contenders, with a column for each size: median, p99, and part of the limit."""
    cells = {(each.backend, each.memory, each.size): each for each in run.results}
    sizes = sorted({each.size for each in run.results})
    limit = limit_of(run)
    quantities: list[tuple[str, Callable[[Result], str]]] = [
        ("median us", lambda each: _time(each.time_us)),
        ("p99 us", lambda each: _time(each.p99_us)),
        *([(f"of the limit ({limit.what})", lambda each: f"{each.busbw / limit.busbw:.1%}")] if limit else []),
    ]
    found = [f"# left out: {name}: {why}" for name, why in run.skipped.items()]
    for title, show_one in quantities:
        rows = []
        for backend, memory in dict.fromkeys(key[:2] for key in cells):
            row = (cells.get((backend, memory, size)) for size in sizes)
            rows.append([backend, memory, *("" if each is None else show_one(each) for each in row)])
        found += ["", *columns([title, "memory", *map(show, sizes)], rows, left=(0, 1))]
    # A script that reads the columns of nccl-tests skips lines with #.
    return [line if line.startswith("#") else f"# {line}".rstrip() for line in found]


def _beside(backends: Sequence[str]) -> list[str]:
    """Return the backends that get their own columns: "auto" and "native", if others are measured too."""
    return [name for name in (CHOOSER, BASELINE) if name in backends and len(set(backends)) > 1]


def _place(run: Run) -> str:
    machine = run.machine
    kernels = str(machine.get("kernels", "NumPy")).split()[0]
    software = f"{machine['mpi']}, numpy {machine['numpy']}, 16-bit floats by {kernels}"
    return f"# {run.place()}: {machine['cpu']}, {machine['cores']} cores, {software}"


def footer(run: Run) -> str:
    """Return the two lines that scripts expect in nccl-tests' output."""
    wrong = sum(result.wrong or 0 for result in run.results)
    verified = any(result.wrong is not None for result in run.results)
    state = ("OK" if wrong == 0 else "FAILED") if verified else "(not verified)"
    average = sum(result.busbw for result in run.results) / max(len(run.results), 1)
    return f"# Out of bounds values : {wrong} {state}\n# Avg bus bandwidth    : {average:g}\n#"


def _row(head: str, sides: Sequence[str], tail: str) -> str:
    return (head + _GAP + _GAP.join(sides) + _GAP + tail).rstrip()


def _side(result: Result | None) -> str:
    if result is None:
        return _SIDE.format(*["N/A"] * 4)
    wrong = "N/A" if result.wrong is None else result.wrong
    return _SIDE.format(_time(result.time_us), f"{result.algbw:.2f}", f"{result.busbw:.2f}", wrong)


def _time(microseconds: float) -> str:
    """Format a time with as many digits as nccl-tests."""
    digits = 0 if microseconds >= 10000 else 1 if microseconds >= 100 else 2
    return f"{microseconds:.{digits}f}"

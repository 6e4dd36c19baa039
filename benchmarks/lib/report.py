"""The HTML page of one or several runs: one file that a browser opens without a network. Needs matplotlib."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from benchmarks.lib.advice import advice, competing, ranges, times_of, wrong_results
from benchmarks.lib.plot import colour, draw
from benchmarks.lib.results import MEMORIES, TITLES, Run
from benchmarks.lib.sizes import show
from benchmarks.lib.table import comparison

LETTERS = 5  # of a name that fit into the map's cell for one size
_STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #222; margin: 2em auto; max-width: 1300px;
  padding: 0 1.5em; }
h1 { font-size: 1.6em; margin-bottom: 0.1em } h2 { font-size: 1.2em; margin: 1.6em 0 0.4em }
p.sub { color: #555; margin-top: 0 } p.advice { font-size: 1.2em; font-weight: bold }
pre { font-size: 13px; overflow-x: auto } .bad { color: #b00; font-weight: bold }
dl { display: grid; grid-template-columns: max-content auto; gap: 0.2em 1.2em } dt { color: #555 } dd { margin: 0 }
table { border-spacing: 2px; width: 100%; table-layout: fixed; margin-bottom: 1em; font-size: 13px }
caption, th { text-align: left; color: #555 } th { white-space: nowrap; font-weight: normal }
th:first-child { width: 14em }
td { color: #fff; text-align: center; padding: 4px 0; border-radius: 3px; overflow: hidden }
summary { cursor: pointer; color: #555 } svg { width: 100%; height: auto }
code { background: #f3f6f9; padding: 0.1em 0.4em } dd, code { overflow-wrap: anywhere; min-width: 0 }
@media (max-width: 1000px) { body { margin-top: 1em; padding: 0 0.8em }
  div.wide { overflow-x: auto } div.wide > div { min-width: 760px } }
"""


def page(*runs: Run) -> str:
    """Return the page of runs with other numbers of ranks as HTML: a map of the fastest backends, then each run."""
    first = runs[0]
    places = first.place() if len(runs) == 1 else f"{', '.join(str(run.ranks) for run in runs)} ranks"
    title = f"AllReduce of {first.dtype} ({first.op}), {places}"
    parts = [
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'><link rel=icon href='data:,'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        "" if len(runs) > 1 else _introduction(first),
        _map([run for run in runs if run.ranks > 1]),  # one rank has nothing to reduce
        *(_of(run, len(runs) > 1) for run in runs),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _of(run: Run, among_others: bool) -> str:
    """Return the part of the page about one run."""
    picture = draw(run, "svg").decode()
    parts = [
        f"<h1>{escape(run.place())}</h1>{_introduction(run)}" if among_others else "",
        *(f"<p class=bad>{escape(line)}</p>" for line in wrong_results(run)),
        f"<h2>Bus bandwidth and time</h2><div class=wide><div>{picture[picture.index('<svg') :]}</div></div>",
        "<p class=sub>Dotted lines: where another backend becomes the fastest. Dashed: the limit for arrays larger "
        "than the caches. All times are medians over the iterations, of the slowest rank.</p>",
        f"<h2>Results</h2><details{'' if among_others else ' open'}><summary>all times</summary>"
        f"<pre>{escape(chr(10).join(comparison(run)))}</pre></details><h2>Machine</h2>{_machine(run)}",
    ]
    return "\n".join(parts)


def _introduction(run: Run) -> str:
    return f"<p class=sub>{escape(_where(run))}</p><p class=advice>{escape(advice(run))}</p>"


def _map(runs: Sequence[Run]) -> str:
    """Return tables of the fastest backend: a row for each run, a column for each size; one for each kind of memory.

    "" without runs.
    """
    if not runs:
        return ""
    sizes = sorted({result.size for run in runs for result in run.results})
    heads = "".join(f"<th>{show(size) if index % 4 == 0 else ''}</th>" for index, size in enumerate(sizes))
    tables = []
    for memory in (memory for memory in MEMORIES if any(run.of(memory) for run in runs)):
        rows = "".join(f"<tr><th class=name>{escape(run.place())}</th>{_row(run, memory, sizes)}</tr>" for run in runs)
        tables.append(f"<table><caption>{TITLES[memory]}</caption><tr><th></th>{heads}</tr>{rows}</table>")
    return f"<h2>The fastest backend</h2><div class=wide>{''.join(tables)}</div>"


def _row(run: Run, memory: str, sizes: Sequence[int]) -> str:
    """Return the cells of a row of the map. Neighbouring sizes with the same fastest backend share a cell."""
    spans = ranges(competing(times_of(run, memory)))
    winners = [next((each.backend for each in spans if each.first <= size <= each.last), None) for size in sizes]
    cells, start = "", 0
    for winner, group in groupby(winners):
        width = len(list(group))
        sizes_in_words = f"{show(sizes[start])} to {show(sizes[start + width - 1])}"
        start += width
        if winner is None:
            cells += f"<td colspan={width}></td>"
            continue
        text = escape(winner) if len(winner) <= LETTERS * width else "·"
        cells += (
            f"<td colspan={width} style='background:{colour(winner)}' "
            f"title='{escape(winner)}: {sizes_in_words}'>{text}</td>"
        )
    return cells


def _where(run: Run) -> str:
    """Return one line that describes the run: ranks and nodes, machine, MPI library, date."""
    machine = run.machine
    each = " each" * (run.nodes > 1 and not run.simulated)
    return f"{run.place()}; {machine['cpu']}, {machine['cores']} cores{each}; {machine['mpi']}; {run.date}"


def _machine(run: Run) -> str:
    facts = {
        **run.machine,
        "place": run.place(),
        "date": run.date,
        **{f"without {k}": v for k, v in run.skipped.items()},
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return f"<dl>{listed}<dt>command</dt><dd><code>{escape(run.command)}</code></dd></dl>"

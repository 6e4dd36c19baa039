"""The HTML page of one or several runs: one file that a browser opens without a network. Needs plotly."""

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from benchmarks.lib.advice import advice, competing, ranges, times_of, wrong_results
from benchmarks.lib.limits import limit_of
from benchmarks.lib.plot import colour, crossings_in_words, mark, numbered, points, ticks, width
from benchmarks.lib.results import MEMORIES, TITLES, Result, Run
from benchmarks.lib.sizes import show

NUMBER_WIDTH = 0.03  # of a panel's width, where it is narrowest
TITLE_WIDTH = 60  # characters above a panel
LETTERS = 5  # of a name that fit into the map's cell for one size
CHARTS = (("busbw", "Bus bandwidth", "bus bandwidth (GB/s)"), ("time_us", "Time", "time (us)"))
_STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #222; margin: 2em auto; max-width: 1300px;
  padding: 0 1.5em; }
h1 { font-size: 1.6em; margin-bottom: 0.1em } h2 { font-size: 1.2em; margin: 1.6em 0 0.4em }
p.sub { color: #555; margin-top: 0 } p.advice { font-size: 1.2em; font-weight: bold }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e4e4e4 }
th { position: sticky; top: 0; background: #fff } td.name, th.name { text-align: left }
tr.first td { border-top: 2px solid #bbb } .dot { display: inline-block; width: 0.7em; height: 0.7em;
  border-radius: 50%; margin-right: 0.5em } .bad { color: #b00; font-weight: bold } td.best { font-weight: bold }
dl { display: grid; grid-template-columns: max-content auto; gap: 0.2em 1.2em } dt { color: #555 } dd { margin: 0 }
table.map { border-spacing: 2px; border-collapse: separate; width: 100%; table-layout: fixed; margin-bottom: 1em }
table.map caption { text-align: left; color: #555 } table.map th { white-space: nowrap; font-weight: normal;
  color: #555; position: static; text-align: left; padding: 3px 0; border: 0 } table.map th:first-child { width: 14em }
table.map td { color: #fff; text-align: center; padding: 4px 0; border: 0; border-radius: 3px; overflow: hidden }
summary { cursor: pointer; color: #555 }
code { background: #f3f6f9; padding: 0.1em 0.4em } dd, code { overflow-wrap: anywhere; min-width: 0 }
@media (max-width: 1000px) { body { margin-top: 1em; padding: 0 0.8em }
  div.wide { overflow-x: auto } div.wide > div { min-width: 760px } }
"""


def missing() -> str | None:
    """Return why no page can be written, or None."""
    try:
        import plotly.offline  # noqa: F401
    except ImportError as error:
        return f'--html needs plotly, which can\'t be imported ({error}); pip install ".[bench]" in the checkout'
    return None


def page(*runs: Run) -> str:
    """Return the page of runs with other numbers of ranks as HTML: a map of the fastest backends, then each run."""
    from plotly.offline import get_plotlyjs

    first = runs[0]
    places = first.place() if len(runs) == 1 else f"{', '.join(str(run.ranks) for run in runs)} ranks"
    title = f"AllReduce of {first.dtype} ({first.op}), {places}"
    parts = [
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'><link rel=icon href='data:,'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{escape(title)}</h1>",
        "" if len(runs) > 1 else _introduction(first),
        _map([run for run in runs if run.ranks > 1]),  # one rank has nothing to reduce
        *(_of(run, len(runs) > 1) for run in runs),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _of(run: Run, among_others: bool) -> str:
    """Return the part of the page about one run."""
    charts = CHARTS if run.ranks > 1 else CHARTS[1:]  # busbw of one rank is 0
    limit = limit_of(run)
    dashed = f" Dashed: the limit of the {limit.what} for arrays larger than the caches." if limit else ""
    parts = [
        f"<h1>{escape(run.place())}</h1>{_introduction(run)}" if among_others else "",
        *(f"<p class=bad>{escape(line)}</p>" for line in wrong_results(run)),
        *(f"<h2>{title}</h2><div class=wide>{_chart(run, quantity, label)}</div>" for quantity, title, label in charts),
        "<p class=sub>Click a name to hide it, double-click to see it alone, drag to zoom. Dotted lines: where "
        f"another backend becomes the fastest, by the numbers above.{dashed} All times are medians over the "
        "iterations, of the slowest rank.</p>",
        f"<h2>Results</h2><details{'' if among_others else ' open'}><summary>all times</summary>"
        f"<div class=wide>{_table(run)}</div></details><h2>Machine</h2>{_machine(run)}",
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
        tables.append(f"<table class=map><caption>{TITLES[memory]}</caption><tr><th></th>{heads}</tr>{rows}</table>")
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


def _chart(run: Run, quantity: str, label: str) -> str:
    """Return a chart with a panel for allocated arrays and one for foreign arrays, on the same scale."""
    from plotly.subplots import make_subplots

    memories = [memory for memory in MEMORIES if run.of(memory)]
    limit = limit_of(run) if quantity == "busbw" else None
    titles = [[TITLES[memory], *map(escape, crossings_in_words(run, memory, TITLE_WIDTH))] for memory in memories]
    figure = make_subplots(1, len(memories), shared_yaxes=True, horizontal_spacing=0.03)
    shown: set[str] = set()
    for column, memory in enumerate(memories, start=1):
        for backend in run.backends():
            curve = points(run, memory, backend)
            if curve:
                figure.add_trace(_trace(backend, curve, quantity, backend not in shown), row=1, col=column)
                shown.add(backend)
        _mark_crossovers(figure, run, memory, column)
        if limit:
            line = {"color": "#111", "dash": "dash", "width": 1.4}
            text = f"{limit.what} {limit.busbw:.3g} GB/s"
            figure.add_hline(
                y=limit.busbw, line=line, annotation_text=text, annotation_position="top left", row=1, col=column
            )
        _above(figure, column, "<br>".join(titles[column - 1]), size=12, x=0.5, xref="domain", yshift=16)
    sizes = ticks(run)
    figure.update_xaxes(
        type="log", title="size", tickvals=sizes, ticktext=[show(size) for size in sizes], tickangle=-40
    )
    figure.update_yaxes(type="log", dtick=1, exponentformat="none", minor={"showgrid": True, "gridcolor": "#f0f0f0"})
    figure.update_yaxes(title=label, col=1)
    figure.update_layout(
        template="plotly_white",
        height=560,
        margin={"l": 70, "r": 20, "t": 32 + 17 * max(map(len, titles)), "b": 80},
        legend={"orientation": "h", "y": -0.24, "x": 0.5, "xanchor": "center"},
        hovermode="closest",
    )
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})


def _trace(backend: str, curve: Sequence[Result], quantity: str, in_legend: bool) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[each.size for each in curve],
        y=[getattr(each, quantity) for each in curve],
        customdata=[[show(each.size), each.time_us, each.min_us, each.p99_us, each.busbw] for each in curve],
        hovertemplate="%{customdata[0]}: %{customdata[1]:.4g} us (min %{customdata[2]:.4g}, p99 %{customdata[3]:.4g})"
        "<br>busbw %{customdata[4]:.3g} GB/s",
        name=escape(backend),  # plotly reads names as a kind of HTML
        legendgroup=backend,
        showlegend=in_legend,
        mode="lines+markers",
        line={"color": colour(backend), "width": width(backend)},
        marker={"symbol": mark(backend)[1], "size": 7},
    )


def _mark_crossovers(figure: Any, run: Run, memory: str, column: int) -> None:
    """Draw a line for each crossover, with its number above the panel."""
    for number, (place, crossing) in enumerate(numbered(run, memory, NUMBER_WIDTH), start=1):
        figure.add_vline(x=crossing.nbytes, line={"color": "#888", "dash": "dot", "width": 1.2}, row=1, col=column)
        # on a log axis the position of an annotation, unlike that of a line, is the exponent
        _above(figure, column, str(number), size=11, x=math.log10(place))


def _above(figure: Any, column: int, text: str, size: int, x: float, xref: str = "", yshift: int = 0) -> None:
    """Write a text above a panel."""
    axis = f"x{column}" if column > 1 else "x"
    figure.add_annotation(
        text=text,
        x=x,
        xref=f"{axis} {xref}".rstrip(),
        y=1,
        yref="y domain",
        yshift=yshift,
        font={"size": size, "color": "#555"},
        showarrow=False,
        xanchor="center",
        yanchor="bottom",
    )


def _where(run: Run) -> str:
    """Return one line that describes the run: ranks and nodes, machine, MPI library, date."""
    machine = run.machine
    each = " each" * (run.nodes > 1 and not run.simulated)
    return f"{run.place()}; {machine['cpu']}, {machine['cores']} cores{each}; {machine['mpi']}; {run.date}"


def _table(run: Run) -> str:
    """Return the HTML table: for each size one row per backend; the fastest time of each size and memory is bold."""
    memories = [memory for memory in MEMORIES if run.of(memory)]
    top = "".join(f"<th colspan=5>{escape(TITLES[memory])}</th>" for memory in memories)
    names = "<th>time (us)</th><th>min</th><th>p99</th><th>busbw (GB/s)</th><th>#wrong</th>" * len(memories)
    rows = [f"<table><tr><th></th><th></th>{top}</tr><tr><th>size</th><th class=name>backend</th>{names}</tr>"]
    cells = {(each.size, each.backend, each.memory): each for each in run.results}
    fastest = {m: {size: min(found.values()) for size, found in times_of(run, m).items()} for m in memories}
    previous = None
    for size, backend in dict.fromkeys((each.size, each.backend) for each in run.results):
        new = size != previous
        previous = size
        dot = f"<span class=dot style='background:{colour(backend)}'></span>"
        row = f"<td>{show(size) if new else ''}</td><td class=name>{dot}{escape(backend)}</td>"
        for memory in memories:
            row += _cells(cells.get((size, backend, memory)), fastest[memory].get(size))
        rows.append(f"<tr{' class=first' if new else ''}>{row}</tr>")
    return "\n".join(rows) + "</table>"


def _cells(result: Result | None, fastest: float | None) -> str:
    if result is None:
        return "<td>–</td>" * 5
    best = " class=best" if result.time_us == fastest else ""
    wrong = "–" if result.wrong is None else f"<span class=bad>{result.wrong}</span>" if result.wrong else "0"
    times = f"<td{best}>{result.time_us:,.2f}</td><td>{result.min_us:,.2f}</td><td>{result.p99_us:,.2f}</td>"
    return f"{times}<td>{result.busbw:.3f}</td><td>{wrong}</td>"


def _machine(run: Run) -> str:
    facts = {
        **run.machine,
        "place": run.place(),
        "date": run.date,
        **{f"without {k}": v for k, v in run.skipped.items()},
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return f"<dl>{listed}<dt>command</dt><dd><code>{escape(run.command)}</code></dd></dl>"

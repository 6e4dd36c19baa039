"""The picture of a trace: a bar for each row of each rank, coloured by what it did. Needs matplotlib."""

import io

from benchmarks.showing.trace_file import OTHER, Slice, rows

MOST_ROWS = 64
COLOURS = {
    "data": "#8dd3c7",
    "compute": "#1f77b4",
    "agree": "#f4a6a6",
    "wait": "#d62728",
    "reduce": "#ff8c00",
    "communication": "#ff8c00",
    "update": "#2ca02c",
    "epoch": "#b39ddb",
    OTHER: "#bbbbbb",
}


def draw(slices: list[Slice], title: str, kind: str = "png") -> bytes:
    """The picture as the content of a file of a kind: "png", "svg", "pdf"."""
    from matplotlib.figure import Figure

    shown = dict(list(rows(slices).items())[:MOST_ROWS])
    figure = Figure(figsize=(12, 1.6 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    begin = slices[0].begin
    kinds = [kind for kind in COLOURS if any(each.kind == kind for each in slices)]
    for place, those in enumerate(shown.values()):
        for what in kinds:
            spans = [((each.begin - begin) / 1e3, (each.end - each.begin) / 1e3) for each in those if each.kind == what]
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=COLOURS[what], label=None if place else what)
    axes.set_yticks(range(len(shown)), [name(*row) for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.set_title(title, parse_math=False)  # a file may have any name
    figure.legend(loc="outside lower center", ncols=len(kinds), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    return content.getvalue()


def name(rank: int, row: int) -> str:
    """What a row is called: 0 is the program's own thread, others work in the background."""
    return f"rank {rank}" if row == 0 else f"rank {rank}, background"

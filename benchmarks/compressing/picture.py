"""The pictures of `benchmarks.compression`. Need matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.sizes import show

OURS, PEER, PLAIN = "#1f77b4", "#e377c2", "#7f7f7f"


def place(record: Mapping[str, Any]) -> str:
    """Return where a record was measured, in words."""
    rate = f" with links of {record['rate']}" if record["rate"] else ""
    nodes = record["node_sizes"]
    return f"{record['ranks']} ranks on {len(nodes)} host{'s' * (len(nodes) != 1)}{rate}"


def of_speed(record: Mapping[str, Any]) -> Any:
    """Return the picture of a record of `speed` as a matplotlib Figure: time, bytes and error of each method."""
    from matplotlib.figure import Figure

    costs = record["costs"]
    names = [cost["method"] for cost in costs]
    figure = Figure(figsize=(14, 1.8 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, title, values, text in (
        (axes[0], "milliseconds", [cost["median_ms"] for cost in costs], "{:.1f}"),
        (axes[1], "MB that a rank sends", [(cost["bytes_per_rank"] or 0) / 1e6 for cost in costs], "{:.2f}"),
        (axes[2], "relative error of one call", [cost["error"] for cost in costs], "{:.1e}"),
    ):
        _bars(axis, names, values, [text.format(value) for value in values], [OURS] * len(names))
        axis.set_title(title, fontsize=11)
    figure.suptitle(f"All-reduce of {show(record['bytes'])} of float32, {place(record)}", fontsize=12)
    return figure


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], texts: Sequence[str], colours: list[str]) -> None:
    bars = axis.barh(range(len(names)), values, 0.7, color=colours)
    axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.2)
    axis.set_axisbelow(True)
    axis.grid(True, axis="x", alpha=0.3)

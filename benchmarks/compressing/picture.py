"""The pictures of `benchmarks.compression`. Need matplotlib."""

from collections.abc import Mapping
from typing import Any

from benchmarks.lib.plot import bars
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
        bars(axis, names, values, [text.format(value) for value in values], color=OURS)
        axis.set_title(title, fontsize=11)
    figure.suptitle(f"All-reduce of {show(record['bytes'])} of float32, {place(record)}", fontsize=12)
    return figure


def of_training(record: Mapping[str, Any]) -> Any:
    """Return the picture of a record of `training` as a Figure: for each model the accuracy over the seconds, and the
    seconds to the target."""
    from matplotlib.figure import Figure

    models = record["models"]
    most = max(len(model["runs"]) for model in models)
    figure = Figure(figsize=(14, (2.2 + 0.25 * most) * len(models)), layout="constrained")
    for (curves, times), model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        runs = model["runs"]
        colours = [_colour(run["method"]) for run in runs]
        for run, colour in zip(runs, colours, strict=True):
            curves.plot(run["seconds"], run["accuracies"], ".-", color=colour, linewidth=0.8, markersize=3)
        curves.axhline(model["target"], color="black", linewidth=0.8, linestyle=":")
        curves.set(xscale="log", xlabel="seconds", ylabel="accuracy", ylim=(model["target"] - 0.3, 1))
        curves.set_title(f"{model['model']}, {model['parameters'] / 1e6:.1f} M parameters", fontsize=11)
        reached = [run["seconds_to_target"] for run in runs]
        texts = ["not reached" if each is None else f"{each:.1f}" for each in reached]
        bars(times, [run["method"] for run in runs], [each or 0 for each in reached], texts, color=colours)
        times.set_title(f"seconds to accuracy {model['target']:.3f}", fontsize=11)
    figure.suptitle(f"Training, {place(record)}. Blue: this library; pink: PyTorch's DDP with gloo", fontsize=12)
    return figure


def _colour(method: str) -> str:
    return PLAIN if method == "none" else PEER if method.startswith("ddp") else OURS

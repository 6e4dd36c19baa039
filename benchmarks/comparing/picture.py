"""The picture of a comparison of strategies. Needs matplotlib."""

import io
from collections.abc import Sequence
from typing import Any

from benchmarks.comparing.runs import Outcome

EQUAL, SLOW = "#1f77b4", "#d62728"
PANELS = (
    ("seconds an epoch", lambda each: each.seconds, "{:.2f}"),
    ("updates a second", lambda each: each.updates_per_second, "{:.0f}"),
    ("accuracy on test data", lambda each: each.accuracy, "{:.3f}"),
    ("MB an epoch through the busiest rank", lambda each: each.megabytes, "{:.1f}"),
    ("mean updates behind", lambda each: each.mean_staleness, "{:.1f}"),
)


def draw(outcomes: Sequence[Outcome], title: str, kind: str = "png") -> bytes:
    """The picture as the content of a file of a kind: "png", "svg", "pdf"."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.variant for each in outcomes))
    figure = Figure(figsize=(15, 2.2 + 0.85 * len(names)), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True).flat
    for axis, (label, value, text) in zip(axes, PANELS, strict=False):
        _bars(axis, outcomes, names, value, text)
        axis.set_title(label, fontsize=11)
    _histogram(axes[len(PANELS)], outcomes, names)
    figure.suptitle(title, fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    return content.getvalue()


def _bars(axis: Any, outcomes: Sequence[Outcome], names: list[str], value: Any, text: str) -> None:
    for slow, colour, label in ((False, EQUAL, "equal ranks"), (True, SLOW, "one slow rank")):
        some = [each for each in outcomes if each.slow == slow]
        places = [names.index(each.variant) + (0.2 if slow else -0.2) for each in some]
        bars = axis.barh(places, [value(each) for each in some], 0.38, color=colour, label=label)
        axis.bar_label(bars, [text.format(value(each)) for each in some], padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.18)
    axis.set_axisbelow(True)
    axis.grid(True, axis="x", alpha=0.3)


def _histogram(axis: Any, outcomes: Sequence[Outcome], names: list[str]) -> None:
    """How many gradients were so many updates behind, as a band of squares for each run."""
    most = max([len(each.staleness) for each in outcomes] or [0])
    for each in outcomes:
        place = names.index(each.variant) + (0.2 if each.slow else -0.2)
        total = max([*each.staleness, 1])
        for behind, count in enumerate(each.staleness):
            colour = SLOW if each.slow else EQUAL
            axis.barh(place, 0.95, 0.38, left=behind - 0.475, color=colour, alpha=count / total, linewidth=0)
    axis.set_xlim(-0.6, max(most, 1) - 0.4)
    axis.set_title("updates behind: the darker, the more gradients", fontsize=11)

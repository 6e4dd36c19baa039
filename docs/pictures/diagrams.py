"""All other pictures: layers, a training step, a call, a failure, slices, strategies."""

from collections.abc import Sequence
from typing import NamedTuple

from svg import FONT, HUES, INK, LINE, MONO, MUTED, RED, TEXT, Svg, mix

from trainers.state.backup import holders

RANKS = 4
HOUSES = {"your program": "#f3e3bf", "trainers": "#d6e6cf", "allreduce": "#cfdff0", "MPI": "#e2e2e2"}

# Layers, one below the other


class Layer(NamedTuple):
    """house: a key of HOUSES. file: where to read the code; "" for none."""

    house: str
    title: str
    file: str
    text: str


YOURS = "your program"
CALL = [
    Layer(YOURS, 'reduce(grads, op="mean")', "", "On every rank. The memory is from reduce.allocate(n)."),
    Layer("allreduce", "AllReduce.__call__", "allreduce/backend.py", "Looks up the call's record: dtype, length, op."),
    Layer("allreduce", "Executor.prepare", "allreduce/call/executor.py", "The ranks compare their calls."),
    Layer("allreduce", "Ring.reduce", "allreduce/algorithms/ring.py", "The algorithm. Each backend has its own."),
    Layer(
        "allreduce", "Transfer", "allreduce/transport/point_to_point.py", "Sends and receives chunks, and adds them."
    ),
    Layer("allreduce", "wait", "allreduce/transport/wait.py", "The stall detector (health/stall.py) sees every wait."),
    Layer("MPI", "Isend, Irecv, Test", "", "The messages contain only chunks of the gradients."),
]
STEP = [
    Layer(YOURS, "trainer.fit(x, y, epochs=10, batch_size=100)", "", "On every rank, with the same rows."),
    Layer("trainers", "Fit", "trainers/fit/loop.py", "Takes this rank's rows of the batch; calls callbacks."),
    Layer("trainers", "Step.compute", "trainers/strategies/step.py", "The replica computes the gradients."),
    Layer("trainers", "Replica", "trainers/replicas/", "Writes gradients into the backend's buffer. Uses no MPI."),
    Layer("trainers", "Step", "trainers/strategies/step.py", "Averages the buffer; the owners update."),
    Layer("allreduce", "AllReduce", "allreduce/backend.py", "Averages the buffer in place (see the other picture)."),
    Layer("trainers", "Replica", "trainers/replicas/", "Updates its parameters from the same buffer."),
]


def draw_layers(layers: list[Layer], title: str) -> Svg:
    width, height, gap = 500, 76, 20
    drawing = Svg(width, len(layers) * (height + gap) - gap + 4, title)
    for number, layer in enumerate(layers):
        y = 2 + number * (height + gap)
        drawing.box(2, y, width - 4, height, HOUSES[layer.house], stroke="#555")
        drawing.text(16, y + 23, layer.title, 15.5, INK, font_weight="bold")
        drawing.text(16, y + 44, layer.text, 14.5, INK)
        drawing.text(16, y + 64, layer.file or layer.house, 13.5, "#3d4a5c", font_family=MONO if layer.file else FONT)
        if number + 1 < len(layers):
            drawing.arrow(40, y + height, 40, y + height + gap)
    return drawing


# A training step


def draw_training_step() -> Svg:
    """Columns are ranks; from the batch to the update."""
    width, left, top = 116, 8, 30
    drawing = Svg(left + RANKS * width + 4, 470, "One training step: shards, backward, buckets, average, update")
    drawing.text(left, 16, "one global batch of 100 rows", 14)
    spans = [(rank * 25, rank * 25 + 24) for rank in range(RANKS)]
    colours = [mix(hue, 0.35) for hue in HUES]
    for rank, (first, last) in enumerate(spans):
        x = left + rank * width
        middle = x + width / 2 - 4
        drawing.box(x, top, width, 34, colours[rank], rx=0, stroke="#fff")
        drawing.middle(x + width / 2, top + 17, f"rows {first}-{last}", 13)
        drawing.arrow(middle, top + 36, middle, top + 60)
        drawing.box(x, top + 62, width - 8, 76, mix("#7f8ea3", 0.3), stroke="#777")
        drawing.middle(middle, top + 76, f"rank {rank}", 13.5, font_weight="bold")
        drawing.middle(middle, top + 97, "forward,", 13)
        drawing.middle(middle, top + 116, "backward", 13)
        drawing.arrow(middle, top + 140, middle, top + 164)
        for bucket in range(3):
            y = top + 166 + bucket * 28
            drawing.box(x, y, width - 8, 26, colours[rank], stroke="none")
            drawing.middle(middle, y + 13, f"bucket {bucket}", 12.5)
        drawing.arrow(middle, top + 252, middle, top + 272)
    band = left + RANKS * width - 8
    drawing.box(left, top + 274, band - left, 40, HOUSES["allreduce"], stroke="#555")
    drawing.middle((left + band) / 2, top + 294, "all-reduce: average each bucket over all ranks, in place", 14)
    for rank in range(RANKS):
        x = left + rank * width
        middle = x + width / 2 - 4
        drawing.arrow(middle, top + 316, middle, top + 338)
        drawing.box(x, top + 340, width - 8, 28, HUES[2], stroke="none")
        drawing.middle(middle, top + 354, "average", 13, "#fff")
        drawing.arrow(middle, top + 370, middle, top + 390)
        drawing.box(x, top + 392, width - 8, 44, mix("#7f8ea3", 0.3), stroke="#777")
        drawing.middle(middle, top + 405, "update", 13)
        drawing.middle(middle, top + 423, "same bits", 12.5)
    return drawing


class Span(NamedTuple):
    """A bar on a lane: from `start` to `stop`, in pixels from the left edge."""

    lane: int
    start: float
    stop: float
    text: str
    colour: str


def draw_lanes(title: str, names: Sequence[str], spans: Sequence[Span], width: float, height: float = 0) -> Svg:
    """Draw bars on lanes, time from left to right. height: 0 for just the lanes."""
    left, row = 72, 36
    drawing = Svg(left + width, height or len(names) * row + 42, title)
    drawing.text(0, 15, title, 14.5, font_weight="bold")
    for lane, name in enumerate(names):
        y = 28 + lane * row
        drawing.text(0, y + 20, name, 12.5)
        end = left + max(span.stop for span in spans if span.lane == lane)
        drawing.path(f"M{left} {y + 15}H{end}", LINE, stroke_width=1)
    for lane, start, stop, text, colour in spans:
        y = 28 + lane * row
        drawing.box(left + start, y, stop - start - 2, 30, colour, stroke="none")
        drawing.middle(left + (start + stop) / 2 - 1, y + 15, text, 12.5)
    return drawing


COMPUTE, REDUCE, UPDATE, WAIT = mix("#7f8ea3", 0.4), mix("#3b78c3", 0.45), mix("#3f9b6b", 0.5), mix("#d8852b", 0.4)


def overlap() -> list[Svg]:
    names = ("compute", "reduce")
    without = [
        Span(0, 0, 70, "forward", COMPUTE),
        Span(0, 70, 190, "backward", COMPUTE),
        Span(1, 190, 310, "all gradients", REDUCE),
        Span(0, 310, 370, "update", UPDATE),
    ]
    with_thread = [
        Span(0, 0, 70, "forward", COMPUTE),
        Span(0, 70, 190, "backward", COMPUTE),
        Span(1, 110, 150, "0", REDUCE),
        Span(1, 150, 190, "1", REDUCE),
        Span(1, 190, 230, "2", REDUCE),
        Span(0, 230, 290, "update", UPDATE),
    ]
    return [
        draw_lanes("Reduce after backward", names, without, 374),
        draw_lanes("Reduce buckets 0, 1, 2 during backward", names, with_thread, 374),
    ]


# A call


def draw_fingerprints() -> Svg:
    """The fingerprint table, in a call that agrees and in one that does not."""
    drawing = Svg(500, 206, "The fingerprint table: the ranks compare 64 bits before each call")
    for column, (title, codes, verdict, colour) in enumerate(
        (
            ("call 6", ("9f3a", "9f3a", "9f3a", "9f3a"), "equal: do the work", "#3f9b6b"),
            ("call 7", ("51c0", "51c0", "e77b", "51c0"), "DisagreementError", RED),
        )
    ):
        x = 70 + column * 226
        drawing.text(x, 16, title, 14.5, font_weight="bold")
        for rank, code in enumerate(codes):
            y = 28 + rank * 34
            odd = code != codes[0]
            drawing.box(x, y, 120, 30, mix(RED if odd else "#3b78c3", 0.3), stroke="none")
            drawing.middle(x + 60, y + 15, code, 14, font_family=MONO)
            if not column:
                drawing.text(0, y + 20, f"rank {rank}", 13)
        drawing.arrow(x + 60, 166, x + 60, 182)
        drawing.text(x, 199, verdict, 14, colour, font_weight="bold")
    return drawing


# A rank fails


def draw_failure() -> Svg:
    """Lanes of four ranks, of which one fails."""
    names = [f"rank {rank}" for rank in range(RANKS)]
    spans: list[Span] = []
    for rank in range(RANKS):
        spans.append(Span(rank, 0, 84, "step 7", COMPUTE))
        if rank == 2:
            spans.append(Span(rank, 84, 112, "", COMPUTE))
            continue
        spans.append(Span(rank, 84, 150, "step 8", COMPUTE))
        spans.append(Span(rank, 150, 226, "survivors", WAIT))
        spans.append(Span(rank, 226, 296, "load state", UPDATE))
        spans.append(Span(rank, 296, 386, "step 8 again", COMPUTE))
    drawing = draw_lanes("Rank 2 fails in step 8", names, spans, 390, 212)
    x, y = 72 + 118, 28 + 2 * 36 + 15
    drawing.path(f"M{x - 8} {y - 8}L{x + 8} {y + 8}M{x - 8} {y + 8}L{x + 8} {y - 8}", RED, stroke_width=3.5)
    drawing.text(x + 16, y + 5, "killed", 13, RED, font_weight="bold")
    drawing.path(f"M{72 + 149} 24V174", RED, stroke_dasharray="4 3")
    drawing.text(72 + 149, 192, "RankLostError on all other ranks", 13, RED)
    return drawing


# Sharded updates and backups


def sharded() -> list[Svg]:
    """Memory of each rank: parameters, gradients, optimizer state."""
    made = []
    for title, text, divided in (
        ("Replicated", "Every rank updates everything.", False),
        ("Sharded", "Every rank updates one slice.", True),
    ):
        drawing = Svg(330, 60 + RANKS * 32, f"{title}. {text}")
        drawing.text(0, 15, title, 14.5, font_weight="bold")
        drawing.text(0, 33, text, 12.5, MUTED)
        for column, name in enumerate(("parameters", "gradients", "Adam's state")):
            drawing.middle(54 + column * 92 + 42, 50, name, 12.5, TEXT)
        for rank in range(RANKS):
            y = 60 + rank * 32
            drawing.text(0, y + 19, f"rank {rank}", 12.5)
            for column in range(3):
                for part in range(RANKS):
                    x = 54 + column * 92 + part * 21
                    kept = not divided or column < 2 or part == rank
                    fill = (HUES[part] if part == rank or not divided else mix(HUES[part], 0.3)) if kept else "none"
                    dash = {} if kept else {"stroke_dasharray": "2 3"}
                    drawing.box(x, y, 20, 27, fill, rx=2, stroke="none" if kept else LINE, **dash)
        made.append(drawing)
    return made


def draw_backups() -> Svg:
    """Two nodes of two ranks: each rank's slice, and the backup that it holds."""
    nodes = (0, 0, 1, 1)
    holder = holders(nodes)
    drawing = Svg(470, 210, "Backups: each slice has a copy on a rank of another node")
    for node in range(2):
        x = 4 + node * 244
        drawing.box(x, 4, 218, 196, "none", rx=8)
        drawing.text(x + 12, 26, f"node {'AB'[node]}", 14, font_weight="bold")
    place = {rank: (16 + nodes[rank] * 244, 40 + (rank % 2) * 78) for rank in range(RANKS)}
    for rank, (x, y) in place.items():
        drawing.text(x, y + 14, f"rank {rank}", 13)
        drawing.box(x, y + 22, 92, 34, HUES[rank], stroke="none")
        drawing.middle(x + 46, y + 39, f"slice {rank}", 13, "#fff")
        source = holder.index(rank)
        drawing.box(x + 100, y + 22, 94, 34, mix(HUES[source], 0.35), stroke=HUES[source], stroke_dasharray="4 3")
        drawing.middle(x + 147, y + 39, f"backup {source}", 13)
    return drawing


# Strategies


def strategies() -> list[Svg]:
    """Which ranks hold the parameters (filled), and what goes between ranks."""
    made = []
    for title, text in (
        ("mirrored", "All average gradients."),
        ("central_storage", "One rank updates for all."),
        ("parameter_server", "Servers update slices."),
        ("spare_replicas", "The late one is left out."),
    ):
        drawing = Svg(170, 170, f"{title}. {text}")
        drawing.text(0, 15, title, 14, font_family=MONO, font_weight="bold")
        drawing.text(0, 33, text, 12.5, MUTED)
        top, bottom = 70, 146
        if title == "parameter_server":
            for server, x in enumerate((50, 114)):
                for worker in (20, 82, 144):
                    drawing.arrow(worker, bottom - 15, x + 0.2 * (worker - x), top + 18)
                disc(drawing, x, top, "s" + str(server), HUES[0])
            for worker, x in enumerate((20, 82, 144)):
                disc(drawing, x, bottom, f"w{worker}")
        elif title == "central_storage":
            for rank, x in enumerate((20, 82, 144), start=1):
                drawing.arrow(x, bottom - 15, 82 + 0.14 * (x - 82), top + 18)
                disc(drawing, x, bottom, str(rank))
            disc(drawing, 82, top, "0", HUES[0])
        else:
            places = ((30, top), (134, top), (134, bottom), (30, bottom))
            late = title == "spare_replicas"
            for a, b in ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)):
                if not (late and 2 in (a, b)):
                    drawing.path(f"M{places[a][0]} {places[a][1]}L{places[b][0]} {places[b][1]}")
            for rank, (x, y) in enumerate(places):
                slow = late and rank == 2
                disc(drawing, x, y, "late" if slow else str(rank), HUES[1] if slow else HUES[0])
        made.append(drawing)
    return made


def disc(drawing: Svg, x: float, y: float, text: str, fill: str = "") -> None:
    colour = fill or mix("#7f8ea3", 0.35)
    drawing.parts.append(f'<circle cx="{x}" cy="{y}" r="18" fill="{colour}" stroke="#777"/>')
    drawing.middle(x, y, text, 12.5, "#fff" if fill else INK)

"""The algorithms in steps, on four ranks.

The steps come from the functions that the backends use, so the pictures show what the code does.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from svg import HUES, INK, MUTED, TEXT, Svg, mix

from allreduce.algorithms.ring import plan
from allreduce.arrays.chunks import binomial, halvings

RANKS = 4


State = list[list[frozenset[int]]]  # by rank and chunk: the ranks whose values are in the sum


@dataclass
class Frame:
    """One step. state: after the step. moves: (from rank, to rank, chunk): what was sent in this step."""

    title: str
    text: str
    state: State
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    workers: dict[int, int] = field(default_factory=dict)  # chunk -> the rank that works on it in all arrays
    nodes: bool = False  # ranks 0 and 1 are one node, 2 and 3 the other


def own_values() -> State:
    return [[frozenset([rank])] * RANKS for rank in range(RANKS)]


def after(state: State, moves: list[tuple[int, int, int]], combine: bool) -> State:
    """Return the state after all moves at once."""
    made = [list(row) for row in state]
    for source, to, chunk in moves:
        made[to][chunk] = state[source][chunk] | (state[to][chunk] if combine else frozenset())
    return made


def ring() -> list[Frame]:
    plans = [plan(rank, RANKS, 1, 2 * RANKS - 1) for rank in range(RANKS)]
    frames = [Frame("Before", "Each rank has its own gradients.", own_values())]
    for number, (sending, receiving) in enumerate(pairwise(range(2 * RANKS - 1)), start=1):
        moves = [(rank, (rank + 1) % RANKS, plans[rank][sending].chunk) for rank in range(RANKS)]
        assert all(plans[to][receiving].chunk == chunk for _, to, chunk in moves)
        combine = plans[0][receiving].combines
        phase = "reduce-scatter" if combine else "all-gather"
        text = "Add the chunk of the rank before." if combine else "Copy the chunk of the rank before."
        frames.append(Frame(f"Step {number}: {phase}", text, after(frames[-1].state, moves, combine), moves))
    return frames


def halving_doubling() -> list[Frame]:
    array = np.arange(RANKS)
    steps = [list(halvings(array, RANKS, rank)) for rank in range(RANKS)]
    frames = [Frame("Before", "Each rank has its own gradients.", own_values())]
    for number in range(2):
        moves = [(rank, steps[rank][number][0], int(c)) for rank in range(RANKS) for c in steps[rank][number][2]]
        text = ("Swap halves with the nearest rank; add.", "Swap quarters, two ranks away; add.")[number]
        state = after(frames[-1].state, moves, combine=True)
        frames.append(Frame(f"Step {number + 1}: reduce-scatter", text, state, moves))
    for number in range(2):
        parts = [steps[rank][1 - number] for rank in range(RANKS)]
        moves = [(rank, parts[rank][0], int(chunk)) for rank in range(RANKS) for chunk in parts[rank][1]]
        text = ("Swap finished quarters; copy.", "Swap finished halves; copy.")[number]
        state = after(frames[-1].state, moves, combine=False)
        frames.append(Frame(f"Step {number + 3}: all-gather", text, state, moves))
    return frames


def hierarchical_copy() -> list[Frame]:
    frames = [Frame("Before", "Ranks 0, 1 are node A; ranks 2, 3 node B.", own_values())]
    halves = ((0, 1), (2, 3))  # of the buffer, by node rank

    def step(title: str, text: str, moves: list[tuple[int, int, int]], combine: bool) -> None:
        frames.append(Frame(title, text, after(frames[-1].state, moves, combine), moves))

    moves = [(rank ^ 1, rank, chunk) for rank in range(RANKS) for chunk in halves[rank % 2]]
    step("1: inside nodes", "Each rank sums its half, in shared memory.", moves, True)
    for number in (1, 2):  # the ring of the two ranks that have the same half
        moves = []
        for rank in range(RANKS):
            place = plan(rank // 2, 2, 1, 3)[number - 1].chunk
            moves.append((rank, (rank + 2) % RANKS, halves[rank % 2][place]))
        text = ("Add a quarter from the other node.", "Copy the other quarter.")[number - 1]
        step(f"{number + 1}: across nodes", text, moves, number == 1)
    moves = [(rank ^ 1, rank, chunk) for rank in range(RANKS) for chunk in halves[1 - rank % 2]]
    step("4: inside nodes", "Copy the other half from shared memory.", moves, False)
    for frame in frames:
        frame.nodes = True
    return frames


def shared() -> list[Frame]:
    everyone = frozenset(range(RANKS))
    workers = {chunk: chunk for chunk in range(RANKS)}
    before = own_values()
    summed = [[everyone] * RANKS, *before[1:]]
    finished = [[everyone] * RANKS] * RANKS
    return [
        Frame("Before", "All arrays are in memory that all ranks map.", before),
        Frame("Barrier, then sum", "Rank r sums chunk r of all arrays.", summed, workers=workers),
        Frame("Copy, then barrier", "Rank r writes chunk r into all arrays.", finished, workers=workers),
    ]


def reduce_to_one() -> list[Frame]:
    frames = [Frame("Before", "Each rank has its own gradients.", own_values())]
    moves = [(rank, 0, chunk) for rank in range(1, RANKS) for chunk in range(RANKS)]
    everyone = frozenset(range(RANKS))
    frames.append(
        Frame("Step 1: reduce", "The root adds all, in rank order.", after_root(frames[0].state, everyone), moves)
    )
    has = [0]
    for number in (2, 3):  # the tree: each rank that has the sum sends it to its next child, the farthest first
        pairs = []
        for rank in has:
            missing = [child for child in binomial(rank, 0, RANKS)[1] if child not in has]
            pairs += [(rank, child) for child in missing[:1]]
        moves = [(source, child, chunk) for source, child in pairs for chunk in range(RANKS)]
        has += [child for _, child in pairs]
        text = " and ".join(f"{source} to {child}" for source, child in pairs)
        frames.append(Frame(f"Step {number}: copy", f"Rank {text}.", after(frames[-1].state, moves, False), moves))
    return frames


def after_root(state: State, everyone: frozenset[int]) -> State:
    return [[everyone] * RANKS, *state[1:]]


CELL, ROW, LEFT, TOP = 49, 34, 54, 46


def draw_frame(frame: Frame) -> Svg:
    drawing = Svg(
        LEFT + RANKS * CELL + 42,
        TOP + RANKS * ROW + 8 * frame.nodes + 24 * bool(frame.workers),
        f"{frame.title}. {frame.text}",
    )
    drawing.text(0, 15, frame.title, 14.5, font_weight="bold")
    drawing.text(0, 34, frame.text, 12.5, MUTED)
    sent = {(source, chunk) for source, _, chunk in frame.moves}
    received = {(to, chunk) for _, to, chunk in frame.moves}
    for rank, row in enumerate(frame.state):
        y = TOP + rank * ROW + (8 if frame.nodes and rank > 1 else 0)
        drawing.text(0, y + 21, f"rank {rank}", 12.5)
        for chunk, ranks in enumerate(row):
            x = LEFT + chunk * CELL
            full = len(ranks) == RANKS
            fill = HUES[chunk] if full else mix(HUES[chunk], 0.12 + 0.14 * len(ranks))
            drawing.box(x + 1.5, y + 1.5, CELL - 3, ROW - 3, fill, stroke="none")
            if (rank, chunk) in received:
                drawing.box(x + 1.5, y + 1.5, CELL - 3, ROW - 3, stroke=TEXT, stroke_width=2.4)
            elif (rank, chunk) in sent:
                drawing.box(x + 1.5, y + 1.5, CELL - 3, ROW - 3, stroke=TEXT, stroke_dasharray="3 3")
            label = "\N{GREEK CAPITAL LETTER SIGMA}" if full else "+".join(map(str, sorted(ranks)))
            drawing.middle(x + CELL / 2, y + ROW / 2, label, 12.5 if len(ranks) < 3 else 11.5, "#fff" if full else INK)
    draw_arcs(drawing, frame)
    for chunk, rank in frame.workers.items():
        x = LEFT + chunk * CELL
        drawing.box(x + 1.5, TOP, CELL - 3, RANKS * ROW, stroke=TEXT, stroke_width=2)
        drawing.middle(x + CELL / 2, TOP + RANKS * ROW + 12, f"rank {rank}", 12, TEXT)
    return drawing


def draw_arcs(drawing: Svg, frame: Frame) -> None:
    """Draw an arc to the right of the cells for each pair of ranks that communicates."""
    x = LEFT + RANKS * CELL + 3
    pairs = sorted({(source, to) for source, to, _ in frame.moves})
    for source, to in pairs:
        both = (to, source) in pairs
        if both and source > to:
            continue
        shift = 8 if frame.nodes else 0
        y, to_y = (TOP + (rank + 0.5) * ROW + (shift if rank > 1 else 0) for rank in (source, to))
        y, to_y = y + 3 * (to_y > y) - 3 * (to_y < y), to_y - 3 * (to_y > y) + 3 * (to_y < y)
        bend = x + 14 + 9 * abs(source - to)
        drawing.path(f"M{x:g} {y:g}C{bend:g} {y:g} {bend:g} {to_y:g} {x + 5:g} {to_y:g}", TEXT)
        drawing.head(x, to_y, -1, 0, TEXT)
        if both:
            drawing.head(x, y, -1, 0, TEXT)


ALGORITHMS = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "hierarchical_copy": hierarchical_copy,
    "shared": shared,
    "reduce_to_one": reduce_to_one,
}

"""Tables of a text for each rank, in a few lines however many ranks there are. No MPI here."""

from collections.abc import Collection, Iterable, Sequence

ONE_BY_ONE = 8  # up to this number of ranks, each rank has a line
LINES = 18  # of a table of more ranks; one more line has the others
RANGES = 10  # runs of consecutive ranks in a line


def ranges(ranks: Iterable[int]) -> list[list[int]]:
    """Return [first, last] of each run of consecutive ranks."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as text: "0-2, 5"."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges(numbers))


def listed(ranks: Collection[int]) -> str:
    """Format ranks as text: "rank 3", "ranks 0-2, 5"; of many runs only the first."""
    shown = [rank for first, last in ranges(ranks)[:RANGES] for rank in range(first, last + 1)]
    more = f" and {len(ranks) - len(shown)} more" if len(shown) < len(ranks) else ""
    return f"rank{'s' * (len(ranks) > 1)} {spans(shown)}{more}"


def table(texts: Sequence[str]) -> str:
    """Format the text of each rank, by rank, as at most LINES + 1 lines. Many ranks with the same text share a line.

    Of more texts the rarest and the most frequent one are shown, because a rare text is usually the mistake.
    """
    if len(texts) <= ONE_BY_ONE:
        return "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    holders: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        holders.setdefault(text, []).append(rank)
    order = sorted(holders, key=lambda text: (len(holders[text]), holders[text]))
    shown = {*order[: LINES - 1], order[-1]}
    lines = [f"  {listed(ranks)}: {text}" for text, ranks in holders.items() if text in shown]
    rest = [rank for text, ranks in holders.items() if text not in shown for rank in ranks]
    return "\n".join(lines + ([f"  {listed(rest)}: {len(holders) - len(shown)} other texts"] if rest else []))

"""Tables in columns, for people."""

from collections.abc import Collection, Sequence


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table: the heads, behind "# ", and a line for each row.

    left: the numbers of the columns that are aligned left; the others are aligned right.
    """
    texts = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(f"{text:{'<' if number in left else '>'}{width}}" for number, (text, width) in cells))
    return [f"{mark}{line}".rstrip() for mark, line in zip(["# ", *["  "] * len(rows)], lines, strict=True)]

"""A drawing, and the colours of all drawings."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

TEXT = "var(--pst-color-text-base, #222832)"
MUTED = "var(--pst-color-text-muted, #48566b)"
LINE = "var(--pst-color-border, #9ca4af)"
INK = "#14202e"  # on a coloured area
RED = "#d6453d"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"
HUES = ("#3470bd", "#b8661a", "#2f8458", "#9058ad")  # of chunks 0 to 3


def mix(colour: str, share: float) -> str:
    """Return `share` of a colour, the rest white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)


class Svg:
    """A drawing: shapes are appended by its methods."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none", **more: object) -> None:
        """more: attributes, with "_" for "-"."""
        more = {"stroke": LINE, "rx": 4} | more
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{attributes}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 14, fill: str = TEXT, anchor: str = "start", **more: object
    ) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{attributes} '
            f'fill="{fill}">{escape(text)}</text>'
        )

    def middle(self, x: float, y: float, text: str, size: float = 14, fill: str = INK, **more: object) -> None:
        """Write text with its middle at (x, y)."""
        self.text(x, y + size * 0.35, text, size, fill, "middle", **more)

    def path(self, path: str, stroke: str = MUTED, **more: object) -> None:
        more = {"stroke_width": 1.6, "fill": "none"} | more
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.parts.append(f'<path d="{path}" stroke="{stroke}"{attributes}/>')

    def head(self, x: float, y: float, dx: float, dy: float, fill: str = MUTED) -> None:
        """Draw an arrow's head with its tip at (x, y) in the direction (dx, dy), a unit vector."""
        back, side = 7.5, 3.6
        a = x - back * dx - side * dy, y - back * dy + side * dx
        b = x - back * dx + side * dy, y - back * dy - side * dx
        self.parts.append(f'<path d="M{x:g} {y:g}L{a[0]:g} {a[1]:g}L{b[0]:g} {b[1]:g}Z" fill="{fill}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = MUTED, **more: object) -> None:
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        dx, dy = (to_x - x) / length, (to_y - y) / length
        self.path(f"M{x:g} {y:g}L{to_x - 6 * dx:g} {to_y - 6 * dy:g}", colour, **more)
        self.head(to_x, to_y, dx, dy, colour)

    def __str__(self) -> str:
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" font-family="{FONT}">'
        )
        return "\n".join([start, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>"])

    def save(self, path: Path) -> None:
        path.with_suffix(".svg").write_text(f"{self}\n", encoding="utf-8")


def save_row(path: Path, title: str, pictures: Sequence[Svg]) -> None:
    """Write an .html file of pictures side by side. path: without the suffix."""
    style = "display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1.2rem 1.6rem; margin: 1.2rem 0"
    lines = [f'<div role="group" aria-label="{escape(title)}" style="{style}">', *map(str, pictures), "</div>", ""]
    path.with_suffix(".html").write_text("\n".join(lines), encoding="utf-8")

"""What all pictures share: colours for a light and a dark page, simple shapes, and `show` for a notebook.

Standard library only; whole numbers only, so that the same picture is the same bytes everywhere.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape

PAD = 16  # between the edge of a picture and what is drawn
# A page shrinks a picture, to 0.6 of its size and less. A gap of 1 would then be there or not by chance.
GAP = 2  # between neighbouring cells
LEAST_PITCH = 5  # cells that are nearer than this have no gap at all: they are one bar

# Okabe-Ito colours, for a light and a dark page. The background is the picture's own: inside an
# <img> it can't see the page's, and a colour that is right on both doesn't exist.
STYLE = {
    "bg": ("fill", "#fff", "#111"),
    "ink": ("fill", "#333", "#ddd"),
    "mute": ("fill", "#6a6a6a", "#9aa0a6"),
    "warn": ("fill", "#9c3f77", "#e39ac4"),
    "on": ("fill", "#111", "#111"),
    "grid": ("fill", "#eee", "#232323"),
    "prefill": ("fill", "#d55e00", "#e8751a"),
    "hatch": ("stroke", "#f2a469", "#a84c00"),
    "decode": ("fill", "#0072b2", "#3d9bd6"),
    "tick": ("stroke", "#0072b2", "#3d9bd6"),
    "stream": ("fill", "#9cc7e0", "#27516b"),
    "unused": ("fill", "#ececec", "#2a2a2a"),
    "stall": ("fill", "#f7e3ef", "#4a2843"),
    "wait": ("stroke", "#767676", "#9aa0a6"),
    "first": ("fill", "#009e73", "#35cf9f"),
    "end": ("fill", "#333", "#ddd"),
    "cancel": ("stroke", "#333", "#ddd"),
    "preempt": ("fill", "#9c3f77", "#e39ac4"),
    "brace": ("stroke", "#9c3f77", "#e39ac4"),
    "limit": ("stroke", "#333", "#ddd"),
    "free": ("fill", "#ececec", "#2a2a2a"),
    "kept": ("stroke", "#8a8a8a", "#8a8a8a"),
    "cellgrid": ("fill", "#fff", "#111"),
    "write": ("fill", "#222", "#fff"),
    "part": ("fill", "#d0d0d0", "#d0d0d0"),
    "mesh": ("stroke", "#222", "#111"),
    "shared": ("fill", "#222", "#111"),
    "queue": ("fill", "#bdbdbd", "#585858"),
}
# One colour per owner, in turn; a label says which owner. Dark letters are legible on each.
OWNERS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7")
STYLE |= {f"own{number}": ("fill", colour, colour) for number, colour in enumerate(OWNERS)}
CRISP = ("wait", "brace", "limit")  # lines that are a pixel wide whatever the size of the picture; all else is smoothed


def css() -> str:
    """One rule a kind. The names begin with lm- since a style inline in a page applies to all of it."""
    rules = [
        "svg:root{color-scheme:light dark}.lm-t{font:11px system-ui,sans-serif}.lm-h{font-size:15px;font-weight:600}",
        ".lm-b{font-weight:600}.lm-m{text-anchor:middle}.lm-e{text-anchor:end}",
    ]
    for name, (what, light, dark) in STYLE.items():
        only = "fill:none;stroke-width:1;" if what == "stroke" else ""
        rules.append(f".lm-{name}{{{only}{what}:{light};{what}:light-dark({light},{dark})}}")
    rules.append(",".join(f".lm-{name}" for name in CRISP) + "{shape-rendering:crispEdges;vector-effect:non-scaling-stroke}")
    rules.append(".lm-tick,.lm-cancel{stroke-width:2}.lm-limit{stroke-dasharray:5 3}.lm-s{font-size:9px}.lm-l{font-size:13px}")
    rules.append(".lm-first,.lm-preempt{stroke:#fff;stroke:light-dark(#fff,#111);stroke-width:2;paint-order:stroke}")
    return "".join(rules)


def box(left: int, right: int, top: int, height: int) -> str:
    """One subpath; it is never thinner than a pixel."""
    return f"M{left} {top}h{max(1, right - left)}v{height}H{left}z"


def diamond(x: int, y: int, r: int) -> str:
    return f"M{x} {y - r}l{r} {r}l-{r} {r}l-{r}-{r}z"


def triangle(x: int, y: int, r: int) -> str:
    return f"M{x - r} {y - r}h{2 * r}l-{r} {2 * r}z"


def cross(x: int, y: int, r: int) -> str:
    return f"M{x - r} {y - r}l{2 * r} {2 * r}m0-{2 * r}l-{2 * r} {2 * r}"


def hatch(left: int, right: int, top: int, height: int, pitch: int = 6) -> str:
    """Slanted lines inside a box: the second code of a colour. Nothing in a box too small for them."""
    slant = height // 2
    count = (right - left - slant - 1) // pitch + 1
    if count < 1 or height < 6:
        return ""
    first = left + (right - left - slant - (count - 1) * pitch) // 2
    return f"M{first} {top + height}" + f"l{slant}-{height}m{pitch - slant} {height}" * (count - 1) + f"l{slant}-{height}"


def text_width(text: str, size: int = 11) -> int:
    """Pixels, on the safe side: fonts differ."""
    return len(text) * size * 63 // 100


def short(text: str, width: int, size: int = 11) -> str:
    """The text, cut to a width in pixels."""
    while text_width(text, size) > width:
        text = text[:-2] + "…"
    return text


def wrapped(parts: list[str], width: int, join: str = " · ") -> list[str]:
    """Parts of a sentence in as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and text_width(lines[-1] + join + part) <= width:
            lines[-1] += join + part
        else:
            lines.append(short(part, width))
    return lines


@dataclass(frozen=True)
class Area:
    """A rectangle of pixels."""

    left: int
    right: int
    top: int
    bottom: int

    @property
    def size(self) -> int:
        return (self.right - self.left) * (self.bottom - self.top)

    def label(self, text: str) -> Area:
        """What a text takes in the middle of the area."""
        x, y, half = (self.left + self.right) // 2, (self.top + self.bottom) // 2, text_width(text) // 2 + 3
        return Area(x - half, x + half, y - 7, y + 7)

    def is_apart(self, other: Area) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return beside or self.bottom <= other.top or other.bottom <= self.top


def areas(rows: list[tuple[int, int, tuple[int, int] | None]], room: int) -> list[Area]:
    """Rectangles, at least `room` wide, inside the intervals of neighbouring rows.

    rows: (top, bottom, (left, right) of its interval or None), from the top down.
    """
    found: list[Area] = []
    area = None
    for top, bottom, interval in rows:
        left, right = interval or (0, 0)
        if area and min(right, area.right) - max(left, area.left) >= room:
            area = Area(max(left, area.left), min(right, area.right), area.top, bottom)
            continue
        if area:
            found.append(area)
        area = Area(left, right, top, bottom) if right - left >= room else None
    return [*found, area] if area else found


class Svg:
    """Collects the parts of one picture."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[str] = []

    def path(self, kind: str, shapes: list[str]) -> None:
        """All shapes of one kind in one element; nothing when there are none."""
        data = "".join(shapes)
        if data:
            self.parts.append(f'<path class="lm-{kind}" d="{data}"/>')

    def dashed(self, kind: str, places: list[int], top: int, bottom: int, dash: int, gap: int) -> None:
        """Vertical lines at `places`, an element each: as one path, dashed lines are slow to paint."""
        lines = "".join(f'<path d="M{x} {top}V{bottom}"/>' for x in places)
        if lines:
            self.parts.append(f'<g class="lm-{kind}" stroke-dasharray="{dash} {gap}">{lines}</g>')

    def text(self, x: int, y: int, text: str, classes: str = "ink") -> None:
        """classes: a colour, then b bold, s small, l large, m middle or e end of the text at x."""
        names = " ".join(f"lm-{name}" for name in classes.split())
        self.parts.append(f'<text x="{x}" y="{y}" class="{names}">{escape(text, quote=False)}</text>')

    def page(self, height: int, title: str, desc: str) -> str:
        """The whole file; title and desc are for the ear."""
        width = self.width
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" class="lm-t"><title>{escape(title, quote=False)}</title><desc>{escape(desc, quote=False)}</desc>'
            f'<style>{css()}</style><rect class="lm-bg" width="{width}" height="{height}"/>{"".join(self.parts)}</svg>'
        )


class Picture:
    """An SVG for a notebook: an <img> with alt text, which a notebook that isn't trusted shows as well."""

    def __init__(self, svg: str, alt: str) -> None:
        self.svg, self.alt = svg, alt

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        data = base64.b64encode(self.svg.encode()).decode()
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.alt)}">'
        return {"text/html": image, "text/plain": self.alt}

    def __repr__(self) -> str:
        return self.alt


def show(svg: str, alt: str) -> Picture:
    """The picture as the value of a notebook cell."""
    return Picture(svg, alt)

"""Measurements as bars, lying, with a line from the lowest to the highest run: a small SVG, the same bytes for the same numbers."""

from __future__ import annotations

from typing import NamedTuple

from ..lab.svg import PAD, Svg, box, text_width

ROW, HEAD, BAR = 20, 30, 12  # pixels: from bar to bar, of a group's title, of a bar
ROOM = 330  # of the longest bar


class Bar(NamedTuple):
    """A row: its label, its value with the text that says it, and the lowest and the highest run, where there are several."""

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def bars(title: str, groups: dict[str, list[Bar]], kind: str = "decode") -> str:
    """Groups of bars, one above the other, all to the same scale. `kind` is one of the colours of lab.svg."""
    rows = [bar for group in groups.values() for bar in group]
    longest = max(max(bar.value, bar.high or 0.0) for bar in rows) or 1.0
    left = PAD + 8 + max(text_width(bar.label) for bar in rows)
    svg = Svg(left + ROOM + 3 * PAD + max(text_width(bar.text) for bar in rows))
    svg.text(PAD, 26, title, "ink h")
    shapes, lines, y = [], [], 36

    def x(value: float) -> int:
        return left + round(ROOM * value / longest)

    for name, group in groups.items():
        svg.text(PAD, y + 18, name, "ink b")
        y += HEAD
        for bar in group:
            svg.text(left - 8, y + BAR - 2, bar.label, "ink e")
            shapes.append(box(left, x(bar.value), y, BAR))
            end = x(bar.value)
            if bar.low is not None and bar.high is not None:
                lines.append(f"M{x(bar.low)} {y + BAR // 2}H{x(bar.high)}M{x(bar.low)} {y + 2}v{BAR - 4}M{x(bar.high)} {y + 2}v{BAR - 4}")
                end = max(end, x(bar.high))
            svg.text(end + 8, y + BAR - 2, bar.text, "ink")
            y += ROW
    svg.path(kind, shapes)
    svg.path("cancel", lines)
    said = "; ".join(f"{name}: " + ", ".join(f"{bar.label} {bar.text}" for bar in group) for name, group in groups.items())
    return svg.page(y + PAD, title, said)

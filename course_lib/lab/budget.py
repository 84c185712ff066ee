"""The token budget of every step: what decode took, what prefill took, what was left unused."""

from __future__ import annotations

from ..trace import Trace
from .axis import Axis, check_way, draw_axis
from .story import Story, joined_lines, plural, read, seconds
from .svg import PAD, Svg, box, hatch, short, text_width, wrapped

HEIGHT = 160  # of the bars in the picture


def draw_budget(svg: Svg, axis: Axis, top: int, height: int) -> None:
    """Tokens per step, stacked: decode, prefill, unused."""
    bottom, budget = top + height, axis.story.budget
    shapes: dict[str, list[str]] = {"unused": [], "prefill": [], "hatch": [], "decode": []}
    for left, right, decode, prefill in _bars(axis):
        low = bottom - _share(decode, budget, height)
        high = min(low, bottom - _share(decode + prefill, budget, height)) if prefill else low
        if bottom > low:
            shapes["decode"].append(box(left, right, low, bottom - low))
        if low > high:
            shapes["prefill"].append(box(left, right, high, low - high))
            shapes["hatch"] += _hatched(left, right, high, low)
        if high > top:
            shapes["unused"].append(box(left, right, top, high - top))
    for kind, subpaths in shapes.items():
        svg.path(kind, subpaths)


def _hatched(left: int, right: int, top: int, bottom: int) -> list[str]:
    """Slanted lines, in pieces that are flat enough to look alike in every bar."""
    return [hatch(left, right, y, min(12, bottom - y)) for y in range(top, bottom, 12) if right - left >= 9]


def _bars(axis: Axis) -> list[tuple[int, int, int, int]]:
    """(left, right, decode, prefill) per step; steps thinner than a pixel share one, as their mean."""
    bars: list[tuple[int, int, int, int]] = []
    decodes = prefills = steps = left = right = 0  # of the bar that isn't finished
    for (start, end), (decode, prefill) in zip(axis.cells, axis.story.used, strict=True):
        if steps and start > left:
            bars.append((left, right, decodes // steps, prefills // steps))
            decodes = prefills = steps = 0
        if not steps:
            left = start
        right, decodes, prefills, steps = end, decodes + decode, prefills + prefill, steps + 1
    return [*bars, (left, right, decodes // steps, prefills // steps)] if steps else bars


def _share(tokens: int, budget: int, height: int) -> int:
    """Pixels of the budget's height; a token is never nothing."""
    return max(1, tokens * height // budget) if tokens and budget else 0


def budget(trace: Trace, *, by: str = "time", width: int = 960, title: str | None = None) -> str:
    """Tokens of every step against the limit, as an SVG: decode below, prefill above it, the rest unused.

    by     "time" or "step", as in `timeline`
    width  pixels
    """
    if width < 320:
        raise ValueError(f"width={width} is too small: it must be at least 320 pixels")
    check_way(by)
    story = read(trace, by=by)
    svg, y = Svg(width), PAD
    if title:
        svg.text(PAD, y + 14, short(title, width - 2 * PAD, 15), "ink h")
        y += 24
    for line in wrapped(_headline(story), width - 2 * PAD):
        svg.text(PAD, y + 9, line, "mute")
        y += 18
    y = _legend(svg, y + 6) + 22
    limit = str(story.budget)
    left = PAD + max(text_width(limit), text_width("steps")) + 10
    axis = Axis(story, by, left, width - PAD, story.duration)
    draw_axis(svg, axis, y, y + HEIGHT)
    draw_budget(svg, axis, y, HEIGHT)
    svg.path("limit", [f"M{left} {y}H{axis.right}"])
    for tokens, level in ((0, HEIGHT), (story.budget // 2, HEIGHT // 2), (story.budget, 0)):
        if tokens or level == HEIGHT:
            svg.text(left - 6, y + level + 4, str(tokens), "mute e")
    return svg.page(y + HEIGHT + 34, title or "Token budget", describe_budget(story))


def _legend(svg: Svg, y: int) -> int:
    x = PAD
    for kind, words in (("decode", "decode"), ("prefill", "prefill"), ("unused", "unused"), ("limit", "limit")):
        if x > PAD and x + 22 + text_width(words) > svg.width - PAD:
            x, y = PAD, y + 18
        if kind == "limit":
            svg.path(kind, [f"M{x} {y + 5}h16"])
        else:
            svg.path(kind, [box(x, x + 16, y, 10)])
        if kind == "prefill":
            svg.path("hatch", [hatch(x, x + 16, y, 10)])
        svg.text(x + 22, y + 9, words)
        x += 22 + text_width(words) + 18
    return y + 14


def _percent(part: int, whole: int) -> int:
    return (200 * part + whole) // (2 * whole) if whole else 0


def _headline(story: Story) -> list[str]:
    decode, prefill = (sum(used[i] for used in story.used) for i in (0, 1))
    steps = len(story.used)
    whole = steps * story.budget
    full = sum(decode + prefill >= story.budget for decode, prefill in story.used) if story.budget else 0
    shares = _percent(decode, whole), _percent(prefill, whole)
    return [
        f"limit {plural(story.budget, 'token')} a step",
        f"decode {shares[0]} %, prefill {shares[1]} %, unused {100 - sum(shares)} %",
        f"full in {full} of {plural(steps, 'step')}",
    ]


def budget_alt(trace: Trace) -> str:
    """What `budget` shows, in two sentences with its numbers."""
    return describe_budget(read(trace))


def describe_budget(story: Story) -> str:
    if not story.used:
        return "Token budget: no step has run yet."
    limit, shares, full = _headline(story)
    largest = max(range(len(story.used)), key=lambda place: sum(story.used[place]))
    decode, prefill = story.used[largest]
    took = f" ({seconds(story.duration)})" if story.unit == "s" else ""
    return (
        f"Tokens of {plural(len(story.used), 'step')}{took}, {limit}: {shares}; {full}. "
        f"The largest step, number {story.numbers[largest]}, computes {plural(prefill, 'prefill token')} and "
        f"{plural(decode, 'decode token')}."
    )


def budget_text(trace: Trace, *, width: int = 100, height: int = 8, unicode: bool = False) -> str:
    """The same in characters: a column per step or per few steps, D decode, P prefill, '.' unused."""
    story = read(trace)
    margin = max(len(str(story.budget)), len("step"))
    columns = max(1, min(width - margin - 2, len(story.used)))
    size = max(1, -(-len(story.used) // columns))
    groups = [story.used[i : i + size] for i in range(0, len(story.used), size)]
    letters = ("█", "▒", "·") if unicode else ("D", "P", ".")
    rows = []
    for level in range(height, 0, -1):
        cells = ""
        for group in groups:
            decode, prefill = (sum(used[i] for used in group) / len(group) for i in (0, 1))
            line = (level - 0.5) * story.budget / height  # a cell shows what reaches its middle
            is_decode = decode > line or (level == 1 and decode > 0)
            cells += letters[0] if is_decode else letters[1] if decode + prefill > line else letters[2]
        label = {height: str(story.budget), 1: "0"}.get(level, "")
        rows.append(f"{label:>{margin}} |{cells}")
    numbers = f"{story.numbers[0]} to {story.numbers[-1]}" if story.numbers else "none"
    per = f", {size} a column" if size > 1 else ""
    legend = f"{letters[0]} decode   {letters[1]} prefill   {letters[2]} unused of the limit"
    return "\n".join([*joined_lines(_headline(story), width, ", "), legend, *rows, f"{'step':>{margin}}  {numbers}{per}"])

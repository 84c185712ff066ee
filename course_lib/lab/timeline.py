"""The timeline of a trace as an SVG: requests down, time or steps across, the token budget below.

`story.read` says what happened, `_Axis` and `_Panel` say where it goes (pixels), the rest draws.
Pure functions of the trace: the same trace gives the same bytes. The picture holds no id, no
script and no fraction, so that it can stand inline, in an <img>, or be drawn anew for every move
of a slider. Each kind of thing is one <path>, whatever the number of requests.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

from ..trace import Trace
from .story import Life, Story, describe, grouped, headline, read, round_steps, round_times, round_up, seconds
from .svg import Svg, box, cross, diamond, short, text_width, triangle

# ---- where it goes: seconds and requests -> pixels ------------------------------------------------

PAD = 16
TALL, LOW = 28, 3  # from row to row, at most and at least
MAX_ROWS_HEIGHT, MAX_ROWS = 680, 160
READABLE = 13  # a bar that can hold text
VISIBLE = 12  # a gap that the eye takes for one
MAX_TICKS = 15_000  # with more tokens than this, bars stand for them
BUDGET_HEIGHT = 52
COLUMN = 84  # of the two columns of numbers at the right


class _Axis:
    """Seconds -> pixels between left and right; by step, every step is equally wide.

    starts, ends   where each step lies
    cells          the same, with a gap to the next where there is room for one
    marks          where a step's tokens are drawn: by time at their arrival, which is the end of
                   the step; by step over the whole step
    has_ticks      by time, there is room for a tick per token
    join           without ticks: marks nearer than this many pixels become one bar
    """

    def __init__(self, story: Story, by: str, left: int, right: int, span: float) -> None:
        self.story, self.by, self.left, self.right, self.span = story, by, left, right, span
        self._scale = (right - left) / span if span else 0.0
        places = range(len(story.ends))
        self.starts = [self._at(t) for t in (story.starts if by == "time" else places)]
        self.ends = [self._at(t) for t in story.ends] if by == "time" else [self._at(i + 1) for i in places]
        widths = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        typical = sorted(widths)[len(widths) // 2] if widths else 0
        least = 3 if typical > 4 else max(3, 2 * typical + 1)  # among narrow steps, only a wide one is set apart
        self.cells = [
            (start, end - 1 if width > least else max(end, start + 1))
            for start, end, width in zip(self.starts, self.ends, widths, strict=True)
        ]
        self.marks = self.cells if by == "step" else [(end - 2, end) for end in self.ends]
        num_tokens = sum(decode for decode, _ in story.used)
        self.has_ticks = by == "time" and typical >= 3 and num_tokens <= MAX_TICKS
        self.join = 1 if by == "step" else 2 * typical + 3

    def _at(self, units: float) -> int:
        return self.left + int(units * self._scale + 0.5)

    def px(self, t: float) -> int:
        """The pixel of a moment."""
        if self.by == "time":
            return self._at(t)
        starts, ends = self.story.starts, self.story.ends
        place = bisect_right(starts, t) - 1
        if place < 0:
            return self.left
        length = ends[place] - starts[place]
        return self._at(place + (min(1.0, (t - starts[place]) / length) if length else 1))

    def ticks(self) -> list[tuple[int, str]]:
        """(pixel, label) at round times, or at round step numbers."""
        room = (self.right - self.left) // 72
        if self.by == "time":
            return [(self._at(t), label) for t, label in round_times(self.span, room)]
        steps = round_steps(self.story.numbers, room)
        return [((self.starts[place] + self.ends[place]) // 2, label) for place, label in steps]


@dataclass
class _Row:
    """One line of the picture: the top and the height of its bars."""

    life: Life
    top: int
    bar: int

    @property
    def middle(self) -> int:
        return self.top + self.bar // 2


def _make_rows(story: Story, top: int, room: int) -> list[_Row]:
    """As high as there is room for; a prompt that stands out keeps a row that can be read."""
    lives = grouped(story.lives, MAX_ROWS)
    pitch = max(LOW, min(TALL, room // max(1, len(lives))))
    rows = []
    for life in lives:
        height = max(pitch, 18) if life.prompt_tokens > story.long_prompt else pitch
        rows.append(_Row(life, top, height - max(1, height // 5)))
        top += height
    return rows


@dataclass
class _Panel:
    """One timeline: what is drawn, and where. Vertical pixels from the top of the picture."""

    story: Story
    axis: _Axis
    title: str
    top: int
    rows: list[_Row]
    budget_top: int
    stall: float  # gaps of at least this many seconds count as a stall
    table: bool  # numbers at the right of each row

    @property
    def bottom(self) -> int:
        return self.budget_top + BUDGET_HEIGHT


def _layout(stories: list[Story], titles: list[str], by: str, width: int) -> list[_Panel]:
    """The panels, one above the other, on one common axis."""
    labels = [life.label for story in stories for life in grouped(story.lives, MAX_ROWS)]
    left = PAD + min(max((text_width(label) for label in [*labels, by]), default=0), 130) + 10
    has_table = width >= 640 and all(len(story.lives) * READABLE <= MAX_ROWS_HEIGHT for story in stories)
    right = width - PAD - (2 * COLUMN if has_table else 0)
    span = max((len(s.ends) if by == "step" else s.duration) for s in stories)
    worst = max((story.stalled.stall for story in stories if story.stalled), default=0.0) or inf
    stall = max(worst / 2, 3 * max(story.typical_gap for story in stories))
    panels, top = [], 0
    for story, title in zip(stories, titles, strict=True):
        rows_top = top + (40 if title else 0) + 28
        rows = _make_rows(story, rows_top, MAX_ROWS_HEIGHT // len(stories))
        rows_end = rows[-1].top + rows[-1].bar if rows else rows_top
        panels.append(_Panel(story, _Axis(story, by, left, right, span), title, top, rows, rows_end + 34, stall, has_table))
        top = panels[-1].bottom + 40
    return panels


def _runs(intervals, join: int) -> list[tuple[int, int]]:
    """Intervals of pixels, in order; those less than `join` apart become one."""
    runs: list[tuple[int, int]] = []
    left, right = None, None
    for start, end in intervals:
        if right is not None and start - right < join:
            right = max(right, end)
            continue
        if right is not None:
            runs.append((left, right))
        left, right = start, end
    return runs if right is None else [*runs, (left, right)]


def _without(line: tuple[int, int], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pieces of a line that are left when holes, in order, are cut out."""
    left, right = line
    pieces = []
    for start, end in holes:
        if left < start < right:
            pieces.append((left, start))
        left = max(left, end)
    return [*pieces, (left, right)] if left < right else pieces


def _stalls(panel: _Panel, life: Life) -> list[tuple[int, int]]:
    """Where a stream visibly stands still: (left, right) of every long gap between two tokens."""
    axis, stalls = panel.axis, []
    for before, after in life.gaps_from(panel.stall):
        right = axis.marks[after][0]
        if right - axis.ends[before] >= VISIBLE:
            stalls.append((axis.ends[before], right))
    return stalls


# ---- how it looks: pixels -> SVG ------------------------------------------------------------------

# From the back to the front.
KINDS = ("stall", "stream", "wait", "prefill", "decode", "tick", "end", "first", "preempt", "cancel")
LEGEND = {
    "decode": "decode: one token",
    "prefill": "prefill chunk",
    "wait": "waiting",
    "first": "first token",
    "end": "finished",
    "preempt": "preempted",
    "cancel": "cancelled",
    "stall": "stream stalls",
}


def _shapes(panel: _Panel) -> dict[str, list[str]]:
    """The subpaths of every kind, for all rows."""
    shapes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    axis = panel.axis
    for row in panel.rows:
        life, top, bar = row.life, row.top, row.bar
        radius = max(2, min(5, bar // 3))
        touching = 1 if bar >= READABLE else 2  # in a low row, neighbours become one
        shapes["stall"] += [box(*stall, top, bar) for stall in _stalls(panel, life)]
        waits = _runs(((axis.px(start), axis.px(end) - 1) for start, end, _ in life.waits), touching)
        shapes["wait"] += [box(*run, top, bar - 1) for run in waits]
        if len(life.tokens) > 1 and bar > 3:
            line = (axis.ends[life.tokens[0]], axis.ends[life.tokens[-1]])
            shapes["stream"] += [box(*piece, row.middle, 1) for piece in _without(line, waits)]
        prefills = (axis.cells[place] for place, _, _ in life.prefills)
        shapes["prefill"] += [box(*run, top, bar) for run in _runs(prefills, 1)]
        if axis.has_ticks:
            shapes["tick"].append(_ticks([axis.ends[place] - 1 for place in life.decodes], row))
        else:
            inset = max(1, bar // 5) if bar > 3 else 0
            runs = _runs((axis.marks[place] for place in life.decodes), max(axis.join, touching))
            shapes["decode"] += [box(*run, top + inset, bar - 2 * inset) for run in runs]
        if life.tokens:
            shapes["first"].append(diamond(axis.ends[life.tokens[0]], row.middle, radius))
        shapes["preempt"] += [triangle(axis.starts[place], row.middle, max(3, radius)) for place in life.preempted]
        if life.end is not None:
            x = axis.px(life.end)
            if life.is_cut:
                shapes["cancel"].append(cross(x, row.middle, max(3, radius)))
            else:
                shapes["end"].append(box(x, x + 2, top, bar))
    return shapes


def _ticks(places: list[int], row: _Row) -> str:
    """A vertical stroke at each x: relative moves, since there may be thousands."""
    if not places:
        return ""
    inset = row.bar // 5
    height = row.bar - 2 * inset
    moves = (f"m{after - before}-{height}v{height}" for before, after in zip(places, places[1:], strict=False))
    return f"M{places[0]} {row.top + inset}v{height}{''.join(moves)}"


def _draw_panel(svg: Svg, panel: _Panel) -> set[str]:
    """Returns the kinds that the legend has to explain."""
    story, shapes = panel.story, _shapes(panel)
    if panel.title:
        _draw_title(svg, panel.top, panel.title)
        _draw_headline(svg, panel.top + 33, story)
    _draw_axis(svg, panel)
    for kind, subpaths in shapes.items():
        svg.path(kind, subpaths)
    _draw_row_texts(svg, panel)
    _draw_stall(svg, panel)
    _draw_budget(svg, panel)
    return {"decode" if kind == "tick" else kind for kind, subpaths in shapes.items() if any(subpaths)}


def _draw_title(svg: Svg, top: int, title: str) -> None:
    svg.text(PAD, top + 14, short(title, svg.width - 2 * PAD, 15), "ink h")


def _draw_headline(svg: Svg, y: int, story: Story) -> None:
    """As much of it as there is room for; the longest gap is the last to go."""
    parts = headline(story)
    while len(parts) > 1 and text_width(" · ".join(parts)) > svg.width - 2 * PAD:
        del parts[0]
    svg.text(PAD, y, short(" · ".join(parts), svg.width - 2 * PAD), "mute")


def _draw_axis(svg: Svg, panel: _Panel) -> None:
    axis = panel.axis
    top = panel.rows[0].top if panel.rows else panel.budget_top
    ticks = axis.ticks()
    svg.path("grid", [box(x, x + 1, top, panel.bottom + 4 - top) for x, _ in ticks])
    for x, label in ticks:
        half = text_width(label) // 2
        svg.text(max(axis.left - 6 + half, min(axis.right + PAD - half, x)), panel.bottom + 18, label, "mute m")
    svg.text(axis.left - 10, panel.bottom + 18, axis.by, "mute e")


def _draw_row_texts(svg: Svg, panel: _Panel) -> None:
    """Labels at the left, token ranges and reasons in the bars, numbers at the right."""
    axis = panel.axis
    for row in _labelled(panel.rows):
        svg.text(axis.left - 10, row.middle + 4, short(row.life.label, axis.left - PAD - 10), "ink e")
    for row in panel.rows:
        if row.bar < READABLE:
            continue
        _draw_bar_texts(svg, axis, row)
        if panel.table:
            _draw_numbers(svg, panel, row)
    if panel.table and panel.rows:
        for column, words in enumerate(("first token", "longest gap")):
            svg.text(axis.right + (column + 1) * COLUMN, panel.rows[0].top - 10, words, "mute e")


def _draw_bar_texts(svg: Svg, axis: _Axis, row: _Row) -> None:
    life, radius = row.life, 6
    if life.size > 1:
        return
    for place, first, last in life.prefills:
        left, right = axis.cells[place]
        is_marked = life.tokens[:1] == [place]
        text = f"{first}–{last}" if last > first else str(first)
        _text_in_bar(svg, left, right - radius * is_marked, row, text, "on m")
    marks = [axis.starts[place] for place in life.preempted]
    for start, end, reason in life.waits:
        left, right = axis.px(start), axis.px(end)
        cuts = [left, *(x for x in marks if left <= x <= right), right]
        room = max(zip(cuts, cuts[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        _text_in_bar(svg, room[0] + radius, room[1] - radius, row, reason, "mute m")


def _draw_numbers(svg: Svg, panel: _Panel, row: _Row) -> None:
    life, right = row.life, panel.axis.right
    if life.ttft is not None:
        svg.text(right + COLUMN, row.middle + 4, seconds(life.ttft), "ink e")
    if life.gaps:
        is_stall = life.stall >= panel.stall
        svg.text(right + 2 * COLUMN, row.middle + 4, seconds(life.stall), "warn e b" if is_stall else "ink e")


def _text_in_bar(svg: Svg, left: int, right: int, row: _Row, text: str, classes: str) -> None:
    """In the middle, smaller where that helps, or not at all."""
    for size, smaller in ((11, ""), (9, " s")):
        if text and text_width(text, size) + 4 <= right - left:
            svg.text((left + right) // 2, row.middle + 4, text, classes + smaller)
            return


def _labelled(rows: list[_Row]) -> list[_Row]:
    """The rows whose label is shown: all, or the high ones and then every so many-th."""
    chosen: list[_Row] = []
    every = round_up(-(-24 // min((row.bar + 1 for row in rows), default=24)))
    usual = min((row.bar for row in rows), default=0)
    candidates = sorted(enumerate(rows), key=lambda pair: (pair[1].bar == usual, pair[0] % every, pair[0]))
    for index, row in candidates:
        is_wanted = usual >= 10 or row.bar > usual or index % every == 0
        if is_wanted and all(abs(row.middle - other.middle) >= 12 for other in chosen):
            chosen.append(row)
    return sorted(chosen, key=lambda row: row.top)


def _draw_stall(svg: Svg, panel: _Panel) -> None:
    """A brace over the longest gap of all, with its length: the one thing to see."""
    life, axis = panel.story.stalled, panel.axis
    if life is None or not panel.story.has_stall:
        return
    before, after = life.gaps_from(life.stall)[0]
    left, right, y = axis.ends[before], axis.ends[after], panel.rows[0].top - 4
    least = life.stall * 9 / 10
    also = sum(any(a < after and b > before for a, b in other.gaps_from(least)) for other in panel.story.lives)
    who = f"{also} streams" if also > 1 else short(life.label, 130)
    text = f"{who}: no token for {seconds(life.stall)}"
    half = text_width(text, 12) // 2
    middle = max(PAD + half, min(axis.right - half, (left + right) // 2))
    svg.path("brace", [f"M{left} {y}v-5H{right}v5"])
    svg.text(middle, y - 10, text, "warn m b")


def _draw_budget(svg: Svg, panel: _Panel) -> None:
    """Tokens per step, stacked: decode, prefill, unused."""
    story, top, bottom = panel.story, panel.budget_top, panel.bottom
    shapes: dict[str, list[str]] = {"unused": [], "prefill": [], "decode": []}
    for left, right, decode, prefill in _bars(panel):
        low = bottom - _share(decode, story.budget)
        high = min(low, bottom - _share(decode + prefill, story.budget))
        for kind, y0, y1 in (("decode", low, bottom), ("prefill", high, low), ("unused", top, high)):
            if y1 > y0:
                shapes[kind].append(box(left, right, y0, y1 - y0))
    for kind, subpaths in shapes.items():
        svg.path(kind, subpaths)
    words = f"tokens per step (grey: unused of {story.budget})"
    left = panel.axis.left if text_width(words) < svg.width - PAD - panel.axis.left else PAD
    svg.text(left, top - 6, words, "mute")


def _bars(panel: _Panel) -> list[tuple[int, int, int, int]]:
    """(left, right, decode, prefill) per step; steps thinner than a pixel share one, as their mean."""
    bars, pending, left = [], [], None
    for (start, end), used in zip(panel.axis.cells, panel.story.used, strict=True):
        if pending and start > left:
            bars.append(_mean_bar(left, pending))
            pending = []
        if not pending:
            left = start
        pending.append((end, used))
    return bars + ([_mean_bar(left, pending)] if pending else [])


def _mean_bar(left: int, steps) -> tuple[int, int, int, int]:
    decode, prefill = (sum(used[i] for _, used in steps) // len(steps) for i in (0, 1))
    return left, steps[-1][0], decode, prefill


def _share(tokens: int, budget: int) -> int:
    """Pixels of the budget's height; a token is never nothing."""
    return max(1, tokens * BUDGET_HEIGHT // budget) if tokens and budget else 0


def _draw_legend(svg: Svg, words: dict[str, str], stories: list[Story], y: int) -> int:
    """One entry per kind that is there, wrapped to the width; returns the bottom."""
    x = PAD
    for kind, text in words.items():
        if kind == "wait":
            reasons = sorted({reason for story in stories for reason in story.reasons})
            text = ": ".join([text, ", ".join(reasons[:3]) + (" …" if len(reasons) > 3 else "")][: 1 + bool(reasons)])
        if x > PAD and x + 22 + text_width(text) > svg.width - PAD:
            x, y = PAD, y + 18
        svg.path(kind, [SWATCHES.get(kind, lambda x, y: box(x, x + 16, y, 10))(x, y)])
        svg.text(x + 22, y + 9, text)
        x += 22 + text_width(text, 10) + 18
    return y + 14


SWATCHES = {
    "decode": lambda x, y: box(x + 5, x + 7, y, 10) + box(x + 10, x + 12, y, 10),
    "end": lambda x, y: box(x + 10, x + 12, y - 1, 12),
    "first": lambda x, y: diamond(x + 10, y + 5, 5),
    "preempt": lambda x, y: triangle(x + 10, y + 5, 5),
    "cancel": lambda x, y: cross(x + 10, y + 5, 4),
}


def _picture(stories: list[Story], title: str, titles: list[str], by: str, width: int, desc: str) -> str:
    """A title, the legend, and a panel per story; a story that is alone needs no title of its own."""
    if width < 320:
        raise ValueError(f"width={width} is too small: it must be at least 320 pixels")
    if by not in ("time", "step"):
        raise ValueError(f"by={by!r} is not known: it must be 'time' or 'step'")
    svg, y = Svg(width), PAD
    if title:
        _draw_title(svg, y, title)
        y += 24
    if len(stories) == 1:
        _draw_headline(svg, y + 9, stories[0])
        y += 24
    body = Svg(width)
    panels = _layout(stories, titles, by, width)
    kinds = set().union(*(_draw_panel(body, panel) for panel in panels))
    y = _draw_legend(svg, {kind: words for kind, words in LEGEND.items() if kind in kinds}, stories, y) + 10
    svg.parts += [f'<g transform="translate(0 {y})">', *body.parts, "</g>"]
    return svg.page(y + panels[-1].bottom + 34, title or "Timeline", desc)


def timeline(trace: Trace, *, by: str = "time", width: int = 960, title: str | None = None,
             labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """One run as an SVG.

    by      "time": a mark where each token arrives, so that a pause is a gap;
            "step": every step equally wide
    width   pixels; the height follows from the number of requests
    labels  request -> what to call it
    """
    story = read(trace, labels)
    return _picture([story], title or "", [""], by, width, describe(story))


def compare(a: Trace, b: Trace, *, titles: tuple[str, str] = ("A", "B"), by: str = "time", width: int = 960,
            title: str | None = None, labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """The same requests under two settings, one above the other, on the same axis."""
    stories = [read(a, labels), read(b, labels)]
    desc = " ".join(f"{name}: {describe(story)}" for name, story in zip(titles, stories, strict=True))
    return _picture(stories, title or "", list(titles), by, width, desc)

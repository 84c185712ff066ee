"""The timeline of a trace as an SVG: requests down, time or steps across, the token budget below.

`story.read` says what happened, `_Axis` and `_Panel` say where it goes (pixels), the rest draws.
Pure functions of the trace: the same trace gives the same bytes. The picture holds no id, no
script and no fraction, so that it can stand inline, in an <img>, or be drawn anew for every move
of a slider. Each kind of thing is one <path>, whatever the number of requests; only a crowd's tokens
are one per step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import NamedTuple

from ..trace import Trace
from .axis import Axis, check_way, draw_axis, joined
from .budget import draw_budget
from .story import Life, Story, describe, grouped, headline, read, round_up
from .svg import GAP, LEAST_PITCH, PAD, Area, Svg, areas, box, cross, diamond, hatch, short, text_width, triangle

# ---- where it goes: seconds and requests -> pixels ------------------------------------------------

TALL, LOW = 28, 3  # from row to row, at most and at least
ROOM, ROOM_OF_TWO = 480, 200  # for the rows of a picture; of each panel when two are compared
READABLE = 13  # a bar that can hold text
RADIUS = 6  # of a mark at the edge of a bar, with its halo
HATCHED = 8  # a bar that can hold a hatch or an outline
VISIBLE = 12  # a gap that the eye takes for one
CROWD = 8  # rows that share their strokes: ten times quicker to paint, in Chromium, but an element for each step
BUDGET_HEIGHT = 52
COLUMN = 84  # of the two columns of numbers at the right


@dataclass
class _Row:
    """One line of the picture: the top and the height of its bars."""

    life: Life
    top: int
    bar: int
    has_gap: bool  # to the row below

    @property
    def middle(self) -> int:
        return self.top + self.bar // 2


def _make_rows(story: Story, lives: list[Life], top: int, room: int) -> list[_Row]:
    """As high as there is room for; a prompt that stands out keeps a row that can be read."""
    pitch = max(LOW, min(TALL, room // max(1, len(lives))))
    rows = []
    for life in lives:
        height = max(pitch, 18) if life.prompt_tokens > story.long_prompt else pitch
        gap = max(GAP, height // 5) if height >= LEAST_PITCH else 0
        rows.append(_Row(life, top, height - gap, gap > 0))
        top += height
    return rows


@dataclass
class _Panel:
    """One timeline: what is drawn, and where. Vertical pixels from the top of the picture."""

    story: Story
    axis: Axis
    title: str
    top: int
    rows: list[_Row]
    budget_top: int
    stall: float  # gaps of at least this count as a stall, in the story's unit
    table: bool  # numbers at the right of each row

    @property
    def bottom(self) -> int:
        return self.budget_top + BUDGET_HEIGHT


def _layout(stories: list[Story], titles: list[str], by: str, width: int, room: int) -> list[_Panel]:
    """The panels, one above the other, on one common axis."""
    lives = [grouped(story, room // LOW) for story in stories]
    labels = [life.label for panel in lives for life in panel]
    left = PAD + min(max((text_width(label) for label in [*labels, "steps"]), default=0), 130) + 10
    has_table = width >= 640 and all(len(story.lives) * (READABLE + 3) <= room for story in stories)
    right = width - PAD - (2 * COLUMN if has_table else 0)
    span = max(story.duration for story in stories)
    worst = max((story.stalled.stall for story in stories if story.stalled), default=0.0) or inf
    stall = max(worst / 2, 3 * max(story.typical_gap for story in stories))
    panels, top = [], 0
    for story, shown, title in zip(stories, lives, titles, strict=True):
        rows_top = top + (40 if title else 0) + 28
        rows = _make_rows(story, shown, rows_top, room)
        rows_end = rows[-1].top + rows[-1].bar if rows else rows_top
        panels.append(_Panel(story, Axis(story, by, left, right, span), title, top, rows, rows_end + 34, stall, has_table))
        top = panels[-1].bottom + 40
    return panels


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
    for before, after in panel.story.long_gaps(life, panel.stall):
        right = axis.marks[after][0]
        if right - axis.ends[before] >= VISIBLE:
            stalls.append((axis.ends[before], right))
    return stalls


# ---- how it looks: pixels -> SVG ------------------------------------------------------------------

# From the back to the front.
KINDS = ("stall", "stream", "queue", "wait", "prefill", "hatch", "decode", "end", "first", "preempt", "cancel")
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


class _Label(NamedTuple):
    """The range of tokens in a chunk's bar, and the pixels from left to right that it takes: no hatch is under it."""

    room: tuple[int, int]
    text: str
    classes: str


def _label_chunks(panel: _Panel) -> list[dict[int, _Label]]:
    """Per row, place -> label, of the chunks that have room for one. Large letters, if that costs none of them its label."""
    large, usual = ([_labels_of(panel.axis, row, *how) for row in panel.rows] for how in ((13, "on m l"), (11, "on m")))
    return large if sum(map(len, large)) == sum(map(len, usual)) else usual


def _labels_of(axis: Axis, row: _Row, size: int, classes: str) -> dict[int, _Label]:
    life, labels = row.life, {}
    if row.bar < READABLE or life.size > 1:
        return labels
    for place, first, last in life.prefills:
        left, right = axis.cells[place]
        right -= RADIUS if life.tokens and life.tokens[0][0] == place else 0
        text = f"{first}–{last}" if last > first else str(first)
        middle, half = (left + right) // 2, text_width(text, size) // 2 + 2
        if 2 * half <= right - left:
            labels[place] = _Label((middle - half, middle + half), text, classes)
    return labels


def _shapes(panel: _Panel, labels: list[dict[int, _Label]]) -> dict[str, list[str]]:
    """The subpaths of every kind, for all rows."""
    shapes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    axis = panel.axis
    for row, ranges in zip(panel.rows, labels, strict=True):
        life, top, bar = row.life, row.top, row.bar
        radius = max(2, min(5, bar // 3))
        touching = 1 if bar >= READABLE else GAP + 1  # in a low row, neighbours become one
        shapes["stall"] += [box(*stall, top, bar) for stall in _stalls(panel, life)]
        waits = joined(((axis.px(start), axis.px(end) - 1) for start, end, _ in life.waits), touching)
        if bar >= HATCHED:
            shapes["wait"] += [box(*run, top, bar - 1) for run in waits]
        else:  # outlines of low rows would be stripes
            shapes["queue"] += [box(left, right + 1, top, bar) for left, right in waits]
        if life.tokens and row.has_gap:
            line = (axis.ends[life.tokens[0][0]], axis.ends[life.tokens[-1][1]])
            shapes["stream"] += [box(*piece, row.middle, 1) for piece in _without(line, waits)]
        chunks = [axis.cells[place] for place, _, _ in life.prefills]
        shapes["prefill"] += [box(*run, top, bar) for run in joined(chunks, 1)]
        if bar >= HATCHED:
            shapes["hatch"] += [
                hatch(*piece, top, bar)
                for place, _, _ in life.prefills
                for piece in _without(axis.cells[place], [ranges[place].room] if place in ranges else [])
            ]
        inset = _inset(bar)
        if axis.has_gaps and touching == 1:
            shapes["decode"] += [axis.stamped(run, top + inset, bar - 2 * inset) for run in life.decodes]
        elif not axis.has_ticks:
            bars = axis.bars(life.decodes, max(axis.join, touching))
            shapes["decode"] += [box(*run, top + inset, bar - 2 * inset) for run in bars if not axis.is_tick(run)]
        if life.tokens:
            shapes["first"].append(diamond(axis.ends[life.tokens[0][0]], row.middle, radius))
        shapes["preempt"] += [triangle(axis.starts[place], row.middle, max(3, radius)) for place in life.preempted]
        if life.end is not None:
            x = axis.px(life.end)
            if life.is_cut:
                shapes["cancel"].append(cross(x, row.middle, max(3, radius)))
            else:
                shapes["end"].append(box(x, x + 2, top, bar))
    return shapes


def _draw_ticks(svg: Svg, panel: _Panel) -> None:
    """A stroke per token; among bars, per token that stands alone.

    A crowd whose tokens come in the same steps shares its strokes, which are then dashed.
    """
    strokes, axis = [], panel.axis
    for _, group in groupby(panel.rows, key=lambda row: (row.life.decodes, row.bar)):
        rows = list(group)
        decodes, bar = rows[0].life.decodes, rows[0].bar
        inset = _inset(bar)
        height = bar - 2 * inset
        if len(rows) >= CROWD:
            top, bottom = rows[0].top + inset, rows[-1].top + inset + height
            svg.dashed("tick", axis.strokes(decodes), top, bottom, height, rows[1].top - rows[0].top - height)
        elif axis.has_ticks:
            strokes += [axis.stamped(run, row.top + inset, height) for row in rows for run in decodes]
        else:
            strokes += [f"M{x} {row.top + inset}v{height}" for row in rows for x in axis.strokes(decodes)]
    svg.path("tick", strokes)


def _inset(bar: int) -> int:
    """How much lower than the bar a token is, above and below."""
    return max(1, bar // 5) if bar > LEAST_PITCH else 0


def _draw_panel(svg: Svg, panel: _Panel) -> set[str]:
    """Returns the kinds that the legend has to explain."""
    story, labels = panel.story, _label_chunks(panel)
    shapes = _shapes(panel, labels)
    if panel.title:
        _draw_title(svg, panel.top, panel.title)
        _draw_headline(svg, panel.top + 33, story)
    axis = panel.axis
    draw_axis(svg, axis, panel.rows[0].top if panel.rows else panel.budget_top, panel.bottom)
    for kind, subpaths in shapes.items():
        svg.path(kind, subpaths)
        if kind == "decode" and axis.by == "time":
            _draw_ticks(svg, panel)
    _draw_row_texts(svg, panel, labels)
    _draw_regions(svg, panel)
    _draw_stall(svg, panel)
    words = f"tokens per step: decode, above it prefill (grey: unused of {story.budget})"
    if text_width(words) > svg.width - PAD - axis.left:
        words = f"tokens per step of {story.budget}"
    svg.text(axis.left, panel.budget_top - 6, words, "mute")
    draw_budget(svg, axis, panel.budget_top, BUDGET_HEIGHT)
    has_decodes = any(row.life.decodes for row in panel.rows)
    return {kind for kind, subpaths in shapes.items() if any(subpaths)} | ({"decode"} if has_decodes else set())


def _draw_title(svg: Svg, top: int, title: str) -> None:
    svg.text(PAD, top + 14, short(title, svg.width - 2 * PAD, 15), "ink h")


def _draw_headline(svg: Svg, y: int, story: Story) -> None:
    """As much of it as there is room for; the longest gap is the last to go."""
    parts = headline(story)
    while len(parts) > 1 and text_width(" · ".join(parts)) > svg.width - 2 * PAD:
        del parts[0]
    svg.text(PAD, y, short(" · ".join(parts), svg.width - 2 * PAD), "mute")


def _draw_row_texts(svg: Svg, panel: _Panel, labels: list[dict[int, _Label]]) -> None:
    """Labels at the left, token ranges and reasons in the bars, numbers at the right."""
    axis, labelled = panel.axis, _labelled(panel.rows)
    is_all = len(labelled) == len(panel.rows)
    for row in labelled:
        # Some of many are a scale, like an axis's: the legend says what a row is.
        label = row.life.label if is_all else row.life.first or row.life.label
        svg.text(axis.left - 10, row.middle + 4, short(label, axis.left - PAD - 10), "ink e")
    for row, ranges in zip(panel.rows, labels, strict=True):
        if row.bar < READABLE:
            continue
        for label in ranges.values():
            svg.text(sum(label.room) // 2, row.middle + 4, label.text, label.classes)
        _draw_reasons(svg, axis, row)
        if panel.table:
            _draw_numbers(svg, panel, row)
    if panel.table and panel.rows:
        for column, words in enumerate(("first token", "longest gap")):
            svg.text(axis.right + (column + 1) * COLUMN, panel.rows[0].top - 10, words, "mute e")


def _draw_reasons(svg: Svg, axis: Axis, row: _Row) -> None:
    life = row.life
    marks = [axis.starts[place] for place in life.preempted]
    for start, end, reason in life.waits if life.size == 1 else []:
        left, right = axis.px(start), axis.px(end)
        cuts = [left, *(x for x in marks if left <= x <= right), right]
        room = max(zip(cuts, cuts[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        began = bisect_left(axis.story.starts, end) - bisect_left(axis.story.starts, start)  # steps that left it out
        words = reason or ("no reason given" if began else "")
        _text_in_bar(svg, room[0] + RADIUS, room[1] - RADIUS, row, words, "ink m")


def _draw_numbers(svg: Svg, panel: _Panel, row: _Row) -> None:
    life, right = row.life, panel.axis.right
    if life.ttft is not None:
        svg.text(right + COLUMN, row.middle + 4, panel.story.say(life.ttft), "ink e")
    if life.num_tokens > 1:
        is_stall = life.stall >= panel.stall
        svg.text(right + 2 * COLUMN, row.middle + 4, panel.story.say(life.stall), "warn e b" if is_stall else "ink e")


def _text_in_bar(svg: Svg, left: int, right: int, row: _Row, text: str, classes: str) -> None:
    """In the middle, or not at all."""
    if text and text_width(text) + 4 <= right - left:
        svg.text((left + right) // 2, row.middle + 4, text, classes)


def _draw_regions(svg: Svg, panel: _Panel) -> None:
    """In rows too low for text: a reason once or twice for neighbours that wait together."""
    taken: list[Area] = []
    for reason in panel.story.reasons:
        rows = [(row.top, row.top + row.bar, _longest_wait(panel, row, reason)) for row in panel.rows]
        largest = sorted(areas(rows, text_width(reason) + 12), key=lambda area: -area.size)
        for area in largest[:2]:
            label = area.label(reason)
            if area.bottom - area.top >= 12 and all(label.is_apart(other) for other in taken):
                svg.path("bg", [box(label.left, label.right, label.top, label.bottom - label.top)])
                svg.text((label.left + label.right) // 2, label.top + 11, reason, "ink m")
                taken.append(label)


def _longest_wait(panel: _Panel, row: _Row, reason: str) -> tuple[int, int] | None:
    """(left, right) of a low row's longest wait for a reason."""
    waits = [(end - start, start, end) for start, end, why in row.life.waits if why == reason]
    if not waits or row.bar >= READABLE:
        return None
    _, start, end = max(waits)
    return panel.axis.px(start), panel.axis.px(end)


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
    story, axis = panel.story, panel.axis
    life = story.stalled
    if life is None or not story.has_stall:
        return
    before, after = story.long_gaps(life, life.stall)[0]
    left, right, y = axis.ends[before], axis.ends[after], panel.rows[0].top - 4
    least = life.stall * 9 / 10
    also = sum(any(a < after and b > before for a, b in story.long_gaps(other, least)) for other in story.lives)
    who = f"{also} streams" if also > 1 else short(life.label, 130)
    text = f"{who}: no token for {story.say(life.stall)}"
    half = text_width(text, 12) // 2
    middle = max(PAD + half, min(axis.right - half, (left + right) // 2))
    svg.path("brace", [f"M{left} {y}v-5H{right}v5"])
    svg.text(middle, y - 10, text, "warn m b")


def _draw_legend(svg: Svg, kinds: set[str], panels: list[_Panel], y: int) -> int:
    """One entry per kind that is there, wrapped to the width; returns the bottom."""
    x = PAD
    reasons = sorted({reason for panel in panels for reason in panel.story.reasons})
    for kind, text in LEGEND.items():
        if kind not in kinds and not (kind == "wait" and "queue" in kinds):
            continue
        if kind == "wait":
            text += f": {', '.join(reasons)}" if reasons else ""
        if x > PAD and x + 22 + text_width(text) > svg.width - PAD:
            x, y = PAD, y + 18
        if kind == "wait" and "queue" in kinds:
            svg.path("queue", [box(x, x + 16, y, 10)])
        if kind == "prefill":
            svg.path(kind, [box(x, x + 16, y, 10)])
            kind = "hatch"
        svg.path(kind, [SWATCHES.get(kind, lambda x, y: box(x, x + 16, y, 10))(x, y)])
        svg.text(x + 22, y + 9, text)
        x += 22 + text_width(text, 10) + 18
    most = max((life.size for panel in panels for life in (row.life for row in panel.rows)), default=1)
    if most > 1:
        text = f"a row is up to {most} requests in order of arrival, named by its first"
        if x > PAD and x + text_width(text) > svg.width - PAD:
            x, y = PAD, y + 18
        svg.text(x, y + 9, short(text, svg.width - 2 * PAD))
    return y + 14


SWATCHES = {
    "decode": lambda x, y: box(x + 5, x + 7, y, 10) + box(x + 10, x + 12, y, 10),
    "hatch": lambda x, y: hatch(x, x + 16, y, 10),
    "end": lambda x, y: box(x + 10, x + 12, y - 1, 12),
    "first": lambda x, y: diamond(x + 10, y + 5, 5),
    "preempt": lambda x, y: triangle(x + 10, y + 5, 5),
    "cancel": lambda x, y: cross(x + 10, y + 5, 4),
}


@dataclass
class Drawing:
    """A finished picture, and where in it things are (pixels): what an interactive view needs."""

    svg: str
    width: int
    height: int
    panels: list[_Panel]
    shift: int  # from the top of the picture to that of the panels


def draw(stories: list[Story], titles: list[str], *, by: str = "time", width: int = 960, title: str = "",
         desc: str = "", room: int | None = None) -> Drawing:  # fmt: skip
    """A title, the legend, and a panel per story; a story that is alone needs no title of its own.

    by: the way the stories were read.
    room: pixels for the rows of a panel, however many there are.
    """
    if width < 320:
        raise ValueError(f"width={width} is too small: it must be at least 320 pixels")
    check_way(by)
    svg, y = Svg(width), PAD
    if title:
        _draw_title(svg, y, title)
        y += 24
    if len(stories) == 1:
        _draw_headline(svg, y + 9, stories[0])
        y += 24
    body = Svg(width)
    panels = _layout(stories, titles, by, width, room or (ROOM if len(stories) == 1 else ROOM_OF_TWO))
    kinds = set().union(*(_draw_panel(body, panel) for panel in panels))
    y = _draw_legend(svg, kinds, panels, y) + 10
    svg.parts += [f'<g transform="translate(0 {y})">', *body.parts, "</g>"]
    height = y + panels[-1].bottom + 34
    return Drawing(svg.page(height, title or "Timeline", desc), width, height, panels, y)


def timeline(trace: Trace, *, by: str = "time", width: int = 960, title: str | None = None,
             labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """One run as an SVG.

    by      "time": a mark where each token arrives, so that a pause is a gap;
            "step": every step equally wide
    width   pixels; the height follows from the number of requests
    labels  request -> what to call it
    """
    check_way(by)
    story = read(trace, labels, by)
    return draw([story], [""], by=by, width=width, title=title or "", desc=describe(story)).svg


def compare(a: Trace, b: Trace, *, titles: tuple[str, str] = ("A", "B"), by: str = "time", width: int = 960,
            title: str | None = None, labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """The same requests under two settings, one above the other, on the same axis."""
    check_way(by)
    stories = [read(a, labels, by), read(b, labels, by)]
    return draw(stories, list(titles), by=by, width=width, title=title or "", desc=describe_two(stories, titles)).svg


def compare_alt(a: Trace, b: Trace, *, titles: tuple[str, str] = ("A", "B"), by: str = "time",
                labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """What `compare` shows, in words."""
    return describe_two([read(a, labels, by), read(b, labels, by)], titles)


def describe_two(stories: list[Story], titles) -> str:
    return " ".join(f"{name}: {describe(story)}" for name, story in zip(titles, stories, strict=True))

"""The timeline of a trace in characters, for a terminal: a row per request, a column per bin of time or per step."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby

from ..trace import Trace
from .axis import check_way
from .story import Life, Story, grouped, headline, read, round_steps, round_times

# kind -> (ASCII, Unicode, colour of a 256-colour terminal); prefill takes the digits of `_chunk_glyph`.
GLYPHS = {
    "stream": ("-", "─", 109),
    "wait": (".", "░", 245),
    "decode": ("D", "●", 32),
    "first": ("F", "◆", 36),
    "prefill": ("", "", 166),
    "preempt": ("!", "▼", 169),
    "cut": ("x", "×", 169),
    "budget": ("", "", 245),
    "none": (" ", " ", 0),
}
NUMBERS = 10  # characters of each of the two columns of numbers

Cell = tuple[str, str]  # (kind, character)


class _Columns:
    """Steps and moments -> columns."""

    def __init__(self, story: Story, by: str, most: int) -> None:
        steps = len(story.ends)
        self.story, self.by = story, by
        self.count = max(1, most if by == "time" else min(most, steps))
        if by == "time":
            self.starts = [self.at(t) for t in story.starts]
            self.ends = [self.at(t) for t in story.ends]
        else:
            self.starts = self.ends = [place * self.count // steps for place in range(steps)]

    def at(self, t: float) -> int:
        """The column of a moment; by step, that of the step that ran then."""
        story = self.story
        if self.by == "time":
            return min(self.count - 1, int(t / story.duration * self.count)) if story.duration else 0
        return self.starts[min(bisect_right(story.ends, t), len(self.starts) - 1)] if self.starts else 0

    def span(self, place: int) -> range:
        """The columns of a step: from its start up to, but not with, the one where it ends."""
        return range(self.starts[place], max(self.starts[place] + 1, self.ends[place]))


def _row(life: Life, columns: _Columns, unicode: bool) -> list[Cell]:
    """One request's cells; what is painted later hides what was there."""
    cells: list[Cell] = [("none", " ")] * columns.count

    def paint(kind: str, where, glyph: str = "") -> None:
        for column in where:
            cells[column] = (kind, glyph or GLYPHS[kind][unicode])

    if life.tokens:
        paint("stream", range(columns.ends[life.tokens[0][0]], columns.ends[life.tokens[-1][1]]))
    for start, end, reason in life.waits:
        paint("wait", _wait_span(columns, start, end))
    paint("decode", (columns.ends[place] for first, last in life.decodes for place in range(first, last + 1)))
    paint("first", (columns.ends[first] for first, _ in life.tokens[:1]))
    for number, (place, _, _) in enumerate(life.prefills):
        digit = "P" if life.size > 1 else str(number % 10)
        paint("prefill", columns.span(place), "█▓"[number % 2] if unicode else digit)
    paint("preempt", (columns.starts[place] for place in life.preempted))
    if life.is_cut and life.end is not None:
        paint("cut", [columns.at(life.end)])
    if life.size == 1:
        for start, end, reason in life.waits:
            _write(cells, "wait", _wait_span(columns, start, end), reason)
    return cells


def _wait_span(columns: _Columns, start: float, end: float) -> range:
    return range(columns.at(start), max(columns.at(start) + 1, columns.at(end)))


def _write(cells: list[Cell], kind: str, where: range, text: str) -> None:
    """Put a text into the middle of the longest stretch of a kind, if there is room for it."""
    stretches = [list(group) for found, group in groupby(where, key=lambda column: cells[column][0]) if found == kind]
    stretch = max(stretches, key=len, default=[])
    if text and len(text) + 4 <= len(stretch):
        start = stretch[0] + (len(stretch) - len(text)) // 2
        cells[start : start + len(text)] = [(kind, character) for character in text]


def _write_stall(cells: list[Cell], story: Story, columns: _Columns) -> None:
    """Write the longest gap into the row where it happened."""
    before, after = story.long_gaps(story.stalled, story.stalled.stall)[0]
    where = range(columns.ends[before] + 1, columns.ends[after])
    _write(cells, "stream", where, f" no token for {story.say(story.stalled.stall)} ")


def _budget_row(columns: _Columns, unicode: bool) -> list[Cell]:
    """The share of the token budget that was used, in tenths (ASCII) or eighths."""
    story, scale = columns.story, "▁▂▃▄▅▆▇█" if unicode else "0123456789#"
    shares: list[list[int]] = [[] for _ in range(columns.count)]
    for place, pair in enumerate(story.used):
        for column in columns.span(place):
            shares[column].append(sum(pair))
    cells = []
    for used in shares:
        level = sum(used) * (len(scale) - 1) // (len(used) * story.budget) if used and story.budget else None
        cells.append(("none", " ") if level is None else ("budget", scale[min(level, len(scale) - 1)]))
    return cells


def _axis_row(columns: _Columns) -> str:
    """Round times or step numbers, each starting at its column."""
    story, row, width = columns.story, "", columns.count
    if columns.by == "time":
        ticks = [(columns.at(t), label) for t, label in round_times(story.duration, width // 12, story.unit)]
    else:
        ticks = [(columns.starts[place], label) for place, label in round_steps(story.numbers, width // 6)]
    for column, label in ticks:
        if (not row or len(row) < column) and column + len(label) <= width:
            row = row.ljust(column) + label
    return row.ljust(width)


def _join(cells: list[Cell], color: bool) -> str:
    if not color:
        return "".join(character for _, character in cells)
    text = ""
    for kind, group in groupby(cells, key=lambda cell: cell[0]):
        characters = "".join(character for _, character in group)
        text += characters if kind == "none" else f"\x1b[38;5;{GLYPHS[kind][2]}m{characters}\x1b[0m"
    return text


def _legend(cells: list[list[Cell]], unicode: bool) -> str:
    """What the characters that are there mean."""
    words = {
        "decode": "decode: a token", "prefill": "prefill chunks", "wait": "waiting, and why", "first": "first token",
        "stream": "no token", "preempt": "preempted", "cut": "cancelled",
    }  # fmt: skip
    there = {kind for row in cells for kind, _ in row}
    glyphs = {kind: pair[unicode] for kind, pair in GLYPHS.items()}
    glyphs["prefill"] = "█▓" if unicode else "P" if any(("prefill", "P") in row for row in cells) else "0-9"
    return "   ".join(f"{glyphs[kind]} {text}" for kind, text in words.items() if kind in there)


def timeline_text(trace: Trace, *, by: str = "time", width: int = 100, color: bool = False, unicode: bool = False,
                  labels: dict[str, str] | None = None, max_rows: int = 48) -> str:  # fmt: skip
    """One run in characters, lines of at most `width` where that leaves room for ten columns.

    by       "time": bins of equal time, so that a pause is a gap; "step": a column a step
    color    ANSI colours as well (the letters say the same)
    unicode  block characters instead of ASCII
    max_rows rows at most; with more requests, neighbours share one
    """
    check_way(by)
    story = read(trace, labels, by)
    lives = grouped(story, max_rows)
    margin = min(16, max([len(life.label) for life in lives] + [len("budget")]))
    columns = _Columns(story, by, max(10, width - margin - 3 - 2 * NUMBERS))
    rows = [_row(life, columns, unicode) for life in lives]
    legend = _legend(rows, unicode)
    if story.has_stall and story.stalled in lives:
        _write_stall(rows[lives.index(story.stalled)], story, columns)

    def line(label: str, body: str, *numbers: str, edge: str = "|") -> str:
        label = label if len(label) <= margin else label[: margin - 1] + "~"
        columns_of_numbers = "".join(f"{number:>{NUMBERS}}" for number in numbers).rjust(2 * NUMBERS)
        return f"{label:<{margin}} {edge}{body}{edge}{columns_of_numbers}"

    lines = [", ".join(headline(story)), legend, line("steps" if by == "time" and story.unit == "step" else by, _axis_row(columns), "TTFT", "max gap", edge=" ")]
    for life, cells in zip(lives, rows, strict=True):
        ttft = "" if life.ttft is None else story.say(life.ttft)
        lines.append(line(life.label, _join(cells, color), ttft, story.say(life.stall) if life.num_tokens > 1 else ""))
    scale = "full = █" if unicode else "0-9: tenths, #: full"
    lines.append(line("budget", _join(_budget_row(columns, unicode), color)))
    lines.append(f"budget: tokens per step of {story.budget} ({scale})")
    text = "\n".join(lines)
    return text if unicode else text.replace("µ", "u")

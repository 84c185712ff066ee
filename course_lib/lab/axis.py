"""The axis under a picture: the moments of a story -> pixels."""

from __future__ import annotations

from bisect import bisect_right
from math import inf

from .story import Run, Story, round_steps, round_times
from .svg import GAP, LEAST_PITCH, PAD, Svg, box, text_width

WAYS = ("time", "step")
TICK = 2  # width of a token's mark, by time
MAX_TICKS = 15_000  # with more tokens than this, bars stand for them


class Axis:
    """The times of a story, which was read by time or by step, -> pixels between left and right.

    starts, ends   where each step lies
    cells          the same, with a gap to the next where there is room for one: by step, for all or none
    marks          where a step's tokens are drawn: by time at their arrival, which is the end of
                   the step; by step over the whole step
    has_ticks      by time, there is room for a tick per token
    has_gaps       by step, there is a gap between two cells
    join           without ticks: marks nearer than this many pixels become one bar
    """

    def __init__(self, story: Story, by: str, left: int, right: int, span: float) -> None:
        self.story, self.by, self.left, self.right, self.span = story, by, left, right, span
        self._scale = (right - left) / span if span else 0.0
        self.starts = [self.px(t) for t in story.starts]
        self.ends = [self.px(t) for t in story.ends]
        widths = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        typical = sorted(widths)[len(widths) // 2] if widths else 0
        self.has_gaps = by == "step" and min(widths, default=0) >= LEAST_PITCH
        least = self._least_apart(typical)
        self.cells = [
            (start, end - GAP if width >= least else max(end, start + 1))
            for start, end, width in zip(self.starts, self.ends, widths, strict=True)
        ]
        self.marks = self.cells if by == "step" else [(end - TICK, end) for end in self.ends]
        num_tokens = sum(decode for decode, _ in story.used)
        self.has_ticks = by == "time" and typical >= LEAST_PITCH and num_tokens <= MAX_TICKS
        self.join = 1 if by == "step" else 2 * typical + 3
        self._stamps: dict[int, list[str]] = {}
        self._rests: dict[tuple[Run, int], str] = {}
        self._breaks: dict[int, list[int]] = {}

    def _least_apart(self, typical: int) -> float:
        """The width from which on a step has a gap to the next. Among narrow steps, only one that is much wider."""
        if self.by == "step":
            return 0 if self.has_gaps else inf
        return LEAST_PITCH - 1 if typical >= LEAST_PITCH else max(LEAST_PITCH, 2 * typical + 2)

    def px(self, t: float) -> int:
        """The pixel of a moment."""
        return self.left + int(t * self._scale + 0.5)

    @property
    def name(self) -> str:
        return "step" if self.by == "step" else "time" if self.story.unit == "s" else "steps"

    def ticks(self) -> list[tuple[int, str]]:
        """(pixel, label) at round times, or at round step numbers."""
        room = (self.right - self.left) // 72
        if self.by == "time":
            return [(self.px(t), label) for t, label in round_times(self.span, room, self.story.unit)]
        steps = round_steps(self.story.numbers, room)
        return [((self.starts[place] + self.ends[place]) // 2, label) for place, label in steps]

    # A run of tokens is drawn mark by mark where there is room, else as bars. Both are cut from
    # pieces that are made once for all rows of a height: that is what makes a crowd quick to draw.

    def stamped(self, run: Run, top: int, height: int) -> str:
        """A mark per token of a run: a stroke by time, a box by step."""
        first, last = run
        if height not in self._stamps:
            self._stamps[height] = self._make_stamps(height)
        if (run, height) not in self._rests:  # many requests have the same runs
            self._rests[run, height] = "".join(self._stamps[height][first + 1 : last + 1])
        rest = self._rests[run, height]
        if self.has_ticks:
            return f"M{self.ends[first] - 1} {top}v{height}{rest}"
        return box(*self.marks[first], top, height) + rest

    def _make_stamps(self, height: int) -> list[str]:
        """Per step: the move from the mark before, and the mark."""
        if self.has_ticks:
            pairs = zip([0, *self.ends], self.ends, strict=False)
            return [_tick(after - before, height) for before, after in pairs]
        pairs = zip([(0, 0), *self.marks], self.marks, strict=False)
        return [f"m{left - before} 0h{right - left}v{height}h-{right - left}z" for (before, _), (left, right) in pairs]

    def strokes(self, runs: list[Run]) -> list[int]:
        """By time: the middles of the marks of all tokens; without room for these, of those that stand alone."""
        if not self.has_ticks:
            return [bar[1] - TICK // 2 for bar in self.bars(runs, self.join) if self.is_tick(bar)]
        middles = []
        for first, last in runs:
            for place in range(first, last + 1):
                middle = self.ends[place] - 1
                if place > first and 0 < middle - middles[-1] - TICK < GAP:
                    middles.append(middles[-1] + TICK)
                middles.append(middle)
        return middles

    def is_tick(self, bar: Run) -> bool:
        """By time: is this interval of pixels a single mark?"""
        return self.by == "time" and bar[1] - bar[0] == TICK

    def bars(self, runs: list[Run], join: int) -> list[Run]:
        """Runs of tokens as intervals of pixels, marks less than `join` apart become one."""
        if join not in self._breaks:
            pairs = enumerate(zip(self.marks, self.marks[1:], strict=False), start=1)
            self._breaks[join] = [place for place, (a, b) in pairs if b[0] - a[1] >= join]
        breaks, marks, pieces = self._breaks[join], self.marks, []
        for first, last in runs:
            for place in breaks[bisect_right(breaks, first) : bisect_right(breaks, last)]:
                pieces.append((marks[first][0], marks[place - 1][1]))
                first = place
            pieces.append((marks[first][0], marks[last][1]))
        return joined(pieces, join)


def _tick(pitch: int, height: int) -> str:
    """A tick `pitch` behind the one before. The gap between them is filled where it would be too narrow."""
    between = f"m{TICK}-{height}v{height}" if 0 < pitch - TICK < GAP else ""
    return f"{between}m{pitch - TICK if between else pitch}-{height}v{height}"


def joined(intervals, join: int) -> list[tuple[int, int]]:
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


def check_way(by: str) -> None:
    if by not in WAYS:
        raise ValueError(f"by={by!r} is not known: it must be 'time' or 'step'")


def draw_axis(svg: Svg, axis: Axis, top: int, bottom: int) -> None:
    """Grid lines from top to bottom, their labels below, the name of the axis at the left."""
    ticks = axis.ticks()
    svg.path("grid", [box(x, x + 1, top, bottom + 4 - top) for x, _ in ticks])
    for x, label in ticks:
        half = text_width(label) // 2
        svg.text(max(axis.left - 6 + half, min(axis.right + PAD - half, x)), bottom + 18, label, "mute m")
    svg.text(axis.left - 10, bottom + 18, axis.name, "mute e")

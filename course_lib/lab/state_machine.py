"""The states of a request, and how often a run took each way between them.

    show(state_machine(engine.trace), state_machine_alt(engine.trace))
"""

from __future__ import annotations

from ..sequence import FINISHED, PREFILLING, RUNNING, TRANSITIONS, WAITING, SequenceStatus
from ..trace import Trace
from .story import plural
from .svg import Svg, box, text_width

Way = tuple[SequenceStatus, SequenceStatus]

WIDTH, HEIGHT = 900, 300
PLACES = {WAITING: (16, 96), PREFILLING: (372, 96), RUNNING: (744, 96), FINISHED: (372, 238)}  # left, top
BOX = (140, 44)
KINDS = {WAITING: "own3", PREFILLING: "own1", RUNNING: "own0", FINISHED: "unused"}
HOLDS = {WAITING: "holds nothing", PREFILLING: "holds blocks", RUNNING: "holds blocks", FINISHED: "holds nothing"}

# way -> (the line, its head's place and direction, the label's place, the label)
WAYS: dict[Way, tuple[str, tuple[int, int, str], tuple[int, int], str]] = {
    (WAITING, RUNNING): ("M86 96V46H814V88", (814, 96, "down"), (450, 40), "one chunk was enough"),
    (PREFILLING, PREFILLING): ("M412 96V72H472V88", (472, 96, "down"), (442, 67), "another chunk"),
    (WAITING, PREFILLING): ("M156 108H364", (372, 108, "right"), (264, 102), "first chunk"),
    (PREFILLING, WAITING): ("M372 130H164", (156, 130, "left"), (264, 146), "preempted"),
    (PREFILLING, RUNNING): ("M512 118H736", (744, 118, "right"), (628, 112), "last chunk"),
    (RUNNING, WAITING): ("M784 140V176H116V148", (116, 140, "up"), (628, 170), "preempted"),
    (WAITING, FINISHED): ("M56 140V260H364", (372, 260, "right"), (214, 254), "cancelled, error"),
    (PREFILLING, FINISHED): ("M442 140V230", (442, 238, "down"), (442, 212), "cancelled, error"),
    (RUNNING, FINISHED): ("M844 140V260H520", (512, 260, "left"), (678, 254), "stop, length, cancelled, error"),
}
assert set(WAYS) == {(a, b) for a, ends in TRANSITIONS.items() for b in ends}


def transitions(trace: Trace) -> dict[Way, int]:
    """How often each way was taken in the whole trace; ways that were not taken are left out."""
    counts: dict[Way, int] = {}
    state: dict[str, SequenceStatus] = dict.fromkeys(trace.requests, WAITING)

    def go(name: str, status: SequenceStatus) -> None:
        way = (state[name], status)
        counts[way] = counts.get(way, 0) + 1
        state[name] = status

    for step in trace.steps:
        for name in step.preempted:
            go(name, WAITING)
        for name, _start, _count, _kind, is_last in step.chunks:
            if state[name] is not RUNNING and step.finished.get(name) != "cancelled":
                go(name, RUNNING if is_last else PREFILLING)
        for name in step.finished:
            go(name, FINISHED)
    return counts


def state_machine(trace: Trace, title: str | None = None) -> str:
    """The four states and the ways between them, as an SVG: taken ways in ink with their count, the others grey."""
    counts = transitions(trace)
    svg = Svg(WIDTH)
    svg.text(16, 18, title or _headline(trace), "mute")
    for taken in (False, True):
        ways = [way for way in WAYS if (way in counts) is taken]
        svg.path("cancel" if taken else "wait", [WAYS[way][0] for way in ways])
        svg.path("ink" if taken else "mute", [_head(*WAYS[way][1]) for way in ways])
    for way, (_, _, (x, y), label) in WAYS.items():
        words = f"{counts[way]} × {label}" if way in counts else label
        svg.path("bg", [box(x - text_width(words) // 2 - 2, x + text_width(words) // 2 + 2, y - 11, 14)])
        svg.text(x, y, words, "ink m b" if way in counts else "mute m")
    for status, (left, top) in PLACES.items():
        svg.path(KINDS[status], [box(left, left + BOX[0], top, BOX[1])])
        colour = "ink" if status is FINISHED else "on"
        svg.text(left + BOX[0] // 2, top + 19, status.name, f"{colour} m b")
        svg.text(left + BOX[0] // 2, top + 35, HOLDS[status], f"{colour} m")
    return svg.page(HEIGHT, title or "states of a request", state_machine_alt(trace))


def _head(x: int, y: int, direction: str) -> str:
    """An arrow head with its point at (x, y)."""
    return {
        "right": f"M{x} {y}l-9 -5v10z", "left": f"M{x} {y}l9 -5v10z",
        "down": f"M{x} {y}l-5 -9h10z", "up": f"M{x} {y}l-5 9h10z",
    }[direction]  # fmt: skip


def _headline(trace: Trace) -> str:
    return f"States of a request, and the ways that {plural(len(trace.requests), 'request')} took in {plural(len(trace.steps), 'step')}"


def state_machine_alt(trace: Trace) -> str:
    """What `state_machine` shows, in words."""
    counts = transitions(trace)
    taken = [f"{a.name} to {b.name} {plural(counts[a, b], 'time')} ({WAYS[a, b][3]})" for a, b in WAYS if (a, b) in counts]
    return f"{_headline(trace)}: {'; '.join(taken) or 'none'}. The other ways were not taken."

"""Traces as the one thing that the interactive view (view.js) is drawn from: plain data, ready for JSON.

A frame holds the timeline as an SVG, where in it each step and each row is, what every request did
(its spans), and what changed in the pool in each step. With that the view can play, scrub and tell
every cell's story without asking anybody.

    panels[i]
      x0, x1, top, bottom     the panel in the picture, in pixels
      left, right             of each step, in pixels
      starts, ends, numbers   of each step: seconds since the first arrival, the engine's number
      used, budget            [decode, prefill] tokens of each step, and the limit
      rows                    top, height, requests (places in `requests`)
      requests                name, prompt (tokens), arrival and end (steps), reason (of the end), spans
      pool                    num_blocks, block_size; per step: changes, a flat list of (block, request,
                              +1 or -1) with request -1 for the prefix cache; counts, [used, cached]

    spans, in order of their first step
      ["p", step, step, first token, last token]   a prefill chunk
      ["d", first step, last step, position]       one token a step, from this position on
      ["w", first step, last step, reason]         waits
      ["x", step, step]                            preempted as the step began
"""

from __future__ import annotations

from ..trace import Trace
from .axis import check_way
from .story import Story, describe, headline, read
from .timeline import Drawing, describe_two, draw


def frame(*traces: Trace, titles: tuple[str, ...] = ("A", "B"), by: str = "time", width: int = 960,
          labels: dict[str, str] | None = None, room: int | None = None, stories: list[Story] | None = None) -> dict:  # fmt: skip
    """The frame of one trace, or of two to be compared; arguments as of `timeline` and `compare`.

    room: pixels for the rows of a run, however many there are. stories: the traces, where they were read (by `by`) already.
    """
    check_way(by)
    stories = [read(trace, labels, by) for trace in traces] if stories is None else stories
    names = list(titles) if len(traces) > 1 else [""]
    alt = describe(stories[0]) if len(traces) == 1 else describe_two(stories, names)
    drawing = draw(stories, names, by=by, width=width, desc=alt, room=room)
    return {
        "svg": drawing.svg,
        "width": drawing.width,
        "height": drawing.height,
        "alt": alt,
        "summary": summary(*stories, titles=titles),
        "panels": [_panel(trace, drawing, place) for place, trace in enumerate(traces)],
    }


def summary(*stories: Story, titles: tuple[str, ...] = ("A", "B")) -> str:
    """One line with the numbers."""
    if len(stories) == 1:
        return ", ".join(headline(stories[0]))
    return "; ".join(f"{title}: {', '.join(headline(story))}" for title, story in zip(titles, stories, strict=True))


def _panel(trace: Trace, drawing: Drawing, place: int) -> dict:
    panel = drawing.panels[place]
    story, axis, shift = panel.story, panel.axis, drawing.shift
    names = [r.name for r in sorted(trace.requests.values(), key=lambda request: request.arrival_time)]
    zero = min([r.arrival_time for r in trace.requests.values()] + [step.start for step in trace.steps[:1]], default=0.0)
    rows, first = [], 0
    for row in panel.rows:
        requests = list(range(first, first + row.life.size))
        rows.append({"top": row.top + shift, "height": row.bar, "requests": requests})
        first += row.life.size
    top = panel.rows[0].top if panel.rows else panel.budget_top
    return {
        "x0": axis.left, "x1": axis.right, "top": top + shift, "bottom": panel.bottom + shift,
        "left": axis.starts, "right": axis.ends,
        "starts": [round(step.start - zero, 9) for step in trace.steps],
        "ends": [round(step.end - zero, 9) for step in trace.steps],
        "numbers": story.numbers,
        "used": story.used, "budget": story.budget,
        "rows": rows,
        "requests": _requests(trace, story, names),
        "pool": _pool(trace, names),
    }  # fmt: skip


def _requests(trace: Trace, story: Story, names: list[str]) -> list[dict]:
    waits = _waits(trace)
    first_index = trace.steps[0].index if trace.steps else 0
    requests = []
    for name, life in zip(names, story.lives, strict=True):
        record = trace.requests[name]
        spans = [["p", place, place, first, last] for place, first, last in life.prefills]
        spans += [["d", first, last, 0] for first, last in life.decodes]
        spans.sort()
        spans.sort(key=lambda span: span[1])
        reached = 0
        for span in spans:
            if span[0] == "p":
                reached = span[4] + 1
            else:
                span[3] = reached
                reached += span[2] - span[1] + 1
        spans += [["x", place, place] for place in life.preempted] + waits.get(name, [])
        spans.sort(key=lambda span: (span[1], span[0] != "x"))
        end = None if record.finish_step is None else record.finish_step - first_index
        requests.append(
            {"name": life.label, "prompt": record.prompt_tokens, "arrival": record.arrival_step - first_index,
             "end": end if end is None or _is_between(record, trace) else end + 1, "reason": record.finish_reason,
             "spans": spans}
        )  # fmt: skip
    return requests


def _is_between(record, trace: Trace) -> bool:
    """Did the request end between two steps, so that it is gone when `finish_step` runs?"""
    place = record.finish_step - trace.steps[0].index if trace.steps else 0
    return place >= len(trace.steps) or record.finish_time <= trace.steps[place].start


def _waits(trace: Trace) -> dict[str, list[list]]:
    """Request -> its waits as spans."""
    waits: dict[str, list[list]] = {}
    open_waits: dict[str, tuple[int, str]] = {}

    def close(name: str, last: int) -> None:
        first, reason = open_waits.pop(name)
        if last >= first:
            waits.setdefault(name, []).append(["w", first, last, reason])

    for place, step in enumerate(trace.steps):
        for name, reason in step.reasons.items():
            if name in open_waits:
                close(name, place - 1)
            if reason is not None:
                open_waits[name] = (place, reason)
    for name in list(open_waits):
        close(name, len(trace.steps) - 1)
    return waits


def _pool(trace: Trace, names: list[str]) -> dict:
    place_of = {name: place for place, name in enumerate(names)} | {"": -1}
    return {
        "num_blocks": trace.config.get("num_blocks", 0),
        "block_size": trace.config.get("block_size", 1),
        "counts": [[step.blocks_used, step.blocks_cached] for step in trace.steps],
        "changes": [
            [number for block, name, change in step.owners for number in (block, place_of[name], change)]
            for step in trace.steps
        ],
    }

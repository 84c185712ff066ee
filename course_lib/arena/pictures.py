"""Where a policy won and lost: bars of its points, and the request that it served worst."""

from __future__ import annotations

from dataclasses import replace

from ..lab.svg import PAD, Picture, Svg, box, hatch
from ..trace import ChunkRecord, RequestRecord, Trace


def excerpt(trace: Trace, name: str, neighbours: int = 6) -> Trace:
    """One request from its arrival to its first token, with those that overtook it; all others share a row.

    What comes after that is cut off: a request that ends later has no end here.
    """
    times = {other: row[0] for other, row in trace.token_times().items() if row}
    arrival = trace.requests[name].arrival_time
    overtakers = [n for n, r in trace.requests.items() if r.arrival_time > arrival and times[n] < times[name]]
    shown = [name, *overtakers[:: -(-len(overtakers) // neighbours) or 1]]
    steps = [step for step in trace.steps if step.end > arrival and step.start < times[name]]
    keep = set(shown)
    rest = "the others"
    part = Trace(trace.config, {n: _until(trace.requests[n], steps[-1].end) for n in shown})
    part.requests[rest] = replace(
        trace.requests[name], name=rest, request_id=rest, prompt_tokens=1, finish_time=None, finish_step=None
    )
    for step in steps:
        chunks = [chunk for chunk in step.chunks if chunk.request in keep]
        for kind in ("prefill", "decode"):
            tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.request not in keep and chunk.kind == kind)
            if tokens:
                chunks.append(ChunkRecord(rest, 0, tokens, kind, False))
        part.steps.append(replace(
            step, chunks=chunks, owners=[], finished={n: r for n, r in step.finished.items() if n in keep},
            admitted=[n for n in step.admitted if n in keep], preempted=[n for n in step.preempted if n in keep],
            tokens={n: t for n, t in step.tokens.items() if n in keep}, reasons={n: r for n, r in step.reasons.items() if n in keep},
        ))  # fmt: skip
    return part


def _until(request: RequestRecord, end: float) -> RequestRecord:
    """A request as it is known at a moment."""
    if request.finish_time is None or request.finish_time <= end:
        return request
    return replace(request, finish_time=None, finish_step=None, finish_reason=None)


def bars(points: dict[str, dict[str, float]], mine: str) -> Picture:
    """policy -> round -> points, as bars from the left; the one named `mine` is filled and hatched."""
    left, room, high, gap = 160, 560, 14, 22
    svg, y = Svg(left + room + 90), PAD + 14
    filled, others, pattern, axis = [], [], [], []
    svg.text(PAD, y, "Points by round (100: every request met both targets, and nobody starved)", "ink b")
    y += 16
    for game in next(iter(points.values())):
        svg.text(PAD, y + 10, game, "ink b")
        y += 16
        for name, rounds_ in points.items():
            width = round(room * rounds_[game] / 100)
            (filled if name == mine else others).append(box(left, left + width, y, high))
            if name == mine:
                pattern.append(hatch(left, left + width, y, high))
            svg.text(left - 8, y + 11, name, "ink e" + (" b" if name == mine else ""))
            svg.text(left + width + 6, y + 11, f"{rounds_[game]:.1f}", "ink" + (" b" if name == mine else ""))
            y += high + 3
        y += gap - high
    axis.append(f"M{left} {PAD + 26}V{y}")
    parts = svg.parts
    svg.parts = []
    svg.path("stream", others)
    svg.path("prefill", filled)
    svg.path("hatch", pattern)
    svg.path("limit", axis)
    svg.parts += parts
    words = "; ".join(
        f"{game}: " + ", ".join(f"{name} {row[game]:.1f}" for name, row in points.items()) for game in points[mine]
    )
    alt = f"Bars of the points by round. {words}."
    return Picture(svg.page(y + PAD, "Points by round", alt), alt)

"""What went through a model, call by call: a row per call, the positions of the text across.

    show(calls_map({"naive": calls}), calls_map_alt({"naive": calls}))

calls: (start_pos, num_tokens) of each call, as PlainModel notes them.
"""

from __future__ import annotations

from .story import plural
from .svg import PAD, Svg, box, hatch, short, text_width

Calls = list[tuple[int, int]]

HEIGHT = 260  # of the rows, where there are many
GAP = 40  # between two panels


def calls_map(panels: dict[str, Calls], *, width: int = 960) -> str:
    """One panel for each (title, calls), side by side with one scale, as an SVG.

    A call of several tokens is hatched; a call of one token is plain.
    """
    for title, calls in panels.items():
        if not calls:
            raise ValueError(f"panels[{title!r}] is empty: there is no call to draw")
    svg = Svg(width)
    longest = max(start + count for calls in panels.values() for start, count in calls)
    most = max(len(calls) for calls in panels.values())
    pitch = max(2, min(20, HEIGHT // most))
    bar = pitch - (pitch > 3)
    margin = text_width("call " + str(most)) + 6
    room = (width - 2 * PAD - GAP * (len(panels) - 1)) // len(panels)
    top = PAD + 62
    for number, (title, calls) in enumerate(panels.items()):
        left = PAD + number * (room + GAP)
        first, across = left + margin, room - margin
        tokens = sum(count for _, count in calls)
        svg.text(left, PAD + 14, short(title, room, 15), "ink h")
        svg.text(left, PAD + 33, f"{plural(len(calls), 'call')}, {plural(tokens, 'token')} through the model", "mute")
        svg.text(first, top - 6, "position 0", "mute")
        svg.text(first + across, top - 6, str(longest - 1), "mute e")
        shapes: dict[str, list[str]] = {"unused": [], "prefill": [], "hatch": [], "decode": []}
        for row, (start, count) in enumerate(calls):
            y = top + row * pitch
            x0, x1 = first + start * across // longest, first + (start + count) * across // longest
            shapes["unused"].append(box(first, first + across, y, bar))
            shapes["prefill" if count > 1 else "decode"].append(box(x0, x1, y, bar))
            if count > 1:
                shapes["hatch"].append(hatch(x0, x1, y, bar))
        for kind, subpaths in shapes.items():
            svg.path(kind, subpaths)
        for row in sorted({0, len(calls) - 1}) if pitch * (len(calls) - 1) >= 12 else [0]:
            svg.text(first - 6, top + row * pitch + max(bar // 2 + 4, 6), f"call {row + 1}", "mute e")
    bottom = top + most * pitch + 10
    x = PAD
    for kind, text in (("prefill", "several tokens in one call"), ("decode", "one token"), ("unused", "not computed in this call")):
        svg.path(kind, [box(x, x + 13, bottom, 13)])
        svg.path("hatch", [hatch(x, x + 13, bottom, 13)] if kind == "prefill" else [])
        svg.text(x + 19, bottom + 11, text, "mute")
        x += 19 + text_width(text) + 24
    return svg.page(bottom + 13 + PAD, "What went through the model", calls_map_alt(panels))


def calls_map_alt(panels: dict[str, Calls]) -> str:
    """The same for the ear."""
    sentences = []
    for title, calls in panels.items():
        counts = [count for _, count in calls]
        several = sum(count > 1 for count in counts)
        sentences.append(
            f"{title}: {plural(len(calls), 'call')}, {plural(sum(counts), 'token')} through the model; "
            f"{several} of the calls with several tokens (the longest {max(counts)}), {len(calls) - several} with one."
        )
    return " ".join(sentences)

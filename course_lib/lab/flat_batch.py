"""One step's batch as what it is: one flat batch of tokens.

    show(flat_batch(batch), flat_batch_alt(batch))
"""

from __future__ import annotations

from ..batch import Batch
from .story import plural
from .svg import OWNERS, PAD, Svg, box, diamond, text_width

LABELS = 108  # pixels for the names of the lines
MOST = 80  # tokens that a picture can hold
LINES = (("row", 62), ("position", 88), ("slot", 114))


def flat_batch(batch: Batch, *, width: int = 960, title: str | None = None) -> str:
    """A cell per token with its row, position and slot; borders between requests; a diamond at each sampled row.

    Raises ValueError for more than 80 tokens: that is more than a page can show.
    """
    count = len(batch.token_ids)
    if not 0 < count <= MOST:
        raise ValueError(f"the batch has {count} tokens: a picture of it can hold 1 to {MOST}")
    pitch = min(36, (width - LABELS - PAD) // count)
    svg, left = Svg(width), PAD + LABELS
    if title:
        svg.text(PAD, 22, title, "ink b")
    starts = batch.query_start_loc
    for number, (sequence, start, end) in enumerate(zip(batch.sequences, starts, starts[1:], strict=False)):
        x0, x1 = left + start * pitch, left + end * pitch
        colour = f"own{number % len(OWNERS)}"
        svg.path(colour, [box(x0, x1 - 2, y - 15, 22) for _, y in LINES])
        words = sequence.request_id
        small = text_width(words) > x1 - x0 - 2
        svg.text((x0 + x1) // 2 - 1, 42, words if not small or text_width(words, 9) <= x1 - x0 + 2 else words[:1],
                 "ink m b" + (" s" if small else ""))  # fmt: skip
    for name, y in LINES:
        svg.text(PAD, y, name, "ink")
    for row in range(count):
        x = left + row * pitch + pitch // 2 - 1
        for value, (_, y) in zip((row, batch.positions[row], batch.slot_mapping[row]), LINES, strict=True):
            room = text_width(str(value)) <= pitch - 2
            if room or text_width(str(value), 9) <= pitch:
                svg.text(x, y, str(value), "on m" if room else "on m s")
    svg.text(PAD, 146, "query_start_loc")
    svg.path("ink", [box(left + start * pitch - 2, left + start * pitch, 124, 10) for start in starts])
    for start in starts:
        svg.text(left + start * pitch - 1, 147, str(start), "ink m b")
    svg.text(PAD, 176, "sample_rows")
    svg.path("first", [diamond(left + row * pitch + pitch // 2 - 1, 172, 6) for row in batch.sample_rows])
    svg.text(PAD, 200, f"◆ these rows give a token: {', '.join(map(str, batch.sample_rows)) or 'none'}", "mute")
    return svg.page(200 + PAD, title or "one step's batch", flat_batch_alt(batch))


def flat_batch_alt(batch: Batch) -> str:
    """What `flat_batch` shows, in words."""
    parts = []
    starts = batch.query_start_loc
    for sequence, start, end in zip(batch.sequences, starts, starts[1:], strict=False):
        first, last = batch.positions[start], batch.positions[end - 1]
        where = f"position {first}" if first == last else f"positions {first} to {last}"
        sampled = ", sampled" if any(start <= row < end for row in batch.sample_rows) else ", not sampled"
        rows = f"row {start}" if end - start == 1 else f"rows {start} to {end - 1}"
        parts.append(f"{rows}: {sequence.request_id}, {where}{sampled}")
    return f"One flat batch of {plural(len(batch.token_ids), 'token')}. {'; '.join(parts)}."

"""Where the tokens of one sequence went: chunks above, logical blocks below, the physical blocks under them.

    log = SlotLog(slot_mapping)
    engine = Engine(FakeRunner(), EngineConfig(block_size=4), slot_mapping=log)
    ...                                    one request
    log.picture(title="Two chunks")

What is drawn is what a slot mapping said, right or wrong: in a slot stands the token that was written there last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .story import plural
from .svg import GAP, OWNERS, PAD, Picture, Svg, box, hatch, text_width, wrapped

MAX_TOKENS = 40  # in the row of tokens: more can't be read
CELL = 26  # height of a token and of a slot
MAX_ROOM = 320  # for a physical block and what is beside it
ROW = 8  # slots side by side: a block of 16 has two rows


class Call(NamedTuple):
    """One question to a slot mapping and its answer."""

    block_table: list[int]
    start_pos: int
    slots: list[int]


class SlotLog:
    """A slot mapping that asks another one and remembers what it said. For an engine with one request."""

    def __init__(self, slot_mapping: Callable) -> None:
        self.slot_mapping = slot_mapping
        self.calls: list[Call] = []
        self.block_size = 0

    def __call__(self, block_table: list[int], start_pos: int, num_tokens: int, block_size: int) -> list[int]:
        slots = [int(slot) for slot in self.slot_mapping(block_table, start_pos, num_tokens, block_size)]
        self.calls.append(Call(list(block_table), start_pos, slots))
        self.block_size = block_size
        return slots

    def picture(self, **settings) -> Picture:
        """`slot_map` of all calls so far."""
        return slot_map(self.calls, self.block_size, **settings)


class Memory:
    """What lies in the slots of a sequence's blocks after all chunks were written, the last writer on top."""

    def __init__(self, calls: list[Call], block_size: int) -> None:
        self.table = calls[-1].block_table
        self.block_size = block_size
        self.chunk_of = {call.start_pos + i: number for number, call in enumerate(calls) for i in range(len(call.slots))}
        self.holds: dict[int, int] = {}  # slot -> token
        self.rewritten: set[int] = set()  # slots written by more than one token
        for call in calls:
            for token, slot in enumerate(call.slots, call.start_pos):
                if self.holds.get(slot, token) != token:
                    self.rewritten.add(slot)
                self.holds[slot] = token
        self.num_tokens = max(self.chunk_of, default=-1) + 1
        own = [block * block_size + offset for block in self.table for offset in range(block_size)]
        self.empty = [slot for slot in own[: self.num_tokens] if slot not in self.holds]
        self.lost = sorted(set(self.chunk_of) - set(self.holds.values()))
        self.stray = sorted(set(self.holds) - set(own))


def slot_map(calls: list[Call], block_size: int, *, first: int = 0, last: int | None = None, follow: int | None = None,
             width: int = 960, title: str | None = None) -> Picture:  # fmt: skip
    """A `Picture` of tokens first … last of one sequence, at most 40 of them, and of the blocks that belong to them.

    calls    what a slot mapping said, chunk after chunk (`SlotLog.calls`)
    follow   a token whose way to its slot is drawn and worked out
    """
    memory = Memory(calls, block_size)
    last = memory.num_tokens - 1 if last is None else last
    if not 0 <= first <= last < memory.num_tokens:
        raise ValueError(f"first={first}, last={last}: must be tokens of the {memory.num_tokens} that were written")
    if last - first >= MAX_TOKENS:
        raise ValueError(f"first={first}, last={last}: {last - first + 1} tokens can't be drawn, at most {MAX_TOKENS}")
    alt = describe(memory, first, last)
    svg, y = Svg(width), PAD
    if title:
        svg.text(PAD, y + 14, title, "ink h")
        y += 28
    y = _draw_tokens(svg, memory, y, first, last, follow)
    y = _draw_blocks(svg, memory, y, first, last, follow)
    for line in wrapped(_words(memory, follow), width - 2 * PAD):
        svg.text(PAD, y + 12, line, "ink")
        y += 18
    return Picture(svg.page(y + PAD, title or "Tokens and slots", alt), alt)


class _Columns:
    """Where each token of the row stands."""

    def __init__(self, width: int, first: int, last: int) -> None:
        self.pitch = min(40, (width - 2 * PAD) // (last - first + 1))
        self.first = first
        self.left = (width - self.pitch * (last - first + 1)) // 2

    def x(self, token: int) -> int:
        return self.left + (token - self.first) * self.pitch


def _draw_tokens(svg: Svg, memory: Memory, y: int, first: int, last: int, follow: int | None) -> int:
    """Chunks, tokens and logical blocks, from the top down; returns where the logical blocks end."""
    at = _Columns(svg.width, first, last)
    top = y + 22
    for chunk, begin, end in _runs(range(first, last + 1), memory.chunk_of.get):
        left, right = at.x(begin), at.x(end + 1)
        whole = [token for token, number in memory.chunk_of.items() if number == chunk]
        label = f"chunk {chunk}: " + (f"tokens {whole[0]} … {whole[-1]}" if len(whole) > 1 else f"token {whole[0]}")
        colour = f"own{chunk % len(OWNERS)}"
        svg.path(colour, [box(left, right - GAP, y, 18)])
        label = label if text_width(label) <= right - left - 4 else f"{chunk}"
        svg.text((left + right) // 2, y + 13, label, "on m b")
        svg.path(colour, [box(at.x(token), at.x(token + 1) - GAP, top, CELL) for token in range(begin, end + 1)])
        if begin > first:
            svg.path("write", [box(left - 2, left, y - 4, top - y + CELL + 8)])
    for token in range(first, last + 1):
        svg.text(at.x(token) + (at.pitch - GAP) // 2, top + 17, str(token), _letters(str(token), at.pitch - GAP))
    if follow is not None and first <= follow <= last:
        svg.path("cancel", [_outline(at.x(follow) - 1, top - 1, at.pitch, CELL + 1)])
    y = top + CELL + 6
    for logical, begin, end in _runs(range(first, last + 1), lambda token: token // memory.block_size):
        left, right = at.x(begin), at.x(end + 1) - 1
        opens = begin % memory.block_size == 0
        closes = (end + 1) % memory.block_size == 0
        shape = f"M{left + 1} {y + (0 if opens else 8)}" + ("v8" if opens else "") + f"H{right - 1}" + ("v-8" if closes else "")
        svg.path("cancel", [shape])
        name = f"logical block {logical}"
        svg.text((left + right) // 2, y + 23, name if text_width(name) <= right - left else str(logical), "ink m")
    return y + 30


def _draw_blocks(svg: Svg, memory: Memory, y: int, first: int, last: int, follow: int | None) -> int:
    """The physical blocks in the order of their numbers, and a line to each from its logical block."""
    at, size = _Columns(svg.width, first, last), memory.block_size
    blocks = sorted((memory.table[number], number) for number in range(first // size, last // size + 1))
    columns = min(size, ROW)
    room = min((svg.width - 2 * PAD) // len(blocks), MAX_ROOM)
    edge = (svg.width - len(blocks) * room) // 2
    pitch = min(36, (room - 16) // columns)
    top = y + 56
    bottom = top
    for place, (block, number) in enumerate(blocks):
        left = edge + place * room + (room - columns * pitch) // 2
        middle = left + columns * pitch // 2
        begin, end = max(first, number * size), min(last, (number + 1) * size - 1)
        start = (at.x(begin) + at.x(end + 1)) // 2
        svg.path("kept", [f"M{start} {y}C{start} {y + 24} {middle} {y + 14} {middle} {y + 38}"])
        svg.text(middle, top - 5, f"physical block {block}", "ink b m")
        for offset in range(size):
            slot = block * size + offset
            x, cell_y = left + offset % columns * pitch, top + offset // columns * (CELL + GAP)
            token = memory.holds.get(slot)
            kind = "free" if token is None else f"own{memory.chunk_of[token] % len(OWNERS)}"
            svg.path(kind, [box(x, x + pitch - GAP, cell_y, CELL)])
            if slot in memory.rewritten:
                svg.path("write", [f"M{x + pitch - GAP - 9} {cell_y}h9v9z"])
            if token is not None:
                svg.text(x + (pitch - GAP) // 2, cell_y + 17, str(token), _letters(str(token), pitch - GAP))
            elif slot in memory.empty:
                svg.path("wait", [hatch(x, x + pitch - GAP, cell_y, CELL)])
            if follow is not None and token == follow:
                svg.path("cancel", [_outline(x - 1, cell_y - 1, pitch, CELL + 1)])
            bottom = max(bottom, cell_y + CELL)
        svg.text(middle, bottom + 14, f"slots {block * size} … {(block + 1) * size - 1}", "mute m")
    return bottom + 26


def _letters(number: str, room: int) -> str:
    """Classes of a number in a cell: as large as there is room for."""
    return "on m" + (" l" if text_width(number, 13) + 4 <= room else "" if text_width(number) + 4 <= room else " s")


def _runs(tokens, key):
    """(key, first token, last token) of neighbours with the same key."""
    begin = tokens[0]
    for token in tokens:
        if token + 1 not in tokens or key(token + 1) != key(token):
            yield key(token), begin, token
            begin = token + 1


def _outline(x: int, y: int, width: int, height: int) -> str:
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _words(memory: Memory, follow: int | None) -> list[str]:
    """What the picture's marks mean, where there are any, and the worked number."""
    parts = []
    if follow is not None:
        slot = next((slot for slot, token in memory.holds.items() if token == follow), None)
        size = memory.block_size
        parts.append(f"token {follow}: {follow} // {size} = {follow // size}, {follow} % {size} = {follow % size}")
        parts.append("it is nowhere" if slot is None else f"it lies in block {slot // size}, slot {slot}")
    if memory.rewritten:
        lost = plural(len(memory.lost), "token")
        parts.append(f"marked corner: {plural(len(memory.rewritten), 'slot')} written more than once, {lost} lost")
    if memory.empty:
        parts.append(f"hatched: {plural(len(memory.empty), 'slot')} that will be read, never written")
    if memory.stray:
        parts.append(f"{plural(len(memory.stray), 'slot')} outside these blocks written")
    return parts


def describe(memory: Memory, first: int, last: int) -> str:
    """The picture in words."""
    size = memory.block_size
    runs = _runs(range(first, last + 1), memory.chunk_of.get)
    chunks = ", ".join(f"chunk {chunk} is " + (f"token {a}" if a == b else f"tokens {a} to {b}") for chunk, a, b in runs)
    tables = ", ".join(f"{number} in block {memory.table[number]}" for number in range(first // size, last // size + 1))
    text = f"Tokens {first} to {last} of a sequence, in blocks of {size}: {chunks}. Logical blocks: {tables}."
    if memory.lost:
        text += f" Overwritten and lost: tokens {_ranges(memory.lost)}."
    if memory.empty:
        text += f" {plural(len(memory.empty), 'slot')} that will be read were never written."
    if memory.stray:
        text += f" Written outside the sequence's blocks: {plural(len(memory.stray), 'slot')}."
    return text if memory.lost or memory.empty or memory.stray else text + " Every token is in a slot of its own."


def _ranges(tokens: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = _runs_of(tokens)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs

"""The KV pool at one step: a cell per block, coloured by who holds it.

`read_pool` plays the trace back to that step; the rest draws, as SVG or in characters.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from ..config import check_int
from ..trace import Trace
from .story import joined_lines, plural
from .svg import GAP, OWNERS, PAD, Area, Svg, areas, box, hatch, short, text_width, wrapped

PITCHES = (40, 32, 28, 24, 20, 16, 14, 12, 10, 8)  # pixels from cell to cell
ROOM = 440  # for the height of all cells
LISTED = 40  # holders named below the map


@dataclass
class Pool:
    """The pool while the forward pass of a step ran.

    holders  block -> the requests that hold it (more than one: a shared prefix)
    cached   blocks held by nobody whose content can still be reused
    filled   block -> tokens in it after the step, of those that are held
    written  blocks that the step writes to
    tables   request -> its blocks, in the order of its tokens
    places   request -> its number among those that hold blocks at the same time: the lowest that was free when
             it took its first block, kept until it holds none
    """

    number: int  # what the engine calls the step
    num_blocks: int
    block_size: int
    holders: dict[int, list[str]]
    cached: set[int]
    filled: dict[int, int]
    written: set[int]
    tables: dict[str, list[int]]
    places: dict[str, int]

    @property
    def num_shared(self) -> int:
        return sum(len(names) > 1 for names in self.holders.values())

    @property
    def num_free(self) -> int:
        """Free, and nothing in it worth keeping."""
        return self.num_blocks - len(self.holders) - len(self.cached)


def read_pool(trace: Trace, step: int = -1) -> Pool:
    """The pool at trace.steps[step]; counted from the end when negative."""
    count = len(trace.steps)
    if not count:
        raise ValueError("the trace has no steps: there is no pool to look at yet")
    check_int("step", step, -count, count - 1)
    place = step % count
    block_size = trace.config["block_size"]
    tables: dict[str, list[int]] = {}
    places: dict[str, int] = {}
    for record in trace.steps[: place + 1]:
        for block, name, change in record.owners:
            if change > 0:
                tables.setdefault(name, []).append(block)
            else:
                tables[name].remove(block)
        _give_places(places, tables)
    cached = set(tables.pop("", []))
    tables = {name: tables[name] for name in trace.requests if tables.get(name)}
    reached = _reached(trace, place, set(tables))
    holders: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for name, table in tables.items():
        for index, block in enumerate(table):
            holders.setdefault(block, []).append(name)
            tokens = min(block_size, max(0, reached.get(name, 0) - index * block_size))
            filled[block] = max(tokens, filled.get(block, 0))
    written: set[int] = set()
    for name, start, num_tokens, _, _ in trace.steps[place].chunks.tuples():
        written.update(tables[name][start // block_size : (start + num_tokens - 1) // block_size + 1])
    return Pool(trace.steps[place].index, trace.config["num_blocks"], block_size, holders, cached, filled, written, tables, places)


def _give_places(places: dict[str, int], tables: dict[str, list[int]]) -> None:
    """Who holds nothing gives its place back; who is new gets the lowest that nobody has."""
    for name in [name for name in places if not tables.get(name)]:
        del places[name]
    for name, table in tables.items():
        if name and table and name not in places:
            taken = set(places.values())
            places[name] = next(number for number in range(len(places) + 1) if number not in taken)


def _reached(trace: Trace, place: int, names: set[str]) -> dict[str, int]:
    """Request -> its tokens in the cache after a step: the end of its last chunk."""
    reached: dict[str, int] = {}
    for record in reversed(trace.steps[: place + 1]):
        for name, start, num_tokens, _, _ in record.chunks:
            if name in names and name not in reached:
                reached[name] = start + num_tokens
        if len(reached) == len(names):
            break
    return reached


# ---- SVG ------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    """What one cell shows: a block, or the first of several where the pool is too large."""

    owner: str  # "" for nobody
    is_cached: bool = False
    num_owners: int = 0
    is_written: bool = False
    tokens: int = 0


class _Grid:
    """Where each cell goes. per_cell: blocks that share a cell, in a pool with too many for one each."""

    def __init__(self, num_blocks: int, width: int) -> None:
        self.left = PAD + text_width(str(num_blocks)) + 8
        self.per_cell = 1
        while not self._fits(-(-num_blocks // self.per_cell), width):
            self.per_cell *= 2
        self.count = -(-num_blocks // self.per_cell)
        self.num_rows = -(-self.count // self.columns)

    def _fits(self, count: int, width: int) -> bool:
        for self.pitch in PITCHES:
            self.columns = (width - PAD - self.left) // self.pitch // 8 * 8
            if self.columns and -(-count // self.columns) * self.pitch <= ROOM:
                return True
        return False


def block_map(trace: Trace, step: int = -1, *, width: int = 960, title: str | None = None,
              labels: dict[str, str] | None = None) -> str:  # fmt: skip
    """The KV pool while trace.steps[step] ran, as an SVG.

    step    place in trace.steps; from the end when negative
    width   pixels; the height follows from the number of blocks
    labels  request -> what to call it
    """
    if width < 320:
        raise ValueError(f"width={width} is too small: it must be at least 320 pixels")
    pool, labels = read_pool(trace, step), labels or {}
    grid = _Grid(pool.num_blocks, width)
    svg, y = Svg(width), PAD
    if title:
        svg.text(PAD, y + 14, short(title, width - 2 * PAD, 15), "ink h")
        y += 24
    for line in wrapped(_headline(pool), width - 2 * PAD):
        svg.text(PAD, y + 9, line, "mute")
        y += 18
    y = _draw_legend(svg, pool, grid, y + 6) + 14
    rows = _cells(pool, grid)
    _draw_cells(svg, pool, grid, rows, y)
    _draw_labels(svg, pool, grid, rows, y, labels)
    y = _draw_holders(svg, pool, y + grid.num_rows * grid.pitch + 16, labels)
    return svg.page(y + PAD, title or "KV blocks", describe_pool(pool, labels))


def _cells(pool: Pool, grid: _Grid) -> list[list[_Cell]]:
    """The cells, row by row. One for several blocks shows the first of them that is held."""
    cells = []
    for first in range(0, pool.num_blocks, grid.per_cell):
        blocks = range(first, min(first + grid.per_cell, pool.num_blocks))
        block = next((block for block in blocks if block in pool.holders), first)
        names = pool.holders.get(block, [])
        tokens = max(1, pool.filled[block]) if grid.per_cell == 1 and names else pool.block_size
        cells.append(
            _Cell(names[0] if names else "", any(b in pool.cached for b in blocks), len(names),
                  any(b in pool.written for b in blocks), tokens)
        )  # fmt: skip
    return [cells[i : i + grid.columns] for i in range(0, len(cells), grid.columns)]


def _runs(row: list[_Cell]):
    """(first column, one behind the last, owner) of neighbours with one owner."""
    first = 0
    for column in range(1, len(row) + 1):
        if column == len(row) or row[column].owner != row[first].owner:
            yield first, column, row[first].owner
            first = column


def _draw_cells(svg: Svg, pool: Pool, grid: _Grid, rows: list[list[_Cell]], top: int) -> None:
    kinds = ["free", *(f"own{number}" for number in range(len(OWNERS))), "mesh", "part", "kept", "cellgrid", "shared", "write"]
    shapes: dict[str, list[str]] = {kind: [] for kind in kinds}
    pitch, left = grid.pitch, grid.left
    mark = max(3, pitch // 4)
    edge = max(1, pitch // 12)  # of a block that isn't full: what it lacks has a frame of its owner's colour
    for number, row in enumerate(rows):
        y = top + number * pitch
        for first, end, owner in _runs(row):
            kind = _colour(pool.places[owner]) if owner else "free"
            shapes[kind].append(box(left + first * pitch, left + end * pitch, y, pitch))
        shapes["cellgrid"].append(box(left, left + len(row) * pitch, y + pitch - GAP, GAP))
        for column, cell in enumerate(row):
            x = left + column * pitch
            if cell.owner and _is_hatched(pool.places[cell.owner]):
                shapes["mesh"].append(hatch(x, x + pitch - GAP, y, pitch - GAP))
            right = x + pitch - GAP - edge
            filled = x + max(edge, cell.tokens * (pitch - GAP) // pool.block_size)
            if cell.owner and cell.tokens < pool.block_size and filled < right:
                shapes["part"].append(box(filled, right, y + edge, pitch - GAP - 2 * edge))
            if cell.is_cached and not cell.owner:
                shapes["kept"].append(f"M{x} {y + pitch - GAP}l{pitch - GAP}-{pitch - GAP}")
            if cell.num_owners > 1:
                shapes["shared"].append(f"M{x + pitch - GAP - 2 * mark} {y}h{2 * mark}v{2 * mark}z")
            if cell.is_written:
                height = max(2, pitch // 8)
                shapes["write"].append(box(x, x + pitch - GAP, y + pitch - GAP - height, height))
    full, rest = divmod(grid.count, grid.columns)
    for column in range(1, grid.columns + 1):
        height = (full + (column <= rest)) * pitch
        if height:
            shapes["cellgrid"].append(box(left + column * pitch - GAP, left + column * pitch, top, height))
    for kind, subpaths in shapes.items():
        svg.path(kind, subpaths)
    every = max(1, -(-14 // pitch))
    for number in range(0, grid.num_rows, every):
        block = number * grid.columns * grid.per_cell
        svg.text(left - 6, top + number * pitch + pitch // 2 + 4, str(block), "mute e")


def _colour(place: int) -> str:
    return f"own{place % len(OWNERS)}"


def _is_hatched(place: int) -> bool:
    """From the sixth holder on the colours come again, hatched: ten that look different."""
    return place // len(OWNERS) % 2 == 1


def _draw_labels(svg: Svg, pool: Pool, grid: _Grid, rows: list[list[_Cell]], top: int, labels: dict[str, str]) -> None:
    """The owner's name: on each run of cells that has room for it, or once on a larger field."""
    pitch, left = grid.pitch, grid.left
    fields: dict[str, list] = {}
    for number, row in enumerate(rows):
        y = top + number * pitch
        longest: dict[str, tuple[int, int]] = {}
        for first, end, owner in _runs(row):
            if not owner:
                continue
            start, stop = left + first * pitch, left + end * pitch
            if pitch >= 14:
                _text_in_run(svg, start, stop, y, pitch, labels.get(owner, owner), pool.places[owner])
            elif stop - start > (longest.get(owner) or (0, 0))[1] - (longest.get(owner) or (0, 0))[0]:
                longest[owner] = (start, stop)
        for owner in fields.keys() | longest.keys():
            fields.setdefault(owner, [(0, 0, None)] * number).append((y, y + pitch, longest.get(owner)))
    taken: list[Area] = []
    for owner in sorted(fields):
        name = short(labels.get(owner, owner), 130)
        for area in sorted(areas(fields[owner], text_width(name) + 10), key=lambda area: -area.size)[:1]:
            label = area.label(name)
            if area.bottom - area.top >= 14 and all(label.is_apart(other) for other in taken):
                if _is_hatched(pool.places[owner]):
                    svg.path(_colour(pool.places[owner]), [box(label.left, label.right, label.top, 14)])
                svg.text((label.left + label.right) // 2, label.top + 11, name, "on m b")
                taken.append(label)


def _text_in_run(svg: Svg, left: int, right: int, top: int, pitch: int, name: str, place: int) -> None:
    """In the run's first cell where it fits, else in its middle, or not at all. On a hatched cell it has a plate."""
    for size, smaller in ((11, ""), (9, " s")):
        need = text_width(name, size) + 2
        if need <= right - left and pitch >= size + 3:
            x = (left + (left + pitch - GAP if need <= pitch else right)) // 2
            if _is_hatched(place):
                svg.path(_colour(place), [box(x - need // 2, x + need // 2, top + (pitch - GAP - size) // 2 - 1, size + 2)])
            svg.text(x, top + (pitch - GAP) // 2 + (4 if size == 11 else 3), name, "on m" + smaller)
            return


def _draw_legend(svg: Svg, pool: Pool, grid: _Grid, y: int) -> int:
    """What the marks mean; the names of the owners are below the map."""
    x, size = PAD, 13

    def whole(x: int) -> list[str]:
        return [box(x, x + size, y, size)]

    looks = 2 * len(OWNERS)
    is_hatched = any(map(_is_hatched, pool.places.values()))
    again = f" (again after {looks})" if max(pool.places.values(), default=0) >= looks else ""
    held = ("held: a colour, or a colour and a hatch, per request" if is_hatched else "held: a colour per request") + again
    entries = [
        (held, [("own0", whole)]),
        ("held by several", [("own0", whole), ("shared", lambda x: [f"M{x + 5} {y}h8v8z"])]),
        ("partly filled", [("own0", whole), ("part", lambda x: [box(x + 6, x + size - 1, y + 1, size - 2)])]),
        ("written in this step", [("own0", whole), ("write", lambda x: [box(x, x + size, y + size - 3, 3)])]),
        ("free, content kept", [("free", whole), ("kept", lambda x: [f"M{x} {y + size}l{size}-{size}"])]),
        ("free", [("free", whole)]),
    ]
    if grid.per_cell > 1:
        entries.append((f"a cell is {grid.per_cell} blocks", []))
    for words, parts in entries:
        if x > PAD and x + 20 + text_width(words) > svg.width - PAD:
            x, y = PAD, y + 20
        for kind, shape in parts:
            svg.path(kind, shape(x))
        svg.text(x + 19 * bool(parts), y + 10, words)
        x += 19 + text_width(words, 10) + 16
    return y + size


def _draw_holders(svg: Svg, pool: Pool, y: int, labels: dict[str, str]) -> int:
    """Who holds how many blocks, in order of arrival, or the largest of many; returns the bottom."""
    x, names = PAD, list(pool.tables)
    if len(names) > LISTED:
        names.sort(key=lambda name: -len(pool.tables[name]))
    for number, name in enumerate(names):
        words = f"{short(labels.get(name, name), 130)}: {len(pool.tables[name])}"
        if number == LISTED:
            words = f"and {len(names) - LISTED} more"
        if x > PAD and x + 16 + text_width(words) > svg.width - PAD:
            x, y = PAD, y + 18
        if number < LISTED:
            svg.path(_colour(pool.places[name]), [box(x, x + 10, y, 10)])
            svg.path("mesh", [hatch(x, x + 10, y, 10, 4)] if _is_hatched(pool.places[name]) else [])
        svg.text(x + 15, y + 9, words)
        x += 15 + text_width(words) + 12
        if number == LISTED:
            break
    return y + (14 if names else 0)


# ---- words and characters -------------------------------------------------------------------------


def _headline(pool: Pool) -> list[str]:
    used = f"{len(pool.holders)} used by {plural(len(pool.tables), 'request')}"
    return [
        f"step {pool.number}",
        f"{plural(pool.num_blocks, 'block')} of {plural(pool.block_size, 'token')}",
        used + (f" ({pool.num_shared} shared)" if pool.num_shared else ""),
        f"{len(pool.cached)} free with their content kept",
        f"{pool.num_free} free",
    ]


def block_map_alt(trace: Trace, step: int = -1, *, labels: dict[str, str] | None = None) -> str:
    """What `block_map` shows, in two sentences with its numbers."""
    return describe_pool(read_pool(trace, step), labels or {})


def describe_pool(pool: Pool, labels: dict[str, str]) -> str:
    step, blocks, *states = _headline(pool)
    text = f"KV pool at {step}, {blocks}: {', '.join(states)}."
    if not pool.tables:
        return f"{text} No request holds a block."
    name, table = max(pool.tables.items(), key=lambda pair: len(pair[1]))
    return (
        f"{text} {labels.get(name, name)} holds most, {plural(len(table), 'block')}; "
        f"the step writes to {plural(len(pool.written), 'block')}."
    )


def block_map_text(trace: Trace, step: int = -1, *, width: int = 100, labels: dict[str, str] | None = None) -> str:
    """The same in characters: a letter per request, * shared, : free with its content kept, . free."""
    pool, labels = read_pool(trace, step), labels or {}
    letters = string.ascii_uppercase + string.ascii_lowercase
    letter_of = {name: letters[number % len(letters)] for number, name in enumerate(pool.tables)}
    margin = len(str(pool.num_blocks - 1))
    columns = max(8, (width - margin - 2) // 8 * 8)
    cells = "".join(
        ("*" if len(pool.holders[block]) > 1 else letter_of[pool.holders[block][0]]) if block in pool.holders
        else ":" if block in pool.cached else "."
        for block in range(pool.num_blocks)
    )  # fmt: skip
    rows = [f"{first:>{margin}}  {cells[first : first + columns]}" for first in range(0, len(cells), columns)]
    held = [f"{letter_of[name]} {labels.get(name, name)}: {len(table)}" for name, table in pool.tables.items()]
    legend = "letter: the request that holds it   * shared   : free, content kept   . free"
    return "\n".join([*joined_lines(_headline(pool), width, ", "), legend, *rows, *joined_lines(held, width, "   ")])

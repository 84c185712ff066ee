"""An attention mask as a picture: a row per query, a column per key, 1 where the query may look."""

from __future__ import annotations

from collections.abc import Sequence

from .story import plural
from .svg import GAP, OWNERS, PAD, Picture, Svg, box, hatch, text_width, wrapped

CELL = 28  # at most; smaller where the mask is wide
SMALLEST = 14


def mask_map(mask, *, queries: Sequence, keys: Sequence, owners: Sequence[int] | None = None, names: Sequence[str] = (),
             expected=None, tile: int | None = None, width: int = 960, title: str | None = None) -> Picture:  # fmt: skip
    """A `Picture` of a mask [queries, keys] of ones and zeros (lists, an array or a tensor).

    queries, keys  what stands at the rows and above the columns: positions, for instance
    owners         for each key a colour from 0 to 4: which chunk or request wrote it; names: what the colours are
    expected       the mask as it should be: cells that differ get a mark in their corner
    tile           keys in a tile: a line between tiles, and hatching on those in which nobody may look
    """
    rows = _plain(mask)
    right = rows if expected is None else _plain(expected)
    for name, grid in (("mask", rows), ("expected", right)):
        if len(grid) != len(queries) or any(len(row) != len(keys) for row in grid):
            shape = f"{len(grid)} x {len(grid[0]) if grid else 0}"
            raise ValueError(f"{name} is {shape}: it must be {len(queries)} x {len(keys)}, as queries and keys say")
    owners = [0] * len(keys) if owners is None else list(owners)
    labels = [str(query) for query in queries]
    margin = max([text_width(label) for label in labels] + [text_width("query \\ key")]) + 12
    cell = min(CELL, (width - 2 * PAD - margin - 60) // max(1, len(keys)))
    if cell < SMALLEST:
        raise ValueError(f"{len(keys)} keys can't be drawn {width} pixels wide")
    svg, y, left = Svg(width), PAD, PAD + margin
    if title:
        svg.text(PAD, y + 14, title, "ink h")
        y += 28
    if names:
        x = left
        for number, name in enumerate(names):
            svg.path(f"own{number % len(OWNERS)}", [box(x, x + 12, y, 12)])
            svg.text(x + 17, y + 10, name)
            x += 17 + text_width(name) + 18
        y += 24
    svg.text(left - 8, y + 11, "query \\ key", "mute e")
    for column, key in enumerate(keys):
        svg.text(left + column * cell + cell // 2, y + 11, str(key), "mute m" + ("" if cell > 18 else " s"))
    svg.text(left + len(keys) * cell + 10, y + 11, "ones", "mute")
    y += 17
    shapes: dict[str, list[str]] = {kind: [] for kind in ("free", *(f"own{n}" for n in range(len(OWNERS))), "write", "wait")}
    wrong = 0
    skipped = _skipped(rows, tile)
    for number, row in enumerate(rows):
        top = y + number * cell
        svg.text(left - 8, top + cell // 2 + 4, labels[number], "mute e")
        svg.text(left + len(keys) * cell + 10, top + cell // 2 + 4, str(sum(row)), "ink b")
        for column, value in enumerate(row):
            x = left + column * cell
            shapes[f"own{owners[column] % len(OWNERS)}" if value else "free"].append(box(x, x + cell - GAP, top, cell - GAP))
            if value != right[number][column]:
                wrong += 1
                shapes["write"].append(f"M{x + cell - GAP - 9} {top}h9v9z")
    for column in skipped:
        x = left + column * cell
        shapes["wait"] += [hatch(x, x + cell - GAP, y + number * cell, cell - GAP) for number in range(len(rows))]
    for kind, parts in shapes.items():
        svg.path(kind, parts)
    for number, row in enumerate(rows):
        for column, value in enumerate(row):
            if column not in skipped:
                at = left + column * cell + cell // 2, y + number * cell + cell // 2 + 4
                svg.text(*at, str(value), "on m" if value else "mute m")
    if tile:
        edges = range(tile, len(keys), tile)
        svg.path("write", [box(left + edge * cell - 2, left + edge * cell, y - 4, len(rows) * cell + 8) for edge in edges])
    y += len(rows) * cell + 8
    words = [f"marked corner: {plural(wrong, 'place')} that should be the other way round"] if wrong else []
    words += ["hatched: tiles in which nobody may look, never loaded"] if skipped else []
    for line in wrapped(words, width - 2 * PAD):
        svg.text(PAD, y + 12, line)
        y += 18
    alt = describe(rows, labels, keys, wrong)
    return Picture(svg.page(y + PAD, title or "Attention mask", alt), alt)


def _plain(mask) -> list[list[int]]:
    """Ones and zeros as lists of Python ints."""
    mask = mask.tolist() if hasattr(mask, "tolist") else mask
    return [[int(bool(value)) for value in row] for row in mask]


def _skipped(rows: list[list[int]], tile: int | None) -> list[int]:
    """The columns of tiles without a one."""
    if not tile or not rows:
        return []
    seen = [any(row[column] for row in rows) for column in range(len(rows[0]))]
    tiles = [range(start, min(start + tile, len(seen))) for start in range(0, len(seen), tile)]
    return [column for columns in tiles if not any(seen[c] for c in columns) for column in columns]


def describe(rows: list[list[int]], labels: list[str], keys: Sequence, wrong: int) -> str:
    """The mask in words: what each query may look at."""
    lines = []
    for label, row in zip(labels, rows, strict=True):
        ones = [str(key) for key, value in zip(keys, row, strict=True) if value]
        lines.append(f"query {label} sees {plural(len(ones), 'key')}" + (f" ({ones[0]} to {ones[-1]})" if ones else ""))
    size = f"{len(rows)} {'query' if len(rows) == 1 else 'queries'} and {plural(len(keys), 'key')}"
    text = f"Attention mask of {size}: {'; '.join(lines)}."
    return text + (f" {plural(wrong, 'place')} should be the other way round." if wrong else "")

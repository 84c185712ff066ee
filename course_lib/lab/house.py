"""The map of the engine: its rooms in the order in which a request passes through them, some of them lit."""

from __future__ import annotations

from .svg import PAD, Picture, Svg, text_width

# room, what it does, the lessons that build it; in the order of the path
ROOMS = (
    ("sequence", "one request: tokens, counters, state", "06"),
    ("slots", "which slot a token's K/V belongs in", "03"),
    ("prefix_cache", "blocks that another prompt can use", "09"),
    ("block_manager", "memory in blocks: who holds which", "02, 09"),
    ("policies", "who is prefilled first", "08, 11"),
    ("scheduler", "what the next step computes", "05, 08"),
    ("batch", "the step as one flat row of tokens", "07"),
    ("attention", "reads K/V through the block table", "04"),
    ("model", "a real model over paged memory", "01, 07"),
    ("sampler", "from logits to a token", "10"),
    ("engine", "requests in, text out", "10"),
    ("trace", "what happened in every step", "10"),
    ("lab", "what you look at", "11"),
)
COLUMNS, WIDTH, HEIGHT, GAP = 4, 172, 62, 14  # of the rooms; all but the first in pixels: as wide as a page's text


def check_rooms(lit: tuple[str, ...]) -> None:
    """An unknown room is a ValueError that names those there are."""
    known = [name for name, *_ in ROOMS]
    for name in lit:
        if name not in known:
            raise ValueError(f"lit={name!r} is no room of the house: use {', '.join(known)}")


def house_alt(*lit: str) -> str:
    """The map in a sentence."""
    check_rooms(lit)
    rooms = ", ".join(name for name, *_ in ROOMS)
    return f"Map of course_lib, in the order of a request's path: {rooms}." + (f" Lit: {', '.join(lit)}." if lit else "")


def house_svg(*lit: str) -> str:
    """The map as an SVG, with the named rooms lit. Pure: the same rooms give the same bytes."""
    check_rooms(lit)
    rows = -(-len(ROOMS) // COLUMNS)
    width = 2 * PAD + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    svg = Svg(width)
    frames, glow, arrows, y = [], [], [], PAD
    for number, (name, *_) in enumerate(ROOMS):
        row, column = divmod(number, COLUMNS)
        x, y = PAD + column * (WIDTH + GAP), PAD + row * (HEIGHT + GAP)
        (glow if name in lit else frames).append(f"M{x} {y}h{WIDTH}v{HEIGHT}h-{WIDTH}z")
        if number and column:
            arrows.append(f"M{x - GAP + 2} {y + HEIGHT // 2}h{GAP - 5}m-4 -4l4 4l-4 4")
    svg.path("unused", frames)
    svg.path("prefill", glow)
    svg.path("wait", arrows)
    for number, (name, what, lessons) in enumerate(ROOMS):
        row, column = divmod(number, COLUMNS)
        x, y = PAD + column * (WIDTH + GAP), PAD + row * (HEIGHT + GAP)
        ink = "on" if name in lit else "ink"
        svg.text(x + 10, y + 20, name, f"{ink} b")
        svg.text(x + WIDTH - 10, y + 20, lessons, f"{ink} e")
        for line, part in enumerate(_lines(what)):
            svg.text(x + 10, y + 38 + 15 * line, part, ink)
    height = 2 * PAD + rows * HEIGHT + (rows - 1) * GAP
    if len(ROOMS) % COLUMNS:
        svg.text(width - PAD, height - PAD - 6, "the number: the lesson that builds the room", "mute e")
    return svg.page(height, "The house", house_alt(*lit))


def _lines(text: str) -> list[str]:
    """A room's sentence in one line or two."""
    lines = [""]
    for word in text.split():
        if text_width(f"{lines[-1]} {word}") > WIDTH - 20:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def house(*lit: str) -> Picture:
    """The map of course_lib with some rooms lit, for a notebook: `house("slots")`. Returns a `Picture`.

    lit  names of rooms: sequence, slots, block_manager, scheduler … An unknown one is a ValueError.
    """
    return Picture(house_svg(*lit), house_alt(*lit))

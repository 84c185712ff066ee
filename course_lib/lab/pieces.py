"""Tokens and the text that each of them brought: what is shown at once, what is held back.

    show(pieces(token_ids, alone, released), pieces_alt(token_ids, alone, released))

alone     each token decoded by itself; "�" where it is no whole character
released  what the user got when that token came; "" when it was held back
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence as SequenceOf

from .svg import PAD, Svg, box, hatch, text_width

LEFT, WIDTH, HIGH, GAP = 110, 960, 24, 6
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Spaces and line ends as signs that one sees."""
    return "".join(VISIBLE.get(letter, letter) for letter in text)


def _room(text: str) -> int:
    """Pixels of a text; Chinese characters and emoji are twice as wide."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return text_width("x" * (len(text) + wide))


def _check(token_ids: SequenceOf[int], alone: SequenceOf[str], released: SequenceOf[str]) -> None:
    if not len(token_ids) == len(alone) == len(released):
        raise ValueError(f"one text per token: {len(token_ids)} token ids, {len(alone)} alone, {len(released)} released")


def pieces_alt(token_ids: SequenceOf[int], alone: SequenceOf[str], released: SequenceOf[str]) -> str:
    """The picture in words."""
    _check(token_ids, alone, released)
    broken = sum("\N{REPLACEMENT CHARACTER}" in text for text in alone)
    held = sum(not text for text in released)
    return (
        f"{len(token_ids)} tokens. Decoded alone, {broken} of them are no whole character. "
        f"The user got text with {len(token_ids) - held} of them, nothing with {held}: {visible(''.join(released))}"
    )


def pieces(token_ids: SequenceOf[int], alone: SequenceOf[str], released: SequenceOf[str]) -> str:
    """An SVG: for each token a column with its id, its text decoded alone, and what the user got."""
    _check(token_ids, alone, released)
    svg, x, y = Svg(WIDTH), LEFT, PAD
    columns, top = [], y
    for token_id, lone, new in zip(token_ids, map(visible, alone), map(visible, released), strict=True):
        wide = max(30, text_width(str(token_id), 9), _room(lone), _room(new)) + 10
        if x + wide > WIDTH - PAD and x > LEFT:
            x, top = LEFT, top + 3 * HIGH + 2 * GAP
        columns.append((x, top, wide, token_id, lone, new))
        x += wide + GAP
    whole, broken, shown, held, lines = [], [], [], [], []
    for x, top, wide, _, lone, new in columns:
        (broken if "\N{REPLACEMENT CHARACTER}" in lone else whole).append(box(x, x + wide, top + 14, HIGH - 4))
        (shown if new else held).append(box(x, x + wide, top + 14 + HIGH, HIGH - 4))
        if not new:
            lines.append(hatch(x, x + wide, top + 14 + HIGH, HIGH - 4))
    svg.path("unused", whole + held)
    svg.path("stall", broken)
    svg.path("own0", shown)
    svg.path("kept", lines)
    for top in sorted({column[1] for column in columns}):
        for row, label in enumerate(("token", "decoded alone", "the user gets")):
            svg.text(LEFT - 8, top + (9, 28, 28 + HIGH)[row], label, "mute e")
    for x, top, wide, token_id, lone, new in columns:
        middle = x + wide // 2
        svg.text(middle, top + 9, str(token_id), "mute s m")
        svg.text(middle, top + 28, lone, "ink m")
        svg.text(middle, top + 28 + HIGH, new, "on m")
    height = (columns[-1][1] if columns else PAD) + 3 * HIGH + PAD
    return svg.page(height, "Tokens and text", pieces_alt(token_ids, alone, released))

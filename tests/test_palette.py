"""Colours that stay apart for everybody, and letters that can be read: in every picture that is saved in the notebooks.

Colours are compared as people see them who lack one kind of cone (protanopia, deuteranopia, tritanopia): matrices of
Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009),
severity 1, on linear RGB. The distance is CIE76 (1976 L*a*b*, white D65); 2.3 is just noticed where two patches touch
(Mahy et al., 1994). Letters: contrast by WCAG 2.2, 1.4.3.
"""

import base64
import functools
import itertools
import re
from pathlib import Path

import nbformat
import pytest

from course_lib.lab import block_map, budget, timeline
from course_lib.lab.scheduler_lab import PRESETS, Settings
from course_lib.lab.svg import OWNERS, STYLE, diamond, text_width, triangle

ROOT = Path(__file__).resolve().parents[1]
LEAST_DISTANCE = 15  # six times what is just noticed: the colours are looked for in a row of small cells, not side by side
LEAST_CONTRAST = 4.5

SIGHT = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


# ---- colours ----


def linear(colour):
    """#rgb or #rrggbb as linear RGB from 0 to 1."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    values = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour, sight):
    """L*, a*, b* of a colour as somebody sees it."""
    seen = [min(1, max(0, value)) for value in times(SIGHT[sight], linear(colour))]
    x, y, z = (t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in
               (value / white for value, white in zip(times(TO_XYZ, seen), WHITE, strict=True)))  # fmt: skip
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one, other, sight):
    return sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight), strict=True)) ** 0.5


def contrast(one, other):
    bright, dark = sorted((times(TO_XYZ, linear(colour))[1] for colour in (one, other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def closest(one, other):
    """(distance, page, sight) where two kinds are hardest to tell apart."""
    pages = {"light": 1, "dark": 2}
    return min((distance(STYLE[one][place], STYLE[other][place], sight), page, sight) for page, place in pages.items() for sight in SIGHT)


def test_the_formulas_give_known_values():
    assert lab("#fff", "all cones") == pytest.approx((100, 0, 0), abs=0.02)
    assert lab("#f00", "all cones") == pytest.approx((53.24, 80.09, 67.20), abs=0.05)
    assert contrast("#fff", "#000") == pytest.approx(21) and contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.01)
    for sight in SIGHT:
        assert distance("#888", "#888", sight) == 0
        assert lab("#888", sight)[1:] == pytest.approx((0, 0), abs=0.1), "grey stays grey"
    assert distance("#c00", "#070", "deuteranopia") < distance("#c00", "#070", "all cones") / 2, "red and green come close"


# ---- the pictures ----

PATH = re.compile(r'<g class=[^>]*>.*?</g>|<g transform="translate\(0 (?P<down>\d+)\)">|(?P<up></g>)|<path class="lm-(?P<kind>\w+)[^"]*" d="(?P<d>[^"]*)"/>'
                  r'|<text x="(?P<x>-?\d+)" y="(?P<y>-?\d+)" class="(?P<classes>[^"]*)">(?P<text>[^<]*)</text>')  # fmt: skip
BOX = re.compile(r"M(-?\d+) (-?\d+)h(\d+)v(\d+)[Hh]-?\d+z")


@functools.cache
def pictures():
    """Name -> SVG: what is saved in the notebooks, and what the lab draws of its presets."""
    found = {}
    for file in sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")]):
        for cell in nbformat.read(file, as_version=4).cells:
            html = "".join(str(output.get("data", {}).get("text/html", "")) for output in cell.get("outputs", []))
            for number, data in enumerate(re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", html)):
                found[f"{file.parent.name}/{file.stem} {cell.id} {number}"] = base64.b64decode(data).decode()
    for key, _, _, changes in PRESETS:
        trace = Settings(**changes).run()
        found |= {f"lab {key} timeline": timeline(trace), f"lab {key} budget": budget(trace),
                  f"lab {key} block map": block_map(trace, step=len(trace.steps) // 2)}  # fmt: skip
    return found


def kinds_in(svg):
    return {part["kind"] for part in PATH.finditer(svg) if part["kind"]} | {"bg"}


# Kinds that say something by their form; what each subpath of theirs looks like.
FORMS = {"first": diamond, "preempt": triangle, "shared": r"M\d+ \d+h\d+v\d+z"}
# What is only there to be filled, or to part what is: no reader has to tell these from each other.
GROUNDS = {"bg", "grid", "cellgrid", "unused", "free", "part"}
# Pairs that mean the same, or are told apart by something that the right side names.
OTHERWISE = {
    frozenset({"decode", "tick"}): "the same thing: a token",
    frozenset({"stall", "bg"}): "a bracket with words stands above the stall",
    frozenset({"stall", "unused"}): "a bracket with words stands above the stall",
    frozenset({"stall", "grid"}): "a bracket with words stands above the stall",
    frozenset({"stall", "stream"}): "a stream is a line inside the area",
    frozenset({"brace", "wait"}): "a bracket above the rows, with words; a box in its row",
    frozenset({"kept", "wait"}): "a curve between two blocks; strokes inside a slot",
}


def form(kind):
    """How a kind is drawn, as a word: shape, line or area."""
    if kind in FORMS:
        return kind
    return "line" if STYLE[kind][0] == "stroke" else "area"


def test_every_two_colours_of_a_picture_are_told_apart():
    """By the colour itself, by form, or by what OTHERWISE names; a line that isn't needed there any more is an error."""
    together = {frozenset(pair): name for name, svg in pictures().items() for pair in itertools.combinations(kinds_in(svg) & STYLE.keys(), 2)}
    assert len(pictures()) > 70 and len(together) > 150
    near = {pair: closest(*pair) for pair in together if closest(*pair)[0] < LEAST_DISTANCE}
    unsaid = [
        f"{' and '.join(sorted(pair))} in {together[pair]}: {where[0]:.1f} apart on a {where[1]} page with {where[2]}"
        for pair, where in near.items()
        if not pair <= GROUNDS and len({form(kind) for kind in pair}) == 1 and pair not in OTHERWISE
    ]
    assert not unsaid, unsaid
    assert OTHERWISE.keys() <= near.keys(), "an exception that isn't needed"


def test_a_form_is_what_it_is_said_to_be():
    seen = set()
    for name, svg in pictures().items():
        for part in PATH.finditer(svg):
            shape = FORMS.get(part["kind"])
            if shape is None:
                continue
            pattern = shape if isinstance(shape, str) else re.sub(r"\d+", r"\\d+", re.escape(shape(50, 60, 7)).replace(r"\ ", " "))
            assert re.fullmatch(f"(?:{pattern})+", part["d"]), f"{name}: {part['kind']} is {part['d'][:60]}"
            seen.add(part["kind"])
    assert seen == FORMS.keys()


# What is drawn on top of what: a second code is none if it can't be seen itself.
ON_TOP = [("hatch", ("prefill",)), ("kept", ("free",)), ("wait", ("free", "bg")), ("tick", ("bg", "stall", "stream")), ("brace", ("bg",)),
          ("cancel", ("bg", "free")), ("limit", ("bg", "unused")), ("end", ("bg", "stream")), ("first", ("bg", "tick", "prefill")),
          ("preempt", ("bg", "tick", "prefill")),
          *((mark, tuple(f"own{number}" for number in range(len(OWNERS)))) for mark in ("write", "part", "shared", "mesh"))]  # fmt: skip


@pytest.mark.parametrize(("mark", "grounds"), ON_TOP, ids=[mark for mark, _ in ON_TOP])
def test_a_mark_is_seen_on_what_it_is_drawn_on(mark, grounds):
    for ground in grounds:
        assert closest(mark, ground)[0] >= LEAST_DISTANCE, (mark, ground, closest(mark, ground))


def test_a_stall_has_its_bracket_and_its_words():
    stalled = [svg for svg in pictures().values() if {"stall", "tick"} <= kinds_in(svg)]
    assert stalled and all("brace" in kinds_in(svg) and "no token for" in svg for svg in stalled)


# ---- letters ----


def grounds(svg):
    """(text, its kind, kind of what lies under it) for every text of a picture, at three places of it."""
    boxes, down = [], 0
    for part in PATH.finditer(svg):
        if part["down"]:
            down = int(part["down"])
        elif part["up"]:
            down = 0
        elif part["kind"] and STYLE.get(part["kind"], ("",))[0] == "fill":
            boxes += [(part["kind"], x, y + down, x + width, y + down + height) for x, y, width, height in
                      (map(int, box) for box in BOX.findall(part["d"]))]  # fmt: skip
        elif part["text"]:
            classes = [name.removeprefix("lm-") for name in part["classes"].split()]
            wide = text_width(part["text"], 9 if "s" in classes else 13 if "l" in classes else 15 if "h" in classes else 11) * 0.8
            left = int(part["x"]) - wide * ("e" in classes) - wide / 2 * ("m" in classes)
            y = int(part["y"]) + down - 3
            for share in (0.25, 0.5, 0.75):
                x = left + share * wide
                under = [kind for kind, x0, y0, x1, y1 in boxes if x0 <= x <= x1 and y0 <= y <= y1 and min(x1 - x0, y1 - y0) > 2]
                yield part["text"], classes[0], (under or ["bg"])[-1]


def test_every_text_in_a_picture_can_be_read_on_a_light_and_a_dark_page():
    found = {(ink, ground): (text, name) for name, svg in pictures().items() for text, ink, ground in grounds(svg)}
    assert {("on", "prefill"), ("ink", "bg"), ("mute", "bg"), ("warn", "bg"), ("on", "own0")} <= found.keys()
    pale = [
        f"{text!r} in {name}: {ink} on {ground}, {page} page: {contrast(STYLE[ink][place], STYLE[ground][place]):.2f}"
        for (ink, ground), (text, name) in found.items()
        for page, place in (("light", 1), ("dark", 2))
        if contrast(STYLE[ink][place], STYLE[ground][place]) < LEAST_CONTRAST
    ]
    assert not pale, pale


def pairs(text, name):
    """(light, dark) of every light-dark() of a property in a style sheet."""
    return set(re.findall(rf"(?<![\w-]){name}:light-dark\((#\w+),(#\w+)\)", text))


@pytest.mark.parametrize("file", ["course_lib/lab/view.js", "site/index.html"])
def test_every_text_of_the_views_and_the_page_can_be_read(file):
    """Any of the sheet's text colours on any of its backgrounds: more than occurs."""
    sheet = (ROOT / file).read_text(encoding="utf-8")
    texts, backgrounds = pairs(sheet, "color"), pairs(sheet, "background")
    assert len(texts) >= 2 and len(backgrounds) >= 2
    page = {pair for pair in backgrounds if pair[0] == "#fff"}
    body = {pair for pair in texts if pair[0] == "#333"}
    for inks, on in ((texts, page), (body, backgrounds)):
        for ink, ground in itertools.product(inks, on):
            for place in (0, 1):
                assert contrast(ink[place], ground[place]) >= LEAST_CONTRAST, f"{ink[place]} on {ground[place]}"


def test_a_colour_that_is_too_near_and_a_text_that_is_too_pale_are_seen(monkeypatch):
    monkeypatch.setitem(STYLE, "own1", ("fill", "#4aa8dd", "#4aa8dd"))
    with pytest.raises(AssertionError, match="own0 and own1 in "):
        test_every_two_colours_of_a_picture_are_told_apart()
    monkeypatch.setitem(STYLE, "mute", ("fill", "#999", "#9aa0a6"))
    with pytest.raises(AssertionError, match="mute on bg, light page: 2.8"):
        test_every_text_in_a_picture_can_be_read_on_a_light_and_a_dark_page()

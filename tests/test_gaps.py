"""Pictures are shrunk by the page: a gap that is drawn must survive it, and cells too narrow for one have none."""

import base64
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from test_timeline import SVG, Recorder, crowd, everything, stall

from course_lib.lab import block_map, budget, timeline
from course_lib.lab.mask_map import mask_map
from course_lib.lab.slot_map import Call, slot_map
from course_lib.lab.svg import CRISP, GAP, LEAST_PITCH, STYLE

CHROMIUM = Path("/usr/bin/chromium")
FILLS = ("prefill", "decode", "tick", "unused", *(f"own{n}" for n in range(5)), "free")


def streams(requests, steps, prompt=8):
    """Everyone is there from the start; the last request's prompt comes in a chunk in each of the first eight steps."""
    r = Recorder(budget=512)
    r.arrive(*(f"r{i}" for i in range(requests - 1)), prompt=1)
    r.arrive("long", prompt=8 * prompt)
    for step in range(steps):
        r.step(dict.fromkeys(list(r.trace.requests)[:-1], 1) | {"long": prompt if step < 8 else 1}, took=0.02 if step < 8 else 0.01)
    return r.trace


def rows(svg, kind):
    """(top, height) -> the intervals of a kind in that row, from the left."""
    body = ET.fromstring(svg)
    group = body.find(f"{SVG}g")
    found = {}
    for path in (body if group is None else group).iter(f"{SVG}path"):
        if f"lm-{kind}" not in path.get("class", "").split():
            continue
        x = y = 0
        for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", path.get("d")):
            values = [int(n) for n in re.findall(r"-?\d+", numbers)]
            if command == "M":
                x, y = values
            elif command == "m":
                x, y = x + values[0], y + values[1]
            elif command == "h" and values[0] > 0:
                wide = values[0]
            elif command == "v" and kind == "tick":
                found.setdefault((y, values[0]), []).append((x - 1, x + 1))
                y += values[0]
            elif command == "v" and values[0] > 0:
                found.setdefault((y, values[0]), []).append((x, x + wide))
    return {row: sorted(set(intervals)) for row, intervals in found.items()}


def drawn():
    for requests, steps in ((3, 10), (5, 64), (33, 80), (64, 200)):
        for by in ("time", "step"):
            for width in (480, 960):
                yield timeline(streams(requests, steps), by=by, width=width)
        yield budget(streams(requests, steps))
    for by in ("time", "step"):
        yield timeline(crowd(), by=by)
        yield timeline(everything(), by=by)
        yield timeline(stall(46), by=by)
    calls = [Call([1, 0, 2], start, [16 + start + i if start < 16 else start - 16 + i for i in range(16)]) for start in (0, 16)]
    yield slot_map(calls, 16).svg
    yield mask_map([[1, 0, 1]] * 2, queries=(0, 1), keys=(0, 1, 2)).svg


def test_between_two_cells_of_a_row_is_no_gap_or_one_that_survives():
    gaps = 0
    for svg in drawn():
        for kind in FILLS:
            for row, intervals in rows(svg, kind).items():
                for (_, end), (start, _) in pairwise(intervals):
                    assert start <= end or start - end >= GAP, (kind, row, end, start)
                    gaps += start > end
    assert gaps > 3000 and GAP >= 1.5


def test_rows_of_a_timeline_are_apart_or_touch():
    apart, touching = 0, 0
    for svg in drawn():
        tops = sorted({(top, height) for kind in ("prefill", "first") for top, height in rows(svg, kind)})
        for (top, height), (below, _) in pairwise(tops):
            assert below - top - height <= 0 or below - top - height >= GAP
            apart, touching = apart + (below > top + height), touching + (below == top + height)
    assert apart and touching


@pytest.mark.parametrize(("requests", "steps"), [(3, 10), (5, 64), (33, 80)])
@pytest.mark.parametrize("by", ["time", "step"])
def test_eight_chunks_are_eight_bars(requests, steps, by):
    svg = timeline(streams(requests, steps), by=by)
    bars = max((intervals for intervals in rows(svg, "prefill").values()), key=len)
    assert len(bars) == 8 and all(start - end >= GAP for (_, end), (start, _) in pairwise(bars))


def test_steps_too_narrow_for_a_gap_are_one_bar_in_every_row():
    svg = timeline(streams(5, 400), by="step")
    assert all(len(intervals) == 1 for row, intervals in rows(svg, "decode").items() if row[1] > 3)
    assert all(len(intervals) == 1 for intervals in rows(svg, "prefill").values())


def test_only_lines_that_keep_their_width_are_crisp():
    sheet = ET.fromstring(timeline(everything())).find(f"{SVG}style").text
    assert all(STYLE[kind][0] == "stroke" for kind in CRISP)
    assert sheet.count("crispEdges") == 1 and sheet.count("crispEdges;vector-effect:non-scaling-stroke") == 1
    assert ",".join(f".lm-{kind}" for kind in CRISP) + "{shape-rendering" in sheet


def test_the_map_of_blocks_parts_its_cells():
    r = Recorder()
    r.trace.config |= {"num_blocks": 4000, "block_size": 16}
    r.arrive("a")
    r.step({"a": 16}, owners=[(0, "a", 1)])
    for width in (320, 960):
        lines = rows(block_map(r.trace, width=width), "cellgrid")
        columns = next(intervals for (_, height), intervals in lines.items() if height > GAP)
        assert {right - left for left, right in columns} == {GAP}
        assert all(b - a >= LEAST_PITCH for (a, _), (b, _) in pairwise(columns))


def red_of(page, svg, scale, y):
    """The red of each pixel of a line, 0 … 255, of the picture as a page shows it at another size."""
    width = int(int(re.search(r'width="(\d+)"', svg)[1]) * scale)
    image = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return page.evaluate(
        """async ([src, width, y]) => {
            const image = new Image(); image.src = src; await image.decode();
            const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
            const full = image.naturalWidth;
            canvas.width = width; canvas.height = Math.round(image.naturalHeight * width / full);
            canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
            return [...pen.getImageData(0, Math.round(y * width / full), width, 1).data].filter((_, i) => i % 4 === 0);
        }""",
        [image, width, y],
    )


@pytest.mark.parametrize("scale", [1, 0.7, 0.62, 2])
def test_every_gap_is_seen_in_a_browser_at_any_size(scale):
    """Decode is blue without any red, the page is white: in each gap a pixel is more than half white."""
    api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip("no Chromium here")
    svg = timeline(streams(5, 64), by="step")
    (top, height), bars = max(rows(svg, "decode").items(), key=lambda pair: len(pair[1]))
    shift = int(re.search(r"translate\(0 (\d+)\)", svg)[1])
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        red = red_of(browser.new_page(color_scheme="light"), svg, scale, shift + top + height // 2)
        browser.close()
    gaps = [red[int(end * scale) : int(start * scale) + 1] for (_, end), (start, _) in pairwise(bars)]
    assert len(gaps) > 50 and all(max(gap) > 127 for gap in gaps), [max(gap) for gap in gaps]
    assert all(min(red[int(left * scale) + 1 : int(right * scale)]) < 64 for left, right in bars)

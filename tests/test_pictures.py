"""Block map, budget, and what all pictures promise: legible without colours, and for every kind of eyes."""

import itertools
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_timeline import SVG, Recorder, crowd, empty, everything, no_time, stall, text_boxes, texts

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.lab import (
    block_map,
    block_map_alt,
    block_map_text,
    budget,
    budget_alt,
    budget_text,
    compare,
    compare_alt,
    timeline,
)  # fmt: skip
from course_lib.lab.block_map import read_pool
from course_lib.lab.svg import OWNERS, STYLE, hatch
from course_lib.runners import FakeRunner
from course_lib.slots import blocks_needed
from course_lib.trace import Trace

ROOT = Path(__file__).resolve().parents[1]


def run(num_requests=10, num_blocks=32, block_size=8, **settings):
    """A real engine's trace: prompts with a common beginning, in a pool that is too small for all."""
    config = EngineConfig(block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=64, max_num_seqs=8,
                          max_prefill_chunk_size=24, **settings)  # fmt: skip
    engine, snapshots = Engine(FakeRunner(), config), []
    engine.on_step = lambda output: snapshots.append((output, engine.snapshot()))
    for number in range(num_requests):
        prompt = [1] * 17 + [number] * (5 + 9 * (number % 4))
        engine.add_request(prompt, SamplingParams(max_tokens=12 + number), request_id=f"r{number}")
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace, snapshots


@pytest.fixture(scope="module")
def pressure():
    trace, snapshots = run()
    assert any(step.preempted for step in trace.steps) and any(step.blocks_cached for step in trace.steps)
    return trace, snapshots


# ---- the pool -------------------------------------------------------------------------------------


def test_the_pool_is_what_the_engine_had_during_the_forward_pass(pressure):
    trace, snapshots = pressure
    assert len(snapshots) == len(trace.steps)
    for place, (output, states) in enumerate(snapshots):
        pool = read_pool(trace, place)
        assert pool.tables == {name: state.block_table for name, state in states.items() if state.block_table}
        step = trace.steps[place]
        assert (len(pool.holders), len(pool.cached)) == (step.blocks_used, step.blocks_cached)
        assert pool.num_free == step.blocks_free - step.blocks_cached
        ends = {name: state.cached_token_count for name, state in states.items()}
        ends |= {chunk.sequence.request_id: chunk.start_pos + chunk.num_tokens for chunk in output.chunks}
        for name, table in pool.tables.items():
            assert len(table) == blocks_needed(ends[name], 8)
            last = table[-1]
            assert len(pool.holders[last]) > 1 or pool.filled[last] == ends[name] - 8 * (len(table) - 1)
        written = {states[c.sequence.request_id].block_table[position // 8]
                   for c in output.chunks for position in range(c.start_pos, c.start_pos + c.num_tokens)}  # fmt: skip
        assert pool.written == written


def test_a_step_is_a_place_in_the_trace(pressure):
    trace, _ = pressure
    assert read_pool(trace, -1) == read_pool(trace, len(trace.steps) - 1)
    with pytest.raises(ValueError, match=f"step={len(trace.steps)} is too large: .* at most {len(trace.steps) - 1}"):
        block_map(trace, len(trace.steps))
    with pytest.raises(ValueError, match="no steps"):
        block_map(empty())
    with pytest.raises(TypeError, match="step must be an integer"):
        block_map(trace, 1.5)


def areas_of(svg, kind):
    """(left, top, width, height) of every box of a kind."""
    paths = [path.get("d") for path in ET.fromstring(svg).iter(f"{SVG}path") if f"lm-{kind}" in path.get("class").split()]
    boxes = re.findall(r"M(\d+) (\d+)(?:h(\d+))v(\d+)H\d+z", " ".join(paths))
    return [tuple(map(int, numbers)) for numbers in boxes]


def test_every_held_block_is_a_cell_of_its_owners_colour():
    """With full blocks only, coloured areas count the cells; the legend's swatches are 13 × 13."""
    trace, _ = run(num_requests=3, num_blocks=64)
    place = 0
    pool = read_pool(trace, place)
    svg = block_map(trace, place)
    coloured = sum(w * h for n in range(len(OWNERS)) for _, _, w, h in areas_of(svg, f"own{n}") if h not in (10, 13))
    pitch = max(h for *_, h in areas_of(svg, "free"))
    assert coloured == len(pool.holders) * pitch * pitch
    assert sum(w * h for *_, w, h in areas_of(svg, "free") if h == pitch) == (64 - len(pool.holders)) * pitch * pitch


def looks(svg):
    """Request -> (colour, is it hatched) as the list of holders below the map says."""
    parts = re.findall(r'<path class="lm-(own\d)" d="M\d+ \d+h10v10H\d+z"/>(<path class="lm-mesh")?(?:[^<]*/>)?<text[^>]*>(\w+): \d+<', svg)
    return {name: (colour, bool(mesh)) for colour, mesh, name in parts}


def test_no_two_holders_of_a_step_look_the_same():
    trace, _ = run(num_requests=24, num_blocks=96)
    most = 0
    for place in range(len(trace.steps)):
        pool, svg = read_pool(trace, place), block_map(trace, place)
        found = looks(svg)
        assert found.keys() == pool.tables.keys()
        assert len(set(found.values())) == len(found) and len(found) <= 10
        assert ("a colour and a hatch" in svg) == any(hatched for _, hatched in found.values())
        most = max(most, len(found))
    assert most > 5


def test_a_holder_keeps_its_colour_while_it_holds_blocks():
    trace, _ = run(num_requests=24, num_blocks=96)
    before = {}
    for place in range(len(trace.steps)):
        places = read_pool(trace, place).places
        assert all(before[name] == places[name] for name in before.keys() & places.keys())
        assert sorted(places.values())[-1:] < [8] and len(set(places.values())) == len(places)
        before = places


def test_what_a_block_lacks_is_framed_by_its_owners_colour():
    trace, _ = run(num_requests=3, num_blocks=64)
    svg = block_map(trace, 0)
    cells = [cell for n in range(3) for cell in areas_of(svg, f"own{n}") if cell[3] > 13]
    parts = [part for part in areas_of(svg, "part") if part[3] > 13]
    assert parts and all(any(left < x and top < y and x + w < left + wide - 2 and y + h < top + high - 2
                             for left, top, wide, high in cells) for x, y, w, h in parts)  # fmt: skip


@pytest.mark.parametrize("num_blocks", [8, 9, 64, 100, 1000, 4096, 5000, 50_000])
@pytest.mark.parametrize("width", [320, 700, 960])
def test_pools_of_every_size_fit(num_blocks, width):
    r = Recorder()
    r.trace.config |= {"num_blocks": num_blocks, "block_size": 16}
    r.arrive("a", "b with a long name", prompt=40)
    owners = [(block, "a", 1) for block in range(min(3, num_blocks))] + [(num_blocks - 1, "b with a long name", 1)]
    r.step({"a": 40, "b with a long name": 9}, owners=[*owners, (num_blocks // 2, "", 1)])
    svg = block_map(r.trace, width=width)
    check_texts(svg)
    assert int(ET.fromstring(svg).get("height")) < 760
    for left, top, w, h in itertools.chain(areas_of(svg, "own0"), areas_of(svg, "own1"), areas_of(svg, "free")):
        assert left + w <= width and top + h <= int(ET.fromstring(svg).get("height"))


def test_the_map_says_its_numbers_to_the_ear(pressure):
    trace, _ = pressure
    for place in range(len(trace.steps)):
        pool, words = read_pool(trace, place), block_map_alt(trace, place)
        assert f"{len(pool.holders)} used by {len(pool.tables)} request" in words and words.count(". ") == 1
        assert f"<desc>{words}</desc>" in block_map(trace, place)


def test_the_map_in_characters_has_one_for_each_block(pressure):
    trace, _ = pressure
    for place in (0, 10, 30):
        pool = read_pool(trace, place)
        lines = block_map_text(trace, place, width=90).splitlines()
        cells = "".join(line[4:] for line in lines[2:] if re.match(r" ?\d+  ", line))
        assert len(cells) == 32
        assert cells.count("*") == pool.num_shared and cells.count(":") == len(pool.cached) and cells.count(".") == pool.num_free
        assert all(len(line) <= 90 for line in lines)


# ---- the budget -----------------------------------------------------------------------------------


def test_the_budget_is_stacked_to_the_tokens_of_each_step():
    r = Recorder(budget=160)  # as many tokens as the bars have pixels
    r.arrive("a", "b", prompt=100)
    r.step({"a": 100, "b": 60})
    r.step({"a": 1, "b": 40})
    r.step({"a": 1, "b": 1})
    svg = budget(r.trace, by="step")
    heights = {kind: [h for *_, h in areas_of(svg, kind) if h != 10] for kind in ("decode", "prefill", "unused")}
    assert heights == {"decode": [1, 2], "prefill": [160, 40], "unused": [119, 158]}
    assert "limit 160 tokens a step" in " ".join(texts(svg)) and "160" in texts(svg)
    words = budget_alt(r.trace)
    assert "decode 1 %, prefill 42 %, unused 57 %; full in 1 of 3 steps" in words and words.count(". ") == 1
    rows = budget_text(r.trace, height=4).splitlines()[2:6]
    assert rows == [" 160 |P..", "     |P..", "     |P..", "   0 |PDD"]


def test_the_budget_of_nothing_is_a_picture_too():
    for trace in (empty(), no_time(), Trace()):
        check_texts(budget(trace))
        assert budget_alt(trace) and budget_text(trace)


# ---- what all pictures promise --------------------------------------------------------------------


def check_texts(svg):
    """No two texts overlap, none leaves the picture, all numbers are whole, there are no ids."""
    boxes = text_boxes(svg)
    root = ET.fromstring(svg)
    _, _, width, height = map(int, root.get("viewBox").split())
    for left, top, right, bottom, text in boxes:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
    for (left, top, right, bottom, text), (left2, top2, right2, bottom2, other) in itertools.combinations(boxes, 2):
        assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, (text, other)
    for element in root.iter():
        assert "id" not in element.attrib
        assert all(name == "role" or not re.search(r"\d\.|nan|inf|e-", value) for name, value in element.attrib.items())


def staircase(requests=64, steps=200):
    """Everyone waits for a place, in rows too low for text."""
    r = Recorder()
    r.arrive(*(f"r{i}" for i in range(requests)))
    for step in range(steps):
        first = step // 6
        live = [f"r{i}" for i in range(first, min(first + 8, requests))]
        reasons = {f"r{i}": "seq_budget" for i in range(8, requests)} if step == 0 else {live[-1]: None} if live else {}
        r.step(dict.fromkeys(live, 1) if step % 5 else {}, reasons=reasons)
    return r.trace


@pytest.mark.parametrize("by", ["time", "step"])
@pytest.mark.parametrize("width", [340, 640, 960, 1400])
def test_from_three_requests_to_a_crowd_no_text_touches_another(by, width):
    few = Recorder()
    few.arrive("a", "b", "c")
    for _ in range(10):
        few.step({"a": 8, "b": 4, "c": 1})
    for trace in (few.trace, everything(), stall(), staircase(), crowd(30, 60), crowd(128, 400)):
        check_texts(timeline(trace, by=by, width=width, title="A title"))
        check_texts(budget(trace, by=by, width=width))
    check_texts(compare(crowd(128, 100), stall(), by=by, width=width))


def test_neighbours_that_wait_together_share_one_word():
    assert 1 <= texts(timeline(staircase())).count("seq_budget") <= 2


def test_reasons_of_neighbours_that_share_rows_do_not_lie_on_one_another():
    r = Recorder()
    r.arrive(*(f"r{i}" for i in range(400)))
    for step in range(60):
        reasons = {f"r{i}": ("seq_budget", "kv_blocks")[i % 2] for i in range(400)} if step == 0 else {}
        r.step({}, reasons=reasons)
    svg = timeline(r.trace)
    check_texts(svg)
    assert "seq_budget" in texts(svg) or "kv_blocks" in texts(svg)


def test_a_prefill_chunk_is_hatched_within_its_box():
    for left, right, top, height in [(0, 40, 0, 20), (10, 30, 5, 8), (3, 400, 7, 12)]:
        x, y = 0, 0
        for command, dx, dy in re.findall(r"([Mlm])(-?\d+)[ ]?(-?\d+)", hatch(left, right, top, height)):
            x, y = (int(dx), int(dy)) if command == "M" else (x + int(dx), y + int(dy))
            assert left <= x <= right and top <= y <= top + height
    assert hatch(0, 3, 0, 20) == "" and hatch(0, 40, 0, 5) == ""
    assert "lm-hatch" in timeline(everything()) and "lm-hatch" in budget(everything())


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
EYES = {
    "trichromat": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanope": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranope": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanope": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour):
    colour = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(colour, eyes):
    """CIE-Lab (D65) of what these eyes see."""
    r, g, b = (min(1, max(0, sum(a * v for a, v in zip(row, linear(colour), strict=True)))) for row in EYES[eyes])
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b, (
        0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883  # fmt: skip
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(a, b, eyes):
    return sum((p - q) ** 2 for p, q in zip(lab(a, eyes), lab(b, eyes), strict=True)) ** 0.5


def contrast(a, b):
    """WCAG 2."""
    low, high = sorted(sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [1, 2], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("kinds", [("prefill", "decode", "first", "preempt", "unused", "end"),
                                   ("own0", "own1", "own2", "own3", "own4", "free")])  # fmt: skip
def test_colours_stay_apart_for_every_kind_of_eyes(kinds, eyes, theme):
    for a, b in itertools.combinations(kinds, 2):
        assert distance(STYLE[a][theme], STYLE[b][theme], eyes) >= 15, (a, b)


@pytest.mark.parametrize("theme", [1, 2], ids=["light", "dark"])
def test_texts_and_marks_have_contrast(theme):
    page = STYLE["bg"][theme]
    for kind in ("ink", "mute", "warn"):
        assert contrast(STYLE[kind][theme], page) >= 4.5, kind  # WCAG: text
    for kind in ("prefill", "decode", "first", "preempt", "wait", "end"):
        assert contrast(STYLE[kind][theme], page) >= 3, kind  # WCAG: graphical objects
    for kind in ("prefill", "part", *(f"own{n}" for n in range(len(OWNERS)))):
        assert contrast(STYLE["on"][theme], STYLE[kind][theme]) >= 4.5, kind


def test_a_comparison_says_both_runs_to_the_ear():
    words = compare_alt(stall(), stall(460), titles=("whole", "chunks"))
    assert words.startswith("whole: Timeline of 4 requests") and "chunks: Timeline of 4 requests" in words
    assert f"<desc>{words}</desc>" in compare(stall(), stall(460), titles=("whole", "chunks"))


def test_the_picture_of_a_simulated_run_is_that_of_a_real_one(pressure):
    """A trace is a trace: what was saved and read back, by whatever engine, gives the same bytes."""
    trace, _ = pressure
    again = Trace.from_json(trace.to_json())
    for draw in (timeline, budget, lambda t: block_map(t, 7), lambda t: compare(t, t)):
        assert draw(trace) == draw(again)


# ---- the same in every Python ---------------------------------------------------------------------

PICTURES = """
import hashlib, sys
assert not [name for name in sys.modules if name.startswith(("torch", "numpy"))]
from course_lib import EngineConfig
from course_lib.lab import alt_text, block_map, budget, compare, timeline, timeline_text
from course_lib.lab.scheduler_lab import PRESETS, Lab, Settings
from course_lib.workloads import mix, simulate
config = EngineConfig(num_blocks=900, max_num_seqs=32, max_num_batched_tokens=1024, max_prefill_chunk_size=512)
traces = [simulate(config, mix(8, 80, seed=1), chip="a100"), Settings(running=16).run(), Settings(running=16, chunk=None).run()]
pictures = [draw(trace) for trace in traces for draw in (timeline, budget, block_map, alt_text, timeline_text)]
pictures += [timeline(trace, by="step") for trace in traces] + [compare(*traces[1:])]
lab = Lab()
for key, *_ in PRESETS:
    answer = lab.handle({"kind": "preset", "key": key})
    pictures += [answer["svg"], str(answer["readouts"])]
for picture in pictures:
    print(hashlib.sha256(picture.encode()).hexdigest())
"""


def hashes(python, hash_seed):
    env = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", PICTURES], capture_output=True, text=True, cwd=ROOT, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def find_python(version):
    """An interpreter of that version: on the PATH, or one of pyenv's."""
    candidates = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    ask = "import sys; print('{}.{}'.format(*sys.version_info))"
    for python in filter(None, candidates):
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return python
    return None


@pytest.fixture(scope="module")
def expected_hashes():
    found = hashes(sys.executable, "1")
    assert len(found) == len(set(found)) > 30
    return found


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_same_configuration_gives_the_same_pictures_to_the_byte_in_python(version, expected_hashes):
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on the PATH or in ~/.pyenv/versions")
    assert hashes(python, "2") == expected_hashes

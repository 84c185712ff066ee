"""The timelines: right numbers, one subpath a chunk, no overlapping text, the same bytes every time."""

import base64
import importlib
import re
import time
import xml.etree.ElementTree as ET

import pytest

from course_lib.lab import alt_text, budget, budget_alt, compare, compare_alt, show, timeline, timeline_text
from course_lib.lab.story import read, round_times, seconds
from course_lib.metrics import metrics
from course_lib.trace import ChunkRecord, RequestRecord, StepRecord, Trace

SVG = "{http://www.w3.org/2000/svg}"
WAYS = ("time", "step")


# ---- traces by hand -------------------------------------------------------------------------------


class Recorder:
    """Writes a trace step by step, from a clock that starts anywhere."""

    def __init__(self, budget=64, clock=100.0):
        self.trace, self.clock = Trace({"max_num_batched_tokens": budget, "num_blocks": 64}), clock
        self.done = {}  # request -> tokens computed

    def arrive(self, *names, prompt=16):
        for name in names:
            self.trace.requests[name] = RequestRecord(name, name, prompt, 99, self.clock, len(self.trace.steps))
            self.done[name] = 0

    def step(self, chunks, took=0.1, silent=(), **record):
        """chunks: request -> tokens; a chunk that reaches the end of the prompt emits a token."""
        step = StepRecord(len(self.trace.steps), self.clock, self.clock + took, **record)
        for name, num_tokens in chunks.items():
            start, prompt = self.done[name], self.trace.requests[name].prompt_tokens
            self.done[name] = start + num_tokens
            is_last = self.done[name] >= prompt
            step.chunks.append(ChunkRecord(name, start, num_tokens, "prefill" if start < prompt else "decode", is_last))
            if is_last and name not in silent:
                step.tokens[name] = 7
        self.clock += took
        self.trace.steps.append(step)

    def finish(self, *names, reason="length"):
        for name in names:
            request = self.trace.requests[name]
            request.finish_reason, request.finish_time, request.finish_step = reason, self.clock, len(self.trace.steps)


def stall(chunk=4600, step_seconds=4.6):
    """Three streams; a document of 4,600 tokens comes, in chunks of `chunk`, a millisecond a token."""
    r, streams = Recorder(budget=5000), ("a", "b", "c")
    r.arrive(*streams)
    r.step(dict.fromkeys(streams, 16))
    for _ in range(8):
        r.step(dict.fromkeys(streams, 1))
    r.arrive("doc", prompt=4600)
    for _ in range(4600 // chunk):
        r.step(dict.fromkeys(streams, 1) | {"doc": chunk}, took=step_seconds * chunk / 4600)
    for _ in range(8):
        r.step(dict.fromkeys((*streams, "doc"), 1))
    r.finish(*streams, "doc")
    return r.trace


def everything():
    """Chunks, waiting for two reasons, a preemption with its recomputation, a cancellation, an arrival during a step."""
    r = Recorder()
    r.arrive("old", prompt=100)
    r.arrive("new", prompt=40)
    r.step({"old": 64}, reasons={"new": "token_budget"})
    r.step({"old": 36, "new": 28}, reasons={"new": None})
    r.step({"old": 1, "new": 12})
    r.step({"old": 1, "new": 1})
    r.step({"old": 1}, preempted=["new"], reasons={"new": "kv_blocks"})
    r.done["new"] = 0
    for _ in range(6):
        r.step({"old": 1})
    r.arrive("late")
    r.trace.requests["late"].arrival_time -= 0.05
    r.finish("old")
    r.step({"new": 41, "late": 16}, reasons={"new": None})
    r.step({"new": 1, "late": 1})
    r.finish("late", reason="cancelled")
    r.step({"new": 1})
    r.finish("new")
    return r.trace


def crowd(requests=128, steps=400):
    """Everyone arrives in turn, decodes for a while, now and then someone waits or is preempted."""
    r = Recorder(budget=512)
    for index in range(steps):
        if index < requests:
            r.arrive(f"r{index}", prompt=20 + 60 * (index % 5))
        live = [name for name, request in r.trace.requests.items() if request.finish_time is None]
        chunks, reasons = {}, {}
        for number, name in enumerate(live):
            if (number + index) % 37 == 0:
                reasons[name] = "kv_blocks"
            else:
                chunks[name] = 1 if r.done[name] >= r.trace.requests[name].prompt_tokens else 20
        before = r.trace.reasons_at(index - 1) if index else {}
        reasons |= {name: None for name in before if name not in reasons}
        r.step(chunks, took=0.02 + sum(chunks.values()) / 10_000, reasons=reasons)
        if index % 3 == 2 and len(live) > 4 and index > 150:
            r.finish(live[0])
    return r.trace


def empty():
    return Trace({"max_num_batched_tokens": 64})


def not_started():
    r = Recorder()
    r.arrive("a", "b")
    return r.trace


def one_step():
    r = Recorder()
    r.arrive("a")
    r.step({"a": 16})
    return r.trace


def no_time():
    """A clock that stands still."""
    r = Recorder()
    r.arrive("a")
    for num_tokens in (16, 1, 1):
        r.step({"a": num_tokens}, took=0.0)
    return r.trace


TRACES = (stall, everything, empty, not_started, one_step, no_time)


def pictures():
    for make in TRACES:
        for by in WAYS:
            yield timeline(make(), by=by, title=f"{make.__name__} <&>")
            yield timeline(make(), by=by, width=340, labels={"a": "a label that is much too long for its place"})
            yield compare(make(), stall(chunk=460), by=by, titles=("whole & all", "chunks"))
    yield timeline(crowd(40, 60))
    yield timeline(crowd(200, 220), by="step")


# ---- reading a picture back -----------------------------------------------------------------------


def subpaths(svg, kind):
    """How many shapes of a kind there are outside the legend."""
    body = ET.fromstring(svg).find(f"{SVG}g")
    paths = [path for path in body.iter(f"{SVG}path") if f"lm-{kind}" in path.get("class").split()]
    return sum(len(re.findall("[Mm]", path.get("d"))) for path in paths)


def text_boxes(svg):
    """(left, top, right, bottom, text) of every text, as wide as in a wide font."""

    def walk(element, dy):
        move = re.fullmatch(r"translate\(0 (\d+)\)", element.get("transform", ""))
        dy += int(move[1]) if move else 0
        if element.tag == f"{SVG}text":
            classes = element.get("class").split()
            size = 15 if "lm-h" in classes else 13 if "lm-l" in classes else 9 if "lm-s" in classes else 11
            width = len(element.text) * size * 0.6
            left = int(element.get("x")) - (width if "lm-e" in classes else width / 2 if "lm-m" in classes else 0)
            bottom = int(element.get("y")) + dy
            yield left, bottom - size * 0.8, left + width, bottom + size * 0.2, element.text
        for child in element:
            yield from walk(child, dy)

    return list(walk(ET.fromstring(svg), 0))


def texts(svg):
    return [text for *_, text in text_boxes(svg)]


# ---- SVG ------------------------------------------------------------------------------------------


def test_the_same_trace_gives_the_same_bytes():
    assert list(pictures()) == list(pictures())


def test_a_trace_that_was_saved_gives_the_same_picture():
    assert timeline(Trace.from_json(everything().to_json())) == timeline(everything())


def test_the_clock_may_start_anywhere():
    shifted = Trace.from_json(everything().to_json())
    for request in shifted.requests.values():
        request.arrival_time += 1e6
        request.finish_time += 1e6
    for step in shifted.steps:
        step.start, step.end = step.start + 1e6, step.end + 1e6
    assert timeline(shifted) == timeline(everything())


def test_pictures_are_valid_xml_with_whole_numbers_and_no_ids():
    for svg in pictures():
        root = ET.fromstring(svg)
        assert root.get("role") == "img" and root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
        for element in root.iter():
            assert element.tag in {SVG + tag for tag in ("svg", "title", "desc", "style", "rect", "g", "path", "text")}
            assert "id" not in element.attrib and "style" not in element.attrib
            for name, value in element.attrib.items():
                assert name == "role" or not re.search(r"\d\.|\.\d|nan|inf|e-", value), (name, value)
        assert not re.search(r"\d\.\d", root.find(f"{SVG}style").text)


def test_texts_neither_overlap_nor_leave_the_picture():
    for svg in pictures():
        boxes = text_boxes(svg)
        _, _, width, height = map(int, ET.fromstring(svg).get("viewBox").split())
        for index, (left, top, right, bottom, text) in enumerate(boxes):
            assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
            for left2, top2, right2, bottom2, other in boxes[index + 1 :]:
                apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
                assert apart, (text, other)


@pytest.mark.parametrize("by", WAYS)
def test_every_kind_is_drawn_once_for_each_time_it_happened(by):
    trace = everything()
    svg = timeline(trace, by=by)
    chunks = [chunk for step in trace.steps for chunk in step.chunks]
    bars = sum(step.prefill_tokens > 0 for step in trace.steps), sum(step.decode_tokens > 0 for step in trace.steps)
    decodes = sum(chunk.kind == "decode" for chunk in chunks)
    assert subpaths(svg, "prefill") == sum(chunk.kind == "prefill" for chunk in chunks) + bars[0]
    assert subpaths(svg, "tick") == (decodes if by == "time" else 0)
    assert subpaths(svg, "decode") == (0 if by == "time" else decodes) + bars[1]
    assert subpaths(svg, "wait") == 3  # new twice; late, which came during a step
    assert subpaths(svg, "preempt") == 1
    assert subpaths(svg, "cancel") == 2  # a cross is two strokes
    assert subpaths(svg, "first") == 3
    assert subpaths(svg, "end") == 2  # the third was cancelled
    for word in ("preempted", "cancelled", "first token", "finished", "prefill chunk"):
        assert word in texts(svg)
    assert "waiting: kv_blocks, token_budget" in texts(svg)


def strokes(svg):
    """(x, top, bottom) of every stroke that stands for a token; a dashed line is many."""
    body, found = ET.fromstring(svg).find(f"{SVG}g"), []
    for path in body.findall(f"{SVG}path[@class='lm-tick']"):
        for move in re.findall("[Mm][^Mm]*", path.get("d")):
            if move.startswith("M"):
                x, y, height = (int(number) for number in re.findall(r"\d+", move))
            else:
                x += int(re.match(r"m(\d+)", move)[1])
            found.append((x, y, y + height))
    for group in body.findall(f"{SVG}g[@class='lm-tick']"):
        dash, gap = map(int, group.get("stroke-dasharray").split())
        for line in group:
            x, top, bottom = map(int, re.fullmatch(r"M(\d+) (\d+)V(\d+)", line.get("d")).groups())
            found += [(x, y, min(y + dash, bottom)) for y in range(top, bottom, dash + gap)]
    return sorted(found)


@pytest.mark.parametrize("streams", [16, 60])
def test_a_crowd_shares_its_strokes_and_each_token_keeps_its_place(streams, monkeypatch):
    r, names = Recorder(budget=5000), [f"r{number}" for number in range(streams)]
    r.arrive(*names, "doc", prompt=4600)
    r.step(dict.fromkeys(names, 4600))
    for _ in range(20):
        r.step(dict.fromkeys(names, 1))
    r.step(dict.fromkeys(names, 1) | {"doc": 4600}, took=0.5)
    for _ in range(5):
        r.step(dict.fromkeys((*names[: streams // 2], "doc"), 1))
    together = timeline(r.trace)
    monkeypatch.setattr(importlib.import_module("course_lib.lab.timeline"), "CROWD", 1000)
    one_by_one = timeline(r.trace)
    assert together.count('" stroke-dasharray="') == 2 and '" stroke-dasharray="' not in one_by_one, "of those that go on, of the others"
    assert strokes(together) == strokes(one_by_one)
    assert len(strokes(together)) == sum(step.decode_tokens for step in r.trace.steps)
    assert len(together) < len(one_by_one)


def test_chunks_carry_their_token_range_and_waits_their_reason():
    found = texts(timeline(everything(), by="step"))
    assert "0–63" in found and "64–99" in found and "kv_blocks" in found


def test_the_legend_names_every_reason():
    r = Recorder()
    r.arrive("a", "b", "c", "d", "e")
    reasons = ("decode_share", "kv_blocks", "seq_budget", "token_budget", "watermark")
    r.step({}, reasons=dict(zip("abcde", reasons, strict=True)))
    for width in (480, 960):
        assert f"waiting: {', '.join(reasons)}" in texts(timeline(r.trace, width=width))


def test_a_wait_without_a_reason_says_so():
    """A scheduler of one's own may give none; who comes while a step runs has none either, but isn't left out."""
    r = Recorder()
    r.arrive("a", "b")
    for _ in range(6):
        r.step({"a": 8})
    r.step({"b": 16})
    for by in WAYS:
        assert "no reason given" in texts(timeline(r.trace, by=by))
        assert "no reason given" not in texts(timeline(everything(), by=by))


def test_no_hatch_is_under_the_letters_of_a_chunk():
    svg = timeline(everything(), by="step", width=1600)
    shift = int(re.search(r"translate\(0 (\d+)\)", svg)[1])
    labels = [box for box in text_boxes(svg) if re.fullmatch(r"\d+–\d+", box[-1])]
    strokes = []
    for x, y, data in re.findall(r"M(\d+) (\d+)((?:[lm]-?\d+[- ]\d+)+)", re.search(r'lm-hatch" d="([^"]*)"', svg.split("translate")[1])[1]):
        x, y = int(x), int(y) + shift
        for command, dx, dy in re.findall(r"([lm])(-?\d+) ?(-?\d+)", data):
            if command == "l":
                strokes.append((x, x + int(dx), y + int(dy), y))
            x, y = x + int(dx), y + int(dy)
    assert len(labels) >= 4 and len(strokes) > 10
    for left, top, right, bottom, text in labels:
        assert not any(x0 < right and x1 > left and y0 < bottom and y1 > top for x0, x1, y0, y1 in strokes), text


def test_rows_of_several_requests_are_a_scale_with_its_key():
    svg = timeline(crowd(400, 420), by="step")
    found = texts(svg)
    assert "a row is up to 3 requests in order of arrival, named by its first" in found
    labels = [text for text in found if re.fullmatch(r"r\d+", text)]
    assert labels[:2] == ["r0", "r30"] and not any(" to r" in text for text in found)
    assert not any("a row is" in text for text in texts(timeline(crowd(40, 60))))


def test_the_stall_says_what_the_metrics_say():
    trace = stall()
    expected = seconds(metrics(trace).stall)
    assert expected == "4.6 s"
    assert f"3 streams: no token for {expected}" in texts(timeline(trace))
    assert subpaths(timeline(trace), "stall") == 3  # each stream's gap is shaded
    assert f"no token for {expected}" in timeline_text(trace)


def test_a_gap_of_one_stream_is_called_by_its_name():
    assert f"new: no token for {seconds(metrics(everything()).stall)}" in texts(timeline(everything()))


def test_an_even_stream_has_no_stall():
    r = Recorder()
    r.arrive("a")
    for num_tokens in (16, *[1] * 9):
        r.step({"a": num_tokens}, took=1.0)
    assert not any("no token" in text for text in texts(timeline(r.trace)))
    assert alt_text(r.trace).endswith("1 step: every stream flows.")


def in_seconds(text):
    return re.search(r"\d [mµ]?s\b", text)


def test_by_step_everything_is_counted_in_steps():
    trace = everything()
    assert "new: no token for 8 steps" in texts(timeline(trace, by="step"))
    assert "The longest gap between two tokens is 8 steps: new was preempted." in alt_text(trace, by="step")
    both = compare_alt(trace, stall(), by="step")
    assert "over 18 steps: " in both
    for said in (alt_text(trace, by="step"), both, timeline_text(trace, by="step"), *texts(timeline(trace, by="step")),
                 *texts(compare(trace, stall(), by="step")), *texts(budget(trace, by="step"))):  # fmt: skip
        assert not in_seconds(said), said
    assert all(in_seconds(said) for said in (alt_text(trace), timeline_text(trace), " ".join(texts(timeline(trace)))))


def test_by_step_a_long_step_is_no_stall():
    assert not any("no token" in text for text in texts(timeline(stall(), by="step")))


def test_a_clock_that_counts_steps_is_said_to():
    """FakeRunner's: a step takes 1 s, and there are no seconds."""
    r = Recorder()
    r.arrive("a", "b")
    r.step({"a": 16, "b": 16}, took=1)
    r.step({"a": 1, "b": 1}, took=1)
    for _ in range(6):
        r.step({"b": 1}, took=1)
    r.step({"a": 1, "b": 1}, took=1)
    for by in WAYS:
        found = texts(timeline(r.trace, by=by))
        assert "a: no token for 7 steps" in found and "2 requests · 9 steps · longest gap between two tokens 7 steps" in found
        assert not any(map(in_seconds, found))
    assert not in_seconds(alt_text(r.trace) + timeline_text(r.trace) + budget_alt(r.trace))
    r.trace.steps[-1].end += 0.5
    assert "a: no token for 7.5 s" in texts(timeline(r.trace))


def test_first_token_and_longest_gap_stand_beside_each_request():
    trace = stall()
    found = texts(timeline(trace))
    for request in metrics(trace).requests.values():
        assert seconds(request.ttft) in found and seconds(request.stall) in found


def test_compare_has_one_axis_and_shades_only_what_stalls_by_comparison():
    svg = compare(stall(), stall(chunk=460), titles=("whole", "chunks"))
    ticks = [text for text in texts(svg) if re.fullmatch(r"[\d.]+ s", text)]
    assert ticks.count("6 s") == 2
    assert subpaths(svg, "stall") == 3
    assert {"whole", "chunks", "3 streams: no token for 4.6 s", "3 streams: no token for 460 ms"} <= set(texts(svg))


def test_a_crowd_is_drawn_fast_and_small():
    trace = crowd()
    assert len(trace.requests) == 128 and len(trace.steps) == 400
    for by in WAYS:
        started = time.perf_counter()
        svg = timeline(trace, by=by)
        assert time.perf_counter() - started < 0.5
        assert len(svg) < 150_000, by
        assert int(ET.fromstring(svg).get("height")) < 1000


def test_a_wait_begins_at_the_arrival_and_ends_with_the_first_chunk():
    lives = {life.label: life for life in read(everything()).lives}
    assert lives["new"].waits[0] == (0.0, pytest.approx(0.1), "token_budget")
    start, end, reason = lives["late"].waits[0]
    assert (end - start, reason) == (pytest.approx(0.05), "")


def test_labels_replace_names_and_are_escaped():
    svg = timeline(stall(), labels={"doc": "R&D <report>"})
    assert "R&D <report>" in texts(svg) and "doc" not in texts(svg)


@pytest.mark.parametrize("call", [timeline, timeline_text])
def test_bad_arguments_are_named(call):
    with pytest.raises(ValueError, match="by='hours' is not known"):
        call(stall(), by="hours")
    with pytest.raises(ValueError, match="width=100 is too small"):
        timeline(stall(), width=100)


# ---- words and characters -------------------------------------------------------------------------


def test_the_alt_text_says_it_in_numbers():
    assert alt_text(stall()) == (
        "Timeline of 4 requests over 18 steps (6.3 s): 59 decode tokens, 4 prefill chunks of up to 4600 tokens. "
        "The longest gap between two tokens is 4.6 s: a stands still while a step computes 4600 prompt tokens of doc."
    )
    assert "1 preemption, 1 cancelled" in alt_text(everything()) and alt_text(everything()).endswith("new was preempted.")
    assert alt_text(empty()) == "Timeline of 0 requests: no step has run yet."


def test_show_gives_an_image_with_alt_text():
    svg, alt = timeline(stall()), 'a "quoted" <alt>'
    bundle = show(svg, alt)._repr_mimebundle_()
    image = ET.fromstring(bundle["text/html"].replace(">", "/>"))
    assert image.get("alt") == alt == bundle["text/plain"] == repr(show(svg, alt))
    assert base64.b64decode(image.get("src").removeprefix("data:image/svg+xml;base64,")).decode() == svg


@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize("by", WAYS)
def test_the_rows_of_the_text_are_equally_long(by, unicode):
    for trace in (*(make() for make in TRACES), crowd(60, 80)):
        text = timeline_text(trace, by=by, unicode=unicode, width=90)
        lines = text.splitlines()
        rows = lines[2:-1]
        assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= 90
        assert unicode or text.isascii()
        assert timeline_text(trace, by=by, unicode=unicode, width=90) == text


def test_colours_only_when_asked_for_and_the_letters_stay():
    plain, coloured = timeline_text(everything()), timeline_text(everything(), color=True)
    assert "\x1b" not in plain and "\x1b" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_the_text_shows_every_kind():
    rows = {line.split(" ")[0]: line for line in timeline_text(everything(), by="step").splitlines()}
    assert rows["old"].startswith("old    |01DDDDDDDDD   |")
    assert rows["new"].startswith("new    |.01D!......2DD|")
    assert rows["late"].startswith("late   |          .0Dx|")
    assert "! preempted" in timeline_text(everything()) and "x cancelled" in timeline_text(everything())


def test_many_requests_share_rows():
    lines = timeline_text(crowd(100, 120), max_rows=20).splitlines()
    assert len(lines) == 2 + 1 + 20 + 2 and lines[3].startswith("r0 to r4")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"), (0.00048, "480 µs"), (0.0046, "4.6 ms"), (0.606, "606 ms"),
        (0.9996, "1 s"), (4.6, "4.6 s"), (240, "240 s"),
    ],
)
def test_times_are_short(value, text):
    assert seconds(value) == text


def test_round_times():
    assert round_times(6.3, 8) == [(float(t), f"{t} s" if t else "0") for t in range(7)]
    assert [label for _, label in round_times(0.012, 4)] == ["0", "5 ms", "10 ms"]
    assert round_times(0.0, 4) == [(0.0, "0")]


@pytest.mark.parametrize("width", [-1, 0, 3, 319])
def test_a_picture_that_is_too_narrow_is_refused_at_once(width):
    with pytest.raises(ValueError, match=f"width={width} .* at least 320"):
        timeline(Trace(), width=width, title="a title that would have to be cut")

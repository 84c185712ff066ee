"""What the interactive views are fed: frames, the lab's settings, a live run. (In the browser: test_lab_browser.py.)"""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from test_pictures import run
from test_timeline import empty, everything, not_started, stall

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.lab import live
from course_lib.lab.block_map import read_pool
from course_lib.lab.frame import frame
from course_lib.lab.live_run import LiveRun
from course_lib.metrics import of_requests
from course_lib.runners import FakeRunner

scheduler_lab = pytest.importorskip("course_lib.lab.scheduler_lab")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pressure():
    return run()[0]


# ---- frames ---------------------------------------------------------------------------------------


def test_the_spans_of_a_request_say_what_it_got_in_every_step(pressure):
    # decodes with pauses between them
    taking_turns = scheduler_lab.Settings(running=24, budget=32, chunk=32, prompt=512, decode_share=0.25).run()
    for trace in (pressure, taking_turns, everything(), stall()):
        panel = frame(trace)["panels"][0]
        by_name = {request["name"]: request for request in panel["requests"]}
        for place, step in enumerate(trace.steps):
            waiting = trace.reasons_at(place)
            for name, request in by_name.items():
                spans = [span for span in request["spans"] if span[1] <= place <= span[2]]
                chunks = [chunk for chunk in step.chunks if chunk.request == name]
                for chunk in chunks:
                    if chunk.kind == "prefill":
                        assert ["p", place, place, chunk.start_pos, chunk.start_pos + chunk.num_tokens - 1] in spans
                    elif trace in (pressure, taking_turns):  # by hand, a recomputation may end where it likes
                        (span,) = [span for span in spans if span[0] == "d"]
                        assert span[3] + place - span[1] == chunk.start_pos
                assert [span[3] for span in spans if span[0] == "w"] == ([waiting[name]] if name in waiting else [])
                assert (["x", place, place] in spans) == (name in step.preempted)
                assert chunks or all(span[0] in "wx" for span in spans)


def test_the_changes_of_the_pool_lead_to_the_pool_of_every_step(pressure):
    panel = frame(pressure)["panels"][0]
    tables, cached = [[] for _ in panel["requests"]], set()
    for place in range(len(pressure.steps)):
        changes = panel["pool"]["changes"][place]
        for block, owner, change in zip(changes[::3], changes[1::3], changes[2::3], strict=True):
            if owner < 0:
                (cached.add if change > 0 else cached.remove)(block)
            elif change > 0:
                tables[owner].append(block)
            else:
                tables[owner].remove(block)
        pool = read_pool(pressure, place)
        assert {r["name"]: t for r, t in zip(panel["requests"], tables, strict=True) if t} == pool.tables
        assert cached == pool.cached and panel["pool"]["counts"][place] == [len(pool.holders), len(cached)]


def test_a_frame_says_where_everything_is():
    data = frame(stall(), stall(460), titles=("whole", "chunks"))
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(frame(stall(), stall(460), titles=("whole", "chunks"))))
    assert data["alt"] in data["svg"] and data["summary"].startswith("whole: 4 requests, 18 steps")
    above, below = data["panels"]
    assert above["bottom"] < below["top"] < below["bottom"] <= data["height"]
    for panel in data["panels"]:
        assert [row["requests"] for row in panel["rows"]] == [[0], [1], [2], [3]]
        assert len(panel["left"]) == len(panel["right"]) == len(panel["used"]) == len(panel["pool"]["changes"])


def test_a_trace_without_steps_has_a_frame_too():
    for trace in (empty(), not_started()):
        assert frame(trace)["panels"][0]["left"] == []


def test_an_end_is_in_the_step_after_the_last_token():
    requests = frame(everything())["panels"][0]["requests"]
    assert {r["name"]: (r["end"], r["reason"]) for r in requests}["old"] == (11, "length")


# ---- views ----------------------------------------------------------------------------------------


def test_the_view_is_one_line_of_text_with_its_numbers(pressure):
    pytest.importorskip("anywidget")
    from course_lib.lab import TraceView

    assert repr(TraceView(stall())) == (
        "TraceView(4 requests, 18 steps in 6.3 s, first token of doc after 4.6 s, longest gap between two tokens 4.6 s)"
    )
    with pytest.raises(TypeError, match="shows traces"):
        TraceView("trace.json")
    with pytest.raises(ValueError, match="got 3"):
        TraceView(stall(), stall(), stall())


def test_without_anywidget_the_views_are_made_of_ipywidgets():
    pytest.importorskip("ipywidgets")
    code = """
import sys
sys.modules["anywidget"] = None
sys.path.insert(0, "tests")
from test_timeline import stall
from test_pictures import run
from course_lib.lab import TraceView, lab
from course_lib.lab.view import LiveView
view = TraceView(run()[0])
slider = next(part for part in view.children if type(part).__name__ == "IntSlider")
before = view.children[-1].value
slider.value = 7
assert view.children[-1].value != before and "step 7" in view.children[-1].value
panel = lab()
before = panel._picture.value
panel._controls["chunk"].value = 9  # whole prompts
assert panel._picture.value != before
from test_views import live_run
run = live_run()
watch = LiveView(run)
run.step()
watch._rows["a"][1].click()
while not run.is_over():
    run.step()
    watch.show_frame(run.frame())
assert [output.finish_reason for output in run.outputs.values()] == ["cancelled", "length"], run.outputs
assert "(cancelled)" in watch._rows["a"][0].value and "5 tokens" in watch._rows["b"][0].value
assert all(button.disabled for _, button in watch._rows.values())
panel._controls["num_blocks"].value = 0  # 64 blocks, a prompt of 8192
assert "max_model_len is 1024" in panel._numbers.value
print(repr(view)); print(repr(panel)); print(repr(watch))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TraceView(10 requests, ")
    assert "LabView(65 requests, " in done.stdout and "LiveView(2 requests, " in done.stdout


def test_the_script_needs_nothing_from_elsewhere():
    text = (ROOT / "course_lib/lab/view.js").read_text("utf-8")
    assert "import " not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "export function mount(" in text


# ---- the lab --------------------------------------------------------------------------------------


def settings():
    """Every preset, and some settings drawn at random."""
    draw = random.Random(5)
    yield from ({**changes} for *_, changes in scheduler_lab.PRESETS)
    for _ in range(6):
        yield {key: draw.choice(values)[0] for key, _, values, _ in scheduler_lab.CONTROLS if key not in ("model", "prompt")}


def test_the_code_of_any_settings_makes_the_same_trace():
    same = 0
    for changes in settings():
        chosen = scheduler_lab.Settings(**{"prompt": 4096} | changes)
        try:
            expected = chosen.run().to_json()
        except ValueError:
            continue
        space = {}
        exec(chosen.code().replace("show(timeline(trace), alt_text(trace))", ""), space)
        assert space["trace"].to_json() == expected, changes
        same += 1
    assert same >= len(scheduler_lab.PRESETS)


def test_each_preset_shows_its_idea():
    traces = {key: scheduler_lab.Settings(**changes).run() for key, _, _, changes in scheduler_lab.PRESETS}
    numbers = {key: of_requests(trace) for key, trace in traces.items()}

    def gap(key):
        return max(request.stall for name, request in numbers[key].items() if name.startswith("chat"))

    def ttft(key):
        return numbers[key]["long"].ttft

    def ttft_of_newcomers(changes):
        trace = scheduler_lab.Settings(**changes).run()
        times = [r.ttft for name, r in of_requests(trace).items() if name.startswith("new")]
        return sum(times) / len(times)

    presets = {key: changes for key, _, _, changes in scheduler_lab.PRESETS}
    assert gap("stall") > 5 * gap("chunks") and gap("stall") > 1.5 * gap("too_big") > 4 * gap("chunks")
    assert ttft("too_small") > 3 * ttft("chunks") and gap("too_small") < gap("chunks") / 3
    uncapped = scheduler_lab.Settings(**presets["decode_cap"] | {"decode_share": 1.0}).run()
    assert ttft("decode_cap") < of_requests(uncapped)["long"].ttft
    patient = scheduler_lab.Settings(**presets["starvation"] | {"policy": "prefilling_first"}).run()
    assert ttft("starvation") > 1.8 * of_requests(patient)["long"].ttft
    assert any(step.preempted for step in traces["pressure"].steps)
    assert traces["prefix"].requests["long"].prefix_hit_tokens == 6144
    assert ttft_of_newcomers(presets["fair"]) < 0.5 * ttft_of_newcomers(presets["fair"] | {"policy": "prefilling_first"})


def test_settings_that_no_engine_can_serve_are_answered_with_the_reason():
    lab = scheduler_lab.Lab(running=8)
    before = lab.trace
    answer = lab.handle({"kind": "set", "values": asdict(lab.settings) | {"num_blocks": 64}})
    assert "8192" in answer["error"] and answer["values"]["num_blocks"] == 64 and "svg" not in answer
    assert lab.trace is before
    assert "svg" in lab.handle({"kind": "set", "values": asdict(lab.settings)})


def test_pinning_compares_and_every_answer_is_a_new_one():
    lab = scheduler_lab.Lab(running=8, chunk=None)
    answers = [lab.frame(), lab.handle({"kind": "action", "key": "pin"})]
    answers.append(lab.handle({"kind": "set", "values": asdict(lab.settings) | {"chunk": 512}}))
    assert len(answers[-1]["panels"]) == 2 and "A: chunk size whole prompt" in answers[-1]["svg"]
    assert [row[0] for row in answers[-1]["readouts"]["rows"]] == ["A", "B"]
    answers.append(lab.handle({"kind": "action", "key": "pin"}))
    assert len(answers[-1]["panels"]) == 1
    assert len({answer["seq"] for answer in answers}) == len(answers)


def test_an_answer_of_the_lab_is_quick(monkeypatch):
    """Simulation, numbers and picture of 64 requests in 200 steps. (In the browser, with all that is around it: test_lab_browser.py.)"""
    monkeypatch.setattr(scheduler_lab, "OUTPUT", 200)
    lab, times = scheduler_lab.Lab(running=63), []
    for chunk in (256, 512, 1024, 2048) * 2:
        begin = time.process_time()  # of this program alone
        frame = lab.handle({"kind": "set", "values": asdict(lab.settings) | {"chunk": chunk}})
        times.append(time.process_time() - begin)
        assert len(json.dumps(frame)) < 90_000, "characters on their way to the browser; 75,000 were seen"
        assert len(lab.trace.requests) == 64 and len(lab.trace.steps) >= 200
    assert min(times) < 0.066  # 0.033 were measured


def test_exports_are_the_trace_and_its_pictures():
    lab = scheduler_lab.Lab(running=4, prompt=512)
    texts = {key: lab.handle({"kind": "action", "key": key})["text"] for key, *_ in scheduler_lab.ACTIONS if key != "pin"}
    assert texts["json"] == lab.trace.to_json() and json.loads(texts["perfetto"])["traceEvents"]
    assert texts["svg"].startswith("<svg") and texts["budget"].startswith("<svg") and "EngineConfig(" in texts["code"]


def test_a_value_between_the_choices_becomes_one():
    controls = {c["key"]: [value for value, _ in c["values"]] for c in scheduler_lab.Lab(running=5).setup()["controls"]}
    assert controls["running"][:4] == [0, 4, 5, 8]


# ---- live -----------------------------------------------------------------------------------------


def live_run(**how):
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
    return LiveRun(engine, {"a": [1] * 20, "b": [2] * 30}, SamplingParams(max_tokens=5), **({"arrive": None} | how))


def test_a_live_run_ends_and_says_the_state_of_each_request():
    run = live_run(arrive={"b": 3})
    seen = []
    while not run.is_over():
        run.step()
        seen.append(tuple(text["state"] for text in run.frame()["texts"]))
    assert seen[:3] == [("decoding", "not yet here")] * 3 and seen[-1] == ("length", "length")
    assert {name: len(output.token_ids) for name, output in run.outputs.items()} == {"a": 5, "b": 5}


def test_a_click_cancels_a_request_of_its_own_run_only():
    run = live_run()
    run.step()
    assert not run.cancel("a", run.number - 1)
    assert run.cancel("a", run.number)
    while not run.is_over():
        run.step()
    assert {name: output.finish_reason for name, output in run.outputs.items()} == {"a": "cancelled", "b": "length"}
    assert not any(text["can_cancel"] for text in run.frame()["texts"])


def test_stopping_ends_all():
    run = live_run(arrive={"b": 4})
    run.step()
    run.stop()
    run.step()
    assert run.is_over() and list(run.outputs) == ["a"]


def test_bad_arguments_of_live_are_named():
    with pytest.raises(ValueError, match="arrive names 'c', but the prompts are a, b"):
        live_run(arrive={"c": 1})
    with pytest.raises(TypeError, match="prompts is one text"):
        LiveRun(Engine(FakeRunner()), "a text", None, None)
    with pytest.raises(TypeError, match="engine must be an Engine"):
        LiveRun(None, [[1]], None, None)


def watched(monkeypatch, on_step=None, **how):
    """live() on a FakeRunner, in a plain Python: the engine, and the list of frames shown."""
    view = pytest.importorskip("course_lib.lab.view")
    monkeypatch.setattr("IPython.display.display", lambda *shown: None)
    monkeypatch.setattr("course_lib.lab.live_run.LEAST_PAUSE", 0.0)
    monkeypatch.setattr("course_lib.lab.live_run.SHARE", 0)
    frames = []
    show_frame = view.LiveView.show_frame
    monkeypatch.setattr(view.LiveView, "show_frame", lambda self, data: (frames.append(data), show_frame(self, data)))
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64), on_step=on_step)
    return engine, frames, lambda: live(engine, {"a": [1] * 20, "b": [2] * 30}, SamplingParams(max_tokens=50), **how)


def test_a_live_run_shows_frames_while_it_runs_and_the_last_one_at_the_end(monkeypatch):
    engine, frames, run = watched(monkeypatch)
    outputs = run()
    assert {name: output.token_ids for name, output in outputs.items()} == {
        "a": FakeRunner().solo([1] * 20, 50), "b": FakeRunner().solo([2] * 30, 50),
    }  # fmt: skip
    assert len(frames) > 3
    assert [text["text"] for text in frames[-1]["texts"]] == ["50 tokens", "50 tokens"]
    assert len(frames[-1]["panels"][0]["left"]) == len(engine.trace.steps)


def test_an_interrupt_ends_a_live_run_between_two_steps_and_the_engine_goes_on(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    engine, frames, run = watched(monkeypatch, lambda output: output.step == 9 and signal.raise_signal(signal.SIGINT))
    outputs = run()
    assert {(output.finish_reason, len(output.token_ids)) for output in outputs.values()} == {("cancelled", 10)}
    assert not any(text["can_cancel"] for text in frames[-1]["texts"])
    assert signal.getsignal(signal.SIGINT) is before
    engine.check_invariants()
    (output,) = engine.generate([[3] * 12], SamplingParams(max_tokens=4))
    assert output.token_ids == FakeRunner().solo([3] * 12, 4)


def test_a_second_interrupt_is_not_held_back(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    clicks = [1]

    def twice(output):
        if output.step == 5 and clicks.pop():
            clicks.append(0)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    engine, frames, run = watched(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert signal.getsignal(signal.SIGINT) is before and len(frames[-1]["panels"][0]["left"]) == 5
    while engine.has_unfinished_requests():  # the step that was interrupted is done again
        engine.step()
    engine.check_invariants()
    assert {request.finish_reason for request in engine.trace.requests.values()} == {"length"}


def test_a_live_run_works_outside_the_main_thread(monkeypatch):
    _, frames, run = watched(monkeypatch)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert [text["state"] for text in frames[-1]["texts"]] == ["length", "length"]


def test_the_view_of_a_live_run_passes_a_click_on_and_says_so():
    pytest.importorskip("anywidget")
    from course_lib.lab.view import LiveView

    run = live_run()
    view, sent = LiveView(run), []
    view.send = sent.append
    run.step()
    view.on_message({"kind": "cancel", "request": "a", "run": run.number - 1})
    view.on_message({"kind": "cancel", "request": "nobody", "run": run.number})
    assert sent == []
    view.on_message({"kind": "cancel", "request": "b", "run": run.number})
    assert sent == [{"kind": "cancelled", "request": "b"}]
    while not run.is_over():
        run.step()
    view.show_frame(run.frame())
    assert repr(view).startswith("LiveView(2 requests, ")
    assert {name: output.finish_reason for name, output in run.outputs.items()} == {"a": "length", "b": "cancelled"}

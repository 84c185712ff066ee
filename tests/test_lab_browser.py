"""The views in a real JupyterLab, driven by keyboard and mouse in Chromium.

Needs the packages playwright and jupyterlab, and a Chromium at CHROMIUM (default /usr/bin/chromium); skipped elsewhere.
"""

import base64
import contextlib
import functools
import inspect
import json
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
if not Path(CHROMIUM).exists():
    pytest.skip(f"no browser at {CHROMIUM}: set CHROMIUM to one, to test the views in it", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright drives the browser")
pytest.importorskip("jupyterlab", reason="the views are tested in JupyterLab")
nbformat = pytest.importorskip("nbformat")

from course_lib.lab.block_map import read_pool

ROOT = Path(__file__).resolve().parents[1]
HEADLESS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip


def serve():
    from course_lib import Engine, EngineConfig, SamplingParams
    from course_lib.runners import FakeRunner

    engine = Engine(FakeRunner(), EngineConfig(num_blocks=40, max_num_batched_tokens=64, max_num_seqs=8, max_prefill_chunk_size=32))
    for number in range(8):
        engine.add_request([1] * 20 + [number] * (10 + 30 * (number % 3)), SamplingParams(max_tokens=24), request_id=f"r{number}")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


TRACE = f"{inspect.getsource(serve)}\nengine = serve()\n"
NOTEBOOKS = {
    "view.ipynb": [TRACE + "from course_lib.lab import TraceView\nview = TraceView(engine.trace)\nview"],
    "lab.ipynb": ["from course_lib.lab import lab\nthe_lab = lab(running=63)\nthe_lab"],
    "speed.ipynb": [  # 64 requests, 200 steps
        "from course_lib.lab import scheduler_lab\nscheduler_lab.OUTPUT = 200\nthe_lab = scheduler_lab.lab(running=63)\nthe_lab",
        "len(the_lab.lab.trace.requests), len(the_lab.lab.trace.steps)",
    ],
    "live.ipynb": [
        "from course_lib.lab import live\n"
        "from course_lib import Engine, EngineConfig, SamplingParams\n"
        "from course_lib.runners import FakeRunner\n"
        "import time\n"
        "engine = Engine(FakeRunner(), EngineConfig(num_blocks=400), on_step=lambda output: time.sleep(0.03))\n"
        "outputs = live(engine, {'first': [1] * 30, 'second': [2] * 60}, SamplingParams(max_tokens=150))",
        "{name: (output.finish_reason, len(output.token_ids)) for name, output in outputs.items()}",
    ],
    "model.ipynb": [
        "from course_lib.lab import live\n"
        "from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams\n"
        "import time\n"
        "engine = Engine(ModelRunner('tiny'), EngineConfig(num_blocks=400), on_step=lambda output: time.sleep(0.03))\n"
        "outputs = live(engine, {'Ana': 'Tell me a story.', 'Ben': 'And another.'}, SamplingParams(max_tokens=1000, ignore_eos=True))",
        "engine.check_invariants()\n"
        "again = engine.generate(['Tell me a story.'], SamplingParams(max_tokens=5, ignore_eos=True))[0]\n"
        "{output.finish_reason for output in outputs.values()}, again.token_ids == outputs['Ana'].token_ids[:5]",
    ],
}

# Two cells, as in every notebook of the course: a picture that stays, and the widget.
SAVED = [
    "from course_lib.lab import alt_text, lab, show, timeline\n"
    "the_lab = lab(running=15)\n"
    "show(timeline(the_lab.lab.trace), alt_text(the_lab.lab.trace))",
    "the_lab",
]


@functools.cache
def saved_notebook():
    """A notebook with the lab that was run and saved the way the course's are: outputs, but no state of widgets."""
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in SAVED])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    nbclient.NotebookClient(notebook, store_widget_state=False, record_timing=False, timeout=120).execute(env=env)
    assert "widgets" not in notebook.metadata
    return notebook


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def jupyterlab(folder, root):
    """A JupyterLab of its own: nothing of the user's, and nothing from the network. Gives the address of each file in `root`.

    folder  what JupyterLab writes goes here
    root    the folder that it shows
    """
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR",
             "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR")  # fmt: skip
    env = os.environ | {name: str(folder / name.lower()) for name in names} | {"PYTHONPATH": str(ROOT)}
    for name in names:
        Path(env[name]).mkdir()
    config = Path(env["JUPYTER_CONFIG_DIR"]) / "labconfig"
    config.mkdir()
    (config / "page_config.json").write_text('{"disabledExtensions":{"@jupyterlab/apputils-extension:announcements":true}}')
    port, token = free_port(), secrets.token_hex(8)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
             "--allow-root", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}", "--expose-app-in-browser",
             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            env=env, stdout=log, stderr=log)  # fmt: skip
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.2)
            yield lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}?reset&token={token}"
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jupyter")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    for name, sources in NOTEBOOKS.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, notebooks / name)
    nbformat.write(saved_notebook(), notebooks / "saved.ipynb")
    with jupyterlab(folder, notebooks) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=HEADLESS)
        yield started
        started.close()


SESSION = "window.jupyterapp.shell.currentWidget.sessionContext"
CELLS = "window.jupyterapp.shell.currentWidget.content.widgets"
# A kernel of ipykernel 7.0 to 7.3 may be deaf for ever when something is sent to it in the very moment in which it answers
# something else, as happens now and then while JupyterLab opens a notebook. So: wait until it has been silent for 0.2 s, and
# ask whether it hears us.
HEARS = f"""async () => {{
    const kernel = {SESSION}.session.kernel, later = (seconds, what) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds, what));
    let heard = performance.now();
    const listen = () => {{ heard = performance.now() }};
    kernel.anyMessage.connect(listen);
    while (performance.now() - heard < 200) await later(0.05);
    kernel.anyMessage.disconnect(listen);
    return Promise.race([kernel.requestKernelInfo().then(() => true), later(10, false)]);
}}"""


class Page:
    """A notebook in the browser, run to its end. Collects what went wrong on the way."""

    def __init__(self, browser, url, **how):
        self.errors, self.strangers, self.console = [], [], []
        self.page = page = browser.new_page(viewport={"width": 1280, "height": 1500}, **how)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.console.append(f"{m.type}: {m.text}"))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" and "anywidget" in m.text else None)
        page.on("request", self.note_request)
        for _ in range(3):
            page.goto(url)
            if self.has_kernel():
                break
            page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")
        else:
            raise AssertionError(f"three deaf kernels: {self.describe()}")
        page.wait_for_function(f"window.jupyterapp.shell.currentWidget.context.isReady && {CELLS}.every((cell) => cell.model)")
        page.evaluate("document.querySelector('.jp-SideBar .lm-mod-current')?.click()")

    def has_kernel(self):
        try:
            self.page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=40_000)
        except playwright.TimeoutError:
            return False
        return self.page.evaluate(HEARS)

    def note_request(self, request):
        if not request.url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")):
            self.strangers.append(request.url)

    def run(self, wait=True):
        self.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        if wait:
            self.page.wait_for_function(f"{CELLS}.every((cell) => cell.model.type !== 'code' || cell.model.executionCount)", timeout=60_000)
        return self.page

    def describe(self):
        """What is to be seen, for a test that failed: the kernel's state, each cell's number and output, the console."""
        try:
            cells = self.page.evaluate(f"{CELLS}.map((cell) => [cell.promptNode?.textContent, cell.outputArea?.node.innerText.slice(0, 800)])")
            kernel = self.page.evaluate(f"{SESSION}.session?.kernel?.status")
        except playwright.Error as error:
            return f"it can't be asked: {error}"
        return "\n".join([f"kernel: {kernel}", *(f"cell {number} {text!r}" for number, text in cells), *self.console[-20:]])

    def num_cells(self):
        return self.page.evaluate(f"{CELLS}.length")

    def close(self):
        with contextlib.suppress(playwright.Error):
            self.page.evaluate(f"{SESSION}.shutdown()")
        self.page.close()
        assert not self.errors, self.errors
        assert not self.strangers, self.strangers


@pytest.fixture
def opened(browser, server):
    pages = []

    def open_page(name, **how):
        pages.append(Page(browser, server(name), **how))
        return pages[-1]

    open_page.pages = pages
    yield open_page
    for page in pages:
        page.close()


KEYS = ["b", "a", "x", "d", "d", "m", "y", "z", "0", "0", "k", "j", "Shift+Enter", "Control+Enter"]


def tab_stops(page, most=60):
    """(role or tag, accessible name) of everything that Tab reaches inside the view, beginning at its first control."""
    stops = []
    for _ in range(most):
        stop = page.evaluate(
            """() => { const e = document.activeElement; if (!e?.closest('.lmv')) return null;
            return [e.tagName.toLowerCase(), e.getAttribute('aria-label') || e.textContent.trim(), e.dataset.lmSuppressShortcuts,
                    getComputedStyle(e).outlineStyle] }"""
        )
        if stop is None:
            break
        stops.append(stop)
        page.keyboard.press("Tab")
    return stops


def test_the_trace_view_is_used_with_the_keyboard_alone(opened):
    notebook = opened("view.ipynb")
    page = notebook.run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    before = notebook.num_cells()
    page.locator(".lmv button").first.focus()
    stops = tab_stops(page)
    assert [tag for tag, *_ in stops] == ["button", "button", "button", "input", "select", "div"]
    assert all(name and suppressed == "true" for _, name, suppressed, _ in stops), stops
    picture = page.get_by_role("application")
    picture.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus must be seen"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    story = page.locator(".lmv-story")
    assert "Step 2 of" in story.inner_text() and "r0, step 2: " in story.inner_text()
    page.keyboard.press("End")
    assert "r0, step" in story.inner_text() and "is finished (length)" in story.inner_text()
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    assert "r5, step 0: waits: " in story.inner_text()
    page.wait_for_function("document.querySelector('.lmv [aria-live]').textContent.startsWith('r5, step 0: waits')")
    assert page.get_by_role("img", name="Block map at step 0").count() == 1
    slider = page.get_by_role("slider", name="Step")
    slider.press("ArrowRight")
    assert "Step 1 of" in slider.get_attribute("aria-valuetext")
    for key in KEYS:
        slider.press(key)
        picture.press(key)
    assert notebook.num_cells() == before
    assert page.evaluate(f"{CELLS}[0].model.type") == "code"
    dirty = "window.jupyterapp.shell.currentWidget.context.model.dirty"
    page.evaluate(f"{dirty} = true")
    slider.press("Control+s")
    page.wait_for_function(f"!{dirty}")
    picture.press("Escape")
    assert page.evaluate("document.activeElement.classList.contains('jp-Cell')"), "Escape leaves the view"


def test_the_mouse_reads_any_cell_and_playing_goes_through_the_run(opened):
    page = opened("view.ipynb").run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    picture = page.locator(".lmv-picture")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    seen = set()
    for x in range(10, 80, 4):
        for y in range(15, 70, 4):
            page.mouse.move(box["x"] + box["width"] * x / 100, box["y"] + box["height"] * y / 100)
            seen.add(page.locator(".lmv-story div").last.inner_text())
    assert sum("prefill of tokens" in story for story in seen) > 3
    assert any("decode: the token at position" in story for story in seen)
    assert any("waits: " in story for story in seen)
    page.get_by_label("Speed").select_option("4")
    play = page.get_by_role("button", name="Play")
    play.click()
    steps = set()
    for _ in range(30):
        steps.add(page.get_by_role("slider", name="Step").input_value())
        page.wait_for_timeout(30)
    assert len(steps) > 5, "playing moves the step"
    page.get_by_role("button", name="Pause").click()
    at = page.get_by_role("slider", name="Step").input_value()
    page.wait_for_timeout(200)
    assert page.get_by_role("slider", name="Step").input_value() == at


SCRUB = """async () => {
  const slider = document.querySelector('.lmv-step'), works = [], frames = [];
  for (let i = 0; i < 60; i++) {
    slider.value = (i * 17) % (+slider.max + 1);
    const start = performance.now();
    slider.dispatchEvent(new Event('input'));
    works.push(performance.now() - start);
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - start);
  }
  return [works.sort((a, b) => a - b), frames.sort((a, b) => a - b)];
}"""


def test_the_lab_is_used_with_the_keyboard_alone(opened):
    notebook = opened("lab.ipynb")
    page = notebook.run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    before = notebook.num_cells()
    page.locator(".lmv button").first.focus()
    stops = tab_stops(page)
    names = [name for _, name, *_ in stops]
    assert len(stops) == 9 + 11 + 6 + 6 and all(names) and len(set(names)) == len(names), names
    assert all(suppressed == "true" for _, _, suppressed, _ in stops)
    chunk = page.get_by_role("slider", name="chunk size")
    chunk.press("End")
    page.wait_for_function("document.querySelector('.lmv table').textContent.includes('ms')")
    assert chunk.get_attribute("aria-valuetext") == "whole prompt"
    page.wait_for_function("document.querySelector('.lmv-picture svg desc').textContent.includes('chunks of up to 8192 tokens')")
    chunk.press("ArrowLeft")
    page.wait_for_function("!document.querySelector('.lmv-picture svg desc').textContent.includes('chunks of up to 8192 tokens')")
    for key in KEYS:
        chunk.press(key)
    assert notebook.num_cells() == before


def test_presets_comparing_and_errors_in_the_lab(opened):
    page = opened("lab.ipynb").run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    page.get_by_role("button", name="the stall").press("Enter")
    page.wait_for_selector(".lmv-picture text:has-text('128 streams: no token for')")
    page.get_by_role("button", name="Pin as A").press("Enter")
    page.wait_for_selector("button:has-text('Unpin A')")
    page.get_by_role("button", name="chunks", exact=True).press("Enter")
    page.wait_for_selector(".lmv-picture text:has-text('A: chunk size whole prompt')")
    assert page.locator(".lmv tbody tr").count() == 2
    page.get_by_role("combobox", name="chip").select_option(label="laptop")
    page.wait_for_selector(".lmv-note:has-text(\"doesn't fit on\")")
    page.get_by_role("combobox", name="chip").select_option(label="a100")
    page.wait_for_selector(".lmv-note", state="hidden")
    for button, name in (("Trace (JSON)", "trace.json"), ("Trace (Perfetto)", "trace.perfetto.json"), ("Picture (SVG)", "timeline.svg")):
        with page.expect_download() as download:
            page.get_by_role("button", name=button).press("Enter")
        assert download.value.suggested_filename == name
        text = Path(download.value.path()).read_text("utf-8")
        assert text.startswith("<svg") if name.endswith("svg") else json.loads(text)
    page.get_by_role("button", name="Copy as code").press("Enter")
    code = page.get_by_role("textbox", name="These settings as Python code")
    assert "chip='a100'" in code.input_value() and "EngineConfig(" in code.input_value()


def test_at_200_percent_beside_the_file_browser_settings_and_picture_are_in_sight_together(opened):
    page = opened("lab.ipynb").run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    page.set_viewport_size({"width": 640, "height": 360})  # a screen of 1280 x 720 at 200 %
    page.evaluate("window.jupyterapp.shell.expandLeft()")
    page.locator(".jp-FileBrowser").wait_for()
    page.locator(".lmv").evaluate("lab => lab.scrollIntoView({ block: 'start' })")
    for name in ("running streams", "chunk size", "known prefix"):
        slider = page.get_by_role("slider", name=name)
        slider.press("ArrowRight")
        parts = (page.locator(".jp-WindowedPanel-outer"), slider, page.locator(".lmv-picture"))
        window, control, picture = (part.bounding_box() for part in parts)
        assert window["x"] <= control["x"] and control["x"] + control["width"] <= window["x"] + window["width"]
        assert window["y"] <= control["y"] < picture["y"] < window["y"] + window["height"] - 120, "120 of about 240 pixels"


DRAG = """async ([values, pause]) => {
  const input = [...document.querySelectorAll('.lmv-control input')].find((e) => e.getAttribute('aria-label') === 'chunk size');
  const picture = document.querySelector('.lmv-picture'), times = [];
  let changed = 0, wake;
  const observer = new MutationObserver(() => { changed = performance.now(); wake?.(); });
  observer.observe(picture, { childList: true });
  const last = async () => {
    let before = -1;
    while (before !== changed) { before = changed; await new Promise((r) => setTimeout(r, 400)); }
  };
  for (const value of values) {
    const start = performance.now();
    changed = 0;
    input.value = value;
    input.dispatchEvent(new Event('input'));
    if (!pause) {
      await new Promise((r) => { wake = r; setTimeout(r, 5000); });
      times.push(changed ? changed - start : 5000);
      for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
    }
    else await new Promise((r) => setTimeout(r, pause));
  }
  const end = performance.now();
  if (pause) { changed = end; await last(); times.push(changed - end); }
  observer.disconnect();
  return times;
}"""


def test_the_lab_is_quick(opened, capsys):
    """What was measured is printed. The limits are three times what is promised, for machines that are busy."""
    page = opened("speed.ipynb").run()
    page.wait_for_selector(".lmv-picture svg path.lm-prefill")
    assert page.locator(".jp-OutputArea-output pre").last.inner_text() == "(64, 200)"
    page.evaluate(DRAG, [[3, 4, 5, 6], 0])  # the first ones are slower: nothing is in any cache yet
    moves = sorted(page.evaluate(DRAG, [[3, 4, 5, 6] * 9, 0]))
    lag = page.evaluate(DRAG, [[2, 3, 4, 5, 6] * 4, 50])[0]
    works, frames = page.evaluate(SCRUB)
    page.get_by_role("button", name="the stall").press("Enter")
    page.wait_for_selector(".lmv-picture text:has-text('128 streams: no token for')")
    start = time.perf_counter()
    page.get_by_role("button", name="Pin as A").press("Enter")
    page.wait_for_selector("button:has-text('Unpin A')")
    page.get_by_role("button", name="chunks", exact=True).press("Enter")
    page.wait_for_selector(".lmv-picture text:has-text('A: chunk size whole prompt')")
    both = time.perf_counter() - start
    move, scrub = statistics.median(moves), statistics.median(works)
    with capsys.disabled():
        print(
            f"\nlab, 200 steps of 64 requests: slider move to new picture {move:.0f} ms (median of {len(moves)}, p95 "
            f"{moves[-2]:.0f}, least {moves[0]:.0f}; promised 50); lag after a drag of 20 moves at 50 ms {lag:.0f} ms (150); "
            f"scrub {scrub:.1f} ms, p95 {works[-3]:.1f} (16), to the frame {statistics.median(frames):.0f} ms; pinning and the "
            f"second run of 128 streams and a prompt of 8192 {both * 1e3:.0f} ms (500)"
        )
    assert moves[0] < 3 * 50, "the least: what other programs take of the machine isn't the lab's"
    assert lag < 3 * 150 and scrub < 16 and both < 3 * 0.5


MAP = """() => {
  const cells = {}, [, , width] = document.querySelector('.lmv-map svg').getAttribute('viewBox').split(' ').map(Number);
  for (const path of document.querySelectorAll('.lmv-map svg > g > path')) {
    const kind = path.getAttribute('class');
    if (/^(lm-own.|lmv-mesh)$/.test(kind)) {
      cells[kind] = [...path.getAttribute('d').matchAll(/M(\\d+) (\\d+)h(\\d+)v(\\d+)/g)].map((match) => match.slice(1).map(Number));
    }
  }
  return [width, cells];
}"""


def test_the_block_map_has_the_colours_of_the_static_one_at_every_step_forwards_and_backwards(opened):
    trace = serve().trace
    page = opened("view.ipynb").run()
    page.wait_for_selector(".lmv-map svg path.lm-own0")
    last, hatched = len(trace.steps) - 1, set()
    for step in [*range(0, last, 5), last, *range(last, -1, -7)]:
        page.get_by_role("slider", name="Step").evaluate("(e, step) => { e.value = step; e.dispatchEvent(new Event('input')) }", step)
        width, drawn = page.evaluate(MAP)
        shown = {}
        for kind, boxes in drawn.items():
            for x, y, w, pitch in boxes:
                columns = (width - 62 - 16) // pitch // 8 * 8
                for column in range((x - 62) // pitch, (x - 62 + w) // pitch):
                    shown.setdefault((y - 26) // pitch * columns + column, set()).add(kind)
        pool = read_pool(trace, step)
        expected = {}
        for block, (name, *_) in pool.holders.items():
            place = pool.places[name]
            expected[block] = {f"lm-own{place % 5}"} | ({"lmv-mesh"} if place // 5 % 2 else set())
            hatched |= {name} if place // 5 % 2 else set()
        assert shown == expected, step
    assert hatched, "with five requests or fewer there would be no hatch to look at"


def test_a_saved_notebook_shows_the_picture_before_anything_is_run(opened):
    page = opened("saved.ipynb").page
    image = page.locator(".jp-OutputArea-output img")
    image.wait_for()
    assert image.get_attribute("alt").startswith("Timeline of 16 requests over ")
    assert image.evaluate("image => image.complete && image.naturalWidth") == 960
    assert page.evaluate(f"{CELLS}[0].model.executionCount") == 1, "from the file: no kernel ran it"
    assert "LabView(16 requests, " in page.locator(".jp-OutputArea-output").last.inner_text(), "a line in place of the widget"


def test_a_page_made_of_a_saved_notebook_shows_the_picture():
    nbconvert = pytest.importorskip("nbconvert")
    html, _ = nbconvert.HTMLExporter().from_notebook_node(saved_notebook())
    (image,) = [tag for tag in re.findall("<img [^>]*>", html) if 'alt="Timeline of 16 requests over ' in tag]
    svg = base64.b64decode(re.search('src="data:image/svg[+]xml;base64,([^"]+)"', image).group(1)).decode()
    assert svg.startswith("<svg ") and 'class="lm-prefill' in svg and 'class="lm-tick' in svg
    assert "LabView(16 requests, " in html, "a line in place of the widget"


def test_a_live_run_streams_and_a_request_is_cancelled_while_it_runs(opened):
    page = opened("live.ipynb").run(wait=False)
    cancel = page.get_by_role("button", name="Cancel first")
    cancel.wait_for()
    page.wait_for_function("document.querySelectorAll('.lmv-picture svg path.lm-prefill').length > 0")
    widths = set()
    for _ in range(8):
        widths.add(page.get_by_role("slider", name="Step").get_attribute("max"))
        page.wait_for_timeout(100)
    assert len(widths) > 3, "the timeline grows"
    cancel.press("Enter")
    page.wait_for_selector(".lmv-request:has-text('cancelled')")
    assert page.evaluate(f"{CELLS}[0].model.executionCount") is None, "the run goes on"
    page.wait_for_function(f"{CELLS}.every((cell) => cell.model.executionCount)", timeout=60_000)
    result = page.locator(".jp-OutputArea-output pre").last.inner_text()
    assert "'second': ('length', 150)" in result and "'first': ('cancelled', " in result
    assert cancel.is_disabled()


def test_the_interrupt_button_ends_a_live_run_of_a_model_and_leaves_the_engine_usable(opened):
    pytest.importorskip("transformers")
    page = opened("model.ipynb").run(wait=False)
    page.get_by_role("button", name="Cancel Ana").wait_for(timeout=60_000)
    text = page.locator(".lmv-request:has-text('Ana') p")
    seen = set()
    for _ in range(8):
        seen.add(text.inner_text())
        page.wait_for_timeout(150)
    assert len(seen) > 3, "text streams"
    assert page.evaluate(f"{CELLS}[0].model.executionCount") is None
    page.get_by_role("button", name="Interrupt the kernel").first.click()
    page.wait_for_function(f"{CELLS}.every((cell) => cell.model.executionCount)", timeout=60_000)
    assert page.locator(".jp-OutputArea-output pre").last.inner_text() == "({'cancelled'}, True)"
    page.wait_for_selector(".lmv-request:has-text('Ana'):has-text('cancelled')")
    assert page.get_by_role("button", name="Cancel Ben").is_disabled()

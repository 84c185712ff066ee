"""The lesson and the exercises that run in the browser: what is put into them, and, once built, a run of each in Chromium.

`make site-lessons` builds them once; the runs are `long`, and skipped where nothing is built. Nothing here asks the network.
"""

import json
import sys
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build_lessons_site as lessons


def test_a_notebook_for_the_browser_has_its_kernel_and_first_cell_and_no_outputs():
    for name in lessons.NOTEBOOKS:
        before = json.loads((ROOT / name).read_text(encoding="utf-8"))
        after = json.loads(lessons.for_browser((ROOT / name).read_text(encoding="utf-8")))
        assert after["metadata"]["kernelspec"]["name"] == "python"
        assert after["cells"][1]["source"] == lessons.FIRST_CELL
        assert [c["source"] for c in after["cells"][2:]] == [c["source"] for c in before["cells"][1:]]
        assert not any(c["outputs"] or c["execution_count"] for c in after["cells"] if c["cell_type"] == "code")


def test_no_notebook_for_the_browser_asks_for_torch_or_for_compiled_packages():
    for name in lessons.NOTEBOOKS:
        text = "".join("".join(cell["source"]) for cell in json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code")
        assert not any(word in text for word in ("torch", "numpy", "matplotlib", "ModelRunner", "load_model")), name


def test_a_package_comes_with_all_that_it_depends_on():
    packages = {"a": {"depends": ["B_c"]}, "b-c": {"depends": ["d", "a"]}, "d": {"depends": []}, "e": {"depends": []}}
    assert lessons.closure(packages, ("a",)) == ["a", "b-c", "d"]


def test_when_a_program_fails_its_words_are_passed_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lessons, "WORK", tmp_path)
    with pytest.raises(lessons.CannotBuild, match="no such package"):
        lessons.run(sys.executable, "-c", "raise SystemExit('no such package')")
    monkeypatch.setattr(lessons, "build", lambda: lessons.run(sys.executable, "-c", "raise SystemExit('no network')"))
    assert lessons.main() == 1
    assert "can't be built: " in capsys.readouterr().err


# ---- in Chromium


@pytest.fixture(scope="module")
def address():
    browser = pytest.importorskip("test_site_browser", reason="it drives the browser")
    if not (lessons.OUT / "lab" / "index.html").exists():
        pytest.skip("the lessons' site isn't built: `make site-lessons` does that, once, with a network")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(browser.QuietHandler, directory=lessons.OUT)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(address):
    from test_lab_browser import CHROMIUM, HEADLESS, playwright

    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=HEADLESS)
        yield started
        started.close()


@pytest.mark.long
@pytest.mark.parametrize("name", lessons.NOTEBOOKS)
def test_it_runs_in_the_browser_and_asks_nobody_else(address, chromium, name):
    from test_lab_browser import CELLS

    page, strangers = chromium.new_page(viewport={"width": 1280, "height": 1500}), []
    page.on("request", lambda request: None if request.url.startswith((address, "data:", "blob:")) else strangers.append(request.url))
    page.goto(f"{address}/lab/index.html?path={name}")
    page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=180_000)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    failed = "cell.model.outputs.toJSON().some((output) => output.output_type === 'error')"
    meant = "(cell.model.getMetadata('tags') ?? []).includes('raises-exception')"
    code = f"{CELLS}.filter((cell) => cell.model.type === 'code')"
    page.wait_for_function(f"{code}.every((cell) => cell.model.executionCount) || {code}.some((cell) => {failed} && !{meant})", timeout=240_000)
    errors = page.evaluate(f"{code}.filter((cell) => {failed} && !{meant}).map((cell) => [cell.model.id, cell.model.outputs.toJSON()])")
    assert not errors, errors
    if name.startswith("notebooks/08"):
        page.wait_for_selector(".lm-parsons select", state="attached")
    else:
        assert "not done yet" in json.dumps(page.evaluate(f"{code}.map((cell) => cell.model.outputs.toJSON())")), "the stubs' checks say so"
    page.close()
    assert not strangers, strangers

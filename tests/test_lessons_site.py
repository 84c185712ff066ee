"""The lesson and the exercises that run in the browser: what is put into them, and, once built, a run of each in Chromium.

`make site-lessons` builds them once; the runs are `long`, and skipped where nothing is built. Nothing here asks the network.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build_lessons_site as lessons

CELLS = "window.jupyterapp.shell.currentWidget.content.widgets"
SECONDS = 180  # until Python has started, on a busy machine


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
        cells = json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
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
    with browser.served(lessons.OUT) as root:
        yield root


@pytest.fixture(scope="module")
def chromium(address):
    from test_lab_browser import CHROMIUM, HEADLESS, playwright

    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=HEADLESS)
        yield started
        started.close()


class Notebook:
    """A notebook in JupyterLite, with what it asks of other hosts."""

    def __init__(self, chromium, address, name):
        self.page, self.strangers = chromium.new_page(viewport={"width": 1280, "height": 1500}), []
        self.page.on("request", lambda request: None if request.url.startswith((address, "data:", "blob:")) else self.strangers.append(request.url))
        self.page.goto(f"{address}/lab/index.html?path={name}")
        kernel = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status"
        self.page.wait_for_function(f"{kernel} === 'idle'", timeout=SECONDS * 1000)

    def cells(self):
        return self.page.evaluate(f"{CELLS}.filter((cell) => cell.model.type === 'code').map((cell) => cell.model.id)")

    def run(self, cell, source=None):
        """Run one cell, with another text if one is given; its outputs as JSON."""
        script = f"""async ([name, source]) => {{
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = {CELLS}.findIndex((cell) => cell.model.id === name);
            if (source !== null) notebook.activeCell.model.sharedModel.setSource(source);
            await window.jupyterapp.commands.execute('notebook:run-cell');
            return notebook.activeCell.model.outputs.toJSON();
        }}"""
        return json.dumps(self.page.evaluate(script, [cell, source]))

    def close(self):
        self.page.close()
        assert not self.strangers, self.strangers


@pytest.fixture
def opened(chromium, address):
    pages = []

    def open_page(name):
        pages.append(Notebook(chromium, address, name))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.mark.long
def test_the_lesson_runs_in_the_browser_with_its_puzzle(opened):
    lesson = opened("notebooks/08_chunk_scheduling.ipynb")
    for cell in lesson.cells():
        assert '"error"' not in lesson.run(cell), cell
    lesson.page.wait_for_selector(".lm-parsons select", state="attached")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in lessons.NOTEBOOKS if name.startswith("exercises")])
def test_an_exercise_is_checked_in_the_browser(opened, name):
    """Stubs are not done; with the course's own answers every check is green, and each part runs inside the engine."""
    exercise = opened(name)
    solved = json.loads((ROOT / name.replace("exercises", "solutions")).read_text(encoding="utf-8"))["cells"]
    answers = {cell["id"]: "".join(cell["source"]) for cell in solved if cell["id"].startswith("your-")}
    assert answers
    for cell in exercise.cells():
        said = exercise.run(cell)
        assert not cell.startswith("check-") or "not done yet" in said, said
    for cell in exercise.cells():
        said = exercise.run(cell, answers.get(cell))
        assert not cell.startswith("check-") or re.search(r": all \d+ hold", said), said
        assert '"output_type": "error"' not in said, said

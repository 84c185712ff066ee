"""Four lessons in a real JupyterLab, from the first cell to the last by the keyboard alone, as a learner without a mouse works.

Every cell is run with Shift+Enter, a guess is typed on the way, answers are unfolded, and what moves is moved. The
notebooks are copies, without outputs, in a folder of their own. Minutes, so not in `make test`: `make test-all`.
"""

import shutil

import pytest

lab = pytest.importorskip("test_lab_browser", reason="it drives the browser")
browser, nbformat, opened, says = lab.browser, lab.nbformat, lab.opened, pytest.importorskip("test_parsons_browser").says
pytestmark = pytest.mark.long

LESSONS = {  # lesson: the cell of a guess, what is typed into it, and the cell that must then say it
    "00_the_stall": ("guess-gap", "my_guess_seconds = 7.25", "run-whole", "You said 7.25 s."),
    "03_global_slots": ("guess-left", "my_guess_tokens_left = 9", "picture-old", "You said 9."),
    "08_chunk_scheduling": ("guess-4096", "my_guess_first_chunk = 96; my_guess_steps = 77", "run-4096", "You said 96 tokens first, and 77 steps."),
    "11_scheduler_lab": ("guess-step", "my_guess_ms = 9.75", "steps", "You said 9.75."),
}
SECONDS = 240  # for a lesson's cells on a busy machine

ACTIVE = f"{lab.CELLS}[window.jupyterapp.shell.currentWidget.content.activeCellIndex]"
FOCUS = "document.activeElement"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab over copies of the lessons, as they are after *Clear Outputs of All Cells*."""
    folder = tmp_path_factory.mktemp("lessons")
    course = folder / "course"
    (course / "notebooks").mkdir(parents=True)
    (course / "exercises").mkdir()
    shutil.copytree(lab.ROOT / "course_lib" / "data", course / "course_lib" / "data")
    for name in LESSONS:
        notebook = nbformat.read(lab.ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, course / "notebooks" / f"{name}.ipynb")
    with lab.jupyterlab(folder, course) as address:
        yield lambda name: address(f"notebooks/{name}.ipynb")


class Lesson:
    """A lesson in the browser, and a learner who has a keyboard."""

    def __init__(self, notebook):
        self.notebook, self.page = notebook, notebook.page
        self.names = self.page.evaluate(f"{lab.CELLS}.map((cell) => cell.model.id)")
        self.page.keyboard.press("Escape")
        self.page.wait_for_function(f"{FOCUS}.closest('.jp-Notebook')")  # a notebook that was opened has the keys

    def go_to(self, name):
        """With the arrow keys, as JupyterLab has it."""
        place = self.names.index(name)
        at = self.page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex")
        for _ in range(abs(place - at)):
            self.page.keyboard.press("ArrowDown" if place > at else "ArrowUp")
        assert self.page.evaluate(f"{ACTIVE}.model.id") == name

    def run_all(self, guess, typed):
        """Shift+Enter from the first cell to the last; on the way the guess is typed."""
        press = self.page.keyboard.press
        self.go_to(self.names[0])
        for name, following in zip(self.names, [*self.names[1:], None], strict=True):
            if name == guess:
                press("Enter")
                self.page.wait_for_function(f"{FOCUS}.closest('.cm-content')")  # else what is typed would be commands
                press("Control+A")
                self.page.keyboard.type(typed)
            press("Shift+Enter" if following else "Control+Enter")
            if following:
                self.page.wait_for_function(f"(name) => {ACTIVE}.model.id === name", arg=following, timeout=20_000)
        self.wait_until_idle()

    def wait_until_idle(self):
        self.page.wait_for_function(
            f"{lab.CELLS}.every((cell) => cell.model.type !== 'code' || cell.model.executionCount && cell.model.executionState === 'idle')"
            f" && {lab.SESSION}.session.kernel.status === 'idle'", timeout=SECONDS * 1000)  # fmt: skip

    def outputs(self, name):
        """The outputs of a cell, as in its file."""
        return self.page.evaluate(f"(name) => {lab.CELLS}.find((cell) => cell.model.id === name).model.outputs.toJSON()", name)

    def said(self, name):
        return "".join("".join(output.get("text", "")) for output in self.outputs(name) if output["output_type"] == "stream")

    def errors(self):
        """(cell, what it raised) of every cell that raised something it isn't there to raise."""
        return self.page.evaluate(
            f"{lab.CELLS}.filter((cell) => cell.model.type === 'code' && !(cell.model.getMetadata('tags') ?? []).includes('raises-exception'))"
            ".flatMap((cell) => cell.model.outputs.toJSON().filter((output) => output.output_type === 'error')"
            ".map((output) => [cell.model.id, output.ename, output.evalue]))"
        )

    def tab_to(self, name, most=40):
        """Tab until what is called so has the focus: a control by its label, anything else by its text."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(f"({FOCUS}.getAttribute('aria-label') || {FOCUS}.textContent.trim() || {FOCUS}.title) === {name!r}"):
                return
        raise AssertionError(f"{most} times Tab don't lead to {name}")

    def press_to(self, name, key, wait_for):
        """Tab to a control, press a key on it, and wait for what must be seen then."""
        self.tab_to(name)
        self.page.keyboard.press(key)
        self.page.wait_for_selector(wait_for, state="attached")


def unfold_the_answers(lesson):
    """The last cell asks three questions; each answer is unfolded with a key."""
    page = lesson.page
    lesson.go_to(lesson.names[-1])
    for number in (1, 2, 3):
        lesson.tab_to("Answer")
        page.keyboard.press("Enter")
        page.wait_for_function(f"{ACTIVE}.node.querySelectorAll('details[open]').length === {number}")
    page.keyboard.press("Escape")


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_worked_through_with_the_keyboard_alone(opened, name):
    guess, typed, place, words = LESSONS[name]
    lesson = Lesson(opened(name))
    lesson.run_all(guess, typed)
    assert lesson.errors() == []
    assert words in lesson.said(place)
    assert lesson.page.locator(".jp-OutputArea-output img").count() >= 2
    MOVES.get(name, lambda lesson: None)(lesson)
    unfold_the_answers(lesson)
    assert lesson.errors() == []
    assert lesson.page.evaluate(f"{lab.CELLS}.map((cell) => cell.model.id)") == lesson.names, "a key went to the notebook"


def solve_the_puzzle(lesson):
    """Lesson 08: a line is moved, the order is typed, and the next cell runs it beside the engine."""
    page, press = lesson.page, lesson.page.keyboard.press
    assert "Not in order yet." in lesson.said("beside")
    lesson.go_to("parsons")
    lesson.press_to("Move down", "Space", ".jp-OutputArea [role=status]:has-text('A is in place 2 of 10.')")
    press("Tab")
    assert page.evaluate(f"{FOCUS}.value") == "BACDEFGHIJ"
    press("Control+A")
    page.keyboard.type("ficedjhabg")
    press("Enter")
    says(page, "in the order that you typed")
    lesson.press_to("Check", "Space", ".jp-OutputArea [role=status]:has-text('In order.')")
    press("Escape")
    lesson.go_to("beside")
    press("Control+Enter")
    page.wait_for_selector(".jp-OutputArea-output:has-text('steps as the engine planned them.')")


def use_the_lab(lesson):
    """Lesson 11: presets are compared, a slider is moved, the run is played and read; Escape gives the keys back."""
    page, press = lesson.page, lesson.page.keyboard.press
    step = page.get_by_role("slider", name="Step")
    lesson.go_to("lab")
    lesson.press_to("the stall", "Enter", ".lmv-picture text:has-text('128 streams: no token for')")
    lesson.press_to("chunks", "Enter", ".lmv-picture desc:has-text('chunks of up to 1024 tokens')")
    lesson.press_to("chunk size", "ArrowLeft", ".lmv-picture desc:has-text('chunks of up to 512 tokens')")
    lesson.press_to("Play", "Space", "button[aria-label=Pause]")
    page.wait_for_function("document.querySelector('.lmv-step').value > 3")
    press("Space")
    page.wait_for_selector("button[aria-label=Play]")
    played = int(step.input_value())
    lesson.tab_to("Step")
    press("ArrowRight")
    assert int(step.input_value()) == played + 1
    while page.evaluate(f"{FOCUS}.getAttribute('role') !== 'application'"):
        press("Tab")
    press("Home")
    press("ArrowDown")
    assert "Step 0 of" in page.locator(".lmv-story").inner_text()
    press("Escape")
    assert page.evaluate(f"{FOCUS}.classList.contains('jp-Cell')"), "Escape leaves the view"


MOVES = {"08_chunk_scheduling": solve_the_puzzle, "11_scheduler_lab": use_the_lab}


def test_a_lesson_that_was_run_and_saved_differs_from_its_file_in_nothing_but_the_version_of_python(browser, tmp_path):
    """So that `git diff` shows what a learner wrote. (Times in outputs differ, in lessons that measure.)"""
    name = "notebooks/03_global_slots.ipynb"
    course = tmp_path / "course"
    shutil.copytree(lab.ROOT / "course_lib" / "data", course / "course_lib" / "data")
    (course / "notebooks").mkdir()
    shutil.copy(lab.ROOT / name, course / name)
    with lab.jupyterlab(tmp_path, course) as address:
        page = lab.Page(browser, address(name)).page
        page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_function(
            f"{lab.CELLS}.every((cell) => cell.model.type !== 'code' || cell.model.executionCount && cell.model.executionState === 'idle')"
            f" && {lab.SESSION}.session.kernel.status === 'idle'", timeout=SECONDS * 1000)  # fmt: skip
        page.evaluate("jupyterapp.commands.execute('docmanager:save')")
        page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
        page.close()
    saved, built = (nbformat.read(folder / name, as_version=4) for folder in (course, lab.ROOT))
    saved.metadata.language_info.pop("version")
    assert saved == built

"""The notebook builder, on tiny lessons in a temporary folder. A kernel start takes a second, so there are few."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]
import build_notebooks as builder  # noqa: E402 (it is a script beside the package, not in it)
from test_notebooks_guard import problems  # noqa: E402

TITLE = "# %% [markdown]\n# # A lesson\n#\n# One block, 中文.\n"
MEASURED_CELL = """
# %% tags=["nbval-ignore-output"] name="measured"
import os, time
print(time.time_ns(), os.getpid())
"""
# All that differs from run to run by itself: hash seed, the pieces in which text is printed, model ids, tracebacks.
LESSON = TITLE + '''
# %%
import time
print("first", hash("text"), flush=True)
time.sleep(0.05)
print("second")
2 + 2

# %% [markdown]
"""
More *text*.
"""

# %% tags=["raises-exception"]
import json
json.loads("{", object_hook=lambda pairs: pairs)

# %%
import os, uuid
from IPython.display import display
view = {"model_id": uuid.uuid4().hex, "version_major": 2, "version_minor": 0}
display({"application/vnd.jupyter.widget-view+json": view, "text/plain": "slider at 3", "text/html": "<b>3</b>"}, raw=True)

# %%
print(os.path.basename(os.getcwd()))
''' + MEASURED_CELL


class Course:
    """A repository in a temporary folder with one lesson, `01_tiny`."""

    def __init__(self, root, text):
        self.root, self.source, self.target = root, root / "notebooks/src/01_tiny.py", root / "notebooks/01_tiny.ipynb"
        self.source.parent.mkdir(parents=True)
        self.write(text)

    def write(self, text):
        self.source.write_text(text, encoding="utf-8")

    def build(self, *options):
        return builder.main([*options], root=self.root)

    def notebook(self):
        return nbformat.read(self.target, as_version=4)

    def measured(self):
        return next(cell.outputs for cell in self.notebook().cells if cell.id == "measured")

    def save_by_hand(self, change):
        """What a person does in Jupyter: change the notebook, save it."""
        nb = self.notebook()
        change(nb)
        nbformat.write(nb, self.target)


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path, TITLE + '\n# %%\nprint("one")\n' + MEASURED_CELL)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The full lesson, built once; tests may look and change, not count on what others leave."""
    course = Course(tmp_path_factory.mktemp("course"), LESSON)
    assert course.build() == 0
    return course


def test_a_built_lesson_keeps_every_rule(built):
    nb = built.notebook()
    assert problems(nb, built.target) == []
    assert [cell.id for cell in nb.cells] == ["01_tiny-00", "01_tiny-01", "01_tiny-02", "01_tiny-03", "01_tiny-04",
                                              "01_tiny-05", "measured"]
    assert "One block, 中文.\n\n<small>Built from `notebooks/src/01_tiny.py`." in nb.cells[0].source
    assert nb.cells[2].source == "More *text*."
    assert nb.cells[5].outputs[0].text == "notebooks\n"  # cells run in the notebook's folder
    assert nb.metadata.kernelspec == {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


@pytest.mark.skipif(os.name == "nt", reason="signal 0 only asks on POSIX")
def test_the_kernel_ends_with_the_build(built):
    pid = int(built.measured()[0].text.split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_text_printed_in_pieces_is_one_output(built):
    outputs = built.notebook().cells[1].outputs
    assert [output.output_type for output in outputs] == ["stream", "execute_result"]
    assert outputs[0].text.startswith("first") and outputs[0].text.endswith("\nsecond\n")


def test_the_file_is_written_in_one_fixed_form(built):
    text = built.target.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert sorted(path.name for path in built.target.parent.iterdir()) == ["01_tiny.ipynb", "src"]  # no drafts left


def test_building_twice_changes_no_byte(built, capsys):
    before, changed_at = built.target.read_bytes(), built.target.stat().st_mtime_ns
    assert built.build("01") == 0
    assert built.target.read_bytes() == before
    assert built.target.stat().st_mtime_ns == changed_at
    assert "notebooks/01_tiny.ipynb: unchanged, measured outputs kept (" in capsys.readouterr().out


def test_measured_outputs_stay_until_some_code_changes(course, capsys):
    course.build()
    first = course.measured()
    course.write(course.source.read_text(encoding="utf-8").replace("One block", "Two blocks"))
    assert course.build() == 0
    assert "Two blocks" in course.notebook().cells[0].source
    assert course.measured() == first
    assert "built, measured outputs kept" in capsys.readouterr().out
    course.write(course.source.read_text(encoding="utf-8").replace('print("one")', 'print("two")'))
    assert course.build() == 0
    assert course.notebook().cells[1].outputs[0].text == "two\n"
    assert course.measured() != first
    assert "built, measured outputs refreshed" in capsys.readouterr().out


def test_refresh_measures_again(built):
    first = built.measured()
    assert built.build("--refresh") == 0
    assert built.measured() != first


def test_measured_outputs_of_someone_elses_run_are_not_kept(course):
    text = TITLE + MEASURED_CELL
    old, new = (make_notebook(text, printed) for printed in ("from the builder\n", "new\n"))
    builder.normalise(old, course.root)
    assert builder.keep_measured(new, old)
    assert new.cells[1].outputs[0].text == "from the builder\n"
    old.cells[1].outputs[0].text = "run in JupyterLab\n"
    assert not builder.keep_measured(new, old)


def make_notebook(text, printed):
    """A notebook as after a run in which every code cell printed `printed`."""
    source = Path("notebooks/src/01_tiny.py")
    nb = builder.jupytext.reads(text, fmt="py:percent")
    nb.metadata.course = nbformat.from_dict({"source": source.as_posix(), "built": builder.fingerprint(nb)})
    for cell in builder.code_cells(nb):
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)]
    return nb


EDITS = {
    "changed text": lambda nb: nb.cells[0].update(source="# My notes"),
    "changed code": lambda nb: nb.cells[1].update(source="print('mine')"),
    "a new cell": lambda nb: nb.cells.append(nbformat.v4.new_code_cell("my_idea()")),
    "a deleted cell": lambda nb: nb.cells.pop(),
    "another kind of cell": lambda nb: nb.cells[1].update(cell_type="raw"),
    "no record of a build": lambda nb: nb.metadata.pop("course"),
}


def saved(course):
    """Put a notebook as the builder leaves it into the course, without running it."""
    nb = builder.read_source(course.source, "notebooks/src/01_tiny.py")
    course.target.write_text(builder.to_text(nb), encoding="utf-8")


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_notebook_is_not_overwritten(course, capsys, edit):
    saved(course)
    course.save_by_hand(EDITS[edit])
    before = course.target.read_bytes()
    assert course.build() == 1
    assert course.target.read_bytes() == before
    message = capsys.readouterr().err
    assert "notebooks/01_tiny.ipynb: not overwritten" in message
    assert "move it" in message and "--force" in message


def test_a_file_that_is_no_notebook_is_not_overwritten(course):
    course.target.write_text("<<<<<<< HEAD", encoding="utf-8")
    assert course.build() == 1
    assert course.target.read_text(encoding="utf-8") == "<<<<<<< HEAD"


def test_running_a_notebook_is_no_edit(course):
    """JupyterLab's Shift+Enter leaves outputs, its own metadata, and an empty cell at the end."""
    saved(course)

    def run(nb):
        nb.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="one\n")]
        nb.metadata.language_info.version = "3.12.1"
        nb.cells.append(nbformat.v4.new_code_cell(""))

    course.save_by_hand(run)
    job = builder.find_jobs([builder.LESSONS], course.root, [])[0]
    assert builder.read_target(job, force=False)[1] is not None


def test_force_overwrites_an_edited_notebook(course):
    saved(course)
    course.save_by_hand(EDITS["changed text"])
    assert course.build("--force") == 0
    assert "# A lesson" in course.notebook().cells[0].source


def test_a_notebook_saved_while_it_is_built_is_not_overwritten(course):
    saved(course)
    job = builder.find_jobs([builder.LESSONS], course.root, [])[0]
    before, _ = builder.read_target(job, force=False)
    course.save_by_hand(EDITS["a new cell"])
    with pytest.raises(builder.BuildError, match="during the build"):
        builder.write(job, builder.to_text(job.nb), before)
    assert "my_idea" in course.target.read_text(encoding="utf-8")


def test_a_failing_cell_leaves_the_old_file(course, capsys):
    saved(course)
    before = course.target.read_bytes()
    course.write(TITLE + "\n# %%\nblocks = []\nblocks[3]\n")
    assert course.build() == 1
    assert course.target.read_bytes() == before
    message = capsys.readouterr().err
    assert "notebooks/01_tiny.ipynb: not built" in message
    assert "blocks[3]" in message and "IndexError" in message and "\x1b" not in message
    assert [path.name for path in course.target.parent.glob("*.tmp")] == []


FAULTS = {
    "an unknown marker": (TITLE + "# %% [markdwon]\n# text\n", "line 5: unknown cell marker: # %% [markdwon]"),
    "a marker without its space": (TITLE + "#%%\n1\n", "line 5: unknown cell marker"),
    "a title in a marker": (TITLE + "# %% Set-up\n1\n", "unknown cell marker"),
    "an unclosed list of tags": (TITLE + '# %% tags=["raises-exception"\n1\n', "unknown cell marker"),
    "an indented marker": (TITLE + "# %%\nif 1:\n    # %%\n    1\n", "unknown cell marker"),
    "text before the first marker": ("import os\n" + TITLE, "before the first cell marker"),
    "code in a Markdown cell": (TITLE + "print(1)\n", "line 1: Markdown that is not behind '#'"),
    "an unclosed text": (TITLE + '# %% [markdown]\n"""\ntext\n', "unclosed triple quote"),
    "a solution in a lesson": (TITLE + "# %%\n### BEGIN SOLUTION\n1\n", "solution markers"),
    "code first": ("# %%\n1\n", "first cell must be Markdown"),
    "no cells": ("", "first cell must be Markdown"),
    "an empty cell": (TITLE + "# %%\n\n# %%\n1\n", "cell 01_tiny-01: empty cell"),
    "one name twice": (TITLE + '# %% name="a"\n1\n# %% name="a"\n2\n', "the name a is used twice"),
    "a silencing semicolon": (TITLE + "# %%\nax.plot(x);\n", "';' at the end"),
    "clear_output": (TITLE + "# %%\nclear_output()\n", "clear_output"),
    "interact": (TITLE + "# %%\ninteract(f)\n", "interact()"),
    "widgets.Output": (TITLE + "# %%\nwidgets.Output()\n", "widgets.Output"),
    "a skipped cell": (TITLE + '# %% tags=["nbval-skip"]\n1\n', "tag nbval-skip"),
    "an image without alt text": (TITLE + "# %% [markdown]\n# ![](blocks.png)\n", "image without alt text"),
    "a drawing that would wrap": (TITLE + f"# %% [markdown]\n# ```text\n# {'x' * 71}\n# ```\n",
                                  "cell 01_tiny-01: a line of 71 characters in a fenced block, the limit is 70"),
    "a drawing in a list that would wrap": (TITLE + f"# %% [markdown]\n# 1. a\n#\n#    ```\n#    {'x' * 68}\n#    ```\n",
                                            "a line of 71 characters"),
    "a fold that isn't rendered": (TITLE + "# %% [markdown]\n# <details><summary>Hint</summary>\n# *a*\n#\n# </details>\n",
                                   "cell 01_tiny-01: no blank line after </summary>"),
    "text right behind a fold": (TITLE + "# %% [markdown]\n# <details><summary>A</summary>\n#\n# a\n# </details>\n# *b*\n",
                                 "no blank line after </details>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_source_is_named_before_anything_runs(course, capsys, fault):
    text, words = FAULTS[fault]
    course.write(text)
    assert course.build() == 1
    message = capsys.readouterr().err
    assert "notebooks/src/01_tiny.py: not built" in message and words in message
    assert not course.target.exists()


def test_what_only_looks_like_a_fault_is_built(course):
    course.write("# ---\n# jupyter:\n#   kernelspec: x\n# ---\n\n" + TITLE
                 + '# %%\na = 1; b = 2  # no ; here\ntext = "a;"\ncss = """\na { b: c; };\n"""\ninteraction = print\n'
                 + f"# %% [markdown]\n# {'x' * 71}\n#\n# ```text\n# {'x' * 70}\n# ```\n#\n# `</summary>` ends a title.\n")
    assert len(builder.find_jobs([builder.LESSONS], course.root, ["01"])[0].nb.cells) == 3


def test_a_file_name_with_capitals_is_named(course, capsys):
    course.source.rename(course.source.with_name("01_Tiny.py"))
    assert course.build() == 1
    assert "file name" in capsys.readouterr().err


def test_lessons_are_chosen_by_the_beginning_of_their_names(course, capsys):
    course.source.with_name("02_next.py").write_text(TITLE, encoding="utf-8")
    chosen = builder.find_jobs([builder.LESSONS], course.root, ["notebooks/src/02_next.py"])
    assert [job.name for job in chosen] == ["notebooks/02_next.ipynb"]
    assert len(builder.find_jobs([builder.LESSONS], course.root, [])) == 2
    assert course.build("03") == 1
    assert "begins with 03" in capsys.readouterr().err


def test_check_passes_on_a_fresh_build_though_times_differ(built, capsys):
    before = built.target.read_bytes()
    assert built.build("--check") == 0
    assert built.target.read_bytes() == before
    assert "01_tiny.ipynb: same as notebooks/src/01_tiny.py" in capsys.readouterr().out


def test_check_shows_what_differs_and_writes_nothing(course, capsys):
    saved(course)  # never run: its outputs are missing
    before = course.target.read_bytes()
    assert course.build("--check") == 1
    assert course.target.read_bytes() == before
    out = capsys.readouterr().out
    assert "differs from notebooks/src/01_tiny.py" in out and '+      "one\\n"' in out
    assert "time" not in out  # the measured cell's output isn't compared


def test_check_names_a_notebook_that_was_never_built(course, capsys):
    assert course.build("--check") == 1
    assert "there is no such file" in capsys.readouterr().out


def test_a_long_difference_is_cut():
    first, second = (builder.to_text(make_notebook(TITLE, "")).replace("One block", word * 300) for word in "ab")
    lines = builder.difference(first, second)
    assert lines and max(map(len, lines)) <= 160
    first = builder.to_text(make_notebook(TITLE + "# %%\n" + "1\n" * 200, ""))
    assert builder.difference(first, second)[-1].endswith("more lines")


@pytest.mark.parametrize("line, tidy", [
    (f"File {ROOT}/course_lib/slots.py:12, in f(x)", "File course_lib/slots.py:12, in f(x)"),
    (f"File {sys.base_prefix}/lib/x.py:3", "File lib/x.py:3"),
    ("<function f at 0x7f3a1b2c4d5e>", "<function f at 0x0>"),
])
def test_tracebacks_hold_nothing_of_this_machine(line, tidy):
    assert builder.tidy_traceback(line, ROOT) == tidy


def test_a_traceback_through_the_home_folder_is_tidy_too(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    assert builder.tidy_traceback("File ~/course/x.py:1", Path("/home/ann/course")) == "File x.py:1"

"""What nbval doesn't see: rules that every committed notebook keeps, checked without running it.

nbval compares outputs. It says nothing about a cell that never ran, a tag that leaves a cell out, a picture without alt
text, a path of the author's machine. `problems` does, and the tests below break a good notebook in each way to show it.
"""

import copy
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from build_notebooks import (  # noqa: E402 (it is a script beside the package, not in it)
    MEASURED, cell_problems, code_cells, fingerprint, images_without_alt, tags)

FOLDERS = ("notebooks", "exercises", "solutions")
NOTEBOOKS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.ipynb"))
SOURCES = sorted(path for folder in ("notebooks", "solutions") for path in (ROOT / folder / "src").glob("*.py"))
MAX_BYTES = 500_000  # larger files are slow to open and to diff; GitHub doesn't show them
MIN_COMPARED = 0.8  # of the code cells with output

# A folder of someone's machine. In base64 a "/tmp" can occur by chance, so pictures are cut out before.
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(home|root|tmp|Users|opt|usr|var)/|\b[A-Z]:\\{1,2}(Users|Windows|Program|Temp)")
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # it ends in a letter, and would hide that a path begins after it
PICTURE = re.compile(r"base64,[\w+/=\s]+")
VIEW = "application/vnd.jupyter.widget-view+json"
NEAR = 3  # code cells: so far from a widget its saved picture may be

# What works on one kind of system alone: in code, and in the commands that a text quotes.
ONE_SYSTEM_CODE = re.compile(
    r"^\s*(!|%%(bash|sh|script|cmd)\b|%(cd|ls|cp|mv|rm|cat)\b)|\bos\.(fork|getuid|sched_\w+|uname)\b|\bimport (fcntl|resource|pwd|winreg|msvcrt)\b|/proc/",
    re.MULTILINE)
ONE_SYSTEM_COMMAND = re.compile(
    r"^\s*(\$ )?(sudo|apt(-get)?|brew|export|set|source|ls|cat|rm|cp|mv|chmod|which|\./|[A-Z_]+=\S+ \w)|/bin/|\\Scripts\\", re.MULTILINE)


def texts(output):
    """The text parts of an output, by kind; pictures are left out."""
    parts = dict(output.get("data", {}))
    parts |= {key: output[key] for key in ("text", "evalue") if key in output}
    if "traceback" in output:
        parts["traceback"] = "\n".join(output.traceback)
    return {kind: PICTURE.sub("base64,", COLOUR.sub("", str(text))) for kind, text in parts.items()
            if not kind.startswith("image/") or kind == "image/svg+xml"}


def one_system_problems(cell):
    """What in a cell works on Linux, on a Mac or on Windows alone."""
    if cell.cell_type == "code":
        found = ONE_SYSTEM_CODE.search(cell.source)
        return [f"works on one kind of system alone: {found[0].strip()}"] if found else []
    commands = "\n".join(re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", cell.source, re.DOTALL | re.MULTILINE))
    found = ONE_SYSTEM_COMMAND.search(commands)
    return [f"a command that works on one kind of system alone: {found[0].strip()}"] if found else []


def widget_problems(cells):
    """Widgets of which nothing is seen without a kernel: neither HTML with them, nor a saved picture near them."""
    for number, cell in enumerate(cells):
        near = [output for other in cells[max(0, number - NEAR) : number + NEAR + 1] for output in other.outputs]
        has_picture = any(kind.startswith("image/") or "<img" in str(data) for output in near for kind, data in output.get("data", {}).items())
        for output in cell.outputs:
            data = output.get("data", {})
            if VIEW in data and "text/html" not in data and not has_picture:
                yield f"cell {cell.id}: a widget without a saved picture near it"
            if VIEW in data and not data.get("text/plain", "").strip():
                yield f"cell {cell.id}: a widget without a line of text in its place"


def output_problems(cell):
    """What is wrong with the outputs of one code cell."""
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if errors and "raises-exception" not in tags(cell):
        yield f"error {errors[0].ename} without the tag raises-exception"
    if "raises-exception" in tags(cell) and cell.execution_count and not errors:
        yield "tagged raises-exception, but no error was raised"
    for output in cell.outputs:
        if output.get("name") == "stderr":
            yield f"writes to stderr (a warning, a progress bar): {output.text[:60]!r}"
        for kind, text in texts(output).items():
            at_home = kind == "traceback" and "~/" in text  # IPython writes the home folder so
            if MACHINE_PATH.search(text) or str(ROOT) in text or at_home:
                yield f"{kind} output holds a path of one machine"
            if ADDRESS.search(text):
                yield f"{kind} output holds a memory address"
            if kind == "image/svg+xml" or kind == "text/html" and "<svg" in text:
                yield f"{kind} output holds a bare SVG, which JupyterLab drops in a fresh clone: use <img>"
            if kind in ("text/html", "text/markdown"):
                yield from (f"{kind} output: image without alt text: {image}" for image in images_without_alt(text))


def run_problems(nb):
    """What shows that the notebook wasn't run from top to bottom, once, by the builder."""
    counts = [cell.execution_count for cell in code_cells(nb)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"cells were not run once each, from top to bottom: counts {counts}"
    if nb.metadata.get("course", {}).get("built") != fingerprint(nb):
        yield "edited by hand since it was built: edit its source, and build again"
    with_output = [cell for cell in code_cells(nb) if cell.outputs]
    compared = [cell for cell in with_output if MEASURED not in tags(cell)]
    if len(compared) < MIN_COMPARED * len(with_output):
        yield f"only {len(compared)} of {len(with_output)} cells with output are compared; 80 % should be"


def problems(notebook, path):
    """All faults of a notebook, as sentences; `path` gives its name and, by its folder, what it must keep."""
    path, found = Path(path), []
    folder, stem = path.parent.name, path.stem
    if not re.fullmatch(r"[a-z0-9_]+", stem):
        found.append("file name: only lower case, digits and underscores")
    size = len(nbformat.writes(notebook, version=nbformat.NO_CONVERT).encode())
    if size >= MAX_BYTES:
        found.append(f"{size} bytes; the limit is {MAX_BYTES}")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("kernel is not python3")
    if "version" in notebook.metadata.get("language_info", {}):
        found.append("metadata.language_info.version changes from machine to machine")
    if "widgets" in notebook.metadata:
        found.append("metadata.widgets: a viewer without a kernel shows nothing at all then")
    source = f"notebooks/src/{stem}.py" if folder == "notebooks" else f"solutions/src/{stem}.py"
    if not notebook.cells or notebook.cells[0].cell_type != "markdown" or source not in notebook.cells[0].source:
        found.append(f"the first cell doesn't say that this is built from {source}")
    for number, cell in enumerate(notebook.cells):
        faults = [*cell_problems(cell), *one_system_problems(cell)]
        if cell.get("id") != cell.metadata.get("name", f"{stem}-{number:02d}"):
            faults.append(f"id {cell.get('id')} is not the builder's: it changes with the next build")
        if "execution" in cell.metadata:
            faults.append("holds the time of its execution")
        if MACHINE_PATH.search(cell.source) or str(ROOT) in cell.source:
            faults.append("source holds a path of one machine")
        if cell.cell_type == "code":
            faults += output_problems(cell)
        found += [f"cell {number}: {fault}" for fault in faults]
    found += widget_problems(code_cells(notebook))
    if folder != "exercises":  # those are the learner's to run
        found += run_problems(notebook)
    return found


def is_work_in_progress(path, notebook):
    """True for an exercise that its learner has changed and not committed: that's what it is there for."""
    if notebook.metadata.get("course", {}).get("built") == fingerprint(notebook):
        return any(cell.outputs for cell in code_cells(notebook))  # run, not changed
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", str(path)], cwd=path.parent, capture_output=True)
    return same.returncode != 0


# ---- the committed notebooks

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_notebook_keeps_the_rules(path):
    notebook = nbformat.read(path, as_version=4)
    if path.parent.name == "exercises" and is_work_in_progress(path, notebook):
        pytest.skip("somebody works in it")
    assert problems(notebook, path) == []
    assert (ROOT / notebook.metadata.course.source).is_file(), "its source is gone"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_source_is_built(source):
    assert source.parents[1].joinpath(f"{source.stem}.ipynb").is_file(), "run make notebooks"


# ---- the rules themselves, each shown to bite

PATH = Path("notebooks/01_example.ipynb")


def good():
    """A notebook without a fault: six code cells with output, one of them measured, one with an intended error."""
    shown = new_output("display_data", {"text/html": '<img src="data:image/png;base64,iVBOR/tmp/w0K" alt="a > b">'})
    cells = [
        new_markdown_cell("# Title\n\nBuilt from `notebooks/src/01_example.py`.\n\n![two blocks](blocks.png)"),
        new_code_cell("print('a')", outputs=[new_output("stream", name="stdout", text="a\n")]),
        new_code_cell("2 + 2", outputs=[new_output("execute_result", {"text/plain": "4"}, execution_count=2)]),
        new_code_cell("timeline()", outputs=[shown]),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}, outputs=[
            new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=["File lib/x.py:1"])]),
        new_code_cell("seconds", metadata={"tags": [MEASURED], "name": "seconds"}, outputs=[
            new_output("execute_result", {"text/plain": "0.5"}, execution_count=5)]),
        new_code_cell("print('; <img>')", outputs=[new_output("stream", name="stdout", text="; <img>\n")]),
    ]
    for number, cell in enumerate(cells):
        cell.id = cell.metadata.get("name", f"01_example-{number:02d}")
        if cell.cell_type == "code":
            cell.execution_count = number
    nb = new_notebook(cells=cells)
    nb.metadata = nbformat.from_dict({
        "kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"},
        "course": {"source": "notebooks/src/01_example.py", "built": fingerprint(nb)}})
    return nb


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def html(text):
    return new_output("display_data", {"text/html": text})


def source(number, text):
    return lambda nb: nb.cells[number].update(source=text)


def output(number, *outputs):
    return lambda nb: nb.cells[number].update(outputs=list(outputs))


def tag(number, *names):
    return lambda nb: nb.cells[number].metadata.update(tags=list(names))


def big(nb):
    nb.cells[1].outputs[0].text = "x" * MAX_BYTES


def widget(words):
    return new_output("display_data", {VIEW: {"model_id": "0"}, "text/plain": words})


def alone(nb):
    nb.cells[1].outputs, nb.cells[3].outputs = [widget("LabView(3 requests)")], []


# What is broken -> how, and a part of the sentence that must say so.
FAULTS = {
    "a cell that never ran": (lambda nb: nb.cells[2].update(execution_count=None, outputs=[]), "not run once each"),
    "cells run in another order": (lambda nb: nb.cells[2].update(execution_count=9), "not run once each"),
    "a cell added by hand": (lambda nb: nb.cells.append(new_markdown_cell("more")), "is not the builder's"),
    "text edited by hand": (source(0, "# New title\n\nBuilt from `notebooks/src/01_example.py`."), "edited by hand"),
    "an empty cell": (source(1, "\n"), "empty cell"),
    "an error nobody meant": (tag(4), "without the tag raises-exception"),
    "an error that no longer comes": (output(4), "no error was raised"),
    "a warning": (output(1, stream("UserWarning", "stderr")), "stderr"),
    "a warning in a measured cell": (output(5, stream("UserWarning", "stderr")), "stderr"),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), "metadata.widgets"),
    "execution time": (lambda nb: nb.cells[1].metadata.update(execution={}), "time of its execution"),
    "a path in code": (source(1, "open('/home/ann/x')"), "source holds a path"),
    "a path in prose": (source(0, "notebooks/src/01_example.py in C:\\Users\\ann"), "source holds a path"),
    "a path in printed text": (output(1, stream("saved /tmp/x.json")), "text output holds a path"),
    "a path in a result": (output(2, new_output("display_data", {"text/plain": "'/Users/ann'/"})), "text/plain output"),
    "a path in a traceback": (
        lambda nb: nb.cells[4].outputs[0].update(traceback=["File \x1b[32m/usr/x.py"]), "traceback output"),
    "a home folder in a traceback": (
        lambda nb: nb.cells[4].outputs[0].update(traceback=["File ~/x.py"]), "traceback output holds a path"),
    "the path of this checkout": (output(1, stream(f"in {ROOT}")), "text output holds a path"),
    "a memory address": (output(2, new_output("display_data", {"text/plain": "<f at 0x7f0012ab>"})), "memory address"),
    "clear_output": (source(1, "clear_output(wait=True)"), "clear_output"),
    "interact": (source(1, "interact(f, x=3)"), "interact()"),
    "interact as a decorator": (source(1, "@interact\ndef f(x): pass"), "interact()"),
    "widgets.Output": (source(1, "out = widgets.Output()"), "widgets.Output"),
    "Output, imported by name": (source(1, "from ipywidgets import HTML, Output"), "widgets.Output"),
    "a silencing semicolon": (source(1, "ax.plot(x);  # quiet"), "';' at the end"),
    "a skipped cell": (tag(1, "nbval-skip"), "no cell is left out"),
    "a cell skipped by nbclient": (tag(1, "skip-execution"), "no cell is left out"),
    "a skipping comment": (source(1, "# NBVAL_SKIP\nprint('a')"), "nbval comment"),
    "too few compared cells": (tag(1, MEASURED), "only 4 of 6 cells"),
    "a large file": (big, "the limit is"),
    "another kernel": (lambda nb: nb.metadata.kernelspec.update(name="conda-env-x"), "kernel is not python3"),
    "a Python version": (lambda nb: nb.metadata.language_info.update(version="3.12.1"), "language_info.version"),
    "a Markdown image without alt": (source(0, "notebooks/src/01_example.py ![](x.png)"), "without alt text: ![](x"),
    "an HTML image in Markdown without alt": (
        source(0, "notebooks/src/01_example.py <img src='x'>"), "without alt text"),
    "an HTML output image without alt": (output(3, html('<img src="x.png">')), "text/html output: image without alt"),
    "an empty alt text": (output(3, html('<img alt=" " src="x.png">')), "text/html output: image without alt"),
    "a bare SVG": (output(3, html("<svg></svg>")), "bare SVG"),
    "an SVG output": (output(3, new_output("display_data", {"image/svg+xml": "<svg/>"})), "bare SVG"),
    "a shell command": (source(1, "x = 1\n!ls notebooks"), "works on one kind of system alone: !"),
    "a shell cell": (source(1, "%%bash\necho a"), "works on one kind of system alone: %%bash"),
    "a module that Windows lacks": (source(1, "import fcntl"), "import fcntl"),
    "a call that Windows lacks": (source(1, "os.sched_getaffinity(0)"), "os.sched_getaffinity"),
    "a quoted command that Windows lacks": (
        source(0, "notebooks/src/01_example.py\n\n```bash\nexport X=1\n```"), "one kind of system alone: export"),
    "a quoted variable that Windows lacks": (
        source(0, "notebooks/src/01_example.py\n\n```bash\nX=1 python a.py\n```"), "one kind of system alone: X=1 p"),
    "a widget alone": (alone, "a widget without a saved picture"),
    "a widget without words": (output(2, widget("")), "a widget without a line of text"),
    "no word of the source": (source(0, "# Title"), "doesn't say that this is built from"),
}


def test_a_good_notebook_has_no_problems():
    assert problems(good(), PATH) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    spoil, words = FAULTS[fault]
    nb = good()
    spoil(nb)
    if fault != "text edited by hand":  # an edit is seen by the hash; here each other rule must see its fault by itself
        nb.metadata.course.built = fingerprint(nb)
    assert any(words in problem for problem in problems(nb, PATH)), problems(nb, PATH)


@pytest.mark.parametrize("name", ["01_Example", "01-example", "01 example"])
def test_a_bad_file_name_is_named(name):
    assert any("file name" in problem for problem in problems(good(), PATH.with_name(f"{name}.ipynb")))


def test_a_base64_picture_that_reads_like_a_path_is_no_problem():
    nb = good()
    nb.cells[1].outputs = [new_output("display_data", {"image/png": "AAA+/tmp/BBB=", "text/plain": "figure"})]
    assert problems(nb, PATH) == []


def test_a_widget_near_its_picture_and_one_with_html_are_no_problem():
    nb = good()
    nb.cells[1].outputs = [widget("LabView(3 requests)")]
    assert problems(nb, PATH) == []
    alone(nb)
    nb.cells[1].outputs[0]["data"]["text/html"] = "<pre>A B C</pre>"
    assert not list(widget_problems(code_cells(nb)))


def test_quoted_code_in_prose_is_not_taken_for_an_image():
    nb = good()
    nb.cells[0].source += "\n\nWrite `![](x.png)` or\n```\n<img src='x.png'>\n```"
    nb.metadata.course.built = fingerprint(nb)
    assert problems(nb, PATH) == []


def test_an_exercise_need_not_have_been_run():
    nb = copy.deepcopy(good())
    nb.cells[0].source = nb.cells[0].source.replace("notebooks/src", "solutions/src")
    for cell in code_cells(nb):
        cell.update(execution_count=None, outputs=[])
    del nb.cells[4].metadata["tags"]  # it raises only when it is run
    assert problems(nb, Path("exercises/01_example.ipynb")) == []
    assert any("not run" in problem for problem in problems(nb, Path("solutions/01_example.ipynb")))


# ---- what nbval replaces before it compares

@pytest.fixture(scope="module")
def sanitize():
    """Apply tests/nbval_sanitize.cfg as nbval does."""
    plugin = pytest.importorskip("nbval.plugin")
    config = (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    patterns = plugin.get_sanitize_patterns(config)
    assert len(patterns) == len(re.findall(r"^\[", config, re.MULTILINE)), "nbval dropped a section"

    def apply(text):
        for pattern, replacement in patterns:
            text = re.sub(pattern, replacement, text)
        return text
    return apply


@pytest.mark.parametrize("text, replaced", [
    ("<f at 0x7f3a1b2c4d5e>", "<f at 0xADDRESS>"),
    ("/tmp/ipykernel_123/456.py:1: UserWarning", "CELL:1: UserWarning"),
    ("load:  40%|####      | 4/10 [00:01<00:02, 3.1it/s]", "load:BAR"),
    ('<img src="data:image/png;base64,iVB+/0K=" alt="x">', '<img src="PNG" alt="x">'),
])
def test_what_differs_between_runs_is_replaced(sanitize, text, replaced):
    assert sanitize(text) == replaced


@pytest.mark.parametrize("text", ["longest gap: 12 ms", "TTFT 4.6 s, 180 tokens/s", "slot 0x10", "3 of 100 (3%)"])
def test_results_stay_compared(sanitize, text):
    assert sanitize(text) == text

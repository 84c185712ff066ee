"""For teachers: run all checks over a folder of submitted notebooks, and write what came out as CSV.

    python -m course_lib check submissions/ --csv results.csv

Each notebook runs in a kernel of its own, in an empty folder. Its check cells are not trusted: the cells that define
things are run, and then our own checks. That is still the learners' code, running as you: use a container or an
account of its own if you don't know them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from . import load
from .exercise import Exercise

CELL_SECONDS = 120
FIELDS = ("submission", "exercise", "state", "held", "of", "concept", "message")
OUR_CELL = re.compile(r"^\s*check\s*\(", re.MULTILINE)


def find_notebooks(paths: list[str]) -> list[Path]:
    """The notebooks at the paths and below them, in order; FileNotFoundError for a path that isn't there."""
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise FileNotFoundError(f"there is no {name}")
        inside = [path] if path.is_file() else sorted(path.rglob("*.ipynb"))
        found += [one for one in inside if ".ipynb_checkpoints" not in one.parts]
    return found


def exercises_of(notebook, known: dict[str, Exercise]) -> list[Exercise]:
    """The exercises that a notebook has a check or a stub for, by the ids in its cells."""
    text = "\n".join(cell.source for cell in notebook.cells)
    ids = set(re.findall(r"\bcheck\s*\(\s*[\"'](\d\d\.\d)[\"']", text)) | set(re.findall(r"NotDone\(\"(\d\d\.\d) ", text))
    return [known[identifier] for identifier in sorted(ids & set(known))]


def run_notebook(path: Path, name: str) -> list[dict[str, object]]:
    """One row (FIELDS) for each exercise of one notebook. A notebook that can't be read gives one row that says so."""
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # somebody's file: anything can be wrong with it
        return [_row(name, "", "unreadable", message=f"{type(error).__name__}: {error}")]
    exercises = exercises_of(notebook, load())
    if not exercises:
        return [_row(name, "", "no exercise")]
    cells = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "needs-your-code" not in cell.metadata.get("tags", []) and not OUR_CELL.search(cell.source)
    ]
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    ours = [nbformat.v4.new_code_cell(f"__import__('course_lib.checks').checks.check({e.id!r}, {e.part})") for e in exercises]
    notebook.cells = cells + ours
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "results.json"
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "COURSE_PROGRESS": str(record), "PYTHONPATH": os.pathsep.join(paths)}
        kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))  # this Python's
        client = NotebookClient(notebook, km=kernel, timeout=CELL_SECONDS, allow_errors=True, interrupt_on_timeout=True,
                                resources={"metadata": {"path": folder}}, extra_arguments=["--log-level=ERROR"])  # fmt: skip
        try:
            client.execute(env=environment, cleanup_kc=True)
        except Exception as error:  # the kernel died, or couldn't be stopped
            crash = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            crash = ""
        results = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    rows = []
    for exercise, cell in zip(exercises, ours, strict=True):
        entry = results.get(exercise.id)
        if entry:
            rows.append(_row(name, exercise.id, entry["state"], entry["held"], entry["of"], entry["concept"]))
        else:
            rows.append(_row(name, exercise.id, "error", 0, len(exercise.tests), message=_first_error([*cells, cell]) or crash))
    return rows


def _row(submission: str, exercise: str, state: str, held: object = "", of: object = "", concept: str = "", message: str = "") -> dict[str, object]:
    return dict(zip(FIELDS, (submission, exercise, state, held, of, concept, message), strict=True))


def _first_error(cells) -> str:
    """The first error of a run in one line: a syntax error comes before the name that it left undefined."""
    for cell in cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"{output.ename}: {output.evalue.splitlines()[0] if output.evalue else ''}"
    return ""


def main(paths: list[str], csv_path: str | None) -> int:
    """Check the notebooks at the paths; CSV to the file, or to the terminal. 1 if any exercise isn't green, 2 if none was found."""
    try:
        notebooks = find_notebooks(paths)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if not notebooks:
        print(f"there is no notebook in {', '.join(paths)}", file=sys.stderr)
        return 2
    rows = []
    common = Path(os.path.commonpath([path.resolve().parent for path in notebooks]))
    for path in notebooks:
        name = path.resolve().relative_to(common).as_posix()
        found = run_notebook(path, name)
        rows += found
        summary = ", ".join(f"{row['exercise']} {row['state']}".strip() for row in found)
        print(f"{name}: {summary}", file=sys.stderr, flush=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    if csv_path:
        Path(csv_path).write_text(text.getvalue(), encoding="utf-8")
    else:
        print(text.getvalue(), end="")
    return int(any(row["state"] != "green" for row in rows))


def _safe(value: object) -> object:
    """A spreadsheet takes text that begins so for a formula."""
    return "'" + value if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value

"""The learner's parts of all lessons: read from their exercise notebooks, checked, and each with its state.

    parts = my_parts()      the notebooks beside this one
    parts                   a table: which part is green, and what it does in the engine
    parts.green             {"03.1": the function, …}

Of a notebook, the cells `set-up` and `your-NN-k` are run, and the cells that the learner put between them. Check and run
cells are not. Nothing that a cell does (raise, print, loop for ever) stops the others.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tokenize
import types
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from . import load
from .card import marked
from .exercise import Exercise
from .run import Report, TimeLimit, TimeUp, run_exercise

SETUP_SECONDS = 120.0  # imports, and a model that is loaded
CELL_SECONDS = 5.0  # a cell that defines something takes no time
COURSE_CELL = re.compile(r"(set-up|[a-z]+(-[a-z]+)*-\d\d-\d)")  # the names that the course gives to cells
OUR_CALL = re.compile(r"^\s*check\s*\(", re.MULTILINE)
MARKS = {"green": "✓", "red": "✗", "not done": "○", "can't run": "!"}
COLOURS = {"green": "#009e73", "red": "#d55e00", "not done": "transparent", "can't run": "#d55e00"}

# Exercise -> the room of the house in which its part works, and what it does there. No room: it's checked, and isn't
# part of a running engine.
PLACES: dict[str, tuple[str | None, str]] = {
    "01.1": (None, "generation without a cache: an engine does it otherwise"),
    "01.2": (None, "one request by itself: an engine serves many"),
    "01.3": (None, "one prompt by itself: an engine serves many"),
    "02.1": ("block_manager", "how many blocks a chunk is given"),
    "02.2": ("block_manager", "hands out the blocks, where there is no prefix cache"),
    "02.3": ("scheduler", "who is let in"),
    "03.1": ("slots", "the slots of a chunk"),
    "03.2": ("slots", "the slot of a decode"),
    "03.3": (None, "tells who owns a slot: a look from outside"),
    "04.1": ("attention", "the mask, where 04.2 isn't there"),
    "04.2": ("attention", "attention of every layer"),
    "04.3": (None, "a GPU kernel: without a GPU too slow for a whole model"),
    "05.1": (None, "schedules whole prompts: 08.2 has its place"),
    "05.2": (None, "measures a trace afterwards"),
    "06.1": ("sequence", "counter and state after a chunk"),
    "06.2": ("sequence", "the end, and preemption"),
    "06.3": (None, "the order of a step: the engine's is the same, with locks"),
    "07.1": ("batch", "the step as one flat row"),
    "07.2": (None, "one chunk by itself: an engine runs batches"),
    "08.1": ("scheduler", "chunk lengths, where 08.2 isn't asked"),
    "08.2": ("scheduler", "who gets how many tokens"),
    "08.3": ("scheduler", "whose turn it is to decode"),
    "09.1": ("prefix_cache", "the names of blocks"),
    "09.2": ("prefix_cache", "what of a prompt is reused"),
    "09.3": ("prefix_cache", "blocks with several holders, where there is a prefix cache"),
    "10.1": ("engine", "text while it grows"),
    "10.2": ("sampler", "one token from a row of logits"),
    "10.3": (None, "measures a trace afterwards"),
    "11.1": (None, "finds a setting, beforehand"),
    "11.2": (None, "a policy: the arena is its place"),
}  # fmt: skip


@dataclass
class Part:
    """The learner's part of one exercise.

    state    "green", "red", "not done", or "can't run": its cell raised, or there is none
    why      of a part that is red or can't run: what happened, in one line
    objects  the function or class, or several; empty unless there is something to test
    lines    lines of code in its cell, without comments, docstrings and blank lines
    """

    exercise: Exercise
    state: str
    why: str = ""
    objects: tuple = ()
    lines: int = 0
    report: Report | None = None

    @property
    def id(self) -> str:
        return self.exercise.id

    @property
    def room(self) -> str | None:
        return PLACES.get(self.id, (None, ""))[0]

    @property
    def role(self) -> str:
        """What is to be said of its place in the engine."""
        room, does = PLACES.get(self.id, (None, ""))
        if room is None:
            return f"only checked: {does}"
        return f"{'yours' if self.state == 'green' else 'ours'}: {does}"


class Parts:
    """The parts of all exercises, in order. In a notebook it shows itself as a table."""

    def __init__(self, parts: list[Part], notes: list[str] | None = None) -> None:
        self._parts = {part.id: part for part in parts}
        self.notes = notes or []

    def __getitem__(self, identifier: str) -> Part:
        return self._parts[identifier]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def green(self) -> dict[str, object]:
        """{exercise: its part}, of those that are green."""
        return {part.id: part.objects[0] for part in self if part.state == "green"}

    @property
    def rooms(self) -> tuple[str, ...]:
        """The rooms of the house in which a green part works."""
        return tuple(dict.fromkeys(part.room for part in self if part.state == "green" and part.room))

    @property
    def ours(self) -> list[Part]:
        """The parts that have a place in the engine and aren't green: the course's own stand in for them."""
        return [part for part in self if part.room and part.state != "green"]

    def headline(self) -> str:
        green, works = len(self.green), sum(part.room is not None for part in self if part.state == "green")
        if green == 0:
            return "None of your parts is green yet, so all of the engine is ours. Lesson 01 is where to begin."
        others = f"for {len(self.ours)} others ours stand in" if self.ours else "nothing of ours stands in for any"
        return f"{green} of {len(self)} parts are green. {works} of those have a place in the engine; {others}."

    def __repr__(self) -> str:
        lines = [self.headline(), ""]
        for part in self:
            lines.append(f"{MARKS[part.state]} {part.id} {part.exercise.part:<20} {part.state:<9}  {part.role}")
            if part.why:
                lines.append(f"       {part.why}")
        return "\n".join([*lines, *self.notes])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        cell = 'style="text-align:left;vertical-align:top"'
        short = 'style="text-align:left;vertical-align:top;white-space:nowrap"'
        rows = []
        for part in self:
            mark = f"{marked(MARKS[part.state], COLOURS[part.state])} {part.state}"
            why = f'<br><span style="opacity:.75">{escape(part.why)}</span>' if part.why else ""
            name = f"{part.id} <code>{escape(part.exercise.part)}</code>"
            rows.append(f"<tr><td {short}>{name}</td><td {short}>{mark}</td><td {cell}>{escape(part.role)}{why}</td></tr>")
        head = f"<tr><th {cell}>exercise</th><th {cell}>state</th><th {cell}>in your engine</th></tr>"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        html = f'<div role="status"><p>{escape(self.headline())}</p><table>{head}{"".join(rows)}</table>{notes}</div>'
        return {"text/html": html, "text/plain": repr(self)}


# ---- where the notebooks are


def parts_folder() -> Path:
    """The folder that this notebook is in, if exercises are beside it; else the nearest `exercises/` from here upwards."""
    here = Path.cwd()
    session = Path(os.environ.get("JPY_SESSION_NAME", "")).parent  # Jupyter: the notebook's file
    for folder in (here, here / session):
        if any('"your-' in path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("[0-9][0-9]_*.ipynb")):
            return folder
    for folder in (here, *here.parents):
        if (folder / "exercises").is_dir():
            return folder / "exercises"
    return here


def my_parts(folder: str | Path | None = None) -> Parts:
    """Read, run and check the parts of all exercises.

    folder  where the exercise notebooks are; by default beside the notebook that asks
    """
    folder = parts_folder() if folder is None else Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is no folder")
    exercises = load()
    parts, notes = [], []
    for lesson in sorted({identifier[:2] for identifier in exercises}):
        own = [exercise for identifier, exercise in sorted(exercises.items()) if identifier.startswith(lesson)]
        notebooks = sorted(folder.glob(f"{lesson}_*.ipynb"), key=lambda path: path.stat().st_mtime_ns)
        if len(notebooks) > 1:
            notes.append(f"Lesson {lesson} has {len(notebooks)} notebooks in {folder.name}/. The one saved last was read: {notebooks[-1].name}")
        if notebooks:
            parts += parts_of(notebooks[-1], own)
        else:
            parts += [Part(exercise, "can't run", f"there is no notebook {lesson}_… in {folder.name}/") for exercise in own]
    return Parts(parts, notes)


# ---- one notebook


@dataclass
class Cell:
    """A code cell: its name (the id that the course gave it, or any), and its code."""

    name: str
    source: str
    tags: list[str]

    @property
    def is_run(self) -> bool:
        """Does it define something: the set-up, the learner's part, or a cell that the learner added?"""
        if self.name == "set-up" or self.name.startswith("your-"):
            return True
        is_own = not COURSE_CELL.fullmatch(self.name) and "needs-your-code" not in self.tags
        return is_own and not OUR_CALL.search(self.source)


def read_cells(path: Path) -> list[Cell]:
    """The code cells of a notebook, up to the last part. ValueError if it can't be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells = []
        for cell in found:
            if cell["cell_type"] == "code":
                metadata = cell.get("metadata", {})
                name = metadata.get("name") or cell.get("id", "")
                cells.append(Cell(name, "".join(cell["source"]), metadata.get("tags", [])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} can't be read as a notebook: {_in_a_line(error)}") from None
    last = max((number for number, cell in enumerate(cells) if cell.name.startswith(("your-", "check-"))), default=-1)
    return cells[: last + 1]


def parts_of(path: Path, exercises: list[Exercise]) -> list[Part]:
    """The parts of one notebook's exercises. Its cells are run in a namespace of their own."""
    try:
        cells = read_cells(path)
    except ValueError as error:
        return [Part(exercise, "can't run", str(error)) for exercise in exercises]
    module = types.ModuleType(f"exercises_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses look
    problems: dict[str, str] = {}
    for cell in cells:
        if cell.is_run:
            problem = run_cell(cell, module, path.name)
            if problem:
                problems[cell.name] = problem
                if cell.name == "set-up":
                    break
    return [_checked(exercise, cells, module, problems) for exercise in exercises]


def run_cell(cell: Cell, module: types.ModuleType, file: str) -> str:
    """Run a cell in the module's namespace, its output dropped; returns what went wrong in one line, or nothing."""
    filename = f"<{file}, cell {cell.name}>"
    linecache.cache[filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), filename)  # for tracebacks, and Triton
    seconds = SETUP_SECONDS if cell.name == "set-up" else CELL_SECONDS
    try:
        code = compile(cell.source, filename, "exec")
        with _quiet(), TimeLimit(seconds):
            exec(code, module.__dict__)
    except TimeUp:
        return f"its cell was stopped after {seconds:g} seconds"
    except KeyboardInterrupt:
        raise
    except SyntaxError as error:
        if any(line.lstrip().startswith(("%", "!")) for line in cell.source.splitlines()):
            return "its cell holds a magic (a line that begins with % or !), and that isn't Python: take it out, and save"
        return _in_a_line(error)
    except BaseException as error:  # the learner's code: anything, SystemExit too
        return _in_a_line(error)
    return ""


def _checked(exercise: Exercise, cells: list[Cell], module: types.ModuleType, problems: dict[str, str]) -> Part:
    """The part of one exercise, from a notebook whose cells were run."""
    name = f"your-{exercise.id.replace('.', '-')}"
    cell = next((cell for cell in cells if cell.name == name), None)
    if cell is None:
        return Part(exercise, "can't run", f"the notebook has no cell {name}")
    if "set-up" in problems:
        return Part(exercise, "can't run", f"the set-up cell failed: {problems['set-up']}")
    if name in problems:
        return Part(exercise, "can't run", problems[name])
    objects = []
    for wanted in exercise.part.split(", "):
        found = getattr(module, wanted, None)
        if found is None or str(getattr(found, "__module__", "")).startswith("course_lib"):
            return Part(exercise, "can't run", f"the cell {name} defines no {wanted}")
        objects.append(found)
    with _quiet():
        report = run_exercise(exercise, tuple(objects))
    why = report.problem or (f"doesn't hold: {report.failed.test.what}" if report.failed else "")
    return Part(exercise, report.state, why, tuple(objects), count_lines(cell.source), report)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the learner's code prints has its place in the learner's notebook."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160].rstrip(": ")


def count_lines(source: str) -> int:
    """Lines that hold code: no comments, docstrings or blank lines. 0 if it isn't Python."""
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return 0
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = {line for token in tokens if token.type not in silent for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)

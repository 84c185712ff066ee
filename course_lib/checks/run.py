"""Run an exercise's tests on the learner's parts: each to its end, none for ever, nothing thrown at the learner."""

from __future__ import annotations

import ctypes
import dis
import linecache
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from .concepts import CONCEPTS, Concept
from .exercise import Exercise, NotDone, Test, Wrong, shown

SECONDS = 5.0  # for one test
HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent


class TimeUp(BaseException):
    """Raised inside the learner's code when a test takes too long. Not an Exception: `except Exception` lets it pass."""


class TimeLimit:
    """Stop the code in a `with` block by raising TimeUp in its thread, again and again until it leaves.

    Works for loops in Python, in any thread and on any system; a single call into C is waited for.
    TimeUp can arrive between any two instructions, in `__exit__` too. So there are bare locks that a single
    call changes, and no `with` that an exception could leave half done.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.thread = seconds, threading.get_ident()
        self.ready, self.inside, self.watching = threading.Lock(), threading.Lock(), threading.Lock()

    def __enter__(self) -> TimeLimit:
        for lock in (self.ready, self.inside, self.watching):
            lock.acquire()
        try:
            threading.Thread(target=self._watch, daemon=True).start()
        except RuntimeError:  # a browser's Python has no threads: there, only a restart of the kernel ends an endless loop
            self.watching.release()
        self.ready.release()  # the time runs from here on: starting a thread must not be interrupted
        return self

    def _watch(self) -> None:
        self.ready.acquire()
        wait = self.seconds
        while not self.inside.acquire(timeout=wait):
            _raise_in(self.thread, TimeUp)
            wait = 0.02  # again: a bare `except:` inside a loop swallows many of them
        self.watching.release()

    def __exit__(self, *error: object) -> None:
        while True:
            try:
                if self.inside.locked():
                    self.inside.release()
                while self.watching.locked():
                    time.sleep(0.0002)
                for _ in range(3):  # one that is still on its way arrives here, at a jump backwards
                    pass
                return
            except TimeUp:
                pass


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread before one of its next instructions.

    It can't be taken back: with no exception given, CPython 3.11 would look for one at every call from then on, and hang
    in the first function that is traced.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


@dataclass
class Result:
    """How one test went: "holds", "wrong", "error", "endless" or "cost"."""

    test: Test
    outcome: str
    wrong: Wrong | None = None
    message: str = ""  # of an error: what was raised, and where in the learner's code

    @property
    def concept_id(self) -> str | None:
        """The idea behind a test that doesn't hold."""
        if self.outcome == "holds":
            return None
        return (self.wrong.concept if self.wrong else None) or self.test.concept

    @property
    def concept(self) -> Concept | None:
        return CONCEPTS[self.concept_id] if self.concept_id else None


@dataclass
class Report:
    """What a check found.

    state    "green" (remarks on cost allowed), "red", "not done"
    results  one Result a test, in order; empty when it isn't done
    where    what was tested, and from where
    """

    exercise: Exercise
    where: str
    state: str
    results: list[Result]
    problem: str = ""  # why nothing could be tested

    @property
    def failed(self) -> Result | None:
        """The first test that is red."""
        return next((result for result in self.results if result.outcome not in ("holds", "cost")), None)

    @property
    def remarks(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "cost"]


def run_exercise(exercise: Exercise, parts: tuple, seconds: float = SECONDS) -> Report:
    """All tests of an exercise on the learner's parts. Stops after an endless loop. Never raises what they raise."""
    where = ", ".join(location(part) for part in parts)
    names = [name.strip() for name in exercise.part.split(",")]
    problem = _wrong_parts(names, parts)
    if problem:
        return Report(exercise, where, "red", [], problem)
    if any(_is_empty(part) for part in parts):
        return Report(exercise, where, "not done", [])
    results: list[Result] = []
    for test in sorted(exercise.tests, key=lambda test: test.is_cost):
        if test.is_cost and any(result.outcome not in ("holds", "cost") for result in results):
            break  # what a wrong answer costs says nothing
        result = _run_test(test, parts, seconds)
        if result is None:
            return Report(exercise, where, "not done", [])
        results.append(result)
        if result.outcome == "endless":
            break
    state = "green" if all(result.outcome in ("holds", "cost") for result in results) else "red"
    return Report(exercise, where, state, results)


def _is_empty(part: object) -> bool:
    """True for a function with nothing in it but `...`, `pass` or a docstring: the stub is gone, the answer isn't there yet."""
    code = getattr(getattr(part, "fn", part), "__code__", None)
    if code is None:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP", "RETURN_VALUE")]
    return all(step.opname in ("LOAD_CONST", "RETURN_CONST") and step.argval in (None, ...) for step in steps)


def _wrong_parts(names: list[str], parts: tuple) -> str:
    """Why these can't be the exercise's parts, or nothing."""
    if len(parts) != len(names):
        return f"it takes {len(names)} part{'s' if len(names) > 1 else ''}: {', '.join(names)}; it was given {len(parts)}"
    for name, part in zip(names, parts, strict=True):
        if not callable(part) and not hasattr(part, "fn"):
            return f"{name} must be a function or a class; it is {shown(part, 60)}. Did you call it? Write {name}, not {name}(...)"
    return ""


def _run_test(test: Test, parts: tuple, seconds: float) -> Result | None:
    """One test's result; None when the learner's part is still a stub."""
    try:
        with TimeLimit(seconds):
            test.run(*parts)
    except Wrong as wrong:
        return Result(test, "cost" if test.is_cost else "wrong", wrong)
    except TimeUp:
        return Result(test, "endless", message=f"stopped after {seconds:g} seconds: does a loop in it ever end?")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the learner's code raises, SystemExit too
        if _is_not_done(error):
            return None
        return Result(test, "error", message=_described(error))
    return Result(test, "holds")


def _is_not_done(error: BaseException | None) -> bool:
    """A stub's NotDone, perhaps wrapped by what ran it (Triton's interpreter does that)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NotDone):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _described(error: BaseException) -> str:
    """What was raised, and the last of the learner's own lines on the way there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    text = text if len(text) <= 300 else text[:299] + "…"
    if own:
        frame = own[-1]
        text += f"\nin {frame.name}, line {frame.lineno} of {file_text(frame.filename)}:  {frame.line}"
    return text


def _is_library(filename: str) -> bool:
    """Ours, Python's, or an installed package's; a cell of a notebook and a learner's file are not."""
    path = os.path.abspath(filename)
    if filename.startswith("<frozen") or path.startswith(str(LIBRARY) + os.sep):
        return True
    prefixes = {os.path.abspath(os.path.dirname(os.__file__))}
    return "site-packages" in path or any(path.startswith(prefix + os.sep) for prefix in prefixes)


def location(part: object) -> str:
    """Which object was tested, and where it's written: "slot_mapping (line 1 of cell [5])"."""
    target = getattr(part, "fn", part)  # a Triton kernel wraps its function
    if isinstance(target, type):
        name, code = target.__qualname__, None
        functions = [value for value in vars(target).values() if hasattr(value, "__code__")]
        code = min((function.__code__ for function in functions), key=lambda code: code.co_firstlineno, default=None)
    else:
        name, code = getattr(target, "__qualname__", type(target).__name__), getattr(target, "__code__", None)
    if code is None:
        return name
    return f"{name} ({file_text(code.co_filename)})"


def file_text(filename: str) -> str:
    """A file's name as the learner knows it: a cell by its number, a file from here."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    compiled = getattr(getattr(shell, "compile", None), "_filename_map", {})
    if filename in compiled:
        return f"cell [{compiled[filename]}] of this notebook"
    if filename.startswith("<"):
        return filename.strip("<>") if linecache.getlines(filename) else "the Python prompt"
    try:
        return os.path.relpath(filename)
    except ValueError:  # another drive
        return filename

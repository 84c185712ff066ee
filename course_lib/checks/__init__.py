"""The exercise checks: `check("03.1", slot_mapping)` tests the learner's part and shows a card.

A check tests exactly the object that it's given. It ends, whatever that object does, and never raises what it raises.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from .exercise import EXERCISES, Exercise, NotDone
from .plug import plug

__all__ = ["NotDone", "check", "plug"]


def load(lesson: str | None = None) -> dict[str, Exercise]:
    """Import the checks of one lesson ("03") or of all; returns the exercises known so far, by id."""
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("lesson_") and lesson in (None, module.name.removeprefix("lesson_")):
            importlib.import_module(f"{__name__}.{module.name}")
    return EXERCISES


def find(identifier: str) -> Exercise:
    """The exercise with this id. ValueError, with the ids there are, for an unknown one."""
    if not isinstance(identifier, str):
        raise TypeError(f"the first argument must be the exercise's id as text, like '03.1'; got {identifier!r}")
    if identifier not in load(identifier[:2]):
        known = ", ".join(sorted(load()))
        raise ValueError(f"there is no exercise {identifier!r}: use one of {known}")
    return EXERCISES[identifier]


def check(identifier: str, *parts: object) -> None:
    """Test your part of an exercise and show what holds, as a card in a notebook and as text elsewhere.

    identifier  the exercise, like "03.1"
    parts       your function or class; several where the exercise has several
    The result is remembered in one local file: `python -m course_lib check --all` prints the table.
    """
    from .card import Card
    from .progress import remember
    from .run import run_exercise

    report = run_exercise(find(identifier), parts)
    remember(report)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import display

        display(Card(report))
    else:
        print(Card(report))

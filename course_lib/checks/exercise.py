"""What a check is made of: exercises, each with small tests, each test for one idea.

    slots = Exercise("03.1", "slot_mapping", "Where each token's K/V goes")

    @slots.test("a chunk inside one block", concept="S3")
    def _(slot_mapping):
        expect(slot_mapping, block_table=[0], start_pos=0, num_tokens=3, block_size=4,
               gives=[0, 1, 2], saying="three tokens, in the first three slots of block 0")
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .concepts import CONCEPTS


class NotDone(NotImplementedError):
    """What the stub of an exercise raises: `raise NotDone("03.1 slot_mapping")`."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it: one line, and no way through the engine."""
        return [f"NotDone: {self} isn't written yet. Write it in its cell, then run this one again."]


class Wrong(Exception):
    """A test that doesn't hold.

    saying   what was expected of the behaviour, in words
    given    the smallest input that shows it
    got      what the learner's part did with it
    concept  another idea than the test's own, where the result shows which
    """

    def __init__(self, saying: str, *, given: str = "", got: object = None, concept: str | None = None) -> None:
        super().__init__(saying)
        self.saying, self.given, self.concept = saying, given, concept
        self.got = got if got is None or isinstance(got, str) else shown(got)


@dataclass(frozen=True)
class Test:
    """what: the behaviour, as a phrase. is_cost: a failure is a remark about cost, not a wrong answer."""

    what: str
    concept: str | None
    run: Callable[..., None]
    is_cost: bool = False


@dataclass
class Exercise:
    """One exercise: its id ("03.1"), the learner's part (or parts, with commas), a title, and its tests in order."""

    id: str
    part: str
    title: str
    tests: list[Test] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d\d\.\d", self.id):
            raise ValueError(f"id={self.id!r} must look like '03.1'")
        if self.id in EXERCISES:
            raise ValueError(f"id={self.id!r} is used twice")
        EXERCISES[self.id] = self

    def test(self, what: str, concept: str | None = None, *, is_cost: bool = False) -> Callable[[Callable], Callable]:
        """Register a test of one idea; it raises `Wrong` (through `expect` or `require`) when it doesn't hold."""
        if concept is not None and concept not in CONCEPTS:
            raise ValueError(f"concept={concept!r} isn't in concepts.py")

        def register(run: Callable[..., None]) -> Callable[..., None]:
            self.tests.append(Test(what, concept, run, is_cost))
            return run

        return register

    def cost(self, what: str, concept: str) -> Callable[[Callable], Callable]:
        """Register a test of cost: the answer is right, and the trace shows that it does more than it must."""
        return self.test(what, concept, is_cost=True)


EXERCISES: dict[str, Exercise] = {}  # by id; filled by the modules lesson_NN


def expect(function: Callable, *args, gives, saying: str, tolerance: float = 1e-4, concept: str | None = None, **kwargs) -> None:
    """Call the learner's function with copies of the arguments and compare what it returns with `gives`.

    Lists, tuples, tensors and arrays with the same numbers are the same; floats may differ by `tolerance`.
    Raises Wrong, with the call and the result, but without the right value.
    """
    given = call_text(function, args, kwargs)
    got = function(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    if not is_same(plain(got), plain(gives), tolerance):
        raise Wrong(saying, given=given, got="returned " + shown(got), concept=concept)


def require(condition: object, saying: str, *, given: str = "", got: object = None, concept: str | None = None) -> None:
    """Raise Wrong unless the condition holds."""
    if not condition:
        raise Wrong(saying, given=given, got=got, concept=concept)


def plain(value: object) -> object:
    """The value without its dress: tensors, arrays, tuples and ranges as lists, NumPy's numbers as Python's."""
    if isinstance(value, str | bytes | bool | int | float) or value is None:
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, dict):
        return {plain(key) if not isinstance(key, tuple) else tuple(plain(part) for part in key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if hasattr(value, "__iter__"):
        return [plain(item) for item in value]
    return value


def is_same(a: object, b: object, tolerance: float) -> bool:
    """Equal in shape and value; a number and a truth value differ, but 1 and 1.0 don't."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(is_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float):
        if isinstance(a, float) or isinstance(b, float):
            return (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= tolerance
    return a == b


def shown(value: object, most: int = 160) -> str:
    """A value as text, without its dress, cut to a readable length."""
    try:
        text = repr(plain(value))
    except Exception as error:  # the learner's object, and its __repr__
        text = f"a {type(value).__name__} that can't be shown ({type(error).__name__})"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    text = re.sub(r"-?\d+\.\d{5,}(e-?\d+)?", lambda match: f"{float(match.group()):.4g}", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def call_text(function: Callable, args: tuple, kwargs: dict) -> str:
    """A call as one would write it."""
    parts = [shown(arg, 80) for arg in args] + [f"{name}={shown(value, 80)}" for name, value in kwargs.items()]
    return f"{getattr(function, '__name__', type(function).__name__)}({', '.join(parts)})"

"""Read solutions/src and solutions/variants for tests: every exercise, its stub, its solution, its wrong answers."""

import ast
import itertools
import linecache
import runpy
import sys
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build_notebooks as builder  # noqa: E402 (it is a script beside the package, not in it)

SOURCES = sorted((ROOT / "solutions" / "src").glob("*.py"))
COUNTER = itertools.count()


@dataclass(frozen=True)
class Written:
    """An exercise as its source has it: code of the set-up cell, of the solution and of the stub; names of the parts."""

    id: str
    source: Path
    setup: str
    solution: str
    stub: str
    parts: tuple[str, ...]

    def answer(self, code):
        """The parts that `code` defines, after the set-up cell, as on a fresh kernel."""
        name = f"answer_{next(COUNTER)}"
        module = types.ModuleType(name)
        sys.modules[name] = module  # where dataclasses look
        for cell, text in (("set-up", self.setup), ("answer", code)):
            filename = f"<{name} {cell}>"
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)  # for inspect
            exec(compile(text, filename, "exec"), module.__dict__)
        return tuple(eval(part, module.__dict__) for part in self.parts)


def read_exercises():
    """{id: Written} of all sources."""
    found = {}
    for source in SOURCES:
        label = source.relative_to(ROOT).as_posix()
        solved = {cell.id: cell for cell in builder.read_source(source, label, builder.SOLUTIONS).cells}
        stubbed = {cell.id: cell for cell in builder.read_source(source, label, builder.EXERCISES).cells}
        for name, cell in solved.items():
            if name.startswith("your-"):
                number = name.removeprefix("your-").replace("-", ".")
                call = ast.parse(solved["check-" + name.removeprefix("your-")].source.strip()).body[0].value
                parts = tuple(ast.unparse(argument) for argument in call.args[1:])
                found[number] = Written(number, source, solved["set-up"].source, cell.source, stubbed[name].source, parts)
    return found


EXERCISES = read_exercises()


def read_variants():
    """(mutants, costs, also_right): the first two as (concept, exercise, old, new), the last as (exercise, code)."""
    mutants, costs, also_right = [], [], []
    for path in sorted((ROOT / "solutions" / "variants").glob("*.py")):
        data = runpy.run_path(str(path))
        mutants += data.get("MUTANTS", [])
        costs += data.get("COSTS", [])
        also_right += [(exercise, code) for exercise, codes in data.get("ALSO_RIGHT", {}).items() for code in codes]
    return mutants, costs, also_right


MUTANTS, COSTS, ALSO_RIGHT = read_variants()


def mutated(exercise, old, new):
    """The solution's code with one change. AssertionError if the old text isn't there exactly once."""
    code = EXERCISES[exercise].solution
    assert code.count(old) == 1, f"{exercise}: {old!r} is there {code.count(old)} times"
    return code.replace(old, new)

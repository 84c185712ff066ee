"""One source becomes the learner's notebook and the solved one; faults in it are named; a learner's work is safe."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]
import build_notebooks as builder  # noqa: E402 (it is a script beside the package, not in it)
from test_notebooks_guard import problems  # noqa: E402

HINT = "# <details><summary>Hint {0}</summary>\n#\n# Words.\n#\n# </details>\n#\n"
SOURCE = '''# %% [markdown]
# # 01 · Exercises

# %% name="set-up"
class NotDone(NotImplementedError): pass
def check(name, *parts): print(name, [part.__name__ for part in parts])

# %% [markdown] name="task-01-1"
# ## 01.1 Add one

# %% name="your-01-1"
def add_one(numbers):
    """Add one to each number."""
    result = []
    for number in numbers:
        ### BEGIN SOLUTION
        more = number + 1  # the secret
        result.append(more)
        ### END SOLUTION
    return result

# %% name="check-01-1"
check("01.1", add_one)

# %% [markdown] name="hints-01-1"
HINTS
# %% name="run-01-1" tags=["needs-your-code"]
print(add_one([1, 2]))
'''.replace("HINTS\n", "".join(HINT.format(n) for n in (1, 2, 3)))


class Course:
    """A repository in a temporary folder with one source of exercises, `01_tiny`."""

    def __init__(self, root):
        self.root = root
        self.source = root / "solutions/src/01_tiny.py"
        self.solution, self.exercise = root / "solutions/01_tiny.ipynb", root / "exercises/01_tiny.ipynb"
        self.source.parent.mkdir(parents=True)
        self.write(SOURCE)

    def write(self, text):
        self.source.write_text(text, encoding="utf-8")

    def build(self, *options):
        return builder.main([*options], root=self.root)

    def cells(self, path):
        return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    course = Course(tmp_path_factory.mktemp("course"))
    assert course.build() == 0
    return course


def test_the_exercise_has_a_stub_where_the_solution_was(built):
    cell = built.cells(built.exercise)["your-01-1"]
    assert cell.source.splitlines()[3:] == ['    for number in numbers:', '        raise NotDone("01.1 add_one")', "    return result"]
    assert "secret" not in built.exercise.read_text() and "SOLUTION" not in built.exercise.read_text()


def test_the_solved_one_was_run_and_shows_no_markers(built):
    cells = built.cells(built.solution)
    assert cells["run-01-1"].outputs[0].text == "[2, 3]\n"
    assert "the secret" in cells["your-01-1"].source and "SOLUTION" not in cells["your-01-1"].source


def test_the_exercise_was_not_run_and_goes_on_after_a_failing_cell(built):
    cells = built.cells(built.exercise).values()
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    assert [cell.id for cell in cells if "raises-exception" in builder.tags(cell)] == ["run-01-1"]
    assert "raises-exception" not in built.solution.read_text()


def test_both_keep_every_rule(built):
    for path in (built.exercise, built.solution):
        assert problems(nbformat.read(path, as_version=4), path) == []


def test_the_first_cell_says_whose_notebook_it_is(built):
    assert "yours to work in" in built.exercise.read_text() and "Type and run here" in built.solution.read_text()


def test_the_titles_tell_exercises_from_solutions(course):
    course.write(SOURCE.replace("# # 01 · Exercises", "# # Exercises 01 · Adding"))
    exercise, solution = (builder.find_jobs([kind], course.root, [])[0].nb for kind in (builder.EXERCISES, builder.SOLUTIONS))
    assert exercise.cells[0].source.startswith("# Exercises 01 · Adding\n")
    assert solution.cells[0].source.startswith("# Solutions 01 · Adding\n")


def test_building_twice_changes_no_byte(built):
    before = built.exercise.read_bytes(), built.solution.read_bytes()
    assert built.build() == 0
    assert (built.exercise.read_bytes(), built.solution.read_bytes()) == before
    assert built.build("--check") == 0


def test_a_learners_work_is_left_alone_and_the_rest_is_built(course, capsys):
    assert course.build() == 0
    nb = nbformat.read(course.exercise, as_version=4)
    nb.cells[3].source += "\n# my own"
    nbformat.write(nb, course.exercise)
    course.write(SOURCE.replace("the secret", "the other secret"))
    assert course.build() == 0
    assert "# my own" in course.exercise.read_text() and "the other secret" in course.solution.read_text()
    assert "somebody works in it" in capsys.readouterr().out
    assert course.build("--force") == 0
    assert "# my own" not in course.exercise.read_text()


def test_an_edited_solution_is_an_error(course, capsys):
    assert course.build() == 0
    nb = nbformat.read(course.solution, as_version=4)
    nb.cells[3].source += "\n# by hand"
    nbformat.write(nb, course.solution)
    assert course.build() == 1 and "solutions/01_tiny.ipynb: not overwritten" in capsys.readouterr().err


def without(cell):
    return re.sub(rf'# %%[^\n]*name="{cell}".*?(?=\n# %%|\Z)', "", SOURCE, flags=re.DOTALL)


BEGIN, END = "        ### BEGIN SOLUTION\n", "        ### END SOLUTION\n"
FAULTS = {
    "never closed": (SOURCE.replace(END, ""), "BEGIN SOLUTION without its END"),
    "never opened": (SOURCE.replace(BEGIN, ""), "END SOLUTION without its BEGIN"),
    "nested": (SOURCE.replace(BEGIN, BEGIN + BEGIN), "BEGIN SOLUTION inside another"),
    "other indentation": (SOURCE.replace(END, END.strip() + "\n"), "same indentation"),
    "nothing between": (SOURCE.replace("        more = number + 1  # the secret\n        result.append(more)\n", ""), "no code between"),
    "only a comment between": (SOURCE.replace("        more = number + 1  # the secret\n        result.append(more)\n", "        # x\n"), "no code between"),
    "misspelt": (SOURCE.replace("### BEGIN SOLUTION", "# BEGIN SOLUTION"), "not a marker, but nearly one"),
    "lower case": (SOURCE.replace("### END SOLUTION", "### end solution"), "not a marker, but nearly one"),
    "text behind a marker": (SOURCE.replace("### BEGIN SOLUTION", "### BEGIN SOLUTION (easy)"), "not a marker, but nearly one"),
    "in another cell": (SOURCE.replace("print(add_one([1, 2]))", "### BEGIN SOLUTION\n1\n### END SOLUTION"), "your-01-k cells only"),
    "in Markdown": (SOURCE.replace("# # 01 · Exercises", "# # 01\n# ### BEGIN SOLUTION"), "your-01-k cells only"),
    "outside a function": (SOURCE.replace("    result = []\n", "").replace("def add_one(numbers):\n", "if 1:\n"), "outside a function"),
    "no markers": (SOURCE.replace(BEGIN, "").replace(END, ""), "no solution between markers"),
    "no set-up": (SOURCE.replace('name="set-up"', 'name="other"'), 'no cell named "set-up"'),
    "no check": (without("check-01-1"), "no cell named check-01-1"),
    "no hints": (without("hints-01-1"), "no cell named hints-01-1"),
    "two hints": (SOURCE.replace(HINT.format(3), ""), "three folded hints"),
    "no run": (without("run-01-1"), "no cell named run-01-1"),
    "an untagged run": (SOURCE.replace(' tags=["needs-your-code"]', ""), "must have the tag needs-your-code"),
    "more in the check": (SOURCE.replace('check("01.1", add_one)', 'check("01.1", add_one)\nprint(1)'), "nothing else"),
    "another id in the check": (SOURCE.replace('check("01.1"', 'check("01.2"'), 'must be check("01.1", name)'),
    "no exercise": (SOURCE.replace("01-1", "02-1"), "no cell named your-01-1"),
    "a stub that is no Python": (SOURCE.replace(BEGIN, "        if number:\n" + BEGIN).replace("        more =", "            more ="), "cell your-01-1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_source_is_named_before_anything_runs(course, capsys, fault):
    text, words = FAULTS[fault]
    assert text != SOURCE
    course.write(text)
    assert course.build() == 1
    assert words in capsys.readouterr().err
    assert not course.exercise.exists() and not course.solution.exists()


def test_several_solutions_in_one_class_each_get_their_own_stub(course):
    course.write(SOURCE.replace("    return result\n", "    return result\n\nclass Two:\n    def second(self):\n        ### BEGIN SOLUTION\n        return 2\n        ### END SOLUTION\n"))
    jobs = builder.find_jobs([builder.EXERCISES], course.root, [])
    source = next(cell.source for cell in jobs[0].nb.cells if cell.id == "your-01-1")
    assert source.count("raise NotDone") == 2 and '        raise NotDone("01.1 second")' in source

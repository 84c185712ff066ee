"""Every exercise: its stub, its solution, other right answers, and each wrong answer with its own concept."""

import re
import subprocess

import nbformat
import pytest
from exercise_source import ALSO_RIGHT, COSTS, EXERCISES, MUTANTS, ROOT, SOURCES, builder, mutated
from helpers import SUMMARY
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

from course_lib import checks
from course_lib.checks.card import as_text
from course_lib.checks.run import run_exercise

# The wrong answers that each lesson's exercises must catch.
BELONGS = {
    "01": "K1 K2", "02": "B1 B2 B3 B4 B5 B6 B8 B9 B12", "03": "S1 S2 S3 S5", "04": "M1 M2 M4 M5 M7 M8 M10",
    "05": "C1 C2 C3 C4 C8 C9", "06": "A1 A2 A4 A5 A7 A9 I8 B7 L1 L2 L4", "07": "P1 I1 I3 I5 I7",
    "08": "C1 C2 C3 C4 C6 C8 C9 C10 C11 C13 C14 C17 C18", "09": "X1 X2 X4 X5 X6 X10 P5",
    "10": "U1 U2 U4 T1 T2 T3 T5 T7 I5", "11": "A2 C6 C13",
}  # fmt: skip
MIN_LINE = 30  # characters: shorter lines, and heads of loops, are in every program


def report(exercise, code):
    return run_exercise(checks.find(exercise), EXERCISES[exercise].answer(code))


def needs(exercise):
    """Skip where the exercise can't run: its set-up says so."""
    if "triton" in EXERCISES[exercise].setup:
        pytest.importorskip("triton", reason="no Triton here")


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_stub_is_not_done_yet_in_one_line(exercise):
    needs(exercise)
    text = as_text(report(exercise, EXERCISES[exercise].stub))
    assert text == f"{exercise} {checks.find(exercise).part}: not done yet"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_green_without_a_remark(exercise):
    needs(exercise)
    result = report(exercise, EXERCISES[exercise].solution)
    assert result.state == "green" and not result.remarks, as_text(result)


@pytest.mark.parametrize("number", range(len(ALSO_RIGHT)), ids=[f"{exercise}-{n}" for n, (exercise, _) in enumerate(ALSO_RIGHT)])
def test_other_right_answers_are_green(number):
    exercise, code = ALSO_RIGHT[number]
    needs(exercise)
    result = report(exercise, code)
    assert result.state == "green" and not result.remarks, as_text(result)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_exercise_has_two_other_right_answers(exercise):
    assert sum(name == exercise for name, _ in ALSO_RIGHT) >= 2


def name_of(mutant):
    return f"{mutant[1]}-{mutant[0]}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_a_wrong_answer_is_red_with_its_own_concept(mutant):
    concept, exercise, old, new = mutant
    needs(exercise)
    result = report(exercise, mutated(exercise, old, new))
    assert result.state == "red", "it passes"
    assert result.failed.concept_id == concept, as_text(result)
    assert concept is None or checks.concepts.CONCEPTS[concept].question in as_text(result)


@pytest.mark.parametrize("mutant", COSTS, ids=name_of)
def test_a_costly_answer_is_green_with_its_remark(mutant):
    concept, exercise, old, new = mutant
    needs(exercise)
    result = report(exercise, mutated(exercise, old, new))
    assert result.state == "green", as_text(result)
    assert concept in [remark.concept_id for remark in result.remarks], "no remark"


@pytest.mark.parametrize("lesson", [lesson for lesson in BELONGS if any(path.stem.startswith(lesson) for path in SOURCES)])
def test_every_wrong_answer_that_belongs_to_a_lesson_is_tried(lesson):
    tried = {concept for concept, exercise, *_ in MUTANTS + COSTS if exercise.startswith(lesson)}
    assert set(BELONGS[lesson].split()) <= tried


def test_checks_and_sources_have_the_same_exercises():
    known = {identifier: exercise for identifier, exercise in checks.load().items() if not identifier.startswith("99")}
    assert sorted(known) == sorted(EXERCISES)
    for identifier, written in EXERCISES.items():
        assert known[identifier].part == ", ".join(written.parts)


def test_the_table_of_wrong_answers():
    """Not a test of its own: it shows, in the summary, which check caught which wrong answer with how many tests."""
    rows = []
    for exercise in EXERCISES:
        caught = [concept or "-" for concept, name, *_ in MUTANTS if name == exercise]
        remarks = [f"({concept})" for concept, name, *_ in COSTS if name == exercise]
        rows.append(f"{exercise} {checks.find(exercise).part:<34} {len(checks.find(exercise).tests):2} tests   {' '.join(caught + remarks)}")
    SUMMARY["wrong answers x checks (in brackets: right, but costly)"] = rows
    assert rows or not SOURCES


# ---- the notebooks

def tracked_texts():
    """(name, text) of every file that a learner may meet: all but solutions/, tests, and the engine, which does the same."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        is_engine = name.startswith("course_lib/") and not name.startswith("course_lib/checks/")
        if name.startswith(("solutions/", "tests/")) or is_engine or not name.endswith((".py", ".ipynb", ".md", ".js")):
            continue
        path = ROOT / name
        if name.endswith(".ipynb"):
            nb = nbformat.read(path, as_version=4)
            if name.startswith("exercises/") and nb.metadata.course.built != builder.fingerprint(nb):
                continue  # its learner's own
            yield name, "\n".join([cell.source for cell in nb.cells] + [str(o) for c in nb.cells for o in c.get("outputs", [])])
        else:
            yield name, path.read_text(encoding="utf-8")


def squeezed(line):
    return re.sub(r"\s+", "", line.split("#")[0])


def test_no_solution_text_outside_its_folder():
    lines = {}
    for written in EXERCISES.values():
        inside = [line for line in written.solution.splitlines() if line not in written.stub.splitlines()]
        lines |= {squeezed(line): written.id for line in inside if len(squeezed(line)) >= MIN_LINE and not line.rstrip().endswith(":")}
    found = []
    for name, text in tracked_texts():
        here = {squeezed(line) for line in text.splitlines()}
        found += [f"{name} holds a line of {lines[line]}: {line}" for line in sorted(here & set(lines))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", builder.KINDS, ids=lambda kind: kind.built)
def test_the_committed_notebooks_are_what_their_sources_say(kind):
    """Outputs are nbval's business; this is about the cells."""
    for source in sorted((ROOT / kind.sources).glob("*.py")):
        built = nbformat.read(ROOT / kind.built / f"{source.stem}.ipynb", as_version=4)
        label = source.relative_to(ROOT).as_posix()
        assert built.metadata.course.built == builder.read_source(source, label, kind).metadata.course.built, f"{built.metadata.course.source}: build again"


LONG = {"01", "04", "05", "07", "10", "11", "99"}  # their lines of set-up load the model, or compute for long


@pytest.mark.parametrize(
    "source", [pytest.param(path, marks=pytest.mark.long if path.stem[:2] in LONG else ()) for path in SOURCES], ids=lambda path: path.stem
)
def test_a_stubbed_notebook_runs_through_and_fails_only_where_it_is_tagged(source, tmp_path):
    nb = builder.read_source(source, source.relative_to(ROOT).as_posix(), builder.EXERCISES)
    manager = builder.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=builder.KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(nb, km=manager, timeout=180, resources={"metadata": {"path": str(ROOT / "exercises")}})
    try:
        client.execute(env=builder.kernel_environment(str(tmp_path)), cleanup_kc=True)  # raises for an untagged cell
    except CellTimeoutError as error:
        pytest.fail(str(error))
    for cell in builder.code_cells(nb):
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        if builder.YOURS in builder.tags(cell):
            assert errors == ["NotDone"], f"{cell.id}: {errors}"
        else:
            assert not errors, f"{cell.id}: {errors}"

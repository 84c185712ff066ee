"""The checks' own machinery: what a learner sees, whatever they hand in. An exercise of three tests is made for it."""

import csv
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from course_lib import checks
from course_lib.checks import NotDone, plug, progress, submissions
from course_lib.checks.card import Card, as_html, as_text
from course_lib.checks.concepts import CONCEPTS
from course_lib.checks.exercise import EXERCISES, Exercise, expect, is_same, plain, require, shown
from course_lib.checks.plug import PARTS
from course_lib.checks.run import TimeLimit, TimeUp, run_exercise

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def double():
    """An exercise: double each number of a list."""
    exercise = Exercise("99.9", "double", "Twice as much")

    @exercise.test("one number", concept="B2")
    def _(double):
        expect(double, [3], gives=[6], saying="three becomes six")

    @exercise.test("two numbers, in order", concept="M10")
    def _(double):
        expect(double, numbers=[1, 5], gives=[2, 10], saying="each number, in its place")

    @exercise.test("no number is copied", concept="K1", is_cost=True)
    def _(double):
        require(not getattr(double, "wasteful", False), saying="no copies", given="double([1])", got="2 copies")

    yield exercise
    del EXERCISES["99.9"]


def right(numbers):
    return [2 * number for number in numbers]


def concept(report):
    return report.failed.concept_id


def test_a_right_answer_is_green(double):
    report = run_exercise(double, (right,))
    assert report.state == "green" and report.failed is None
    assert as_text(report).splitlines()[0] == "99.9 double: all 3 hold"


def test_a_stub_is_not_done_in_one_calm_line(double):
    def stub(numbers):
        raise NotDone("99.9 double")

    report = run_exercise(double, (stub,))
    assert as_text(report) == "99.9 double: not done yet"
    assert "✗" not in as_html(report)


def dots(numbers):
    ...


def passes(numbers):
    """Twice as much."""
    pass


def returns_dots(numbers):
    return ...


@pytest.mark.parametrize("answer", [dots, passes, returns_dots])
def test_what_holds_nothing_yet_is_not_done_either(double, answer):
    assert as_text(run_exercise(double, (answer,))) == "99.9 double: not done yet"


def test_an_answer_that_returns_nothing_is_wrong(double):
    def forgets(numbers):
        [2 * number for number in numbers]

    assert "returned None" in as_text(run_exercise(double, (forgets,)))


def test_a_stub_that_is_run_says_one_line_and_no_traceback():
    assert NotDone("03.1 slot_mapping")._render_traceback_() == [
        "NotDone: 03.1 slot_mapping isn't written yet. Write it in its cell, then run this one again."]


def test_a_stub_inside_another_exception_is_still_not_done(double):
    def wrapped(numbers):
        try:
            raise NotDone("99.9 double")
        except NotDone as error:
            raise RuntimeError("interpreter") from error

    assert run_exercise(double, (wrapped,)).state == "not done"


def test_a_wrong_answer_names_its_concept_and_not_the_right_value(double):
    report = run_exercise(double, (lambda numbers: right(numbers)[::-1],))
    assert report.state == "red" and concept(report) == "M10"
    text = as_text(report)
    assert "numbers=[1, 5]" in text and "returned [10, 2]" in text and CONCEPTS["M10"].question in text
    assert "[2, 10]" not in text
    assert text.splitlines()[0] == "99.9 double: 1 of 2 hold"
    assert "no number is copied" not in text  # what a wrong answer costs says nothing


def test_a_costly_answer_is_green_with_a_remark(double):
    def costly(numbers):
        return right(numbers)

    costly.wasteful = True
    report = run_exercise(double, (costly,))
    assert report.state == "green" and [remark.concept_id for remark in report.remarks] == ["K1"]
    assert "<em>" not in as_text(report)
    assert "costs more" in as_text(report) and "costs more" in as_html(report)


def test_an_exception_is_shown_with_the_learners_own_line(double, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text("import json\n\ndef double(numbers):\n    return json.loads('{')  # my line\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    text = as_text(run_exercise(double, (names["double"],)))
    assert "JSONDecodeError" in text and "line 4" in text and "my line" in text and "decoder.py" not in text


@pytest.mark.parametrize("ending", [SystemExit(3), RecursionError("deep"), StopIteration(), GeneratorExit()])
def test_whatever_is_raised_is_caught(double, ending):
    def raises(numbers):
        raise ending

    report = run_exercise(double, (raises,))
    assert report.state == "red" and type(ending).__name__ in as_text(report)


def test_the_stop_button_still_works(double):
    def interrupted(numbers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_exercise(double, (interrupted,))


def endless(numbers):
    while True:
        pass


def stubborn(numbers):
    while True:
        try:
            len(numbers)
        except:  # noqa: E722 (that is the point)
            pass


def patient(numbers):
    while True:
        time.sleep(0.01)


def test_where_no_thread_can_start_a_check_works_without_its_time_limit(double, monkeypatch):
    """As in a browser: Pyodide has none."""

    def no_threads(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_threads)
    assert run_exercise(double, (right,)).state == "green"
    assert run_exercise(double, (lambda numbers: numbers,)).state == "red"


@pytest.mark.parametrize("answer", [endless, stubborn, patient])
def test_an_endless_loop_is_stopped(double, answer):
    start = time.monotonic()
    report = run_exercise(double, (answer,), seconds=0.3)
    assert time.monotonic() - start < 5
    assert report.state == "red" and "does a loop in it ever end?" in as_text(report)
    assert "1 more, not tested" in as_text(report)


def test_a_time_limit_never_fires_after_its_block():
    for _ in range(100):
        try:
            with TimeLimit(0.01):
                deadline = time.monotonic() + 0.01  # the two end at about the same time
                while time.monotonic() < deadline:
                    pass
        except TimeUp:
            pass
        sum(range(2000))  # a TimeUp that is late would be raised here
    assert threading.active_count() < 20


def test_a_debugger_works_after_a_check(tmp_path):
    """A trace function, as a debugger sets it, is called and ends: nothing of a limit is left in the interpreter."""
    code = """if True:
        import sys, time
        from course_lib.checks.run import TimeLimit, TimeUp

        for seconds, work in ((5, 0.0), (0.05, 0.2)):
            try:
                with TimeLimit(seconds):
                    end = time.monotonic() + work
                    while time.monotonic() < end:
                        pass
            except TimeUp:
                print("stopped")
        seen = []
        sys.settrace(lambda frame, event, arg: seen.append(event))
        len.__call__([])
        (lambda **kwargs: None)(**{})
        sys.settrace(None)
        print(seen)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.stdout.split("\n")[0] == "stopped" and "call" in done.stdout, done.stderr


@pytest.mark.parametrize("parts, says", [
    ((), "it takes 1 part: double; it was given 0"),
    ((right, right), "it was given 2"),
    (([6],), "Write double, not double(...)"),
    ((None,), "must be a function or a class"),
])
def test_what_is_no_answer_at_all_is_said_kindly(double, parts, says):
    report = run_exercise(double, parts)
    assert report.state == "red" and says in as_text(report) and says in as_html(report).replace("&#x27;", "'")


def test_the_card_says_what_was_tested_and_from_where(double):
    text = as_text(run_exercise(double, (right,)))
    assert "tested: right (" in text and "test_checks.py" in text


def test_html_and_text_hold_the_same_words(double):
    import html
    import re

    report = run_exercise(double, (lambda numbers: ["<b>", 1],))
    words = re.sub(r"<[^>]+>", " ", as_html(report))
    for line in as_text(report).splitlines():
        for part in line.split(":")[-1].split():
            assert part in html.unescape(words), part
    assert "<b>'" not in as_html(report)  # the learner's text is escaped
    assert Card(report)._repr_mimebundle_()["text/plain"] == as_text(report)


def test_an_unknown_exercise_is_named():
    with pytest.raises(ValueError, match="no exercise '98.7'"):
        checks.find("98.7")
    with pytest.raises(TypeError, match="as text, like"):
        checks.check(right, "03.1")


def test_two_exercises_with_one_id_are_an_error(double):
    with pytest.raises(ValueError, match="used twice"):
        Exercise("99.9", "other", "Other")


def test_a_test_of_an_unknown_concept_is_an_error(double):
    with pytest.raises(ValueError, match="Q7"):
        double.test("x", concept="Q7")


# ---- right answers in another dress

class Numbers(list):
    pass


@pytest.mark.parametrize("value", [(1, 2), range(1, 3), Numbers([1, 2]), iter([1, 2]), [1.0, 2.00001]])
def test_sequences_of_the_same_numbers_are_the_same(value):
    assert is_same(plain(value), [1, 2], 1e-4)


def test_tensors_and_arrays_are_lists_of_numbers():
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    for value in (torch.tensor([1, 2]), numpy.array([1, 2]), [numpy.int64(1), torch.tensor(2)], torch.tensor([1.0, 2.0], requires_grad=True)):
        assert is_same(plain(value), [1, 2], 1e-4)
    assert is_same(plain({"a": torch.tensor([True])}), {"a": [True]}, 0)


@pytest.mark.parametrize("value", [[1], [1, 2, 3], [2, 1], None, [1, "2"], [[1, 2]], [1, 2.01], {1: 2}])
def test_other_values_are_not(value):
    assert not is_same(plain(value), [1, 2], 1e-4)


def test_the_learners_function_gets_copies():
    def spoils(numbers):
        numbers.clear()
        return []

    numbers = [1, 2]
    expect(spoils, numbers, gives=[], saying="")
    assert numbers == [1, 2]


def test_long_and_strange_values_are_shown_in_one_line():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert len(shown(list(range(1000)))) == 160 and "\n" not in shown(list(range(1000)))
    assert "can't be shown" in shown(Broken())
    assert "0x" not in shown(object())
    assert shown([0.1 + 0.2]) == "[0.3]"


# ---- progress

@pytest.fixture
def remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def test_results_are_remembered_and_shown_in_a_table(double, remembered, capsys):
    checks.load()
    checks.check("99.9", lambda numbers: numbers)
    text, is_done = progress.table(progress.read_progress())
    assert not is_done and "✗ 99.9" in text and "B2" in text
    checks.check("99.9", right)
    text, _ = progress.table(progress.read_progress())
    assert "✓ 99.9" in text and "3 of 3" in text
    assert list(remembered.parent.iterdir()) == [remembered]  # no draft is left


def test_a_broken_progress_file_costs_nothing_but_the_memory(double, remembered, capsys):
    remembered.write_text("{")
    checks.check("99.9", right)
    assert json.loads(remembered.read_text())["99.9"]["state"] == "green"


def test_a_check_works_where_nothing_can_be_written(double, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "missing" / "progress.json"))
    checks.check("99.9", right)
    assert "all 3 hold" in capsys.readouterr().out


def test_progress_lies_beside_the_exercises(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    (tmp_path / "exercises").mkdir()
    monkeypatch.chdir(tmp_path / "exercises")
    assert progress.progress_file() == tmp_path / ".course_progress.json"


def command(*args, **environment):
    done = subprocess.run([sys.executable, "-m", "course_lib", "check", *map(str, args)], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, **environment}, timeout=240)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_check_all_says_what_is_left_and_fails_until_all_is_green(tmp_path):
    record = tmp_path / "progress.json"
    code, text, _ = command("--all", COURSE_PROGRESS=str(record))
    assert code == 1 and text.splitlines()[-2].startswith("0 of ")
    known = [identifier for identifier in checks.load() if not identifier.startswith("99")]
    record.write_text(json.dumps({identifier: {"state": "green", "held": 1, "of": 1} for identifier in known}))
    code, text, _ = command("--all", COURSE_PROGRESS=str(record))
    assert code == 0 and f"{len(known)} of {len(known)} done" in text


@pytest.mark.parametrize("args", [[], ["--all", "x"], ["--csv", "x"]])
def test_check_without_a_clear_wish_says_how_to_use_it(args):
    code, _, error = command(*args)
    assert code == 2 and "--all" in error


def test_a_missing_folder_is_named():
    code, _, error = command("nowhere/")
    assert code == 2 and "nowhere/" in error


# ---- plug

def test_a_plugged_part_is_used_and_taken_out_again():
    from course_lib import engine

    before, mine = engine.build_batch, object()
    with pytest.raises(RuntimeError), plug(build_batch=mine):
        assert engine.build_batch is mine
        raise RuntimeError
    assert engine.build_batch is before


def test_an_unknown_part_is_named():
    with pytest.raises(ValueError, match=r"'wheel' .*build_batch"), plug(wheel=1):
        pass


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_where_the_table_says(name):
    pytest.importorskip("torch")
    with plug(**{name: None}):
        pass


# ---- a class's submissions

SUBMISSION = '''
from course_lib.checks import NotDone, check
{code}
'''


def write_notebook(path, *cells):
    import nbformat

    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, path)


@pytest.mark.skipif(not any((ROOT / "solutions" / "src").glob("*.py")), reason="no exercise yet")
def test_a_folder_of_submissions_becomes_a_csv(tmp_path):
    """Bad files, syntax errors, a forged check and an endless cell each give a row; the others are checked."""
    checks.load("02")
    exercise = sorted(identifier for identifier in EXERCISES if not identifier.startswith("99"))[0]
    part = EXERCISES[exercise].part
    setup, call = "from course_lib.checks import NotDone, check", f'check("{exercise}", {part})'
    names = [name.strip() for name in part.split(",")]
    stub = "\n".join(f'def {name}(*args, **kwargs):\n    raise NotDone("{exercise} {name}")' for name in names)
    write_notebook(tmp_path / "ana/x.ipynb", setup, stub, call)
    write_notebook(tmp_path / "ben/x.ipynb", setup, "def broken(:", call)
    write_notebook(tmp_path / "cem/x.ipynb", "def check(*args): pass", stub.replace("NotDone", "ValueError"), call)
    (tmp_path / "dora.ipynb").write_text("{")
    write_notebook(tmp_path / "eva.ipynb", "1 + 1")
    output = tmp_path / "results.csv"
    code, _, error = command(tmp_path, "--csv", output)
    assert code == 1, error
    rows = {row["submission"]: row for row in csv.DictReader(io.StringIO(output.read_text()))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "ana/x.ipynb": "not done", "ben/x.ipynb": "error", "cem/x.ipynb": "red", "dora.ipynb": "unreadable", "eva.ipynb": "no exercise"}
    assert "SyntaxError" in rows["ben/x.ipynb"]["message"]
    assert list(rows["ana/x.ipynb"]) == list(submissions.FIELDS)


def test_what_a_spreadsheet_takes_for_a_formula_is_made_text():
    assert submissions._safe("=1+1") == "'=1+1" and submissions._safe("ana") == "ana" and submissions._safe(3) == 3
    assert submissions._safe("") == ""

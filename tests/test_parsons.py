"""The Parsons problem: which line it asks about, what it never tells, its list and buttons, and text without widgets."""

import builtins
import itertools

import pytest

from course_lib.checks.lesson_08 import three_budgets
from course_lib.lab.parsons import Parsons

LINES = ["    total += x", "total = 0", "for x in xs:"]
RULES = [("B", "A", "What is the total before?"), ("C", "A", "Which x?"), ("B", "C", "What does the loop begin with?")]


def small():
    return Parsons(LINES, RULES, "A sum")


def test_it_asks_about_the_first_line_that_stands_too_early():
    puzzle = small()
    assert puzzle.order == "ABC" and not puzzle.is_solved
    assert puzzle.first_too_early() == ("A", "What is the total before?")
    assert puzzle.put("BAC").first_too_early() == ("A", "Which x?")
    assert puzzle.put("CBA").first_too_early() == ("C", "What does the loop begin with?")
    assert puzzle.put("b, c, a").is_solved
    assert puzzle.verdict() == "In order."


def test_the_verdict_names_a_line_and_asks_but_does_not_say_where_it_goes():
    puzzle = small().put("BAC")
    assert puzzle.verdict() == "Look at line A, “total += x”, in place 2. Which x?"


def test_the_lines_in_order_are_a_program():
    place = {"xs": [1, 2, 3]}
    exec(small().put("BCA").code, place)
    assert place["total"] == 6


def test_every_order_that_keeps_the_rules_is_right():
    puzzle = Parsons(["x", "y", "z"], [("A", "B", "?")])
    right = ["".join(order) for order in itertools.permutations("ABC") if puzzle.put("".join(order)).is_solved]
    assert right == ["ABC", "ACB", "CAB"]


@pytest.mark.parametrize("order", ["AB", "ABCC", "ABD", ""])
def test_an_order_that_does_not_name_each_line_once_is_refused(order):
    puzzle = small()
    with pytest.raises(ValueError, match="must name each of A, B, C once"):
        puzzle.put(order)
    assert puzzle.order == "ABC"


def test_rules_that_cannot_be_kept_are_refused():
    with pytest.raises(ValueError, match="no order keeps the rules between A, B"):
        Parsons(LINES, [("A", "B", "?"), ("B", "A", "?")])
    with pytest.raises(ValueError, match="names no line"):
        Parsons(LINES, [("A", "Z", "?")])
    with pytest.raises(ValueError, match="has no question"):
        Parsons(LINES, [("A", "B", " ")])


def test_moving_stops_at_the_ends():
    puzzle = small()
    puzzle.move("A", -1)
    assert puzzle.order == "ABC"
    puzzle.move("A", 1)
    assert puzzle.order == "BAC"
    puzzle.move("A", 9)
    assert puzzle.order == "BCA"


def test_the_buttons_move_the_chosen_line_and_keep_it_chosen():
    pytest.importorskip("ipywidgets")
    puzzle = small()
    _look, lines, buttons, say = puzzle.widget().children
    up, down, _typed, ask = buttons.children
    lines.value = "A"
    down.click()
    down.click()
    assert puzzle.order == "BCA" and lines.value == "A"
    assert [letter for _, letter in lines.options] == ["B", "C", "A"]
    assert "A is in place 3 of 3" in say.value and 'aria-live="polite"' in say.value
    up.click()
    ask.click()
    assert "Which x?" in say.value
    puzzle.put("BCA")
    ask.click()
    assert "In order." in say.value
    assert lines.options[2][0].startswith("A\u00a0\u00a0\u00a0\u00a0"), "the indentation is seen in a list"
    assert all(button.tooltip and button.description for button in (up, down, ask))


def test_an_order_can_be_typed():
    pytest.importorskip("ipywidgets")
    puzzle = small()
    _look, lines, buttons, say = puzzle.widget().children
    _up, down, typed, _ask = buttons.children
    assert typed.value == "ABC"
    typed.value = "bca"
    assert puzzle.is_solved and typed.value == "BCA"
    assert [letter for _, letter in lines.options] == ["B", "C", "A"]
    typed.value = "BC"
    assert "must name each of A, B, C once" in say.value and puzzle.order == "BCA"
    lines.value = "B"
    down.click()
    assert typed.value == puzzle.order == "CBA"


def test_a_notebook_shows_widget_text_and_html():
    pytest.importorskip("ipywidgets")
    bundle = small()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == "A sum\nA       total += x\nB   total = 0\nC   for x in xs:"
    assert "<b>A</b>       total += x" in bundle["text/html"]


def test_without_ipywidgets_it_is_text(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    puzzle = small()
    assert puzzle.widget() is None
    assert set(puzzle._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert puzzle.put("BCA").is_solved


# ---- lesson 08's ----------------------------------------------------------------------------------


def test_the_lessons_puzzle_does_not_begin_solved_and_no_line_is_where_it_belongs_by_its_text():
    puzzle = three_budgets()
    assert not puzzle.is_solved
    assert "ipywidgets" not in str(puzzle)


def test_each_question_of_the_lessons_puzzle_is_asked_for_some_order():
    puzzle = three_budgets()
    right = sorted_by_rules(puzzle)
    assert puzzle.put(right).is_solved
    for earlier, later, question in puzzle.rules:
        wrong = right.replace(later, "")
        place = wrong.index(earlier)
        asked = puzzle.put(wrong[:place] + later + wrong[place:]).first_too_early()
        assert asked and asked[1] in {q for _, _, q in puzzle.rules}, question


def sorted_by_rules(puzzle):
    done = ""
    while len(done) < len(puzzle.lines):
        done += next(
            letter for letter in puzzle.lines
            if letter not in done and all(earlier in done for earlier, later, _ in puzzle.rules if later == letter)
        )  # fmt: skip
    return done

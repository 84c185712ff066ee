"""The Parsons problem of lesson 08 in a real JupyterLab: keyboard alone, then the mouse."""

import pytest

lab = pytest.importorskip("test_lab_browser", reason="it drives the browser")
browser, opened, server = lab.browser, lab.opened, lab.server
lab.NOTEBOOKS["parsons.ipynb"] = [
    "from course_lib.checks.lesson_08 import three_budgets\npuzzle = three_budgets()\npuzzle",
    "puzzle.order",
]
STATUS = ".jp-OutputArea [role=status]"


def says(page, words):
    page.wait_for_function(
        "([place, words]) => document.querySelector(place)?.textContent.includes(words)", arg=[STATUS, words]
    )
    return page.locator(STATUS).inner_text()


def test_the_puzzle_is_solved_with_the_keyboard_and_with_the_mouse(opened):
    notebook = opened("parsons.ipynb")
    page = notebook.run()
    page.wait_for_selector(".lm-parsons select")
    cells = notebook.num_cells()
    field = page.locator(".jp-OutputArea input[type=text]")
    page.locator(".lm-parsons select").focus()
    stops = []
    for _ in range(5):
        stops.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert stops[1:] == ["Move up", "Move down", "INPUT", "Check"]
    field.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("abc")  # the letters a, b, c are the field's, not JupyterLab's
    page.keyboard.press("Enter")
    says(page, "must name each of")
    page.keyboard.press("Control+A")
    page.keyboard.type("ficedjhabg")
    page.keyboard.press("Enter")
    says(page, "in the order that you typed")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    says(page, "In order.")
    page.locator(".lm-parsons option").nth(9).click()
    up = page.get_by_role("button", name="Move up")
    up.focus()
    for place in (9, 8, 7):
        page.keyboard.press("Space")
        says(page, f"G is in place {place} of 10")
    assert field.input_value() == "FICEDJGHAB"
    page.get_by_role("button", name="Check", exact=True).click()
    asked = says(page, "Look at line")
    assert "line G" in asked and "Were its blocks" not in asked
    assert notebook.num_cells() == cells, "a key went to the notebook"

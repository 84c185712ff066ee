"""Where Triton has no package, mini_triton stands in for it: kernels must say the same, and wrong ones must fail the same."""

import sys

import pytest
import torch
from exercise_source import ALSO_RIGHT, EXERCISES, MUTANTS, mutated

from course_lib import checks
from course_lib.checks.card import as_text
from course_lib.checks.run import run_exercise
from course_lib.model.mini_triton import Pointer, tl, triton

WRONG = [mutant for mutant in MUTANTS if mutant[1] == "04.3"]


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """The set-up cell of the exercise, on a system without Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "course_lib.model.own_kernels", raising=False)
    yield
    sys.modules.pop("course_lib.model.own_kernels", None)  # the next import gets Triton again


def report(code):
    return run_exercise(checks.find("04.3"), EXERCISES["04.3"].answer(code))


def test_the_stub_is_not_done_yet():
    assert report(EXERCISES["04.3"].stub).state == "not done"


@pytest.mark.parametrize("code", [EXERCISES["04.3"].solution, *(code for exercise, code in ALSO_RIGHT if exercise == "04.3")])
def test_right_kernels_are_green(code):
    result = report(code)
    assert result.state == "green", as_text(result)


@pytest.mark.parametrize("mutant", WRONG, ids=range(len(WRONG)))
def test_wrong_kernels_fail_with_their_concept(mutant):
    concept, exercise, old, new = mutant
    result = report(mutated(exercise, old, new))
    assert result.state == "red" and result.failed.concept_id == concept, as_text(result)


def test_a_masked_load_reads_nothing_and_a_masked_store_writes_nothing():
    memory = torch.arange(4.0)
    at = tl.arange(0, 8)  # the last four are outside
    assert tl.load(Pointer(memory) + at, mask=at < 4, other=-1.0).tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    tl.store(Pointer(memory) + at, tl.full([8], 9.0, tl.float32), mask=(at > 0) & (at < 3))
    assert memory.tolist() == [0, 9, 9, 3]


def test_each_program_of_the_grid_runs_once():
    @triton.jit
    def count(output, WIDTH: tl.constexpr):
        at = tl.program_id(0) * WIDTH + tl.program_id(1)
        tl.store(output + at, tl.load(output + at) + 1)

    output = torch.zeros(6)
    count[(2, 3)](output, WIDTH=3)
    assert output.tolist() == [1] * 6

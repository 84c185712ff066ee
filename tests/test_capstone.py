"""The capstone: parts are read from notebooks and checked; the green ones serve together in one engine, ours stand in for the others."""

import json
import os
import random

import nbformat
import pytest
from exercise_source import ALSO_RIGHT, EXERCISES, ROOT, builder

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, checks
from course_lib.checks import lesson_09
from course_lib.checks import my_engine as assembly
from course_lib.checks import my_parts as reading
from course_lib.checks.my_engine import my_engine
from course_lib.checks.my_parts import PLACES, Parts, count_lines, my_parts
from course_lib.lab.house import ROOMS
from course_lib.runners import FakeRunner

NAMES = {"03": "03_global_slots", "08": "08_chunk_scheduling"}
MAX_STEPS = 2000  # the runs here take a hundred at most


@pytest.fixture(scope="module")
def solved():
    """The parts of solutions/."""
    return my_parts(ROOT / "solutions")


@pytest.fixture(autouse=True)
def quick_cells(monkeypatch):
    monkeypatch.setattr(reading, "CELL_SECONDS", 0.5)


class Folder:
    """A learner's folder with two notebooks in it, one of them solved and edited by `edit`."""

    def __init__(self, path):
        self.path = path
        for name in NAMES.values():
            self.write(name, nbformat.read(ROOT / "exercises" / f"{name}.ipynb", as_version=4))

    def write(self, name, nb):
        nbformat.write(nb, self.path / f"{name}.ipynb")

    def edit(self, lesson, changes, own=()):
        """Cells of the solved notebook replaced by name; `own`: (name of the cell before it, code) of added cells."""
        nb = nbformat.read(ROOT / "solutions" / f"{NAMES[lesson]}.ipynb", as_version=4)
        for cell in nb.cells:
            cell.source = changes.get(cell.id, cell.source)
        for before, code in own:
            place = next(number for number, cell in enumerate(nb.cells) if cell.id == before)
            nb.cells.insert(place + 1, nbformat.v4.new_code_cell(code))
        self.write(NAMES[lesson], nb)
        return my_parts(self.path)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


# ---- parts at work


def serve(parts, *, caching=True, share=1.0, seed=0):
    """Fourteen requests in a pool that is too small for them, and two who leave; every answer is compared. Returns the engine."""
    rng = random.Random(seed)
    runner = FakeRunner()
    config = EngineConfig(
        block_size=4, num_blocks=18, max_num_seqs=5, max_num_batched_tokens=16, max_prefill_chunk_size=8, max_decode_share=share,
        enable_prefix_caching=caching,
    )  # fmt: skip
    engine = my_engine(runner, config, parts)
    engine.block_manager.shuffle_free_blocks(seed=seed)
    common, prompts, last = list(range(12)), {}, {}
    for step in range(MAX_STEPS):
        if len(prompts) < 14 and step % 2 == 0:
            name = f"r{len(prompts)}"
            prompts[name] = common[: rng.choice([4, 8, 12])] + [1000 * len(prompts) + k for k in range(rng.randint(1, 14))]
            engine.add_request(prompts[name], SamplingParams(max_tokens=12), request_id=name)
        if step in (7, 13) and engine.snapshot():
            engine.cancel(rng.choice(list(engine.snapshot())))
        last |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
        if len(prompts) == 14 and not engine.has_unfinished_requests():
            break
    assert len(last) == 14
    for name, output in last.items():
        alone = runner.solo(prompts[name], 12)
        assert output.token_ids == alone[: len(output.token_ids)], name
        assert output.finish_reason == "cancelled" or output.token_ids == alone, name
    return engine


def test_every_exercise_has_a_place_or_a_reason_why_not():
    assert sorted(PLACES) == sorted(identifier for identifier in checks.load() if not identifier.startswith("99"))
    assert {room for room, _ in PLACES.values() if room} <= {name for name, *_ in ROOMS}


def test_all_solutions_are_green_and_light_their_rooms(solved):
    assert [part.id for part in solved if part.state != "green"] == [], repr(solved)
    assert solved.ours == [] and len(solved.rooms) == 9
    assert all(part.lines >= 3 for part in solved)
    assert "nothing of ours stands in" in solved.headline()


def test_every_part_with_a_place_is_asked(solved, tiny):
    """Under pressure, on a model, or (04.1, whose place is 04.2's) where that one isn't there."""
    asked = set(serve(solved.green).calls) | set(serve(solved.green, caching=False).calls)
    model = ModelRunner(tiny)
    for parts in (solved.green, {"04.1": solved.green["04.1"]}):
        engine = my_engine(model, EngineConfig(num_blocks=32, max_prefill_chunk_size=7, max_num_batched_tokens=64, enable_prefix_caching=False), parts)
        engine.generate(["Three pieces of text."], SamplingParams(max_tokens=3))
        asked |= set(engine.calls)
    assert asked == {identifier for identifier, (room, _) in PLACES.items() if room}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_all_parts_together_keep_every_answer_under_pressure(solved, caching, share):
    engine = serve(solved.green, caching=caching, share=share)
    assert sum(len(step.preempted) for step in engine.trace.steps) > 0
    hits = sum(request.prefix_hit_tokens for request in engine.trace.requests.values())
    assert (hits > 0) == caching


@pytest.mark.parametrize("seed", range(30))
def test_any_mixture_of_parts_and_ours_keeps_every_answer(solved, seed):
    rng = random.Random(seed)
    some = {identifier: part for identifier, part in solved.green.items() if rng.random() < rng.choice([0.2, 0.5, 0.8])}
    serve(some, caching=rng.random() < 0.7, share=rng.choice([1.0, 0.5, 0.2]), seed=seed)


def test_each_part_alone_keeps_every_answer(solved):
    for identifier, part in solved.green.items():
        for caching in (True, False):
            engine = serve({identifier: part}, caching=caching)
            assert set(engine.calls) <= {identifier}


def test_other_right_answers_work_in_the_engine_too(solved):
    """They return tensors, tuples, NumPy numbers."""
    for exercise, code in ALSO_RIGHT:
        if PLACES[exercise][0] and "import torch" not in EXERCISES[exercise].setup:
            (part,) = EXERCISES[exercise].answer(code)
            for caching in (True, False):
                serve({exercise: part}, caching=caching, share=0.3)
                serve({**solved.green, exercise: part}, caching=caching, share=0.3)


def test_two_blocks_with_one_hash_are_told_apart_by_the_learners_match(solved, monkeypatch):
    for module in (assembly, lesson_09):
        monkeypatch.setattr(module, "hash_block", lambda *known: 7)
    some = {identifier: solved.green[identifier] for identifier in ("09.2", "09.3")}
    serve(some)
    block, runner = [11, 12, 13, 14], FakeRunner()
    engine = my_engine(runner, EngineConfig(block_size=4, num_blocks=32), some)
    for prompt in ([*block, 1], [*block, *block, 2]):  # the same tokens, behind another past
        [output] = engine.generate([prompt], SamplingParams(max_tokens=3))
        assert output.token_ids == runner.solo(prompt, 3)


def test_who_is_left_out_of_decode_keeps_its_seat_and_the_budget_holds(solved):
    runner = FakeRunner()
    config = EngineConfig(block_size=4, num_blocks=128, max_num_seqs=5, max_num_batched_tokens=10, max_decode_share=0.2)
    engine = my_engine(runner, config, solved)
    names = {engine.add_request([number] * 3, SamplingParams(max_tokens=9)): [number] * 3 for number in range(8)}
    names[engine.add_request([9] * 60, SamplingParams(max_tokens=2))] = [9] * 60
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()  # seats and tokens of the step among them
    assert all(output.token_ids == runner.solo(names[name], len(output.token_ids)) for name, output in last.items())
    assert min(len(step.tokens) for step in engine.trace.steps[3:12]) < 5, "nobody was left out"


def test_a_door_that_is_always_open_costs_no_block(solved):
    """Who is let in and finds no blocks gives back the cached ones that it had taken."""
    serve({**solved.green, "02.3": lambda *numbers: True})


def test_a_request_can_leave_while_its_step_is_computed(solved):
    engine = my_engine(FakeRunner(), EngineConfig(block_size=4, num_blocks=32, max_prefill_chunk_size=8), solved)
    engine.on_step = lambda out: out.step == 1 and engine.cancel("r")
    engine.add_request(list(range(30)), SamplingParams(max_tokens=4), request_id="r")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_invariants()
    assert [output.finish_reason for output in outputs] == ["cancelled"] and engine.block_manager.num_free == 32


def test_a_step_that_failed_is_done_again(solved):
    """A hit that was adopted in it is given back, also where 08.2's schedule had put it in."""
    runner, prompt = FakeRunner(fail_at={3, 5}), list(range(20))
    engine = my_engine(runner, EngineConfig(block_size=4, num_blocks=32, max_prefill_chunk_size=8), solved)
    answers, failures = [], 0
    engine.generate([prompt], SamplingParams(max_tokens=1))  # calls 0, 1, 2
    engine.add_request(prompt, SamplingParams(max_tokens=4))  # 16 tokens of it are cached
    while engine.has_unfinished_requests():
        try:
            answers += [output.token_ids for output in engine.step() if output.finished]
        except RuntimeError:
            failures += 1
        engine.check_invariants()
    assert failures == 2 and answers == [runner.solo(prompt, 4)]
    assert [request.prefix_hit_tokens for request in engine.trace.requests.values()] == [0, 16]


def test_a_model_gives_the_same_tokens_and_texts_on_both_engines(solved, tiny):
    config = EngineConfig(num_blocks=64, max_prefill_chunk_size=9, max_num_batched_tokens=32, max_num_seqs=8)
    prompts = ["A text in pieces.", "Another, somewhat longer one, in more pieces.", "Ü 中 🐦"]
    params = SamplingParams(max_tokens=6)
    runner = ModelRunner(tiny)
    backend = runner.attention
    yours, ours = my_engine(runner, config, solved), Engine(ModelRunner(tiny), config)
    assert [(o.token_ids, o.text) for o in yours.generate(prompts, params)] == [(o.token_ids, o.text) for o in ours.generate(prompts, params)]
    assert yours.calls["04.2"] and yours.calls["10.1"] and yours.calls["10.2"]
    assert runner.attention == backend, "the caller's runner was changed"


def test_what_a_part_was_not_asked_for_is_done_by_ours(solved, tiny):
    """Stop strings aren't in exercise 10.1, log-probabilities aren't in 10.2."""
    engine = my_engine(ModelRunner(tiny), EngineConfig(num_blocks=64), solved)
    [output] = engine.generate(["A text."], SamplingParams(max_tokens=4, logprobs=2, stop=("no such text",)))
    assert len(output.logprobs) == 4 and not engine.calls["10.2"] and not engine.calls["10.1"]


# ---- not all is done


def test_with_nothing_done_all_of_the_engine_is_ours_and_it_says_so():
    parts = my_parts(ROOT / "exercises")
    if any(part.state != "not done" for part in parts):
        pytest.skip("somebody works in exercises/")
    assert parts.green == {} and parts.rooms == ()
    assert "None of your parts is green yet" in repr(parts) and "ours: the slots of a chunk" in repr(parts)
    engine = serve(parts)
    assert engine.title == "Your engine: so far all of it is ours"


def test_one_part_that_is_done_and_one_that_is_red(folder):
    solution = EXERCISES["03.1"].solution
    parts = folder.edit("03", {"your-03-1": solution.replace("start_pos + local", "local")})
    assert parts["03.1"].state == "red" and parts["03.2"].state == "green"
    assert parts["03.1"].why == "doesn't hold: " + parts["03.1"].report.failed.test.what
    assert parts["03.1"].role.startswith("ours: ") and parts["03.2"].role.startswith("yours: ")
    html = parts._repr_mimebundle_()["text/html"]
    assert "✗" in html and "<td" in html and parts["03.1"].report.failed.test.what.split("'")[0] in html
    assert "03.1" in [part.id for part in parts.ours] and parts.rooms == ("slots",)
    engine = serve(parts)
    assert engine.calls["03.2"] > 0 and "03.1" not in engine.calls


BROKEN = {
    "it raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "it isn't Python": ("def slot_mapping(:", "SyntaxError"),
    "it loops for ever": ("while True: pass", "its cell was stopped after 0.5 seconds"),
    "it leaves": ("import sys; sys.exit()", "SystemExit"),
    "a magic": ("%%time\n" + EXERCISES["03.1"].solution, "magic"),
    "another name": ("def my_slots(): pass", "defines no slot_mapping"),
    "the course's own": ("slot_mapping = our_slot_mapping", "defines no slot_mapping"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_cell_that_fails_leaves_the_others_alone(folder, fault):
    code, words = BROKEN[fault]
    parts = folder.edit("03", {"your-03-1": code})
    assert parts["03.1"].state == "can't run" and words in parts["03.1"].why
    assert parts["03.2"].state == parts["03.3"].state == "green" and parts["08.1"].state == "not done"
    assert serve(parts).calls["03.2"] > 0


def test_a_function_that_loops_for_ever_is_red(folder, monkeypatch):
    monkeypatch.setattr(reading, "run_exercise", lambda exercise, parts: checks.run.run_exercise(exercise, parts, seconds=0.5))
    parts = folder.edit("03", {"your-03-1": "def slot_mapping(block_table, start_pos, num_tokens, block_size):\n    while True: pass"})
    assert parts["03.1"].state == "red" and parts["03.2"].state == "green"


def test_a_set_up_that_fails_is_the_reason_for_its_notebook_only(folder):
    parts = folder.edit("03", {"set-up": "import no_such_package"})
    assert "the set-up cell failed: ModuleNotFoundError" in parts["03.1"].why and parts["08.1"].state == "not done"


def test_a_notebook_that_is_missing_or_no_notebook_is_named(folder):
    (folder.path / "03_global_slots.ipynb").write_text("{", encoding="utf-8")
    (folder.path / "08_chunk_scheduling.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code"}]}), encoding="utf-8")
    parts = my_parts(folder.path)
    assert "03_global_slots.ipynb can't be read" in parts["03.1"].why and "08_chunk_scheduling.ipynb can't be read" in parts["08.1"].why
    assert "there is no notebook 01_" in parts["01.1"].why
    with pytest.raises(ValueError, match="no folder"):
        my_parts(folder.path / "nowhere")


def test_a_missing_cell_is_named(folder):
    nb = nbformat.read(folder.path / "03_global_slots.ipynb", as_version=4)
    nb.cells = [cell for cell in nb.cells if cell.id != "your-03-2"]
    folder.write("03_global_slots", nb)
    assert my_parts(folder.path)["03.2"].why == "the notebook has no cell your-03-2"


# ---- which cells are run


def test_own_cells_are_run_and_checks_and_runs_are_not(folder, capsys):
    solution = EXERCISES["03.1"].solution.replace("divmod(token, block_size)", "split(token, block_size)")
    parts = folder.edit(
        "03",
        {"your-03-1": f"print('noise')\n{solution}", "check-03-1": "1 / 0", "run-03-1": "slot_mapping = None"},
        own=[("task-03-1", "def split(token, size): return divmod(token, size)"), ("your-03-2", "check('03.2', None); who_owns = 1")],
    )
    assert parts["03.1"].state == parts["03.2"].state == parts["03.3"].state == "green"
    assert capsys.readouterr().out == ""


def test_an_own_cell_that_fails_is_no_reason_to_stop(folder):
    parts = folder.edit("03", {}, own=[("task-03-2", "raise ValueError('just trying')")])
    assert parts["03.1"].state == parts["03.2"].state == "green"


def test_cells_are_found_by_their_name_where_an_editor_changed_the_ids(folder):
    nb = nbformat.read(ROOT / "solutions" / "03_global_slots.ipynb", as_version=4)
    for number, cell in enumerate(nb.cells):
        cell.id = f"cell{number}"
    folder.write("03_global_slots", nb)
    assert my_parts(folder.path)["03.1"].state == "green"


def test_of_two_copies_the_one_saved_last_is_read(folder):
    copy = folder.path / "03_global_slots-Copy1.ipynb"
    copy.write_text((ROOT / "solutions" / "03_global_slots.ipynb").read_text(encoding="utf-8"), encoding="utf-8")
    os.utime(copy, (4e9, 4e9))
    parts = my_parts(folder.path)
    assert parts["03.1"].state == "green" and "03_global_slots-Copy1.ipynb" in repr(parts)


def test_the_folder_is_the_notebooks_own_and_else_exercises(folder, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for here, found in ((folder.path, folder.path), (ROOT, ROOT / "exercises"), (ROOT / "solutions", ROOT / "solutions"), (ROOT / "notebooks", ROOT / "exercises")):
        monkeypatch.chdir(here)
        assert reading.parts_folder() == found
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JPY_SESSION_NAME", str(ROOT / "solutions" / "99_my_engine.ipynb"))
    assert reading.parts_folder() == ROOT / "solutions"


def test_reading_parts_remembers_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    folder.edit("03", {})
    assert not (tmp_path / "progress.json").exists()


def test_lines_of_code_are_counted_without_what_is_said_about_them():
    assert count_lines('def f(a):\n    """Says\n    a lot."""\n\n    # why\n    b = [\n        a,\n    ]\n    return b\n') == 5
    assert count_lines("def (") == 0


def test_an_empty_list_of_parts_is_no_error():
    assert "None of your parts" in repr(Parts([]))


# ---- the notebook


@pytest.mark.parametrize("kind", [builder.SOLUTIONS, builder.EXERCISES], ids=lambda kind: kind.built)
def test_the_capstone_is_built_without_exercises_of_its_own(kind, tmp_path):
    source = tmp_path / "99_tiny.py"
    source.write_text('# %% [markdown]\n# # 99\n\n# %% name="parts"\n1 + 1\n', encoding="utf-8")
    nb = builder.read_source(source, "solutions/src/99_tiny.py", kind)
    assert [cell.id for cell in nb.cells] == ["99_tiny-00", "parts"]
    source.write_text('# %% [markdown]\n# # 99\n\n# %% name="parts"\n### BEGIN SOLUTION\n1\n### END SOLUTION\n', encoding="utf-8")
    with pytest.raises(builder.BuildError, match="no meaning here"):
        builder.read_source(source, "solutions/src/99_tiny.py", kind)

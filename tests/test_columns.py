"""Columns: to its user a list of named tuples, whatever is done to it."""

import copy
import gc
import random
from typing import NamedTuple

import pytest
from helpers import make_engine, prompt, step

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.columns import Columns
from course_lib.runners import FakeRunner, SimulatedRunner
from course_lib.scheduler import ScheduledChunk, ScheduledChunks, Scheduler, SchedulerOutput


class Pair(NamedTuple):
    name: str
    number: int


class Pairs(Columns):
    __slots__ = ()
    row = Pair


def some(seed, count):
    return [Pair(f"p{i}", random.Random(seed * 100 + i).randrange(9)) for i in range(count)]


OPERATIONS = (
    lambda rows, r: rows.append(("new", r.randrange(9))),
    lambda rows, r: rows.insert(r.randrange(-3, 9), Pair("put", 1)),
    lambda rows, r: rows.extend(some(5, r.randrange(3))),
    lambda rows, r: rows.__iadd__(some(6, 2)),
    lambda rows, r: rows.pop(r.randrange(-2, 2)) if len(rows) > 2 else None,
    lambda rows, r: rows.__setitem__(-1, Pair("set", 3)) if len(rows) else None,
    lambda rows, r: rows.__setitem__(slice(1, 3), some(7, r.randrange(4))),
    lambda rows, r: rows.__delitem__(slice(None, None, 2)),
    lambda rows, r: rows.remove(rows[0]) if len(rows) else None,
    lambda rows, r: rows.reverse(),
    lambda rows, r: rows.sort(key=lambda row: (row.number, row.name), reverse=r.random() < 0.5),
    lambda rows, r: rows.clear() if r.random() < 0.2 else None,
)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_list_does_columns_do(seed):
    choose = random.Random(seed)
    rows, columns = some(seed, 4), Pairs(some(seed, 4))
    for _ in range(30):
        operation, dice = choose.choice(OPERATIONS), choose.random()
        operation(rows, random.Random(dice))
        operation(columns, random.Random(dice))
        rows = [Pair(*row) for row in rows]
        assert columns == rows and rows == columns and list(columns) == rows and len(columns) == len(rows)
        assert list(columns.tuples()) == [tuple(row) for row in rows]
        assert repr(columns) == repr(rows) and bool(columns) == bool(rows)
        assert columns[:3] == rows[:3] and list(reversed(columns)) == rows[::-1]
        assert columns + [1] == rows + [1]
        assert all(isinstance(row, Pair) for row in columns) and all(len(column) == len(rows) for column in columns.columns)
        if rows:
            assert columns[-1] == rows[-1] and rows[0] in columns and columns.index(rows[0]) == 0


def test_a_row_with_too_few_or_too_many_fields_is_refused_and_nothing_changes():
    columns = Pairs(some(1, 2))
    for bad in (("x",), ("x", 1, 2)):
        for change in (columns.append, lambda row: columns.insert(0, row), lambda row: columns.__setitem__(0, row)):
            with pytest.raises(TypeError, match="argument"):
                change(bad)
        with pytest.raises(TypeError):
            Pairs([bad])
    assert columns == some(1, 2) and columns != some(1, 1) and columns != 7
    with pytest.raises(IndexError):
        columns[2]


def test_rows_that_are_added_together_are_added_or_refused_together():
    columns = Pairs(some(1, 2))
    for add in (columns.extend, columns.__iadd__):
        with pytest.raises(TypeError):
            add([Pair("good", 1), ("bad",)])
    assert columns == some(1, 2)
    columns += (row for row in some(2, 2))
    columns += columns
    assert columns == 2 * (some(1, 2) + some(2, 2))


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, Pairs.copy, lambda c: c[:]])
def test_a_copy_has_rows_of_its_own(copying):
    columns = Pairs(some(1, 3))
    twin = copying(columns)
    twin.append(Pair("new", 1))
    columns[0] = Pair("set", 2)
    assert twin == [*some(1, 3), Pair("new", 1)] and columns == [Pair("set", 2), *some(1, 3)[1:]]


def test_kept_columns_stay_as_they_were_and_can_still_be_changed():
    names, numbers = ["a", "b"], [1, 2]
    columns = Pairs()
    columns.keep(names, numbers)
    names.clear()
    assert columns == [("a", 1), ("b", 2)]
    gc.collect()
    assert not any(map(gc.is_tracked, columns.columns)), "the collector has nothing to look for in there"
    for change in (lambda c: c.append(("c", 3)), lambda c: c.__delitem__(0), lambda c: c.__iadd__([("d", 4)]), lambda c: c.reverse()):
        columns.keep(*columns.columns)
        change(columns)
    assert columns == [("d", 4), ("c", 3), ("b", 2)]


def test_decodes_are_chunks_of_one_token_behind_what_is_cached():
    engine = make_engine(num_blocks=64)
    for number in (3, 5):
        engine.add_request(prompt(number), SamplingParams(max_tokens=8))
    step(engine)
    running = engine.scheduler.running
    chunks = ScheduledChunks.decodes(running)
    assert chunks == [ScheduledChunk(s, n, 1, "decode", True) for s, n in zip(running, (3, 5), strict=True)]
    chunks.clear()
    assert len(running) == 2


class OnAPlainList(Scheduler):
    """Its chunks are in a list, which it makes before the output and fills after it, and which it goes on using."""

    mine: list = []

    def schedule(self):
        chunks = self.mine
        chunks.clear()
        real, out = super().schedule(), SchedulerOutput(self.step, self.block_size, chunks)
        out.reasons, out.admitted, out.preempted = real.reasons, real.admitted, real.preempted
        chunks += real.chunks
        return out


class Sorted(Scheduler):
    """Puts another list in the output's place, half-way."""

    def _schedule_prefills(self, out, tokens):
        left = super()._schedule_prefills(out, tokens)
        out.chunks = sorted(out.chunks, key=lambda chunk: -chunk.start_pos)
        return left


@pytest.mark.parametrize("runner", [FakeRunner, SimulatedRunner])
@pytest.mark.parametrize("scheduler", [OnAPlainList, Sorted])
def test_a_scheduler_may_use_a_plain_list(scheduler, runner):
    """And whoever looks at a step before it runs may put another list there."""

    def traced(scheduler, on_step=None):
        config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=8, max_prefill_chunk_size=6, max_decode_share=0.2)
        engine = Engine(runner(), config, scheduler=scheduler, on_step=on_step)
        for length in (9, 3, 5):
            engine.add_request(prompt(length), SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        return [sorted(map(tuple, step.chunks)) for step in engine.trace.steps], [step.tokens for step in engine.trace.steps]

    usual = traced(Scheduler)
    assert traced(scheduler) == usual
    assert traced(Scheduler, on_step=lambda out: setattr(out, "chunks", list(out.chunks))) == usual
    assert any(kind == "prefill" for step in usual[0] for *_, kind, _ in step) and max(map(len, usual[0])) == 3

"""Columns: to its user a list of named tuples, whatever is done to it."""

import random
from typing import NamedTuple

import pytest
from helpers import make_engine, prompt, step

from course_lib import SamplingParams
from course_lib.columns import Columns
from course_lib.scheduler import ScheduledChunk, ScheduledChunks, SchedulerOutput


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
        assert columns + [1] == rows + [1] and [1] + columns == [1] + rows
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


def test_decodes_are_chunks_of_one_token_behind_what_is_cached():
    engine = make_engine(num_blocks=64)
    for number in (3, 5):
        engine.add_request(prompt(number), SamplingParams(max_tokens=8))
    step(engine)
    running = engine.scheduler.running
    chunks = ScheduledChunks()
    chunks.add_decodes(running)
    assert chunks == [ScheduledChunk(s, n, 1, "decode", True) for s, n in zip(running, (3, 5), strict=True)]


def test_a_scheduler_may_put_a_plain_list_there_and_keep_it():
    """The engine takes it as it is; what happens to the list later is not the trace's business."""
    engine = make_engine(num_blocks=64)
    engine.add_request(prompt(3), SamplingParams(max_tokens=3, ignore_eos=True))
    kept, real = [], engine.scheduler.schedule

    def schedule():
        kept.append(real())
        kept[-1].chunks = list(kept[-1].chunks)
        return kept[-1]

    engine.scheduler.schedule = schedule
    while engine.has_unfinished_requests():
        step(engine)
        kept[-1].chunks.clear()
    assert [[tuple(chunk)[1:3] for chunk in s.chunks] for s in engine.trace.steps] == [[(0, 3)], [(3, 1)], [(4, 1)]]
    assert isinstance(SchedulerOutput(0, 16, [("s", 0, 1, "decode", True)]).chunks[0], ScheduledChunk)

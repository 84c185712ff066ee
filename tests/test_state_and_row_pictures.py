"""The state machine and the flat row, drawn: what the pictures say is what the engine did."""

import re
import xml.etree.ElementTree as ET

import pytest
from helpers import limit, make_engine, prompt

from course_lib.batch import build_batch
from course_lib.lab.flat_batch import flat_batch, flat_batch_alt
from course_lib.lab.state_machine import WAYS, state_machine, state_machine_alt, transitions
from course_lib.sequence import FINISHED, PREFILLING, RUNNING, TRANSITIONS, WAITING, Sequence

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.fixture
def every_change(monkeypatch):
    """All changes of state that an engine makes while the test runs, in order."""
    changes = []
    change = Sequence.transition_to

    def note(sequence, status):
        changes.append((sequence.status, status))
        change(sequence, status)

    monkeypatch.setattr(Sequence, "transition_to", note)
    return changes


def busy_engine(**parts):
    """Short and long prompts, cancels and preemptions in every state, in a pool that is too small for all."""
    engine = make_engine(
        parts=parts, block_size=4, num_blocks=24, max_num_seqs=5, max_num_batched_tokens=32, max_prefill_chunk_size=12,
        enable_prefix_caching=False,
    )  # fmt: skip
    for number, length in enumerate((5, 40, 22, 9, 30, 12, 7)):
        engine.add_request(prompt(length, number), limit(6 + number), request_id=f"r{number}")
    engine.step()
    engine.step()
    engine.cancel("r6")
    engine.preempt("r1")
    engine.preempt("r0")
    engine.step()
    engine.cancel("r2")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


def test_the_counts_are_those_of_the_changes_that_were_made(every_change):
    engine = busy_engine()
    counted = {way: every_change.count(way) for way in set(every_change)}
    stays = counted.pop((PREFILLING, PREFILLING), 0)  # the engine doesn't always announce that nothing changes
    drawn = transitions(engine.trace)
    assert drawn.pop((PREFILLING, PREFILLING), 0) >= stays
    assert drawn == counted
    assert {(PREFILLING, WAITING), (RUNNING, WAITING), (WAITING, FINISHED), (RUNNING, FINISHED)} <= set(drawn)


def test_another_chunk_is_a_way_of_its_own():
    engine = make_engine(max_prefill_chunk_size=10)
    engine.add_request(prompt(35), limit(2))
    while engine.has_unfinished_requests():
        engine.step()
    way = transitions(engine.trace)
    assert way == {(WAITING, PREFILLING): 1, (PREFILLING, PREFILLING): 2, (PREFILLING, RUNNING): 1, (RUNNING, FINISHED): 1}


def test_a_chunk_that_a_cancel_overtook_changes_nothing():
    engine = make_engine(max_prefill_chunk_size=10)
    engine.add_request(prompt(35), limit(2), request_id="r")
    engine.on_step = lambda output: engine.cancel("r")
    engine.step()
    assert transitions(engine.trace) == {(WAITING, FINISHED): 1}


def test_every_legal_way_is_drawn_and_no_other():
    assert set(WAYS) == {(a, b) for a, ends in TRANSITIONS.items() for b in ends}


def test_the_picture_and_its_words_name_what_was_taken():
    engine = busy_engine()
    words = " ".join(texts(state_machine(engine.trace)))
    for count in transitions(engine.trace).values():
        assert f"{count} × " in words
    assert all(status.name in words for status in (WAITING, PREFILLING, RUNNING, FINISHED))
    alt = state_machine_alt(engine.trace)
    assert "RUNNING to WAITING" in alt and "7 requests" in alt
    assert state_machine(engine.trace) == state_machine(engine.trace)


@pytest.fixture
def mixed_batch():
    batches = []
    engine = make_engine(on_step=lambda output: batches.append(build_batch(output)), block_size=4, max_prefill_chunk_size=12)
    for name, length in (("Ana", 5), ("Ben", 7)):
        engine.add_request(prompt(length, length), limit(8), request_id=name)
    engine.step()
    engine.add_request(prompt(30), limit(8), request_id="document")
    engine.step()
    return batches[-1]


def test_the_row_shows_positions_slots_borders_and_samples(mixed_batch):
    batch = mixed_batch
    assert batch.query_start_loc == [0, 1, 2, 14] and batch.sample_rows == [0, 1]
    shown = texts(flat_batch(batch))
    for numbers in (batch.positions, batch.slot_mapping, range(14), batch.query_start_loc):
        for number in set(numbers):
            assert shown.count(str(number)) >= list(numbers).count(number)
    assert "document" in shown and "◆ these rows give a token: 0, 1" in shown
    diamonds = re.search(r'lm-first[^"]*" d="([^"]*)"', flat_batch(batch))
    assert diamonds[1].count("z") == 2


def test_the_row_in_words(mixed_batch):
    alt = flat_batch_alt(mixed_batch)
    assert "rows 2 to 13: document, positions 0 to 11, not sampled" in alt
    assert "row 0: Ana, position 5, sampled" in alt


def test_a_row_that_no_page_can_hold_is_refused(mixed_batch):
    mixed_batch.token_ids = [1] * 81
    with pytest.raises(ValueError, match="81 tokens"):
        flat_batch(mixed_batch)

"""The pictures of lessons 03 and 04: they draw what is, right or wrong."""

import re
import sys
from xml.etree import ElementTree

import pytest

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.lab.mask_map import mask_map
from course_lib.lab.slot_map import Call, Memory, SlotLog, slot_map
from course_lib.lab.source import source
from course_lib.lab.unimported import unimported
from course_lib.runners import FakeRunner
from course_lib.slots import slot_mapping

RIGHT = [Call([3, 1], 0, [12, 13, 14]), Call([3, 1], 3, [15, 4])]
OVER = [Call([3, 1], 0, [12, 13, 14]), Call([3, 1], 3, [12, 13])]


def texts(picture):
    return [element.text for element in ElementTree.fromstring(picture.svg).iter("{http://www.w3.org/2000/svg}text")]


def test_every_token_is_drawn_in_its_row_and_in_its_slot():
    drawn = texts(slot_map(RIGHT, 4))
    assert all(drawn.count(str(token)) >= 2 for token in range(5))
    assert "physical block 3" in drawn and "slots 12 … 15" in drawn
    assert "Every token is in a slot of its own" in slot_map(RIGHT, 4).alt


def test_lost_tokens_holes_and_strangers_slots_are_found():
    memory = Memory(OVER, 4)
    assert (memory.lost, memory.empty, sorted(memory.rewritten), memory.stray) == ([0, 1], [15, 4], [12, 13], [])
    assert "Overwritten and lost: tokens 0-1." in slot_map(OVER, 4).alt
    assert Memory([Call([3], 0, [0, 1])], 4).stray == [0, 1]


def test_a_log_of_a_real_engine_has_the_engines_slots():
    log = SlotLog(slot_mapping)
    config = EngineConfig(block_size=4, num_blocks=16, max_prefill_chunk_size=6, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config, slot_mapping=log)
    engine.block_manager.shuffle_free_blocks(1)
    engine.generate([list(range(10))], SamplingParams(max_tokens=3))
    assert [(call.start_pos, len(call.slots)) for call in log.calls] == [(0, 6), (6, 4), (10, 1), (11, 1)]
    memory = Memory(log.calls, 4)
    assert not memory.lost and not memory.stray and memory.num_tokens == 12


def test_too_many_tokens_or_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="at most 40"):
        slot_map([Call(list(range(20)), 0, list(range(80)))], 4)
    with pytest.raises(ValueError, match="must be tokens of the 5"):
        slot_map(RIGHT, 4, last=5)


def test_a_followed_token_is_worked_out():
    assert "token 3: 3 // 4 = 0, 3 % 4 = 3 · it lies in block 3, slot 15" in texts(slot_map(RIGHT, 4, follow=3))


def test_the_same_picture_is_the_same_bytes():
    assert slot_map(RIGHT, 4).svg == slot_map(RIGHT, 4).svg
    assert not re.search(r'"[^"]*\d\.\d[^"]*"', re.sub(r"<style>.*?</style>", "", slot_map(RIGHT, 4).svg)), "whole numbers only"


MASK = [[1, 1, 0], [1, 1, 1]]


def test_a_mask_is_drawn_with_its_counts():
    picture = mask_map(MASK, queries=[1, 2], keys=range(3))
    assert picture.alt == "Attention mask of 2 queries and 3 keys: query 1 sees 2 keys (0 to 1); query 2 sees 3 keys (0 to 2)."
    assert texts(picture).count("2") >= 2


def test_places_that_differ_are_counted():
    assert "1 place should" in mask_map([[1, 0, 0], [1, 1, 1]], queries=[1, 2], keys=range(3), expected=MASK).alt


def test_tensors_arrays_and_lists_give_the_same_mask():
    torch = pytest.importorskip("torch")
    as_list = mask_map(MASK, queries=[1, 2], keys=range(3)).svg
    assert as_list == mask_map(torch.tensor(MASK).bool(), queries=[1, 2], keys=range(3)).svg


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="mask is 2 x 3: it must be 3 x 3"):
        mask_map(MASK, queries=[0, 1, 2], keys=range(3))


def test_a_kernel_can_be_shown_where_there_is_no_triton(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    shown = str(source(unimported("course_lib.model.attention.triton_paged", "attention_kernel"), mark="query_pos ="))
    assert "▌     query_pos = first_pos + token" in shown
    with pytest.raises(ValueError, match="no function of"):
        unimported("course_lib.model.attention.triton_paged", "nothing")

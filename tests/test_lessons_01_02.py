"""What lessons 01 and 02 stand on: the model without an engine, the picture of its calls, a learner's block manager in the engine."""

import xml.etree.ElementTree as ET

import pytest

from course_lib import Engine, EngineConfig, SamplingParams, load_model
from course_lib.block_manager import BlockManager
from course_lib.checks.lesson_01 import RecordingModel, continuation
from course_lib.checks.lesson_02 import for_engine
from course_lib.lab.calls import calls_map, calls_map_alt
from course_lib.runners import FakeRunner
from course_lib.slots import blocks_needed


@pytest.fixture(scope="module")
def tiny():
    from course_lib.model.plain import PlainModel

    return PlainModel(load_model("tiny"))


def test_the_plain_model_says_what_generate_says(tiny):
    import torch

    prompt = list(range(10, 30))
    ids = torch.tensor([prompt])
    expected = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0, 20:].tolist()
    cache, answer, tokens, position = tiny.new_cache(), [], prompt, 0
    for _ in range(8):
        answer.append(tiny(tokens, position, cache))
        position, tokens = position + len(tokens), answer[-1:]
    assert answer == expected == [tiny(prompt + expected[:n], 0) for n in range(8)]


@pytest.mark.parametrize("cut", [1, 7, 16, 19])
def test_the_plain_models_cache_can_be_filled_in_pieces(tiny, cut):
    prompt, cache = list(range(40, 60)), tiny.new_cache()
    tiny.logits(prompt[:cut], 0, cache)
    difference = (tiny.logits(prompt[cut:], cut, cache) - tiny.logits(prompt, 0)).abs().max()
    assert difference < 1e-4
    cache = tiny.new_cache()
    tiny.logits(prompt[:cut], 0, cache)
    assert (tiny.logits(prompt[cut:], 0, cache) - tiny.logits(prompt, 0)).abs().max() > 0.1, "positions play no part"


def test_the_plain_model_notes_its_calls_and_wants_a_token(tiny):
    tiny.calls.clear()
    tiny([5, 6, 7], 0)
    tiny([8], 3)
    assert tiny.calls == [(0, 3), (3, 1)]
    with pytest.raises(ValueError, match="token_ids is empty"):
        tiny([], 4)


def test_the_stand_in_depends_on_every_token_and_position():
    """A text of five tokens: change one token or one position, leave one out, send one twice."""
    right = continuation([1, 2, 3, 4, 5], 1)[0]
    assert RecordingModel()([1, 2, 3, 4, 5], 0) == right
    for wrong in ([9, 2, 3, 4, 5], [1, 2, 3, 4, 6], [2, 1, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 5, 5]):
        assert RecordingModel()(wrong, 0) != right
    for start in (1, 3, 5):
        model, cache = RecordingModel(), RecordingModel().new_cache()
        model([1, 2], 0, cache)
        assert (model([3, 4, 5], start, cache) == right) == (start == 2)
    assert RecordingModel()([3, 4, 5], 2) != right, "without a cache nothing comes before"


def test_the_picture_of_calls_shows_each_call_where_it_was():
    calls = {"A": [(0, 8), (8, 8), (16, 1)], "B": [(0, 17)]}
    svg = calls_map(calls)
    root = ET.fromstring(svg)
    assert svg == calls_map(calls), "the same calls give the same bytes"
    paths = {path.get("class").split()[0]: path.get("d") for path in root.iter("{http://www.w3.org/2000/svg}path")}
    assert {"lm-prefill", "lm-hatch", "lm-decode", "lm-unused"} <= set(paths)
    alt = calls_map_alt(calls)
    assert "A: 3 calls, 17 tokens through the model; 2 of the calls with several tokens (the longest 8), 1 with one." in alt
    assert "B: 1 call, 17 tokens" in alt
    assert alt in [element.text for element in root.iter("{http://www.w3.org/2000/svg}desc")]


def test_the_picture_of_calls_takes_many_calls_and_refuses_none():
    ET.fromstring(calls_map({"long": [(0, 1)] + [(n, 1) for n in range(1, 600)]}))
    with pytest.raises(ValueError, match="'none'.* is empty"):
        calls_map({"none": []})


class Learners:
    """A block manager as exercise 02.2 asks for it."""

    def __init__(self, num_blocks, block_size):
        self.size, self.idle = block_size, set(range(num_blocks))

    @property
    def num_free(self):
        return len(self.idle)

    def allocate(self, sequence, num_tokens):
        missing = blocks_needed(num_tokens, self.size) - len(sequence.block_table)
        if missing > len(self.idle):
            return False
        sequence.block_table.extend(self.idle.pop() for _ in range(missing))
        return True

    def free(self, sequence):
        self.idle.update(sequence.block_table)
        sequence.block_table = []


def serve(manager):
    config = EngineConfig(num_blocks=24, max_prefill_chunk_size=32, enable_prefix_caching=False, kv_watermark=0.0)
    runner = FakeRunner()
    engine = Engine(runner, config, block_manager=manager)
    prompts = {f"r{n}": list(range(n, n + 20 + 17 * n)) for n in range(6)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=30), request_id=name)
    tokens = {}
    while engine.has_unfinished_requests():
        if len(engine.trace.steps) == 5:
            engine.cancel("r5")
        tokens |= {output.request_id: output.token_ids for output in engine.step()}
        engine.check_invariants()
    assert all(tokens[name] == runner.solo(prompts[name], 30) for name in prompts if name != "r5")
    return engine


def test_a_learners_block_manager_serves_the_engine_as_ours_does():
    theirs, ours = serve(for_engine(Learners)), serve(BlockManager)
    assert sum(len(step.preempted) for step in ours.trace.steps) > 0, "the pool is not under pressure"
    assert [step.blocks_used for step in theirs.trace.steps] == [step.blocks_used for step in ours.trace.steps]
    assert theirs.block_manager.num_free == 24


def test_a_learners_mistake_shows_in_the_engines_books():
    class Forgets(Learners):
        def free(self, sequence):
            self.idle.update(sequence.block_table[1:])
            sequence.block_table = []

    with pytest.raises(AssertionError, match="num_free"):
        serve(for_engine(Forgets))


def test_a_learners_block_manager_has_no_prefix_cache():
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        Engine(FakeRunner(), EngineConfig(), block_manager=for_engine(Learners))

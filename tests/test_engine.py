"""The engine from outside: what goes in, what comes out, and what happens when something goes wrong."""

import ast
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import (
    RecordingRunner,
    check_books,
    goes_on,
    is_idle,
    limit,
    make_engine,
    prompt,
    run_to_end,
    step,
    steps,
)

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.block_manager import BlockManager
from course_lib.policies import FairShare, Policy
from course_lib.runners import FakeRunner, Sample
from course_lib.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from course_lib.slots import slot_mapping

ROOT = Path(__file__).resolve().parent.parent
NAN, INFINITE = float("nan"), float("inf")


class Letters:
    """A tokenizer for tests: token id 0 is "a", 1 is "b" … 25 is "z"."""

    eos_token_id = None

    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(97 + token_id) for token_id in token_ids)


class LetterRunner(FakeRunner):
    def __init__(self, tokenizer=None, **settings):
        super().__init__(vocab_size=26, **settings)
        self.tokenizer = tokenizer or Letters()


class WaitingRunner(FakeRunner):
    """Its forward pass ends when it is let go."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def execute(self, batch):
        self.entered.set()
        assert self.let_go.wait(10)
        return super().execute(batch)


def drain(engine, most=2000):
    """All outputs until nothing is left."""
    outputs = []
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError(f"no end in {most} steps: {engine.snapshot()}")


def joined(outputs, request_id):
    return [token for output in outputs if output.request_id == request_id for token in output.new_token_ids]


def ends(outputs):
    return [(output.request_id, output.finish_reason) for output in outputs if output.finished]


# --- bad input: said at once, with the field, the value and the limit ---


@pytest.mark.parametrize("settings, error, parts", [
    ({"block_size": 0}, ValueError, ("block_size", "0", "1")),
    ({"block_size": -16}, ValueError, ("block_size", "-16", "1")),
    ({"block_size": 12}, ValueError, ("block_size", "12", "power of two")),
    ({"block_size": 16.0}, TypeError, ("block_size", "16.0")),
    ({"block_size": "16"}, TypeError, ("block_size", "'16'")),
    ({"block_size": True}, TypeError, ("block_size", "True")),
    ({"num_blocks": 0}, ValueError, ("num_blocks", "0", "1")),
    ({"max_num_seqs": 0}, ValueError, ("max_num_seqs", "0", "1")),
    ({"max_num_batched_tokens": 0}, ValueError, ("max_num_batched_tokens", "0", "1")),
    ({"max_num_seqs": 10, "max_num_batched_tokens": 8}, ValueError, ("max_num_seqs=10", "max_num_batched_tokens=8")),
    ({"max_prefill_chunk_size": 0}, ValueError, ("max_prefill_chunk_size", "0", "1")),
    ({"max_prefill_chunk_size": -1}, ValueError, ("max_prefill_chunk_size", "-1", "1")),
    ({"max_prefill_chunk_size": 2.5}, TypeError, ("max_prefill_chunk_size", "2.5")),
    ({"max_num_partial_prefills": 0}, ValueError, ("max_num_partial_prefills", "0", "1")),
    ({"enable_prefix_caching": "no"}, TypeError, ("enable_prefix_caching", "'no'")),
    ({"enable_prefix_caching": 1}, TypeError, ("enable_prefix_caching", "1")),
    ({"max_model_len": 0}, ValueError, ("max_model_len", "0")),
    ({"max_model_len": 1025, "num_blocks": 64}, ValueError, ("max_model_len=1025", "1024")),
    ({"max_decode_share": 0}, ValueError, ("max_decode_share", "0")),
    ({"max_decode_share": 1.5}, ValueError, ("max_decode_share", "1.5", "1")),
    ({"max_decode_share": NAN}, ValueError, ("max_decode_share", "nan")),
    ({"max_decode_share": "half"}, TypeError, ("max_decode_share", "'half'")),
    ({"max_decode_share": None}, TypeError, ("max_decode_share", "None")),
    ({"kv_watermark": -0.1}, ValueError, ("kv_watermark", "-0.1", "0")),
    ({"kv_watermark": 1}, ValueError, ("kv_watermark", "1")),
    ({"kv_watermark": INFINITE}, ValueError, ("kv_watermark", "inf")),
    ({"policy": "fastest"}, ValueError, ("policy", "'fastest'", "prefilling_first", "fair_share")),
    ({"policy": None}, TypeError, ("policy", "None")),
    ({"policy": 3}, TypeError, ("policy", "3")),
    ({"policy": FairShare}, TypeError, ("policy", "FairShare")),  # the class, where an object is meant
])  # fmt: skip
def test_a_bad_config_is_refused(settings, error, parts):
    with pytest.raises(error) as refused:
        EngineConfig(**settings)
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_a_config_says_what_is_longer_than_the_model_takes():
    with pytest.raises(ValueError, match=r"max_model_len=600.*512"):
        Engine(FakeRunner(max_model_len=512), EngineConfig(max_model_len=600))


@pytest.mark.parametrize("config", [{"block_size": 16}, SamplingParams(), 16])
def test_a_config_must_be_one(config):
    with pytest.raises(TypeError, match="config.*EngineConfig"):
        Engine(FakeRunner(), config)


@pytest.mark.parametrize("model, pool_blocks, own, expected", [
    (512, 64, None, 512),  # the model's limit is the smaller one
    (1 << 20, 64, None, 1024),  # the pool is: 64 × 16
    (512, 64, 100, 100),
])  # fmt: skip
def test_one_length_limit_is_used_everywhere(model, pool_blocks, own, expected):
    engine = make_engine(FakeRunner(max_model_len=model), num_blocks=pool_blocks, max_model_len=own)
    assert engine.max_model_len == expected == engine.trace.config["max_model_len"]
    with pytest.raises(ValueError, match=rf"{expected} tokens.*{expected}"):
        engine.add_request(prompt(expected), limit(1))
    engine.add_request(prompt(expected - 1), limit(50), request_id="A")  # one token is left
    engine.add_request(prompt(expected - 3, 1), limit(50), request_id="B")  # cut to three
    last = run_to_end(engine)
    assert (len(last["A"].token_ids), last["A"].finish_reason) == (1, "length")
    assert (len(last["B"].token_ids), last["B"].finish_reason) == (3, "length")


@pytest.mark.parametrize("settings, error, parts", [
    ({"max_tokens": 0}, ValueError, ("max_tokens", "0", "1")),
    ({"max_tokens": -5}, ValueError, ("max_tokens", "-5", "1")),
    ({"max_tokens": 2.0}, TypeError, ("max_tokens", "2.0")),
    ({"max_tokens": None}, TypeError, ("max_tokens", "None")),
    ({"max_tokens": True}, TypeError, ("max_tokens", "True")),
    ({"temperature": -0.1}, ValueError, ("temperature", "-0.1", "0")),
    ({"temperature": NAN}, ValueError, ("temperature", "nan")),
    ({"temperature": INFINITE}, ValueError, ("temperature", "inf")),
    ({"temperature": "hot"}, TypeError, ("temperature", "'hot'")),
    ({"temperature": None}, TypeError, ("temperature", "None")),
    ({"top_k": -1}, ValueError, ("top_k", "-1", "0")),
    ({"top_k": 1.5}, TypeError, ("top_k", "1.5")),
    ({"top_p": 0}, ValueError, ("top_p", "0")),
    ({"top_p": 1.1}, ValueError, ("top_p", "1.1", "1")),
    ({"top_p": -0.5}, ValueError, ("top_p", "-0.5", "0")),
    ({"top_p": NAN}, ValueError, ("top_p", "nan")),
    ({"min_p": -0.1}, ValueError, ("min_p", "-0.1", "0")),
    ({"min_p": 2}, ValueError, ("min_p", "2", "1")),
    ({"min_p": NAN}, ValueError, ("min_p", "nan")),
    ({"repetition_penalty": 0}, ValueError, ("repetition_penalty", "0")),
    ({"repetition_penalty": -1}, ValueError, ("repetition_penalty", "-1")),
    ({"repetition_penalty": NAN}, ValueError, ("repetition_penalty", "nan")),
    ({"seed": -1}, ValueError, ("seed", "-1", "0")),
    ({"seed": 1.5}, TypeError, ("seed", "1.5")),
    ({"stop": ""}, ValueError, ("stop", "''")),
    ({"stop": ["end", ""]}, ValueError, ("stop", "''")),
    ({"stop": [7]}, TypeError, ("stop", "7")),
    ({"stop": 7}, TypeError, ("stop", "7")),
    ({"stop": 0}, TypeError, ("stop", "0")),
    ({"stop_token_ids": 7}, TypeError, ("stop_token_ids", "7")),
    ({"stop_token_ids": 0}, TypeError, ("stop_token_ids", "0")),  # not "none"
    ({"stop_token_ids": [-1]}, ValueError, ("stop_token_ids", "-1", "0")),
    ({"stop_token_ids": ["end"]}, TypeError, ("stop_token_ids", "'end'")),
    ({"ignore_eos": 1}, TypeError, ("ignore_eos", "1")),
    ({"logprobs": -1}, ValueError, ("logprobs", "-1", "0")),
])  # fmt: skip
def test_bad_sampling_parameters_are_refused(settings, error, parts):
    with pytest.raises(error) as refused:
        SamplingParams(**settings)
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_sampling_parameters_are_greedy_by_default():
    assert SamplingParams().temperature == 0


BAD_REQUESTS = [
    ({"prompt": []}, ValueError, ("prompt", "0 tokens", "1")),
    ({"prompt": ""}, ValueError, ("prompt", "0 tokens", "1")),
    ({"prompt": None}, TypeError, ("prompt", "None")),
    ({"prompt": 7}, TypeError, ("prompt", "7")),
    ({"prompt": [1, 26]}, ValueError, ("prompt[1]", "26", "25")),  # the vocabulary has 26 tokens
    ({"prompt": [1, -1, 2]}, ValueError, ("prompt[1]", "-1", "0")),
    ({"prompt": [1.0]}, TypeError, ("prompt[0]", "1.0")),
    ({"prompt": ["a"]}, TypeError, ("prompt[0]", "'a'")),
    ({"prompt": [True]}, TypeError, ("prompt[0]", "True")),
    ({"prompt": [[1, 2]]}, TypeError, ("prompt[0]", "[1, 2]")),
    ({"prompt": [1] * 200}, ValueError, ("prompt", "200 tokens", "160")),  # 10 blocks of 16
    ({"prompt": [1] * 160}, ValueError, ("prompt", "160 tokens", "159")),
    ({"params": {"max_tokens": 3}}, TypeError, ("params", "max_tokens")),
    ({"params": 3}, TypeError, ("params", "3")),
    ({"request_id": 5}, TypeError, ("request_id", "5")),
    ({"request_id": "live"}, ValueError, ("request_id", "'live'")),
    ({"priority": 1.5}, TypeError, ("priority", "1.5")),
    ({"priority": "high"}, TypeError, ("priority", "'high'")),
    ({"cache_salt": 5}, TypeError, ("cache_salt", "5")),
]


@pytest.mark.parametrize("request_, error, parts", BAD_REQUESTS)
@pytest.mark.parametrize("way", ["add_request", "stream"])
def test_a_bad_request_is_refused_and_the_engine_goes_on(request_, error, parts, way):
    engine = make_engine(LetterRunner(), num_blocks=10, max_prefill_chunk_size=16)
    engine.add_request([1] * 40, limit(5), request_id="live")
    step(engine)
    before = engine.snapshot()
    with pytest.raises(error) as refused:
        getattr(engine, way)(**{"prompt": [1, 2], **request_})
    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert engine.snapshot() == before
    check_books(engine)
    assert run_to_end(engine)["live"].token_ids == engine.runner.solo([1] * 40, 5)
    assert is_idle(engine)


def test_a_text_needs_a_tokenizer():
    engine = make_engine()
    with pytest.raises(TypeError, match=r"prompt.*tokenizer.*token ids"):
        engine.add_request("hello")
    goes_on(engine)


def test_a_prompt_longer_than_a_step_is_refused_when_it_must_go_in_whole():
    engine = make_engine(max_prefill_chunk_size=None, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=r"65 tokens.*max_num_batched_tokens is 64"):
        engine.add_request(prompt(65))
    goes_on(engine)


def test_a_first_chunk_that_never_fits_beside_the_watermark_is_refused():
    engine = make_engine(num_blocks=10, kv_watermark=0.5)  # 5 blocks are kept free
    engine.add_request(prompt(80), limit(2))  # 5 blocks
    with pytest.raises(ValueError, match=r"81 tokens.*6 blocks.*kv_watermark=0.5.*5.*10"):
        engine.add_request(prompt(81), limit(2))
    run_to_end(engine)
    goes_on(engine)


def test_numbers_of_other_types_are_taken_as_what_they_are():
    class Seven:  # like a NumPy integer
        def __index__(self):
            return 7

    engine = make_engine(block_size=16)
    engine.add_request((Seven(), 8), SamplingParams(max_tokens=Seven(), temperature=0), request_id="A")
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo([7, 8], 7)
    engine.add_request(iter([7, 8]), limit(2), request_id="A")
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo([7, 8], 2)


def test_a_prompt_can_be_changed_by_its_owner_afterwards():
    engine = make_engine()
    tokens = prompt(20)
    engine.add_request(tokens, limit(3), request_id="A")
    expected = engine.runner.solo(tokens, 3)
    tokens.clear()
    assert run_to_end(engine)["A"].token_ids == expected


# --- outputs ---


def test_only_requests_with_a_new_token_or_an_end_have_an_output():
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(5), limit(9), request_id="runs")
    engine.add_request(prompt(60), limit(1), request_id="prefills")
    for _ in range(3):
        assert [output.request_id for output in step(engine)] == ["runs"]
    assert [output.request_id for output in step(engine)] == ["runs", "prefills"]


def test_an_output_tells_this_steps_token_and_all_of_them():
    engine = make_engine()
    engine.add_request(prompt(5), limit(4), request_id="A")
    outputs = drain(engine)
    solo = engine.runner.solo(prompt(5), 4)
    assert [output.new_token_ids for output in outputs] == [[token] for token in solo]
    assert [output.token_ids for output in outputs] == [solo[:n] for n in (1, 2, 3, 4)], "older outputs don't change"
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert {output.text for output in outputs} == {""}, "no tokenizer, no text"


def test_an_output_has_the_times_of_its_request():
    engine = make_engine(FakeRunner(step_seconds=2.0), max_prefill_chunk_size=16)
    engine.add_request(prompt(3), limit(1))
    step(engine)  # the clock is at 2
    engine.add_request(prompt(30), limit(3), request_id="A")
    outputs = drain(engine)
    assert {output.arrival_time for output in outputs} == {2.0}
    assert {output.first_token_time for output in outputs} == {6.0}  # two chunks of 2 seconds
    assert [output.finish_time for output in outputs] == [None, None, 10.0]


def test_ids_are_given_when_none_is_asked_for_and_are_never_those_of_live_requests():
    engine = make_engine()
    mine = engine.add_request([1], limit(3), request_id="r1")
    names = [engine.add_request([1], limit(3)) for _ in range(5)]
    assert len({mine, *names}) == 6


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_stop_token_ends_a_request(place):
    engine = make_engine()
    solo = engine.runner.solo(prompt(9), 5)
    engine.add_request(prompt(9), SamplingParams(max_tokens=5, stop_token_ids=(solo[place],)), request_id="A")
    output = run_to_end(engine)["A"]
    assert (output.token_ids, output.finish_reason) == (solo[: place + 1], "stop")  # also where it is the last one


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_end_token_ends_a_request_unless_it_is_ignored(ignore):
    runner = FakeRunner()
    solo = runner.solo(prompt(9), 5)
    runner.eos_token_ids = [solo[2], 1]
    engine = make_engine(runner)
    engine.add_request(prompt(9), SamplingParams(max_tokens=5, ignore_eos=ignore), request_id="A")
    output = run_to_end(engine)["A"]
    assert (len(output.token_ids), output.finish_reason) == ((5, "length") if ignore else (3, "stop"))


def test_text_comes_in_pieces_and_a_stop_string_is_not_shown():
    runner = LetterRunner()
    letters = Letters().decode(runner.solo([1, 2, 3], 12))
    engine = make_engine(runner)
    (whole,) = engine.generate(["bcd"], limit(12))
    assert whole.text == letters
    stop = letters[5:7]
    pieces = list(engine.stream("bcd", SamplingParams(max_tokens=12, stop=stop)))
    assert "".join(piece.new_text for piece in pieces) == pieces[-1].text == letters[: letters.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_a_request_whose_text_fails_ends_with_an_error_and_the_others_go_on():
    runner = LetterRunner()
    solo = runner.solo([1, 2, 3], 6)

    class Fails(Letters):
        def decode(self, token_ids, skip_special_tokens=True):
            if list(token_ids)[-1:] == [solo[2]] and list(token_ids)[-2:-1] == [solo[1]]:
                raise OverflowError("no such letter")
            return super().decode(token_ids)

    runner.tokenizer = Fails()
    engine = make_engine(runner)
    engine.add_request([1, 2, 3], limit(6), request_id="bad")
    engine.add_request([4], limit(6), request_id="good")
    last = run_to_end(engine)
    assert last["bad"].finish_reason == "error" and "no such letter" in last["bad"].error
    assert last["good"].finish_reason == "length" and last["good"].token_ids == runner.solo([4], 6)
    assert is_idle(engine)


# --- cancel ---


@pytest.mark.parametrize("state, after_steps", [("WAITING", 0), ("PREFILLING", 2), ("RUNNING", 5)])
def test_a_request_can_be_cancelled_in_any_state(state, after_steps):
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(60), limit(9), request_id="A")
    engine.add_request(prompt(7, 1), limit(12), request_id="other")
    outputs = steps(engine, after_steps)
    assert engine.snapshot()["A"].status == state
    assert engine.cancel("A") is True
    assert engine.cancel("A") is False, "it isn't live any more"
    check_books(engine)
    assert "A" not in engine.snapshot()
    holders = [s.request_id for s in engine.scheduler.prefilling + engine.scheduler.running]
    assert "A" not in holders and engine.block_manager.num_used == len(holders), "its blocks are free at once"
    outputs += drain(engine)
    mine = [output for output in outputs if output.request_id == "A"]
    assert ends(mine) == [("A", "cancelled")] and mine[-1].finished
    assert mine[-1].new_token_ids == [] and mine[-1].token_ids == joined(mine, "A")
    assert joined(outputs, "other") == engine.runner.solo(prompt(7, 1), 12)
    assert is_idle(engine)


def test_cancelling_what_is_not_there_says_so():
    engine = make_engine()
    assert engine.cancel("nobody") is False
    engine.add_request([1], limit(1), request_id="A")
    run_to_end(engine)
    assert engine.cancel("A") is False


def test_an_engine_has_unfinished_requests_until_the_last_end_was_delivered():
    engine = make_engine()
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request(prompt(5), limit(5), request_id="A")
    step(engine)
    engine.cancel("A")
    assert engine.has_unfinished_requests()
    assert ends(engine.step()) == [("A", "cancelled")]
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_an_id_is_free_again_when_its_end_was_delivered_and_not_before():
    engine = make_engine()
    engine.add_request(prompt(5), limit(5), request_id="A")
    step(engine)
    engine.cancel("A")
    with pytest.raises(ValueError, match="'A'"):
        engine.add_request([1], limit(1), request_id="A")
    step(engine)
    engine.add_request(prompt(3), limit(1), request_id="A")
    (output,) = step(engine)
    assert output.finished and output.token_ids == engine.runner.solo(prompt(3), 1)
    engine.add_request(prompt(4), limit(1), request_id="A")  # at once after an ordinary end, too
    run_to_end(engine)
    assert [name for name in engine.trace.requests] == ["A", "A#2", "A#3"]


@pytest.mark.parametrize("state, at_step", [("WAITING", 0), ("PREFILLING", 2), ("RUNNING", 6)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancel_from_on_step_takes_effect_when_the_forward_returns(state, at_step, fails):
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(60), limit(9), request_id="A")
    engine.add_request(prompt(7, 1), limit(20), request_id="other")
    outputs = steps(engine, at_step)
    tokens_before = len(joined(outputs, "A"))
    seen = []

    def on_step(scheduled):
        assert engine.snapshot()["A"].status == state
        seen.append((engine.cancel("A"), engine.cancel("A"), len(engine.snapshot()["A"].block_table)))
        engine.on_step = None

    engine.on_step = on_step
    if fails:
        engine.runner.fail_at = {engine.runner.num_calls}
        with pytest.raises(RuntimeError):
            engine.step()
        check_books(engine)
    else:
        outputs += step(engine)
    assert seen[0][:2] == (True, False) and seen[0][2] > 0, "while the forward runs it keeps its blocks"
    assert "A" not in engine.snapshot()
    outputs += drain(engine)
    mine = [o.new_token_ids for o in outputs if o.request_id == "A"]
    assert mine[tokens_before:] == [[]], "the token in flight is dropped"
    assert ends(outputs) == [("A", "cancelled"), ("other", "length")]
    assert joined(outputs, "other") == engine.runner.solo(prompt(7, 1), 20)
    assert is_idle(engine)


def test_a_waiting_request_that_is_not_in_the_step_can_be_cancelled_from_on_step():
    engine = make_engine(max_num_seqs=1)
    engine.add_request(prompt(5), limit(3), request_id="A")
    engine.add_request(prompt(5, 1), limit(3), request_id="B")
    engine.on_step = lambda scheduled: engine.cancel("B")
    outputs = drain(engine)
    assert sorted(ends(outputs)) == [("A", "length"), ("B", "cancelled")]
    assert joined(outputs, "B") == []


def in_a_step(engine, action):
    """Runs `action` while another thread's forward pass is under way; the step's outputs."""
    outputs, errors = [], []

    def run():
        try:
            outputs.extend(engine.step())
        except BaseException as error:  # looked at below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert engine.runner.entered.wait(10)
        result = action()
    finally:
        engine.runner.let_go.set()
        thread.join(10)
    assert not thread.is_alive()
    return result, outputs, errors


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancel_from_another_thread_returns_at_once_and_takes_effect_after_the_forward(fails):
    engine = make_engine(WaitingRunner(fail_at={0} if fails else set()))
    engine.add_request(prompt(40), limit(9), request_id="A")
    engine.add_request(prompt(7, 1), limit(3), request_id="other")

    def action():
        assert not engine.runner.let_go.is_set()
        return engine.cancel("A"), engine.cancel("A"), engine.block_manager.num_used

    result, outputs, errors = in_a_step(engine, action)
    assert result == (True, False, 4)  # 3 + 1 blocks: in use until the forward has returned
    assert len(errors) == fails
    check_books(engine)
    assert engine.block_manager.num_used == (0 if fails else 1)
    outputs += drain(engine)
    assert ends(outputs) == [("A", "cancelled"), ("other", "length")] and joined(outputs, "A") == []
    assert joined(outputs, "other") == engine.runner.solo(prompt(7, 1), 3)
    assert is_idle(engine)


def test_a_request_can_be_added_from_another_thread_while_the_forward_runs():
    engine = make_engine(WaitingRunner())
    engine.add_request(prompt(7), limit(3), request_id="A")

    def action():
        engine.add_request(prompt(8), limit(3), request_id="B")
        return sorted(engine.snapshot())

    result, outputs, errors = in_a_step(engine, action)
    assert result == ["A", "B"] and not errors and joined(outputs, "B") == []
    outputs += drain(engine)
    assert joined(outputs, "B") == engine.runner.solo(prompt(8), 3)


def test_many_threads_may_add_and_cancel_while_one_steps():
    engine = make_engine(num_blocks=20, max_prefill_chunk_size=16, max_num_seqs=8)
    accepted, cancelled, done = {}, set(), threading.Event()

    def user(number):
        rng = random.Random(number)
        mine = []
        for i in range(40):
            tokens = prompt(rng.randint(1, 60), 100 * number + i)
            request_id = engine.add_request(tokens, limit(5), request_id=f"{number}-{i}")
            accepted[request_id] = tokens
            mine.append(request_id)
            if rng.random() < 0.4:
                victim = rng.choice(mine)
                if engine.cancel(victim):
                    cancelled.add(victim)

    threads = [threading.Thread(target=user, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    threading.Thread(target=lambda: ([thread.join() for thread in threads], done.set())).start()
    outputs = []
    while not done.is_set() or engine.has_unfinished_requests():
        outputs += engine.step()
    reasons = dict(ends(outputs))
    assert len(ends(outputs)) == len(reasons) == len(accepted) == 120
    assert {name for name, reason in reasons.items() if reason == "cancelled"} == cancelled
    for name, tokens in accepted.items():
        solo = engine.runner.solo(tokens, 5)
        assert joined(outputs, name) == (solo[: len(joined(outputs, name))] if name in cancelled else solo)
    check_books(engine)
    assert is_idle(engine)


# --- on_step, step, preempt, snapshot ---


def test_step_inside_a_step_is_an_error_and_the_engine_goes_on():
    engine = make_engine()
    engine.add_request(prompt(5), limit(3), request_id="A")
    engine.on_step = lambda scheduled: engine.step()
    with pytest.raises(RuntimeError, match="while a step is running"):
        engine.step()
    engine.on_step = None
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(5), 3)


def test_an_error_in_on_step_fails_the_step_only():
    engine = make_engine(num_blocks=8, max_prefill_chunk_size=16)
    engine.add_request(prompt(40), limit(3), request_id="A")
    step(engine)

    def broken(scheduled):
        raise ZeroDivisionError("a broken picture")

    engine.on_step = broken
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            engine.step()
        check_books(engine)
        assert engine.block_manager.num_used == 1
    engine.on_step = None
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(40), 3)


def test_requests_can_be_added_from_on_step():
    engine = make_engine()
    todo = [prompt(5, 1), prompt(6, 2)]
    names = []

    def on_step(scheduled):
        if todo:
            names.append(engine.add_request(todo.pop(), limit(2)))

    engine.on_step = on_step
    engine.add_request(prompt(4), limit(4))
    outputs = drain(engine)
    assert joined(outputs, names[0]) == engine.runner.solo(prompt(6, 2), 2)
    assert joined(outputs, names[1]) == engine.runner.solo(prompt(5, 1), 2)


def test_preempt_takes_the_blocks_and_keeps_the_tokens():
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(40), limit(9), request_id="A")
    outputs = steps(engine, 5)
    engine.preempt("A")
    check_books(engine)
    state = engine.snapshot()["A"]
    assert (state.status, state.block_table, state.generated_tokens, state.num_preemptions) == ("WAITING", [], 3, 1)
    outputs += drain(engine)
    assert joined(outputs, "A") == engine.runner.solo(prompt(40), 9)


@pytest.mark.parametrize("name, text", [("nobody", "nobody"), ("waits", "WAITING")])
def test_only_what_holds_blocks_can_be_preempted(name, text):
    engine = make_engine()
    engine.add_request(prompt(5), limit(3), request_id="waits")
    with pytest.raises(ValueError, match=rf"'{name}'.*"):
        engine.preempt(name)
    with pytest.raises(ValueError, match=text):
        engine.preempt(name)
    run_to_end(engine)


def test_preempt_during_a_step_says_that_a_step_is_running():
    engine = make_engine()
    engine.add_request(prompt(5), limit(3), request_id="A")
    step(engine)
    engine.on_step = lambda scheduled: engine.preempt("A")
    with pytest.raises((ValueError, RuntimeError), match=r"\bstep"):
        engine.step()
    engine.on_step = None
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(5), 3)


def test_the_metrics_count_a_preemption_by_hand():
    engine = make_engine(enable_prefix_caching=False)
    engine.add_request(prompt(20), limit(5), request_id="A")
    steps(engine, 2)
    engine.preempt("A")
    run_to_end(engine)
    assert engine.metrics().num_preemptions == 1
    assert engine.metrics().recomputed_tokens == 21  # 20 + 1; the newest token had no K/V yet


def test_the_metrics_count_a_preemption_of_a_step_that_failed():
    engine = make_engine(block_size=4, num_blocks=4, kv_watermark=0, enable_prefix_caching=False)
    for name in "AB":
        engine.add_request(prompt(8, ord(name)), limit(4), request_id=name)
    step(engine)
    engine.runner.fail_at = {1}
    with pytest.raises(RuntimeError):
        engine.step()  # A's next token took B's blocks, and B stays preempted
    assert engine.snapshot()["B"].num_preemptions == 1
    run_to_end(engine)
    assert engine.metrics().num_preemptions == 1


def test_a_snapshot_shows_every_unfinished_request():
    engine = make_engine(max_num_seqs=2, max_prefill_chunk_size=16)
    for name, length in (("A", 5), ("B", 100), ("C", 7)):
        engine.add_request(prompt(length), limit(5), request_id=name)
    step(engine)
    a, b, c = engine.snapshot().values()
    assert list(engine.snapshot()) == ["A", "B", "C"]
    assert (a.status, a.prompt_tokens, a.generated_tokens, len(a.block_table), a.reason) == ("RUNNING", 5, 1, 1, None)
    assert (b.status, b.prefilled_token_count, b.cached_token_count, len(b.block_table)) == ("PREFILLING", 16, 16, 1)
    assert (c.status, c.block_table, c.reason) == ("WAITING", [], "seq_budget")
    b.block_table.clear()
    check_books(engine)
    run_to_end(engine)
    assert engine.snapshot() == {}


def test_without_a_trace_the_engine_serves_the_same():
    engine = make_engine(parts={"record_trace": False}, num_blocks=8, max_prefill_chunk_size=16)
    requests = [prompt(40 + i, i) for i in range(5)]
    outputs = engine.generate(requests, limit(20))
    assert [o.token_ids for o in outputs] == [engine.runner.solo(tokens, 20) for tokens in requests]
    assert engine.trace.steps == [] and is_idle(engine)


def test_requests_with_a_trace_can_be_saved_and_read_back():
    engine = make_engine(num_blocks=8, max_prefill_chunk_size=16)
    engine.generate([prompt(40, i) for i in range(4)], limit(20))
    text = engine.trace.to_json()
    assert type(engine.trace).from_json(text).to_json() == text
    assert json.loads(engine.trace.to_perfetto())["traceEvents"]


# --- stream ---


def test_a_stream_gives_every_output_of_its_request():
    engine = make_engine(max_prefill_chunk_size=16)
    stream = engine.stream(prompt(40), limit(5))
    outputs = list(stream)
    assert joined(outputs, stream.request_id) == engine.runner.solo(prompt(40), 5)
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    assert list(stream) == [], "it has ended"
    assert is_idle(engine)


def test_a_stream_is_checked_and_queued_when_it_is_asked_for():
    engine = make_engine()
    with pytest.raises(ValueError, match="empty"):
        engine.stream([])
    stream = engine.stream(prompt(5), limit(2), request_id="mine", priority=3, cache_salt="s")
    assert list(engine.snapshot()) == ["mine"]
    stream.close()


@pytest.mark.parametrize("way", ["close", "break", "with", "del", "error"])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_that_nobody_listens_to_any_more_is_cancelled(way, taken):
    engine = make_engine()
    engine.add_request(prompt(9, 9), limit(30), request_id="other")
    stream = engine.stream(prompt(40), limit(20), request_id="S")
    for _ in range(taken):
        next(stream)
    if way == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "break":
        for _ in stream:
            break
        del stream
    elif way == "with":
        with stream:
            pass
    elif way == "del":
        del stream
    else:
        with pytest.raises(KeyError), stream:
            raise KeyError("the consumer failed")
    check_books(engine)
    assert "S" not in engine.snapshot() and engine.block_manager.num_used <= 1
    outputs = drain(engine)
    assert [end for end in ends(outputs) if end[0] == "S"] == [("S", "cancelled")]
    assert joined(outputs, "other") == engine.runner.solo(prompt(9, 9), 30)
    assert is_idle(engine)


@pytest.mark.parametrize("pattern", ["ab", "aab", "abb", "aaaaaaab", "ba"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3), (1, 1), (1, 6)])
def test_two_streams_side_by_side_each_get_all_their_outputs(pattern, lengths):
    engine = make_engine(max_prefill_chunk_size=16)
    streams = {name: engine.stream(prompt(20, i), limit(n)) for i, (name, n) in enumerate(zip("ab", lengths, strict=True))}
    got = {"a": [], "b": []}
    open_ = {"a", "b"}
    for name in itertools.islice(itertools.cycle(pattern), 200):
        if name in open_:
            try:
                got[name].append(next(streams[name]))
            except StopIteration:
                open_.remove(name)
        if not open_:
            break
    for i, (name, n) in enumerate(zip("ab", lengths, strict=True)):
        request_id = streams[name].request_id
        assert joined(got[name], request_id) == engine.runner.solo(prompt(20, i), n)
        assert ends(got[name]) == [(request_id, "length")]
    assert is_idle(engine) and engine.step() == []


def test_outputs_of_others_are_kept_for_the_next_step():
    engine = make_engine()
    engine.add_request(prompt(9, 9), limit(4), request_id="other")
    assert len(list(engine.stream(prompt(20), limit(8)))) == 8
    assert engine.has_unfinished_requests(), "the other's end wasn't delivered yet"
    with pytest.raises(ValueError, match="'other'"):
        engine.add_request([1], limit(1), request_id="other")
    outputs = engine.step()
    assert joined(outputs, "other") == engine.runner.solo(prompt(9, 9), 4)
    assert ends(outputs) == [("other", "length")]
    assert is_idle(engine) and engine.step() == []
    engine.add_request([1], limit(1), request_id="other")
    run_to_end(engine)


def test_outputs_of_others_are_kept_for_their_own_stream():
    engine = make_engine()
    mine = engine.stream(prompt(9, 9), limit(4))
    engine.generate([prompt(20)], limit(8))
    outputs = list(mine)
    assert joined(outputs, mine.request_id) == engine.runner.solo(prompt(9, 9), 4) and outputs[-1].finished
    assert is_idle(engine) and engine.step() == []


def test_a_stream_whose_request_is_cancelled_by_another_ends():
    engine = make_engine()
    stream = engine.stream(prompt(9), limit(9))
    first = next(stream)
    engine.cancel(stream.request_id)
    rest = list(stream)
    assert ends(rest) == [(stream.request_id, "cancelled")] and joined([first, *rest], stream.request_id) == first.token_ids
    assert is_idle(engine), "its end was delivered: to the stream"
    assert engine.step() == []


def test_a_stream_has_nothing_to_do_with_a_later_request_of_its_id():
    engine = make_engine()
    stream = engine.stream(prompt(9), limit(2), request_id="S")
    assert ends(drain(engine)) == [("S", "length")]  # delivered to another
    engine.add_request(prompt(5), limit(3), request_id="S")
    assert next(stream, None) is None
    stream.close()
    del stream
    assert joined(drain(engine), "S") == engine.runner.solo(prompt(5), 3)


def test_an_end_that_a_stream_has_not_given_yet_was_not_delivered():
    engine = make_engine()
    stream = engine.stream(prompt(9), limit(3), request_id="S")
    engine.generate([prompt(5)], limit(5))  # computes all of S meanwhile
    first = next(stream)
    assert engine.has_unfinished_requests() and not first.finished
    stream.close()
    assert [end for end in ends(drain(engine))] == [("S", "length")], "the end that nobody took from the stream"
    assert is_idle(engine)


def test_a_stream_goes_on_after_a_failed_step():
    engine = make_engine()
    stream = engine.stream(prompt(9), limit(4))
    outputs = [next(stream)]
    engine.runner.fail_at = {1}
    with pytest.raises(RuntimeError):
        next(stream)
    outputs += stream
    assert joined(outputs, stream.request_id) == engine.runner.solo(prompt(9), 4)


def test_a_stream_may_be_collected_while_the_engine_schedules():
    # Python may run the end of an object anywhere, also in the middle of a step.
    held = []

    class Collects(Policy):
        def order(self, prefilling, waiting, step):
            order = [*prefilling, *waiting]
            held.clear()
            return order

    engine = make_engine(policy=Collects())
    engine.add_request(prompt(9), limit(4), request_id="other")
    held.append(engine.stream(prompt(40, 1), limit(4), request_id="S"))
    outputs = drain(engine)
    assert sorted(ends(outputs)) == [("S", "cancelled"), ("other", "length")]
    check_books(engine)
    assert is_idle(engine)


def test_a_stream_may_be_collected_while_the_engine_takes_its_last_token():
    runner = LetterRunner()
    held = []

    class Collects(Letters):
        def decode(self, token_ids, skip_special_tokens=True):
            held.clear()
            return super().decode(token_ids)

    runner.tokenizer = Collects()
    engine = make_engine(runner)
    held.append(engine.stream([1, 2], limit(1), request_id="S"))
    engine.add_request([3], limit(3), request_id="other")
    outputs = drain(engine)
    assert [name for name, _ in ends(outputs)].count("S") == 1
    assert joined(outputs, "other") == runner.solo([3], 3)
    goes = engine.add_request([5], limit(2))
    assert joined(drain(engine), goes) == runner.solo([5], 2)
    assert is_idle(engine)


# --- generate ---


def test_generate_answers_in_the_order_of_the_prompts():
    engine = make_engine(max_prefill_chunk_size=16)
    prompts = [prompt(length, length) for length in (90, 5, 40, 1, 17)]
    counts = [2, 9, 1, 12, 3]
    outputs = engine.generate(prompts, [limit(n) for n in counts])
    assert [o.token_ids for o in outputs] == [engine.runner.solo(p, n) for p, n in zip(prompts, counts, strict=True)]
    assert all(o.finished for o in outputs) and is_idle(engine)


def test_generate_takes_texts_and_token_ids_and_nothing():
    engine = make_engine(LetterRunner())
    outputs = engine.generate(["bcd", [1, 2, 3]], limit(4))
    assert outputs[0].text == outputs[1].text == Letters().decode(engine.runner.solo([1, 2, 3], 4))
    assert engine.generate("bcd", limit(4))[0].text == outputs[0].text
    assert engine.generate([]) == []
    assert len(engine.generate(["bcd"])[0].token_ids) == SamplingParams().max_tokens


@pytest.mark.parametrize("prompts, params, error, parts", [
    ([1, 2, 3], None, TypeError, ("prompts", "generate([[1, 2, 3]")),  # says how to wrap it
    ((1, 2, 3), None, TypeError, ("prompts", "generate([[1, 2, 3]")),
    ([[1], []], None, ValueError, ("prompts[1]", "0 tokens")),
    ([[1], [26]], None, ValueError, ("prompts[1][0]", "26", "25")),
    ([[1], "b", None], None, TypeError, ("prompts[2]", "None")),
    ([[1], [1] * 160], None, ValueError, ("prompts[1]", "160")),
    ([[1], [2]], [SamplingParams()], ValueError, ("params", "1", "2")),
    ([[1], [2]], {"max_tokens": 3}, TypeError, ("params", "max_tokens")),
    ([[1], [2]], [SamplingParams(), 3], TypeError, ("params", "3")),
    (7, None, TypeError, ("prompts", "7")),
    (None, None, TypeError, ("prompts", "None")),
])  # fmt: skip
def test_one_bad_prompt_adds_none(prompts, params, error, parts):
    engine = make_engine(LetterRunner(), num_blocks=10)
    with pytest.raises(error) as refused:
        engine.generate(prompts, params)
    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert is_idle(engine) and engine.trace.requests == {}
    assert engine.generate([[1]], limit(2))[0].token_ids == engine.runner.solo([1], 2)


def test_generate_leaves_other_requests_alone():
    engine = make_engine()
    engine.add_request(prompt(9, 9), limit(3), request_id="ends meanwhile")
    engine.add_request(prompt(9, 8), limit(30), request_id="goes on")
    (output,) = engine.generate([prompt(20)], limit(6))
    assert output.token_ids == engine.runner.solo(prompt(20), 6)
    outputs = drain(engine)
    assert joined(outputs, "ends meanwhile") == engine.runner.solo(prompt(9, 9), 3)
    assert joined(outputs, "goes on") == engine.runner.solo(prompt(9, 8), 30)
    assert sorted(ends(outputs)) == [("ends meanwhile", "length"), ("goes on", "length")]
    assert is_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_generate_cancels_its_requests_and_the_next_one_works(error):
    class Interrupted(FakeRunner):
        def execute(self, batch):
            samples = super().execute(batch)
            if self.num_calls == 3:
                raise error
            return samples

    engine = make_engine(Interrupted())
    with pytest.raises(error):
        engine.generate([prompt(5), prompt(6)], limit(9))
    assert engine.snapshot() == {} and engine.block_manager.num_used == 0
    for _ in range(2):
        outputs = engine.generate([prompt(7), prompt(8)], limit(4))
        assert [o.token_ids for o in outputs] == [engine.runner.solo(prompt(n), 4) for n in (7, 8)]
    rest = drain(engine)
    assert len(ends(rest)) <= 2 and {reason for _, reason in ends(rest)} <= {"cancelled"}
    assert is_idle(engine) and engine.step() == []


def test_a_request_of_generate_can_be_cancelled_by_another():
    engine = make_engine()
    engine.on_step = lambda scheduled: engine.runner.num_calls == 2 and engine.cancel("r1")
    first, second = engine.generate([prompt(5), prompt(6)], limit(9))
    assert (first.finish_reason, second.finish_reason, len(second.token_ids)) == ("length", "cancelled", 2)
    assert is_idle(engine)


CONSUMERS = {
    "generate": lambda engine: engine.generate([prompt(5, 1), prompt(6, 2)], limit(3)),
    "stream": lambda engine: (engine.add_request(prompt(5, 1), limit(3)), list(engine.stream(prompt(6, 2), limit(3)))),
    "step": lambda engine: [engine.add_request(prompt(5 + i, 1 + i), limit(3)) for i in range(2)],
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_cancel_from_another_thread_is_never_lost_wherever_the_engine_is(consumer):
    """Cancels at the first line that the engine's code runs, then, in another engine, at the second, and so on."""
    source = sys.modules[Engine.__module__].__file__

    def run(at):
        """Cancels at line number `at`; returns how many lines ran, and what became of the request."""
        engine, lines, answer = make_engine(), 0, []

        def trace(frame, event, arg):
            nonlocal lines
            if frame.f_code.co_filename != source:
                return None
            if event == "line":
                lines += 1
                assert lines < 20_000, "it waits for ever for an end that was lost"
                if lines == at:
                    thread = threading.Thread(target=lambda: answer.append(engine.cancel("r1")))
                    thread.start()
                    thread.join(0.002)  # it may have to wait until the engine lets go of its lock
                    threads.append(thread)
            return trace

        threads = []
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = CONSUMERS[consumer](engine)
            rest = drain(engine)
        finally:
            sys.settrace(before)
        for thread in threads:
            thread.join(10)
        rest += drain(engine)
        got = [o for o in result if not isinstance(o, str)] if consumer == "generate" else []
        got = result[1] if consumer == "stream" else got
        reasons = [o.finish_reason for o in [*got, *rest] if o.request_id == "r1" and o.finished]
        assert reasons == ["cancelled" if answer == [True] else "length"], "one end, and the right one"
        check_books(engine)
        assert is_idle(engine)
        return lines

    total = run(0)
    for at in range(1, total + 1, 1 + total // 200):  # some 200 places, whatever the number of lines
        run(at)


# --- runners that fail ---


class Fails(FakeRunner):
    """Raises once, in call `at`, before or after the K/V was written."""

    def __init__(self, at, error=RuntimeError("no more memory"), late=False):
        super().__init__()
        self.at, self.error, self.late = at, error, late

    def execute(self, batch):
        failing = self.num_calls == self.at
        if failing and not self.late:
            self.num_calls += 1
            raise self.error
        samples = super().execute(batch)
        if failing:
            raise self.error
        return samples


# Chunks, decodes, a prefix hit, a pool too small for all: steps of every kind.
TRIO = [(prompt(40, 1), 14), (prompt(40, 1)[:33] + prompt(9, 2), 6), (prompt(25, 3), 12)]


def trio(runner):
    engine = make_engine(
        runner, block_size=4, num_blocks=24, max_prefill_chunk_size=12, max_num_batched_tokens=20, max_num_seqs=3
    )
    for i, (tokens, count) in enumerate(TRIO):
        engine.add_request(tokens, limit(count), request_id=str(i))
    return engine


def calls_without_failure():
    engine = trio(FakeRunner())
    drain(engine)
    assert any(record.preempted for record in engine.trace.steps)
    return engine.runner.num_calls


@pytest.mark.parametrize("error", [RuntimeError("no more memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("late", [False, True])
def test_wherever_a_runner_fails_the_engine_goes_on_and_nothing_leaks(late, error):
    total = calls_without_failure()
    for k in range(total + 1):
        engine = trio(Fails(k, error, late))
        outputs, failures = [], 0
        while engine.has_unfinished_requests():
            before = {name: state.generated_tokens for name, state in engine.snapshot().items()}
            try:
                outputs += engine.step()
            except type(error):
                failures += 1
                assert {name: s.generated_tokens for name, s in engine.snapshot().items()} == before
            check_books(engine)
        assert failures == (k < total)
        assert [joined(outputs, str(i)) for i in range(3)] == [engine.runner.solo(*request) for request in TRIO]
        assert len(ends(outputs)) == 3 and is_idle(engine)


def test_an_interrupt_at_any_moment_never_leads_to_wrong_tokens():
    """Ctrl-C can come in the middle of the bookkeeping, too: then the engine goes on as it should, or says that it can't."""
    package = str(Path(sys.modules[Engine.__module__].__file__).parent)

    def run(at):
        """Interrupts when the engine's code calls its function number `at`; returns how many calls there were."""
        engine = trio(FakeRunner())
        calls, interrupted = 0, False

        def trace(frame, event, arg):
            nonlocal calls, interrupted
            if frame.f_code.co_filename.startswith(package) and "runners" not in frame.f_code.co_filename:
                calls += 1
                if calls == at:
                    interrupted = True
                    raise KeyboardInterrupt

        outputs = []
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            outputs += drain(engine)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupted:
            try:
                outputs += drain(engine, most=100)
            except RuntimeError:
                return calls
        for output in outputs:
            tokens, count = TRIO[int(output.request_id)]
            assert output.token_ids == engine.runner.solo(tokens, count)[: len(output.token_ids)], f"interrupted at {at}"
            assert len(output.token_ids) == count or not output.finished
        return calls

    total = run(0)
    for at in range(1, total + 1):
        run(at)


def test_a_runner_that_fails_many_times_in_a_row_takes_nothing():
    class Broken(FakeRunner):
        broken = True

        def execute(self, batch):
            if self.broken:
                raise RuntimeError("broken")
            return super().execute(batch)

    engine = trio(Broken())
    for _ in range(50):
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
        check_books(engine)
        assert engine.block_manager.num_used == 0
        assert {state.status for state in engine.snapshot().values()} == {"WAITING"}
    engine.runner.broken = False
    outputs = drain(engine)
    assert [joined(outputs, str(i)) for i in range(3)] == [engine.runner.solo(*request) for request in TRIO]


@pytest.mark.parametrize("wrong", [
    pytest.param(lambda samples: samples[:-1], id="one too few"),
    pytest.param(lambda samples: [*samples, samples[0]], id="one too many"),
    pytest.param(lambda samples: [], id="none"),
    pytest.param(lambda samples: None, id="None"),
    pytest.param(lambda samples: [sample.token_id for sample in samples], id="ids instead of Samples"),
    pytest.param(lambda samples: [None] * len(samples), id="a None for each"),
])  # fmt: skip
def test_a_runner_that_returns_the_wrong_samples_fails_the_step_only(wrong):
    class Wrong(FakeRunner):
        at = 2

        def execute(self, batch):
            samples = super().execute(batch)
            return wrong(samples) if self.num_calls == self.at + 1 else samples

    engine = make_engine(Wrong())
    engine.add_request(prompt(5, 1), limit(6), request_id="A")
    engine.add_request(prompt(5, 2), limit(6), request_id="B")
    outputs = steps(engine, 2)
    with pytest.raises((RuntimeError, TypeError)):
        engine.step()
    check_books(engine)
    outputs += drain(engine)
    for name, seed in (("A", 1), ("B", 2)):
        assert joined(outputs, name) == engine.runner.solo(prompt(5, seed), 6)
    assert is_idle(engine)


def test_a_wrong_number_of_samples_is_named():
    class OneShort(FakeRunner):
        def execute(self, batch):
            return super().execute(batch)[1:]

    engine = make_engine(OneShort())
    for i in range(3):
        engine.add_request([i + 1], limit(2))
    with pytest.raises(RuntimeError, match="2 samples for 3"):
        engine.step()


def test_a_sample_with_an_error_ends_its_request_and_no_other():
    class CannotChoose(FakeRunner):
        def execute(self, batch):
            samples = super().execute(batch)
            return [
                Sample(0, error="all probabilities are NaN")
                if s.request_id == "bad" and len(s.generated_token_ids) == 2 else sample
                for s, sample in zip(batch.sampled, samples, strict=True)
            ]  # fmt: skip

    engine = make_engine(CannotChoose())
    for name in ("bad", "good"):
        engine.add_request(prompt(5), limit(6), request_id=name)
    outputs = drain(engine)
    solo = engine.runner.solo(prompt(5), 6)
    assert ends(outputs) == [("bad", "error"), ("good", "length")]
    assert (joined(outputs, "bad"), joined(outputs, "good")) == (solo[:2], solo), "a token that failed isn't one"
    (end,) = [output for output in outputs if output.request_id == "bad" and output.finished]
    assert end.error == "all probabilities are NaN" and end.new_token_ids == [] and is_idle(engine)


def test_an_engine_whose_runner_serves_a_newer_one_says_so():
    runner = FakeRunner()
    old = make_engine(runner)
    old.add_request(prompt(20), limit(5), request_id="A")
    old.step()
    new = make_engine(runner)
    with pytest.raises(RuntimeError, match="newer engine"):
        old.step()
    assert new.generate([prompt(20)], limit(5))[0].token_ids == runner.solo(prompt(20), 5)


# --- parts of one's own ---


def test_a_scheduler_of_ones_own_is_used():
    class OneAtATime(Scheduler):
        """Computes tokens of one request, the first, until it ends."""

        def schedule(self):
            output = SchedulerOutput(self.step, self.config.block_size)
            first, *others = self.running + self.prefilling + self.waiting
            start = first.cached_token_count
            count = min(first.remaining_token_count, self.config.max_prefill_chunk_size)
            assert self.block_manager.allocate(first, start + count)
            kind = "decode" if first in self.running else "prefill"
            output.chunks.append(ScheduledChunk(first, start, count, kind, start + count == first.known_token_count))
            output.admitted += [first] if first in self.waiting else []
            output.reasons |= {other.request_id: "queue" for other in others}
            return output

    engine = make_engine(parts={"scheduler": OneAtATime}, max_prefill_chunk_size=8)
    assert type(engine.scheduler) is OneAtATime and engine.scheduler.block_manager is engine.block_manager
    for i in range(3):
        engine.add_request(prompt(9, i), limit(3))
    outputs = drain(engine)
    assert [o.request_id for o in outputs] == ["r0"] * 3 + ["r1"] * 3 + ["r2"] * 3
    for i in range(3):
        assert joined(outputs, f"r{i}") == engine.runner.solo(prompt(9, i), 3)
    assert len(engine.trace.steps) == 3 * 4  # two chunks and two decodes each


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_error_in_a_scheduler_of_ones_own_takes_no_blocks(where, prefix_caching):
    class Broken(Scheduler):
        broken = False

        def schedule(self):
            if self.broken and where == "before":
                raise ZeroDivisionError
            output = super().schedule()
            if self.broken:
                raise ZeroDivisionError
            return output

    engine = make_engine(
        parts={"scheduler": Broken}, num_blocks=12, max_prefill_chunk_size=16, enable_prefix_caching=prefix_caching
    )
    warm = prompt(40)
    engine.generate([warm], limit(2))
    engine.add_request(warm, limit(20), request_id="A")
    outputs = steps(engine, 1)
    engine.add_request(warm + prompt(30), limit(4), request_id="B")
    engine.scheduler.broken = True
    for _ in range(40):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.scheduler.broken = False
    check_books(engine)
    outputs += drain(engine)
    assert joined(outputs, "A") == engine.runner.solo(warm, 20)
    assert joined(outputs, "B") == engine.runner.solo(warm + prompt(30), 4)
    assert is_idle(engine)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_error_in_a_policy_of_ones_own_takes_no_blocks(prefix_caching):
    class Broken(Policy):
        broken = False

        def order(self, prefilling, waiting, step):
            return [*prefilling, *waiting]

        def share(self, budget, left, candidates, block_size):
            if self.broken and left < budget:  # for the second one
                raise ZeroDivisionError
            return left

    policy = Broken()
    engine = make_engine(policy=policy, num_blocks=20, enable_prefix_caching=prefix_caching)
    warm = prompt(40)
    engine.generate([warm], limit(2))
    policy.broken = True
    engine.add_request(warm, limit(4), request_id="A")
    engine.add_request(warm + prompt(30), limit(4), request_id="B")
    for _ in range(40):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    policy.broken = False
    check_books(engine)
    outputs = drain(engine)
    assert joined(outputs, "A") == engine.runner.solo(warm, 4)
    assert joined(outputs, "B") == engine.runner.solo(warm + prompt(30), 4)
    assert is_idle(engine)


@pytest.mark.parametrize("look", [
    pytest.param(lambda engine: engine.snapshot(), id="snapshot"),
    pytest.param(lambda engine: engine.has_unfinished_requests(), id="has_unfinished_requests"),
    pytest.param(lambda engine: engine.add_request([1], limit(1)), id="add_request"),
    pytest.param(lambda engine: engine.cancel("nobody"), id="cancel"),
    pytest.param(lambda engine: engine.preempt("A"), id="preempt"),
    pytest.param(lambda engine: engine.step(), id="step"),
])  # fmt: skip
def test_a_part_of_ones_own_that_calls_the_engine_does_not_hang(look):
    class Looks(Scheduler):
        engine = None

        def schedule(self):
            look(self.engine)
            return super().schedule()

    engine = make_engine(parts={"scheduler": Looks})
    engine.add_request(prompt(5), limit(1), request_id="A")
    engine.scheduler.engine = engine
    ended = threading.Event()

    def go():
        try:
            engine.step()
        except (RuntimeError, ValueError):  # it may refuse
            pass
        ended.set()

    threading.Thread(target=go, daemon=True).start()
    assert ended.wait(2)


def test_a_scheduler_that_never_schedules_is_found_out():
    class Idle(Scheduler):
        def schedule(self):
            return SchedulerOutput(self.step, self.config.block_size)

    engine = make_engine(parts={"scheduler": Idle})
    engine.add_request(prompt(5), limit(2))
    with pytest.raises(RuntimeError, match="nothing to do"):
        for _ in range(2000):
            engine.step()
    assert engine.cancel("r0")
    assert ends(engine.step()) == [("r0", "cancelled")]


def test_a_slot_mapping_of_ones_own_is_used():
    calls = []

    def mine(block_table, start_pos, num_tokens, block_size):
        calls.append((len(block_table), start_pos, num_tokens, block_size))
        return slot_mapping(block_table, start_pos, num_tokens, block_size)

    engine = make_engine(parts={"slot_mapping": mine}, max_prefill_chunk_size=25)
    engine.generate([prompt(60)], limit(2))
    assert calls == [(2, 0, 25, 16), (4, 25, 25, 16), (4, 50, 10, 16), (4, 60, 1, 16)]


@pytest.mark.parametrize("mistake", [
    pytest.param(lambda *args: 1 / 0, id="raises"),
    pytest.param(lambda *args: slot_mapping(*args)[:-1], id="one slot too few"),
    pytest.param(lambda *args: [slot + 10**6 for slot in slot_mapping(*args)], id="slots outside the pool"),
    pytest.param(lambda *args: None, id="None"),
])  # fmt: skip
def test_an_error_in_a_slot_mapping_of_ones_own_takes_no_blocks(mistake):
    engine = make_engine(parts={"slot_mapping": mistake})
    engine.add_request(prompt(20), limit(3), request_id="A")
    for _ in range(3):
        with pytest.raises((ZeroDivisionError, IndexError, TypeError, ValueError, RuntimeError)):
            engine.step()
        check_books(engine)
    engine.slot_mapping = slot_mapping
    assert joined(drain(engine), "A") == engine.runner.solo(prompt(20), 3)


def test_a_block_manager_of_ones_own_is_used():
    class HighestFirst(BlockManager):
        def _take(self):
            self._free = type(self._free)(sorted(self._free, reverse=True))
            return super()._take()

    engine = make_engine(parts={"block_manager": HighestFirst}, num_blocks=10)
    engine.add_request(prompt(40), limit(3), request_id="A")
    step(engine)
    assert engine.snapshot()["A"].block_table == [9, 8, 7]
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(40), 3)


def test_on_step_sees_what_is_about_to_be_computed():
    engine = make_engine(RecordingRunner(), max_prefill_chunk_size=16)
    seen = []
    engine.on_step = lambda out: seen.append([(c.sequence.request_id, c.start_pos, c.num_tokens) for c in out.chunks])
    engine.generate([prompt(40), prompt(5)], limit(3))
    assert seen == engine.runner.calls


# --- the house ---

# In the order in which a request flows through them: a module may import only from those before it.
ORDER = [
    "validation", "vllm_flags", "columns", "config", "sequence", "slots", "prefix_cache", "block_manager", "text", "policies", "scheduler", "contrast",
    "hardware", "cost_model", "batch", "model", "runners", "trace", "recorder", "metrics", "prompts", "outputs", "invariants",
    "engine", "calibrate", "workloads", "capacity", "lab", "checks", "arena", "__init__", "demo", "doctor", "bench", "simulate",
    "gpu_jobs", "gpu_check", "__main__",
]  # fmt: skip
# Imported inside a function, where something is shown or said about it, and done without where it is missing.
SHOWN_WITH = {"ipywidgets", "matplotlib", "IPython", "anywidget", "traitlets", "tqdm"}
VIEWS = {("lab", "view")}  # classes that are widgets: imported when one is shown, and by nothing else
COMMANDS = {"checks", "demo", "doctor", "bench", "simulate", "gpu_jobs", "gpu_check", "__main__"}  # may look at anything, inside a function


def modules():
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        parts = path.relative_to(ROOT / "course_lib").with_suffix("").parts
        yield path, parts


def imports_of(path, parts):
    """(line, target, is_top_level): target as a dotted name, absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }  # fmt: skip
    package = ["course_lib", *parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names] if base == "course_lib" else [base]
        else:
            continue
        for target in targets:
            yield node.lineno, target, id(node) not in inside


def test_imports_only_point_upwards():
    known = {parts[0] for _, parts in modules()}
    wrong = [f"{name} has no place in ORDER" for name in sorted(known - set(ORDER))]
    for path, parts in modules():
        for line, target, _ in imports_of(path, parts):
            top, _, rest = target.partition(".")
            if top != "course_lib":
                continue
            name = rest.split(".")[0]
            name = name if name in known else "__init__"
            if name != parts[0] and ORDER.index(name) > ORDER.index(parts[0]):
                wrong.append(f"{'/'.join(parts)}, line {line}: imports {target}, which comes after it")
    assert not wrong, "\n".join(wrong)


def test_everything_but_the_model_needs_the_standard_library_alone():
    wrong = []
    for path, parts in modules():
        if parts[0] == "model" or parts == ("runners", "model"):
            continue
        for line, target, top_level in imports_of(path, parts):
            package = target.partition(".")[0]
            if package in sys.stdlib_module_names or package == "course_lib":
                continue
            if (top_level and parts not in VIEWS) or not (package in SHOWN_WITH or parts[0] in COMMANDS):
                wrong.append(f"{'/'.join(parts)}, line {line}: imports {target}")
    assert not wrong, "\n".join(wrong)


def python(*args):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_quick_and_brings_no_torch():
    code = """if True:
        import sys, time
        begin = time.perf_counter()
        import course_lib
        print(time.perf_counter() - begin)
        print([name for name in ("torch", "numpy", "transformers", "tqdm", "matplotlib") if name in sys.modules])
    """
    seconds = []
    for _ in range(3):
        took, loaded = python("-c", code).splitlines()
        assert loaded == "[]"
        seconds.append(float(took))
    assert min(seconds) < 0.3


def test_the_engine_runs_where_nothing_else_is_installed():
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from course_lib import Engine, EngineConfig, SamplingParams
        from course_lib.runners import FakeRunner
        engine = Engine(FakeRunner(), EngineConfig(max_prefill_chunk_size=16))
        (output,) = engine.generate([list(range(40))], SamplingParams(max_tokens=3))
        assert output.token_ids == engine.runner.solo(list(range(40)), 3)
        engine.metrics(), engine.trace.to_json(), engine.trace.to_perfetto(), engine.snapshot()
        print(any("site-packages" in (getattr(m, "__file__", None) or "") for m in sys.modules.values()))
    """
    assert python("-I", "-S", "-c", code).strip() == "False"  # -S: no site-packages


def test_an_empty_request_id_is_refused():
    engine = Engine(FakeRunner())
    with pytest.raises(ValueError, match="request_id=''"):
        engine.add_request([1], request_id="")
    assert not engine.has_unfinished_requests()


def test_the_oracle_gives_log_probabilities_when_asked():
    engine = Engine(FakeRunner())
    asked, plain = engine.generate([[1, 2]] * 2, [SamplingParams(max_tokens=3, logprobs=0), limit(3)])
    assert asked.logprobs == [{token: 0.0} for token in asked.token_ids]
    assert plain.logprobs is None


def test_metrics_show_themselves_in_a_few_lines():
    engine = Engine(FakeRunner())
    engine.generate([[1, 2, 3]] * 50, limit(50))
    assert len(repr(engine.metrics())) < 1500


# ---- outputs only at the end ----------------------------------------------------------------------


def test_a_request_that_wants_only_its_last_output_gets_one_with_all_tokens():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
    engine.add_request([1] * 20, SamplingParams(max_tokens=6), request_id="each")
    engine.add_request([2] * 20, SamplingParams(max_tokens=6, final_only=True), request_id="last")
    engine.add_request([3] * 20, SamplingParams(max_tokens=6, final_only=True), request_id="cancelled")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if len(engine.trace.steps) == 3:
            engine.cancel("cancelled")
    counts = {name: [len(o.token_ids) for o in outputs if o.request_id == name] for name in ("each", "last", "cancelled")}
    assert counts == {"each": [1, 2, 3, 4, 5, 6], "last": [6], "cancelled": [3]}
    (last,) = [output for output in outputs if output.request_id == "last"]
    assert last.token_ids == FakeRunner().solo([2] * 20, 6) and last.finish_reason == "length"
    assert [step.tokens.get("last") for step in engine.trace.steps] == last.token_ids, "the trace has them all the same"
    with pytest.raises(TypeError, match="final_only"):
        SamplingParams(final_only=1)


def test_an_output_stays_what_it_was_when_the_request_goes_on():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
    engine.add_request([1] * 20, SamplingParams(max_tokens=3, logprobs=0), request_id="r")
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [(o.finished, o.finish_reason, len(o.token_ids), len(o.logprobs)) for o in outputs] == [
        (False, None, 1, 1), (False, None, 2, 2), (True, "length", 3, 3),
    ]  # fmt: skip
    assert [output.finish_time for output in outputs] == [None, None, 3.0]
    shown = repr(outputs[0])
    assert shown.startswith("RequestOutput(request_id='r', new_token_ids=[") and "finish_reason=None" in shown

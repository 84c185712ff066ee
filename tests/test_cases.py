"""Faults that real serving engines had, as small inputs with the right value.

Each test varies what the fault doesn't depend on (block size, chunk, company), since the kind of
fault has to be gone, not the one input. B: block size, N: blocks in the pool, P: prompt length,
M: max_tokens; "solo": what the request would get alone.
"""

import math

import pytest
from helpers import (
    RecordingRunner,
    Watch,
    goes_on,
    is_idle,
    limit,
    make_engine,
    prompt,
    run_to_end,
    step,
    steps,
)

from course_lib import EngineConfig, SamplingParams
from course_lib.config import POLICY_NAMES
from course_lib.sequence import Sequence

# --- capacity and admission ---


@pytest.mark.parametrize("block_size, num_blocks", [(16, 2), (16, 1), (1, 32), (4, 3), (64, 2)])
@pytest.mark.parametrize("chunk", [None, 7, 256])
def test_a_request_that_outgrows_the_pool_is_cut_to_it(block_size, num_blocks, chunk):
    pool = block_size * num_blocks
    engine = make_engine(block_size=block_size, num_blocks=num_blocks, max_prefill_chunk_size=chunk)
    for room in (1, 2, 5):  # tokens that the pool has left for the output
        if room >= pool:
            continue
        tokens = prompt(pool - room, room)
        engine.add_request(tokens, limit(room + 4), request_id="only")
        output = run_to_end(engine)["only"]
        assert (output.token_ids, output.finish_reason) == (engine.runner.solo(tokens, room), "length")
        assert engine.block_manager.num_free == num_blocks


@pytest.mark.parametrize("block_size, num_blocks", [(16, 2), (1, 32), (4, 3), (64, 2)])
def test_a_prompt_as_long_as_the_pool_is_refused_when_added(block_size, num_blocks):
    pool = block_size * num_blocks
    engine = make_engine(block_size=block_size, num_blocks=num_blocks)
    for length in (pool, pool + 1, 3 * pool):
        with pytest.raises(ValueError) as refused:
            engine.add_request(prompt(length), limit(5))
        text = str(refused.value)
        assert f"{length} tokens" in text and f"holds {pool}" in text, "it names the length and the pool's tokens"
    assert is_idle(engine)
    engine.add_request([1], limit(1))
    run_to_end(engine)


@pytest.mark.parametrize("model_limit", [1024, 1 << 20])  # tokens the model takes: as many as the pool, or more
def test_a_prompt_too_long_for_the_pool_does_not_block_the_queue(model_limit):
    engine = make_engine(RecordingRunner(max_model_len=model_limit), num_blocks=64)  # 64 × 16 = 1024 tokens
    with pytest.raises(ValueError, match=r"1025.*1024"):
        engine.add_request(prompt(1025), limit(4))
    engine.add_request(prompt(32), limit(4), request_id="second")
    output = run_to_end(engine)["second"]
    assert output.token_ids == engine.runner.solo(prompt(32), 4)


@pytest.mark.parametrize("chunk", [16, 25, 256])
@pytest.mark.parametrize("block_size, num_blocks", [(16, 8), (1, 128), (4, 32)])
@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.2])
def test_every_prompt_near_the_limit_ends_soon(chunk, block_size, num_blocks, watermark):
    pool = block_size * num_blocks
    engine = make_engine(
        block_size=block_size, num_blocks=num_blocks, max_prefill_chunk_size=chunk, kv_watermark=watermark,
        enable_prefix_caching=False,
    )  # fmt: skip
    refused = 0
    for length in range(pool - 20, pool):
        first_chunk = math.ceil(min(length, chunk) / block_size)
        if first_chunk + int(watermark * num_blocks) > num_blocks:
            with pytest.raises(ValueError, match="kv_watermark"):
                engine.add_request(prompt(length), limit(1))
            refused += 1
            continue
        engine.add_request(prompt(length), limit(1), request_id="long")
        last = run_to_end(engine, max_steps=math.ceil(length / chunk) + 2)
        assert last["long"].token_ids == engine.runner.solo(prompt(length), 1)
    assert refused < 20 or (chunk == 256 and watermark == 0.2), "only a whole pool and a watermark don't go together"


def test_after_a_long_prompt_is_cancelled_half_way_a_short_one_ends():
    engine = make_engine(num_blocks=8, max_prefill_chunk_size=16)
    long = engine.add_request(prompt(127), limit(1))
    steps(engine, 4)  # 64 of 127 tokens
    assert engine.cancel(long)
    engine.add_request(prompt(16), limit(2), request_id="short")
    assert run_to_end(engine)["short"].token_ids == engine.runner.solo(prompt(16), 2)
    assert is_idle(engine)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("size", [16, 4])  # block size; the case is the same in any unit
def test_two_requests_that_do_not_fit_together_do_not_preempt_each_other_for_ever(prefix_caching, size):
    unit = size // 4
    engine = make_engine(
        block_size=size, num_blocks=10, max_prefill_chunk_size=8 * unit, enable_prefix_caching=prefix_caching
    )
    watch = Watch(engine)
    a, b = prompt(24 * unit, 1), prompt(32 * unit, 2)  # 6 and 8 of the 10 blocks
    engine.add_request(a, limit(15 * unit), request_id="A")
    engine.add_request(b, limit(unit), request_id="B")
    last = run_to_end(engine, max_steps=200)
    assert sum(map(len, watch.preempted())) <= 2
    assert last["A"].token_ids == engine.runner.solo(a, 15 * unit)
    assert last["B"].token_ids == engine.runner.solo(b, unit)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_half_filled_prompts_that_hold_every_block_do_not_stop_one_another(policy):
    # Two prompts of 8 blocks in a pool of 10: each gets 5 in the first step, and then there are none.
    engine = make_engine(num_blocks=10, max_prefill_chunk_size=80, max_num_batched_tokens=160, policy=policy)
    watch = Watch(engine)
    for name, seed in (("older", 1), ("younger", 2)):
        engine.add_request(prompt(128, seed), limit(2), request_id=name)
    ended = []
    for _ in range(50):
        ended += [output for output in step(engine) if output.finished]
    assert [output.request_id for output in ended] == ["older", "younger"]
    assert [output.token_ids for output in ended] == [engine.runner.solo(prompt(128, seed), 2) for seed in (1, 2)]
    preempted = [name for names in watch.preempted() for name in names]
    assert preempted in ([], ["younger"])
    assert engine.block_manager.num_free == 10


@pytest.mark.parametrize("chunk", [16, 8, 64])
def test_a_chunk_that_meets_a_full_pool_waits_and_decode_goes_on(chunk):
    engine = make_engine(num_blocks=8, max_prefill_chunk_size=chunk, max_num_batched_tokens=64)
    watch = Watch(engine)
    engine.add_request(prompt(64, 1), limit(40), request_id="A")
    steps(engine, 64 // min(chunk, 64))
    assert engine.snapshot()["A"].status == "RUNNING"
    engine.add_request(prompt(96, 2), limit(4), request_id="B")
    first = len(watch.outputs)
    last = run_to_end(engine)
    without = [out for out in watch.outputs[first:] if out.reasons.get("B") == "kv_blocks"]
    assert without, "A and B need 7 + 7 of 8 blocks, so B has to wait at times"
    has_token = ["A" in tokens for tokens in watch.scheduled()[first:]]
    assert has_token == [True] * 39 + [False] * (len(has_token) - 39), "one of A's 40 tokens was there already"
    for out in without:
        assert [c.sequence.request_id for c in out.chunks] == ["A"]
    assert "A" not in [name for names in watch.preempted() for name in names]
    assert last["A"].token_ids == engine.runner.solo(prompt(64, 1), 40)
    assert last["B"].token_ids == engine.runner.solo(prompt(96, 2), 4)


# --- chunk arithmetic ---


@pytest.mark.parametrize("chunk, count", [(16, 4), (16, 3), (7, 5), (1, 6), (30, 3)])
def test_a_prompt_counts_as_done_after_its_last_chunk_only(chunk, count):
    engine = make_engine(max_prefill_chunk_size=chunk)
    engine.add_request(prompt(chunk * count), limit(5), request_id="A")
    for done in range(1, count):
        assert step(engine) == [], "a half-filled prompt gives no output"
        state = engine.snapshot()["A"]
        assert (state.status, state.prefilled_token_count, state.generated_tokens) == ("PREFILLING", chunk * done, 0)
    (output,) = step(engine)
    assert engine.snapshot()["A"].status == "RUNNING"
    assert output.token_ids == engine.runner.solo(prompt(chunk * count), 1)


def test_more_sequences_than_tokens_in_a_step_are_refused_by_the_config():
    with pytest.raises(ValueError, match=r"max_num_seqs=10 .*max_num_batched_tokens=8"):
        EngineConfig(max_num_seqs=10, max_num_batched_tokens=8)
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)  # just enough


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_prompt_gets_its_share_beside_as_many_decodes_as_the_budget(block_size):
    engine = make_engine(
        block_size=block_size, max_num_seqs=8, max_num_batched_tokens=8, max_decode_share=0.5
    )
    for i in range(7):
        engine.add_request([i + 1], limit(100))
    step(engine)  # 7 prompts of 1 token
    watch = Watch(engine)
    engine.add_request(prompt(16), limit(100), request_id="P")
    outputs = [step(engine) for _ in range(12)]
    # decode may take 4 of 8 tokens, so 4 are left for the prompt: 16 / 4 = 4 steps
    first = next(i for i, out in enumerate(outputs) if any(o.request_id == "P" for o in out))
    assert first == 3
    assert all(sum(tokens.values()) <= 8 and min(tokens.values()) >= 1 for tokens in watch.scheduled())
    for i in range(7):  # 7 decodes, 4 a step: ceil(7 / 4) = 2
        assert longest_wait(watch, f"r{i}") <= 2


def longest_wait(watch: Watch, name: str) -> int:
    """Most steps from one token of a running request to its next."""
    waits, since = [], 0
    for tokens in watch.scheduled():
        since += 1
        if name in tokens:
            waits.append(since)
            since = 0
    return max([*waits, since])


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_request_vanishes_when_the_budget_is_spent(policy):
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4, policy=policy)
    most = 0
    names = [engine.add_request(prompt(10, i), limit(3)) for i in range(6)]
    finished = set()
    while engine.has_unfinished_requests():
        finished |= {output.request_id for output in step(engine) if output.finished}
        scheduler = engine.scheduler
        groups = [[s.request_id for s in queue] for queue in (scheduler.waiting, scheduler.prefilling, scheduler.running)]
        most = max(most, len(scheduler.prefilling))
        assert sorted([*groups[0], *groups[1], *groups[2], *finished]) == sorted(names)
    if policy == "waiting_first":
        assert most >= 3, "here three are half-filled at a time"


# --- positions and slots ---


@pytest.mark.parametrize("length, chunk, starts", [
    (100, 30, [0, 30, 60, 90]),
    (70, 16, [0, 16, 32, 48, 64]),
    (48, 16, [0, 16, 32]),  # the last chunk is full
    (33, 32, [0, 32]),
])  # fmt: skip
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("company", [False, True])
def test_positions_go_on_from_chunk_to_chunk(length, chunk, starts, block_size, company):
    runner = RecordingRunner()
    engine = make_engine(runner, block_size=block_size, max_prefill_chunk_size=chunk)
    if company:
        engine.add_request(prompt(23, 7), limit(40))
        step(engine)
    engine.add_request(prompt(length), limit(20), request_id="A")
    output = run_to_end(engine)["A"]
    positions = [call["A"][1] for call in runner.seen if "A" in call]
    ends = [*starts[1:], length]
    assert positions[: len(starts)] == [list(range(a, b)) for a, b in zip(starts, ends, strict=True)]
    assert positions[len(starts) :] == [[length + i] for i in range(19)]  # the last token is never an input
    assert output.token_ids == runner.solo(prompt(length), 20)


@pytest.mark.parametrize("length, blocks", [
    (15, [1, 1, 2]),  # index 15 still fits; index 16 doesn't
    (16, [1, 2, 2]),
    (17, [2, 2, 2]),
    (31, [2, 2, 3]),
])  # fmt: skip
def test_the_next_block_is_taken_when_the_first_token_needs_it(length, blocks):
    engine = make_engine()
    engine.add_request(prompt(length), limit(9), request_id="A")
    held = []
    for _ in blocks:  # after the prefill, the first and the second decode
        step(engine)
        held.append(len(engine.snapshot()["A"].block_table))
    assert held == blocks


@pytest.mark.parametrize("chunk", [7, 16, None])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_nothing_past_the_context_is_read(chunk, block_size):
    engine = make_engine(block_size=block_size, num_blocks=64, max_prefill_chunk_size=chunk)
    everything = list(range(64))
    engine.runner.poison(everything, block_size)
    engine.add_request(prompt(20), limit(20), request_id="A")
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(20), 20)


def test_nothing_is_read_of_what_a_cancelled_request_left_behind():
    engine = make_engine(num_blocks=4, max_prefill_chunk_size=8)
    dirty = engine.add_request(prompt(60, 1), limit(2))
    steps(engine, 6)  # 48 tokens: 3 of the 4 blocks
    engine.cancel(dirty)
    engine.add_request(prompt(20, 2), limit(40), request_id="A")
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(20, 2), 40)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_chunks_joined_are_the_prompt(chunk):
    for length in range(1, 3 * chunk + 2):
        runner = RecordingRunner()
        engine = make_engine(runner, block_size=4, max_prefill_chunk_size=chunk)
        engine.add_request(prompt(length), limit(1), request_id="A")
        run_to_end(engine)
        assert [token for call in runner.seen for token in call["A"][0]] == prompt(length)
        assert len(runner.seen) == math.ceil(length / chunk)


# --- prefix cache and chunks ---


@pytest.mark.parametrize("chunk", [256, 5, None])
def test_the_budget_is_counted_after_the_hit(chunk):
    engine = make_engine(max_prefill_chunk_size=chunk)
    warm = prompt(64)
    engine.generate([warm], limit(1))
    watch = Watch(engine)
    tokens = warm + prompt(10, 1)
    engine.add_request(tokens, limit(3), request_id="A")
    last = run_to_end(engine)["A"]
    prefill = [c for out in watch.outputs for c in out.chunks if c.kind == "prefill"]
    assert sum(c.num_tokens for c in prefill) == 10 and prefill[0].start_pos == 64
    assert (last.num_cached_tokens, last.token_ids) == (64, engine.runner.solo(tokens, 3))


@pytest.mark.parametrize("chunk", [256, 5])
def test_a_recomputation_takes_its_own_prefix_from_the_cache(chunk):
    engine = make_engine(max_prefill_chunk_size=chunk)
    warm = prompt(64)
    engine.generate([warm], limit(1))
    tokens = warm + prompt(10, 1)
    engine.add_request(tokens, limit(3), request_id="A")
    while not engine.step():
        pass
    engine.preempt("A")  # behind its first token: 75 known tokens, of which 4 full blocks are cached
    watch = Watch(engine)
    last = run_to_end(engine)["A"]
    prefill = [c for out in watch.outputs for c in out.chunks if c.kind == "prefill"]
    assert sum(c.num_tokens for c in prefill) == 11 and prefill[0].start_pos == 64
    assert (last.num_cached_tokens, last.token_ids) == (64, engine.runner.solo(tokens, 3))


@pytest.mark.parametrize("length, cached", [
    (64, 48),  # never the whole prompt: one token must be computed
    (65, 64),
    (63, 48),
    (15, 0),  # no full block
    (16, 0),
    (17, 16),
    (1, 0),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [256, 7])
def test_a_full_hit_leaves_a_token_to_compute(length, cached, chunk):
    engine = make_engine(max_prefill_chunk_size=chunk)
    (cold,) = engine.generate([prompt(length)], limit(5))
    (warm,) = engine.generate([prompt(length)], limit(5))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, cached)
    assert warm.token_ids == cold.token_ids == engine.runner.solo(prompt(length), 5)


@pytest.mark.parametrize("chunk", [256, 16])
def test_two_equal_prompts_in_one_step_both_compute(chunk):
    engine = make_engine(max_prefill_chunk_size=chunk)
    outputs = engine.generate([prompt(64), prompt(64)], limit(4))
    assert [o.token_ids for o in outputs] == [engine.runner.solo(prompt(64), 4)] * 2
    assert [o.num_cached_tokens for o in outputs] == [0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_was_never_written_is_never_shared(fails):
    # The first of two equal prompts is cancelled while its chunk is in flight (and the step may fail besides).
    engine = make_engine(enable_prefix_caching=True)
    tables = {}

    def cancel_first(output):
        tables.update({c.sequence.request_id: list(c.sequence.block_table) for c in output.chunks})
        assert engine.cancel("first")
        engine.on_step = None

    engine.on_step = cancel_first
    engine.runner.fail_at = {0} if fails else set()
    for name in ("first", "second"):
        engine.add_request(prompt(64), limit(4), request_id=name)
    if fails:
        with pytest.raises(RuntimeError):
            engine.step()
    else:
        step(engine)
    assert not set(tables["first"]) & set(tables["second"])
    last = run_to_end(engine)
    assert last["second"].token_ids == engine.runner.solo(prompt(64), 4)
    assert last["second"].num_cached_tokens == 0


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_after_k_chunks_others_can_match_k_blocks(chunks):
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(100), limit(2))
    steps(engine, chunks)
    assert len(engine.block_manager.match(Sequence("probe", prompt(100)))) == chunks
    engine.add_request(prompt(100), limit(2), request_id="B")
    output = run_to_end(engine)["B"]
    assert (output.num_cached_tokens, output.token_ids) == (16 * chunks, engine.runner.solo(prompt(100), 2))


def test_a_block_that_is_not_full_is_never_shared():
    engine = make_engine()
    engine.generate([prompt(40)], limit(1))
    for name, seed in (("A", 1), ("B", 2)):  # 40 tokens: two full blocks and a third of 8 tokens
        engine.add_request(prompt(40), SamplingParams(max_tokens=5, seed=seed), request_id=name)
    step(engine)
    a, b = (engine.snapshot()[name].block_table for name in "AB")
    assert a[:2] == b[:2] and len(set(a + b)) == 4
    last = run_to_end(engine)
    assert last["A"].token_ids == last["B"].token_ids == engine.runner.solo(prompt(40), 5)


@pytest.mark.parametrize("first, second, cached", [
    ("x", "x", 64),
    ("x", "y", 0),
    ("x", None, 0),
    (None, "x", 0),
    (None, None, 64),
    ("", None, 0),  # an empty salt is a salt
])  # fmt: skip
def test_another_salt_never_matches(first, second, cached):
    engine = make_engine()
    engine.add_request(prompt(65), limit(2), cache_salt=first)
    run_to_end(engine)
    engine.add_request(prompt(65), limit(2), cache_salt=second, request_id="B")
    output = run_to_end(engine)["B"]
    assert (output.num_cached_tokens, output.token_ids) == (cached, engine.runner.solo(prompt(65), 2))


def test_recomputed_tokens_are_no_hits():
    engine = make_engine(num_blocks=16, max_prefill_chunk_size=16)
    for i in range(6):
        engine.add_request(prompt(40 + i, i), limit(20))
    outputs, step_number = {}, 0
    while engine.has_unfinished_requests():
        step_number += 1
        running = engine.scheduler.running
        if step_number % 7 == 0 and running:
            engine.preempt(running[-1].request_id)
        outputs |= {o.request_id: o for o in step(engine) if o.finished}
    assert engine.metrics().prefix_hit_rate == 0
    assert {o.num_cached_tokens for o in outputs.values()} == {0}
    for i in range(6):
        assert outputs[f"r{i}"].token_ids == engine.runner.solo(prompt(40 + i, i), 20)


def test_cached_tokens_cost_no_budget():
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=64)
    engine.generate([prompt(97)], limit(1))  # 97: so that 96 are full blocks
    watch = Watch(engine)
    engine.add_request(prompt(97)[:96] + prompt(4, 5), limit(1), request_id="A")
    engine.add_request(prompt(60, 6), limit(1), request_id="B")
    step(engine)
    assert watch.scheduled() == [{"A": 4, "B": 60}]  # 64 in all


# --- cancel and leaks ---


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 4])  # the 4th is the last: then the request is RUNNING
def test_a_cancelled_prefill_gives_its_blocks_back(chunks, prefix_caching):
    engine = make_engine(num_blocks=80, enable_prefix_caching=prefix_caching)
    for round_ in range(20):  # five counts of chunks: 100 times in all
        request_id = engine.add_request(prompt(1000, round_), limit(5))
        steps(engine, chunks)
        assert engine.block_manager.num_used == [0, 16, 32, 48, 63][chunks]  # 63 = ceil(1000 / 16)
        assert engine.cancel(request_id)
        assert engine.block_manager.num_free == 80 and not any(engine.block_manager.ref_counts)
        (output,) = step(engine)
        assert (output.finish_reason, len(output.token_ids)) == ("cancelled", chunks == 4)
    goes_on(engine)


def test_a_request_cancelled_with_its_last_chunk_in_flight_gives_no_token():
    engine = make_engine(num_blocks=10, max_prefill_chunk_size=16)

    def cancel_at_last_chunk(output):
        if output.chunks and output.chunks[0].is_last:
            assert engine.cancel("A")

    engine.on_step = cancel_at_last_chunk
    engine.add_request(prompt(48), limit(5), request_id="A")
    outputs = steps(engine, 6)
    assert [(o.request_id, o.new_token_ids, o.token_ids, o.finish_reason) for o in outputs] == [("A", [], [], "cancelled")]
    assert is_idle(engine) and engine.runner.num_calls == 3


@pytest.mark.parametrize("at", [1, 3, 10])
def test_a_cancel_during_prefill_takes_effect_at_once(at):
    engine = make_engine(max_prefill_chunk_size=100)
    engine.on_step = lambda output: engine.runner.num_calls == at - 1 and engine.cancel("A")
    engine.add_request(prompt(1000), limit(5), request_id="A")  # 10 chunks of 100
    run_to_end(engine)
    assert engine.runner.num_calls == at


def test_nothing_leaks_over_many_requests():
    engine = make_engine(num_blocks=20)
    for i in range(200):
        engine.add_request(prompt(33, i % 50), limit(3))
        run_to_end(engine)
        assert engine.block_manager.num_used == 0
    metrics = engine.metrics()
    assert metrics.kv_use_max == 3 / 20  # 35 positions are written: 3 of 20 blocks
    assert 0 < metrics.kv_use_mean < 3 / 20 + 1e-9
    assert is_idle(engine)


# --- preemption ---


@pytest.mark.parametrize("chunk", [16, 256, 5])
@pytest.mark.parametrize("times", [1, 2])
def test_prompt_and_output_are_recomputed_after_a_preemption(chunk, times):
    runner = RecordingRunner()
    engine = make_engine(runner, enable_prefix_caching=False, max_prefill_chunk_size=chunk)
    engine.add_request(prompt(32), limit(25), request_id="A")
    tokens = []
    while len(tokens) < 10:
        tokens += [t for o in step(engine) for t in o.new_token_ids]
    for time in range(1, times + 1):
        engine.preempt("A")
        state = engine.snapshot()["A"]
        assert state.num_preemptions == time
        assert (state.status, state.cached_token_count, state.prefilled_token_count) == ("WAITING", 0, 0)
        assert (state.generated_tokens, state.block_table) == (len(tokens), [])
        known = 32 + len(tokens)  # 42 at first; the newest has no K/V yet, all the others lost theirs
        calls = len(runner.seen)
        for i in range(math.ceil(known / chunk)):
            outputs = step(engine)
            cached = engine.snapshot()["A"].cached_token_count
            assert cached == min(known, (i + 1) * chunk)
            assert engine.snapshot()["A"].prefilled_token_count == min(32, cached)
            assert bool(outputs) == (cached == known), "nothing is sampled before all are cached"
        assert sum(len(call["A"][0]) for call in runner.seen[calls:]) == known
        tokens += outputs[0].new_token_ids  # the 11th, then the 12th
        assert tokens == runner.solo(prompt(32), len(tokens))
    last = run_to_end(engine)["A"]
    assert last.token_ids == runner.solo(prompt(32), 25)


def test_a_sequence_that_is_preempted_again_before_it_is_whole_loses_nothing():
    runner = RecordingRunner()
    engine = make_engine(runner, enable_prefix_caching=False, max_prefill_chunk_size=16)
    engine.add_request(prompt(32), limit(12), request_id="A")
    steps(engine, 6)  # 2 chunks: 1 token, 4 decodes: 4 more
    engine.preempt("A")
    steps(engine, 2)  # 32 of 37
    assert engine.snapshot()["A"].status == "PREFILLING"
    engine.preempt("A")
    assert run_to_end(engine)["A"].token_ids == runner.solo(prompt(32), 12)


# --- fairness ---


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_decode_does_not_starve_prefill(policy):
    engine = make_engine(max_num_seqs=9, max_num_batched_tokens=12, max_decode_share=0.5, policy=policy)
    for i in range(8):
        engine.add_request([i + 1], limit(1000))
    step(engine)
    watch = Watch(engine)
    engine.add_request(prompt(16), limit(5), request_id="P")
    outputs = [step(engine) for _ in range(6)]
    # decode may take 6 of 12, so 6 are left for the prompt: 6 + 6 + 4 = 16
    assert [tokens.get("P") for tokens in watch.scheduled()][:3] == [6, 6, 4]
    assert next(i for i, out in enumerate(outputs) if any(o.request_id == "P" for o in out)) == 2
    for i in range(8):  # 8 decodes, 6 a step: ceil(8 / 6) = 2
        assert longest_wait(watch, f"r{i}") <= 2


def test_by_default_a_short_prompt_waits_for_a_long_one_before_it():
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16)
    watch = Watch(engine)
    engine.add_request(prompt(1000), limit(1), request_id="A")
    step(engine)
    engine.add_request(prompt(8, 1), limit(1), request_id="B")
    run_to_end(engine)
    # 1000 = 62 × 16 + 8: in the 63rd step 8 tokens are left, just enough for B
    assert watch.scheduled()[61:] == [{"A": 16}, {"A": 8, "B": 8}]


def test_fair_share_does_not_let_a_short_prompt_wait_for_a_long_one():
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16, policy="fair_share")
    engine.add_request(prompt(1000), limit(1), request_id="A")
    step(engine)
    engine.add_request(prompt(8, 1), limit(1), request_id="B")
    assert "B" in [output.request_id for output in steps(engine, 3)]
    assert engine.snapshot()["A"].status == "PREFILLING"

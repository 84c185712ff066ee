"""Metrics: on traces written by hand, with values computed by hand, and on runs."""

import json
import random

import numpy
import pytest
from fuzz import FlakyRunner, random_config

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.config import POLICY_NAMES
from course_lib.metrics import Summary, metrics, percentile
from course_lib.runners import FakeRunner
from course_lib.trace import ChunkRecord, RequestRecord, StepRecord, Trace


def request(name, arrival, prompt=4, finish=None, reason=None, hit=0):
    return RequestRecord(
        name, name, prompt_tokens=prompt, max_new_tokens=9, arrival_time=arrival, arrival_step=0,
        prefix_hit_tokens=hit, finish_reason=reason, finish_time=finish,
    )  # fmt: skip


def trace_of(requests, steps, num_blocks=10):
    """`steps`: (start, end, chunks, tokens, blocks used) with chunks as (request, start, tokens, kind, is last)."""
    trace = Trace({"num_blocks": num_blocks}, {r.name: r for r in requests})
    for index, (start, end, chunks, tokens, used) in enumerate(steps):
        trace.steps.append(
            StepRecord(
                index, start, end, [ChunkRecord(*c) for c in chunks], tokens=dict.fromkeys(tokens, 7),
                blocks_used=used, blocks_free=num_blocks - used,
            )  # fmt: skip
        )
    return trace


@pytest.fixture
def two_requests():
    """A (4 prompt tokens, comes at 0) and B (6, comes at 1); steps of unequal length."""
    return trace_of(
        [request("A", 0.0, 4, finish=8.0, reason="length"), request("B", 1.0, 6, finish=4.0, reason="stop")],
        [
            (0.5, 2.0, [("A", 0, 4, "prefill", True)], ["A"], 1),
            (2.0, 3.0, [("A", 4, 1, "decode", True), ("B", 0, 3, "prefill", False)], ["A"], 2),
            (3.0, 4.0, [("A", 5, 1, "decode", True), ("B", 3, 3, "prefill", True)], ["A", "B"], 3),
            (4.0, 8.0, [("A", 6, 1, "decode", True)], ["A"], 2),
        ],
    )


def test_times_of_each_request(two_requests):
    result = metrics(two_requests)
    a, b = result.requests["A"], result.requests["B"]
    assert a.ttft == 2.0  # from arrival at 0, not from the step's start
    assert a.itl == [1.0, 1.0, 4.0]  # tokens at 2, 3, 4, 8
    assert a.tpot == 2.0  # (8 - 2) / 3
    assert a.e2e == 8.0
    assert a.stall == 4.0
    assert b.ttft == 3.0  # at 4, came at 1
    assert b.itl == [] and b.tpot is None and b.stall is None  # one token only
    assert b.e2e == 3.0


def test_summaries_and_totals(two_requests):
    result = metrics(two_requests)
    assert (result.ttft.count, result.ttft.mean, result.ttft.p50, result.ttft.max) == (2, 2.5, 2.5, 3.0)
    assert (result.itl.count, result.itl.mean, result.itl.p50, result.itl.max) == (3, 2.0, 1.0, 4.0)
    assert result.tpot.count == 1 and result.tpot.mean == 2.0
    assert result.e2e.mean == 5.5
    assert result.stall == 4.0
    assert result.num_steps == 4
    assert result.output_tokens == 5
    assert result.computed_tokens == 13  # 4 + 6 in prefill, 3 in decode
    assert result.recomputed_tokens == 0
    assert result.finish_reasons == {"length": 1, "stop": 1}


def test_throughput_counts_from_the_first_arrival_to_the_last_step(two_requests):
    result = metrics(two_requests)
    assert result.duration == 8.0
    assert result.output_tokens_per_second == 5 / 8
    assert result.total_tokens_per_second == 15 / 8  # 10 prompt tokens


def test_kv_use_is_weighted_by_time(two_requests):
    result = metrics(two_requests)
    # 1.5 s with 1 block of 10, 1 s with 2, 1 s with 3, 4 s with 2: 14.5 of 75
    assert result.kv_use_mean == pytest.approx(14.5 / 75)
    assert result.kv_use_max == 0.3


def test_the_mean_hides_a_stall_that_the_maximum_shows():
    # 100 tokens, 10 ms apart, but for one gap of 2 s
    times = [0.01 * i + (2.0 if i > 50 else 0.0) for i in range(1, 101)]
    steps = [(t - 0.01, t, [("A", i, 1, "decode", True)], ["A"], 1) for i, t in enumerate(times)]
    result = metrics(trace_of([request("A", 0.0)], steps))
    assert result.itl.mean < 0.031  # (0.99 + 2) / 99
    assert result.itl.p90 == pytest.approx(0.01)
    assert result.itl.max == result.stall == pytest.approx(2.01)


def test_a_stall_includes_the_time_preempted():
    trace = trace_of(
        [request("A", 0.0), request("B", 0.0)],
        [
            (0, 1, [("A", 0, 4, "prefill", True), ("B", 0, 4, "prefill", True)], ["A", "B"], 2),
            (1, 2, [("A", 4, 1, "decode", True), ("B", 4, 1, "decode", True)], ["A", "B"], 2),
            (2, 3, [("A", 5, 1, "decode", True)], ["A"], 2),  # B is preempted
            (3, 7, [("A", 6, 1, "decode", True)], ["A"], 2),
            (7, 8, [("B", 0, 4, "prefill", False)], [], 1),
            (8, 9, [("B", 4, 2, "prefill", True)], ["B"], 1),
        ],
    )
    trace.steps[2].preempted.append("B")
    result = metrics(trace)
    assert result.requests["B"].stall == result.stall == 7.0  # from 2 to 9
    assert result.requests["A"].stall == 4.0
    assert result.num_preemptions == 1
    assert result.recomputed_tokens == 5  # positions 0-4 of B; position 5 is its second token, new to the model


def test_recomputed_tokens_are_counted_again_at_each_preemption():
    trace = trace_of(
        [request("A", 0.0, prompt=8)],
        [
            (0, 1, [("A", 0, 8, "prefill", True)], ["A"], 1),
            (1, 2, [("A", 0, 6, "prefill", False)], [], 1),  # preempted, and again before it was through
            (2, 3, [("A", 0, 9, "prefill", True)], ["A"], 1),
        ],
    )
    result = metrics(trace)
    assert result.computed_tokens == 23
    assert result.recomputed_tokens == 14  # 6 and 8; the ninth token is new


def test_an_unfinished_request_has_no_end_to_end_time():
    trace = trace_of([request("A", 1.0), request("B", 2.0)], [(1, 3, [("A", 0, 4, "prefill", True)], ["A"], 1)])
    result = metrics(trace)
    assert (result.requests["A"].ttft, result.requests["A"].e2e) == (2.0, None)
    assert (result.requests["B"].ttft, result.requests["B"].e2e, result.requests["B"].stall) == (None, None, None)
    assert result.ttft.count == 1 and result.e2e == Summary(0)
    assert result.finish_reasons == {}


def test_a_request_cancelled_before_its_first_token_has_no_ttft():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    engine.add_request([1, 2, 3], request_id="a")
    engine.cancel("a")
    engine.step()
    result = engine.metrics()
    assert result.requests["a"].ttft is None and result.requests["a"].e2e == 0.0
    assert result.ttft == Summary(0)
    assert result.finish_reasons == {"cancelled": 1}


@pytest.mark.parametrize("engine_trace", [False, True])
def test_an_empty_trace_has_metrics(engine_trace):
    trace = Engine(FakeRunner(), EngineConfig(num_blocks=20)).trace if engine_trace else Trace()
    result = metrics(trace)
    assert result.requests == {} and result.num_steps == 0 and result.duration == 0
    assert result.ttft == result.itl == result.tpot == result.e2e == Summary(0)
    assert result.output_tokens == result.computed_tokens == result.recomputed_tokens == result.num_preemptions == 0
    for value in (result.stall, result.output_tokens_per_second, result.total_tokens_per_second):
        assert value is None
    for value in (result.kv_use_mean, result.kv_use_max, result.prefix_hit_rate):
        assert value is None
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_request_that_has_not_been_scheduled_yet_breaks_no_metric():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    engine.add_request([1, 2, 3], request_id="a")
    result = engine.metrics()
    assert result.requests["a"].ttft is None and result.duration == 0 and result.prefix_hit_rate is None


# --- percentiles ---


def test_percentiles_are_numpys():
    rng = random.Random(0)
    for _ in range(200):
        values = [rng.choice([rng.random(), rng.randrange(3)]) for _ in range(rng.randint(1, 40))]
        for percent in (0, 1, 50, 90, 99, 99.9, 100, rng.random() * 100):
            assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent), abs=1e-12)


def test_a_summary_has_mean_percentiles_and_maximum():
    values = [5.0, 1.0, 2.0, 10.0]
    summary = Summary.of(values)
    assert (summary.count, summary.mean, summary.max) == (4, 4.5, 10.0)
    assert summary.p50 == 3.5
    assert summary.p90 == pytest.approx(8.5)  # place 2.7 of 1, 2, 5, 10: 5 + 0.7 × 5
    assert summary.p99 == pytest.approx(9.85)
    assert values == [5.0, 1.0, 2.0, 10.0]  # left as they were
    assert Summary.of([]) == Summary(0)
    assert Summary.of([3.0]) == Summary(1, 3.0, 3.0, 3.0, 3.0, 3.0)


# --- runs ---


def run(engine, until=lambda outputs: False):
    """Step to the end, or until `until` says so."""
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return
        if until(engine.step()):
            return
    raise AssertionError("no end in sight")


def has_tokens(count):
    return lambda outputs: any(len(o.token_ids) == count for o in outputs)


def test_times_of_a_run_are_those_of_its_outputs():
    engine = Engine(FakeRunner(step_seconds=0.5), EngineConfig(num_blocks=20, max_prefill_chunk_size=16))
    engine.add_request(list(range(40)), SamplingParams(max_tokens=3), request_id="a")
    last = []
    run(engine, lambda outputs: last.extend(outputs))
    result = engine.metrics().requests["a"]
    assert result.ttft == 1.5 == last[0].first_token_time - last[0].arrival_time  # three chunks
    assert result.itl == [0.5, 0.5]
    assert result.e2e == 2.5 == last[-1].finish_time - last[-1].arrival_time


def test_a_recomputation_in_chunks_is_one_stall():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20, max_prefill_chunk_size=8, enable_prefix_caching=False))
    engine.add_request(list(range(32)), SamplingParams(max_tokens=6), request_id="a")
    run(engine, has_tokens(3))
    engine.preempt("a")
    run(engine)
    result = engine.metrics()
    assert result.requests["a"].itl == [1, 1, 5, 1, 1]  # 32 + 3 tokens in chunks of 8: five steps
    assert result.stall == 5
    assert result.recomputed_tokens == 34  # the third token is known, but was never computed


def test_without_caching_prompt_and_output_are_recomputed():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=20, enable_prefix_caching=False))
    engine.add_request(list(range(32)), SamplingParams(max_tokens=15), request_id="a")
    run(engine, has_tokens(10))
    engine.preempt("a")
    engine.step()
    (chunk,) = engine.trace.steps[-1].chunks
    assert (chunk.start_pos, chunk.num_tokens) == (0, 42)  # 32 + 10
    run(engine)
    assert engine.metrics().recomputed_tokens == 41  # the tenth token had no K/V before


def test_with_caching_only_the_part_behind_the_last_full_block_is_recomputed():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=20))
    engine.add_request(list(range(32)), SamplingParams(max_tokens=15), request_id="a")
    run(engine, has_tokens(10))
    engine.preempt("a")
    engine.step()
    (chunk,) = engine.trace.steps[-1].chunks
    assert (chunk.start_pos, chunk.num_tokens) == (32, 10)  # two full blocks are found again
    run(engine)
    result = engine.metrics()
    assert result.recomputed_tokens == 9
    assert result.prefix_hit_rate == 0  # what it finds of itself is no hit


def test_preemptions_are_counted_whoever_asked_for_them():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), request_id="a")
    engine.step()
    engine.preempt("a")
    assert engine.snapshot()["a"].num_preemptions == 1
    run(engine)
    assert engine.metrics().num_preemptions == 1


def test_a_preemption_in_a_step_that_failed_is_counted():
    def preemptions(fail_at):
        config = EngineConfig(block_size=4, num_blocks=8, max_num_batched_tokens=64)
        engine = Engine(FakeRunner(fail_at=fail_at), config)
        for request_id in ("a", "b"):
            # each writes 12 + 12 - 1 positions: 6 blocks in the end
            engine.add_request(list(range(12)), SamplingParams(max_tokens=12), request_id=request_id)
        most = 0
        while engine.has_unfinished_requests():
            try:
                engine.step()
            except RuntimeError:
                pass
            most = max([most, *(s.num_preemptions for s in engine.snapshot().values())])
        return most, engine

    count, engine = preemptions(set())
    (step,) = [step for step in engine.trace.steps if step.preempted]
    assert count == engine.metrics().num_preemptions == 1
    count, engine = preemptions({step.index})
    assert count == engine.metrics().num_preemptions == 1  # preemptions of a failed step stay


def test_hit_rate_is_the_cached_part_of_all_prompt_tokens():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=20))
    prompt = list(range(64))
    engine.generate([prompt])
    engine.generate([prompt + list(range(100, 110))])
    assert engine.metrics().prefix_hit_rate == 64 / (64 + 74)
    assert engine.trace.steps[-1].blocks_used <= 20


def test_hit_rate_of_a_whole_prompt_leaves_the_last_block_out():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=20))
    for _ in range(2):
        output = engine.generate([list(range(64))])[0]
    assert output.num_cached_tokens == 48
    assert engine.metrics().prefix_hit_rate == 48 / 128


@pytest.mark.parametrize("caching", [False, True])
def test_distinct_prompts_have_no_hits_however_often_they_are_preempted(caching):
    rng = random.Random(3)
    config = EngineConfig(
        block_size=4, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=caching
    )
    engine = Engine(FakeRunner(), config)
    for _ in range(8):
        engine.add_request([rng.randrange(32000) for _ in range(rng.randint(8, 40))], SamplingParams(max_tokens=30))
    while engine.has_unfinished_requests():
        engine.step()
        held = [i for i, s in engine.snapshot().items() if s.block_table]
        if held and rng.random() < 0.1:
            engine.preempt(rng.choice(held))
    result = engine.metrics()
    assert result.recomputed_tokens > 0
    assert result.prefix_hit_rate == 0


def test_a_request_that_ends_in_its_peak_step_shows_its_peak():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=10))
    engine.add_request(list(range(33)), SamplingParams(max_tokens=1))
    run(engine)
    assert engine.metrics().kv_use_max == engine.metrics().kv_use_mean == 0.3  # 33 tokens are 3 blocks


@pytest.mark.parametrize("seed", range(15))
def test_metrics_of_random_runs_agree_with_a_count_by_hand(seed):
    rng = random.Random(seed)
    config = random_config(rng, POLICY_NAMES[seed % len(POLICY_NAMES)])
    engine = Engine(FlakyRunner(rng, 0.02), config)
    tokens, times = {}, {}
    for _ in range(300):
        if rng.random() < 0.1:
            try:
                prompt = [rng.randrange(50) for _ in range(min(rng.randint(1, 40), engine.max_model_len - 1))]
                engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 20)))
            except ValueError:
                pass
        try:
            outputs = engine.step()
        except RuntimeError:
            outputs = []
        for output in outputs:
            tokens[output.request_id] = output.token_ids
            times.setdefault(output.request_id, []).append(engine.runner.now() - output.arrival_time)
    result = engine.metrics()
    json.dumps(result.to_dict(), allow_nan=False)
    assert result.output_tokens == sum(map(len, tokens.values()))
    assert result.num_steps == len(engine.trace.steps)
    for name, one in result.requests.items():
        own = times.get(name)
        assert one.ttft == (own[0] if own else None)
        assert one.itl == ([b - a for a, b in zip(own, own[1:], strict=False)] if own else [])
        assert one.stall == max(one.itl, default=None)
    computed = recomputed = 0
    seen = {}
    for step in engine.trace.steps:
        for chunk in step.chunks:
            positions = set(range(chunk.start_pos, chunk.start_pos + chunk.num_tokens))
            before = seen.setdefault(chunk.request, set())
            computed += len(positions)
            recomputed += len(positions & before)
            before |= positions
    assert result.computed_tokens == computed
    if config.enable_prefix_caching:  # what others had computed may count too, once it has to be computed again
        assert recomputed <= result.recomputed_tokens <= computed
    else:
        assert result.recomputed_tokens == recomputed
        assert not result.prefix_hit_rate
    if result.kv_use_max is not None:
        assert 0 < result.kv_use_mean <= result.kv_use_max <= 1

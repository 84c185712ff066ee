"""SmolLM2 with everything at once: chunks of any size, preemptions, prefix hits, a pool that is too small."""

import random

import pytest

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams
from course_lib.demo import document_text
from course_lib.slots import blocks_needed

NEW_TOKENS = 8


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    """Prompts of 20 to 150 tokens, many of which begin alike: pieces of one text from a few places on."""
    rng = random.Random(7)
    ids = tokenizer.encode(document_text())
    places = [rng.randrange(1000) for _ in range(12)]
    starts = [rng.choice(places) for _ in range(count)]
    return [ids[start : start + rng.randint(20, 150)] for start in starts]


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.long)])
def test_tokens_are_those_of_the_one_shot_run_whatever_chunks_preemptions_and_hits(smollm2, count):
    runner = ModelRunner(smollm2)
    prompts = prompts_of(runner.tokenizer, count)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    plain = EngineConfig(
        num_blocks=1024, max_num_batched_tokens=200, max_prefill_chunk_size=None, enable_prefix_caching=False, max_num_seqs=8
    )
    expected = [output.token_ids for output in Engine(runner, plain).generate(prompts, params, progress=False)]

    rng = random.Random(8)
    order = list(range(count))
    rng.shuffle(order)
    got, preemptions, hits, chunks = {}, 0, 0, 0
    while order:
        group, order = order[:10], order[10:]
        block_size = rng.choice([4, 8, 16])
        longest = max(len(prompts[i]) for i in group) + NEW_TOKENS
        config = EngineConfig(
            block_size=block_size,
            num_blocks=2 * blocks_needed(longest, block_size),  # room for two of the longest
            max_num_seqs=rng.randint(3, 8),
            max_num_batched_tokens=rng.randint(40, 160),
            max_prefill_chunk_size=rng.randint(5, 90),
            policy=rng.choice(["prefilling_first", "fair_share", "shortest_first"]),
        )
        engine = Engine(runner, config)
        engine.block_manager.shuffle_free_blocks(len(order))
        for i in group:
            engine.add_request(prompts[i], params, request_id=str(i))
        while engine.has_unfinished_requests():
            holders = engine.scheduler.prefilling + engine.scheduler.running
            if holders and rng.random() < 0.1:
                engine.preempt(rng.choice(holders).request_id)
            runner.kv_cache.poison(engine.block_manager.free_blocks())
            for output in engine.step():
                if output.finished:
                    got[int(output.request_id)] = output.token_ids
            engine.check_invariants()
        metrics = engine.metrics()
        preemptions += metrics.num_preemptions
        hits += sum(request.prefix_hit_tokens for request in engine.trace.requests.values())
        chunks += sum(chunk.kind == "prefill" for step in engine.trace.steps for chunk in step.chunks)
    assert [got[i] for i in range(count)] == expected
    assert preemptions >= count // 5 and hits >= 2 * count and chunks > 2 * count, (preemptions, hits, chunks)
    print(f"{count} prompts, {chunks} chunks, {preemptions} preemptions, {hits} prompt tokens from the prefix cache")

"""The real model behind the engine: chunked, paged and batched, it must say what transformers' own forward says."""

import copy
import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import course_lib
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import Batch
from course_lib.model import LoadedModel
from course_lib.model.attention import PagedContext
from course_lib.model.attention.reference import attend
from course_lib.model.kv_cache import KVCache
from course_lib.runners.model import ModelRunner
from course_lib.sequence import Sequence

NAN = float("nan")
PROMPT_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100]  # around one and two blocks, and a long one
NEW_TOKENS = 5


def prompt_of(length, seed=0):
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


def generate(model, token_ids, num_tokens):
    """The tokens that transformers' own generate() appends, without stopping."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(token_ids) :].tolist()


@torch.inference_mode()
def last_logits(model, token_ids):
    """Logits of the last position by transformers' own forward."""
    return model(torch.tensor([token_ids])).logits[0, -1]


def greedy(max_tokens, **params):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


def engine_of(runner, poisoned=True, shuffled=True, **settings):
    """An engine whose free blocks hold NaN, before and during the run, and are taken in random order."""
    engine = Engine(runner, EngineConfig(**settings))
    blocks = engine.block_manager
    if shuffled:
        blocks.shuffle_free_blocks(seed=1)
    if poisoned:
        runner.kv_cache.poison(blocks.free_blocks())
        engine.on_step = lambda scheduled: runner.kv_cache.poison(blocks.free_blocks())
    return engine


def chunks_of(prompt, size):
    """(start, token ids) of the chunks."""
    return [(start, prompt[start : start + size]) for start in range(0, len(prompt), size)]


class Recorder(ModelRunner):
    """Keeps the logits of every sampled row: (request id, tokens known) -> [vocab]."""

    def __init__(self, model):
        super().__init__(model)
        self.logits = {}

    def forward(self, batch):
        logits = super().forward(batch)
        for row, one in enumerate(batch.sampled):
            self.logits[one.request_id, one.known_token_count] = logits[row].clone()
        return logits


@pytest.fixture(scope="module")
def expected(tiny):
    """Prompt length -> what generate() makes of that prompt."""
    return {length: generate(tiny.model, prompt_of(length), NEW_TOKENS) for length in PROMPT_LENGTHS}


# --- run_prefill_chunk ---


def prefill(tiny, prompt, chunk, table, block_size=16, num_blocks=10, forward="auto"):
    """Run the chunks of a prompt one by one, on NaN. Returns the runner and what each chunk returned."""
    runner = ModelRunner(tiny, forward=forward)
    runner.init_kv_cache(num_blocks, block_size)
    runner.kv_cache.poison(range(num_blocks))
    one = Sequence("a", prompt)
    one.block_table = list(table)
    return runner, [runner.run_prefill_chunk(one, tokens, start) for start, tokens in chunks_of(prompt, chunk)]


def test_a_chunk_returns_logits_only_if_it_is_the_last(tiny):
    _, results = prefill(tiny, prompt_of(60), 25, [7, 3, 9, 1])
    assert results[:2] == [None, None]
    assert results[2].shape == (512,)  # one score for each token of the vocabulary


@pytest.mark.parametrize("chunk", [1, 7, 16, 25, 60])
def test_logits_of_the_last_chunk_are_those_of_one_shot_and_of_transformers(tiny, chunk):
    prompt = prompt_of(60)
    _, results = prefill(tiny, prompt, chunk, [7, 3, 9, 1])
    _, one_shot = prefill(tiny, prompt, 60, [0, 1, 2, 3])
    assert (results[-1] - one_shot[-1]).abs().max() < 1e-4
    assert (results[-1] - last_logits(tiny.model, prompt)).abs().max() < 1e-4


def test_a_chunk_writes_its_slots_and_no_other(tiny):
    # The design's example: block 16, table [7, 3, 9, 1], prompt 60, chunk 25.
    slots = [[*range(112, 128), *range(48, 57)], [*range(57, 64), *range(144, 160), 16, 17], [*range(18, 28)]]
    prompt = prompt_of(60)
    runner = ModelRunner(tiny)
    runner.init_kv_cache(10, 16)
    runner.kv_cache.poison(range(10))
    one = Sequence("a", prompt)
    one.block_table = [7, 3, 9, 1]
    written = set()
    for (start, tokens), own in zip(chunks_of(prompt, 25), slots, strict=True):
        runner.run_prefill_chunk(one, tokens, start)
        written |= set(own)
        for rows in (runner.kv_cache.k, runner.kv_cache.v):
            is_filled = ~rows.isnan().flatten(2).any(-1)  # [layers, slots]
            assert all(set(layer.nonzero().flatten().tolist()) == written for layer in is_filled)


@pytest.mark.parametrize("chunk", [1, 7, 16, 25])
def test_the_kv_rows_of_chunks_are_those_of_the_one_shot_run(tiny, chunk):
    prompt = prompt_of(60)
    table = [7, 3, 9, 1]
    slots = [table[i // 16] * 16 + i % 16 for i in range(60)]
    chunked, _ = prefill(tiny, prompt, chunk, table)
    one_shot, _ = prefill(tiny, prompt, 60, [0, 1, 2, 3])
    for ours, theirs in ((chunked.kv_cache.k, one_shot.kv_cache.k), (chunked.kv_cache.v, one_shot.kv_cache.v)):
        assert (ours[:, slots] - theirs[:, :60]).abs().max() < 1e-4


def test_the_model_sees_the_positions_of_the_whole_sequence(tiny):
    seen = []
    hook = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"][0].tolist(), kwargs["position_ids"][0].tolist())),
        with_kwargs=True,
    )
    try:
        prefill(tiny, prompt_of(100), 30, range(7), forward="transformers")
    finally:
        hook.remove()
    assert [positions for _, positions in seen] == [list(range(a, min(a + 30, 100))) for a in (0, 30, 60, 90)]
    assert [token for tokens, _ in seen for token in tokens] == prompt_of(100)


def test_a_chunk_moves_no_counter(tiny):
    runner = ModelRunner(tiny)
    runner.init_kv_cache(4, 16)
    one = Sequence("a", prompt_of(20))
    one.block_table = [2, 1]
    runner.run_prefill_chunk(one, prompt_of(20), 0)
    assert (one.cached_token_count, one.prefilled_token_count, one.status.name) == (0, 0, "WAITING")
    assert (one.block_table, one.generated_token_ids) == ([2, 1], [])


def test_a_recomputation_runs_over_prompt_and_output(tiny):
    prompt, output = prompt_of(20), prompt_of(7, seed=1)
    runner = ModelRunner(tiny)
    runner.init_kv_cache(4, 16)
    one = Sequence("a", prompt)
    one.block_table = [2, 1]
    one.generated_token_ids = output
    known = prompt + output
    assert runner.run_prefill_chunk(one, known[:20], 0) is None  # the prompt alone is not all that is known
    logits = runner.run_prefill_chunk(one, known[20:], 20)
    assert (logits - last_logits(tiny.model, known)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (lambda p: [], 0),  # empty
        (lambda p: p[:16], 1),  # another place
        (lambda p: [p[0] + 1, *p[1:16]], 0),  # other tokens
        (lambda p: p[::-1][:16], 0),  # another order
        (lambda p: [*p, 5], 0),  # more than there are
        (lambda p: p[16:] + [5], 16),
        (lambda p: p[:1], 20),  # behind the end
        (lambda p: p[-3:-1], -3),  # Python would count from the end
        (lambda p: [*p[-3:], *p[:2]], -3),
    ],
)
def test_a_chunk_that_is_not_the_known_tokens_at_its_place_is_refused(tiny, tokens, start):
    prompt = prompt_of(20)
    runner = ModelRunner(tiny)
    runner.init_kv_cache(4, 16)
    one = Sequence("a", prompt)
    one.block_table = [2, 1]
    with pytest.raises(ValueError, match=f"start_pos={start}"):
        runner.run_prefill_chunk(one, tokens(prompt), start)
    assert not runner.kv_cache.k.any() and not runner.kv_cache.v.any()  # nothing was written


# --- chunked = one shot, through the engine ---


def test_a_prompt_in_four_chunks_gives_the_logits_and_tokens_of_one_shot(tiny):
    prompt = prompt_of(100)
    _, results = prefill(tiny, prompt, 30, range(7))
    _, one_shot = prefill(tiny, prompt, 100, range(7))
    assert (results[-1] - one_shot[-1]).abs().max() < 1e-4
    engine = engine_of(ModelRunner(tiny), num_blocks=20, max_prefill_chunk_size=30)
    output = engine.generate([prompt], greedy(20))[0]
    chunks = [(c.start_pos, c.num_tokens) for s in engine.trace.steps for c in s.chunks if c.kind == "prefill"]
    assert chunks == [(0, 30), (30, 30), (60, 30), (90, 10)]
    assert output.token_ids == generate(tiny.model, prompt, 20)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 25, 33, None])
def test_any_chunk_and_block_size_gives_the_same_tokens_in_company(tiny, expected, chunk, block_size):
    engine = engine_of(
        ModelRunner(tiny), block_size=block_size, num_blocks=512 // block_size, max_prefill_chunk_size=chunk,
        max_num_batched_tokens=128, max_num_seqs=8,
    )  # fmt: skip
    outputs = engine.generate([prompt_of(length) for length in PROMPT_LENGTHS], greedy(NEW_TOKENS))
    assert {length: o.token_ids for length, o in zip(PROMPT_LENGTHS, outputs, strict=True)} == expected
    engine.check_invariants()


@pytest.mark.parametrize(("chunk", "block_size"), [(7, 4), (16, 16), (25, 16), (33, 1), (None, 16)])
def test_any_chunk_and_block_size_gives_the_same_tokens_alone(tiny, expected, chunk, block_size):
    engine = engine_of(
        ModelRunner(tiny), block_size=block_size, num_blocks=128 // block_size, max_prefill_chunk_size=chunk,
        max_num_batched_tokens=128, enable_prefix_caching=False,
    )  # fmt: skip
    for length in PROMPT_LENGTHS:
        assert engine.generate([prompt_of(length)], greedy(NEW_TOKENS))[0].token_ids == expected[length], length


def test_a_budget_smaller_than_the_work_gives_the_same_tokens(tiny, expected):
    engine = engine_of(ModelRunner(tiny), block_size=4, num_blocks=128, max_num_batched_tokens=11, max_num_seqs=8)
    outputs = engine.generate([prompt_of(length) for length in PROMPT_LENGTHS], greedy(NEW_TOKENS))
    assert [o.token_ids for o in outputs] == [expected[length] for length in PROMPT_LENGTHS]


def test_a_pool_too_small_for_all_gives_the_same_tokens_after_preemptions(tiny):
    lengths = [31, 32, 33]
    # Each needs 12 or 13 blocks of 4 in the end, 38 in all; 24 are there.
    engine = engine_of(ModelRunner(tiny), block_size=4, num_blocks=24, max_num_batched_tokens=128, max_num_seqs=8)
    outputs = engine.generate([prompt_of(length) for length in lengths], greedy(18))
    assert engine.metrics().num_preemptions > 0
    assert [o.token_ids for o in outputs] == [generate(tiny.model, prompt_of(length), 18) for length in lengths]


def test_a_prefix_hit_gives_the_same_tokens_as_a_cold_run(tiny):
    prompt = prompt_of(70)
    engine = engine_of(ModelRunner(tiny), num_blocks=40, max_prefill_chunk_size=25)
    for tail, cached in (([], 0), ([], 64), ([1, 2, 3] * 8, 64)):
        output = engine.generate([prompt + tail], greedy(8))[0]
        assert output.num_cached_tokens == cached
        assert output.token_ids == generate(tiny.model, prompt + tail, 8)


def test_a_context_that_ends_inside_a_block_reads_nothing_behind_it(tiny):
    engine = engine_of(ModelRunner(tiny), num_blocks=10)
    output = engine.generate([prompt_of(20)], greedy(20, logprobs=5))[0]
    assert output.token_ids == generate(tiny.model, prompt_of(20), 20)
    values = torch.tensor([value for logprobs in output.logprobs for value in logprobs.values()])
    assert values.isfinite().all()


def test_blocks_that_a_cancelled_request_left_dirty_do_no_harm(tiny):
    engine = engine_of(ModelRunner(tiny), poisoned=False, num_blocks=4, max_prefill_chunk_size=25)
    dirty = engine.add_request(prompt_of(60), greedy(4))
    engine.step()
    engine.step()
    engine.cancel(dirty)
    output = engine.generate([prompt_of(20)], greedy(20))[0]
    assert output.token_ids == generate(tiny.model, prompt_of(20), 20)


def test_a_mixed_batch_gives_each_request_the_logits_that_it_has_alone(tiny):
    lengths = {"a": 5, "b": 40, "c": 17, "d": 63}
    together = Recorder(tiny)
    engine = engine_of(
        together, block_size=4, num_blocks=128, max_prefill_chunk_size=16, max_num_batched_tokens=32, max_num_seqs=8
    )
    for request_id, length in lengths.items():
        engine.add_request(prompt_of(length), greedy(12), request_id=request_id)
        engine.step()  # the next one arrives when this one is on its way
    while engine.has_unfinished_requests():
        engine.step()
    kinds = [{chunk.kind for chunk in step.chunks} for step in engine.trace.steps]
    assert {"prefill", "decode"} in kinds  # it was mixed
    alone = Recorder(tiny)
    for request_id, length in lengths.items():
        engine = engine_of(alone, num_blocks=20)
        engine.add_request(prompt_of(length), greedy(12), request_id=request_id)
        while engine.has_unfinished_requests():
            engine.step()
    assert together.logits.keys() == alone.logits.keys() and len(alone.logits) == 48  # 4 × 12
    for key, logits in alone.logits.items():
        assert (together.logits[key] - logits).abs().max() < 1e-4, key


def test_a_batch_without_a_row_to_sample_is_computed_and_samples_nothing(tiny):
    runner = Recorder(tiny)
    engine = engine_of(runner, num_blocks=20, max_prefill_chunk_size=10)
    engine.add_request(prompt_of(30), greedy(2), request_id="a")
    assert engine.step() == [] and engine.step() == []
    assert runner.logits == {}
    assert len(engine.step()) == 1


# --- attention ---


def dense_attention(query, keys, values, context_len, scaling):
    """Attention of the last queries of one sequence, in float64, one query and one head at a time.

    query [n, heads, d]; keys and values [context_len, kv_heads, d].
    """
    query, keys, values = query.double(), keys.double(), values.double()
    n, heads, _ = query.shape
    group = heads // keys.shape[1]
    output = torch.zeros_like(query)
    for row, head in itertools.product(range(n), range(heads)):
        visible = context_len - n + row + 1  # itself and all before it
        k, v = keys[:visible, head // group], values[:visible, head // group]
        weights = torch.exp(scaling * (k @ query[row, head]))
        output[row, head] = (weights / weights.sum()) @ v
    return output


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_reference_attention_agrees_with_a_dense_computation(heads, kv_heads, block_size):
    generator = torch.Generator().manual_seed(heads * 100 + block_size)
    rng = random.Random(heads)
    d, scaling = 8, 0.3
    # (context, queries): whole prompts, chunks that begin anywhere, decodes, one single token
    shapes = [(20, 20), (33, 7), (17, 1), (16, 16), (1, 1), (50, 33), (31, 1)]
    num_blocks = sum(-(-context // block_size) for context, _ in shapes) + 5
    cache = KVCache(2, num_blocks, block_size, kv_heads, d, torch.float32, torch.device("cpu"))
    cache.poison(range(num_blocks))
    free = rng.sample(range(num_blocks), num_blocks)
    batch = Batch([], [], [], [], [], [0], [], [], [], block_size)
    sequences = []
    for context, n in shapes:
        table = [free.pop() for _ in range(-(-context // block_size))]
        slots = [table[i // block_size] * block_size + i % block_size for i in range(context)]
        keys, values = (torch.randn(context, kv_heads, d, generator=generator) for _ in range(2))
        cache.k[1, slots], cache.v[1, slots] = keys, values
        query = torch.randn(n, heads, d, generator=generator)
        sequences.append((query, keys, values, context))
        batch.token_ids += [0] * n
        batch.positions += range(context - n, context)
        batch.slot_mapping += slots[-n:]
        batch.block_tables.append(table)
        batch.context_lens.append(context)
        batch.query_start_loc.append(len(batch.token_ids))
    queries = torch.cat([query for query, *_ in sequences])
    output = attend(queries, 1, PagedContext(batch, cache, attend), scaling)
    assert output.shape == queries.shape
    wanted = torch.cat([dense_attention(*one, scaling) for one in sequences])
    assert (output.double() - wanted).abs().max() < 1e-5  # float32 against float64


def test_a_query_sees_itself_and_nothing_behind_it():
    cache = KVCache(1, 1, 4, 1, 2, torch.float32, torch.device("cpu"))
    cache.k[0, :, 0] = 0.0  # equal keys: each visible token gets the same weight
    cache.v[0, :, 0] = torch.tensor([[1.0, 0], [2.0, 0], [4.0, 0], [8.0, 0]])
    batch = Batch([0] * 3, [0, 1, 2], [0, 1, 2], [[0]], [3], [0, 3], [], [], [], 4)
    output = attend(torch.ones(3, 1, 2), 0, PagedContext(batch, cache, attend), 1.0)
    assert output[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, 7 / 3])


def test_the_kv_cache_stores_rows_at_their_slots():
    cache = KVCache(2, 3, 4, 1, 2, torch.float32, torch.device("cpu"))
    key = torch.arange(6.0).view(3, 1, 2)
    cache.store(1, key, key + 10, torch.tensor([11, 0, 5]))
    assert cache.k[1, [11, 0, 5]].equal(key) and cache.v[1, [11, 0, 5]].equal(key + 10)
    assert cache.k.count_nonzero() == 5 and not cache.k[0].any()  # of the six numbers one is 0
    cache.poison([1])
    assert cache.k.isnan()[:, 4:8].all() and cache.v.isnan()[:, 4:8].all()
    assert cache.k.isnan().sum() == 2 * 4 * 2  # layers, slots of the block, numbers


# --- the model is only borrowed ---


def test_the_model_is_left_as_it_was_found(tiny):
    model = tiny.model
    settings, attention = model.config.to_dict(), model.config._attn_implementation
    before = generate(model, prompt_of(20), 8)
    engine = engine_of(ModelRunner(tiny), num_blocks=20, max_prefill_chunk_size=7)
    engine.add_request(prompt_of(20), greedy(8), request_id="a")
    tokens = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.new_token_ids
        assert generate(model, prompt_of(20), 8) == before  # also between two steps
    assert tokens == before
    assert model.config._attn_implementation == attention
    assert model.config.to_dict() == settings
    assert not model.training


def test_the_models_own_attention_is_back_after_an_exception(tiny):
    attention = tiny.model.config._attn_implementation
    before = generate(tiny.model, prompt_of(20), 8)
    engine = engine_of(ModelRunner(tiny, forward="transformers"), num_blocks=20)
    request_id = engine.add_request(prompt_of(20), greedy(8))

    def fail(module, args):
        assert tiny.model.config._attn_implementation != attention  # ours is in place
        raise RuntimeError("injected")

    hook = tiny.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
    finally:
        hook.remove()
    assert tiny.model.config._attn_implementation == attention
    assert generate(tiny.model, prompt_of(20), 8) == before
    engine.check_invariants()
    assert engine.block_manager.num_used == 0
    output = list(itertools.chain.from_iterable(engine.step() for _ in range(8)))[-1]  # and the work is done again
    assert (output.request_id, output.token_ids) == (request_id, before)


def test_two_engines_over_one_model_do_not_disturb_each_other(tiny):
    engines = [engine_of(ModelRunner(tiny), num_blocks=20, max_prefill_chunk_size=c) for c in (7, 16)]
    for engine, length in zip(engines, (33, 31), strict=True):
        engine.add_request(prompt_of(length), greedy(6))
    last = [None, None]
    while any(engine.has_unfinished_requests() for engine in engines):
        for number, engine in enumerate(engines):
            for output in engine.step():
                last[number] = output.token_ids
    assert last == [generate(tiny.model, prompt_of(33), 6), generate(tiny.model, prompt_of(31), 6)]


def test_an_engine_whose_runner_went_to_another_engine_says_so(tiny):
    runner = ModelRunner(tiny)
    first = Engine(runner, EngineConfig(num_blocks=8))
    first.add_request(prompt_of(5), greedy(2))
    Engine(runner, EngineConfig(num_blocks=8))
    with pytest.raises(RuntimeError, match="newer engine"):
        first.step()


def test_an_unknown_attention_is_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"attention='flash'.*reference"):
        ModelRunner(tiny, attention="flash")


def test_the_limits_are_those_of_the_model(tiny):
    runner = ModelRunner(tiny)
    assert (runner.vocab_size, runner.max_model_len) == (512, 2048)
    engine = Engine(runner, EngineConfig(num_blocks=256))  # the pool holds 4,096
    assert engine.max_model_len == 2048
    with pytest.raises(ValueError, match=r"512.*511"):
        engine.add_request([512])


# --- the end of a sequence ---


def with_eos(tiny, in_generation_config=None, in_config=None):
    """A copy of the tiny model whose end-of-sequence tokens are these."""
    model = copy.deepcopy(tiny.model)
    model.generation_config.eos_token_id = in_generation_config
    model.config.eos_token_id = in_config
    return dataclasses.replace(tiny, model=model)


def run_with_eos(loaded, params):
    engine = engine_of(ModelRunner(loaded), num_blocks=20)
    return engine.generate([prompt_of(20)], params)[0]


def test_the_models_end_of_sequence_token_ends_a_request(tiny):
    tokens = generate(tiny.model, prompt_of(20), 8)
    eos = tokens[3]
    end = tokens.index(eos) + 1
    for loaded in (with_eos(tiny, eos), with_eos(tiny, [511, eos]), with_eos(tiny, None, eos)):
        output = run_with_eos(loaded, SamplingParams(max_tokens=8))
        assert (output.finish_reason, output.token_ids) == ("stop", tokens[:end])
        output = run_with_eos(loaded, SamplingParams(max_tokens=8, ignore_eos=True))
        assert (output.finish_reason, output.token_ids) == ("length", tokens)


def test_a_model_without_an_end_of_sequence_token_goes_on_to_the_limit(tiny):
    output = run_with_eos(with_eos(tiny), SamplingParams(max_tokens=8))
    assert (output.finish_reason, output.token_ids) == ("length", generate(tiny.model, prompt_of(20), 8))


# --- other families of models ---

SMALL = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
FAMILIES = {
    # its head size need not be hidden_size / heads, and it norms q and k
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 48, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),  # has biases in q, k and v
    # the second layer slides, the first doesn't
    "qwen2 with a window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ),
}


def random_model(family):
    """A tiny model of this family whose greedy output varies."""
    model_class, config_class, settings = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**SMALL, **settings)).eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(std=1.0 if "embed" in name else gain * weight.shape[1] ** -0.5)
            elif "bias" in name:
                weight.normal_(std=0.5)
    return LoadedModel(model, None, family, "random weights", torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_give_the_tokens_of_their_own_generate(family):
    loaded = random_model(family)
    engine = engine_of(
        ModelRunner(loaded), block_size=4, num_blocks=128, max_prefill_chunk_size=11,
        max_num_batched_tokens=32, max_num_seqs=8,
    )  # fmt: skip
    limit = engine.max_model_len
    assert limit == (48 if "sliding_window" in FAMILIES[family][2] else 256)  # within its window a model attends to all
    lengths = [1, 16, 29, 40]
    outputs = engine.generate([prompt_of(length) for length in lengths], greedy(20))
    for length, output in zip(lengths, outputs, strict=True):
        count = min(20, limit - length)
        assert output.token_ids == generate(loaded.model, prompt_of(length), count)
        assert output.finish_reason == "length"
    assert len({token for o in outputs for token in o.token_ids}) > 10  # else equal tokens would say little


# --- SmolLM2 ---

STORY = Path(course_lib.__file__).parent / "data" / "how_a_server_works.txt"


@pytest.mark.long
def test_smollm2_says_what_transformers_makes_it_say(smollm2):
    story = smollm2.tokenizer.encode(STORY.read_text(encoding="utf-8"))
    prompts = [
        story[:1050],  # more than a thousand: 29 chunks of 37
        story[300:350],
        story[700:737],  # exactly one chunk
        smollm2.tokenizer.encode("The capital of France is"),
        smollm2.tokenizer.encode("分块预填充 🙂"),
    ]
    counts = [6, 10, 10, 12, 10]
    engine = engine_of(
        ModelRunner(smollm2), block_size=16, num_blocks=128, max_prefill_chunk_size=37,
        max_num_batched_tokens=64, max_num_seqs=8,
    )  # fmt: skip
    outputs = engine.generate(prompts, [greedy(count) for count in counts])
    chunks = [c.num_tokens for s in engine.trace.steps for c in s.chunks if c.kind == "prefill" and c.request == "r0"]
    assert max(chunks) <= 37 and sum(chunks) == 1050
    for prompt, count, output in zip(prompts, counts, outputs, strict=True):
        assert output.token_ids == generate(smollm2.model, prompt, count)
        assert output.text == smollm2.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_smollm2_logits_are_those_of_transformers(smollm2):
    prompt = smollm2.tokenizer.encode(STORY.read_text(encoding="utf-8"))[:100]
    _, results = prefill(smollm2, prompt, 37, [7, 3, 9, 1, 0, 8, 2])
    assert (results[-1] - last_logits(smollm2.model, prompt)).abs().max() < 1e-4


def test_a_pool_larger_than_the_memory_is_refused(tiny):
    with pytest.raises(ValueError, match=r"num_blocks=1000000000 .* GB .* at most \d+ blocks would fit"):
        Engine(ModelRunner(tiny), EngineConfig(num_blocks=10**9, max_model_len=1024))


def test_what_is_no_runner_or_no_loaded_model_is_refused(tiny):
    with pytest.raises(TypeError, match="runner must be .* got 'smollm2'"):
        Engine("smollm2")
    with pytest.raises(TypeError, match="model must be .* got LlamaForCausalLM"):
        ModelRunner(tiny.model)

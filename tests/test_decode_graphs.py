"""The engine's way over a GPU: CUDA graphs, one copy and one read a step, a pool sized from free memory.

A graph replays the same calls on the same buffers. Without a GPU a stand-in does that: it makes the recorded call anew.
The tests marked gpu record real CUDA graphs. Either way the tokens must be those of the plain forward.
"""

import random
import warnings

import pytest
import torch

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import Batch, build_batch
from course_lib.hardware import num_blocks_for
from course_lib.model import decode_graphs, load_model, transfer
from course_lib.model.kv_cache import KVCache, blocks_that_fit, free_memory, total_memory
from course_lib.runners import FakeRunner, SimulatedRunner
from course_lib.runners import model as runner_module
from course_lib.runners.model import ModelRunner

pytest.importorskip("triton", reason="needs the package triton, which is not installed here")
from course_lib.model.attention import triton_paged as kernels

HAS_GPU = torch.cuda.is_available()
CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(not kernels.INTERPRETED, reason="the kernels are compiled here: see the gpu tests")
)
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU, and there is none here"),
        pytest.mark.skipif(HAS_GPU and kernels.INTERPRETED, reason="TRITON_INTERPRET is set: no kernel is compiled"),
    ],
)
NAN = float("nan")


class StandIn:
    """In place of a CUDA graph: replaying calls the recorded function again. Counts both."""

    def __init__(self):
        self.captures, self.replays = 0, 0

    def __call__(self, call):
        self.captures += 1
        output = call()  # as warming up does: its K/V is stored before the first replay

        def replay():
            self.replays += 1
            return output.copy_(call())  # a graph's output lies in the same memory every time

        return replay


def runner_with_graphs(loaded, **options):
    """A runner with graphs: CUDA's on a GPU, else the stand-in; and the stand-in."""
    if loaded.device.type == "cuda":
        return ModelRunner(loaded, attention="triton_paged", cuda_graphs=True, **options), None
    runner = ModelRunner(loaded, attention="triton_paged", **options)
    runner.capture = StandIn()
    return runner, runner.capture


def prompts_of(lengths):
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def tokens_of(runner, prompts, params, **settings):
    """The tokens that an engine answers with; free blocks hold NaN, and are taken in random order."""
    engine = Engine(runner, EngineConfig(**{"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings))
    blocks = engine.block_manager
    blocks.shuffle_free_blocks(seed=1)
    engine.on_step = lambda scheduled: runner.kv_cache.poison(blocks.free_blocks())
    outputs = engine.generate(prompts, params)
    engine.check_invariants()
    return [(output.token_ids, output.logprobs) for output in outputs]


def is_same(found, wanted):
    """Equal tokens, and log-probabilities equal but for rounding."""
    return [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted] and all(
        a == pytest.approx(b, abs=1e-4)
        for (_, ours), (_, theirs) in zip(found, wanted, strict=True)
        for a, b in zip(ours or [], theirs or [], strict=True)
    )


# --- graphs ---


def test_graphs_have_1_2_4_and_then_every_eighth_number_of_rows():
    assert [decode_graphs.graph_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 64, 65)] == [
        1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 64, 72,
    ]  # fmt: skip


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("forward", ["packed", "transformers"])
@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.long) for count in (3, 5))])  # 3 rows in a graph of 4, 5 in one of 8
def test_the_tokens_are_those_of_the_plain_forward_and_of_other_attention(count, forward, device):
    tiny = load_model("tiny", device=device)
    prompts, params = prompts_of([1, 33, 16, 5, 20][:count]), SamplingParams(max_tokens=4, ignore_eos=True)
    runner, stand_in = runner_with_graphs(tiny, forward=forward)
    found = tokens_of(runner, prompts, params, max_prefill_chunk_size=20)
    for name in ("triton_paged", "torch_paged"):
        plain = ModelRunner(tiny, attention=name, forward=forward, cuda_graphs=False)
        assert found == tokens_of(plain, prompts, params, max_prefill_chunk_size=20), name
    assert runner.graphs.graphs  # they were used
    if stand_in:
        assert stand_in.replays >= 3 and stand_in.captures == len(runner.graphs.graphs)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_seeded_sampling_penalties_and_log_probabilities_work_on_graphs(device):
    tiny = load_model("tiny", device=device)
    params = [
        SamplingParams(max_tokens=5, temperature=0.8, seed=3, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=5, repetition_penalty=1.5, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=1.2, seed=4, top_k=9, min_p=0.01, logprobs=0, ignore_eos=True),
    ]
    runner, _ = runner_with_graphs(tiny)
    prompts = prompts_of([9, 17, 4])
    plain = ModelRunner(tiny, attention="torch_paged")
    assert is_same(tokens_of(runner, prompts, params), tokens_of(plain, prompts, params))
    assert (4, 1) in runner.graphs.graphs


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_pool_too_small_for_all_gives_the_same_tokens(device):
    tiny = load_model("tiny", device=device)
    prompts, params = prompts_of([15, 16, 17]), SamplingParams(max_tokens=6, ignore_eos=True)
    settings = {"block_size": 4, "num_blocks": 13}  # each needs 5 or 6 blocks in the end
    runner, _ = runner_with_graphs(tiny)
    plain = ModelRunner(tiny, attention="torch_paged")
    assert tokens_of(runner, prompts, params, **settings) == tokens_of(plain, prompts, params, **settings)


def decodes(contexts, block_size=16):
    """A batch of one token per sequence, whose blocks are 0, 1, 2, … in turn."""
    batch = Batch([], [], [], [], [], [0], [], [], [], block_size)
    first = 0
    for number, context in enumerate(contexts):
        table = list(range(first, first + -(-context // block_size)))
        first += len(table)
        batch.token_ids.append(7 * number + 1)
        batch.positions.append(context - 1)
        batch.slot_mapping.append(table[-1] * block_size + (context - 1) % block_size)
        batch.block_tables.append(table)
        batch.context_lens.append(context)
        batch.query_start_loc.append(number + 1)
        batch.sample_rows.append(number)
    return batch


def filled(runner, num_blocks=80, seed=0):
    """Give the runner a cache full of random K/V."""
    runner.init_kv_cache(num_blocks, 16)
    generator = torch.Generator().manual_seed(seed)
    for rows in (runner.kv_cache.k, runner.kv_cache.v):
        rows.copy_(torch.randn(rows.shape, generator=generator))


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("forward", ["packed", "transformers"])
@torch.inference_mode()
def test_rows_that_fill_up_a_graph_read_and_write_nothing(forward, device):
    runner, _ = runner_with_graphs(load_model("tiny", device=device), forward=forward)
    filled(runner)
    full, part = decodes([20, 3, 50, 17]), decodes([40])
    with_four = runner.forward(full).clone()  # leaves its numbers in the buffer of 4 rows
    before = runner.kv_cache.k.clone(), runner.kv_cache.v.clone()
    three = decodes([20, 3, 50])
    logits = runner.forward(three).clone()
    assert list(runner.graphs.graphs) == [(4, 1)]
    assert logits.shape == (3, 512) and (logits - with_four[:3]).abs().max() < 1e-5
    for rows, old in zip((runner.kv_cache.k, runner.kv_cache.v), before, strict=True):
        assert (rows - old).abs().max() < 1e-5  # the three rows wrote what was there, the fourth wrote nothing
    # Also when all blocks but the sequence's own hold NaN.
    runner.kv_cache.poison(range(3, 80))
    assert (runner.forward(part)[0] - runner.forward_plainly(part)[0]).abs().max() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU, GPU])
@torch.inference_mode()
def test_a_longer_context_takes_a_graph_with_more_splits(device):
    runner, _ = runner_with_graphs(load_model("tiny", device=device))
    filled(runner)
    runner.graphs._num_sms = 132
    for contexts in ([40], [511], [512], [1100], [1023], [30, 700], [40]):
        batch = decodes(contexts)
        assert (runner.forward(batch) - runner.forward_plainly(batch)).abs().max() < 1e-4, contexts
    assert list(runner.graphs.graphs) == [(1, 1), (1, 2), (1, 4), (2, 2)]  # 511 and 1023 keys have one of these


def test_only_steps_in_which_all_sequences_decode_take_a_graph(tiny):
    runner, stand_in = runner_with_graphs(tiny)
    engine = Engine(runner, EngineConfig(num_blocks=32, max_prefill_chunk_size=1))
    seen = []
    engine.on_step = lambda scheduled: seen.append((runner.graphs.serves(build_batch(scheduled)), stand_in.replays))
    engine.add_request([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()  # one token of a prompt of two: nothing is sampled
    engine.step()  # the last one: like a decode
    engine.step()
    engine.add_request([3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()  # a decode, and a chunk that isn't sampled
    assert seen == [(False, 0), (True, 0), (True, 1), (False, 2)]
    assert not runner.graphs.serves(decodes([1] * (decode_graphs.MAX_ROWS + 1)))


def test_a_new_kv_cache_gets_new_graphs(tiny):
    runner, stand_in = runner_with_graphs(tiny)
    prompts, params = prompts_of([5]), SamplingParams(max_tokens=3, ignore_eos=True)
    assert tokens_of(runner, prompts, params) == tokens_of(runner, prompts, params)
    assert stand_in.captures == 2


@pytest.mark.parametrize("value", [None, "yes", 1, "True"])
def test_an_unknown_setting_of_graphs_is_refused(value, tiny):
    with pytest.raises(ValueError, match=r"cuda_graphs=.* is unknown: it must be 'auto', True or False"):
        ModelRunner(tiny, cuda_graphs=value)


def test_graphs_without_a_gpu_or_with_other_attention_are_refused_by_name(tiny):
    for name in ("torch_paged", "triton_paged"):
        with pytest.raises(ValueError, match=rf"cuda_graphs=True needs .*'triton_paged', got a model on cpu and .*'{name}'"):
            ModelRunner(tiny, attention=name, cuda_graphs=True)
    assert ModelRunner(tiny).capture is None and ModelRunner(tiny, cuda_graphs=False).capture is None


# --- one copy, one read ---


def test_lists_travel_in_one_copy_and_begin_at_multiples_of_16_bytes():
    lists = {"a": [1, 2, 3], "b": [], "c": [4], "d": [5, 6, -1, 2**40]}
    arrived = transfer.to_device(lists, torch.device("cpu"))
    assert {name: numbers.tolist() for name, numbers in arrived.items()} == lists
    assert {numbers.dtype for numbers in arrived.values()} == {torch.int64}
    assert len({numbers.untyped_storage().data_ptr() for numbers in arrived.values()}) == 1
    assert not any(numbers.data_ptr() % 16 for numbers in arrived.values() if len(numbers))
    assert transfer.to_device({"a": []}, torch.device("cpu"))["a"].tolist() == []


READS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")


@pytest.fixture
def counted(monkeypatch):
    """How often a tensor was read by the host, and how often a tensor was made of numbers on the way to the device."""
    counts = {"reads": 0, "copies": 0}

    def count(owner, name, what):
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in READS:
        count(torch.Tensor, name, "reads")
    for name in ("tensor", "frombuffer", "as_tensor"):
        count(torch, name, "copies")
    return counts


PARAMS = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "everything": {"temperature": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": 4, "seed": 1},
}


@pytest.mark.parametrize("forward", ["packed", "transformers"])
@pytest.mark.parametrize("name", ["reference", "torch_paged", "triton_paged"])
@pytest.mark.parametrize("params", PARAMS)
def test_a_step_makes_one_copy_and_one_read(params, name, forward, tiny, counted, monkeypatch):
    if name == "triton_paged" and not kernels.INTERPRETED:
        pytest.skip("the kernels are compiled here: see the gpu tests")
    if name == "triton_paged":  # the interpreter reads its arguments itself
        monkeypatch.setattr(kernels, "store_kv", lambda *args: None)
        monkeypatch.setattr(kernels, "paged_attention", lambda query, *args: query)
    engine = Engine(ModelRunner(tiny, attention=name, forward=forward), EngineConfig(num_blocks=32, max_prefill_chunk_size=16))
    of_step = []
    for length in (20, 5):
        engine.add_request(prompts_of([length])[0], SamplingParams(max_tokens=4, ignore_eos=True, **PARAMS[params]))
        counted.update(reads=0, copies=0)
        engine.step()
        of_step.append(dict(counted))
    assert of_step[0] == {"reads": 0, "copies": 1}  # a chunk that isn't sampled: nothing to read
    assert of_step[1]["reads"] == 1  # the end of the first prompt, and the whole second one
    assert params != "greedy" or of_step[1]["copies"] == 1  # parameters of sampling have copies of their own


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("forward", ["packed", "transformers"])
@pytest.mark.parametrize("name", ["reference", "torch_paged", "triton_paged"])
def test_on_a_gpu_a_forward_never_waits_and_a_step_waits_once(name, forward, device):
    runner = ModelRunner(load_model("tiny", device=device), attention=name, forward=forward)
    engine = Engine(runner, EngineConfig(num_blocks=32, max_prefill_chunk_size=16))
    waits = []

    def execute(batch, original=runner.execute, plain=runner.forward):
        with torch.inference_mode():
            plain(batch)  # kernels are compiled and graphs recorded
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                plain(batch)
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                samples = original(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append((len(batch.sample_rows), sum("synchroniz" in str(one.message) for one in caught)))
        return samples

    runner.execute = execute
    for length, params in ((20, "greedy"), (5, "drawn"), (7, "everything")):
        engine.add_request(prompts_of([length])[0], SamplingParams(max_tokens=6, ignore_eos=True, **PARAMS[params]))
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert waits[0] == (0, 0) and len(waits) > 6
    assert {count for sampled, count in waits if sampled} == {1}


# --- the size of the pool ---


def test_a_block_takes_keys_and_values_of_all_layers():
    assert KVCache.bytes_per_token(30, 3, 64, torch.bfloat16) * 16 == 2 * 30 * 3 * 64 * 2 * 16


@pytest.mark.parametrize(
    ("free", "step", "fraction", "blocks"),
    [
        (10_000, 0, 1.0, 100),
        (10_099, 0, 1.0, 100),  # a part of a block is none
        (10_000, 0, 0.9, 90),
        (10_000, 1000, 0.9, 80),  # the step takes its part of what is used, not of what is left over
        (1_000, 800, 0.9, 1),
    ],
)
def test_the_pool_takes_a_part_of_the_free_memory_less_what_a_step_takes(free, step, fraction, blocks):
    assert blocks_that_fit(100, free, step, fraction) == blocks


def test_a_memory_without_room_for_a_block_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"num_blocks=None: no block of 0.5 MB fits: 1.00 GB are free.* is 0.9.* 0.90 GB"):
        blocks_that_fit(500_000, 10**9, 899_600_000)
    for fraction in (0, -0.1, 1.01, NAN):
        with pytest.raises(ValueError, match=r"memory_fraction=.* above 0 and at most 1"):
            blocks_that_fit(100, 10_000, 0, fraction)


def test_a_pool_without_a_number_of_blocks_is_sized_by_the_runner(tiny, monkeypatch):
    monkeypatch.setattr(runner_module, "free_memory", lambda device: 10_000_000)
    runner = ModelRunner(tiny)
    engine = Engine(runner, EngineConfig(num_blocks=None, block_size=4))
    per_block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, K/V heads, head size, bytes, tokens
    assert engine.config.num_blocks == runner.kv_cache.num_blocks == int(0.9 * 10_000_000) // per_block
    assert engine.max_model_len == 2048  # the model's own limit
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].finished
    assert engine.trace.config["num_blocks"] == engine.config.num_blocks
    monkeypatch.setattr(runner_module, "free_memory", lambda device: 10**15)
    engine = Engine(runner, EngineConfig(num_blocks=None))
    assert engine.config.num_blocks == 4 * 2**30 // (4 * per_block)  # the limit of a CPU; blocks of 16 tokens
    assert runner.blocks_that_fit(EngineConfig(), memory_fraction=1e-9) == 10**6 // (4 * per_block)


def test_the_limits_hold_for_a_pool_that_was_sized(tiny, monkeypatch):
    monkeypatch.setattr(runner_module, "free_memory", lambda device: 100_000)  # 90,000 are 21 blocks of 4,096 bytes
    config = EngineConfig(num_blocks=None, block_size=8, max_model_len=169)
    with pytest.raises(ValueError, match=r"max_model_len=169 is more than the pool holds: .* = 168 tokens"):
        Engine(ModelRunner(tiny), config)
    engine = Engine(ModelRunner(tiny), EngineConfig(num_blocks=None, block_size=8, max_model_len=168))
    assert (engine.config.num_blocks, engine.max_model_len) == (21, 168)
    monkeypatch.setattr(runner_module, "free_memory", lambda device: None)
    with pytest.raises(ValueError, match=r"num_blocks=None: this system doesn't say how much memory is free"):
        Engine(ModelRunner(tiny), config)


def test_an_earlier_engine_gives_its_memory_back_before_the_pool_is_sized(tiny):
    runner = ModelRunner(tiny)
    first = Engine(runner, EngineConfig(num_blocks=8))
    old = runner.kv_cache
    first.add_request([1, 2])
    Engine(runner, EngineConfig(num_blocks=None, max_model_len=100))
    assert old.k is None and old.v is None
    with pytest.raises(RuntimeError, match="newer engine"):
        first.step()


def test_other_runners_know_their_memory_or_say_that_they_do_not():
    engine = Engine(SimulatedRunner("llama3-8b", "h100"), EngineConfig(num_blocks=None))
    assert engine.config.num_blocks == num_blocks_for("llama3-8b", "h100", 16)
    with pytest.raises(ValueError, match=r"num_blocks=None: a FakeRunner doesn't know its memory, so give it a number"):
        Engine(FakeRunner(), EngineConfig(num_blocks=None))


def test_free_memory_of_this_machine_is_part_of_all_of_it():
    assert 0 < free_memory(torch.device("cpu")) <= total_memory(torch.device("cpu"))


@pytest.mark.parametrize(("tokens", "seqs", "lengths"), [(10, 3, [4, 4, 2]), (8, 8, [1] * 8), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1])])
def test_the_largest_step_uses_up_both_budgets(tokens, seqs, lengths):
    config = EngineConfig(num_blocks=None, block_size=2, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    batch = runner_module.largest_batch(config, 100)
    assert batch.context_lens == lengths and len(batch.token_ids) == tokens and len(batch.sample_rows) == seqs
    blocks = [block for table in batch.block_tables for block in table]
    assert blocks == list(range(len(blocks)))
    assert max(runner_module.largest_batch(config, 3).context_lens) <= 3


def test_the_largest_step_runs(tiny):
    batch = runner_module.largest_batch(EngineConfig(max_num_batched_tokens=70, max_num_seqs=4), 2048)
    runner = ModelRunner(tiny)
    runner.init_kv_cache(max(map(max, batch.block_tables)) + 1, 16)
    assert len(runner.execute(batch)) == 4


@pytest.mark.parametrize("device", [GPU])
def test_a_gpu_is_filled_but_for_a_tenth_and_a_second_engine_gets_as_much(device):
    runner = ModelRunner(load_model("tiny", device=device, dtype="bfloat16"))
    config = EngineConfig(num_blocks=None, max_num_batched_tokens=2048)
    before = free_memory(runner.model.device)
    sizes = []
    for _ in range(2):
        engine = Engine(runner, config)
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"
        sizes.append(engine.config.num_blocks)
        assert 0.05 * before < free_memory(runner.model.device) < 0.15 * before
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)

"""The Triton kernels must say what the reference says in float64, for every mix of chunks and decodes.

Without a GPU they run in Triton's interpreter (conftest.py switches it on). The tests marked gpu run the same cases on
a real one: `pytest -m gpu tests/test_triton_paged.py`.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import Batch
from course_lib.model import attention, load_model
from course_lib.model.attention import PagedContext, choose_backend, plan, reference
from course_lib.model.kv_cache import KVCache
from course_lib.runners.model import ModelRunner

pytest.importorskip("triton", reason="needs the package triton, which is not installed here")
from course_lib.model.attention import triton_paged as kernels

TESTS = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not kernels.INTERPRETED, reason="the kernels are compiled here: see the gpu tests")
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU, and there is none here"),
            pytest.mark.skipif(HAS_GPU and kernels.INTERPRETED, reason="TRITON_INTERPRET is set: no kernel is compiled"),
        ],
    ),
]
# Largest error, as a part of the largest value. Half a unit in the last place of a number just above a power of two is
# 2**-12 of it in float16 and 2**-9 in bfloat16; inputs, weights and output are all rounded, and the interpreter
# cuts bfloat16 off instead of rounding it.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


class Case(NamedTuple):
    """A batch and the model that it is for."""

    sequences: list[tuple[int, int]]  # (context length, of which the last … are queries)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    splits: int | None = 1  # None: as the plan says
    layout: str = "contiguous"  # of query, key and value: see laid_out()
    dtype: torch.dtype = torch.float32


def laid_out(tensor, layout):
    """The same numbers [T, heads, head_dim], in memory as models have them."""
    tokens, heads, head_dim = tensor.shape
    if layout == "heads first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "part of a fused projection":  # q, k and v of a token side by side in one row
        row = tensor.new_full((tokens, 3 * heads * head_dim), float("nan"))
        view = row[:, heads * head_dim : 2 * heads * head_dim].view(tokens, heads, head_dim)
        view.copy_(tensor)
        return view
    if layout == "last dimension strided":
        return tensor.new_full((*tensor.shape, 2), float("nan"))[..., 0].copy_(tensor)
    assert layout == "contiguous"
    return tensor


LAYOUTS = ["contiguous", "heads first", "part of a fused projection"]


def error_of(case, device, seed=0):
    """Run store_kv and paged_attention for a case, on free slots full of NaN and shuffled block tables.

    Returns max|ours - reference| / max|reference|, the reference in float64. A number that isn't written is NaN.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, kv_heads, head_dim = case.block_size, case.kv_heads, case.head_dim
    num_blocks = sum(-(-context // size) for context, _ in case.sequences) + 3
    free = rng.sample(range(num_blocks), num_blocks)
    batch = Batch([], [], [], [], [], [0], [], [], [], size)
    cached = []  # slots that hold K/V from earlier steps
    for context, num_queries in case.sequences:
        table = [free.pop() for _ in range(-(-context // size))]
        slots = [table[i // size] * size + i % size for i in range(context)]
        cached += slots[: context - num_queries]
        batch.slot_mapping += slots[context - num_queries :]
        batch.block_tables.append(table)
        batch.context_lens.append(context)
        batch.query_start_loc.append(batch.query_start_loc[-1] + num_queries)
    num_tokens = batch.query_start_loc[-1]

    def numbers(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype)

    query, key, value = (numbers(num_tokens, heads, head_dim) for heads in (case.heads, kv_heads, kv_heads))
    oracle = KVCache(1, num_blocks, size, kv_heads, head_dim, torch.float64, torch.device("cpu"))
    oracle.poison(range(num_blocks))
    ours = KVCache(1, num_blocks, size, kv_heads, head_dim, case.dtype, torch.device(device))
    ours.poison(range(num_blocks))
    old = numbers(len(cached), kv_heads, head_dim), numbers(len(cached), kv_heads, head_dim)
    for cache in (oracle, ours):
        cache.store(0, *(kv.to(cache.k) for kv in old), torch.tensor(cached, dtype=torch.int64, device=cache.k.device))
    oracle.store(0, key.double(), value.double(), torch.tensor(batch.slot_mapping))
    wanted = reference(query.double(), 0, PagedContext(batch, oracle, reference), head_dim**-0.5)

    query, key, value = (laid_out(tensor.to(device), case.layout) for tensor in (query, key, value))
    torch.use_deterministic_algorithms(True)  # then new memory is full of NaN
    try:
        slot_mapping = torch.tensor(batch.slot_mapping, device=device)
        kernels.store_kv(key, value, ours.k[0], ours.v[0], slot_mapping)
        work = plan.make_plan(batch, case.heads, kv_heads, case.dtype, torch.device(device))
        if case.splits is not None:
            work.num_splits = case.splits
        output = kernels.paged_attention(query, ours.k[0], ours.v[0], work, head_dim**-0.5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.shape == wanted.shape and output.dtype == case.dtype and output.is_contiguous()
    for cache, exact in ((ours.k, oracle.k), (ours.v, oracle.v)):  # also: every other slot still holds NaN
        assert torch.equal(cache.cpu().double().nan_to_num(7e9), exact.nan_to_num(7e9)), case
    error = (output.cpu().double() - wanted).abs().max() / wanted.abs().max()
    return error.item()


def check(case, device, seed=0):
    error = error_of(case, device, seed)
    assert error < BOUNDS[case.dtype], f"{case} seed {seed}: error {error:.2e}"  # NaN is not smaller either


# Heads, K/V heads, head size, block size: not every combination, because on a GPU each is compiled anew (seconds).
MODELS = [
    (4, 2, 16, 16), (2, 2, 8, 1), (6, 2, 24, 4), (9, 3, 64, 16), (3, 3, 64, 32), (8, 1, 32, 2), (8, 2, 128, 16),
    (5, 1, 80, 8), (7, 1, 96, 64), (9, 1, 64, 256), (16, 1, 16, 128), (2, 1, 128, 1), (6, 3, 32, 256),
]  # fmt: skip
# For joining splits, the interpreter needs a program for each row: few rows.
SPLIT_MODELS = [(2, 1, 16, 16), (4, 1, 64, 8), (1, 1, 128, 32), (3, 1, 80, 1), (2, 1, 32, 128)]


def random_case(seed):
    """A small case whose sizes lie on and beside the edges of tiles, blocks and splits."""
    rng = random.Random(f"case {seed}")
    splits = rng.choice([1, 1, 2, 4, 8])
    heads, kv_heads, head_dim, block_size = rng.choice(MODELS if splits == 1 else SPLIT_MODELS)
    edges = [1, 1, 16, 32, 33, 64, 65, 96, 128, block_size, 2 * block_size, 3 * block_size]
    sequences = []
    for _ in range(rng.choice([1, 1, 1, 2, 3]) if splits == 1 else 1):
        context = min(260, max(1, rng.choice(edges) + rng.choice([-1, 0, 1])))
        most = min(context, 40 if splits == 1 else 2)
        num_queries = min(most, rng.choice([1, 1, 2, 10, 11, 16, 17, rng.randint(1, most)]))
        sequences.append((context, num_queries))
    return Case(sequences, heads, kv_heads, head_dim, block_size, splits, layout=rng.choice(LAYOUTS))


# --- the kernels against the reference ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [*range(8), *(pytest.param(group, marks=pytest.mark.long) for group in range(8, 24))])  # 240 cases
def test_random_batches_agree_with_the_reference(group, device):
    for seed in range(10 * group, 10 * group + 10):
        check(random_case(seed), device, seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_agrees_within_its_rounding(dtype, device):
    for seed in range(1000, 1015):
        check(random_case(seed)._replace(dtype=dtype), device, seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("edge", [16, 32, 64, 128])
def test_contexts_that_end_on_and_beside_an_edge(edge, block_size, device):
    # float32 has tiles of 64 keys for this head size, so every edge of a tile, block and split is among these
    decodes = [(edge + d, 1) for d in (-1, 0, 1)]
    chunks = [(edge + d, 10) for d in (-1, 0, 1)]
    check(Case(decodes + chunks, block_size=block_size, heads=2, kv_heads=1), device)
    check(Case(decodes, block_size=block_size, heads=2, kv_heads=1, splits=2), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_queries", [1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_chunks_of_any_size_at_any_start(num_queries, device):
    # groups of two: 8 tokens fill a tile of 16 rows, 16 one of 32 (the largest in float32)
    check(Case([(num_queries + start, num_queries) for start in (0, 1, 63, 64)]), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (9, 3), (7, 1), (8, 1), (17, 1), (40, 1)])
def test_query_heads_find_the_kv_head_that_they_share(heads, kv_heads, device):
    check(Case([(70, 1), (40, 6)], heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_alone(device):
    check(Case([(1, 1)]), device)
    check(Case([(1, 1)], splits=8), device)


@pytest.mark.parametrize("device", DEVICES)
def test_splits_without_a_key_count_for_nothing(device):
    check(Case([(10, 1)], splits=8), device)  # one tile of keys: seven parts are empty
    check(Case([(150, 1), (3, 1), (64, 1)], splits=4), device)  # some parts are empty for some of the sequences
    check(Case([(70, 10)], heads=1, kv_heads=1, splits=2), device)  # the first queries see nothing of the second part


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_do_not_overflow(device):
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(100, 1, 16, generator=generator) for _ in range(3))
    query = query[:1] * 1e4  # scores of thousands: exp() of one is infinite
    batch = Batch([], [], [], [[0]], [100], [0, 1], [], [], [], 128)
    scores = (query[0, 0].double() @ key[:, 0].double().T) * 0.25
    wanted = torch.softmax(scores, dim=0) @ value[:, 0].double()
    for splits in (1, 2):
        work = plan.make_plan(batch, 1, 1, torch.float32, torch.device(device))
        work.num_splits = splits
        output = kernels.paged_attention(query.to(device), key.to(device), value.to(device), work, 0.25)
        assert (output.cpu()[0, 0] - wanted).abs().max() < 1e-4
        assert wanted.abs().max() > 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_a_last_dimension_with_a_stride_is_read_right(device):
    check(Case([(20, 3)], layout="last dimension strided"), device)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_thousands_of_tokens(device):
    check(Case([(3000, 1), (2500, 40), (1, 1)], heads=9, kv_heads=3, head_dim=64), device)
    check(Case([(5000, 1)], heads=9, kv_heads=3, head_dim=64, splits=8), device)
    check(Case([(1025, 1025)], heads=2, kv_heads=1, block_size=1), device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_the_slot_minus_one_is_stored_nowhere(device):
    key = torch.ones(3, 2, 16, device=device)
    memory = torch.zeros(2, 8, 2, 16, device=device)
    caches = memory[:, 4:]  # what lies before them is written if -1 is taken for a slot
    kernels.store_kv(key, 2 * key, *caches, torch.tensor([-1, 2, -1], device=device))
    assert memory.sum(dim=(-1, -2)).tolist() == [[0, 0, 0, 0, 0, 0, 32, 0], [0, 0, 0, 0, 0, 0, 64, 0]]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_cache_of_more_than_two_billion_numbers(device):
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    cache = torch.empty((2**31 // 64 + 64, 1, 64), dtype=torch.bfloat16, device=device)
    slots = torch.arange(len(cache) - 64, len(cache), device=device)
    key, query = torch.randn(64, 1, 64, device=device).bfloat16(), torch.randn(1, 1, 64, device=device).bfloat16()
    kernels.store_kv(key, key, cache, cache, slots)
    batch = Batch([], [], [], [list(range(len(cache) // 16 - 4, len(cache) // 16))], [64], [0, 1], [], [], [], 16)
    output = kernels.paged_attention(query, cache, cache, plan.make_plan(batch, 1, 1, query.dtype, query.device), 0.125)
    weights = torch.softmax(query[0].double() @ key[:, 0].double().T * 0.125, dim=-1)
    assert (output[0].double() - weights @ key[:, 0].double()).abs().max() < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_host_never_waits_for_the_gpu(device):
    query = torch.randn(1, 2, 16, device=device)
    cache = torch.randn(600, 1, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    batch = Batch([], [], [], [[0] * 38], [600], [0, 1], [], [], [], 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        work = plan.make_plan(batch, 2, 1, torch.float32, query.device)
        assert work.num_splits == 2
        kernels.store_kv(query[:, :1], query[:, :1], cache, cache, slots)
        kernels.paged_attention(query, cache, cache, work, 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- the plan ---


def batch_of(sequences, block_size=16):
    batch = Batch([], [], [], [], [], [0], [], [], [], block_size)
    for context, num_queries in sequences:
        batch.block_tables.append([0] * -(-context // block_size))
        batch.context_lens.append(context)
        batch.query_start_loc.append(batch.query_start_loc[-1] + num_queries)
    return batch


def test_tiles_hold_every_token_once_and_the_longest_come_first():
    # (first row, tokens, position of the first, where its block table begins), for tiles of 5 tokens
    assert plan.make_tiles(batch_of([(20, 12), (40, 1), (3, 3)]), 5) == [
        (12, 1, 39, 2),
        (10, 2, 18, 0),
        (5, 5, 13, 0),
        (0, 5, 8, 0),
        (13, 3, 0, 5),
    ]


@pytest.mark.parametrize(
    ("programs", "max_keys", "splits"),
    [
        (3, 511, 1),  # two parts would have fewer than 256 keys each
        (3, 512, 2),
        (3, 4096, 16),
        (3, 32768, 64),  # 128 parts of 256 would be possible: 64 is the limit
        (48, 32768, 16),  # 48 × 8 are fewer than 4 × 132 programs, 48 × 16 aren't
        (527, 32768, 2),
        (528, 32768, 1),  # 4 programs for each of the 132 SMs
        (3000, 32768, 1),
    ],
)
def test_contexts_are_split_until_the_gpu_is_full_or_the_parts_are_small(programs, max_keys, splits):
    assert plan.choose_num_splits(programs, max_keys, num_sms=132) == splits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "longest", "dtype", "rows"),
    [
        (9, 3, 1, torch.bfloat16, 16),  # a decode has 3 rows; tl.dot wants 16
        (9, 3, 6, torch.bfloat16, 32),  # 18 rows
        (9, 3, 500, torch.bfloat16, 64),
        (9, 3, 500, torch.float32, 32),
        (80, 1, 1, torch.bfloat16, 128),  # a token's heads stay together
    ],
)
def test_tiles_are_as_high_as_the_longest_chunk_needs(heads, kv_heads, longest, dtype, rows):
    batch = batch_of([(600, longest), (10, 1)])
    assert plan.make_plan(batch, heads, kv_heads, dtype, torch.device("cpu")).block_m == rows


# --- the backend ---


def test_the_default_is_triton_on_a_gpu_that_has_it(monkeypatch):
    def default(device):
        return choose_backend("auto", 9, 3, 64, torch.bfloat16, torch.device(device))

    assert default("cpu") == "torch_paged"
    assert default("cuda") == default("cuda:1") == "triton_paged"
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert default("cuda") == "torch_paged"


def test_without_triton_the_error_says_what_to_do(monkeypatch, tiny):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'triton_paged' needs the package triton.*'torch_paged'"):
        ModelRunner(tiny, attention="triton_paged")


def python(code, **environment):
    """Run code in a Python of its own, without Triton's interpreter. Returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "TRITON_INTERPRET": "0", **environment}
    done = subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_is_not_imported_before_its_kernels_are_used():
    assert python(["-c", "import course_lib.model.attention, sys; print('triton' in sys.modules)"]).strip() == "False"


def test_a_cpu_without_the_interpreter_is_told_about_it():
    code = """
import torch
from course_lib.model.attention import triton_paged
try:
    triton_paged.store_kv(*[torch.zeros(1, 1, 16)] * 4, torch.zeros(1, dtype=torch.int64))
except RuntimeError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in python(["-c", code])


def test_a_type_that_the_kernels_do_not_know_is_refused():
    key = torch.zeros(1, 1, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"key is torch.float64: must be float16, bfloat16 or float32"):
        kernels.store_kv(key, key, key, key, torch.zeros(1, dtype=torch.int64))


class Layer:
    layer_idx = 0


@pytest.mark.parametrize("name", ["reference", "torch_paged", "triton_paged"])
def test_a_context_longer_than_a_sliding_window_is_refused(name):
    batch = batch_of([(40, 1)])
    batch.slot_mapping = [39]
    cache = KVCache(1, 3, 16, 1, 16, torch.float32, torch.device("cpu"))
    paged = PagedContext(batch, cache, attention.BACKENDS[name], num_heads=1)
    row = torch.ones(1, 1, 1, 16)
    with pytest.raises(NotImplementedError, match=r"window of 39 tokens.* context of 40 tokens"):
        attention.paged_attention_forward(Layer, row, row, row, None, paged=paged, sliding_window=39)
    assert not cache.k.any()
    if name != "triton_paged" or kernels.INTERPRETED:
        attention.paged_attention_forward(Layer, row, row, row, None, paged=paged, sliding_window=40)
        assert cache.k.any()


# --- the engine ---


def greedy_tokens(loaded, name, prompts, num_tokens, **settings):
    """What the engine answers with this attention; free blocks hold NaN, and are taken in random order."""
    runner = ModelRunner(loaded, attention=name)
    engine = Engine(runner, EngineConfig(**settings))
    engine.block_manager.shuffle_free_blocks(seed=1)
    engine.on_step = lambda scheduled: runner.kv_cache.poison(engine.block_manager.free_blocks())
    runner.kv_cache.poison(engine.block_manager.free_blocks())
    outputs = engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    engine.check_invariants()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (4, 16), (16, None)])
def test_the_engine_gives_the_tokens_of_the_other_backends(block_size, chunk, device):
    tiny = load_model("tiny", device=device)
    rng = random.Random(block_size)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 33, 70)]
    settings = {
        "block_size": block_size, "num_blocks": 160 // block_size, "max_prefill_chunk_size": chunk,
        "max_num_batched_tokens": 80, "max_num_seqs": 8,
    }  # fmt: skip
    ours = greedy_tokens(tiny, "triton_paged", prompts, 5, **settings)
    assert ours == greedy_tokens(tiny, "torch_paged", prompts, 5, **settings)
    assert ours == greedy_tokens(tiny, "reference", prompts, 5, **settings)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_smollm2_gives_the_tokens_of_the_other_backends(device):
    try:
        smollm2 = load_model("smollm2", device=device, dtype="float32")
    except OSError as error:
        pytest.skip(f"SmolLM2 can't be had: {error}")
    story = Path(attention.__file__).parents[2] / "data" / "how_a_server_works.txt"
    story = smollm2.tokenizer.encode(story.read_text(encoding="utf-8"))
    prompts = [story[:1050], story[300:350], story[700:737], smollm2.tokenizer.encode("The capital of France is")]
    settings = {"num_blocks": 128, "max_prefill_chunk_size": 37, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    ours = greedy_tokens(smollm2, "triton_paged", prompts, 20, **settings)
    assert ours == greedy_tokens(smollm2, "torch_paged", prompts, 20, **settings)
    assert ours == greedy_tokens(smollm2, "reference", prompts, 20, **settings)


# --- compiling for a GPU that isn't here ---


@pytest.mark.long
@pytest.mark.parametrize(("capability", "shared_memory"), [(90, 227), (80, 163)])  # KiB that a program may have
def test_the_kernels_compile_for_a_gpu(capability, shared_memory, tmp_path):
    """To machine code, by Triton and NVIDIA's assembler, which need no GPU: what the interpreter can't find out."""
    code = [str(TESTS / "compile_kernels.py"), str(capability)]
    lines = python(code, TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1").splitlines()
    compiled = [json.loads(line) for line in lines]
    assert {one["kernel"] for one in compiled} == {"store_kv_kernel", "attention_kernel", "combine_kernel"}
    for one in compiled:
        assert one["machine code"] > 0 and one["shared"] <= shared_memory * 1024, one
        if one["kernel"] == "attention_kernel":
            assert one["copies of 16 bytes"] > 0, one  # keys and values come 16 bytes a thread
            dtype, *_, tokens, _splits = one["case"]
            if dtype == "bfloat16":  # a chunk's tile is high enough for Hopper's matrix unit, a decode's isn't
                assert (one["wgmma"] > 0) == (capability == 90 and tokens > 1), one
                assert one["wgmma"] > 0 or one["mma"] > 0, one

"""The compiled CPU kernels and the packed forward: the same numbers as PyTorch in float64, and as transformers."""

import random
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config
from transformers import MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import Batch
from course_lib.model import LoadedModel, cpu_kernels
from course_lib.model.attention import PagedContext, choose_backend, cpu_paged, reference
from course_lib.model.kv_cache import KVCache
from course_lib.model.packed import CPULayer, PackedModel, can_pack, packed_copy
from course_lib.runners.model import ModelRunner
from course_lib.sequence import Sequence

KERNELS = cpu_kernels.load()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no C compiler with OpenMP here: the kernels can't be built")
CPU = torch.device("cpu")


@pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="no C compiler here")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a compiler may come without OpenMP")
def test_the_kernels_compile_wherever_there_is_a_compiler():
    assert KERNELS is not None, "the tests below would be skipped, and the engine be slow, without a word"


def error(found, expected):
    """Largest difference, relative to the largest expected value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_kernels
@pytest.mark.parametrize("k", [1, 64, 287, 288, 289, 577, 1536])  # around one and two DEPTHs
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 12, 83, 84, 85, 170])  # around a tile and around ROWS
def test_matmul_is_the_product_in_float64(m, k):
    for n in (16, 48):
        x, w, add = randn(m, k), randn(n, k, seed=1), randn(m, n, seed=2)
        expected = x.double() @ w.double().T
        packed = KERNELS.pack(w)
        assert error(KERNELS.matmul(x, packed), expected) < 1e-5
        assert error(KERNELS.matmul(x, packed, add), expected + add) < 1e-5


@needs_kernels
def test_matmul_of_no_rows_is_empty():
    assert KERNELS.matmul(randn(0, 32), KERNELS.pack(randn(16, 32))).shape == (0, 16)


def batch_of(rng, lengths, block_size, heads, kv_heads, dim):
    """A batch of (context length, query tokens), its context over NaN that nobody may read."""
    counts = [-(-context // block_size) for context, _ in lengths]
    blocks = list(range(sum(counts) + 3))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    cache = KVCache(1, sum(counts) + 3, block_size, kv_heads, dim, torch.float32, CPU)
    cache.poison(range(cache.num_blocks))
    starts = [0]
    for (context, queries), table in zip(lengths, tables, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(context)]
        cache.k[0, slots] = torch.randn(context, kv_heads, dim)
        cache.v[0, slots] = torch.randn(context, kv_heads, dim)
        starts.append(starts[-1] + queries)
    zeros = [0] * starts[-1]
    contexts = [context for context, _ in lengths]
    return Batch(zeros, zeros, zeros, tables, contexts, starts, [], [], [], block_size), cache


@needs_kernels
@pytest.mark.parametrize("seed", range(60))
def test_paged_attention_is_that_of_the_reference_in_float64(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 16])
    dim, block_size = rng.choice([16, 64, 80, 128, 256]), rng.choice([1, 4, 16, 32, 64, 128])
    edge = rng.choice([1, block_size, 2 * block_size, 32])
    lengths = []
    for _ in range(rng.randrange(1, 9)):
        context = max(1, rng.choice([edge - 1, edge, edge + 1, rng.randrange(1, 300)]))
        lengths.append((context, rng.choice([1, 1, 1, rng.randrange(1, context + 1)])))
    batch, cache = batch_of(rng, lengths, block_size, kv_heads * group, kv_heads, dim)
    query = torch.randn(batch.query_start_loc[-1], kv_heads * group + 5, dim)[:, : kv_heads * group] * 3  # rows apart
    found = cpu_paged.attend(query, 0, PagedContext(batch, cache, None), dim**-0.5)
    cache.k, cache.v = cache.k.double(), cache.v.double()
    expected = reference(query.double(), 0, PagedContext(batch, cache, None), dim**-0.5)
    assert error(found, expected) < 1e-5


@needs_kernels
def test_scores_far_apart_do_not_overflow():
    batch, cache = batch_of(random.Random(0), [(100, 1)], 16, 2, 2, 64)
    query = torch.randn(1, 2, 64) * 1000
    found = cpu_paged.attend(query, 0, PagedContext(batch, cache, None), 1.0)
    cache.k, cache.v = cache.k.double(), cache.v.double()
    expected = reference(query.double(), 0, PagedContext(batch, cache, None), 1.0)
    assert error(found, expected) < 1e-4


# --- the packed forward ---

SMALL = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256,
)  # fmt: skip
FAMILIES = [
    (LlamaForCausalLM, LlamaConfig(**SMALL)),
    (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, tie_word_embeddings=True)),
    (LlamaForCausalLM, LlamaConfig(**SMALL | {"vocab_size": 161, "head_dim": 32})),  # no whole panels; heads apart
    (LlamaForCausalLM, LlamaConfig(**SMALL | {"num_attention_heads": 8})),  # head_dim 8: attention by PyTorch
    (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
    (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
]


def model_of(family):
    torch.manual_seed(1)
    model = family[0](family[1]).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.copy_(torch.randn(weight.shape) * (0.3 if weight.dim() == 2 else 0.2) + (weight.dim() == 1))
    return LoadedModel(model, None, "small", "made here", CPU)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0].__name__)
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_the_packed_forward_gives_the_models_own_logits(family, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(cpu_kernels, "load", lambda: None)
    loaded = model_of(family)
    assert can_pack(loaded.model)
    runners = [ModelRunner(loaded, forward=forward) for forward in ("packed", "transformers")]
    fits = family[1].vocab_size % 16 == 0 and not getattr(family[1], "attention_bias", False)
    assert isinstance(runners[0].packed.layers[0], CPULayer) == (kernels and fits)
    engines = [Engine(r, EngineConfig(num_blocks=64, block_size=4, max_prefill_chunk_size=7)) for r in runners]
    for engine in engines:
        engine.runner.kv_cache.poison(engine.block_manager.free_blocks())
    seen = [[], []]
    for runner, rows in zip(runners, seen, strict=True):
        plain = runner.forward

        def forward(batch, plain=plain, rows=rows):
            rows.append(plain(batch))
            return rows[-1]

        runner.forward = forward
    prompts = [[(7 * i + j * j) % 160 for j in range(n)] for i, n in enumerate((1, 5, 17, 30))]
    tokens = [
        [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))]
        for engine in engines
    ]
    assert tokens[0] == tokens[1]
    for packed, own in zip(*seen, strict=True):
        assert packed.shape == own.shape
        if len(own):
            assert error(packed, own.double()) < 1e-5


@needs_kernels
def test_gates_far_from_zero_do_not_overflow(monkeypatch):
    loaded = model_of(FAMILIES[0])
    for layer in loaded.model.model.layers:
        layer.mlp.gate_proj.weight.mul_(100)  # exp(-gate) leaves float32's range
    for model in (loaded.model, model_of(FAMILIES[0]).model):
        runner = ModelRunner(LoadedModel(model, None, "small", "made here", CPU), forward="packed")
        runner.init_kv_cache(4, 16)
        token_ids = [3, 1, 4, 1, 5, 9]
        one = Sequence("a", token_ids)
        one.block_table = [2]
        own = model(torch.tensor([token_ids])).logits[0, -1]
        assert error(runner.run_prefill_chunk(one, token_ids, 0), own.double()) < 1e-5


def test_a_model_is_packed_once(tiny):
    assert ModelRunner(tiny).packed is ModelRunner(tiny).packed is packed_copy(tiny.model)
    assert ModelRunner(tiny, forward="transformers").packed is None


def test_what_cannot_be_had_is_refused_with_the_reason(tiny, monkeypatch):
    with pytest.raises(ValueError, match=r"forward='fast'.*'packed'"):
        ModelRunner(tiny, forward="fast")
    monkeypatch.setattr(tiny.model.config, "model_type", "gpt2")
    assert ModelRunner(tiny).packed is None  # "auto" takes the model's own forward
    with pytest.raises(ValueError, match=r"model_type='gpt2'.*llama"):
        PackedModel(tiny.model)
    monkeypatch.setattr(cpu_kernels, "load", lambda: None)
    assert choose_backend("auto", 4, 2, 16, torch.float32, CPU) == "torch_paged"
    with pytest.raises(ValueError, match="'cpu_paged' can't be used here.*C compiler"):
        ModelRunner(tiny, attention="cpu_paged")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 16), torch.bfloat16), ((4, 2, 24), torch.float32), ((34, 2, 64), torch.float32)]
)
def test_other_models_get_pytorchs_attention(shape, dtype):
    assert choose_backend("auto", *shape, dtype, CPU) == "torch_paged"


def test_without_a_working_compiler_there_are_no_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path))
    for compiler in ("/does/not/exist", "false"):
        monkeypatch.setenv("CC", compiler)
        cpu_kernels.load.cache_clear()
        try:
            assert cpu_kernels.load() is None
        finally:
            cpu_kernels.load.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


@needs_kernels
def test_the_library_is_built_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path))
    built = cpu_kernels._build(cpu_kernels.find_compiler())
    assert [path.name for path in tmp_path.rglob("*.*")] == [built.name]
    monkeypatch.setattr(cpu_kernels.subprocess, "run", None)  # a second build would need it
    assert cpu_kernels._build(cpu_kernels.find_compiler()) == built

"""What the GPU kernels take in time, beside what the machine can do and what other libraries take.

Used by `python -m course_lib gpu-check`. The functions *_rows give rows of its report as dicts: `who` was measured,
`seconds`, and the fewest `bytes` and `flops` with which it could be done; or why there is no time.
"""

from __future__ import annotations

import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..batch import Batch
from .attention import plan, triton_paged

SEED = 0
REPEATS = 25
BLOCK_SIZE = 16


class Timer:
    """Median seconds of a call. On a GPU by events on the device, the L2 cache emptied before each run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            # Several times the L2 cache, and filling it takes long enough for the host to get ahead of the GPU:
            # what a launch costs the host is then not in the times.
            size = min(2**30, torch.cuda.get_device_properties(device).total_memory // 16)
            self.flush = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        for _ in range(3):
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for begin, end in events:
            self.flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


# --- attention ---


class Work:
    """Random queries, K/V and block tables of a shape, in one layer's cache."""

    def __init__(self, groups, heads, kv_heads, head_dim, dtype, device) -> None:
        self.groups, self.heads, self.kv_heads, self.head_dim = groups, heads, kv_heads, head_dim
        rng = random.Random(SEED)
        torch.manual_seed(SEED)
        self.batch = Batch([], [], [], [], [], [0], [], [], [], BLOCK_SIZE)
        sequences = [(context, queries) for count, context, queries in groups for _ in range(count)]
        num_blocks = sum(-(-context // BLOCK_SIZE) for context, _ in sequences)
        free = rng.sample(range(num_blocks), num_blocks)
        for context, queries in sequences:
            self.batch.block_tables.append([free.pop() for _ in range(-(-context // BLOCK_SIZE))])
            self.batch.context_lens.append(context)
            self.batch.query_start_loc.append(self.batch.query_start_loc[-1] + queries)
        options = {"dtype": dtype, "device": device}
        self.num_tokens = self.batch.query_start_loc[-1]
        self.query = torch.randn(self.num_tokens, heads, head_dim, **options)
        self.keys, self.values = (torch.randn(num_blocks * BLOCK_SIZE, kv_heads, head_dim, **options) for _ in range(2))
        self.scaling = head_dim**-0.5

    @staticmethod
    def memory(groups, heads, kv_heads, head_dim, dtype) -> int:
        """Bytes of the cache and of a second copy of it, gathered for the peers."""
        return 2 * sum(count * context for count, context, _ in groups) * 2 * kv_heads * head_dim * dtype.itemsize

    @property
    def bytes(self) -> int:
        """The fewest that can be moved: each key and value once, queries in, results out."""
        kv = sum(count * context for count, context, _ in self.groups) * 2 * self.kv_heads * self.head_dim
        return (kv + 2 * self.query.numel()) * self.query.element_size()

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each number of each key and each value that a query may look at."""
        pairs = sum(count * (n * context - n * (n - 1) // 2) for count, context, n in self.groups)
        return 4 * pairs * self.heads * self.head_dim

    def gathered(self):
        """Each group as query [count, n, heads, head_dim], key and value [count, context, kv_heads, head_dim]."""
        row = s = 0
        for count, context, n in self.groups:
            query = self.query[row : row + count * n].unflatten(0, (count, n))
            tables = torch.tensor(self.batch.block_tables[s : s + count], device=self.query.device)
            slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=tables.device)).flatten(1)
            yield query, self.keys[slots[:, :context]], self.values[slots[:, :context]]
            row, s = row + count * n, s + count

    def tables(self):
        """Padded block tables [S, most], context lengths [S] and query starts [S + 1], int32 on the device."""
        most = max(map(len, self.batch.block_tables))
        padded = [table + [0] * (most - len(table)) for table in self.batch.block_tables]
        numbers = (padded, self.batch.context_lens, self.batch.query_start_loc)
        return [torch.tensor(n, dtype=torch.int32, device=self.query.device) for n in numbers]

    def paged(self):
        """The caches as [blocks, BLOCK_SIZE, kv_heads, head_dim]."""
        return self.keys.unflatten(0, (-1, BLOCK_SIZE)), self.values.unflatten(0, (-1, BLOCK_SIZE))


# Each peer: Work -> a call that computes the same attention and returns the parts of [T, heads, head_dim] in order.
# Where a peer wants K/V gathered, gathering is not in its time.


def ours(work: Work, num_splits: int | None = None, max_rows: int = plan.MAX_ROWS):
    usual, plan.MAX_ROWS = plan.MAX_ROWS, max_rows
    try:
        programs = plan.make_plan(work.batch, work.heads, work.kv_heads, work.query.dtype, work.query.device)
    finally:
        plan.MAX_ROWS = usual
    programs.num_splits = num_splits or programs.num_splits
    return lambda: [triton_paged.paged_attention(work.query, work.keys, work.values, programs, work.scaling)]


def sdpa(work: Work):
    from torch.nn.attention.bias import causal_lower_right

    groups = [[tensor.transpose(1, 2) for tensor in group] for group in work.gathered()]
    masks = [causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None for q, k, _ in groups]

    def call():
        return [
            scaled_dot_product_attention(*group, attn_mask=mask, scale=work.scaling, enable_gqa=True).transpose(1, 2)
            for group, mask in zip(groups, masks, strict=True)
        ]

    return call


def flex_attention(work: Work):
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    on_gpu = work.query.is_cuda
    compiled = torch.compile(flex, dynamic=False) if on_gpu else flex
    groups, masks = [[tensor.transpose(1, 2) for tensor in group] for group in work.gathered()], []
    for query, key, _ in groups:
        n, context = query.shape[2], key.shape[2]

        def is_visible(b, h, q, k, first=context - n):
            return q + first >= k

        masks.append(create_block_mask(is_visible, None, None, n, context, device=query.device) if n > 1 else None)

    def call():
        return [
            compiled(*group, block_mask=mask, scale=work.scaling, enable_gqa=True).transpose(1, 2)
            for group, mask in zip(groups, masks, strict=True)
        ]

    return call


def flash_attn(work: Work):
    from flash_attn import flash_attn_func

    groups = list(work.gathered())
    return lambda: [flash_attn_func(*group, softmax_scale=work.scaling, causal=True) for group in groups]


def flashinfer(work: Work):
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    batch, device = work.batch, work.query.device
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    ends = [0]
    for table in batch.block_tables:
        ends.append(ends[-1] + len(table))
    pages = [block for table in batch.block_tables for block in table]
    last = [(context - 1) % BLOCK_SIZE + 1 for context in batch.context_lens]
    ends, pages, last, starts = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in (ends, pages, last, batch.query_start_loc)
    )
    sizes = (work.heads, work.kv_heads, work.head_dim, BLOCK_SIZE)
    types = {"q_data_type": work.query.dtype, "kv_data_type": work.query.dtype, "sm_scale": work.scaling}
    if all(n == 1 for _, _, n in work.groups):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(ends, pages, last, *sizes, **types)
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts, ends, pages, last, *sizes, causal=True, **types)
    return lambda: [wrapper.run(work.query, work.paged())]


def vllm(work: Work):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tables, context_lens, starts = work.tables()
    keys, values = work.paged()
    longest, most = max(n for _, _, n in work.groups), max(work.batch.context_lens)
    return lambda: [
        flash_attn_varlen_func(
            q=work.query, k=keys, v=values, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=most,
            seqused_k=context_lens, softmax_scale=work.scaling, causal=True, block_table=tables,
        )
    ]  # fmt: skip


PEERS = {"SDPA, gathered": sdpa, "FlexAttention, gathered": flex_attention, "flash-attn, gathered": flash_attn}
PEERS |= {"FlashInfer, paged": flashinfer, "vLLM's flash-attn, paged": vllm}


def attention_rows(timer, dtype, sizes, groups, with_flex) -> Iterator[dict]:
    memory = Work.memory(groups, *sizes, dtype)
    if timer.device.type == "cuda" and memory > 0.7 * torch.cuda.mem_get_info()[0]:
        yield {"who": "ours", "left out": f"needs {memory / 1e9:.0f} GB"}
        return
    work = Work(groups, *sizes, dtype, timer.device)
    floor = {"bytes": work.bytes, "flops": work.flops}
    call = ours(work)
    output = call()[0].clone()
    yield {"who": "ours", "seconds": timer(call), **floor}
    for who, peer in PEERS.items():
        if peer is flex_attention and not with_flex:
            continue
        try:
            call = peer(work)
            theirs = torch.cat([part.reshape(-1, *output.shape[1:]) for part in call()])
            error = ((output.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()
            yield {"who": who, "seconds": timer(call), **floor, "difference": error}
        except ImportError as problem:
            yield {"who": who, "absent": f"{problem}"}
        except Exception as problem:  # whatever a peer trips over, the rest goes on
            if is_fatal(problem):
                raise
            yield {"who": who, "error": words(problem)}
        call = theirs = None  # gives the gathered K/V back


def variant_rows(timer, dtype, sizes, groups, variants) -> Iterator[dict]:
    work = Work(groups, *sizes, dtype, timer.device)
    for name, values in variants.items():
        for value in values:
            who = f"ours, {name.replace('_', ' ')} {value}"
            yield {"who": who, "seconds": timer(ours(work, **{name: value})), "bytes": work.bytes, "flops": work.flops}


# --- the rest ---


def ceiling_rows(timer, tiny: bool) -> Iterator[dict]:
    """What the machine can do: copying memory, multiplying random bfloat16 matrices."""
    source = torch.empty(2**16 if tiny else 2**31, dtype=torch.int8, device=timer.device).random_()
    target = torch.empty_like(source)
    yield {"who": "copy", "seconds": timer(lambda: target.copy_(source)), "bytes": 2 * source.numel()}
    source = target = None  # gives the memory back
    size = 64 if tiny else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=timer.device) for _ in range(2))
    yield {"who": "bfloat16 matrix product", "seconds": timer(lambda: a @ b), "flops": 2 * size**3}


def store_rows(timer, dtype, kv_heads, head_dim, num_tokens) -> Iterator[dict]:
    options = {"dtype": dtype, "device": timer.device}
    key, value = (torch.randn(num_tokens, kv_heads, head_dim, **options) for _ in range(2))
    num_slots = 4 * num_tokens + 64
    caches = [torch.full((num_slots, kv_heads, head_dim), float("nan"), **options) for _ in range(4)]
    slots = torch.tensor(random.Random(SEED).sample(range(num_slots), num_tokens), device=timer.device)
    moved = {"bytes": 4 * key.numel() * key.element_size() + slots.numel() * slots.element_size(), "flops": 0}

    def index_put():
        caches[2][slots], caches[3][slots] = key, value

    index_put()
    triton_paged.store_kv(key, value, *caches[:2], slots)
    same = all(torch.equal(caches[i].nan_to_num(7), caches[i + 2].nan_to_num(7)) for i in (0, 1))
    store = timer(lambda: triton_paged.store_kv(key, value, *caches[:2], slots))
    yield {"who": "ours", "seconds": store, **moved}
    yield {"who": "PyTorch's index_put", "seconds": timer(index_put), **moved, "difference": 0.0 if same else 1.0}


def machine(dry_run: bool) -> dict:
    """Where the numbers come from."""
    import triton

    found = {
        "platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "seed": SEED, "repeats": REPEATS,
    }  # fmt: skip
    if not dry_run:
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "multiprocessors": gpu.multi_processor_count,
            "memory": gpu.total_memory, "l2": getattr(gpu, "L2_cache_size", None),
        }  # fmt: skip
    return found


def words(problem: Exception) -> str:
    """An exception in one short line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]


def is_fatal(problem: Exception) -> bool:
    """Whether this process can't use the GPU any more."""
    return not isinstance(problem, torch.OutOfMemoryError) and bool(
        re.search(r"CUDA error|Triton Error \[CUDA\]", str(problem))
    )


def give_memory_back() -> None:
    """What torch keeps of it for later; no-op without a GPU."""
    torch.cuda.empty_cache()

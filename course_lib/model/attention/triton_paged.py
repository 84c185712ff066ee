"""Paged attention for GPUs: our own kernels in Triton, to be read from top to bottom.

A kernel is a function that the GPU runs many times at once. Each run is a *program*, with a number of its own
(tl.program_id), and works on *tiles*: small arrays whose sizes are powers of two and known when the kernel is compiled
(tl.constexpr). tl.arange makes a row of numbers; pointer + offsets is a tile of addresses; tl.load and tl.store move a
tile between the GPU's memory and the chip; tl.dot multiplies two. Memory is slow and the chip is fast: so a program
reads its keys and values once, keeps the scores to itself and writes nothing but its result.

With TRITON_INTERPRET=1, set before triton is imported, all this runs on a CPU, slowly, in NumPy.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .plan import Plan, tile_size

TILE_BYTES = 16 * 1024  # of a tile of keys, at most: several must fit into the chip's shared memory


@triton.jit
def store_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Cached K/V: one program copies K and V of one token, a tile [HEADS_TILE, D] each, to the token's slot.

    key, value [T, kv_heads, head_dim], any strides but the last; caches [slots, kv_heads, head_dim]; slot_mapping [T],
    where -1 means: nowhere (a row that only fills up a batch).
    """
    token = tl.program_id(0).to(tl.int64)  # 64 bits: token × stride may pass 2**31
    head, d = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, D)[None, :]
    is_in = (head < KV_HEADS) & (d < HEAD_DIM)  # a tile's sizes are powers of two, a model's needn't be
    k = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=is_in)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + d, mask=is_in)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        target = (slot * KV_HEADS + head) * HEAD_DIM + d
        tl.store(key_cache + target, k, mask=is_in)
        tl.store(value_cache + target, v, mask=is_in)


# What one program of attention_kernel computes, for a model in which two query heads share a K/V head:
#
#                      positions of the keys ->
#                      0 … 63      64 … 127    128 …
#     token 70 head 0  x x x x x   x x - - -              Rows: some tokens' queries, all heads that share the K/V head.
#     token 70 head 1  x x x x x   x x - - -              Columns: keys, a tile of BLOCK_N at a time, each key found
#     token 71 head 0  x x x x x   x x x - -   not        through the block table (and its value with it).
#     token 71 head 1  x x x x x   x x x - -   loaded     x: may look.  -: lies behind the query, its weight is 0.
#     token 72 head 0  x x x x x   x x x x -              Tiles behind the last query are not even loaded.
#     token 72 head 1  x x x x x   x x x x -              A decode is the same with one token: rows 0 and 1 alone.
#
# Softmax divides by a sum over all keys, but the keys come tile by tile. So each row keeps, of what it has seen: the
# largest score, the sum of the weights 2**(score - largest), and the sum of weight × value. If a tile brings a larger
# score, both sums shrink to fit it. (Online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022.)


@triton.jit
def attention_kernel(
    query, key_cache, value_cache, output, lse, tiles, block_tables,
    scale, num_tokens, query_token_stride, query_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, NUM_SPLITS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Paged attention: one program is one tile of queries, one K/V head, one part of the keys. Grid (tiles × kv_heads, splits).

    query [T, heads, head_dim]; caches as above; tiles and block_tables: see plan.py; scale: scaling × log2(e);
    output [splits, T, heads, head_dim]; lse [splits, T, heads], written if splits > 1; DOT: the type that is multiplied.
    """
    # 1. What it is for: num_queries tokens of one sequence, from row first_row of the batch and position first_pos on.
    pid, split = tl.program_id(0), tl.program_id(1)
    tile, kv_head = tiles + pid // KV_HEADS * 4, pid % KV_HEADS
    first_row, num_queries = tl.load(tile).to(tl.int32), tl.load(tile + 1).to(tl.int32)
    first_pos = tl.load(tile + 2).to(tl.int32)
    block_table = block_tables + tl.load(tile + 3)

    # 2. Its queries, [BLOCK_M, D]. Rows beyond the tokens are loaded as 0 and never stored.
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, D)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_query, is_d = (token < num_queries)[:, None], (d < HEAD_DIM)[None, :]
    batch_row = (first_row + token).to(tl.int64)
    query_at = batch_row * query_token_stride + head * query_head_stride
    q = tl.load(query + query_at[:, None] + d[None, :], mask=is_query & is_d, other=0.0).to(DOT)
    query_pos = first_pos + token

    # 3. Its part of the keys: positions begin … end - 1 of the num_keys that its last query may look at.
    num_keys = first_pos + num_queries
    tiles_per_split = (num_keys + NUM_SPLITS * BLOCK_N - 1) // (NUM_SPLITS * BLOCK_N)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, num_keys)

    # 4. The online softmax. The maximum starts low but finite: (-inf) - (-inf) would be NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, D], 0.0, tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_pos = start + tl.arange(0, BLOCK_N)
        is_key = key_pos < end  # the slots behind it aren't this sequence's: they may hold anything, NaN too
        block = tl.load(block_table + key_pos // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key_pos % BLOCK_SIZE
        kv_at = ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + d[None, :]
        is_kv = is_key[:, None] & is_d
        k = tl.load(key_cache + kv_at, mask=is_kv, other=0.0).to(DOT)  # [BLOCK_N, D]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        scores = tl.where(key_pos[None, :] <= query_pos[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        v = tl.load(value_cache + kv_at, mask=is_kv, other=0.0).to(DOT)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max

    # 5. The result. A row that saw no key of this part keeps the maximum -1e30, so the part gets no weight later on.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = (acc / row_sum[:, None]).to(output.dtype.element_ty)
    out_row = (split.to(tl.int64) * num_tokens + batch_row) * HEADS + head
    tl.store(output + (out_row * HEAD_DIM)[:, None] + d[None, :], out, mask=is_query & is_d)
    if NUM_SPLITS > 1:  # lse: the log2 of the sum of 2**score over the part
        tl.store(lse + out_row, row_max + tl.log2(row_sum), mask=token < num_queries)


@triton.jit
def combine_kernel(parts, lse, output, num_rows, HEAD_DIM: tl.constexpr, D: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """One program joins the parts of one row (one head of one token): the mean of them, weighted by 2**lse.

    parts [splits, T × heads, head_dim] and lse [splits, T × heads], both float32; output [T × heads, head_dim].
    """
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    part = tl.arange(0, NUM_SPLITS).to(tl.int64) * num_rows + row
    part_lse = tl.load(lse + part)
    weights = tl.exp2(part_lse - tl.max(part_lse, axis=0))
    values = tl.load(parts + (part * HEAD_DIM)[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(output + row * HEAD_DIM + d, out.to(output.dtype.element_ty), mask=d < HEAD_DIM)


# --- launching ---

INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)

# What tl.dot gets. The interpreter knows no bfloat16: it would multiply the bits as integers.
DOT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16, torch.float32: tl.float32}


def readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, its last dimension contiguous; ValueError for a wrong type, RuntimeError where no kernel can run."""
    if tensor.dtype not in DOT_TYPES:
        raise ValueError(f"{name} is {tensor.dtype}: must be float16, bfloat16 or float32")
    if not (tensor.is_cuda or INTERPRETED):
        raise RuntimeError(
            f"{name} is on {tensor.device}: our Triton kernels need a GPU, or Triton's interpreter "
            f"(the environment variable TRITON_INTERPRET=1, set before triton is imported)"
        )
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def store_kv(key, value, key_cache, value_cache, slot_mapping) -> None:
    """Write key and value [T, kv_heads, head_dim] to the rows slot_mapping [T] of the caches [slots, kv_heads, head_dim]."""
    key, value = readable(key, "key"), readable(value, "value")
    num_tokens, kv_heads, head_dim = key.shape
    store_kv_kernel[(num_tokens,)](
        key, value, key_cache, value_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEADS_TILE=triton.next_power_of_2(kv_heads), D=tile_size(head_dim),
    )  # fmt: skip


def paged_attention(query, key_cache, value_cache, plan: Plan, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim], caches [slots, kv_heads, head_dim] -> output [T, heads, head_dim]."""
    query = readable(query, "query")
    num_tokens, heads, head_dim = query.shape
    kv_heads, num_splits, num_rows = key_cache.shape[1], plan.num_splits, num_tokens * heads
    output = parts = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = None
    if num_splits > 1:
        parts = query.new_empty((num_splits, num_rows, head_dim), dtype=torch.float32)
        lse = query.new_empty((num_splits, num_rows), dtype=torch.float32)
    D = tile_size(head_dim)  # of a head of 80 the tile's last 48 numbers are 0
    BLOCK_N = min(64, max(16, TILE_BYTES // (D * query.element_size())))
    attention_kernel[(plan.num_tiles * kv_heads, num_splits)](
        query, key_cache, value_cache, parts, lse, plan.tiles, plan.block_tables,
        scaling * math.log2(math.e), num_tokens, query.stride(0), query.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=plan.block_size,
        BLOCK_M=plan.block_m, BLOCK_N=BLOCK_N, D=D, NUM_SPLITS=num_splits, DOT=DOT_TYPES[query.dtype],
        num_warps=max(4, plan.block_m // 16), num_stages=5 if BLOCK_N * D * query.element_size() < TILE_BYTES else 3,
    )  # fmt: skip
    if num_splits > 1:
        combine_kernel[(num_rows,)](parts, lse, output, num_rows, HEAD_DIM=head_dim, D=D, NUM_SPLITS=num_splits)
    return output


def attend(query: torch.Tensor, layer: int, paged, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim]. `paged`: the step's PagedAttention, with a plan."""
    keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
    return paged_attention(query, keys, values, paged.plan, scaling)

"""Paged attention on a CPU by our own compiled kernels (cpu_kernels.c).

A decode has one query per sequence: its K/V is read where it lies, since gathering it first would
cost more than the attention itself. A chunk has many queries per key: there the gather hardly
counts, and what matters is that scores and outputs are fast matrix products.
"""

from __future__ import annotations

import torch

from .. import cpu_kernels

NEEDS = (
    "it needs a model in float32 on a CPU, a head_dim that is a multiple of 16 and at most "
    f"{cpu_kernels.MAX_HEAD_DIM}, at most {cpu_kernels.MAX_GROUP} query heads per K/V head, and a C compiler with OpenMP"
)


def is_available(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Can the compiled kernel serve such a model here?"""
    fits = num_heads // num_kv_heads <= cpu_kernels.MAX_GROUP and head_dim % 16 == 0 and head_dim <= cpu_kernels.MAX_HEAD_DIM
    return fits and dtype == torch.float32 and device.type == "cpu" and cpu_kernels.load() is not None


def attend(query: torch.Tensor, layer: int, paged, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim]. `paged`: the step's PagedContext."""
    keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
    output = query.new_empty(query.shape)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    kernels, decodes, block_size = cpu_kernels.load(), paged.decodes, paged.kv_cache.block_size
    if decodes.num_sequences:
        kernels.paged_decode(query, keys, values, output, decodes, block_size, scaling)
    for s in paged.chunks:
        rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
        table, context_len = paged.block_table(s), paged.context_lens[s]
        kernels.paged_chunk(query[rows], keys, values, output[rows], table, context_len, block_size, scaling)
    return output

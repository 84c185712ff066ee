"""Paged attention with PyTorch's own fused kernel, on any device.

The same gather as in reference.py, but the scores of a long prompt are never written to memory in
full: scaled_dot_product_attention works through them in tiles.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(query: torch.Tensor, layer: int, paged, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim]. `paged`: the step's PagedContext."""
    keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
    output = query.new_empty(query.shape)
    for s, context_len in enumerate(paged.context_lens):
        rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
        slots = paged.context_slots(s)
        is_whole = rows.stop - rows.start == context_len  # nothing was cached before
        output[rows] = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys.index_select(0, slots).transpose(0, 1)[None],
            values.index_select(0, slots).transpose(0, 1)[None],
            attn_mask=None if is_whole else paged.mask(s, query.dtype),
            is_causal=is_whole,
            scale=scaling,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return output

"""Paged attention to read: per sequence, gather, mask, softmax. The oracle of the faster backends.

A query at position p sees the keys at positions 0 … p of its own sequence: all earlier chunks,
and of its own chunk what comes before it and itself. Because keys are gathered in the order of
their positions, that one comparison is the whole mask, for a whole prompt, a chunk and a decode.
"""

from __future__ import annotations

import torch


def attend(query: torch.Tensor, layer: int, paged, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim]. `paged`: the step's PagedContext."""
    keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
    output = torch.empty_like(query)
    for s, context_len in enumerate(paged.context_lens):
        rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
        slots = paged.context_slots(s)
        num_queries = rows.stop - rows.start
        positions = torch.arange(context_len, device=query.device)
        query_positions = positions[context_len - num_queries :]  # a chunk ends where the context ends
        mask = positions[None, :] <= query_positions[:, None]
        output[rows] = attend_one(query[rows], keys[slots], values[slots], mask, scaling)
    return output


def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of n queries over c keys of one sequence.

    q [n, heads, d], k and v [c, kv_heads, d], mask [n, c] (True: may look); returns [n, heads, d].
    With grouped-query attention (GQA) heads / kv_heads query heads share one K/V head.
    """
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(n, kv_heads, heads // kv_heads, d)
    scores = torch.einsum("nkgd,ckd->kgnc", q, k) * scaling
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)
    return torch.einsum("kgnc,ckd->nkgd", weights, v).reshape(n, heads, d)

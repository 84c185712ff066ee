"""Wrong answers to the exercises of lesson 04, with the idea that each misses, and other right ones."""

MUTANTS = [
    ("M1", "04.1", "query_at = start_pos + torch.arange(num_tokens)", "query_at = torch.arange(num_tokens)"),
    ("M1", "04.1", "return ~is_future", "return torch.ones(num_tokens, start_pos + num_tokens).tril().bool()"),
    ("M1", "04.1", "return ~is_future", "return ~is_future & (key_at.unsqueeze(0) != query_at.unsqueeze(1)) if start_pos else ~is_future"),
    ("M2", "04.1", "return ~is_future", "return ~is_future if start_pos == 0 else torch.ones_like(is_future)"),
    ("M2", "04.1", "return ~is_future", "return torch.ones_like(is_future)"),
    ("M2", "04.1", "> query_at.unsqueeze(1)", "> query_at.unsqueeze(1) + 1"),
    ("M10", "04.1", "return ~is_future", "return ~is_future.flip(0)"),
    ("M4", "04.2", "context = range(length)", "context = range(length - num_queries, length)"),
    ("S2", "04.2", "block_tables[s][t // block_size] * block_size", "t // block_size * block_size"),
    ("M7", "04.2", 'scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)', "scores.softmax(dim=-1).masked_fill(is_future, 0.0)"),
    ("M10", "04.2", 'torch.einsum("hqk,khd->qhd", weights, v)', 'torch.einsum("hqk,khd->qhd", weights, v).flip(0)'),
    ("M1", "04.2", "query_at = torch.arange(length - num_queries, length)", "query_at = torch.arange(num_queries)"),
    ("M2", "04.2", "scores.masked_fill(is_future,", "scores.masked_fill(is_future & (num_queries == length),"),
    ("M2", "04.2", "scores.masked_fill(is_future,", "scores.masked_fill(is_future & False,"),
    ("M5", "04.2", "context = range(length)", "context = range(len(block_tables[s]) * block_size)"),
    ("M8", "04.2", "block_tables[s][t", "block_tables[0][t"),
    ("M8", "04.2", "first, end = query_start_loc[s], query_start_loc[s + 1]", "first, end = 0, query_start_loc[s + 1]"),
    ("M1", "04.3", "key_pos[None, :] <= query_pos[:, None]", "key_pos[None, :] <= row[:, None]"),
    ("M2", "04.3", 'scores = tl.where(may_look, scores, float("-inf"))', "scores = tl.where(is_key[None, :], scores, float(\"-inf\"))"),
    ("M7", "04.3", "weighted = weighted * fade[:, None] + tl.dot(weights, v, input_precision=\"ieee\")",
     "weighted = weighted * fade[:, None] + tl.dot(tl.where(key_pos[None, :] % 2 == 0, weights, 0.0), v, input_precision=\"ieee\")"),
    ("M7", "04.3", "total = total * fade", "total = total"),
    ("M7", "04.3", "fade = tl.exp(largest - higher)", "fade = tl.exp(largest - largest)"),
    ("M7", "04.3", "weighted * fade[:, None]", "weighted"),
]  # fmt: skip

ALSO_RIGHT = {
    "04.1": [
        '''
def causal_mask(start_pos, num_tokens):
    return [[1] * (start_pos + i + 1) + [0] * (num_tokens - i - 1) for i in range(num_tokens)]
''',
        '''
import numpy as np

def causal_mask(start_pos, num_tokens):
    return np.tri(num_tokens, start_pos + num_tokens, k=start_pos, dtype=bool)
''',
        '''
def causal_mask(start_pos, num_tokens):
    past = torch.ones(num_tokens, start_pos)
    return torch.cat([past, torch.ones(num_tokens, num_tokens).tril()], dim=1)
''',
    ],
    "04.2": [
        '''
def paged_attention(query, keys, values, block_tables, context_lens, query_start_loc, block_size, scaling):
    rows = []
    for s, table in enumerate(block_tables):
        n = query_start_loc[s + 1] - query_start_loc[s]
        slots = (torch.tensor(table)[:, None] * block_size + torch.arange(block_size)).flatten()[:context_lens[s]]
        for i in range(n):
            seen = slots[:context_lens[s] - n + i + 1]
            q = query[query_start_loc[s] + i]
            weights = torch.softmax((keys[seen] * q).sum(-1) * scaling, dim=0)
            rows.append((weights[..., None] * values[seen]).sum(0))
    return torch.stack(rows)
''',
        '''
def paged_attention(query, keys, values, block_tables, context_lens, query_start_loc, block_size, scaling):
    outputs = [None] * len(context_lens)
    for s in reversed(range(len(context_lens))):
        q = query[query_start_loc[s]:query_start_loc[s + 1]].transpose(0, 1)
        where = [block_tables[s][i // block_size] * block_size + i % block_size for i in range(context_lens[s])]
        k, v = keys[where].transpose(0, 1), values[where].transpose(0, 1)
        mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        outputs[s] = out.transpose(0, 1)
    return torch.cat(outputs)
''',
    ],
}

# The kernel around the missing lines is the same in every answer.
_HEAD = '''
@triton.jit
def chunk_attention(
    query, keys, values, output, block_table, start_pos, num_queries, scaling,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    row, d = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q), tl.arange(0, D)
    is_query = (row < num_queries)[:, None]
    q = tl.load(query + row[:, None] * D + d[None, :], mask=is_query, other=0.0)
    query_pos = start_pos + row
    context_len = start_pos + num_queries
    largest = tl.full([TILE_Q], -1e30, tl.float32)
    total = tl.full([TILE_Q], 0.0, tl.float32)
    weighted = tl.full([TILE_Q, D], 0.0, tl.float32)
    for start in range(0, context_len, TILE_K):
        key_pos = start + tl.arange(0, TILE_K)
        is_key = key_pos < context_len
        block = tl.load(block_table + key_pos // BLOCK_SIZE, mask=is_key, other=0)
        kv_at = (block * BLOCK_SIZE + key_pos % BLOCK_SIZE)[:, None] * D + d[None, :]
        k = tl.load(keys + kv_at, mask=is_key[:, None], other=0.0)
        v = tl.load(values + kv_at, mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
'''
_TAIL = '''
    tl.store(output + row[:, None] * D + d[None, :], weighted / total[:, None], mask=is_query)
'''
ALSO_RIGHT["04.3"] = [
    _HEAD + '''
        future = key_pos[None, :] > query_pos[:, None]
        scores = scores * 1.4426950408889634  # to base 2
        scores = tl.where(future, -1e30, scores)
        new = tl.maximum(tl.max(scores, axis=1), largest)
        p = tl.where(future, 0.0, tl.exp2(scores - new[:, None]))
        total *= tl.exp2(largest - new)
        total += tl.sum(p, axis=1)
        weighted *= tl.exp2(largest - new)[:, None]
        weighted += tl.dot(p, v, input_precision="ieee")
        largest = new
''' + _TAIL,
    _HEAD + '''
        scores += tl.where(query_pos[:, None] >= key_pos[None, :], 0.0, float("-inf"))
        tile_max = tl.max(scores, axis=1)
        top = tl.where(tile_max > largest, tile_max, largest)
        e = tl.exp(scores - top[:, None])
        weighted = tl.dot(e, v, weighted * tl.exp(largest - top)[:, None], input_precision="ieee")
        total = tl.sum(e, axis=1) + tl.exp(largest - top) * total
        largest = top
''' + _TAIL,
]  # fmt: skip

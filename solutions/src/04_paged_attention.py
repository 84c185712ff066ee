# %% [markdown]
# # Exercises 04 · Paged attention
#
# [Lesson 04](../notebooks/04_paged_attention.ipynb) took attention apart. Here you put it together three times: the mask of
# a chunk, attention through the block table for a whole batch, and the heart of a GPU kernel. The last two run a model inside
# the engine.

# %% name="set-up"
import torch

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, load_model
from course_lib.checks import NotDone, check
from course_lib.model.own_kernels import launch, tl, triton  # Triton: its interpreter, or your GPU
from course_lib.demo import chat_prompt
from course_lib.lab import block_map, block_map_alt, show
from course_lib.lab.mask_map import mask_map
from course_lib.model import attention

# %% [markdown] name="task-04-1"
# ## 04.1 The mask of a chunk
#
# A chunk of `num_tokens` tokens begins at token `start_pos`; all earlier tokens are in the cache. Make the mask: a row for
# each token of the chunk, a column for each token up to the chunk's end, true where the row's token may look.
#
# ```text
# start_pos 5, num_tokens 3
#
#   key       0 1 2 3 4   5 6 7
#             cached      chunk
#   query 5   how many ones must this row have?
#   query 6
#   query 7   1 1 1 1 1   1 1 1
# ```

# %% name="your-04-1"
def causal_mask(start_pos, num_tokens):
    """Which keys each query of a chunk may look at.

    start_pos   tokens before the chunk, whose keys are in the cache
    num_tokens  tokens of the chunk: the queries
    Returns a mask [num_tokens, start_pos + num_tokens] of true and false (a tensor, or lists).
    """
    ### BEGIN SOLUTION
    query_at = start_pos + torch.arange(num_tokens)
    key_at = torch.arange(start_pos + num_tokens)
    is_future = key_at.unsqueeze(0) > query_at.unsqueeze(1)
    return ~is_future
    ### END SOLUTION

# %% name="check-04-1"
check("04.1", causal_mask)

# %% [markdown] name="hints-04-1"
# <details><summary>Hint 1: the rule</summary>
#
# Count both, queries and keys, by their position in the sequence. Then one comparison is the whole mask.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# `torch.ones(3, 8).tril()` gives row 0 a single one. But the chunk's first token is token 5 of the sequence: it sees
# tokens 0 to 5.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Row i stands for position start_pos + i, column j for position j. Two `arange`s, one of them as a column (`[:, None]`),
# and a comparison between them gives the whole table at once.
#
# </details>

# %% name="run-04-1" tags=["needs-your-code"]
def with_your_mask(query, layer, paged, scaling):
    """A backend for the engine: gather, then PyTorch's attention with your mask."""
    keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
    output = torch.empty_like(query)
    for s, length in enumerate(paged.context_lens):
        rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
        mask = torch.as_tensor(causal_mask(length - (rows.stop - rows.start), rows.stop - rows.start))
        slots = paged.context_slots(s)
        q, k, v = (x.transpose(0, 1) for x in (query[rows], keys[slots], values[slots]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool(), scale=scaling, enable_gqa=True)
        output[rows] = out.transpose(0, 1)
    return output


mask = causal_mask(5, 3)
attention.BACKENDS["yours"] = with_your_mask
runner = ModelRunner(load_model("smollm2", device="cpu"), attention="yours")
prompt = chat_prompt(runner.tokenizer, "What is the capital of France? Answer in one short sentence.")
for chunk_size in (None, 16):
    engine = Engine(runner, EngineConfig(max_prefill_chunk_size=chunk_size, enable_prefix_caching=False))
    [output] = engine.generate([prompt], SamplingParams(max_tokens=12), progress=False)
    print(f"SmolLM2 with your mask, chunk size {chunk_size or 'whole':>5}: {output.text!r}")
mask_map(mask, queries=[5, 6, 7], keys=range(8), owners=[0] * 5 + [1] * 3, names=("cached", "chunk"), title="Your mask")

# %% [markdown] name="task-04-2"
# ## 04.2 Attention through the block table
#
# Compute attention for a step of several requests. Their new tokens lie one after the other in the flat row `query`;
# the K/V of all their tokens, the new ones included, already lies in the pool, scattered over blocks.
#
# ```text
# A: context 6, its last 2 tokens are queries
# B: context 3, its last token is a query
#
# block_size 4
# block_tables     A [2, 0]   B [3]
# context_lens     [6, 3]
# query            A4 A5 | B2
# query_start_loc  [0, 2, 3]
#
# pool    block 0        block 1        block 2        block 3
#         A4 A5  ?  ?     ?  ?  ?  ?    A0 A1 A2 A3    B0 B1 B2  ?
#         ?: anything, even NaN
#
# A4 sees A0 … A4        A5 sees A0 … A5        B2 sees B0 … B2
# ```

# %% name="your-04-2"
def paged_attention(query, keys, values, block_tables, context_lens, query_start_loc, block_size, scaling):
    """Attention of a flat batch over K/V in blocks. T tokens, S sequences, H heads of D numbers.

    query            [T, H, D]
    keys, values     [slots, H, D]: the pool. Only the slots of a sequence's tokens may be read
    block_tables     S lists: physical block of each logical block
    context_lens     S lengths: tokens of the sequence in the pool, those of this step included
    query_start_loc  S + 1 numbers: rows query_start_loc[s] … query_start_loc[s + 1] - 1 are the last tokens of sequence s
    scaling          what the scores (query · key) are multiplied with
    Returns [T, H, D]: for each query the mean of the values that it sees, weighted by softmax(scores).
    """
    ### BEGIN SOLUTION
    output = torch.zeros(query.shape)
    for s, length in enumerate(context_lens):
        first, end = query_start_loc[s], query_start_loc[s + 1]
        num_queries = end - first
        context = range(length)
        slots = [block_tables[s][t // block_size] * block_size + t % block_size for t in context]
        k, v = keys[slots], values[slots]
        query_at = torch.arange(length - num_queries, length)
        is_future = torch.tensor(context)[None, :] > query_at[:, None]
        scores = torch.einsum("qhd,khd->hqk", query[first:end], k) * scaling
        weights = scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return output
    ### END SOLUTION

# %% name="check-04-2"
check("04.2", paged_attention)

# %% [markdown] name="hints-04-2"
# <details><summary>Hint 1: the rule</summary>
#
# One sequence at a time. Its keys and values in the order of its tokens, no more and no fewer; its queries are the last of
# these tokens; then scores, mask, softmax, weighted sum.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# A has 6 tokens in blocks 2 and 0, with 4 slots each. `keys[[8, 9, 10, 11, 0, 1]]` are its keys. The eight slots of
# both blocks would be too many: slots 2 and 3 may hold NaN, and 0 × NaN is NaN, so masking them isn't enough.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# For each s: the slots of tokens 0 … context_lens[s] - 1 by the rule of lesson 03; index keys and values with them; a score
# for each head, query and key (`torch.einsum` with the letters of the shapes); minus infinity where the key's position is
# beyond the query's, where the first query's position is context_lens[s] minus the number of queries; softmax over the
# keys; another einsum with the values; write the rows of s.
#
# </details>

# %% name="run-04-2" tags=["needs-your-code"]
def with_your_attention(query, layer, paged, scaling):
    """A backend for the engine. SmolLM2's 9 query heads share 3 K/V heads: each K/V head is given to you three times."""
    group = query.shape[1] // paged.kv_cache.k.shape[2]
    keys, values = (x[layer].repeat_interleave(group, dim=1) for x in (paged.kv_cache.k, paged.kv_cache.v))
    batch = paged.batch
    return paged_attention(
        query, keys, values, batch.block_tables, batch.context_lens, batch.query_start_loc, batch.block_size, scaling
    )


attention.BACKENDS["yours"] = with_your_attention
runner = ModelRunner(load_model("smollm2", device="cpu"), attention="yours")
questions = ["What is the capital of France? Answer in one short sentence.", "Name a colour.", "What is 2 + 3?"]
config = EngineConfig(num_blocks=16, max_num_batched_tokens=32, max_num_seqs=4, max_prefill_chunk_size=20)
engine = Engine(runner, config)
engine.block_manager.shuffle_free_blocks(seed=4)
prompts = [chat_prompt(runner.tokenizer, question) for question in questions]
outputs = engine.generate(prompts, SamplingParams(max_tokens=10), progress=False)

runner.attention = "reference"
expected = Engine(runner, EngineConfig(num_blocks=64)).generate(prompts, SamplingParams(max_tokens=10), progress=False)
for question, output, other in zip(questions, outputs, expected):
    print(f"{question:62} {output.text!r}")
    assert output.token_ids == other.token_ids, "other tokens than the engine's own attention gives"
title = "The blocks that your attention read in step 4"
show(block_map(engine.trace, step=4, title=title), block_map_alt(engine.trace, step=4))

# %% [markdown] name="task-04-3"
# ## 04.3 Inside the kernel
#
# This is a whole Triton kernel for a chunk of one sequence and one head, except for its heart. The loop brings the keys tile
# by tile and computes a tile of scores. Write what follows: the mask, and the online softmax that keeps `largest`, `total`
# and `weighted` up to date.
#
# ```text
#             keys 0 … 15         16 … 31
# query 20    xxxxxxxxxxxxxxxx    xxxxx-----------
# query 21    xxxxxxxxxxxxxxxx    xxxxxx----------
# query 22    xxxxxxxxxxxxxxxx    xxxxxxx---------
#
# after each tile, for each row:
#   largest   the largest score so far
#   total     the sum of exp(score - largest)
#   weighted  the sum of exp(score - largest) * value
# ```
#
# You need `tl.where`, `tl.maximum`, `tl.max(…, axis=1)`, `tl.sum(…, axis=1)`, `tl.exp` and `tl.dot(…, …,
# input_precision="ieee")`. Tiles behave like tensors: `x[:, None]` makes a column of a row of numbers.

# %% name="your-04-3"
@triton.jit
def chunk_attention(
    query, keys, values, output, block_table, start_pos, num_queries, scaling,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):
    """One program: TILE_Q queries of a chunk that begins at start_pos, over all keys of the sequence.

    query and output [num_queries, D]; keys and values [slots, D]; block_table: the sequence's blocks.
    """
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
        k = tl.load(keys + kv_at, mask=is_key[:, None], other=0.0)  # [TILE_K, D]
        v = tl.load(values + kv_at, mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling  # [TILE_Q, TILE_K]
        ### BEGIN SOLUTION
        may_look = key_pos[None, :] <= query_pos[:, None]
        scores = tl.where(may_look, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        fade = tl.exp(largest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        weighted = weighted * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        largest = higher
        ### END SOLUTION
    tl.store(output + row[:, None] * D + d[None, :], weighted / total[:, None], mask=is_query)

# %% name="check-04-3"
check("04.3", chunk_attention)

# %% [markdown] name="hints-04-3"
# <details><summary>Hint 1: the rule</summary>
#
# Mask first: minus infinity where the key's position is beyond the query's. Then the three numbers: if a tile brings a
# larger score, what was summed before was computed with too small a maximum, and shrinks by one factor.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Scores 1, 2, 3 in the first tile: largest 3, total 1.50. Then 5, 1, 1: largest 5. The old 1.50 is worth e³⁻⁵ × 1.50 = 0.20
# now, and the new total is 0.20 + 1 + e⁻⁴ + e⁻⁴ = 1.24. Without shrinking it would be 2.54.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# The new maximum of each row: of the old one and of the tile's. The factor: exp of old minus new. The weights: exp of score
# minus new, which is 0 for minus infinity. The total: old times factor, plus the sum of the weights. The weighted sum: the
# same factor, plus weights times values, which is a matrix product. At last the new maximum becomes the old one.
#
# </details>

# %% name="run-04-3" tags=["needs-your-code"]
def with_your_kernel(query, layer, paged, scaling):
    """A backend for the engine: your kernel, once for each sequence and head."""
    keys, values, group = paged.kv_cache.k[layer], paged.kv_cache.v[layer], query.shape[1] // paged.kv_cache.k.shape[2]
    output = torch.empty_like(query)
    for s, table in enumerate(paged.batch.block_tables):
        first, end = paged.query_start_loc[s], paged.query_start_loc[s + 1]
        for head in range(query.shape[1]):
            q, result = query[first:end, head].contiguous(), torch.empty(end - first, query.shape[2])
            k, v = keys[:, head // group].contiguous(), values[:, head // group].contiguous()
            launch(
                chunk_attention, (triton.cdiv(end - first, 16),), q, k, v, result, torch.tensor(table, dtype=torch.int32),
                paged.context_lens[s] - (end - first), end - first, scaling,
                D=query.shape[2], BLOCK_SIZE=paged.batch.block_size, TILE_Q=16, TILE_K=16,
            )  # fmt: skip
            output[first:end, head] = result
    return output


attention.BACKENDS["yours"] = with_your_kernel
runner = ModelRunner(load_model("tiny", device="cpu"), attention="yours")
prompts = ["A kernel of my own, paged.", "Beside it."]
config = EngineConfig(num_blocks=16, max_num_batched_tokens=32, max_num_seqs=4, max_prefill_chunk_size=20)
engine = Engine(runner, config)
engine.block_manager.shuffle_free_blocks(seed=4)
outputs = engine.generate(prompts, SamplingParams(max_tokens=3), progress=False)

runner.attention = "reference"
expected = Engine(runner, EngineConfig(num_blocks=64)).generate(prompts, SamplingParams(max_tokens=3), progress=False)
for output, other in zip(outputs, expected):
    print("by your kernel:", output.token_ids, "  by the reference:", other.token_ids)
    assert output.token_ids == other.token_ids, "other tokens than the engine's own attention gives"
title = "The blocks that your kernel read in step 1"
show(block_map(engine.trace, step=1, title=title), block_map_alt(engine.trace, step=1))

# %% [markdown]
# # 04 · Paged attention
#
# **After this lesson you can**
#
# - draw the attention mask of any chunk, and say how many keys its first token sees;
# - compute attention over keys and values that lie scattered over blocks, for several requests in one row;
# - explain why a slot that nobody may read can still ruin the result;
# - work out a softmax tile by tile, and read the Triton kernel that does so on a GPU.
#
# **Time** 45 minutes · **You need** lesson 03 (slots), and what a query, a key and a value are · **Adds to the engine**
# attention: a version to read, and kernels of our own.

# %% name="set-up"
import importlib.util
import os

import torch

# Triton reads this once, when it is imported: without a GPU its kernels then run in an interpreter, on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, load_model
from course_lib.demo import chat_prompt
from course_lib.lab import house, source
from course_lib.lab.mask_map import mask_map
from course_lib.model import attention

torch.set_printoptions(precision=4, sci_mode=False, linewidth=120)
house("attention")

# %% [markdown]
# ## One word too simple
#
# Attention for a chunk has three parts: collect the keys and values of the chunk's request, in the order of their
# tokens; decide which query may look at which key; compute softmax and the weighted sum. PyTorch has a fast function
# for the last two, `scaled_dot_product_attention`, and it even makes the causal mask itself: `is_causal=True`.
#
# So here is a backend for our engine in ten lines. `context_slots(s)` says where the K/V of request `s` lies, token by
# token: that is lesson 03, read backwards.

# %% name="three-backends"
from torch.nn.functional import scaled_dot_product_attention


def backend(mask_options):
    """A backend for the engine: gather, then PyTorch's attention with the options that `mask_options` gives."""

    def attend(query, layer, paged, scaling):
        keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
        output = torch.empty_like(query)
        for s in range(len(paged.context_lens)):
            rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
            slots = paged.context_slots(s)
            q, k, v = (x.transpose(0, 1) for x in (query[rows], keys[slots], values[slots]))
            options = mask_options(num_queries=q.shape[1], num_keys=k.shape[1])
            output[rows] = scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True, **options).transpose(0, 1)
        return output

    return attend


def is_causal(num_queries, num_keys):
    return {"is_causal": num_queries > 1}  # a decode, one query, may look at everything


attention.BACKENDS["is_causal"] = backend(is_causal)

runner = ModelRunner(load_model("smollm2", device="cpu"))
fastest = runner.attention  # what the engine chose for this machine
QUESTION = (
    "What is the capital of France? And which river runs through it? Please answer in one short sentence for a class "
    "of young pupils who are learning about the cities and the rivers of Europe this week, and about their history."
)


def ask(name, chunk_size):
    """SmolLM2's answer, with the attention backend of that name."""
    runner.attention = name
    engine = Engine(runner, EngineConfig(max_prefill_chunk_size=chunk_size, enable_prefix_caching=False))
    prompt = chat_prompt(runner.tokenizer, QUESTION)
    return engine.generate([prompt], SamplingParams(max_tokens=24), progress=False)[0].text


print(f"in one piece: {ask('is_causal', None)!r}")

# %% [markdown]
# Right in one piece. In chunks, the second one has fewer queries than keys: 3 queries and 8 keys, say, when five tokens
# came before.
#
# > **Predict, then run.** The mask is then a grid of 3 rows and 8 columns. How many ones must be in row 0? And how many
# > does `is_causal=True` put there?

# %% name="guess-row-0"
my_guess_must = 1  # write yours
my_guess_is_causal = 3  # write yours

# %% name="what-is-causal-does"
def mask_in_use(num_queries, num_keys):
    """Which keys PyTorch lets each query see: attention over the unit vectors, with all scores equal."""
    q, k, v = torch.zeros(1, num_queries, 4), torch.zeros(1, num_keys, 4), torch.eye(num_keys)[None]
    return scaled_dot_product_attention(q, k, v, is_causal=True)[0] > 0


def ones_and_zeros(*rows):
    return torch.tensor([[int(digit) for digit in row] for row in rows]).bool()


right = ones_and_zeros("11111100", "11111110", "11111111")
wrong = mask_in_use(3, 8)
print(f"Must be:   {right[0].sum()} ones in row 0. You said {my_guess_must}.")
print(f"is_causal: {wrong[0].sum()} in row 0. You said {my_guess_is_causal}.")
picture = {"queries": [5, 6, 7], "keys": range(8), "owners": [0] * 5 + [1] * 3, "names": ("chunk 0", "chunk 1")}
mask_map(wrong, **picture, expected=right, title="is_causal=True, 3 queries and 8 keys")

# %% [markdown]
# Six, and one. PyTorch aligns its triangle to the *upper left* corner: row 0 sees key 0, as if the chunk began at
# token 0. The two notions agree only when the mask is square, which it is for a whole prompt. (FlashAttention had the
# same meaning until version 2.1, then changed it to the lower right. Both call it `causal`.)
#
# What the chunk needs:

# %% name="the-right-mask"
mask_map(right, **picture, title="What the chunk may see: all earlier chunks, and itself up to the diagonal")

# %% [markdown]
# The first token of the chunk sees all earlier chunks, and itself. The second sees all earlier chunks, the first
# token of its own, and itself. And so on: every row has one more.
#
# It looks like two rules, "everything before the chunk" and "causal inside it". It is one, as soon as you don't count
# from the chunk's beginning but use **positions in the sequence** on both sides:
#
# > **A query sees the keys of its own request whose position is not larger than its own, wherever chunks and
# > blocks begin.**
#
# One comparison for all three shapes of work. A whole prompt is a square with a triangle in it; a decode is one row of
# ones. A chunk is between the two: like a decode it reads what earlier steps left in the cache, like a whole prompt it is
# causal inside itself.
#
# Now on the real model: the mask that is too simple; another shortcut, "there is a cache already, so no mask"; and the
# engine's own reference.

# %% name="on-the-model"
def no_mask(num_queries, num_keys):
    return {"is_causal": num_queries == num_keys}  # a whole prompt is causal, later chunks see everything


attention.BACKENDS["no_mask"] = backend(no_mask)
for chunk_size in (48, 32):
    for name in ("is_causal", "no_mask", "reference"):
        print(f"chunks of {chunk_size}  {name:10} {ask(name, chunk_size)!r}")

# %% [markdown]
# No error in any of the lines. Without a mask the model is still right with chunks of 48, and with chunks of 32 the
# Eiffel Tower becomes a river. It is the milder mistake, and the one that is easier to miss: the tokens of later chunks
# see a little of their future, which in training they never could.
#
# ## A head that counts
#
# To see more, let's take attention that one can check in one's head. With a query of zeros all scores are equal, so
# attention is the plain **mean** of the values it sees. And let the value of token *i* be the number *i*. Then the
# query at position *p* must give the mean of 0 … p, which is p / 2.
#
# The function is the engine's own:

# %% name="attend-one"
from course_lib.model.attention.reference import attend_one

source(attend_one, mark=("masked_fill", "softmax"), docstring=False)

# %% [markdown]
# The mask comes *before* the softmax: a score of minus infinity becomes a weight of exactly 0, and the others add up
# to 1. In the other order, softmax first and then zeros, they don't: you will see below what that does.
#
# Now the memory. The request has 10 tokens in blocks of 4, with the block table `[4, 1, 3]`. Its values lie in the
# pool, where other requests left their numbers, too: 1000 and more.

# %% name="the-pool"
BLOCK_SIZE, BLOCK_TABLE, CONTEXT_LEN = 4, [4, 1, 3], 10

values = torch.arange(1000.0, 1024.0)  # six blocks; what others left behind
for token in range(CONTEXT_LEN):
    block = BLOCK_TABLE[token // BLOCK_SIZE]
    values[block * BLOCK_SIZE + token % BLOCK_SIZE] = token

for block, row in enumerate(values.view(6, BLOCK_SIZE).tolist()):
    owner = f"logical block {BLOCK_TABLE.index(block)}" if block in BLOCK_TABLE else ""
    print(f"block {block}: " + " ".join(f"{value:6.0f}" for value in row) + f"   {owner}")

# %% [markdown]
# Attention must read the slots in the order of the *tokens*: block 4, then block 1, then half of block 3. That is
# called a **gather**: `values[slots]`, with a list of slots. Where the blocks lie doesn't matter any more after that.
# (The reference copies the keys and values together, and so does PyTorch's function above. A kernel reads them where they
# lie.)
#
# Take the last chunk, tokens 7, 8 and 9, and look at some ways to compute it:

# %% name="some-ways"
from course_lib.slots import slot_mapping


def mean_head(slots, sees):
    """One query for each number in `sees`: it sees so many of these slots, the first ones. Returns the outputs."""
    mask = torch.tensor([[column < number for column in range(len(slots))] for number in sees])
    gathered = values[slots].view(-1, 1, 1)
    means = attend_one(torch.zeros(len(sees), 1, 1), torch.zeros_like(gathered), gathered, mask, 1.0)
    return [round(mean, 1) for mean in means.flatten().tolist()]


context = slot_mapping(BLOCK_TABLE, 0, CONTEXT_LEN, BLOCK_SIZE)  # where tokens 0 to 9 lie

print("must be                         ", [7 / 2, 8 / 2, 9 / 2])
print("through the block table         ", mean_head(context, sees=(8, 9, 10)))
print("the first 10 slots of the pool  ", mean_head(list(range(10)), sees=(8, 9, 10)))
print("only the chunk's own K/V        ", mean_head(context[7:], sees=(1, 2, 3)))

weights = torch.softmax(torch.zeros(3, 10), dim=1) * ones_and_zeros("1111111100", "1111111110", "1111111111")
print("softmax first, then the mask    ", [round(x, 1) for x in (weights @ values[context]).tolist()], end="   ")
print("sums of the rows:", [round(x, 1) for x in weights.sum(dim=1).tolist()])

# %% [markdown]
# The third line is what one gets by taking neighbours in memory for neighbours in the text. The fourth forgets the
# earlier chunks: the model would read the chunk as if the document began there. And the last one has the mask in the
# wrong place: the weights that were set to 0 are missing in the sum. See the row sums printed beside it: the weights of the
# first two rows add up to less than 1. (The third query sees all ten keys, so it loses nothing.)
#
# ## Slots that nobody may read
#
# The three blocks have room for 12 tokens, the request has 10. The last two slots of block 3, slots 14 and 15, still hold
# 1014 and 1015, from a request that ended long ago. Suppose that attention reads whole blocks, all 12 slots, because that
# is simpler and faster, and masks the two: their position is larger than any query's.
#
# > **Predict, then run.** The weights of the two stale slots are exactly 0. What comes out if the stale slots hold
# > 1014 and 1015? And if they hold NaN?
# > A: right and right · B: right and NaN · C: wrong and NaN

# %% name="guess-nan"
my_guess = "A"  # write yours

# %% name="stale-slots"
whole_blocks = slot_mapping(BLOCK_TABLE, 0, 12, BLOCK_SIZE)
print("masked, stale slots hold 1014 and 1015:", mean_head(whole_blocks, sees=[10]))
print("no mask, as 'a decode sees everything':", mean_head(whole_blocks, sees=[12]))
values[whole_blocks[10:]] = float("nan")
print("masked, stale slots hold NaN:          ", mean_head(whole_blocks, sees=[10]))
print(f"You said {my_guess}.")

# %% [markdown]
# B. The sum of weight × value runs over all slots, and 0 × NaN is NaN. Memory that was never written can hold any bits,
# NaN among them. So it isn't enough to give a stale slot no weight: it must not be *read*, or what is read must be
# replaced by 0. Keep this in mind for the kernel.
#
# The second line is worse in practice, because it gives a number: whoever skips the mask in a decode ("it may look at
# everything") *and* reads whole blocks gets an answer that depends on who had the block before.
#
# The engine's test for all this is brutal: before every step, fill every block that nobody holds with NaN. To see the test
# catch something, there is a fourth backend beside three of the engine's: it reads whole blocks and masks afterwards.

# %% name="poison"
def run_poisoned(name):
    """The answer, or the error, with NaN in every free block before every step."""

    def poison(scheduled):
        runner.kv_cache.poison(engine.block_manager.free_blocks())

    runner.attention = name
    config = EngineConfig(num_blocks=16, max_prefill_chunk_size=37, enable_prefix_caching=False)
    engine = Engine(runner, config, on_step=poison)
    engine.block_manager.shuffle_free_blocks(seed=1)
    prompt = chat_prompt(runner.tokenizer, QUESTION)
    [output] = engine.generate([prompt], SamplingParams(max_tokens=24), progress=False)
    return f"error: {output.error}" if output.error else output.text


def whole_blocks_backend(query, layer, paged, scaling):
    """Reads every slot of a request's blocks; those behind its last token get the weight 0, and 0 × NaN is NaN."""
    output = torch.empty_like(query)
    for s, length in enumerate(paged.context_lens):
        rows, table = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1]), paged.batch.block_tables[s]
        slots = slot_mapping(table, 0, len(table) * 16, 16)
        query_at = torch.arange(length - (rows.stop - rows.start), length)
        mask = torch.arange(len(slots))[None, :] <= query_at[:, None]
        output[rows] = attend_one(query[rows], paged.kv_cache.k[layer][slots], paged.kv_cache.v[layer][slots], mask, scaling)
    return output


attention.BACKENDS["whole_blocks"] = whole_blocks_backend
for label, name in (("reference", "reference"), ("torch_paged", "torch_paged"), ("the fastest here", fastest),
                    ("whole blocks, then a mask", "whole_blocks")):  # fmt: skip
    print(f"{label + ':':27}{run_poisoned(name)}")

# %% [markdown]
# Three answers are untouched by the NaN. The fourth request ends with an error: the zero weight didn't help, and the engine
# doesn't guess a token from logits that hold NaN.
#
# ## Two requests in one row
#
# A step computes several requests at once: their tokens lie one after the other in a flat batch (lesson 07 builds it).
# If the mask compares nothing but positions, what does request B see?
#
# Request A has computed 3 tokens before and brings 2 more (positions 3 and 4). Request B brings its first 3.

# %% name="flat-batch"
by_position = ones_and_zeros("11110111", "11111111", "10000100", "11000110", "11100111")
with_borders = ones_and_zeros("11110000", "11111000", "00000100", "00000110", "00000111")
picture = {
    "queries": ["A3", "A4", "B0", "B1", "B2"],
    "keys": ["A0", "A1", "A2", "A3", "A4", "B0", "B1", "B2"],
    "owners": [0] * 5 + [1] * 3,
    "names": ("keys of A", "keys of B"),
}
mask_map(by_position, **picture, expected=with_borders, title="Positions alone: requests read each other")

# %% [markdown]
# "May look" has two halves: the *same request*, and not in the future. The reference and the kernels never build this
# large mask. They keep a list of borders, `query_start_loc = [0, 2, 5]`, and treat each request's rows with its own
# block table: what belongs to another request isn't masked, it isn't even found.

# %% name="together-and-alone"
A, B = torch.arange(5.0), 100 + torch.arange(3.0)  # the values of the two requests
both = torch.cat([A, B]).view(-1, 1, 1)
zeros = torch.zeros(5, 1, 1)
for title, mask in (("positions alone", by_position), ("with borders", with_borders)):
    means = attend_one(zeros, torch.zeros_like(both), both, mask, 1.0).flatten().tolist()
    print(f"{title:16}", [round(mean, 1) for mean in means])
print("each alone      ", [1.5, 2.0], "and", [100.0, 100.5, 101.0])

# %% [markdown]
# ## The softmax, tile by tile
#
# The gather copies all keys and values of a request, in every layer and every step, and the scores of a chunk of 1,000
# over a context of 8,000 are eight million numbers a head. A GPU kernel does without both: it takes the keys in
# **tiles**, 64 at a time, and never has more than one tile of scores.
#
# But softmax divides by a sum over *all* keys, and for numerical safety it first subtracts the largest of *all* scores.
# How can one begin before one has seen them?
#
# By keeping three numbers for what was seen so far: the largest score, the sum of the weights, and the weighted sum of
# the values. When a tile brings a larger score, the old sums were computed with too small a maximum, and shrink by
# one factor.
#
# > **Predict, then run.** Six scores in two tiles: 1, 2, 3 and then 5, 1, 1. After the first tile the largest is 3, and the
# > sum of the weights is e⁻² + e⁻¹ + 1 ≈ 1.50. Then the 5 arrives, and all weights are measured from it instead of from 3.
# > What is this old sum of 1.50 worth now, before the weights of the new tile are added? (e⁻² ≈ 0.14.)

# %% name="guess-shrink"
my_guess_becomes = 1.50  # write yours

# %% name="online-softmax"
scores = torch.tensor([1.0, 2.0, 3.0, 5.0, 1.0, 1.0])
vals = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 60.0])

largest, total, weighted = float("-inf"), 0.0, 0.0
for tile_scores, tile_values in zip(scores.split(3), vals.split(3)):
    before = largest
    largest = max(before, tile_scores.max().item())
    factor = torch.tensor(before - largest).exp().item()  # what the older sums are still worth
    older = total * factor
    tile_weights = (tile_scores - largest).exp()
    print(f"tile {tile_scores.tolist()}: largest {before} -> {largest}; older sum {total:.4f} shrinks to {older:.4f}; "
          f"with this tile {older + tile_weights.sum().item():.4f}")
    total = older + tile_weights.sum().item()
    weighted = weighted * factor + (tile_weights * tile_values).sum().item()

print(f"\ntile by tile: {weighted / total:.4f}   all at once: {torch.softmax(scores, dim=0).dot(vals):.4f}")
print(f"The old sum of 1.50 is now worth {1.5032 * torch.tensor(-2.0).exp():.4f}. You said {my_guess_becomes}.")

# %% [markdown]
# It shrinks by e³⁻⁵ ≈ 0.135, and so does the weighted sum: one factor for both, so their ratio stays true. This is the
# *online softmax* (Milakov and Gimelshein 2018), and the heart of FlashAttention (Dao et al. 2022).
#
# ## The kernel
#
# Ours is in [triton_paged.py](../course_lib/model/attention/triton_paged.py), and is meant to be read. A Triton kernel is
# a function that the GPU runs many times at once; each run, a *program*, has its number and its own piece of work. One
# program of this kernel takes a tile of queries, all heads that share a K/V head, and walks over the keys. With keys
# in tiles of 4 (in truth up to 64), tokens 9 to 11 of a request with two heads:

# %% name="tiles"
rows = [f"token {token} head {head}" for token in (9, 10, 11) for head in (0, 1)]
sees = ["1" * number + "0" * (20 - number) for number in (10, 10, 11, 11, 12, 12)]
mask_map(ones_and_zeros(*sees), queries=rows, keys=range(20), tile=4, title="What one program computes")

# %% [markdown]
# Tiles behind the last query aren't loaded at all. Only the tile on the diagonal needs the mask.
#
# First, the program finds out what it is for. `tl.program_id` is its number, `tl.load` reads from memory, and a pointer
# plus an `arange` is a whole tile of addresses. `tiles` is a list that the engine makes before the launch, four numbers for
# each tile of queries: its first row in the batch, how many queries it has from there on, the position of the first in its
# sequence, and where that sequence's block table begins. `split` counts the parts into which the keys of a very
# long context are cut, one program for each; where there are none, it is 0. (The functions of this file are shown, not
# imported: Triton has packages for Linux alone.)

# %% name="kernel-queries"
from course_lib.lab.unimported import unimported

kernel = unimported("course_lib.model.attention.triton_paged", "attention_kernel")
source(kernel, mark=("first_pos =", "query_pos ="), first="# 1.", last="query_pos =")

# %% [markdown]
# A row of the tile isn't a token but a token *and* a head (`row // GROUP`, `row % GROUP`): query heads that share a K/V
# head share its loads. The last line is our rule's left side: each row knows its **position in the sequence**.
#
# Then the walk over the keys, and this is where the attention is *paged*. `begin` and `end` are the positions of the
# program's part of the keys: from 0 to behind the last key that its last query may see, if nothing was split.

# %% name="kernel-keys"
source(kernel, mark=("block =", "slot =", "is_key ="), first="for start in", last="scores = tl.dot")

# %% [markdown]
# The three marked lines are lesson 03 on a GPU. 64 positions at once; for each of them the block from the block table, the
# slot from the block and the offset. No copy is made: `tl.load` reads each key where it lies.
#
# And `is_key` is the answer to the NaN: behind the last key nothing is read, a 0 stands there instead (`other=0.0`). A
# mask on the scores comes *in addition*.
#
# The lines that follow are that mask and the online softmax, for a tile of queries at once. They aren't shown here,
# because you will write them in exercise 04.3. When all tiles were seen, one division:

# %% name="kernel-end"
source(kernel, mark="out = ", first="# 5.", last="tl.store(output")

# %% [markdown]
# ## Does it say the same?
#
# The judge is the reference in float64. The batch: a whole prompt, a chunk that begins at 37, a decode; blocks shuffled,
# everything free filled with NaN. On a GPU the kernel is compiled. Without one it runs in Triton's interpreter, slowly but
# with the same code. Where there is no Triton (macOS, Windows), the cell says so, and you lose nothing but this line.

# %% name="run-kernel" tags=["nbval-ignore-output"]
import random

from course_lib.batch import Batch
from course_lib.model.attention import BACKENDS, PagedContext
from course_lib.model.kv_cache import KVCache

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 4, 2, 16, 64
gpu_or_cpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_batch(requests):
    """A batch with shuffled blocks. requests: (context length, of which the last … are queries)."""
    blocks = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables, starts = [], [0]
    for length, num_queries in requests:
        tables.append([blocks.pop() for _ in range(-(-length // 16))])
        starts.append(starts[-1] + num_queries)
    nothing, lens = [0] * starts[-1], [length for length, _ in requests]
    return Batch(token_ids=nothing, positions=nothing, slot_mapping=nothing, block_tables=tables, context_lens=lens,
                 query_start_loc=starts, sample_rows=[], sequences=[], sampled=[], block_size=16)  # fmt: skip


def output_of(name, batch, dtype, device):
    """The output of a backend: the same random numbers for every type and device, NaN in the free slots."""
    torch.manual_seed(0)
    cache = KVCache(1, NUM_BLOCKS, 16, KV_HEADS, HEAD_DIM, dtype, device)
    cache.poison(range(NUM_BLOCKS))
    paged = PagedContext(batch, cache, BACKENDS[name], HEADS)
    for s, length in enumerate(batch.context_lens):
        k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, dtype=torch.float64).to(device, dtype)
        cache.k[0, paged.context_slots(s)], cache.v[0, paged.context_slots(s)] = k, v
    query = torch.randn(batch.query_start_loc[-1], HEADS, HEAD_DIM, dtype=torch.float64).to(device, dtype)
    return paged.attend(0, query, HEAD_DIM**-0.5).double().cpu()


batch = random_batch([(40, 40), (57, 20), (100, 1)])
expected = output_of("reference", batch, torch.float64, torch.device("cpu"))
if HAS_TRITON:
    result = output_of("triton_paged", batch, torch.float32, gpu_or_cpu)
    error = (result - expected).abs().max().item()
    where = "in Triton's interpreter" if gpu_or_cpu.type == "cpu" else f"on {torch.cuda.get_device_name()}"
    print(f"The kernel {where}: {result.numel()} numbers, largest difference {error:.1e}")
    assert error < 1e-5
else:
    print("There is no Triton on this system (it has packages for Linux alone): the kernel can be read here, not run.")

# %% [markdown]
# ## Your turn
#
# [Exercise 04](../exercises/04_paged_attention.ipynb): the mask of a chunk; paged attention for a flat batch; and the
# missing lines of a Triton kernel. Your attention then runs SmolLM2 inside the engine.
#
# ## What production does
#
# - **vLLM**: the Triton backend's `kernel_unified_attention` in `vllm/v1/attention/ops/triton_unified_attention.py` is the
#   large sister of ours: chunks and decodes in one kernel, queries grouped by K/V head, and the mask from positions in the
#   sequence. On most NVIDIA GPUs it prefers FlashAttention, `flash_attn_varlen_func` with the arguments `cu_seqlens_q`,
#   `block_table` and `causal=True`: `cu_seqlens_q` is our `query_start_loc`.
# - **SGLang** uses FlashInfer among others: `BatchPrefillWithPagedKVCacheWrapper` serves chunks,
#   `BatchDecodeWithPagedKVCacheWrapper` decodes. "Prefill" there means: queries that extend a cached context.
# - Papers: PagedAttention (Kwon et al., SOSP 2023), FlashAttention (Dao et al., 2022), and Flash-Decoding (2023), which cuts
#   the keys of *one* long decode into parts. In our kernel that is the argument `NUM_SPLITS`.
#
# ## Three questions
#
# 1. A prompt of 12 tokens, once whole and once in chunks of 4. In which of the two are more ones in the masks, all
#    together? And in which are more keys read from memory?
#
#    <details><summary>Answer</summary>
#
#    The same number of ones: 78. Every pair of a query and a key that it may see occurs once, however the prompt is cut.
#    But the keys are read more often: whole, 12 of them; in chunks 4 + 8 + 12 = 24. That is part of what chunks cost: each
#    reads all earlier K/V again, so very small chunks are expensive (`make bench` measures it).
#
#    </details>
#
# 2. Somebody sorts the tokens inside each chunk before the forward pass, for some reason, and moves nothing else. Then
#    somebody moves tokens, positions and slots together. Which of the two changes the output?
#
#    <details><summary>Answer</summary>
#
#    The first: a token then has another token's position, and sees other keys; it is another text. The second changes
#    nothing but the order of the output rows: attention knows a row by its position and its slot, not by its place in
#    the batch. Order matters inside a chunk, but it is the order of *positions*.
#
#    </details>
#
# 3. For a decode the mask is a row of ones. Why does the kernel compare positions all the same?
#
#    <details><summary>Answer</summary>
#
#    Because a tile has 64 columns and the context ends somewhere inside the last tile. The columns behind the end
#    need the weight 0. And because one code path for decodes and chunks is half as much to get wrong.
#
#    </details>
#
# **Lesson 05** asks who takes part in the next step. Its scheduler decides again after each one, and meets a prompt that it
# can't cut.

# %% [markdown]
# # Exercises 03 · Global slots
#
# [Lesson 03](../notebooks/03_global_slots.ipynb) showed where the K/V of a token belongs, and what an engine does when it
# gets that wrong. Here you write it, for prefill chunks and for decodes, and then a tool that reads memory backwards:
# whose token lies in this slot?

# %% name="set-up"
from IPython.display import display

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.checks import NotDone, check
from course_lib.lab import block_map, block_map_alt, show
from course_lib.lab.slot_map import SlotLog
from course_lib.runners import FakeRunner
from course_lib.slots import slot_mapping as our_slot_mapping

# %% [markdown] name="task-03-1"
# ## 03.1 Where each token's K/V goes
#
# Say for each token of a chunk in which slot of the pool its K/V belongs. A slot is a number that runs through the whole
# pool: with blocks of 4, physical block 7 is slots 28 to 31.
#
# ```text
# block_table [7, 2, 9], block_size 4
# a chunk of 4 tokens that begins at token 6
#
#   token of the sequence   0  1  2  3 |  4  5  6  7 |  8  9
#   this chunk                                  ^  ^    ^  ^
#   logical block               0      |      1      |   2
#   physical block              7      |      2      |   9
#   slots of the chunk                         10 11   36 37
# ```
#
# The function has the engine's own signature, and will run in it.

# %% name="your-03-1"
def slot_mapping(block_table, start_pos, num_tokens, block_size):
    """Slots of the tokens start_pos … start_pos + num_tokens - 1 of one sequence.

    block_table  physical block of each logical block of the sequence
    start_pos    index in the sequence of the chunk's first token: so many tokens came before
    num_tokens   tokens in the chunk
    block_size   tokens per block
    Returns num_tokens slots, in the order of the tokens.
    """
    ### BEGIN SOLUTION
    slots = []
    for local in range(num_tokens):
        token = start_pos + local
        logical, offset = divmod(token, block_size)
        slots.append(block_table[logical] * block_size + offset)
    return slots
    ### END SOLUTION

# %% name="check-03-1"
check("03.1", slot_mapping)

# %% [markdown] name="hints-03-1"
# <details><summary>Hint 1: the rule</summary>
#
# A token's slot depends on its index in the whole sequence and on the block table. Compute the index first, then forget
# that there are chunks.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Blocks of 4, block table [7, 2], a chunk that begins at token 6. Its first token doesn't go into slot 28, and not into
# slot 6: token 6 is the third of the sequence's second block, which is physical block 2, so slot 10.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# For each place in the chunk: the index in the sequence; divided by the block size it gives the logical block, and the
# remainder gives the place in it. The table turns the logical block into a physical one, whose first slot is its number
# times the block size.
#
# </details>

# %% name="run-03-1" tags=["needs-your-code"]
def in_the_pool(block_table, start_pos, num_tokens, block_size):
    """Your slots, if the pool of 16 blocks has them."""
    slots = slot_mapping(block_table, start_pos, num_tokens, block_size)
    outside = [int(slot) for slot in slots if not 0 <= slot < 16 * block_size]
    assert not outside, f"your function returned a slot outside the pool of {16 * block_size}: {outside}"
    return slots


log = SlotLog(in_the_pool)
config = EngineConfig(block_size=4, num_blocks=16, max_prefill_chunk_size=7, enable_prefix_caching=False)
engine = Engine(FakeRunner(), config, slot_mapping=log)
engine.block_manager.shuffle_free_blocks(seed=2)
prompt = list(range(18))
[output] = engine.generate([prompt], SamplingParams(max_tokens=4))
print("tokens in chunks of 7, by your slots:", output.token_ids)
print("the same request in one piece:       ", FakeRunner().solo(prompt, 4))
display(log.picture(title="Your slots, in the engine: a prompt of 18 in chunks of 7, then three decodes"))
assert output.token_ids == FakeRunner().solo(prompt, 4), "other tokens than in one piece: look at the slots above"

# %% [markdown] name="task-03-2"
# ## 03.2 The slots of a decode step
#
# In a decode step each running sequence feeds in one token: its newest, which was sampled in the step before and has no
# K/V yet. Say for each sequence in which slot that token's K/V belongs.
#
# ```text
# block_size 4
#
#   A has 6 tokens, its table is [5, 2]
#     slot    20 21 22 23 |  8  9 10 11
#     token    0  1  2  3 |  4  5
#     token 5 is the newest: slot 9
#
#   B has 1 token, its table is [7]
#     slot    28 29 30 31
#     token    0
#     token 0 is the newest: slot 28
# ```

# %% name="your-03-2"
def decode_slots(block_tables, lengths, block_size):
    """The slot of the newest token of each sequence.

    block_tables  one block table for each sequence
    lengths       for each sequence the number of its tokens, prompt and generated, the newest included
    block_size    tokens per block
    Returns one slot for each sequence.
    """
    ### BEGIN SOLUTION
    slots = []
    for table, length in zip(block_tables, lengths):
        newest = length - 1
        block = table[newest // block_size]
        slots.append(block * block_size + newest % block_size)
    return slots
    ### END SOLUTION

# %% name="check-03-2"
check("03.2", decode_slots)

# %% [markdown] name="hints-03-2"
# <details><summary>Hint 1: the rule</summary>
#
# A decode is a chunk of one token. All that is new is the question which token of the sequence it is.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# A sequence of 4 tokens with blocks of 4 and the table [6]: its newest token lies in the last slot of block 6, slot 27.
# There is no second block yet, so an index error means that you looked one token too far.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# For each sequence: the index of its newest token, from its length; then the rule of 03.1 for that one index.
#
# </details>

# %% name="run-03-2" tags=["needs-your-code"]
def with_your_decodes(block_table, start_pos, num_tokens, block_size):
    """Chunks of one token by your function, longer ones by ours."""
    if num_tokens == 1:
        slots = decode_slots([block_table], [start_pos + 1], block_size)
        outside = [int(slot) for slot in slots if not 0 <= slot < 16 * block_size]
        assert not outside, f"your function returned a slot outside the pool of {16 * block_size}: {outside}"
        return slots
    return our_slot_mapping(block_table, start_pos, num_tokens, block_size)


log = SlotLog(with_your_decodes)
config = EngineConfig(block_size=4, num_blocks=16, enable_prefix_caching=False)
engine = Engine(FakeRunner(), config, slot_mapping=log)
engine.block_manager.shuffle_free_blocks(seed=6)
[output] = engine.generate([[3, 1, 4, 1, 5, 9]], SamplingParams(max_tokens=8))
print("tokens with your decodes:", output.token_ids)
print("as they must be:         ", FakeRunner().solo([3, 1, 4, 1, 5, 9], 8))
display(log.picture(title="A prompt of 6 in one chunk, then seven decodes by your function"))
assert output.token_ids == FakeRunner().solo([3, 1, 4, 1, 5, 9], 8), "other tokens than alone: look at the slots above"

# %% [markdown] name="task-03-3"
# ## 03.3 Whose token lies in this slot?
#
# The same road backwards, as a tool for debugging: given a slot of the pool, say whose token lies there and which one.
# A block can be shared by several requests (a common prefix, lesson 09), so the answer is a list; for a slot in which
# no request has a token it is empty.
#
# ```text
# block_size 4
# block_tables {"Ana": [5, 2], "Ben": [7]}, cached {"Ana": 6, "Ben": 3}
#
#   slot   8  9 10 11 | 20 21 22 23 | 28 29 30 31
#   Ana    4  5  .  . |  0  1  2  3 |
#   Ben               |             |  0  1  2  .
#
#   who_owns(9, …)    is [("Ana", 5)]
#   who_owns(10, …)   is []
#   who_owns(0, …)    is []
# ```

# %% name="your-03-3"
def who_owns(slot, block_tables, cached, block_size):
    """The requests that have a token in this slot.

    slot          a slot of the pool
    block_tables  name of a request -> its block table
    cached        name of a request -> number of its tokens whose K/V is in the cache
    block_size    tokens per block
    Returns a list of (name, index of the token in the request's sequence), in the order of block_tables.
    """
    ### BEGIN SOLUTION
    owners = []
    block, offset = divmod(slot, block_size)
    for name, table in block_tables.items():
        if block in table:
            token = table.index(block) * block_size + offset
            if token < cached[name]:
                owners.append((name, token))
    return owners
    ### END SOLUTION

# %% name="check-03-3"
check("03.3", who_owns)

# %% [markdown] name="hints-03-3"
# <details><summary>Hint 1: the rule</summary>
#
# From the slot to the physical block and the offset; from the physical block to its place in a request's table, which is
# the logical block; from there to the token's index.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Blocks of 4, Ana's table is [5, 2], and 6 of her tokens are cached. Slot 10 is in her block 2, at offset 2: that would be
# token 6. But her cached tokens are 0 to 5: nobody's token lies there.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Divide the slot by the block size, with remainder. For each request whose table holds that block: where in the table?
# That place times the block size, plus the remainder, is the index; it counts if it is one of the cached tokens. Go
# on to the next request also after a hit.
#
# </details>

# %% name="run-03-3" tags=["needs-your-code"]
config = EngineConfig(block_size=4, num_blocks=24, max_prefill_chunk_size=6)
engine = Engine(FakeRunner(), config)
engine.block_manager.shuffle_free_blocks(seed=9)
prefix = [1, 2, 3, 4, 5, 6, 7, 8]
engine.add_request([*prefix, 20, 21], SamplingParams(max_tokens=9), request_id="Ana")
for _ in range(3):
    engine.step()
engine.add_request([*prefix, 30, 31, 32], SamplingParams(max_tokens=9), request_id="Ben")
engine.add_request([40, 41, 42], SamplingParams(max_tokens=9), request_id="Chen")
for _ in range(3):
    engine.step()

live = [sequence for sequence in engine.scheduler.running]
tables = {sequence.request_id: sequence.block_table for sequence in live}
cached = {sequence.request_id: sequence.cached_token_count for sequence in live}
print("cached tokens:", cached, "\n")
for block in sorted({block for table in tables.values() for block in table}):
    print(f"block {block}")
    for slot in range(block * 4, block * 4 + 4):
        owners = [f"token {token} of {name}" for name, token in who_owns(slot, tables, cached, 4)]
        print(f"  slot {slot}: {' and '.join(owners) or 'nobody'}")
show(block_map(engine.trace), block_map_alt(engine.trace))

# %% [markdown]
# # Exercises 02 · Blocks
#
# [Lesson 02](../notebooks/02_blocks.ipynb) gave memory out in blocks. Now you count them, hand them out and take them back.
# Everything here is plain Python on small numbers, and in the end the engine runs on it.

# %% name="set-up"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.block_manager import BlockManager
from course_lib.checks import NotDone, check
from course_lib.checks.lesson_02 import for_engine
from course_lib.lab import block_map, block_map_alt, compare, compare_alt, show
from course_lib.runners import FakeRunner
from course_lib.scheduler import Scheduler
from course_lib.slots import blocks_needed

# %% [markdown] name="task-02-1"
# ## 02.1 How many new blocks a chunk needs
#
# A request has some tokens in the cache and holds some blocks. Now a chunk of new tokens is to be computed (a decode is a
# chunk of one): how many blocks must it be given first?
#
# ```text
# block_size 4, 6 tokens cached, 2 blocks held
#
#   ■ ■ ■ ■   ■ ■ · ·
#   block 0   block 1
#
# a chunk of 7 comes
#
#   ■ ■ ■ ■   ■ ■ □ □   □ □ □ □   □ · · ·
#   block 0   block 1   new       new
# ```

# %% name="your-02-1"
def new_blocks_needed(cached_tokens, new_tokens, held_blocks, block_size):
    """Blocks to hand out before a chunk is computed.

    cached_tokens  tokens of the request in the cache, before the chunk
    new_tokens     tokens of the chunk, at least 1
    held_blocks    blocks in the request's table; at least as many as its cached tokens fill
    block_size     tokens per block
    Returns the number of new blocks, 0 if it holds enough.
    """
    ### BEGIN SOLUTION
    full, rest = divmod(cached_tokens + new_tokens, block_size)
    if rest:
        full += 1
    return max(0, full - held_blocks)
    ### END SOLUTION

# %% name="check-02-1"
check("02.1", new_blocks_needed)

# %% [markdown] name="hints-02-1"
# <details><summary>Hint 1: the rule</summary>
#
# Don't look at the chunk alone. Ask what the request fills when the chunk is in, and what it has.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Blocks of 4. After 3 tokens it holds one block; two more come. They need one new block: the fourth token goes into the
# old one. And if one more comes instead of two, none.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Tokens afterwards, divided by the block size, rounded up: that many blocks it must have. Take away what it holds. Rounding
# up without floats: divide with a remainder, and one more if there is any.
#
# </details>

# %% name="run-02-1" tags=["needs-your-code"]
class CountedByYou(BlockManager):
    """The engine's block manager, with your number of new blocks."""

    def allocate(self, sequence, num_tokens):
        cached, held = sequence.cached_token_count, len(sequence.block_table)
        new = new_blocks_needed(cached, num_tokens - cached, held, self.block_size)
        return super().allocate(sequence, (held + new) * self.block_size)


runner = FakeRunner()
config = EngineConfig(num_blocks=80, max_prefill_chunk_size=100, enable_prefix_caching=False)
engine = Engine(runner, config, block_manager=CountedByYou)
prompts = {"document": list(range(1000)), "Ana": list(range(7, 47)), "Ben": list(range(3, 68))}
for name, prompt in prompts.items():
    engine.add_request(prompt, SamplingParams(max_tokens=20), request_id=name)
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            expected = runner.solo(prompts[output.request_id], 20)
            print(f"{output.request_id:8} tokens are right: {output.token_ids == expected}")
    engine.check_invariants()
print("blocks held in each step:", [step.blocks_used for step in engine.trace.steps])
show(block_map(engine.trace, step=11, title="Your blocks, in step 11"), block_map_alt(engine.trace, step=11))

# %% [markdown] name="task-02-2"
# ## 02.2 A block manager
#
# Write the three deeds of a block manager: `allocate` (all or nothing), `share`, and `free`, which gives a block back to the pool
# when nobody holds it any more. A request is a `Sequence`; of it you need one thing, its list `block_table`.
#
# ```text
# 5 blocks of 4 tokens        block tables       reference   free list
#                             Ana      Ben       counts
#
#                             []       []        0 0 0 0 0   0 1 2 3 4
# allocate(Ana, 6)   True     [0, 1]   []        1 1 0 0 0   2 3 4
# share(Ben, [0])             [0, 1]   [0]       2 1 0 0 0   2 3 4
# allocate(Ben, 8)   True     [0, 1]   [0, 2]    2 1 1 0 0   3 4
# allocate(Ana, 20)  False    [0, 1]   [0, 2]    2 1 1 0 0   3 4
# free(Ana)                   []       [0, 2]    1 0 1 0 0   3 4 1
# ```

# %% name="your-02-2"
class MyBlockManager:
    """Hands out the blocks 0 … num_blocks - 1, lets requests share them, takes them back."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free_list = list(range(num_blocks))  # handed out from the front
        self.ref_counts = [0] * num_blocks  # how many tables each block is in

    @property
    def num_free(self):
        return len(self.free_list)

    def allocate(self, sequence, num_tokens):
        """Append blocks to sequence.block_table until it has room for num_tokens tokens.

        num_tokens counts all tokens of the request, those that have their place already included.
        True if that was done (also when it had room already). False, and nothing has changed, if too few
        blocks are free. The blocks in the table before stay as they are.
        """
        ### BEGIN SOLUTION
        new = blocks_needed(num_tokens, self.block_size) - len(sequence.block_table)
        if new > len(self.free_list):
            return False
        for _ in range(new):
            block = self.free_list.pop(0)
            self.ref_counts[block] += 1
            sequence.block_table += [block]
        return True
        ### END SOLUTION

    def share(self, sequence, blocks):
        """Put `blocks`, which another request holds, into the empty table of `sequence`, in this order.

        `blocks` may be that other request's own table: don't keep it.
        """
        ### BEGIN SOLUTION
        for block in blocks:
            self.ref_counts[block] += 1
        sequence.block_table.extend(blocks)
        ### END SOLUTION

    def free(self, sequence):
        """Take back all blocks of `sequence`; its table is empty afterwards. The order in the free list doesn't count.

        ValueError, and nothing has changed, if a block in its table is held by nobody.
        """
        ### BEGIN SOLUTION
        held = sequence.block_table
        if 0 in (self.ref_counts[block] for block in held):
            raise ValueError(f"held by nobody: a block of {held}")
        for block in held:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_list.append(block)
        held.clear()
        ### END SOLUTION

# %% name="check-02-2"
check("02.2", MyBlockManager)

# %% [markdown] name="hints-02-2"
# <details><summary>Hint 1: the rule</summary>
#
# At every moment each block is either in the free list, once, with a reference count of 0, or in as many tables as its
# count says. Each deed must leave that true, also the one that says no. `blocks_needed(num_tokens, block_size)` from
# `course_lib.slots` rounds up for you.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Ana and Ben share block 0, and Ana is cancelled. If block 0 goes to the free list now, Chen gets it next and writes his
# own keys and values where Ben goes on reading. And if Ana's table still says [0, 1] when she comes back, she writes
# into blocks that are Chen's.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# allocate: how many blocks are missing? More than are free: say no. Else move that many from the front of the free list to
# the table, each with one owner. share: one owner more for each block, and into the table. free: first look whether
# every block has an owner; then one owner less for each, into the free list if that was the last; then empty the table.
#
# </details>

# %% name="run-02-2" tags=["needs-your-code"]
runner = FakeRunner()
config = EngineConfig(num_blocks=48, max_prefill_chunk_size=64, enable_prefix_caching=False, kv_watermark=0.0)
engine = Engine(runner, config, block_manager=for_engine(MyBlockManager))
engine.block_manager.yours.free_list.reverse()  # any order will do
prompts = {f"r{number}": list(range(number, number + 20 + 23 * number)) for number in range(7)}
for name, prompt in prompts.items():
    engine.add_request(prompt, SamplingParams(max_tokens=60), request_id=name)
for step in range(500):
    if step == 4:
        engine.cancel("r6")  # in the middle of its prefill, or still waiting
    for output in engine.step():
        if output.finish_reason == "length":
            expected = runner.solo(prompts[output.request_id], 60)
            print(f"{output.request_id} tokens are right: {output.token_ids == expected}")
    engine.check_invariants()
    if not engine.has_unfinished_requests():
        break
print(f"preempted: {sum(len(step.preempted) for step in engine.trace.steps)}")
print(f"free in the end: {engine.block_manager.num_free} of 48")
svg = block_map(engine.trace, step=30, title="Handed out by you: the pool in step 30")
show(svg, block_map_alt(engine.trace, step=30))

# %% [markdown] name="task-02-3"
# ## 02.3 Who is let in
#
# A request waits at the door. Decide by the blocks whether its first chunk can be computed now. Later chunks and the answer will
# ask for theirs when they come; but those who run already need blocks as well, so some must stay in reserve.
#
# ```text
# blocks of 16, chunks of at most 256, 20 blocks free, reserve 2
#
#   prompt 1000, max_tokens 500
#     first chunk: 256 tokens, 16 blocks     16 + 2 of 20: let it in
#   prompt 300, max_tokens 500
#     first chunk: 256 tokens, 16 blocks     16 + 2 of 20: let it in
#
#   reserving everything would ask for 94 and 50 blocks,
#   and both would wait
# ```
#
# What is let in early may have to be preempted later. The picture at the end shows what you win, and what you pay.

# %% name="your-02-3"
def can_admit(prompt_tokens, max_tokens, chunk_size, block_size, num_free, reserve):
    """May a waiting request begin?

    prompt_tokens  tokens of its prompt, none of them cached
    max_tokens     most tokens that its answer may have
    chunk_size     most tokens of a prompt in one step
    block_size     tokens per block
    num_free       free blocks
    reserve        blocks that must still be free when its first chunk has got its own
    Returns True or False.
    """
    ### BEGIN SOLUTION
    first_chunk = min(prompt_tokens, chunk_size)
    needed, rest = divmod(first_chunk, block_size)
    if rest:
        needed += 1
    return needed + reserve <= num_free
    ### END SOLUTION

# %% name="check-02-3"
check("02.3", can_admit)

# %% [markdown] name="hints-02-3"
# <details><summary>Hint 1: the rule</summary>
#
# Blocks are given per chunk. So what counts at the door is the first chunk, and how many blocks it fills.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# One block of 4 is free and a prompt of 14 comes. There *is* a free block, but the first chunk needs four: the step would
# fail in the middle. On the other hand, a prompt of 1,000 in chunks of 100 doesn't need 63 free blocks, only 7.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# The first chunk is the prompt or the largest chunk, whichever is smaller. Count its blocks, rounded up. Together with
# the reserve they must not be more than what is free.
#
# </details>

# %% name="run-02-3" tags=["needs-your-code"]
class LetInByYou(Scheduler):
    """The engine's scheduler, with your answer at the door."""

    def _can_admit(self, sequence, matched, end):
        if sequence.num_preemptions:  # it comes back: the engine's own rule
            return super()._can_admit(sequence, matched, end)
        return can_admit(
            len(sequence.prompt_token_ids), sequence.max_new_tokens, self.config.max_prefill_chunk_size,
            self.block_size, self.block_manager.num_free, self.config.watermark_blocks,
        )


class AllReserved(BlockManager):
    """Takes blocks for the whole prompt and the longest possible answer with the first chunk."""

    def allocate(self, sequence, num_tokens):
        return super().allocate(sequence, max(num_tokens, len(sequence.prompt_token_ids) + sequence.max_new_tokens))


traces = []
for parts in ({"block_manager": AllReserved}, {"scheduler": LetInByYou}):
    config = EngineConfig(num_blocks=64, max_prefill_chunk_size=64, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config, **parts)
    for number in range(8):
        prompt = [number] * (200 if number % 4 == 0 else 40)
        engine.add_request(prompt, SamplingParams(max_tokens=60), request_id=f"r{number}")
    while engine.has_unfinished_requests():
        engine.step()
    traces.append(engine.trace)
titles = ("Everything reserved at the door", "Let in by you")
for title, trace in zip(titles, traces):
    at_once = max(len(step.chunks) for step in trace.steps)
    preempted = sum(len(step.preempted) for step in trace.steps)
    print(f"{title}: {len(trace.steps)} steps, at most {at_once} requests at once, {preempted} preempted")
show(compare(*traces, titles=titles, by="step"), compare_alt(*traces, titles=titles))

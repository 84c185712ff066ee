# %% [markdown]
# # Exercises 08 · Chunk scheduling
#
# You write the scheduler of a serving engine: how long a chunk may be, who gets one, and which readers get their token
# when not all can. [The lesson](../notebooks/08_chunk_scheduling.ipynb) comes first.

# %% name="set-up"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.checks import NotDone, check
from course_lib.lab import alt_text, compare, compare_alt, show, timeline
from course_lib.runners import FakeRunner
from course_lib.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from course_lib.sequence import PREFILLING, RUNNING, WAITING

# %% [markdown] name="task-08-1"
# ## 08.1 How long is the next chunk?
#
# A request wants prefill. Two budgets, tokens and blocks, and one setting say how many of its
# tokens go into this step.
#
# A worked number: a prompt of 1,000 tokens has 264 of them in the cache, the chunk size is 256, blocks have 16 tokens.
#
# ```text
#  block       0     1   …   15    16  |  17    18   …   31    32
#  cached    [16]  [16]  …  [16]  [ 8··]
#  chunk                          [·· 8] [16]  [16]  …  [16]  [ 8··]
#
#  cached: 264 tokens in 17 blocks; 8 slots of the last are free
#  chunk:  the next 256 tokens, 8 + 15 × 16 + 8
# ```
#
# They fill the 8 free slots, and 248 tokens remain: 15.5 blocks, so **16 new blocks**. Are they not free? Then the
# request gets nothing in this step. (It could get a shorter chunk. Our engine does that only when nothing else moves.)


# %% name="your-08-1"
def chunk_length(remaining: int, cached: int, tokens_left: int, free_blocks: int, max_chunk: int, block_size: int) -> int:
    """Tokens of the next prefill chunk of one request, or 0 if it gets none in this step.

    remaining    prompt tokens that have no K/V yet, at least 1
    cached       tokens of the request that have K/V; it holds just the blocks that these need
    tokens_left  what is left of the step's token budget, at least 0
    free_blocks  blocks that nobody holds
    max_chunk    max_prefill_chunk_size, in tokens
    block_size   tokens per block

    The chunk is as long as remaining, max_chunk and tokens_left allow. It's never shortened for want of blocks: a
    chunk whose new blocks are not all free isn't scheduled at all.
    """
    ### BEGIN SOLUTION
    size = min(remaining, tokens_left, max_chunk)
    held = (cached + block_size - 1) // block_size
    needed = (cached + size + block_size - 1) // block_size
    if needed - held > free_blocks:
        return 0
    return size
    ### END SOLUTION


# %% name="check-08-1"
check("08.1", chunk_length)

# %% [markdown] name="hints-08-1"
# <details><summary>Hint 1: the rule</summary>
#
# First the tokens: the smallest of three numbers. Then the blocks, for a chunk of that length: how many does the request
# need to hold after the chunk, and how many does it hold before?
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# 20 tokens are cached, in 2 blocks of 16; one block is free, 25 tokens remain. 12 of them fit into the second block, 13 into
# the free one. A formula that rounds `25 / 16` up asks for 2 new blocks, and gets nothing.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Blocks for n tokens: n divided by the block size, rounded up. Compute it for `cached` and for `cached` plus the
# chunk; the difference is what must be free. If it isn't, the answer is 0.
#
# </details>


# %% name="run-08-1" tags=["needs-your-code"]
class WithMyChunks(Scheduler):
    def _chunk_size(self, sequence, start, tokens, share):
        remaining, free = sequence.known_token_count - start, self.block_manager.num_free
        return chunk_length(remaining, start, tokens, free, self.config.max_prefill_chunk_size, self.block_size)


# Exactly the blocks that B needs. As long as A holds 2 of them, B's last chunk must wait.
config = EngineConfig(num_blocks=62, max_num_batched_tokens=128, max_prefill_chunk_size=128, enable_prefix_caching=False,
                      kv_watermark=0.0)  # fmt: skip
engine = Engine(FakeRunner(), config, scheduler=WithMyChunks)
engine.add_request([1] * 20, SamplingParams(max_tokens=12), request_id="A")
engine.step()
engine.add_request(list(range(990)), SamplingParams(max_tokens=2), request_id="B")
while engine.has_unfinished_requests():
    engine.step()
    engine.check_invariants()
chunks = [
    chunk.num_tokens
    for step in engine.trace.steps
    for chunk in step.chunks
    if chunk.request == "B" and chunk.kind == "prefill"
]
print("B's chunks:", chunks)
assert sum(chunks) == 990, "something was computed twice: B was preempted, for want of a block that it didn't need"
assert len(chunks) == 8, "a chunk was shortened for want of blocks"
show(timeline(engine.trace, title="Your chunk lengths, in the engine's scheduler"), alt_text(engine.trace))

# %% [markdown] name="task-08-2"
# ## 08.2 One step, three budgets
#
# Write `schedule`: which requests get how many tokens in this step. And `has_unfinished`: when is there nothing left
# to do?
#
# The budgets are `self.config.max_num_batched_tokens` (tokens in this step), `self.config.max_num_seqs` (requests
# that have been begun and aren't done) and the free blocks. The queues are `self.running`, `self.prefilling` and
# `self.waiting`, each in the order of arrival. You only read them: after the forward pass the engine moves everybody
# to the right queue.
#
# A worked step, with a budget of 100 tokens, chunks of at most 64, room for 3 requests:
#
# ```text
# RUNNING     A  1 token                       A: 1    (99 tokens left)
# PREFILLING  B  200 tokens, 150 in the cache  B: 50   (49 tokens left)
# WAITING     C  40 tokens                     C: 40   (9 tokens left)
#             D  10 tokens                     nothing
#
# D: three requests are in flight, there's no seat for it
# ```


# %% name="your-08-2"
class MyScheduler(Scheduler):
    """A scheduler for `Engine(..., scheduler=MyScheduler)`: decode first, then PREFILLING, then WAITING."""

    def schedule(self) -> SchedulerOutput:
        """Choose the chunks of the next step with `self.add_chunk`, and allocate the blocks that they write to.

        - Every RUNNING request gets one token. (One that finds no block for it is left out, and costs
          no token; those behind it may still get theirs.)
        - A prefill chunk has at most max_prefill_chunk_size tokens, and at most what is left of the token budget.
          sequence.remaining_token_count is what its prefill still has to compute.
        - A WAITING request needs a free seat, before it takes any blocks: at most max_num_seqs are in flight, and
          RUNNING, PREFILLING and those begun in this step count.
        - A request that can't get its blocks gets nothing, and no prefill goes to anyone behind it.
        """
        out = SchedulerOutput(self.step, self.block_size)
        ### BEGIN SOLUTION
        tokens = self.config.max_num_batched_tokens
        seats = self.config.max_num_seqs - len(self.running) - len(self.prefilling)
        for reader in self.running:
            if self.get_blocks(reader, 1):
                self.add_chunk(out, reader, 1)
                tokens -= 1
        for sequence in self.prefilling + self.waiting:
            size = min(sequence.remaining_token_count, self.config.max_prefill_chunk_size, tokens)
            is_new = sequence.status is WAITING
            if size == 0 or (is_new and seats == 0):
                break
            if not self.get_blocks(sequence, size):
                break
            self.add_chunk(out, sequence, size)
            tokens -= size
            seats -= is_new
        ### END SOLUTION
        return out

    def has_unfinished(self) -> bool:
        """Is any request of this scheduler not at its end?"""
        ### BEGIN SOLUTION
        return len(self.waiting) + len(self.prefilling) + len(self.running) > 0
        ### END SOLUTION

    def get_blocks(self, sequence, size: int) -> bool:
        """Allocate the blocks for the next `size` tokens. False, and nothing is changed, if they aren't free."""
        return self.block_manager.allocate(sequence, sequence.cached_token_count + size)

    def add_chunk(self, out: SchedulerOutput, sequence, size: int) -> None:
        """Put the next `size` tokens of a request into the step."""
        kind = "decode" if sequence.status is RUNNING else "prefill"
        is_last = size == sequence.remaining_token_count
        out.chunks.append(ScheduledChunk(sequence, sequence.cached_token_count, size, kind, is_last))
        if sequence.status is WAITING:
            out.admitted.append(sequence)


# %% name="check-08-2"
check("08.2", MyScheduler)

# %% [markdown] name="hints-08-2"
# <details><summary>Hint 1: the rule</summary>
#
# Two loops: one over those who run, one over those who want prefill, in the order in which they are to be served. Keep
# two numbers, tokens left and seats left, and make them smaller as you give. The blocks keep count of themselves.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Budget 4, two half-filled requests with 10 tokens to go. The first takes 4 tokens. What would you schedule for the
# second? And: `max_num_seqs` is 2, one request runs and one is half-filled. Is there a seat for a new one?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# For each running request: blocks for 1 token? then a chunk of 1. For each of prefilling, then waiting: the chunk is
# the smallest of what remains, the setting, the tokens left. Stop when it's 0, when a new one finds no seat, or when
# the blocks aren't free. Else add it, and subtract what it took.
#
# For `has_unfinished`: there are three queues.
#
# </details>


# %% name="run-08-2" tags=["needs-your-code"]
def serve(scheduler):
    """Four chats, a long document, and a fifth chat that comes after it."""
    config = EngineConfig(num_blocks=128, max_num_batched_tokens=68, max_prefill_chunk_size=64, max_num_seqs=6,
                          enable_prefix_caching=False)  # fmt: skip
    engine = Engine(FakeRunner(), config, scheduler=scheduler)
    for number in range(4):
        engine.add_request([number] * 20, SamplingParams(max_tokens=14), request_id=f"chat {number}")
    engine.step()
    engine.step()
    engine.add_request(list(range(500)), SamplingParams(max_tokens=4), request_id="document")
    engine.add_request([9] * 30, SamplingParams(max_tokens=6), request_id="chat 4")
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
        engine.check_invariants()
    return engine.trace, tokens


mine, my_tokens = serve(MyScheduler)
theirs, their_tokens = serve(Scheduler)
wrong = [name for name, ids in their_tokens.items() if my_tokens.get(name) != ids]
assert not wrong, f"other tokens than with the engine's scheduler: {', '.join(wrong)}"
print(
    f"The same {sum(map(len, my_tokens.values()))} tokens, in {len(mine.steps)} steps with yours and {len(theirs.steps)} with ours."
)
titles = ("Your scheduler", "The engine's")
show(compare(mine, theirs, titles=titles, by="step"), compare_alt(mine, theirs, titles=titles))

# %% [markdown] name="task-08-3"
# ## 08.3 Whose turn is it?
#
# When many requests run, decode can take nearly the whole budget, and a prompt that arrives gets next to nothing. So
# `max_decode_share` caps what decode may take **while prefill is waiting**. Then somebody is left out, and you choose
# who.
#
# A worked number, for a budget of 8 tokens and a share of 0.5: decode may take 4 of them.
#
# ```text
# request           A   B   C   D   E   F
# last_step         7   7   6   6   7   7
# gets its token    x   x   x   x
#
# last_step is the step that last computed something of it.
# C and D have gone longest without; then A and B, who arrived before E.
# ```


# %% name="your-08-3"
def choose_decodes(running: list, prefill_waits: bool, budget: int, share: float) -> list:
    """The RUNNING requests that get their token in this step.

    running        sequences in arrival order; each has `last_step` (a step's number) and `arrival` (smaller is older)
    prefill_waits  does any request want prefill?
    budget, share  decode may take floor(share × budget) tokens, at least 1, while prefill waits; else there's no cap

    Those that have gone longest without a token come first; of equal ones the older.
    """
    ### BEGIN SOLUTION
    if not prefill_waits:
        return running
    cap = max(1, int(share * budget))
    by_turn = sorted(running, key=lambda reader: (reader.last_step, reader.arrival))
    return by_turn[:cap]
    ### END SOLUTION


# %% name="check-08-3"
check("08.3", choose_decodes)

# %% [markdown] name="hints-08-3"
# <details><summary>Hint 1: the rule</summary>
#
# Nobody who runs may wait more than `ceil(running / cap)` steps. So those who were left out come first the next time.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Six run, the cap is 4, and you take the first four of the list. Who are the first four in the next step?
# And what does a share of 0.05 leave of a budget of 8?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# No prefill waits: all of them. Else compute the cap, sort by the last step and then by arrival, and take as many
# from the front as the cap says.
#
# </details>


# %% name="run-08-3" tags=["needs-your-code"]
class Rotating(Scheduler):
    def _schedule_decodes(self, out):
        share, budget = self.config.max_decode_share, self.config.max_num_batched_tokens
        chosen = choose_decodes(list(self.running), bool(self.prefilling or self.waiting), budget, share)
        for sequence in sorted(chosen, key=lambda sequence: sequence.arrival):
            if self.block_manager.allocate(sequence, sequence.cached_token_count + 1):
                out.chunks.append(ScheduledChunk(sequence, sequence.cached_token_count, 1, "decode", True))
        return [sequence for sequence in self.running if sequence not in chosen]


def serve_share(share):
    config = EngineConfig(num_blocks=256, max_num_batched_tokens=16, max_prefill_chunk_size=16, max_num_seqs=16,
                          max_decode_share=share, enable_prefix_caching=False)  # fmt: skip
    engine = Engine(FakeRunner(), config, scheduler=Rotating)
    for number in range(14):
        engine.add_request([number], SamplingParams(max_tokens=40), request_id=f"chat {number:2}")
    engine.step()
    engine.add_request(list(range(96)), SamplingParams(max_tokens=2), request_id="document")
    while "document" in engine.snapshot():
        engine.step()
        engine.check_invariants()
    return engine.trace


all_of_it, half = serve_share(1.0), serve_share(0.5)
titles = ("Decode may take all of the budget", "Decode may take half of it, by your turns")
show(compare(all_of_it, half, titles=titles, by="step"), compare_alt(all_of_it, half, titles=titles))

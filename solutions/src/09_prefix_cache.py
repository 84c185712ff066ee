# %% [markdown]
# # Exercises 09 · Prefix cache
#
# You write a prefix cache: the names of blocks, what of a prompt can be reused, and a pool in which a block has several
# holders. [The lesson](../notebooks/09_prefix_cache.ipynb) comes first.

# %% name="set-up"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.checks import NotDone, check
from course_lib.checks.lesson_09 import engine_with
from course_lib.lab import alt_text, block_map, block_map_alt, show, timeline
from course_lib.runners import FakeRunner

# %% [markdown] name="task-09-1"
# ## 09.1 A hash for each full block
#
# A block of K/V is found by a hash. The K/V of a token depends on every token before it, so the hash of a block has to
# depend on all of them, too: it's made of the **hash of the block before it** and of the block's own tokens.
#
# ```text
# salt
#  └──> hash( · , 11 12 13 14)                  hashes[0]
#        └──> hash( · , 21 22 23 24)            hashes[1]
#              └──> hash( · , 31 32 33 34)      hashes[2]
#                             41 42             not full: no hash
# ```
#
# Before the first block stands the salt, where the request has one. Python's `hash()` of a tuple will do.


# %% name="your-09-1"
def block_hashes(token_ids: list[int], block_size: int, salt: str | None = None) -> list[int]:
    """One hash for each full block of `token_ids`, in their order.

    Two hashes are equal when everything from the beginning of the prompt to the end of the block is equal, the salt included.
    A last block that isn't full has no hash.
    """
    ### BEGIN SOLUTION
    hashes = []
    so_far = salt
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = tuple(token_ids[end - block_size : end])
        so_far = hash((so_far, block))
        hashes.append(so_far)
    return hashes
    ### END SOLUTION


# %% name="check-09-1"
check("09.1", block_hashes)

# %% [markdown] name="hints-09-1"
# <details><summary>Hint 1: the rule</summary>
#
# Each hash goes into the next one. So the third hash knows about the first block, though it never sees its tokens.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Two prompts, A B C and D B C. The second and third blocks have the same tokens. May they have the same hashes? The K/V
# of B after A isn't the K/V of B after D.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Start with the salt. For each full block: the new value is the hash of a tuple of the old value and the block's
# tokens; append it. (A list can't be hashed, a tuple can.)
#
# </details>

# %% name="run-09-1" tags=["needs-your-code"]
config = EngineConfig(num_blocks=24, max_num_batched_tokens=128, max_prefill_chunk_size=64)
engine = Engine(FakeRunner(), config, block_manager=engine_with(block_hashes=block_hashes))
instructions = list(range(64))  # four blocks that three prompts have in common
for number, name in enumerate(("Ana", "Ben", "Chen"), start=1):
    engine.add_request(instructions + [100 * number + k for k in range(40)], SamplingParams(max_tokens=8), request_id=name)
    engine.step()
    engine.step()
    engine.check_invariants()
hits = {name: request.prefix_hit_tokens for name, request in engine.trace.requests.items()}
print("prompt tokens found in the cache, with your hashes:", hits)
show(block_map(engine.trace, title="Found by your hashes"), block_map_alt(engine.trace))

# %% [markdown] name="task-09-2"
# ## 09.2 What can be reused
#
# Walk along a prompt, block by block, as long as the cache has them. Return the blocks that can be reused, and the
# **positions** of the tokens that are left to compute.
#
# Two traps. If every token were reused, nothing would go through the model, and then no logits would give the first
# token. And a hash isn't a proof: two different blocks *can* have the same one. What the cache gives you, you compare
# with what you asked for.
#
# ```text
# blocks of 16, the 4 full blocks of the prompt are cached
#
# prompt of 64 tokens:   reuse 3 blocks, compute positions 48 … 63
# prompt of 65 tokens:   reuse 4 blocks, compute position 64
# ```


# %% name="your-09-2"
def match_prefix(token_ids: list[int], lookup, block_size: int) -> tuple[list[int], list[int]]:
    """The cached beginning of a prompt.

    lookup(parent, tokens)  the entry that the cache has under the hash of these tokens (a tuple) behind `parent` (the
                            entry of the block before, None for the first block), or None.
                            An entry has .parent (the entry it stands behind), .token_ids (a tuple) and .block.
    Returns (blocks, positions): the physical blocks of the longest cached prefix, in order, full blocks only and never all of the
    prompt; and the positions of the tokens that are left to compute.
    """
    ### BEGIN SOLUTION
    blocks, parent = [], None
    for start in range(0, len(token_ids) - block_size, block_size):
        tokens = tuple(token_ids[start : start + block_size])
        entry = lookup(parent, tokens)
        if entry is None:
            break
        if entry.token_ids != tokens or entry.parent is not parent:
            break
        blocks.append(entry.block)
        parent = entry
    positions = range(len(blocks) * block_size, len(token_ids))
    return blocks, list(positions)
    ### END SOLUTION


# %% name="check-09-2"
check("09.2", match_prefix)

# %% [markdown] name="hints-09-2"
# <details><summary>Hint 1: the rule</summary>
#
# Go on as long as three things hold: the block is full and isn't the prompt's end, the cache has an entry, and the
# entry is what you asked for. The first time one doesn't, stop.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Blocks of 4, a prompt of 8, both blocks cached. If you reuse both, which token do you send through the model to get the
# first answer token? And if you reuse one: is the next token's position 0 or 4?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Let the beginning of a block run from 0 in steps of the block size, while there is at least one token behind the
# block. Ask `lookup` with the last entry as the parent. Compare the entry's tokens, and its parent with `is`. The
# positions begin where the reused blocks end.
#
# </details>

# %% name="run-09-2" tags=["needs-your-code"]
runner = FakeRunner()
config = EngineConfig(num_blocks=1024, max_num_batched_tokens=1008, max_prefill_chunk_size=1000)
engine = Engine(runner, config, block_manager=engine_with(match_prefix=match_prefix))
document = list(range(8000))
prompts = {"first": document + [1, 2, 3], "second": document + list(range(9000, 13000))}
for name, prompt in prompts.items():
    (answer,) = [
        output for output in engine.stream(prompt, SamplingParams(max_tokens=2), request_id=name) if output.finished
    ]
    assert answer.token_ids == runner.solo(prompt, 2), f"{name} got other tokens than alone"
    chunks = [
        chunk for step in engine.trace.steps for chunk in step.chunks if chunk.request == name and chunk.kind == "prefill"
    ]
    print(
        f"{name}: {len(prompt)} tokens, {answer.num_cached_tokens} from the cache, {len(chunks)} chunks, the first at {chunks[0].start_pos}"
    )
show(timeline(engine.trace, title="8,003 tokens, then 12,000 of which your match finds 8,000"), alt_text(engine.trace))

# %% [markdown] name="task-09-3"
# ## 09.3 Blocks with several holders
#
# A pool in which a block can be *held* by several requests, and *found* by its key as long as what is in it is true.
# Those are two different things: a block that nobody holds can still be found, and a block that was just taken can't
# be found yet.
#
# ```text
#                  holders of    found
#                  block 0
# take("k1")         0 → 1       no
# filled(0)            1         yes, as "k1"
# share(0)             2         yes
# give_back([0])       1         yes
# give_back([0])       0         yes
# take("k7")           1         no: it's going to hold something else
#                                (when it's block 0's turn)
# ```
#
# When a block must be overwritten, take the one that nobody has held for the longest time. When a request gives its
# blocks back, they become idle all at once. In which order? Its first block may be the beginning of many prompts, its
# last one hardly.


# %% name="your-09-3"
class SharedBlocks:
    """Blocks 0 … num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = [0] * num_blocks  # of each block: how many requests hold it
        self.idle = list(range(num_blocks))  # the blocks that nobody holds: the first one is taken first
        self.meant_for = {}  # block -> the key of what it was taken for
        self.found = {}  # key -> the block in which that can be found

    def find(self, key):
        """The block that holds this content now, or None."""
        return self.found.get(key)

    def take(self, key) -> int | None:
        """A block for new content, held once; None if all are held. What was in it before can't be found from now on.

        key  what it's going to hold; None if that isn't known yet (such a block is never found)
        """
        ### BEGIN SOLUTION
        if len(self.idle) == 0:
            return None
        block = self.idle.pop(0)
        before = self.meant_for.get(block)
        if self.found.get(before) == block:
            del self.found[before]
        self.meant_for[block] = key
        self.holders[block] = 1
        return block
        ### END SOLUTION

    def filled(self, block: int) -> None:
        """The forward pass that filled this block has returned: its content is true."""
        ### BEGIN SOLUTION
        key = self.meant_for[block]
        if key is not None:
            self.found.setdefault(key, block)
        ### END SOLUTION

    def share(self, block: int) -> None:
        """One more request holds this block, which it has found."""
        ### BEGIN SOLUTION
        if block in self.idle:
            self.idle.remove(block)
        self.holders[block] += 1
        ### END SOLUTION

    def give_back(self, blocks: list[int]) -> None:
        """A request ends: it holds these blocks no more. blocks: from its first tokens to its last."""
        ### BEGIN SOLUTION
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.idle.append(block)
        ### END SOLUTION


# %% name="check-09-3"
check("09.3", SharedBlocks)

# %% [markdown] name="hints-09-3"
# <details><summary>Hint 1: the rule</summary>
#
# A block is idle exactly when its number of holders is 0. A key is found exactly when a block was filled for it and
# nobody has taken that block for something else since.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Ana computes a block, Ben finds it and shares it, Ana ends. Chen needs a block. If Ana's leaving made it idle, Chen
# writes over what Ben is reading. And if a block could be found from the moment it's taken, Ben would read it before
# Ana's forward pass has written it.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# take: none idle, None; else the first idle one. If its old key is found in *this* block, forget that. Note the new
# key, one holder. filled: if it has a key, it's found from now on. share: out of the idle ones, one holder more.
# give_back: from the last block to the first: one holder less, and at 0 to the end of the idle ones.
#
# </details>

# %% name="run-09-3" tags=["needs-your-code"]
runner = FakeRunner()
config = EngineConfig(num_blocks=32, max_num_batched_tokens=64, max_prefill_chunk_size=48)
engine = Engine(runner, config, block_manager=engine_with(shared_blocks=SharedBlocks))
instructions = list(range(64))
prompts = {
    name: instructions + [100 * number + k for k in range(30)]
    for number, name in enumerate(("Ana", "Ben", "Chen", "Dora"), 1)
}
tokens = {}


def step():
    for output in engine.step():
        tokens[output.request_id] = output.token_ids
    engine.check_invariants()


for name, prompt in prompts.items():
    engine.add_request(prompt, SamplingParams(max_tokens=12), request_id=name)
    for _ in range(4):
        step()
while engine.has_unfinished_requests():
    step()
wrong = [name for name, prompt in prompts.items() if tokens.get(name) != runner.solo(prompt, 12)]
assert not wrong, f"other tokens than alone: {', '.join(wrong)}"
print(
    "Everybody's tokens are those they get alone. From the cache:",
    {n: r.prefix_hit_tokens for n, r in engine.trace.requests.items()},
)
show(timeline(engine.trace, title="On your blocks"), alt_text(engine.trace))

# %% [markdown] name="pool-09-3"
# And the pool, in the step with the most blocks in use:

# %% name="pool-run-09-3" tags=["needs-your-code"]
assert SharedBlocks(1).take("k1") == 0, "a pool of one block gives block 0"
busiest = max(range(len(engine.trace.steps)), key=lambda place: engine.trace.steps[place].blocks_used)
show(
    block_map(engine.trace, busiest, title="Your pool: the instructions' blocks have several holders"),
    block_map_alt(engine.trace, busiest),
)

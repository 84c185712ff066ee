# %% [markdown]
# # 02 · Blocks
#
# **After this lesson you can**
#
# - say how much memory a server wastes when it reserves room for the longest possible answer, and measure it;
# - read a block table, and find the block and the place in it where a token's keys and values are;
# - count the blocks a request holds after each chunk of its prompt, and the new ones that each chunk needs;
# - weigh giving a prompt all its blocks up front against giving them chunk by chunk, on pictures of both;
# - say what must be true of a pool of blocks at every moment, also when requests share blocks or are cancelled.
#
# **Time** 40 minutes · **You need** lesson 01 · **Adds to the engine** the block manager.

# %% name="house"
from course_lib.lab import block_map, block_map_alt, compare, compare_alt, house, show, source

house("block_manager")

# %% [markdown]
# ## Sixty people and one memory
#
# Lesson 01 showed a price: 46,080 bytes of keys and values for every token of SmolLM2 (in float32), 131,072 for
# Llama-3-8B (in bfloat16). All requests that run at the same time share what memory there is. Let that be room for
# **8,192 tokens**, and let sixty people send a chat message at nearly the same moment.
#
# Nobody knows how long an answer will be. But no text, prompt and answer together, may be longer than **1,024
# tokens**. So reserve 1,024 for each request, in one piece, and nothing can go wrong.

# %% name="set-up"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.block_manager import BlockManager
from course_lib.hardware import MODELS, num_blocks_for
from course_lib.runners import FakeRunner
from course_lib.workloads import chat, replay

POOL = 8192  # tokens
requests = chat(rate=100, count=60, seed=1, prompt_tokens=(32, 256), output_tokens=(32, 256))
lengths = [request.num_prompt_tokens + request.max_tokens for request in requests]

print(f"{len(requests)} requests of {min(lengths)} to {max(lengths)} tokens, prompt and answer together")
print(f"{sum(lengths) / len(lengths):.0f} tokens on average")
print(f"with 1,024 tokens reserved for each, {POOL} / 1024 = {POOL // 1024} requests fit at a time")

# %% [markdown]
# Eight at a time, and each of them uses less than a third of what it holds.
#
# Now cut the memory into **blocks** of 16 tokens, 512 of them, and give a request one block whenever its last one is full.
#
# > **Predict, then run.** With blocks, how many of the sixty are being served at the same time, when it is most?

# %% name="guess-at-once"
my_guess_at_once = 8  # write yours

# %% [markdown]
# Both cases are one engine with one setting changed. A block of 1,024 tokens *is* a reservation for the longest
# text: every request takes one and never needs a second. `FakeRunner` (lesson 00) computes nothing, so time is counted
# in steps here.

# %% name="at-once"
def serve(block_size: int) -> dict:
    """Serve the sixty requests from the same memory in blocks of `block_size`; what the trace says about it."""
    config = EngineConfig(block_size=block_size, num_blocks=POOL // block_size, max_num_seqs=64,
                          enable_prefix_caching=False, kv_watermark=0.0)
    trace = replay(Engine(FakeRunner(), config), requests)
    in_cache, running, filled, held = {}, [], 0, 0
    for step in trace.steps:
        for name in step.preempted:
            in_cache.pop(name)
        in_cache |= {chunk.request: chunk.start_pos + chunk.num_tokens for chunk in step.chunks}
        running.append(len(in_cache))
        filled += sum(in_cache.values())
        held += step.blocks_used * block_size
        for name in step.finished:
            in_cache.pop(name)
    return {
        "most": max(running), "mean": sum(running) / len(running), "steps": len(running),
        "filled": filled / held, "preempted": sum(len(step.preempted) for step in trace.steps),
    }


one_piece, blocks = serve(1024), serve(16)
print("                     at once: most   on average   steps until all are served   memory held that is filled")
for name, run in (("1,024 in one piece", one_piece), ("blocks of 16", blocks)):
    print(f"{name:20}{run['most']:14}{run['mean']:13.1f}{run['steps']:29}{run['filled']:29.0%}")
print(f"\nYou said {my_guess_at_once}.")

# %% [markdown]
# More than `8192 / 294`, about 28, can be there at once, because not all of them are at their end: a request that has just
# begun holds its prompt, and nothing for an answer that isn't written yet.
#
# The last column is the point. In one piece, most of the memory that is "in use" holds nothing. With blocks, what is
# held and empty is the rest of each request's *last* block: less than 16 tokens, whatever the request's length.
#
# Then why not blocks of one token?

# %% name="block-sizes"
print("block size   at once: most   on average   steps   filled   preempted")
for block_size in (1024, 512, 256, 64, 16, 4, 1):
    run = serve(block_size)
    print(f"{block_size:10}{run['most']:16}{run['mean']:13.1f}{run['steps']:8}"
          f"{run['filled']:9.0%}{run['preempted']:12}")

# %% [markdown]
# Below 16 there is hardly anything left to win, and every block has its price: an entry in a table, and a jump in memory
# whenever attention passes from one block to the next (lesson 04).
#
# The last column is an honest cost of the whole idea. Whoever gives memory only when it is needed can promise more
# than there is. Sometimes a running request finds no free block; the engine then takes the blocks of the newest one and
# lets it start again later. That is called *preemption*, and lesson 06 comes to it. Sixty people are served in a third
# of the steps all the same.
#
# ## A block table
#
# Blocks are handed out as they become free, so a request's blocks lie anywhere. Below, four chats ran for a while in a
# pool of 40 blocks. Two of them ended, and Emil came with a longer prompt.

# %% name="map"
def tokens(request: int, count: int) -> list[int]:
    """`count` token ids that no other request has."""
    return [1000 * request + k for k in range(count)]


engine = Engine(FakeRunner(), EngineConfig(num_blocks=40, enable_prefix_caching=False))
chats = [("Ana", 70, 90), ("Ben", 30, 12), ("Chen", 100, 80), ("Dora", 50, 16)]
for number, (name, prompt, answer) in enumerate(chats):
    engine.add_request(tokens(number, prompt), SamplingParams(max_tokens=answer), request_id=name)
for _ in range(30):
    engine.step()
engine.add_request(tokens(5, 230), SamplingParams(max_tokens=40), request_id="Emil")
for _ in range(20):
    engine.step()
show(block_map(engine.trace, title="40 blocks of 16 tokens, after 50 steps"), block_map_alt(engine.trace))

# %% [markdown]
# Each cell is a block; a pale end is a place where no token is yet. Only the last block of a request has one.
#
# What keeps a request together is its **block table**: a list that says, for its first 16 tokens, for the next 16, and so
# on, *which block of the pool* they are in. The number of a block in that list is its **logical** number, the one in
# the pool its **physical** number. Besides the tables, the block manager keeps one more list: the free blocks, in the
# order in which it will hand them out.

# %% name="table"
state = engine.snapshot()["Ana"]
print(f"Ana has {state.cached_token_count} tokens in the cache, in {len(state.block_table)} blocks\n")
print("logical   tokens        physical")
for logical, physical in enumerate(state.block_table):
    last = min(16 * logical + 15, state.cached_token_count - 1)
    print(f"{logical:7}   {16 * logical:3} to {last:3}{physical:12}")
free = engine.block_manager.free_blocks()
print(f"\nEmil's blocks: {engine.snapshot()['Emil'].block_table}")
print(f"free, in the order in which they will be handed out: {free}")

# %% [markdown]
# Ana's prompt got its five blocks together. While she was being answered, the others took blocks too, so her table jumps.
# What Ben and Dora gave back when they ended went to the end of the free list (last block first), to be handed out again:
# Ana's last block, number 18, was Ben's before.
#
# To Ana it makes no difference: the table says where a token is, and attention follows the table. Does it really make
# none? SmolLM2, once with the free blocks in order and once shuffled:

# %% name="smollm2"
loaded = load_model("smollm2", device="cpu")
runner = ModelRunner(loaded)
prompt = demo.chat_prompt(loaded.tokenizer, "What is a lighthouse for?")

answers = []
for seed in (None, 1):
    engine = Engine(runner, EngineConfig(num_blocks=64))
    if seed is not None:
        engine.block_manager.shuffle_free_blocks(seed)
    for output in engine.stream(prompt, SamplingParams(max_tokens=30)):
        table = engine.snapshot()["r0"].block_table if not output.finished else table
    answers.append(output.token_ids)
    print(f"blocks {table}: {output.text[:60]} …")
print("same tokens:", answers[0] == answers[1])

# %% [markdown]
# ## How many blocks a chunk needs
#
# A long prompt comes in chunks (lesson 00), and a chunk needs blocks before it can be computed. The engine gives them
# **per chunk**: what this chunk needs, and nothing for the chunks after it. Take a prompt of 1,000 tokens and blocks of
# 16.
#
# > **Predict, then run.** In chunks of 256, how many blocks does the request hold after each of its four chunks? And in
# > chunks of 100: how many *new* blocks does each of the first five take?

# %% name="guess-chunks"
my_guess_held = [16, 32, 48, 64]  # chunks of 256: blocks held after each; write yours
my_guess_new = [7, 7, 7, 7, 7]  # chunks of 100: new blocks of each; write yours

# %% name="chunks"
def blocks_after_each_chunk(prompt_tokens: int, chunk_size: int) -> list[int]:
    config = EngineConfig(max_prefill_chunk_size=chunk_size, max_num_batched_tokens=1024, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config)
    engine.add_request(tokens(0, prompt_tokens), SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return [step.blocks_used for step in engine.trace.steps]


held = blocks_after_each_chunk(1000, 256)
print(f"1,000 tokens in chunks of 256:    blocks held {held}")
print(f"                                  you said    {my_guess_held}")
held = blocks_after_each_chunk(1000, 100)
print(f"1,000 tokens in chunks of 100:    blocks held {held}")
print(f"                                  new blocks  {[after - before for before, after in zip([0, *held], held)]}")
print(f"                                  you said    {my_guess_new} for the first five")
print(f"8,192 tokens in chunks of 1,024:  blocks held {blocks_after_each_chunk(8192, 1024)}")

# %% [markdown]
# The last chunk of the first case has 232 tokens, and 1,000 tokens fit in 63 blocks. In the second case chunks end in
# the middle of a block, and what is free there belongs to the next chunk. So the number of new blocks can't be found
# from the chunk alone; it depends on where the chunk begins. A request gets a block when a token has nowhere else to go, and
# not before.
#
# An upper limit is easy. The last line is the server-scale prompt of lesson 00: each chunk of 1,024 tokens takes
# **at most 64** blocks of 16. If fewer are free than a chunk needs, the chunk can't be computed in this step. So the scheduler has
# to know *before* it decides: blocks are a budget, beside the budget of tokens (lesson 08).
#
# ## Up front, or per chunk?
#
# There is another way. When the prompt is admitted, give it blocks for all of its 1,000 tokens; each chunk then writes
# where it has to, and no chunk can ever lack a block. A class with one method turns our block manager into that one:

# %% name="up-front"
class UpFront(BlockManager):
    """Gives a prompt all its blocks with its first chunk."""

    def allocate(self, sequence, num_tokens: int) -> bool:
        return super().allocate(sequence, max(num_tokens, len(sequence.prompt_token_ids)))


def serve_document(block_manager: type, cancel_after: int | None = None) -> Engine:
    """Three chats run; a document of 1,000 tokens arrives, and one step later three more chats."""
    config = EngineConfig(num_blocks=80, max_num_seqs=16, max_num_batched_tokens=272,
                          max_prefill_chunk_size=128, enable_prefix_caching=False, kv_watermark=0.0)
    engine = Engine(FakeRunner(), config, block_manager=block_manager)

    def add(name: str, number: int, prompt: int, answer: int) -> None:
        engine.add_request(tokens(number, prompt), SamplingParams(max_tokens=answer), request_id=name)

    for number in (1, 2, 3):
        add(f"chat {number}", number, 40, 20)
    for _ in range(3):
        engine.step()
    add("document", 0, 1000, 4)
    engine.step()
    for number in (4, 5, 6):
        add(f"chat {number}", number, 40, 16)
    while engine.has_unfinished_requests() and len(engine.trace.steps) != cancel_after:
        engine.step()
    return engine


# %% [markdown]
# The pool has 80 blocks of 16. Three chats begin in step 0. The document arrives in step 3, in chunks of 128 tokens, one
# a step, and three more chats in step 4. A chat has a prompt of 40 tokens; the first three get 20 tokens, the others 16.
# So the document needs 63 blocks in the end, a chat 4. All chats get a token in every step in which they hold their blocks,
# and a request whose last chunk of the prompt is computed in a step gets its first token in that step.
#
# > **Predict, then run.** In which step after its arrival (that of its arrival is 1) does the last chat get its first token,
# > up front and per chunk? And the document?

# %% name="guess-up-front"
my_guess_chat = {"up front": 2, "per chunk": 2}  # the step in which chat 6 has its first token: write yours
my_guess_document = {"up front": 2, "per chunk": 2}  # the step in which the document has its first token: write yours

# %% name="compare"
runs = {"up front": serve_document(UpFront), "per chunk": serve_document(BlockManager)}


def steps_to_first_token(engine: Engine, name: str) -> int:
    request = engine.trace.requests[name]
    return next(step.index for step in engine.trace.steps if name in step.tokens) - request.arrival_step + 1


for name, engine in runs.items():
    chat_6, document = (steps_to_first_token(engine, who) for who in ("chat 6", "document"))
    print(f"{name:10} first token of chat 6 in its step {chat_6:2} (you said {my_guess_chat[name]}), "
          f"of the document in its step {document:2} (you said {my_guess_document[name]})")
traces = [engine.trace for engine in runs.values()]
titles = ("Blocks up front", "Blocks per chunk")
show(compare(*traces, titles=titles, by="step"), compare_alt(*traces, titles=titles))

# %% [markdown]
# Above, the document takes 63 blocks for its first 128 tokens. What it holds and doesn't use yet is denied to chats that would
# have used it at once: one of them is turned away at the door, another one loses its blocks in the middle.
# Below, the chats get what is free, and the document goes on while it can. Then *it* waits, half-filled, until the
# chats are done. That is its 18: seven chunks in seven steps, which fill 56 blocks; six chats hold 21 by then, so 3 are free,
# and the last chunk needs 7. It waits for ten steps, till the chats end, and is computed in the next.
#
# | | up front | per chunk |
# |---|---|---|
# | a chunk needs | nothing more: its blocks are there | a check and an allocation, before every chunk |
# | memory is held | from the first chunk on, all of it | as it is filled |
# | others | can't use what the prompt doesn't use yet | can |
# | the prompt | is certain to be prefilled, once admitted | may have to wait in the middle, holding what it has |
#
# The engine gives blocks per chunk: as much as is used, when it is used. That needs a scheduler which looks at the free
# blocks before every chunk, and which finishes what it has begun before it begins more. You will write it in lesson 08.
#
# ## Cancelled in the middle
#
# The document's sender closes the window after three chunks. Not a token of an answer has appeared, but blocks are
# held. They must come back, all of them and at once.

# %% name="cancel"
for name, block_manager in (("up front", UpFront), ("per chunk", BlockManager)):
    engine = serve_document(block_manager, cancel_after=6)
    state = engine.snapshot()["document"]
    before = engine.block_manager.num_free
    engine.cancel("document")
    print(f"{name:10} {state.status}, {state.prefilled_token_count} tokens in {len(state.block_table)} blocks;"
          f" free blocks: {before} before the cancel, {engine.block_manager.num_free} after")

# %% [markdown]
# Up front, 39 blocks had been kept from everybody for tokens that were never computed. Per chunk, none.
#
# ## One block, two owners
#
# A block that is full doesn't change any more. If two prompts begin with the same tokens (the same instructions to a
# chatbot, say), the second can use the first one's blocks: same tokens, same positions, same keys and values. The block
# manager only has to remember *how many* tables a block is in: its **reference count**. How equal beginnings are found
# is the subject of lesson 09; here it is about giving back.
#
# > **Predict, then run.** Ana's and Ben's prompts have 42 tokens each, of which the first 32 are the same. Ana is cancelled.
# > How many of her 3 blocks become free?

# %% name="guess-shared"
my_guess_freed = 3  # write yours

# %% name="shared"
runner = FakeRunner()
engine = Engine(runner, EngineConfig(num_blocks=16))
instructions = tokens(0, 32)
engine.add_request(instructions + tokens(1, 10), SamplingParams(max_tokens=40), request_id="Ana")
engine.step()
engine.add_request(instructions + tokens(2, 10), SamplingParams(max_tokens=8), request_id="Ben")
engine.step()

blocks = engine.block_manager
tables = {name: state.block_table for name, state in engine.snapshot().items()}
print("block tables:    ", tables)
print("reference counts:", {block: blocks.ref_counts[block] for block in sorted({*tables["Ana"], *tables["Ben"]})})
show(block_map(engine.trace, title="Two requests, two blocks in common"), block_map_alt(engine.trace))

# %% name="cancel-shared"
before = blocks.num_free
engine.cancel("Ana")
print(f"free blocks: {before} before the cancel, {blocks.num_free} after. You said {my_guess_freed} become free.")
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.request_id == "Ben" and output.finished:
            print("Ben's tokens are right:", output.token_ids == runner.solo(instructions + tokens(2, 10), 8))

# %% [markdown]
# Giving back means: one owner less. Only who gives back the *last* reference makes the block free. Had Ana's cancel freed all
# three, the next request would have written its own keys and values into two of them, under Ben's eyes.
#
# ## What must always be true
#
# A block manager that errs doesn't crash. It hands out a block twice, and two people's answers turn to nonsense; or it
# forgets one, and a week later the server is "full" with nobody there. So write down what must be true, and
# check it. The engine's own check, which its tests call after every step. (`_free` are the blocks with nothing in them to
# reuse. `_cached` are free blocks too, held by nobody; their content is kept for a prompt that begins with the same tokens,
# until the memory is needed: lesson 09. Without prefix caching `_cached` is empty.)

# %% name="source-check"
source(BlockManager.check, mark=("counts == self.ref_counts", "listed as free twice", "free + used != num_blocks"))

# %% [markdown]
# ## At a server's scale
#
# How many blocks does a GPU have? What is left beside the weights, divided by the bytes of a block. For Llama-3-8B on
# an H100 with 80 GB, of which a tenth is kept for other things:

# %% name="scale"
model = MODELS["llama3-8b"]
num_blocks = num_blocks_for(model, "h100", block_size=16)
per_token = 2 * model.kv_values_per_token  # bytes: two for each number, in bfloat16
print(f"a block: 16 × {per_token:,} bytes = {16 * per_token / 1e6:.1f} MB")
print(f"the memory: {num_blocks:,} blocks = {16 * num_blocks:,} tokens")
print(f"requests at once, with 8,192 tokens reserved for each: {16 * num_blocks // 8192}")
print(f"requests at once, if they hold 300 tokens on average, in blocks of 16: {num_blocks // -(-300 // 16)}")

# %% [markdown]
# ## The rule
#
# > **A request holds as many blocks as its cached tokens fill, and not one more: it gets one when a token needs it, and
# > gives back each of them exactly once.**
#
# ## Your turn
#
# [Exercise 02](../exercises/02_blocks.ipynb): count the new blocks of a chunk, write the block manager that hands them
# out, shares and takes them back, and decide who is let in. All three run in the engine above.
#
# ## What production does
#
# - *Efficient Memory Management for Large Language Model Serving with PagedAttention* (Kwon et al., SOSP 2023) brought
#   the idea from the operating systems' virtual memory. In the systems that it measured, 20.4 to 38.2 per cent of the
#   memory reserved for keys and values held any. It became vLLM.
# - In vLLM, `KVCacheManager.allocate_slots` (`vllm/v1/core/kv_cache_manager.py`) gives blocks per step, for the tokens of
#   that step, and returns `None` when there are too few: all or nothing. Its `BlockPool` keeps the free blocks in a linked
#   list and a `ref_cnt` in each block. Its blocks usually have 16 tokens (`--block-size`).
# - SGLang's pool has pages too (`--page-size`); a page of one token, which it began with, is the last line of our table of
#   block sizes.
#
# ## Three questions
#
# 1. Two documents of 600 tokens arrive together; the pool has 64 blocks of 16. Blocks are given per chunk. What can
#    go wrong, and what can't with blocks up front?
#
#    <details><summary>Answer</summary>
#
#    Each needs 38 blocks. If both are prefilled in turns, both get stuck half-filled, at 32 blocks each: neither can go on,
#    neither gives anything back. Somebody has to notice and preempt one of them. Up front, the second isn't
#    admitted before the first is done. Finishing one prefill before beginning the next avoids it nearly as well.
#
#    </details>
#
# 2. How much memory do 100 running requests waste with blocks of 16, on average? Does it depend on how long they are?
#
#    <details><summary>Answer</summary>
#
#    The last block of each is half-empty on average: some 100 × 8 = 800 tokens. It doesn't depend on their length.
#    For a thousand-token request that is under one per cent, for one of eight tokens it is half.
#
#    </details>
#
# 3. May the *last*, partly filled block of a prompt be shared between two requests?
#
#    <details><summary>Answer</summary>
#
#    Not if both write to it: each would put the keys and values of its own next token into the same slot. Either only
#    full blocks are shared (this engine, vLLM), or the block is copied for whoever writes first: *copy on write*.
#
#    </details>
#
# **Lesson 03** looks at a single line: given the table, in which slot does a token go? There are several wrong
# answers, and each of them works for a while.

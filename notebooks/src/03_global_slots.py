# %% [markdown]
# # 03 · Global slots
#
# **After this lesson you can**
#
# - say in which slot of the memory any token's keys and values belong, whatever chunk it came in;
# - explain how an engine can lose half a prompt without an error, and still answer in good English;
# - tell a logical block from a physical one, and show the bug of mixing them up;
# - write down the test cases that find such bugs, and say which cases never will.
#
# **Time** 30 minutes · **You need** lesson 02 (blocks, the block table) · **Adds to the engine** the slot of every token.

# %% name="map"
from course_lib.lab import house, source

house("slots")

# %% [markdown]
# ## An engine that was right
#
# Lesson 02 showed a **block table**: for each request, a list of the blocks that it holds. A block has room for
# `block_size` tokens, and each of these places is a **slot**: one row of K and one row of V, in every layer. Slots are
# numbered through the whole pool, so block 5 with 16 tokens a block is slots 80 to 95.
#
# Before a forward pass, the engine must say for each of its tokens: *your K/V goes into slot so-and-so*. That list is
# the **slot mapping**.
#
# Here is the slot mapping of an engine from the time when prompts came in one piece. It knows two cases: a prompt
# begins in the first slot of the request's first block, and a decode step writes one token behind all the others.

# %% name="old-engine"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, load_model
from course_lib.demo import chat_prompt, document_text
from course_lib.lab.slot_map import SlotLog
from course_lib.runners import FakeRunner
from course_lib.slots import slot_mapping


def whole_prompts_only(block_table, start_pos, num_tokens, block_size):
    """Our own slot mapping, except that every prompt piece is said to begin at token 0 of the request."""
    is_decode = num_tokens == 1
    return slot_mapping(block_table, start_pos if is_decode else 0, num_tokens, block_size)


runner = ModelRunner(load_model("smollm2", device="cpu"))
question = (
    "What is the capital of France? Please answer in one short sentence, and begin your answer with the words: "
    "The capital of. Do not add anything else, no explanation and no greeting; I will read your answer to a class of "
    "young pupils who are learning the names of European cities this week."
)


def ask(chunk_size, mapping):
    config = EngineConfig(max_prefill_chunk_size=chunk_size, enable_prefix_caching=False)
    engine = Engine(runner, config, slot_mapping=mapping)
    prompt = chat_prompt(runner.tokenizer, question)
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=20), progress=False)
    engine.check_invariants()
    return answer.text


print(f"{len(chat_prompt(runner.tokenizer, question))} prompt tokens, one piece: {ask(None, whole_prompts_only)!r}")

# %% [markdown]
# Right, and it has been right for months. Now somebody sets `max_prefill_chunk_size=64`, because lesson 00 was so
# convincing. The prompt of 90 tokens comes in two chunks, of 64 and 26 tokens, and the second chunk is written where
# the first one was.
#
# > **Predict, then run.** What will the engine do?
# > A: raise an error, since a slot is written twice · B: produce garbage characters · C: answer as before, since the
# > last chunk is what counts · D: answer in fluent English, but something else

# %% name="guess-failure"
my_guess = "A"  # write yours

# %% name="run-failure"
print(f"You said {my_guess}.\n")
for chunk_size in (64, 48, 32):
    print(f"chunks of {chunk_size}, the old slots: {ask(chunk_size, whole_prompts_only)!r}")
    print(f"              our slots: {ask(chunk_size, slot_mapping)!r}\n")

# %% [markdown]
# D. No error, no NaN, and `check_invariants()` has nothing to say: the books about who holds which block are in
# perfect order. It is the *contents* that are wrong.
#
# Look at the first pair again. The old slots give *almost* the right sentence. A test that looks for the word "Paris"
# is green. This is what makes the bug expensive: it doesn't crash, it makes the model a little more stupid, and
# only for long prompts.
#
# ## The memory, in slow motion
#
# The model is too large to look into. So take a request of 10 tokens, blocks of 4 slots and chunks of 6, and let a
# `SlotLog` write down what the engine's slot mapping says. The pool's free list is shuffled, as it would be after an
# hour of traffic.
#
# > **Predict, then run.** Chunk 0 is tokens 0 to 5, chunk 1 is tokens 6 to 9, both written from the request's first
# > slot on. Of how many of the 10 tokens is the K/V still there when the prefill is done?

# %% name="guess-left"
my_guess_tokens_left = 4  # write yours

# %% name="picture-old"
def run(mapping, prompt_tokens, chunk_size, block_size, max_tokens=1, num_blocks=256, seed=4):
    """One request through a real engine; what its slot mapping said."""
    log = SlotLog(mapping)
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_prefill_chunk_size=chunk_size,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    engine = Engine(FakeRunner(), config, slot_mapping=log)
    engine.block_manager.shuffle_free_blocks(seed)
    engine.generate([list(range(prompt_tokens))], SamplingParams(max_tokens=max_tokens), progress=False)
    return log


old = run(whole_prompts_only, prompt_tokens=10, chunk_size=6, block_size=4, num_blocks=12)
left = {slot: token for call in old.calls for token, slot in enumerate(call.slots, call.start_pos)}
print(f"Still there: tokens {sorted(left.values())}, so {len(left)} of 10. You said {my_guess_tokens_left}.")
old.picture(title="Slots by the place in the chunk: chunk 1 is written over chunk 0")

# %% [markdown]
# Read it from top to bottom. The request's ten tokens, in the colours of their chunks; below them the request's
# *logical* blocks 0, 1 and 2; and below those the blocks of the pool that the block table names. A number in a slot is
# the token whose K/V lies there.
#
# Six are left, not four: chunk 1 is shorter than chunk 0, and tokens 4 and 5 escaped. What the last tokens of the
# prompt now attend to is: tokens 6, 7, 8, 9, then 4 and 5, then four slots that nobody wrote. In a fresh pool those
# are zeros. In a busy one they hold the keys and values of *somebody else's* request.
#
# ## The rule
#
# The slot of a token must not depend on the chunk that it came in. So don't ask "the how-many-th token of this chunk
# is it?". Ask "which token of the *sequence* is it?":
#
# ```text
# global_token_index = prefilled_token_count + local_index_in_chunk
# logical_block_id   = global_token_index // block_size
# offset             = global_token_index %  block_size
# ```
#
# `prefilled_token_count` is how many tokens of the prompt are in the cache already, which is where this chunk begins
# (in the code: `start_pos`). The logical block says *which of the request's blocks*, the offset *which place in it*.
# One step is left, from the request's block to the pool's block, and it goes through the block table.
#
# > **A token's slot follows from its index in the whole sequence and from the block table. Where a chunk begins or
# > ends plays no part.**
#
# The same ten tokens, by that rule:

# %% name="picture-new"
new = run(slot_mapping, prompt_tokens=10, chunk_size=6, block_size=4, num_blocks=12)
new.picture(follow=6, title="Slots by the place in the sequence: chunk 1 goes on where chunk 0 ended")

# %% [markdown]
# Token 6 is the first of chunk 1, and it goes into the *middle* of a block: the block that chunk 0 began. That is no
# special case in the rule, it just comes out so. A special case would be to treat it as one.
#
# ## Chunk 1000, block 16
#
# With sizes from practice: blocks of 16, chunks of 1,000. A thousand isn't a multiple of 16, so chunk borders fall inside
# blocks.
#
# > **Predict, then run.** A prompt of 2,500 tokens. How many tokens of chunk 1 belong into the block that chunk 0 left
# > half filled? (And chunk 2: will it be the same number again?)

# %% name="guess-border"
my_guess_tokens = 0  # of chunk 1: write yours

# %% name="picture-border"
long = run(slot_mapping, prompt_tokens=2500, chunk_size=1000, block_size=16)
for before, call in zip(long.calls, long.calls[1:]):
    shared = before.slots[-1] // 16
    count = sum(slot // 16 == shared for slot in call.slots)
    print(f"the chunk from token {call.start_pos} on puts {count} tokens into block {shared}, begun by the chunk before")
print(f"You said {my_guess_tokens}.")
long.picture(first=984, last=1015, follow=1000, title="Around token 1000: the chunk border lies inside logical block 62")

# %% [markdown]
# 1000 = 62 × 16 + 8: chunk 0 fills 62 blocks and half of the next, chunk 1 begins with the other half. And 2000 =
# 125 × 16: the next border happens to meet a block border, so chunk 2 begins a new block. Code that starts each chunk
# with a fresh block would be right there, and wrong at 1,000.
#
# The lines in the middle of the picture are the block table. They cross, because the pool gave out whatever block was
# free: logical block 62 lies *behind* logical block 63 in memory. Attention finds them through the same table
# (lesson 04).
#
# ## Logical isn't physical
#
# Which brings us to the second way to get this wrong: to take the logical block's number for the physical one. Here is
# an engine that does. It hands our slot mapping the block table 0, 1, 2, … instead of the request's own:

# %% name="forgot-the-table"
def no_block_table(block_table, start_pos, num_tokens, block_size):
    return slot_mapping(range(len(block_table)), start_pos, num_tokens, block_size)


A, B = list(range(100, 140)), list(range(200, 230))  # two prompts


def is_right(outputs, *prompts):
    return all(output.token_ids == FakeRunner().solo(prompt, 5) for output, prompt in zip(outputs, prompts))


def four_runs(mapping):
    """Four ways to run requests; True where all their tokens are as they must be."""

    def engine(seed=None):
        made = Engine(FakeRunner(), EngineConfig(num_blocks=64, enable_prefix_caching=False), slot_mapping=mapping)
        if seed is not None:
            made.block_manager.shuffle_free_blocks(seed)
        return made

    five = SamplingParams(max_tokens=5)
    fresh, used = engine(), engine()
    used.generate([B], five)
    return {
        "one request, fresh engine": is_right(fresh.generate([A], five), A),
        "one request, after another one has ended": is_right(used.generate([A], five), A),
        "two requests at once": is_right(engine().generate([A, B], five), A, B),
        "one request, free list shuffled": is_right(engine(seed=3).generate([A], five), A),
    }


# %% [markdown]
# `FakeRunner` is the engine's oracle: a model without a network whose next token is a hash of *everything* that it
# reads back from memory, in order. One wrong slot, and the token is another one. `solo()` says which tokens a prompt
# must give.
#
# > **Predict, then run.** In how many of the four runs does the engine without block tables produce the right tokens?

# %% name="guess-runs"
my_guess_runs = 0  # write yours

# %% name="run-four"
ours, theirs = four_runs(slot_mapping), four_runs(no_block_table)
for name in ours:
    print(f"{name:42} our slots: {'right' if ours[name] else 'WRONG'}   no table: {'right' if theirs[name] else 'WRONG'}")
print(f"\nRight without a block table: {sum(theirs.values())} of 4. You said {my_guess_runs}.")

# %% [markdown]
# One, and it is the one that everybody tries first. On a fresh engine the free list is 0, 1, 2, …, so the first
# request's logical and physical numbers are equal, and a wrong program is right by coincidence. Even the second
# request, alone on the same engine, is lost: the free list is a queue, and blocks come back at its end.
#
# Hence `shuffle_free_blocks()` in the engine: a test of memory must begin in a used memory.
#
# ## Decode is a chunk of one token
#
# Does the rule cover decode? After the prefill of 10 tokens the first token of the answer was sampled. It is known,
# but it has no K/V yet: it is the *input* of the next step, and that step writes it.
#
# > **Predict, then run.** Blocks of 4 again, a prompt of 10, block table `[11, 2, 8]`. The request now has 11 tokens.
# > Into which slot does the next step write?

# %% name="guess-decode"
my_guess_slot = 3  # write yours

# %% name="run-decode"
decode = run(slot_mapping, prompt_tokens=10, chunk_size=6, block_size=4, max_tokens=4, num_blocks=12)
for call in decode.calls:
    end = call.start_pos + len(call.slots) - 1
    kind = "decode" if len(call.slots) == 1 else "prefill"
    print(f"{kind:8} tokens {call.start_pos:2} to {end:2}   block table {call.block_table!s:14} slots {call.slots}")
print(f"\nThe first decode writes slot {decode.calls[2].slots[0]}. You said {my_guess_slot}.")
decode.picture(follow=10, title="Prefill in two chunks, then three decodes")

# %% [markdown]
# Eleven tokens, so the newest has index **10**: logical block 2, offset 2. The table's entry 2 is physical
# block 8, so slot 8 × 4 + 2 = 34. Who computes with the length, 11, writes slot 35. Then 34 stays as it was, and every
# later token attends to a hole. (Four tokens came out, three were written: the last one is nobody's input any more.)
#
# The engine has no second rule for decode. A decode is a chunk of length one that begins at the last token:
#
# ## Where it happens

# %% name="source"
from course_lib.batch import build_batch

source(build_batch, mark=("positions +=", "slots +="), first="for sequence, start", last="context_lens.append")

# %% [markdown]
# One loop over everything that was scheduled, prefill chunks and decodes alike. `start` is the index of the chunk's
# first token in its sequence. The line above the slots is the same idea once more: the *positions* that the model's
# rotary embedding sees are global, too. Lesson 07 is about what happens otherwise.
#
# ## The tests that find it
#
# Chunked prefill is right if the tokens are those of a prefill in one piece (`solo()` computes in one piece, without
# any blocks). Which prompts and chunk sizes must one try? The prompt shorter than a chunk, exactly a chunk, just over,
# several chunks; the chunk a multiple of the block or not. Here is that matrix, on a shuffled pool, for blocks of 16:

# %% name="matrix"
CASES = ("shorter than a chunk", "exactly a chunk", "one token over", "two tokens over", "several chunks")
LENGTHS = {  # chunk size: a prompt of each kind
    64: (40, 64, 65, 66, 300),
    50: (40, 50, 51, 52, 300),
    1000: (999, 1000, 1001, 1002, 2500),
}


def tokens(mapping, prompt, chunk_size):
    config = EngineConfig(
        num_blocks=256, max_num_batched_tokens=4096, max_prefill_chunk_size=chunk_size, enable_prefix_caching=False
    )
    engine = Engine(FakeRunner(), config, slot_mapping=mapping)
    engine.block_manager.shuffle_free_blocks(seed=5)
    return engine.generate([prompt], SamplingParams(max_tokens=4), progress=False)[0].token_ids


def matrix(mapping):
    """Are the tokens those of one piece? For each chunk size, a row of True and False."""
    rows = {}
    for chunk_size, lengths in LENGTHS.items():
        prompts = [list(range(length)) for length in lengths]
        rows[chunk_size] = [tokens(mapping, prompt, chunk_size) == FakeRunner().solo(prompt, 4) for prompt in prompts]
    return rows


def show_matrix(title, rows):
    print(f"{title}\n{'chunk size':>12}   " + "   ".join(CASES))
    for chunk_size, row in rows.items():
        cells = (f"{'equal' if same else 'DIFFERENT':{len(case)}}" for same, case in zip(row, CASES))
        print(f"{chunk_size:12}   " + "   ".join(cells))


show_matrix("Our slots", matrix(slot_mapping))
assert all(all(row) for row in matrix(slot_mapping).values())

# %% [markdown]
# All equal. A test suite is only worth what it finds, so run the same matrix on the old engine, the one for whole
# prompts only.
#
# > **Predict, then run.** Which of the five columns will find its bug? (There is one surprise.)

# %% name="guess-columns"
my_guess_columns = ["one token over", "two tokens over", "several chunks"]  # write yours

# %% name="matrix-old"
result = matrix(whole_prompts_only)
show_matrix("The old slots", result)
found = [case for number, case in enumerate(CASES) if not all(row[number] for row in result.values())]
print(f"\nFound by: {found}\nYou said: {my_guess_columns}")

# %% [markdown]
# The natural test case, a prompt one token longer than a chunk, finds *nothing*: its second chunk has a single token,
# the old code takes it for a decode, and is right. The bug needs a second chunk of two tokens at least.
#
# That is the use of listing cases by their *kind* and then trying a neighbour of each. It is also why the engine's own
# tests draw prompt lengths, chunk sizes and block orders at random, by the thousand.
#
# ## On the real model
#
# Finally the same claim about text, with the sizes from above: 1,100 tokens of the document from lesson 00, in one
# piece and in chunks of 1,000, so that a border lies inside a block.

# %% name="real-model"
excerpt = runner.tokenizer.encode(document_text())[:1100]
answers = {}
for chunk_size in (None, 1000):
    config = EngineConfig(max_num_batched_tokens=2048, max_prefill_chunk_size=chunk_size, enable_prefix_caching=False)
    engine = Engine(runner, config)
    engine.block_manager.shuffle_free_blocks(seed=7)
    [output] = engine.generate([excerpt], SamplingParams(max_tokens=12), progress=False)
    answers[chunk_size] = output.token_ids
    print(f"chunk size {chunk_size or 'whole':>5}: {output.text!r}")
assert answers[None] == answers[1000]

# %% [markdown]
# ## Your turn
#
# [Exercise 03](../exercises/03_global_slots.ipynb): write `slot_mapping`, the slots of a decode step, and a debugging
# tool that says whose token lies in a given slot. All three then run inside this engine.
#
# ## What production does
#
# - **vLLM**: `BlockTable.compute_slot_mapping()` in `vllm/v1/worker/block_table.py`. It gets the *positions* of all
#   tokens in the flat batch, and a small Triton kernel divides them by the block size and looks up the block table:
#   this lesson's rule. Rows that only pad the batch get the slot `PAD_SLOT_ID`, and aren't written.
# - **SGLang** keeps the rule one level lower: `ReqToTokenPool.req_to_token` has a row for each request with the slot of
#   *every token*, not of every block. The look-up is `req_to_token[request, global index]`.
# - The block table is a page table, and the idea is the paper's: Kwon et al., *Efficient Memory Management for Large
#   Language Model Serving with PagedAttention* (SOSP 2023).
#
# ## Three questions
#
# 1. Somebody "repairs" chunked prefill by allowing only chunk sizes that are multiples of the block size. Which of
#    this lesson's bugs goes away, and which stays?
#
#    <details><summary>Answer</summary>
#
#    Neither goes away. Chunk 1 still overwrites chunk 0 if slots go by the place in the chunk (the matrix's row for
#    chunk size 64 shows it). What goes away is only the border inside a block, which the right rule handles anyway. And
#    the engine can't keep the promise: the last chunk, and a chunk cut by the token budget, end where they end.
#
#    </details>
#
# 2. Forget the modulo, so that the slot is `block × 16 + index`. With 64 blocks of 16 in the pool: which prompt is the
#    first that fails, and does it fail loudly?
#
#    <details><summary>Answer</summary>
#
#    Index 16 is the first whose offset should be 0 and isn't. In block b it goes to slot `16 b + 16`: the first slot of
#    block b + 1, which may be anybody's. Nothing is raised as long as the number is below 1,024. It gets loud only when
#    a large index meets a high block, and that depends on the traffic. The offset inside a block is always below 16:
#    that is worth an assert.
#
#    </details>
#
# 3. Two requests share a prefix, so both block tables begin with the same blocks (lesson 09). Does the rule for slots
#    change? What must never happen?
#
#    <details><summary>Answer</summary>
#
#    The rule is the same: index and block table. What must not happen is that one of them *writes* into a shared block.
#    It doesn't, because only full blocks are shared: the first token that a request computes itself lies behind them, in
#    a block of its own.
#
#    </details>
#
# **Lesson 04** reads back what was written here: attention that follows the block table, and the mask that a chunk needs.

# %% [markdown]
# # 09 · Prefix cache
#
# **After this lesson you can**
#
# - say what a block of K/V may be reused for, and show the wrong text that comes of a careless answer;
# - predict how many tokens of a prompt come from the cache, and which of them are computed;
# - follow a block from taken to true to shared to idle to overwritten, and say who holds it and who can find it;
# - say what a prefix cache saves and what chunks save, and why a server wants both.
#
# **Time** 40 minutes · **You need** lessons 02, 06, 07 and 08 · **Adds to the engine** the prefix cache.

# %% name="house"
from course_lib.lab import alt_text, block_map, block_map_alt, house, show, source, timeline

house("prefix_cache", "block_manager")

# %% [markdown]
# ## A very fast wrong answer
#
# Prompts repeat themselves: the same instructions before each question, the same document with another question, a
# conversation that is sent again with one more line. Their K/V has been computed already. Why compute it again?
#
# So keep it. Each full block holds the K/V of 16 tokens; remember for which 16 tokens, and when a prompt comes with
# the same 16, use the block. Here is that idea, in two changed functions of the engine's cache. Two passages of a
# text are retrieved for one question, and for the next one the same two passages in the other order.

# %% name="careless"
from unittest import mock

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, prefix_cache
from course_lib.runners import FakeRunner

runner = ModelRunner("smollm2")
newline, encode = runner.tokenizer.encode("\n"), runner.tokenizer.encode


def one_block(text: str) -> list[int]:
    """The text as 16 tokens, filled up with line ends: one block exactly."""
    ids = encode(text)
    return ids + newline * (16 - len(ids))


head, ana, ben = (
    one_block("<|im_start|>user\n"),
    one_block("\nAna won the race at the school."),
    one_block("\nBen won the race at the school."),
)
task = encode("\nRepeat the text above, word for word.<|im_end|>\n<|im_start|>assistant\n")
prompts = {"Ana, then Ben": head + ana + ben + task, "Ben, then Ana": head + ben + ana + task}


def answers(enable_prefix_caching: bool) -> None:
    engine = Engine(runner, EngineConfig(num_blocks=64, enable_prefix_caching=enable_prefix_caching))
    for name, prompt in prompts.items():
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=20), progress=False)
        print(f"  {name}: {answer.num_cached_tokens:2} tokens from the cache   {' '.join(answer.text.split())!r}")


print("no cache:")
answers(enable_prefix_caching=False)
own_tokens_only = mock.patch.object(prefix_cache, "hash_block", lambda parent, tokens, salt: hash(tokens))
any_parent = mock.patch.object(prefix_cache.Entry, "holds", lambda entry, parent, tokens, salt: entry.token_ids == tokens)
print("a block is known by its own 16 tokens:")
with own_tokens_only, any_parent:
    answers(enable_prefix_caching=True)

# %% [markdown]
# The second prompt says that Ben comes first. With the careless cache the model repeats *the other prompt*: it read
# that one's K/V. No error, no warning, and the text looks fine. If the two prompts had come from two users, one of
# them would now read what the other one wrote.
#
# What is in a block isn't the K/V of 16 tokens. It's the K/V of 16 tokens **after everything that stood before
# them**: each layer has mixed the earlier tokens in, and the positions are in it as well.
#
# ## A name that knows its past
#
# So a block's name must depend on its whole past. That's cheap, with a chain: the hash of a block is made of the hash
# of the block before it and of its own tokens. `FakeRunner`'s K/V is made in the same way, and that's why it notices
# every mistake of this kind.
#
# ```text
#           Ana, then Ben         Ben, then Ana
# block 0   h1 = hash(-, head)    h1 = hash(-, head)    the same block
# block 1   h2 = hash(h1, Ana)    h4 = hash(h1, Ben)    another block
# block 2   h3 = hash(h2, Ben)    h5 = hash(h4, Ana)    another block
# ```
#
# > **Predict, then run.** With the engine's own cache: how many tokens of the second prompt come from the cache? And
# > with a third prompt, *Ben, then Ana, then a different task*?

# %% name="guess-orders"
my_guess_second, my_guess_third = 0, 0  # tokens: write yours

# %% name="orders"
print("the engine's cache:")
answers(enable_prefix_caching=True)
engine = Engine(runner, EngineConfig(num_blocks=64))
third = head + ben + ana + encode("\nWho won?<|im_end|>\n<|im_start|>assistant\n")
found = [
    engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)[0].num_cached_tokens
    for prompt in [*prompts.values(), third]
]
print(f"\nfrom the cache: {found}. You said {my_guess_second} and {my_guess_third}.")

# %% [markdown]
# Only the head is common to the first two. A prefix cache is a *prefix* cache: after the first difference nothing can
# be reused, whatever comes. That is why instructions and documents belong at the beginning of a prompt, and the date,
# the name and the question at its end.
#
# ## What it's worth
#
# A document, and two questions about it. Each question is asked of an engine that hasn't seen the document, and of
# one that has.
#
# > **Predict, then run.** By what factor does the time to first token fall?

# %% name="guess-factor"
my_guess_factor = 2  # cold time / warm time: write yours

# %% name="ttft" tags=["nbval-ignore-output"]
text = demo.document_text()[:2400]
questions = ("Summarise the text above in one sentence.", "What is the text above about?")
asked = [demo.chat_prompt(runner.tokenizer, f"{text}\n\n{question}") for question in questions]


def ask(engine: Engine, prompt: list[int]):
    for output in engine.stream(prompt, SamplingParams(max_tokens=12)):
        pass
    return output, output.first_token_time - output.arrival_time


cold_output, cold = ask(Engine(runner, EngineConfig(num_blocks=256)), asked[1])
warm_engine = Engine(runner, EngineConfig(num_blocks=256))
ask(warm_engine, asked[0])
warm_output, warm = ask(warm_engine, asked[1])
assert warm_output.token_ids == cold_output.token_ids and cold > 2 * warm
print(
    f"a prompt of {len(asked[1])} tokens: {warm_output.num_cached_tokens} of them from the cache, "
    f"{len(asked[1]) - warm_output.num_cached_tokens} computed"
)
print(
    f"time to first token: cold {cold:.2f} s, warm {warm:.3f} s, {cold / warm:.0f} times as long. "
    f"You said {my_guess_factor} times."
)
print(f"the answers are token by token the same: {' '.join(warm_output.text.split())!r}")

# %% [markdown]
# Nothing was made faster; most of it wasn't done. (The time falls by less than the number of tokens: each step has a
# price of its own, however few tokens it holds. Lesson 00 met it with chunks of 16.)
#
# ## Whose block is it now?
#
# Three people with the same instructions, one after the other. The corner marks blocks that are in several tables.


# %% name="shared"
def tokens(request: int, count: int) -> list[int]:
    """`count` token ids that no other request has."""
    return [1000 * request + k for k in range(count)]


engine = Engine(FakeRunner(), EngineConfig(num_blocks=48))
instructions = tokens(0, 100)
for number, name in enumerate(("Ana", "Ben", "Chen"), start=1):
    engine.add_request(instructions + tokens(number, 40), SamplingParams(max_tokens=30), request_id=name)
    engine.step()
counts = engine.block_manager.ref_counts
for name, state in engine.snapshot().items():
    print(f"{name:5}", " ".join(f"{block}({counts[block]})" for block in state.block_table), "  block (holders)")
show(block_map(engine.trace, title="100 tokens of instructions, three times"), block_map_alt(engine.trace))

# %% [markdown]
# The instructions are 100 tokens, six blocks and a quarter. Six are shared; the seventh holds the end of the
# instructions *and* the beginning of a question, and everybody has one of their own. A hit makes the request a **holder**:
# the reference count of lesson 02 goes up, and the block stays until its last holder has gone.
#
# ## How much of a prompt can be reused?
#
# Full blocks only, as you saw. There's one more limit.
#
# > **Predict, then run.** The same prompt is sent twice. How many of its tokens come from the cache the second time,
# > if it has 64 tokens? 65? 15?

# %% name="guess-lengths"
my_guess_lengths = {64: 64, 65: 65, 15: 15}  # prompt length: tokens from the cache; write yours

# %% name="lengths"
for length, guess in my_guess_lengths.items():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
    first, second = (engine.generate([tokens(1, length)], SamplingParams(max_tokens=3))[0] for _ in range(2))
    chunk = [step.chunks[0] for step in engine.trace.steps if step.chunks[0].request == "r1"][0]
    print(
        f"{length} tokens: {second.num_cached_tokens} from the cache, {chunk.num_tokens} computed, "
        f"from position {chunk.start_pos} on.  You said {guess}."
    )
    assert first.token_ids == second.token_ids

# %% [markdown]
# With 64 tokens all four blocks are there, and the engine reuses three. The K/V of a token isn't what gives the next
# token: the *logits* of the last one do, and they aren't cached. So at least one token must go through the model, and
# since only full blocks are shared, that costs a block. Its position is the one that it has in the whole prompt:
# lesson 07's rule, from another side.
#
# ## When is a block true?
#
# A request takes a block in `schedule()`. The forward pass fills it. Between the two, the block table says that the
# block is there, and what is in it is somebody's old K/V.
#
# > **Predict, then run.** Two equal prompts of 64 tokens arrive at the same time, and both are prefilled in the first
# > step. How many tokens of the second one come from the cache? And if the second one comes a step later?

# %% name="guess-twins"
my_guess_same_step, my_guess_next_step = 64, 64  # tokens: write yours

# %% name="twins"
for guess, when, steps_between in ((my_guess_same_step, "in the same step", 0), (my_guess_next_step, "a step later", 1)):
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
    engine.add_request(tokens(1, 64), SamplingParams(max_tokens=4), request_id="first")
    for _ in range(steps_between):
        engine.step()
    engine.add_request(tokens(1, 64), SamplingParams(max_tokens=4), request_id="second")
    engine.step()
    hit = engine.trace.requests["second"].prefix_hit_tokens
    tables = {name: state.block_table for name, state in engine.snapshot().items()}
    print(f"{when + ':':17} {hit:2} tokens from the cache, tables {tables}.  You said {guess}.")

# %% [markdown]
# In the same step both compute, and the pool holds the same K/V twice. A block can be found from the moment when the
# **forward pass that filled it has returned**, not from the moment when it was taken. The engine registers blocks in
# `commit`, which is called after the forward pass; if that raises, nothing was registered:

# %% name="commit"
from course_lib.scheduler import Scheduler

source(Scheduler.commit, mark=("register", "The forward pass returned"))

# %% [markdown]
# ## Free, and not forgotten
#
# When its last holder ends, a block is free. Its content stays true until somebody overwrites it. So *free* has two
# kinds: free with nothing in it, and free with content that can still be found. The first kind is taken first; then,
# of the second, the block that nobody has used for the longest time (*least recently used*). (Exercise 09.3 makes it
# simpler: one order for all free blocks, whether they hold something or not.)
#
# A request gives back all its blocks at once. In which order should they be overwritten?
#
# > **Predict, then run.** A pool of 8 blocks. A prompt of 97 tokens (6 full blocks, and one token) was served and is
# > gone. Another request needs 4 blocks. 2 hold nothing that can be found, so 2 of the 6 are overwritten. How many
# > tokens of the first prompt are still found, if the two *first* blocks went? If the two *last* ones went?

# %% name="guess-evicted"
my_guess_first_gone, my_guess_last_gone = 32, 32  # tokens: write yours

# %% name="evicted"
from course_lib.block_manager import BlockManager


class HeadFirst(BlockManager):
    """Gives back a request's first block first. For comparing."""

    def truncate(self, sequence, num_tokens):
        if num_tokens == 0:
            sequence.block_table.reverse()
        super().truncate(sequence, num_tokens)


for guess, title, manager in (
    (my_guess_first_gone, "the first blocks go first", HeadFirst),
    (my_guess_last_gone, "the last blocks go first", BlockManager),
):
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=8, kv_watermark=0.0), block_manager=manager)
    for prompt in (tokens(1, 97), tokens(2, 50), tokens(1, 97)):
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    print(f"{title:27}: {answer.num_cached_tokens} tokens of 97 found.  You said {guess}.")

# %% [markdown]
# Without its first block nothing of a prompt can be found: the chain has no beginning. Both ways overwrite the same
# number of blocks. One keeps a prefix, the other keeps rubbish.
#
# ## Two safety belts
#
# A hash is a number, and two different prefixes *can* have the same one. `hash()` has 64 bits and wasn't made against
# people who look for collisions. So on a hit the engine compares what the entry holds, tokens, parent and salt, with
# what was asked for. Let us make the hash as bad as it can be:

# %% name="collisions"
shared = tokens(0, 64)
orders = [shared + tokens(number, 40) for number in (1, 2, 1)]
for title, worst in (("the engine's hash", prefix_cache.hash_block), ("always 7", lambda parent, tokens, salt: 7)):
    with mock.patch.object(prefix_cache, "hash_block", worst):
        fake = FakeRunner()
        engine = Engine(fake, EngineConfig(num_blocks=64))
        outputs = [engine.generate([prompt], SamplingParams(max_tokens=8))[0] for prompt in orders]
    right = all(output.token_ids == fake.solo(prompt, 8) for output, prompt in zip(outputs, orders))
    print(
        f"{title:18} from the cache: {[output.num_cached_tokens for output in outputs]}   everybody's tokens right: {right}"
    )
source(prefix_cache.Entry.holds)

# %% [markdown]
# One key, one entry: the first block's. With one key for all there is room for that block alone, so only its 16 tokens
# are found. A bad hash costs hits, never the truth.
#
# The second belt is for people. Whether a prompt comes from the cache can be felt: its first token is there at once.
# Who may send prompts to your server could find out, block by block, what others have sent. A **salt** goes into the
# first hash, and so into all of the chain; different salts never match:

# %% name="salt"
engine = Engine(FakeRunner(), EngineConfig(num_blocks=64))
print("salt         tokens from the cache")
for salt in ("Ana's firm", "Ben's firm", "Ana's firm", None):
    engine.add_request(tokens(1, 70), SamplingParams(max_tokens=2), request_id="request", cache_salt=salt)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    print(f"{salt!s:12}{output.num_cached_tokens:22}")

# %% [markdown]
# ## Compute less, compute apart
#
# A prompt comes in. The engine first asks the cache, and what is left is the **suffix**. Is the suffix long? Then
# it's cut into chunks.
#
# ```text
# prompt ──> match ──> suffix ──> chunk, chunk, chunk … ──> decode
# 12,000     8,000     4,000      1,000 each, from position 8,000
# ```
#
# > **Predict, then run.** A document of 8,000 tokens has been read before. Now it comes with 4,000 new tokens behind
# > it, while eight people read their streams. Fill in the table: how many tokens has the largest step, with and
# > without a cache, with and without chunks of 1,000?

# %% name="guess-both"
my_guess_largest = {  # (prefix cache, chunks): tokens of the largest step; write yours
    (False, False): 12000, (True, False): 12000, (False, True): 1000, (True, True): 1000,
}  # fmt: skip


# %% name="both"
def long_prompt(caching: bool, chunked: bool) -> Engine:
    config = EngineConfig(num_blocks=2048, max_num_batched_tokens=13_000, max_prefill_chunk_size=1000 if chunked else None,
                          enable_prefix_caching=caching)  # fmt: skip
    engine = Engine(FakeRunner(), config)
    document = list(range(8000))
    for _ in engine.stream(document + [1], SamplingParams(max_tokens=1), request_id="read before"):
        pass
    for number in range(8):
        engine.add_request([number] * 10, SamplingParams(max_tokens=18), request_id=f"chat {number}")
    engine.step()
    engine.add_request(document + list(range(9000, 13_000)), SamplingParams(max_tokens=1), request_id="long")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


print("prefix cache   chunked   tokens computed for it   chunks   the first at   largest step   you said")
for (caching, chunked), guess in my_guess_largest.items():
    engine = long_prompt(caching, chunked)
    chunks = [chunk for step in engine.trace.steps for chunk in step.chunks if chunk.request == "long"]
    steps = [step for step in engine.trace.steps if any(chunk.request == "long" for chunk in step.chunks)]
    largest = max(step.prefill_tokens + step.decode_tokens for step in steps)
    yes = {True: "yes", False: "no"}
    print(
        f"{yes[caching]:>12}{yes[chunked]:>10}{sum(chunk.num_tokens for chunk in chunks):25}"
        f"{len(chunks):9}{chunks[0].start_pos:15}{largest:15}{guess:11}"
    )
show(
    timeline(engine.trace, title="Read before: 8,000 of 12,000 tokens. The rest in 4 chunks", by="step"),
    alt_text(engine.trace),
)

# %% [markdown]
# The cache makes the work smaller: 4,000 tokens for 12,000. In one piece they are still a stall of 4,008 tokens.
# Chunks make the steps smaller, and not the work: 12 chunks without a cache. Together: **4 chunks, the first at
# position 8,000.**
#
# | | prefix cache | chunked prefill |
# |---|---|---|
# | the question | must this be computed at all? | when is it computed? |
# | it changes | how many tokens go through the model | how many of them go in one step |
# | it helps | the one who sends a known beginning | everybody else |
# | it can't help | a text that nobody has sent before | the total work |
#
# *Compute less* and *compute apart*. Neither knows of the other: the scheduler of lesson 08 asks for what remains of
# a prompt, and for a hit less remains. Cached tokens cost no budget.
#
# ## The rule
#
# > **A block may be reused only behind exactly the same past, only when its forward pass has returned, and never for
# > the last token of a prompt.**
#
# ## Your turn
#
# [Exercise 09](../exercises/09_prefix_cache.ipynb): write the hashes of blocks, what of a prompt can be reused, and a pool
# whose blocks have several holders. All three find their blocks inside the engine.
#
# ## What production does
#
# - **vLLM** calls it *automatic prefix caching* (`--enable-prefix-caching`, on by default in V1).
#   `hash_block_tokens()` in `vllm/v1/core/kv_cache_utils.py` chains the parent's hash, the tokens and extra keys
#   (LoRA, images, the `cache_salt` of a request). It doesn't compare tokens on a hit; its default hash is SHA-256,
#   for which nobody knows a collision. Idle blocks wait in one queue, least recently used first, a request's tail
#   before its head. It too leaves at least one token to compute.
# - **SGLang** keeps a *radix tree* over token ids instead of hashes (RadixAttention; Zheng et al., *SGLang: Efficient
#   Execution of Structured Language Model Programs*, 2024), and evicts leaves first: the same rule, tail before head.
# - Whole services are built on it: **Mooncake** (Qin et al., 2024) puts a prefix cache for many machines into their
#   main memory and disks. Its published trace names blocks of 512 tokens by chained hashes; this course's simulator
#   can replay it.
#
# ## Three questions
#
# 1. A chat sends its whole history with each new message. What does the prefix cache find, and what isn't found
#    although it was computed?
#
#    <details><summary>Answer</summary>
#
#    It finds all full blocks of the history, the model's own answers among them: their K/V was written while they
#    were decoded. Not found: the last block that wasn't full. And everything after the first difference, if the
#    client changes anything in the history: one removed blank is enough.
#
#    </details>
#
# 2. Why must a preempted request's own recomputation not count as a cache hit in the statistics?
#
#    <details><summary>Answer</summary>
#
#    It finds its own blocks, which it had computed and paid for. Counted as hits, they'd make the hit rate rise when
#    memory is short: the number would look best when the server is in trouble.
#
#    </details>
#
# 3. With a full hit, 48 of 64 tokens are reused and 16 are computed. Why not one?
#
#    <details><summary>Answer</summary>
#
#    Only whole blocks are shared. The token that must be computed writes its K/V into the last block, and that block
#    would then belong to several requests while one of them writes in it. It could be copied first (*copy on write*);
#    computing 16 tokens is simpler and hardly slower.
#
#    </details>
#
# **Lesson 10** follows a token behind the forward pass, from logits to text on a screen, and asks who waited for what.

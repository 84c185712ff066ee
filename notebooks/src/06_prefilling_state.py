# %% [markdown]
# # 06 · The state between
#
# **After this lesson you can**
#
# - say what a half-filled request holds, what it owes, and what it can't do yet;
# - follow the three counters of a request through prefill and decode, without being off by one;
# - name every way in and out of the four states, and who has to give back memory on which;
# - say why counters may move only after the forward pass has returned.
#
# **Time** 40 minutes · **You need** lessons 02, 03 and 05 · **Adds to the engine** the state PREFILLING, its counters,
# and an end for a request in any state.

# %% name="map"
from course_lib.lab import house

house("sequence")

# %% [markdown]
# ## Impatient users
#
# Somebody sends a prompt of 1,000 tokens, waits for two steps, and closes the tab. The engine cancels the request.
# The pool has 128 blocks of 16 tokens; the prompt is computed in chunks of 256, so after two steps it holds 32
# blocks.
#
# Two block managers take part. One is ours. The other has a rule that sounds right: *a request that has produced no
# token has nothing to give back.*

# %% name="leaky"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.block_manager import BlockManager
from course_lib.runners import FakeRunner


class NoTokenNoBlocks(BlockManager):
    def free(self, sequence):
        if sequence.generated_token_ids:
            super().free(sequence)


# %% [markdown]
# > **Predict, then run.** Five such users come, one after the other, each gone before the next arrives. Then an
# > ordinary request with a prompt of 20 tokens. With *their* rule, in which step does it get its first token (0 for
# > never)?

# %% name="guess-leak"
my_guess_first_token_after_steps = 1  # 0 for never: write yours

# %% name="leak"
def impatient_users(block_manager):
    config = EngineConfig(num_blocks=128, max_prefill_chunk_size=256, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config, block_manager=block_manager)
    free = [engine.block_manager.num_free]
    for user in range(5):
        name = engine.add_request([user] * 1000, SamplingParams(max_tokens=5))
        engine.step()
        engine.step()
        engine.cancel(name)
        free.append(engine.block_manager.num_free)
    return engine, free


healthy, free = impatient_users(BlockManager)
print("free blocks, ours:  ", free)
leaking, free = impatient_users(NoTokenNoBlocks)
print("free blocks, theirs:", free, end="\n\n")

for engine in (healthy, leaking):
    engine.add_request([7] * 20, SamplingParams(max_tokens=3), request_id="ordinary")
    outputs = [output for _ in range(50) for output in engine.step() if output.request_id == "ordinary"]
    state = engine.snapshot().get("ordinary")
    ending = f"it is still {state.status}, because of {state.reason}" if state else "it is done"
    print(f"{len(outputs)} tokens of the ordinary request in 50 steps; {ending}")
print(f"\nYou said: first token after {my_guess_first_token_after_steps} step(s).")

# %% [markdown]
# Never. Nobody is being served, nobody holds anything, and all the memory is gone: `kv_blocks` is the reason that the
# engine gives, with a pool that nobody uses. No exception has told you. (After 1,000 empty steps our engine gives up with
# one.) The server has to be restarted, and it will happen again. The engine's books know it, if one asks them:

# %% name="books"
try:
    leaking.check_invariants()
except AssertionError as complaint:
    print("AssertionError:", complaint)

# %% [markdown]
# With whole prompts, that rule would have been right. A request had either not begun (no token, no blocks) or it had
# its first token (and blocks). Chunked prefill puts something in between, which
#
# - **holds blocks**, like a running request,
# - **has no output**, like a waiting one,
# - and is neither: it isn't waiting, since a part of it is done, and it can't decode, since a part of it is missing.
#
# ## Four states
#
# So it gets a name of its own.

# %% name="states"
from course_lib.lab import source
from course_lib.sequence import Sequence, SequenceStatus

source(SequenceStatus)

# %% [markdown]
# Now let the real engine take every way there is: short and long prompts, cancels and preemptions in each state. (A
# request is *preempted* when its blocks are taken for another one: it goes back to WAITING and begins again later.) The
# picture is drawn from its trace; a way that nobody took would be grey.

# %% name="every-way"
from course_lib.lab import show
from course_lib.lab.state_machine import state_machine, state_machine_alt

config = EngineConfig(
    block_size=4, num_blocks=64, max_num_seqs=5, max_num_batched_tokens=48, max_prefill_chunk_size=16,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config)


def add(name, prompt_length, max_tokens=4):
    engine.add_request([len(name)] * prompt_length, SamplingParams(max_tokens=max_tokens), request_id=name)


add("short", 10)
add("chat", 8, max_tokens=9)
add("gone", 12, max_tokens=9)
engine.step()
add("long", 60)
add("moved", 40)
add("late", 10)  # all five seats are taken
engine.step()
engine.cancel("late")  # WAITING
engine.cancel("gone")  # RUNNING
engine.preempt("moved")  # PREFILLING
engine.preempt("chat")  # RUNNING
add("impatient", 50)
engine.step()
engine.step()
engine.cancel("impatient")  # PREFILLING
while engine.has_unfinished_requests():
    engine.step()
    engine.check_invariants()

show(state_machine(engine.trace), state_machine_alt(engine.trace))

# %% [markdown]
# Read the arrows into FINISHED: a request can end in **every** state, and from two of them it brings memory along.
# The arrows are all there are; a change of state goes through one method, which refuses any other.

# %% name="illegal"
request = Sequence("r", [1, 2, 3])
for status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING, SequenceStatus.FINISHED):
    request.transition_to(status)
try:
    request.transition_to(SequenceStatus.RUNNING)
except RuntimeError as refusal:
    print("RuntimeError:", refusal)

# %% [markdown]
# The reasons, one line each:
#
# | from | to | because |
# |---|---|---|
# | WAITING | PREFILLING | its first chunk is done, and there is more |
# | WAITING | RUNNING | its prompt was so short that one chunk was enough |
# | PREFILLING | PREFILLING | another chunk |
# | PREFILLING | RUNNING | its last chunk is done, and its first token is sampled |
# | RUNNING | FINISHED | a stop condition, or all the tokens it may have |
# | WAITING, PREFILLING, RUNNING | FINISHED | cancelled, or an error |
# | PREFILLING, RUNNING | WAITING | preempted: someone else needs its blocks more |
#
# ## Three counters
#
# *Where exactly* a request is, three numbers say:
#
# - `cached_token_count`: tokens of **any kind** whose K/V is in the cache;
# - `prefilled_token_count`: tokens of the **prompt** whose K/V is in the cache. It's computed from the one above, as
#   `min(cached_token_count, prompt length)`, so there are two fields to keep, and three numbers to read;
# - `generated_token_ids`: the tokens that were sampled, which the user gets.
#
# > **Predict, then run.** A prompt of 10 tokens, in chunks of 4. The last chunk has just run, and the first token of
# > the answer was sampled. What are the three now? How many tokens are prefilled, how many cached, how many
# > generated, and how many blocks of 4 does it hold?

# %% name="guess-counters"
my_guess = {"prefilled": 10, "cached": 11, "generated": 1, "blocks": 3}  # write yours

# %% name="counters"
def row(step, state):
    prompt = state.prompt_tokens
    in_cache = "■" * state.prefilled_token_count + "□" * (prompt - state.prefilled_token_count)
    behind = state.cached_token_count - state.prefilled_token_count
    answer = "●" * behind + "○" * (state.generated_tokens - behind)
    numbers = (state.prefilled_token_count, state.cached_token_count, state.generated_tokens, len(state.block_table))
    print(f"{step:>6}  {state.status:<11}" + "".join(f"{n:>10}" for n in numbers) + f"   {in_cache} {answer}")
    return dict(zip(("prefilled", "cached", "generated", "blocks"), numbers))


small = EngineConfig(block_size=4, num_blocks=16, max_prefill_chunk_size=4, enable_prefix_caching=False)
engine = Engine(FakeRunner(), small)
engine.add_request(list(range(100, 110)), SamplingParams(max_tokens=6), request_id="r")
print(" after  state       prefilled    cached generated    blocks   ■ ● in the cache   □ ○ not")
seen = [row("-", engine.snapshot()["r"])]
for step in range(6):
    engine.step()
    seen.append(row(step, engine.snapshot()["r"]))
print(f"\nAfter the last chunk: {seen[3]}\nYou said:             {my_guess}")

# %% [markdown]
# Look at the circle after step 2. The first token was **sampled**, so the user has it, but nothing was ever
# **computed** with it: it has no keys and values. It goes into the model as the input of the next step, and that is
# when its K/V is written. In every row of a running request exactly one token has no K/V, the newest.
#
# - after prefill: prefilled 10, cached 10 (the prompt's length), generated 1;
# - after the first decode: prefilled 10, cached **11**, generated **2**.
#
# If someone counts the sampled token as cached, the next step starts one position too far, and the cache has a hole
# at position 10 that every later token looks into.
#
# Chunking changed nothing about this. The prompt arrives in the cache in several steps, that is all.
#
# ## What the user sees
#
# A document of 2,048 tokens, in chunks of 256. On the left what the engine knows, on the right all that a client
# hears of it.

# %% name="two-kinds-of-progress"
engine = Engine(FakeRunner(), EngineConfig(max_prefill_chunk_size=256, enable_prefix_caching=False))
engine.add_request(list(range(2048)), SamplingParams(max_tokens=3), request_id="document")
print("step   state        prefilled                     step() returned")
while engine.has_unfinished_requests():
    outputs = engine.step()
    state = engine.snapshot().get("document")
    done = state.prefilled_token_count if state else 2048
    bar = "█" * (done // 128) + "·" * (16 - done // 128)
    print(f"{engine.trace.steps[-1].index:4}   {state.status if state else 'FINISHED':<11}{done:6} of 2048 {bar}", end="   ")
    print([output.new_token_ids for output in outputs] or "nothing")

# %% [markdown]
# For seven steps there is work, and there is nothing to show. An intermediate chunk gives no output, not even an empty
# one: an empty output would look like the beginning of an answer, and whoever measures the time to first token would
# be pleased for no reason.
#
# So there are two kinds of progress. **Internal**: the counter grows, the cache fills. **Visible**: the first token,
# then the stream. A monitor that watches outputs alone can't tell this request from one that hangs;
# `engine.snapshot()` can. Lesson 10 builds the monitor.
#
# ## When may a counter move?
#
# A counter says what *is* in the cache. The scheduler decides what *will be*. Between the two lies the forward pass,
# and it can fail: out of memory, a device that resets, an interrupt. Here is a model that fails once, in its third
# step, and a scheduler that is a little too eager: it counts a chunk as soon as it has planned it. (`commit`, which comes
# after the forward pass, *sets* the counter to the chunk's end; so nothing is counted twice.)

# %% name="eager"
from course_lib import ModelRunner, demo, load_model
from course_lib.scheduler import Scheduler


class Flaky(ModelRunner):
    """SmolLM2 on a device that fails at the third step, and never again."""

    calls = 0

    def execute(self, batch):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("device out of memory")
        return super().execute(batch)


class Eager(Scheduler):
    def schedule(self):
        out = super().schedule()
        for chunk in out.chunks:
            chunk.sequence.cached_token_count += chunk.num_tokens  # as good as done
        return out


NOTES = """Notes of the meeting. The group met on Monday in the old library. Anna brought coffee and cake. They talked \
about the summer trip and the budget. The trip goes to the city of Lisbon. Tom will buy the tickets. The next meeting \
is on Friday at noon. Everybody should bring a pen.

Which city does the trip go to?"""

model = load_model("smollm2")


def ask(scheduler):
    runner = Flaky(model)
    config = EngineConfig(num_blocks=64, max_prefill_chunk_size=24, enable_prefix_caching=False)
    engine = Engine(runner, config, scheduler=scheduler)
    engine.add_request(demo.chat_prompt(runner.tokenizer, NOTES), SamplingParams(max_tokens=24))
    text = ""
    while engine.has_unfinished_requests():
        try:
            text += "".join(output.new_text for output in engine.step())
        except RuntimeError as failure:
            print(f"step {engine.scheduler.step}: {failure}; we go on")
    return text


# %% [markdown]
# The server catches the error and calls `step()` again. The notes say that the trip goes to Lisbon.
#
# > **Predict, then run.** With our scheduler: what does the model answer? And with `Eager`: another exception, an
# > empty answer, the right answer, or something else?

# %% name="guess-eager"
my_guess_ours = "..."  # write yours
my_guess_eager = "..."  # write yours

# %% name="failure"
print(f"ours:  {ask(Scheduler)}\n")
print(f"Eager: {ask(Eager)}\n")
print(f"You said: {my_guess_ours!r} and {my_guess_eager!r}.")

# %% [markdown]
# One of the cities above is not in the notes. 24 tokens of the prompt were never computed, the counter says they were,
# and the model reads zeros where their keys and values belong. There is no further exception, and the answer sounds as
# good as any. This is the worst kind of fault that an engine can have: **silently wrong text.**
#
# Ours does the chunk again, because for it nothing had happened. The order is fixed: schedule, forward pass, and only
# then *commit*. If the forward pass raises, the step's blocks go back, and the books are as before:

# %% name="rollback"
engine = Engine(FakeRunner(fail_at={1}), small)
engine.add_request(list(range(100, 110)), SamplingParams(max_tokens=3), request_id="r")
print(" after  state       prefilled    cached generated    blocks   ■ ● in the cache   □ ○ not")
for step in range(5):
    try:
        engine.step()
    except RuntimeError as failure:
        print(f"        {failure}")
    engine.check_invariants()
    if "r" in engine.snapshot():
        row(step, engine.snapshot()["r"])

# %% [markdown]
# ## Preempted: what is forgotten, what is kept
#
# When the pool is full, the engine takes the blocks of one request for another (lesson 08 says whose). The request
# goes back to WAITING. Its tokens are kept, prompt and answer, since its user has read them; its K/V is gone, so what
# counts K/V goes to 0. Then it computes everything again, in chunks, the tokens of its own answer included:

# %% name="preempted"
engine = Engine(FakeRunner(), small)
engine.add_request(list(range(100, 110)), SamplingParams(max_tokens=9), request_id="r")
print(" after  state       prefilled    cached generated    blocks   ■ ● in the cache   □ ○ not")
tokens = []
while engine.has_unfinished_requests():
    step = engine.scheduler.step
    if step == 8:
        row("7", engine.snapshot()["r"])
        engine.preempt("r")
        row("", engine.snapshot()["r"])
    tokens += [token for output in engine.step() for token in output.new_token_ids]
    if step >= 8 and "r" in engine.snapshot():
        row(step, engine.snapshot()["r"])
assert tokens == FakeRunner().solo(list(range(100, 110)), 9)
print(f"\n{len(tokens)} tokens, each once, the same as without the preemption")

# %% [markdown]
# Here the two counters part: in a recomputation `cached_token_count` goes on beyond the prompt, while
# `prefilled_token_count` stops at the prompt's length. And the request is PREFILLING again, with tokens generated:
# the state says what is in the cache, not what the user has seen.
#
# ## The rule
#
# > **A request is what its cache holds: count a token only when its K/V is written, and give back the blocks whatever
# > state it ends in.**
#
# ## Your turn
#
# [Exercise 06](../exercises/06_prefilling_state.ipynb): write what moves after a forward pass, how a request ends in any
# state, and in which order a step happens. All three run inside the engine's queues and blocks.
#
# ## What production does
#
# - vLLM V1 has no PREFILLING. In `vllm/v1/request.py` the states are WAITING, RUNNING, PREEMPTED and several
#   FINISHED_…; a request is RUNNING from its first chunk on, and `num_computed_tokens` says how far it is. What was
#   this lesson's state is there a comparison. `finish_requests()` in its scheduler ends requests of either queue.
# - In the same scheduler, `_update_after_schedule()` moves `num_computed_tokens` right after scheduling, *before* the
#   forward pass, so that the next step can be planned while this one runs. It can afford to: there, an engine whose
#   forward pass raises doesn't go on.
# - SGLang keeps a `chunked_req` beside its queues. In mini-sglang, a `ChunkedReq` is a class of its own that
#   refuses to be sampled: the type forbids the mistake.
#
# ## Three questions
#
# 1. A prompt of 40 tokens, chunks of 64. Which states does it pass, and does it ever have `prefilled_token_count == 20`?
#
#    <details><summary>Answer</summary>
#
#    WAITING, RUNNING, FINISHED. It never is PREFILLING, and its counter goes from 0 to 40 at once. (If other requests
#    take most of the step's budget, its first chunk may be 20 tokens, and then it is PREFILLING after all.)
#
#    </details>
#
# 2. A PREFILLING request with 3,072 of 8,192 tokens cached is cancelled. How many blocks of 16 come back, and what
#    would a user have seen of it?
#
#    <details><summary>Answer</summary>
#
#    192, since blocks are allocated per chunk and it holds exactly what it has cached. The user has seen nothing but the
#    end: one output with the reason `cancelled`.
#
#    </details>
#
# 3. Could you do without the state, and look at
#    `0 < prefilled_token_count < len(prompt_token_ids)` instead?
#
#    <details><summary>Answer</summary>
#
#    For a first prefill, yes. But see the preempted request after step 10: `prefilled_token_count` is 10 of 10, and four
#    tokens of its answer still have no K/V: it isn't ready to decode. One has to compare *cached* with *known* tokens, as
#    vLLM does. The state is that comparison with a name on it, and a table of what may follow.
#
#    </details>
#
# **Lesson 07** computes the chunk: what the model must be told about a piece of a prompt, and which row gives a token.

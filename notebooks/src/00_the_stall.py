# %% [markdown]
# # 00 · The stall
#
# **After this lesson you can**
#
# - show, on a real model, how one long prompt freezes everybody else's answer;
# - read a serving timeline: who got which tokens in which step, and who waited;
# - say in one sentence what chunked prefill changes, and what it costs;
# - check that it doesn't change a single token of anybody's answer.
#
# **Time** 25 minutes · **You need** PyTorch, and to have called `generate()` once · **Adds to the engine** nothing yet.
# Today you use the whole engine, and see what it is for. From lesson 01 on you build it, room by room. A request
# passes through the rooms below from left to right; the number is the lesson that builds the room.

# %% name="house"
from course_lib.lab import house

house()

# %% [markdown]
# ## Before you begin
#
# This notebook was saved with its outputs, so that it can be read without running it. You will learn more if you
# don't see the answers before you guess: choose *Edit → Clear Outputs of All Cells*, then run the cells one by one
# with Shift+Enter.
#
# ## Four people and a document
#
# A language model answers in two phases. **Prefill** reads the whole prompt and fills the model's memory of it, the
# KV cache. **Decode** then produces the answer, one token at a time. Lesson 01 takes both apart. Today it is enough to
# know that prefill costs as much as the prompt is long, and that a decode step is short.
#
# A server does both for many people at once. Below, four people chat with SmolLM2, a small but real model that runs
# on your own processor. Then somebody sends a long document and asks for a summary.

# %% name="set-up"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.lab import alt_text, compare, show, timeline
from course_lib.runners import FakeRunner

runner = ModelRunner(load_model("smollm2"))
workload = demo.Workload.standard(runner.tokenizer)

for name, prompt in workload.chats.items():
    print(f"{name:>8}: {len(prompt):5} tokens   {demo.CHATS[name]}")
print(f"{'document':>8}: {len(workload.document):5} tokens   {demo.document_text().splitlines()[0]}")

# %% [markdown]
# The document is [a short text on how such a server works](../course_lib/data/how_a_server_works.txt). You may want
# to read it: it tells the story of this course in 1,500 words.
#
# The four chats run first, and together: every step of the engine computes one token for each of them. When each has
# its first 16 tokens, the document arrives. What will Ana see, who is reading her story as it appears?
#
# > **Predict, then run.** How long will Ana wait between two tokens, at worst? Put your guess in the next cell.

# %% name="guess-gap"
my_guess_seconds = 0.2  # Ana's longest wait, in seconds: write yours
print(f"Noted: Ana waits {my_guess_seconds} s at worst.")

# %% [markdown]
# Now watch Ana's stream. Waits of more than three times the usual are marked where they happened. (The numbers that
# you see here before you run the cell were measured when the course was built, on two cores of a server processor.
# Yours will differ. Let nothing else work on the machine meanwhile, or you compare that as well.)

# %% name="run-whole" tags=["nbval-ignore-output"]
whole = demo.run(runner, workload, max_prefill_chunk_size=None, on_outputs=demo.Watch("Ana"))

gap = whole.measures()["longest gap in a stream, s"]
print(f"\nAna's longest wait: {gap:.2f} s. You said {my_guess_seconds} s.")
assert whole.token_ids["Ana"]
show(timeline(whole.trace, title=whole.title), alt_text(whole.trace))

# %% [markdown]
# ## What happened in that step
#
# Time runs to the right. Each blue tick is a token that reached its reader. While the orange bar is being computed,
# no one gets anything: a step is **one** forward pass through the model, and everything in it is ready at the same
# moment. The document's step is so long because it holds its whole prompt.
#
# Look at the steps around it. Their *time* depends on your machine, but what they *hold* doesn't:

# %% name="steps-whole"
def show_steps(trace, first, last):
    print("step   decode tokens   prefill tokens")
    for step in trace.steps[first : last + 1]:
        print(f"{step.index:4}{step.decode_tokens:16}{step.prefill_tokens:17}")


arrival = whole.trace.requests["document"].arrival_step
show_steps(whole.trace, arrival - 2, arrival + 2)

# %% [markdown]
# In the step of the document, the four decodes are a fifth of a percent of the tokens. They wait for the other 99.8.
#
# This isn't a small model's problem. Take a server with **128** running chats, so 128 tokens in a decode step, and a
# prompt of **8,192** tokens: 128 readers stand still while 64 times as many tokens are computed as in any step before.
# The long prompt must be computed, sooner or later. But must it be computed *in one piece*?
#
# ## Operating systems had this problem
#
# A processor with one long job, and somebody who types meanwhile: if the long job runs to its end, no letter appears.
# The answer, since the 1960s, is the **time slice**: let the long job work for a moment, look who else has something
# to do, go on. It isn't free. Each change from one job to another has a price of its own. Here are 2,048 ticks of
# work, with a price of 8 ticks for every slice:

# %% name="time-slices"
PRICE = 8
print("slice   a key press waits at most   the long job is done after")
for time_slice in (2048, 512, 128, 32, 8):
    slices = 2048 // time_slice
    print(f"{time_slice:5}{time_slice + PRICE:22} ticks{2048 + slices * (PRICE + 1):23} ticks")  # + 1: the typist's turn

# %% [markdown]
# The same cut can be made in a prompt. The KV cache can be filled bit by bit: a second piece of the prompt attends to
# the keys and values that the first piece left there. So the scheduler may take **256 tokens of the document**, give
# every chat its token in the same step, take the next 256, and so on. These pieces are called *chunks*.
#
# > **Predict, then run.** The document has 2,048 tokens, and a chunk is 256. First: how long is Ana's longest wait
# > now? Second: the document's own first token took as long as the wall above. In eight pieces, with four chats in
# > between, how long will it take? Give a factor: 2 means twice as long as before.

# %% name="guess-chunks"
my_guess_seconds_now = 0.2  # Ana's longest wait, in seconds: write yours
my_guess_factor = 2.0  # the document's time to first token, chunked against whole: write yours
print(f"Noted: Ana waits {my_guess_seconds_now} s at worst, and the document {my_guess_factor} times as long as before.")

# %% name="run-chunked" tags=["nbval-ignore-output"]
chunked = demo.run(runner, workload, max_prefill_chunk_size=256, on_outputs=demo.Watch("Ana"))

print(f"\nWhat the document's sender got: {' '.join(chunked.outputs['document'].text.split())}\n")
print(demo.table([whole], [chunked]))
before, after = whole.measures(), chunked.measures()
factor = after["document's time to first token, s"] / before["document's time to first token, s"]
print(f"\nAna's longest wait: {after['longest gap in a stream, s']:.2f} s. You said {my_guess_seconds_now} s.")
print(f"The document's first token took {factor:.2f} times as long. You said {my_guess_factor} times.")
assert after["longest gap in a stream, s"] < before["longest gap in a stream, s"], "something kept the machine busy: run both again"
show(
    compare(whole.trace, chunked.trace, titles=(whole.title, chunked.title)),
    f"{whole.title}: {alt_text(whole.trace)} {chunked.title}: {alt_text(chunked.trace)}",
)

# %% [markdown]
# (The answer is what you get from a model this small: fluent, and soon in a loop. It is real enough to stall.)
#
# One setting differs between the two halves, `max_prefill_chunk_size`. Above, one wall that everybody stands behind.
# Below, the same work in slices, and the chats go on between them. Slower than before, yes: each of their steps
# now carries 256 tokens of somebody else's prompt. But they go on.
#
# Two surprises, perhaps. The document loses little or nothing: the same 2,048 tokens are computed, and the chats'
# four tokens ride along in each of its steps for almost nothing. And the median hides everything: half of the chats'
# tokens come at times when nobody sends a document. Whoever reports a mean or a median doesn't see the stall. Look at
# the longest gap, or at a high percentile of enough tokens.
#
# In steps, which don't depend on your machine:

# %% name="steps-chunked"
arrival = chunked.trace.requests["document"].arrival_step
show_steps(chunked.trace, arrival - 1, arrival + 8)

prefill_steps = [step for step in chunked.trace.steps if any(c.request == "document" and c.kind == "prefill" for c in step.chunks)]
tokens_for_ana = sum("Ana" in step.tokens for step in prefill_steps)
print(f"\nThe document's prefill took {len(prefill_steps)} steps; Ana got {tokens_for_ana} tokens meanwhile.")

# %% [markdown]
# ## What the document lived through
#
# With whole prompts, a request was either waiting or running. Now there is something in between. After its first
# chunk the document holds memory, and part of it is computed, but it can't answer yet: the first token of the answer
# needs the *last* token of the prompt. That state has a name, **PREFILLING**, and lesson 06 is about it.

# %% name="document-chunks"
for step in chunked.trace.steps:
    for chunk in step.chunks:
        if chunk.request == "document" and chunk.kind == "prefill":
            first, last = chunk.start_pos, chunk.start_pos + chunk.num_tokens - 1
            after = "RUNNING, and its first token appears" if chunk.is_last else "PREFILLING, nothing to show"
            print(f"step {step.index}: prompt tokens {first:4} to {last:4}   then {after}")

# %% [markdown]
# ## Did anybody's answer change?
#
# Slicing the work may change *when* a token appears, never *which*. The engine has to earn that claim. Position
# numbers, memory slots and attention must all go by a token's place in the whole prompt, not by its place in the
# chunk. One mistake there, and the model reads a different text. So compare the two runs with each other, and with an
# engine that shares no code with ours: transformers' own `generate()`, one prompt after the other.

# %% name="same-tokens"
expected = demo.transformers_tokens(runner, workload)
for name in expected:
    same = whole.token_ids[name] == chunked.token_ids[name] == expected[name]
    print(f"{name:>8}: {len(expected[name])} tokens, {'all equal' if same else 'DIFFERENT'} in the three")
assert whole.token_ids == chunked.token_ids == expected

# %% [markdown]
# ## At a server's scale
#
# The scheduler doesn't care which model computes its steps. `FakeRunner` is one that computes nothing: it lets the
# same scheduler and the same memory run with 128 chats and 8,192 tokens in no time. Its clock is virtual, one tick a
# step, so this table is about *steps*: how many tokens the largest one holds, and how many tokens a chat got while
# the long prompt was prefilled.

# %% name="at-scale"
print("chunk size   prefill steps   largest step   tokens for each chat meanwhile")
for chunk_size in (None, 4096, 1024, 256):
    config = EngineConfig(
        num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=8192 + 128, max_prefill_chunk_size=chunk_size
    )
    engine = Engine(FakeRunner(), config)
    for chat in range(128):
        engine.add_request([chat] * 20, SamplingParams(max_tokens=60), request_id=f"chat {chat}")
    engine.step()
    engine.add_request(list(range(8192)), SamplingParams(max_tokens=1), request_id="document")
    while "document" in engine.snapshot():
        engine.step()
    steps = [step for step in engine.trace.steps if any(chunk.request == "document" for chunk in step.chunks)]
    largest = max(step.prefill_tokens + step.decode_tokens for step in steps)
    got = sum("chat 0" in step.tokens for step in steps)
    print(f"{chunk_size or 'whole':>10}{len(steps):16}{largest:15}{got:33}")

# %% [markdown]
# Smaller chunks, smaller steps, steadier chats. Then why not chunks of 16? Because every step has a price of its
# own, like a time slice: the model's weights are read from memory once per step, however few tokens it holds.
#
# > **Predict, then run.** The demo again, in chunks of 16. Chunks of 256 made Ana wait a sixth or so of the whole
# > prompt's time. What will chunks of 16 do to her longest wait, and what to the time until everybody is served?

# %% name="guess-small"
my_guess_gap_factor = 1.0  # Ana's longest wait, chunks of 16 against chunks of 256: write yours
my_guess_time_factor = 1.0  # the total time, chunks of 16 against chunks of 256: write yours
print(f"Noted: Ana's wait times {my_guess_gap_factor}, the total time times {my_guess_time_factor}.")

# %% name="run-small" tags=["nbval-ignore-output"]
small = demo.run(runner, workload, max_prefill_chunk_size=16)
print(demo.table([chunked], [small]))
ratio = {name: small.measures()[name] / chunked.measures()[name] for name in ("longest gap in a stream, s", "total time, s")}
print(f"\nAna's longest wait: {ratio['longest gap in a stream, s']:.2f} times. You said {my_guess_gap_factor}.")
print(f"The total time: {ratio['total time, s']:.2f} times. You said {my_guess_time_factor}.")
assert small.token_ids == chunked.token_ids
assert ratio["longest gap in a stream, s"] < 1, "something else kept the machine busy: run both again"

# %% [markdown]
# The steadiest chats of all, and the longest wait for the document. Chunk size is a trade, not a setting with a right
# value. Lesson 11 lets you turn that knob, `make bench` measures it.
#
# ## The rule
#
# > **Chunked prefill doesn't make a long prompt faster. It stops a long prompt from having the engine to itself:
# > the scheduler gets to decide again after every chunk.**
#
# ## Where it happens
#
# You can read the whole engine, and you will. Here is the place where the size of a chunk is decided:

# %% name="source"
from course_lib.lab import source
from course_lib.scheduler import Scheduler

source(Scheduler._chunk_size, mark="return min(")

# %% [markdown]
# `remaining` is what is left of the prompt, `limit` the chunk size, `tokens` what is left of the step's token budget
# after every running chat got its token. The smallest of them wins. The rest of the course is about everything that
# has to be true around this line, so that it may be this short.
#
# ## What production does
#
# - Sarathi (Agrawal et al., 2023) introduced chunked prefills that share a batch with decodes. Its successor
#   Sarathi-Serve (*Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI 2024) calls what you
#   saw a *generation stall*, and schedules so that there is none.
# - In vLLM it is on by default in the V1 engine. `Scheduler.schedule()` in `vllm/v1/core/sched/scheduler.py` says it in
#   a comment at the top: no prefill phase, no decode phase, just computed tokens catching up with known ones.
#   The knobs are `--max-num-batched-tokens` and `--long-prefill-token-threshold`.
# - SGLang has it as `--chunked-prefill-size`.
#
# ## Three questions
#
# 1. The four chats' tokens were equal in both runs. Name two things in the engine that, done wrong, would have
#    changed them.
#
#    <details><summary>Answer</summary>
#
#    For instance the position numbers of the chunk's tokens (they must go on where the last chunk ended), the memory
#    slots that their keys and values are written to, which keys each token may attend to, and from which row of the
#    step's result a chat's next token is taken. Lessons 03, 04 and 07 break each of them on purpose.
#
#    </details>
#
# 2. Who pays for the smoother streams? Look at the document's time to first token in both tables, and at the chats'
#    tokens right after the document arrived.
#
#    <details><summary>Answer</summary>
#
#    The chats pay a little in every step that carries a chunk: those steps are longer than a decode step alone. The
#    document pays when the chunks are so small that the price of a step counts: with chunks of 16 its first token
#    comes later. With chunks of 256 it pays next to nothing here.
#
#    </details>
#
# 3. Five people send a long document in the same second. What should the scheduler do, and whom does your answer hurt?
#
#    <details><summary>Answer</summary>
#
#    One after the other: the first document's answer begins early, the last one waits for all others. All at once, a
#    slice of each: all five begin late, and all five hold memory meanwhile. Neither is best for everybody; lesson 08
#    takes the first way and says why, and lesson 11 lets you try others.
#
#    </details>
#
# **Lesson 01** starts at the beginning: a `generate()` of your own, first without a KV cache, then with one.

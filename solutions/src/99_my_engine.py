# %% [markdown]
# # 99 · Your engine
#
# You wrote a serving engine, in thirty pieces, in eleven notebooks, and each piece ran in the course's engine for a moment.
# Here they run **together**: your slots, your blocks, your scheduler, your attention serve SmolLM2, beside the course's engine.
#
# What has to come out: the same tokens for everybody, and every check green. What may come out: other steps, where a part
# of yours makes another choice that is as good.
#
# **Time** 20 minutes · **You need** whatever you have done so far. Where a part isn't there yet, or isn't green, ours stands in, and
# the tables say so. You can come back here after every lesson.

# %% name="set-up"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.checks.my_engine import my_engine
from course_lib.checks.my_parts import my_parts
from course_lib.lab import block_map, block_map_alt, compare, compare_alt, house, show
from course_lib.runners import FakeRunner

# %% [markdown]
# ## Your parts
#
# `my_parts()` reads the exercise notebooks that lie in the folder of this one, as you **saved** them. Of each it runs the set-up cell,
# your cells, and cells that you added between them; then it runs the checks. A notebook that fails doesn't stop the others.
#
# Some exercises have no place in a running engine: they measure a trace, or were a step on the way. They are checked all the
# same.

# %% name="parts"
parts = my_parts()
parts

# %% [markdown]
# The house, with a light in every room in which a green part of yours works:

# %% name="house"
house(*parts.rooms)

# %% [markdown]
# ## SmolLM2, on your engine and on ours
#
# The main job of lesson 00, in small. Three people chat; after eight steps somebody sends a document of about 500 tokens, which is
# prefilled in chunks. First on your engine, then on the course's. There is no prefix cache in this run, so the blocks are handed
# out by your block manager of lesson 02.

# %% name="workload"
runner = ModelRunner(load_model("smollm2", device="cpu"))
config = EngineConfig(
    num_blocks=56, max_num_seqs=4, max_num_batched_tokens=128, max_prefill_chunk_size=96, enable_prefix_caching=False
)
chats = {name: demo.chat_prompt(runner.tokenizer, demo.CHATS[name]) for name in ("Ana", "Ben", "Chen")}
document = demo.chat_prompt(runner.tokenizer, f"{demo.document_text()[:2250]}\n\n{demo.QUESTION}")


def serve(engine):
    """The workload on an engine; returns the last output of each request."""
    last = {}
    for name, prompt in chats.items():
        engine.add_request(prompt, SamplingParams(max_tokens=16), request_id=name)
    for _ in range(8):
        last |= {output.request_id: output for output in engine.step()}
    engine.add_request(document, SamplingParams(max_tokens=12), request_id="document")
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
    return last


yours = my_engine(runner, config, parts)
your_outputs = serve(yours)
ours = Engine(runner, config)
our_outputs = serve(ours)

print(yours.title)
print(f"A document of {len(document)} tokens came. Its answer, as it was streamed:")
print(f"  {your_outputs['document'].text!r}\n")
for name, output in your_outputs.items():
    is_same = (output.token_ids, output.text) == (our_outputs[name].token_ids, our_outputs[name].text)
    verdict = "the same tokens and text on both engines" if is_same else "OTHERS than on ours"
    print(f"{name:>8}: {len(output.token_ids)} tokens, {verdict}")

# %% [markdown]
# Both runs, step by step, one above the other. Compare what each step **holds**, not its seconds: your attention was written to be
# read, ours to be fast.

# %% name="timelines" tags=["nbval-ignore-output"]
other = [name for name in our_outputs if your_outputs[name].token_ids != our_outputs[name].token_ids]
assert not other, f"other tokens than the course's engine gives: {', '.join(other)}"
both, titles = (yours.trace, ours.trace), (yours.title, "The course's engine")
show(compare(*both, titles=titles, by="step"), compare_alt(*both, titles=titles))

# %% [markdown]
# Do the steps differ? That isn't wrong. A scheduler may make other chunks out of the same budget, or let somebody in a step
# later; a reader sees a token a little earlier or later, and never another token.

# %% name="steps"
def in_steps(trace):
    """What can differ between two right engines: the number of steps, and the chunks of the document."""
    chunks = [chunk for step in trace.steps for chunk in step.chunks if chunk.request == "document"]
    sizes = [chunk.num_tokens for chunk in chunks if chunk.kind == "prefill"]
    first = next(step.index for step in trace.steps if "document" in step.tokens)
    return f"{len(trace.steps)} steps; the document in chunks of {sizes}, its first token in step {first}"


print("yours:", in_steps(yours.trace))
print("ours: ", in_steps(ours.trace))
is_same = in_steps(yours.trace) == in_steps(ours.trace)
print("The same steps." if is_same else "Other steps, and the same tokens: another choice, not a wrong one.")

# %% [markdown]
# ## Under pressure
#
# Now everything at once, on `FakeRunner`, whose every token depends on everything that can go wrong. A pool of 16 blocks is far too small
# for fourteen requests, so some are preempted. They begin with the same tokens, so blocks are shared and found again. Two people
# leave: one in the middle of a prompt, one while the answer grows. After **every** step the engine's books are checked; and in the end each
# request must have the tokens that it would have got alone.
#
# The prefix cache is on, so the blocks are handed out by your pool of lesson 09. Decode may take only a quarter of the budget while
# prefill waits, so that there are turns to take.
#
# > **Predict, then run.** Your scheduler of lesson 08 leaves a request out when it finds no block. Ours takes a block from the newest request
# > at once. (When nobody can go on, the engine's own rule preempts for yours as well.) Which of the two takes fewer steps?

# %% name="guess"
my_guess = "no idea"  # "yours" or "ours": write it here

# %% name="pressure"
tight = EngineConfig(
    block_size=4, num_blocks=16, max_num_seqs=8, max_num_batched_tokens=8, max_prefill_chunk_size=8, max_decode_share=0.25
)
instructions = list(range(12))  # three blocks that all prompts have in common
requests = {}
for number in range(14):
    own = [100 * number + place for place in range(1 + 5 * number % 14)]
    requests[f"r{number:02}"] = instructions + own


def serve_under_pressure(engine):
    """A newcomer in every second step, and two who leave. Returns the last output of each request."""
    last, coming, leaving = {}, list(requests), ["PREFILLING", "RUNNING"]
    engine.block_manager.shuffle_free_blocks(seed=1)
    while coming or engine.has_unfinished_requests():
        if coming and len(engine.trace.steps) % 2 == 0:
            name = coming.pop(0)
            engine.add_request(requests[name], SamplingParams(max_tokens=16), request_id=name)
        last |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
        goes = [name for name, state in engine.snapshot().items() if leaving and state.status == leaving[0]]
        if goes and len(engine.trace.steps) > 8:
            engine.cancel(goes[-1])
            leaving.pop(0)
    return last


def is_right(name, output):
    """A request that was cancelled has a part of its answer, every other one has all of it."""
    alone = FakeRunner().solo(requests[name], 16)
    if output.finish_reason == "cancelled":
        return output.token_ids == alone[: len(output.token_ids)]
    return output.token_ids == alone


pressed, reference = my_engine(FakeRunner(), tight, parts), Engine(FakeRunner(), tight)
for title, engine in (("yours", pressed), ("ours", reference)):
    outputs = serve_under_pressure(engine)
    right = sum(is_right(name, output) for name, output in outputs.items())
    cancelled = sum(output.finish_reason == "cancelled" for output in outputs.values())
    preempted = sum(len(step.preempted) for step in engine.trace.steps)
    hits = sum(request.prefix_hit_tokens for request in engine.trace.requests.values())
    print(f"{title:>5}: {right} of {len(requests)} requests right, {cancelled} of them cancelled")
    print(f"       {hits} prompt tokens from the cache; {len(engine.trace.steps)} steps, {preempted} preemptions")
print(f"You said: {my_guess}.")

# %% [markdown]
# Leaving somebody out throws no work away, so fewer are preempted. But whoever is left out keeps its blocks and does nothing
# with them, and with many such the steps are half empty. Taking a block from the newest costs a recomputation, and keeps
# the oldest going. (Where 08.2 is ours, your engine preempts as ours does.)

# %% name="pressure-timelines"
both, titles = (pressed.trace, reference.trace), (pressed.title, "The course's engine")
show(compare(*both, titles=titles, by="step"), compare_alt(*both, titles=titles))

# %% name="pool"
busiest = max(range(len(pressed.trace.steps)), key=lambda place: pressed.trace.steps[place].blocks_used)
title = "The pool of your engine, in its fullest step"
show(block_map(pressed.trace, busiest, title=title), block_map_alt(pressed.trace, busiest))

# %% [markdown]
# ## Who did the work
#
# How often each of your green parts was asked in the two runs. Some have their place only where another one isn't: the last
# column says so.

# %% name="calls"
print(f"{'':>24} SmolLM2   under pressure")
for part in parts:
    if part.room and part.state == "green":
        counts = f"{yours.calls[part.id]:>8} {pressed.calls[part.id]:>16}"
        print(f"{part.id} {part.exercise.part:<18} {counts}     {part.role.removeprefix('yours: ')}")
if not yours.calls and not pressed.calls:
    print("No part of yours was asked yet: in both runs all of the engine was ours.")

# %% [markdown]
# ## What you built

# %% name="numbers"
from textwrap import fill

done = [part for part in parts if part.state == "green"]
at_work = [part for part in done if part.id in pressed.calls | yours.calls]
lines, lines_at_work = (sum(part.lines for part in which) for which in (done, at_work))
print(f"{len(done)} of {len(parts)} parts are green, {len(at_work)} of them worked in the two runs above")
print(f"{lines} lines of code in their cells, {lines_at_work} of them worked here (without comments and docstrings)")
missing = ", ".join(f"{part.id} {part.exercise.part} ({part.state})" for part in parts.ours) or "nothing"
print(fill(f"Ours stood in for: {missing}", 110))

# %% [markdown]
# And what is ours however much you do: the transformer's own layers and weights, the storing of K/V, who is preempted when nobody
# can go on, the order among preempted requests, stop strings, the locks around a step, the trace and the pictures. That is most of the
# lines, and the smaller half of the ideas.
#
# **Where to go on.** [Lesson 13](../notebooks/13_to_production.ipynb) finds each of these rooms again in vLLM. Read its scheduler next:
# you know what it has to decide. And if something above is ours and should be yours, the table at the top says which
# notebook to open.

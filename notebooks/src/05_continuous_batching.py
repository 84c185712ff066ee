# %% [markdown]
# # 05 · Continuous batching
#
# **After this lesson you can**
#
# - count what a batch wastes when it waits for its slowest request;
# - write a scheduler that fills a free seat at once, and run it inside the real engine;
# - measure a stall, and say why the mean, the median and often the P99 don't show it;
# - say why no scheduler can avoid the stall as long as a prompt is computed in one piece.
#
# **Time** 35 minutes · **You need** lessons 01 to 04 · **Adds to the engine** the scheduler, in its first form:
# requests are WAITING or RUNNING, and a prompt goes in whole.

# %% name="map"
from course_lib.lab import house

house("scheduler")

# %% [markdown]
# ## Eight questions, four seats
#
# A decode step reads all of the model's weights to compute one token. Lesson 01 showed it: for four requests in one
# batch, the weights are read once as well, and the step costs hardly more. So a server batches.
#
# Eight people ask SmolLM2 something short. How long are its answers?

# %% name="answers"
from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo
from course_lib.runners import FakeRunner

runner = ModelRunner("smollm2")
QUESTIONS = (
    "What is the capital of France?",
    "Write a poem about the sea.",
    "What is 2 + 2?",
    "Explain how a bicycle works.",
    "Say hello.",
    "Translate 'good morning' into French.",
    "Write a story about a dragon.",
    "What colour is the sky?",
)
prompts = [demo.chat_prompt(runner.tokenizer, question) for question in QUESTIONS]
answers = Engine(runner).generate(prompts, SamplingParams(max_tokens=64), progress=False)
lengths = [len(answer.token_ids) for answer in answers]

for question, answer, length in zip(QUESTIONS, answers, lengths):
    print(f"{length:3} tokens   {question:38} {' '.join(answer.text.split())[:42]}")

# %% [markdown]
# (64 is where we cut. No one knows beforehand which answer ends when, the model included.)
#
# Say the machine has room for four. The simple way, and what you get from `generate()` on a padded batch of four:
# take the first four questions, step until **all** of them are done, then take the next four. That is **static
# batching**. A request whose answer is complete keeps its row of the batch, and the row computes padding.
#
# > **Predict, then run.** Of all rows that the two batches compute (4 rows × steps), which part gives nobody a token?

# %% name="guess-waste"
my_guess_percent_wasted = 10  # write yours

# %% name="count-waste"
seats = 4
rows = 0
for first in range(0, len(lengths), seats):
    group = lengths[first : first + seats]
    computed = seats * max(group)
    rows += computed
    print(f"batch of {group}: {max(group)} steps, {computed} rows, {computed - sum(group)} of them empty")
wasted = rows - sum(lengths)
print(f"\n{wasted} of {rows} rows, {100 * wasted // rows} %, give nobody a token. You said {my_guess_percent_wasted} %.")

# %% [markdown]
# One long answer in a batch is enough: everybody who is done sits beside it until it is done too, and everybody who
# waits, waits for it. The person who asked for the capital of France was ready after 8 steps of 64.
#
# ## Decide again at every step
#
# The way out is a change of *when* the scheduler is asked. Not once a batch, but **once a step**: whoever is done
# leaves, whoever waits takes the seat, and the others don't notice. That is **continuous batching**. The engine of
# this course is built around it:

# %% name="step"
import course_lib.engine

print(course_lib.engine.__doc__.strip().split("\n\n")[1])

# %% [markdown]
# So a scheduler is a class with a `schedule()` that answers one question: *what is computed in the next step?* Each
# answer is a list of chunks: this sequence, from this position, so many tokens. Here is the whole of one. It knows two
# kinds of requests, those that run and those that wait, and it counts seats.

# %% name="seats"
from course_lib.scheduler import ScheduledChunk, Scheduler, SchedulerOutput


class Seats(Scheduler):
    """At most max_num_seqs requests at a time. A prompt goes in whole. Nobody counts tokens."""

    def may_admit(self) -> bool:
        return True

    def schedule(self) -> SchedulerOutput:
        out = SchedulerOutput(self.step, self.block_size)
        for sequence in self.running:
            self.give(out, sequence, "decode")
        if self.may_admit():
            out.admitted = self.waiting[: self.config.max_num_seqs - len(self.running)]
        for sequence in out.admitted:
            self.give(out, sequence, "prefill")
        return out

    def give(self, out, sequence, kind):
        """All tokens of `sequence` that have no K/V yet: a whole prompt, or the newest token."""
        start, count = sequence.cached_token_count, sequence.remaining_token_count
        self.block_manager.allocate(sequence, start + count)  # the pool is large here; exercise 05.1 looks at the answer
        out.chunks.append(ScheduledChunk(sequence, start, count, kind, is_last=True))


class Static(Seats):
    def may_admit(self) -> bool:
        return not self.running  # only when the whole batch is done


# %% [markdown]
# One line is all the difference between the two. Both run inside the real engine, as `Engine(..., scheduler=Seats)`,
# with its queues, its blocks and its trace. `FakeRunner` takes the model's place: each request gets as many tokens as
# SmolLM2 gave it, and a step takes one tick.
#
# > **Predict, then run.** `Static` needs 128 steps (64 + 64). How many does `Seats` need for the same tokens?

# %% name="guess-steps"
my_guess_steps = 120  # write yours

# %% name="static-and-continuous"
from course_lib.lab import compare, compare_alt, show


def run(scheduler):
    config = EngineConfig(max_num_seqs=4, max_prefill_chunk_size=None, enable_prefix_caching=False)
    engine = Engine(FakeRunner(vocab_size=runner.vocab_size), config, scheduler=scheduler)
    for number, (prompt, length) in enumerate(zip(prompts, lengths)):
        engine.add_request(prompt, SamplingParams(max_tokens=length), request_id=f"Q{number}")
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


static, continuous = run(Static), run(Seats)
print(f"Static: {len(static.steps)} steps. Seats: {len(continuous.steps)} steps. You said {my_guess_steps}.")
titles = ("static batching", "continuous batching")
show(compare(static, continuous, titles=titles, by="step"), compare_alt(static, continuous, titles=titles))

# %% [markdown]
# Read the upper picture row by row: Q0 is done early and its seat stays empty until Q1 is done. In the lower one
# each end of a row has a beginning of another row right under it. At the end there is nobody left to fill the seats;
# with people arriving all the time that tail isn't there, and no seat is ever empty.
#
# The first token comes sooner, too:

# %% name="first-tokens"
print("steps to the first token" + "".join(f"{name:>5}" for name in static.requests))
for title, trace in zip(titles, (static, continuous)):
    firsts = [next(count for count, step in enumerate(trace.steps, 1) if name in step.tokens) for name in trace.requests]
    print(f"{title:24}" + "".join(f"{first:5}" for first in firsts))

# %% [markdown]
# ## Then somebody sends a long prompt
#
# So far every prompt was a line long. Now four people chat with SmolLM2, on your own processor, under `Seats`. When
# each has 8 tokens, a fifth request arrives, a text of about a thousand tokens, and a seat is free for it. We run it
# twice, without the fifth and with it.
#
# > **Predict, then run.** The fifth request comes once, in the middle of four answers of 48 tokens. Look at all gaps
# > between two tokens of the four chats. By what factor do their **median** and their **mean** grow?

# %% name="guess-factors"
my_guess_median = 3.0  # write yours
my_guess_mean = 3.0  # write yours

# %% name="measure" tags=["nbval-ignore-output"]
from course_lib.lab import alt_text, timeline
from course_lib.metrics import Summary, of_requests

LONG = demo.chat_prompt(runner.tokenizer, f"{demo.document_text()[:4500]}\n\n{demo.QUESTION}")
chats = {name: demo.chat_prompt(runner.tokenizer, message) for name, message in demo.CHATS.items()}


def serve(scheduler, long_prompt):
    config = EngineConfig(
        max_num_seqs=5, max_num_batched_tokens=2048, max_prefill_chunk_size=None, enable_prefix_caching=False
    )
    engine = Engine(runner, config, scheduler=scheduler)
    for name, prompt in chats.items():
        engine.add_request(prompt, SamplingParams(max_tokens=48, ignore_eos=True), request_id=name)
    for _ in range(8):
        engine.step()
    if long_prompt:
        engine.add_request(long_prompt, SamplingParams(max_tokens=8), request_id="long")
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


def gaps_of_chats(trace):
    requests = of_requests(trace)
    return [gap for name in chats for gap in requests[name].itl]


alone, together = serve(Seats, None), serve(Seats, LONG)
before, after = Summary.of(gaps_of_chats(alone)), Summary.of(gaps_of_chats(together))
print(f"{after.count} gaps, in milliseconds, without and with a prompt of {len(LONG):,} tokens")
for name, word in (("p50", "median"), ("mean", "mean"), ("p90", "P90"), ("p99", "P99"), ("max", "longest")):
    a, b = getattr(before, name), getattr(after, name)
    print(f"{word:>8} {1000 * a:8.0f} {1000 * b:8.0f}   {b / a:5.1f} ×")
print(f"\nYou said: median {my_guess_median:.1f} ×, mean {my_guess_mean:.1f} ×.")
assert after.max > 10 * after.p50 and after.p50 < 2 * before.p50
show(timeline(together, title="whole prompts: one of them is long"), alt_text(together))

# %% [markdown]
# The median has hardly moved: at least half of the gaps are as they were. The mean has, to a number that no gap has
# and nobody felt. Each dot below is one gap. A reader doesn't live through the mean, but through the dot at the top.

# %% name="gaps-picture" tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt

from course_lib.lab import show_figure

gaps = gaps_of_chats(together)
fig, ax = plt.subplots(figsize=(8, 3.4), facecolor="white")
ax.scatter(range(len(gaps)), [1000 * gap for gap in gaps], s=14, color="#0072b2", label="one gap")
for value, word, color, style in (
    (after.p50, "median", "#009e73", "--"),
    (after.mean, "mean", "#d55e00", "-"),
    (after.max, "longest", "#9c3f77", ":"),
):
    ax.axhline(1000 * value, color=color, linestyle=style, label=f"{word}: {1000 * value:.0f} ms")
ax.set(xlabel="gaps of Ana, Ben, Chen and Dora, one chat after the other", yscale="log")
ax.set_ylabel("gap between two tokens, ms")
ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
assert sum(gap > after.max / 2 for gap in gaps) == len(chats), "one long gap in each chat"
show_figure(
    fig,
    f"{len(gaps)} gaps between tokens. All but {len(chats)} lie near the median of {1000 * after.p50:.0f} ms; one of each "
    f"chat is near {1000 * after.max:.0f} ms. The mean, {1000 * after.mean:.0f} ms, lies where there is no gap at all.",
)

# %% [markdown]
# Four gaps of 188 are long: one in each chat, all of them the same step. That is 2.1 %, so the P99 just catches
# them. It was lucky. Let an answer be longer, or let the long prompt come less often, and the P99 goes blind as well.
# Here one gap is as long as sixty, and all others are equal:

# %% name="blind-p99"
print("gaps    mean     P50     P99   longest")
for count in (50, 100, 200, 1000):
    ordinary = Summary.of([1.0] * (count - 1) + [60.0])
    print(f"{count:4}{ordinary.mean:8.2f}{ordinary.p50:8.2f}{ordinary.p99:8.2f}{ordinary.max:10.2f}")

# %% [markdown]
# So this course measures the **stall**: the longest gap between two tokens of one request. A percentile over all
# tokens is a statement about tokens. A person is not interested in 99 % of her tokens.
#
# ## At a server's scale
#
# 128 chats run, and a prompt of 8,192 tokens arrives. `FakeRunner` shows what the steps hold:

# %% name="at-scale"
config = EngineConfig(
    num_blocks=2048, max_num_seqs=256, max_num_batched_tokens=8192, max_prefill_chunk_size=None,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config, scheduler=Seats)
for chat in range(128):
    engine.add_request([chat] * 20, SamplingParams(max_tokens=12), request_id=f"chat {chat}")
for _ in range(3):
    engine.step()
engine.add_request(list(range(8192)), SamplingParams(max_tokens=2), request_id="long")
engine.step()
for step in engine.trace.steps[1:]:
    total = step.decode_tokens + step.prefill_tokens
    print(f"step {step.index}: {step.decode_tokens:4} decode + {step.prefill_tokens:5} prefill = {total:5} tokens", end="")
    print(f", {100 * step.decode_tokens / total:5.1f} % decode")

# %% [markdown]
# Step 3 has 65 times as many tokens as the one before. Everybody in it gets the result at its end.
#
# And the engine has a complaint. `max_num_batched_tokens` was 8,192, the most that the machine was said to take in
# one step:

# %% name="complaint"
try:
    engine.check_invariants()
except AssertionError as complaint:
    print("AssertionError:", complaint)

# %% [markdown]
# `Seats` counts requests, and a request is no measure of work: one of them was 8,192 times as much as another. The
# unit of the budget is the **token**. In the exercise you write the scheduler that counts them.
#
# But watch what a budget can't do. Make it small, so that no step is ever long:

# %% name="refused"
small = EngineConfig(max_num_batched_tokens=512, max_prefill_chunk_size=None)
try:
    Engine(FakeRunner(), small).add_request(list(range(8192)))
except ValueError as refusal:
    print("ValueError:", refusal)

# %% [markdown]
# With whole prompts, the budget has to be as large as the longest prompt, or that prompt is never served. And a
# budget that lets it in lets the stall in with it. The scheduler may hold the long prompt back, and it will only come
# a moment later; it can't make it smaller.
#
# ## What is missing is a state
#
# Every request of this lesson was in one of two states before its end:

# %% name="two-states"
engine = Engine(FakeRunner(), config, scheduler=Seats)
engine.add_request([1] * 20, SamplingParams(max_tokens=4), request_id="short")
engine.add_request(list(range(5000)), SamplingParams(max_tokens=4), request_id="long")
print("before step     short      long")
while engine.has_unfinished_requests():
    states = engine.snapshot()
    print(f"{engine.scheduler.step:11}" + "".join(f"{states[name].status:>10}" for name in ("short", "long")))
    engine.step()

# %% [markdown]
# Not begun, or ready to answer: with whole prompts there is nothing between. Prefill is **one indivisible task**.
#
# You know this from operating systems. A scheduler that may only choose when a task gives up the processor by itself
# is called *cooperative*, and one long task freezes everything that is interactive. The remedy was the time slice: the
# long task is stopped after a while, remembers where it was, and gets its next turn later.
#
# | an operating system | a serving engine |
# |---|---|
# | a process | a request |
# | a long computation beside an editor | a long prefill beside streaming answers |
# | the time slice | the **chunk** |
# | the program counter, saved between slices | how many prompt tokens are computed, and their K/V in the cache |
# | a process that was begun and isn't done | PREFILLING |
#
# The last two rows are the next lesson. To cut a prompt, a request must be able to say *I am at token 3,072 of 8,192*,
# and the engine must know that such a request holds memory and has nothing to show yet.
#
# ## The rule
#
# > **Decide again at every step, and count tokens, not requests; but a prompt that can't be cut you can only delay, and
# > whenever it runs, it blocks everybody.**
#
# ## Your turn
#
# [Exercise 05](../exercises/05_continuous_batching.ipynb): write the scheduler that counts tokens, and the measure that
# shows a stall. Both run on the real engine.
#
# ## What production does
#
# - *Orca: A Distributed Serving System for Transformer-Based Generative Models* (Yu et al., OSDI 2022) introduced
#   the idea as **iteration-level scheduling**. The name *continuous batching* came later; TensorRT-LLM calls it
#   *in-flight batching*.
# - vLLM before V1 scheduled whole prompts, prefill first, and by default put no decode into the same step. Its
#   documentation of that time says what follows: better time to first token, slower inter-token latency. In V1,
#   chunked prefill is on, and chunks and decodes share a step: first all that has begun, decoding or half-filled, in one
#   order, then the prompts that wait. The budget is `--max-num-batched-tokens`, the seats are `--max-num-seqs`.
# - transformers has the idea too, in `generate_batch()`.
#
# ## Three questions
#
# 1. With continuous batching, is the request with the longest answer served faster, slower or the same?
#
#    <details><summary>Answer</summary>
#
#    About the same: it had a seat from the beginning and got a token in every step, then as now. The gain is
#    everybody else's, those who were done and those who waited. (Its steps may even be a little slower, because they
#    are fuller.)
#
#    </details>
#
# 2. Your dashboard shows P99 inter-token latency, and it is flat. A user writes that her answer freezes "every few
#    minutes". Who is right?
#
#    <details><summary>Answer</summary>
#
#    Both. At 40 tokens per second, a freeze every five minutes is one gap in 12,000. Look at the longest gap of each
#    request, and at how many requests had one above a limit.
#
#    </details>
#
# 3. A colleague proposes to run a long prompt only when no chat is running. What happens on a busy server, and
#    whom does it help?
#
#    <details><summary>Answer</summary>
#
#    On a busy server that moment never comes: the long prompt starves. If it does come, a chat that arrives one step
#    later waits for the whole prefill before its first token. Holding back moves the stall; only cutting shortens it.
#
#    </details>
#
# **Lesson 06** gives the request in the middle of its prompt a name and counters, and an end in any state.

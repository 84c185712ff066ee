# %% [markdown]
# # Exercises 05 · Continuous batching
#
# Two exercises to [lesson 05](../notebooks/05_continuous_batching.ipynb): the scheduler that counts tokens, and the
# number that shows a stall. Run the set-up cell first; then every exercise works by itself.

# %% name="set-up"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.checks import NotDone, check
from course_lib.lab import alt_text, budget, budget_alt, show, timeline
from course_lib.runners import FakeRunner
from course_lib.scheduler import ScheduledChunk, Scheduler, SchedulerOutput

# %% [markdown] name="task-05-1"
# ## 05.1 A scheduler that counts tokens
#
# Write `schedule()`: it says what the next step computes. Requests that run get their one token each, first of all; then
# the prompts that wait go in whole, in their order, as long as there are tokens, seats and blocks for them.
#
# ```text
# budget 32 tokens, 8 seats             left of the budget
#   decode   Ana 1, Ben 1, Chen 1       32 → 29
#   prefill  Dora's prompt, 20 tokens   29 →  9
#   prefill  Emil's prompt, 12 tokens         9: doesn't fit, he waits
#            Finn's prompt, 5 tokens          9: would fit, but nobody
#                                                passes Emil
# ```
#
# One exception, because without it somebody would wait for ever: a prompt that is longer than the *whole* budget goes
# in when the step is empty, alone. (Our engine refuses such prompts at the door when they can't be cut. A scheduler
# shouldn't depend on its doorman.)
#
# This scheduler takes no blocks away from anybody: with a pool that is too small, requests can get stuck, each waiting
# for a block that another one holds. Preemption is the way out (lessons 06 and 08).

# %% name="your-05-1"
class WholePrompts(Scheduler):
    """Requests are WAITING or RUNNING. A prompt goes in whole, or not in this step.

    self.running, self.waiting            lists of Sequence, in the order in which they are to be served; leave both
                                          lists as they are: the engine moves sequences
    self.config.max_num_batched_tokens    most tokens in a step, of all requests together
    self.config.max_num_seqs              most requests at a time: those that run and those that go in now
    self.block_manager.allocate(sequence, n)
                                          takes blocks for the first n tokens of a sequence; False, and nothing
                                          has changed, if they are not free
    """

    def schedule(self) -> SchedulerOutput:
        """The next step's chunks: first the decodes, then whole prompts.

        A chunk is ScheduledChunk(sequence, start_pos, num_tokens, kind, is_last). kind is "decode" or "prefill"; is_last
        is True for all of them here. `plan.admitted` lists the sequences whose prompt goes in now.
        A RUNNING sequence has one token without K/V, at position sequence.cached_token_count; a WAITING one has
        sequence.remaining_token_count of them, from position 0 on. Who can't get blocks gets no chunk.
        The first prompt that doesn't fit (tokens, seats or blocks) stops all prompts behind it, and takes no blocks.
        """
        plan = SchedulerOutput(self.step, self.block_size)
        ### BEGIN SOLUTION
        limit = self.config.max_num_batched_tokens
        left = limit
        seats = self.config.max_num_seqs - len(self.running)
        for request in self.running:
            place = request.cached_token_count
            if left > 0 and self.block_manager.allocate(request, place + 1):
                plan.chunks.append(ScheduledChunk(request, place, 1, "decode", True))
                left -= 1
        for request in self.waiting:
            need = request.remaining_token_count
            fits = need <= left or not plan.chunks
            if seats == 0 or not fits or not self.block_manager.allocate(request, need):
                break
            plan.chunks.append(ScheduledChunk(request, 0, need, "prefill", True))
            plan.admitted.append(request)
            left -= need
            seats -= 1
        return plan
        ### END SOLUTION


# %% name="check-05-1"
check("05.1", WholePrompts)

# %% [markdown] name="hints-05-1"
# <details><summary>Hint 1: the rule</summary>
#
# Keep one number, the tokens that are left in this step. Whoever gets a chunk takes as many from it as the chunk has.
# Decodes were promised a token, so they are served from it first.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Budget 10, three requests run, a prompt of 8 waits. If you compare the prompt with the budget, the step has 11
# tokens. If you serve the prompt first, somebody who is reading gets nothing.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# left = the budget. For each that runs: if left isn't 0 and its block is there, a decode chunk, left minus 1. For each
# that waits: how many tokens does it need? Stop if no seat is left; stop if they are more than left, unless the plan is
# still empty; stop if allocate says no. Otherwise a prefill chunk, and take seat and tokens away.
#
# </details>

# %% name="run-05-1" tags=["needs-your-code"]
# Your scheduler in the real engine: six requests, 40 tokens a step, four seats.
config = EngineConfig(
    block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=40, max_prefill_chunk_size=None,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config, scheduler=WholePrompts)
prompts = {"Ana": 6, "Ben": 9, "Chen": 30, "Dora": 12, "Emil": 38, "Finn": 5}
for name, length in prompts.items():
    engine.add_request([len(name)] * length, SamplingParams(max_tokens=6), request_id=name)
while engine.has_unfinished_requests():
    engine.step()
    engine.check_invariants()  # no step above the budget, no block lost

for step in engine.trace.steps:
    print(f"step {step.index:2}: {step.decode_tokens} decode + {step.prefill_tokens:2} prefill tokens")
show(budget(engine.trace, by="step", title="your scheduler: tokens in every step"), budget_alt(engine.trace))

# %% [markdown] name="task-05-2"
# ## 05.2 The longest gap
#
# Write `longest_gaps(trace)`: for each request, the longest time between two of its tokens, read off a trace. That is the
# stall its reader felt; a time in which the request was preempted counts like any other wait.
#
# ```text
# step       0     1     2     3     4     5
# ends at   1.0   2.0   3.0   7.0   8.0   9.0  seconds
# Ana        ●     ●     ●     ●     ●     ●
# Ben              ●     ●                 ●
# Chen                               ●
#
# Ana:  gaps 1 1 4 1 1  → 4.0
# Ben:  gaps 1 6        → 6.0    preempted in steps 3 and 4
# Chen: one token       → None
# ```

# %% name="your-05-2"
def longest_gaps(trace) -> dict[str, float | None]:
    """The longest time between two tokens in a row of each request, in seconds.

    trace.requests   the requests, by name
    trace.steps      in order; step.tokens holds the names of those that got a token (a dict, name -> token id),
                     step.end is the time at which they got it
    None for a request with fewer than two tokens. The time to the first token is no gap.
    """
    ### BEGIN SOLUTION
    worst = dict.fromkeys(trace.requests)
    latest = {}
    for step in trace.steps:
        for name in step.tokens:
            if name in latest:
                gap = step.end - latest[name]
                worst[name] = max(gap, worst[name] or 0.0)
            latest[name] = step.end
    return worst
    ### END SOLUTION


# %% name="check-05-2"
check("05.2", longest_gaps)

# %% [markdown] name="hints-05-2"
# <details><summary>Hint 1: the rule</summary>
#
# A gap belongs to one request. It lies between a token and the next token *of the same request*, whatever happened to
# others, or to itself, between the two.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Ben gets tokens in steps 2 and 5, and nothing between. If you look at the length of the steps in which he got tokens,
# you never see that he waited.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Remember for each name the time of its latest token. Walk through the steps; whoever gets a token and had one before has
# a gap: keep it if it is the longest so far. Then this token is the latest.
#
# </details>

# %% name="run-05-2" tags=["needs-your-code"]
# Your measure on the real engine, in a pool that is too small for all: somebody is preempted and has to wait.
config = EngineConfig(
    block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=32, max_prefill_chunk_size=8,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config)
for name, length in {"Ana": 9, "Ben": 12, "Chen": 7, "Dora": 6}.items():
    engine.add_request([len(name)] * length, SamplingParams(max_tokens=10), request_id=name)
while engine.has_unfinished_requests():
    engine.step()
print("longest gap, in ticks; a tick is one step")
for name, gap in longest_gaps(engine.trace).items():
    print(f"{name:>5}: {gap:2.0f}")
show(timeline(engine.trace, by="step", title="who was preempted, and for how long"), alt_text(engine.trace))

# %% name="run-05-2-real" tags=["needs-your-code", "nbval-ignore-output"]
# And on SmolLM2: four people chat, and a prompt of a thousand tokens arrives.
from statistics import mean, median

from course_lib import ModelRunner, demo
from course_lib.metrics import of_requests

runner = ModelRunner("smollm2")
config = EngineConfig(
    max_num_seqs=5, max_num_batched_tokens=2048, max_prefill_chunk_size=None, enable_prefix_caching=False
)
engine = Engine(runner, config)
for name, message in demo.CHATS.items():
    engine.add_request(
        demo.chat_prompt(runner.tokenizer, message), SamplingParams(max_tokens=32, ignore_eos=True), request_id=name
    )
for _ in range(8):
    engine.step()
long_prompt = demo.chat_prompt(runner.tokenizer, demo.document_text()[:4500])
engine.add_request(long_prompt, SamplingParams(max_tokens=8), request_id="long")
while engine.has_unfinished_requests():
    engine.step()

stalls, ordinary = longest_gaps(engine.trace), of_requests(engine.trace)
print("            longest     mean   median, in milliseconds")
for name in demo.CHATS:
    gaps = ordinary[name].itl
    print(f"{name:>8} {1000 * stalls[name]:10.0f} {1000 * mean(gaps):8.0f} {1000 * median(gaps):8.0f}")
    assert stalls[name] > 5 * median(gaps), f"no stall to be seen: {name}'s longest gap is an ordinary one"
show(timeline(engine.trace, title="whole prompts on SmolLM2"), alt_text(engine.trace))

# %% [markdown]
# # 08 · Chunk scheduling
#
# **After this lesson you can**
#
# - say which three budgets a step spends, in which unit each is counted, and which one a request waits for;
# - predict, token by token, what a chunk scheduler puts into the next steps;
# - put the lines of a scheduler with three budgets in order, and say what each order would break;
# - defend "decode first" and "PREFILLING before WAITING" with a picture, and name a workload where each is the wrong
#   choice.
#
# **Time** 45 minutes · **You need** lessons 05 to 07 · **Adds to the engine** the chunk scheduler: `schedule()` in
# the form in which it stays, and the policies that order the prompts.

# %% name="house"
from course_lib.lab import alt_text, compare, compare_alt, house, show, source, timeline

house("scheduler", "policies")

# %% [markdown]
# ## Forty people, one each step
#
# In every step somebody new sends a prompt of 256 tokens. A step has room for 64 tokens, and a chunk has at most 64. So
# each prompt takes four steps, and only one in four can be served while the next ones queue up. The server is overloaded,
# and somebody has to wait. The question is who.
#
# One idea sounds friendly: **newcomers first**. Nobody stands before a closed door, everybody is begun at once. The
# other idea: **finish what you have begun**, and let newcomers queue.
#
# > **Predict, then run.** After 40 steps, how many of the forty have their first token, with either idea?

# %% name="guess-answers"
my_guess_newcomers_first = 10  # people with a first token after 40 steps: write yours
my_guess_begun_first = 10  # write yours

# %% name="forty"
from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.runners import FakeRunner


def tokens(request: int, count: int) -> list[int]:
    """`count` token ids that no other request has."""
    return [1000 * request + k for k in range(count)]


def forty(policy: str) -> Engine:
    config = EngineConfig(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=64, max_prefill_chunk_size=64,
                          enable_prefix_caching=False, policy=policy)  # fmt: skip
    engine = Engine(FakeRunner(vocab_size=50_000), config)
    for number in range(40):
        engine.add_request(tokens(number, 256), SamplingParams(max_tokens=4), request_id=f"P{number:02}")
        engine.step()
    return engine


runs = {name: forty(name) for name in ("waiting_first", "prefilling_first")}
guesses = {"waiting_first": my_guess_newcomers_first, "prefilling_first": my_guess_begun_first}
print("                   first tokens   you said   tokens computed   blocks held at the end")
for name, engine in runs.items():
    answered = {request for step in engine.trace.steps for request in step.tokens}
    computed = engine.metrics().computed_tokens
    print(f"{name:18}{len(answered):13}{guesses[name]:11}{computed:18}{engine.trace.steps[-1].blocks_used:25}")
pair = [runs[name].trace for name in ("waiting_first", "prefilling_first")]
titles = ("Newcomers first", "What was begun first")
show(compare(*pair, titles=titles, by="step"), compare_alt(*pair, titles=titles))

# %% [markdown]
# The same number of tokens went through the model. With one idea nine people read their answer, with the other
# **nobody** does. (Not ten, as 40 × 64 / 256 would have it: of the 2,560 tokens the nine readers' own answers took 27,
# three each.) Forty requests are begun, each with a quarter of its prompt computed, and they hold five times the
# memory.
#
# In the picture, orange is a chunk of prompt, blue a token of an answer. Look for blue in the upper half.
#
# A request that is half-filled is the worst thing to have many of: it holds memory, and its user sees nothing. This
# lesson builds a scheduler that knows what it spends.
#
# ## Budget one: tokens
#
# The more tokens a step has, the longer everybody in it waits. So the first budget is `max_num_batched_tokens`: at
# most so many tokens in a step, of whatever kind. Those who run are served first, one token each. What they leave is
# for prompts, and it's never more than one chunk a request:
#
# > `chunk = min(what remains of the prompt, the chunk size, what is left of the budget)`
#
# > **Predict, then run.** 128 chats run, the budget is 4,096 tokens, the chunk size as large. A prompt of 8,192
# > tokens arrives. How large is its first chunk, and in how many steps is it prefilled? (Two chunks of 4,096 would be
# > two.)

# %% name="guess-4096"
my_guess_first_chunk = 4096  # write yours
my_guess_steps = 2  # write yours

# %% name="run-4096"
config = EngineConfig(num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=4096, max_prefill_chunk_size=4096)
engine = Engine(FakeRunner(), config)
for chat in range(128):
    engine.add_request([chat] * 10, SamplingParams(max_tokens=20), request_id=f"chat {chat}")
engine.step()
engine.add_request(list(range(8192)), SamplingParams(max_tokens=1), request_id="document")
while "document" in engine.snapshot():
    engine.step()
for step in engine.trace.steps[1:]:
    print(
        f"step {step.index}: {step.decode_tokens} decode + {step.prefill_tokens:4} prefill"
        f" = {step.decode_tokens + step.prefill_tokens} of 4096 tokens"
    )
print(f"\nYou said {my_guess_first_chunk} tokens first, and {my_guess_steps} steps.")

# %% [markdown]
# 3,968 tokens: what the 128 readers left. A chunk is **shrunk** to what is left, never dropped for it. The prompt
# needs a third step for its last 256 tokens, and in a busy server the rest of that step isn't empty: the next prompt
# takes it.
#
# As a function on plain numbers, the first version of a scheduler looks like this:

# %% name="plan-tokens"
from dataclasses import dataclass


@dataclass
class Request:
    name: str
    known: int  # tokens of its prompt
    cached: int = 0  # of those, tokens with K/V

    @property
    def left(self) -> int:
        return self.known - self.cached


CHUNK = 64


def plan_tokens(running, prefilling, waiting, tokens):
    """{request: tokens} of the next step."""
    step = {}
    for r in running:
        step[r.name] = 1
        tokens -= 1
    for r in prefilling + waiting:
        size = min(r.left, CHUNK, tokens)
        if size > 0:
            step[r.name] = size
            tokens -= size
    return step


A, B, C = Request("A", 20, 20), Request("B", 200, 64), Request("C", 40)
for budget in (64, 128, 256):
    print(f"budget {budget:3}:", plan_tokens([A], [B], [C], budget))

# %% [markdown]
# ### Why decode first?
#
# Because the readers were promised a stream. Here is one reader, A, and a prompt of 1,000 tokens. Above, the engine's
# order. Below, the opposite: chunks as well, but a step is for prompts as long as there is one
# (`course_lib/contrast.py`; a well-known small engine, nano-vllm, chooses so).

# %% name="decode-first"
from course_lib.contrast import PrefillFirstScheduler
from course_lib.scheduler import Scheduler


def one_reader(scheduler: type) -> Engine:
    config = EngineConfig(max_num_batched_tokens=128, max_prefill_chunk_size=128, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config, scheduler=scheduler)
    engine.add_request(tokens(1, 20), SamplingParams(max_tokens=12), request_id="A")
    engine.step()
    engine.add_request(tokens(2, 1000), SamplingParams(max_tokens=3), request_id="B")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


engines = [one_reader(scheduler) for scheduler in (Scheduler, PrefillFirstScheduler)]
titles = ("Decode first", "Prefill first, in chunks all the same")
for title, engine in zip(titles, engines):
    requests = engine.metrics().requests
    chunks = [
        chunk.num_tokens
        for step in engine.trace.steps
        for chunk in step.chunks
        if chunk.request == "B" and chunk.kind == "prefill"
    ]
    print(f"{title}: in steps, A's longest gap {requests['A'].stall:.0f}, B's first token after {requests['B'].ttft:.0f}")
    print(f"    B's chunks: {chunks}")
traces = [engine.trace for engine in engines]
show(compare(*traces, titles=titles, by="step"), compare_alt(*traces, titles=titles))

# %% [markdown]
# Chunks alone don't help: below, the prompt is cut, and the stall is back. Cutting makes a task *schedulable*; somebody
# still has to schedule. And B loses nothing by being second: a token less in each chunk, the same number of chunks.
#
# ## Budget two: sequences
#
# `max_num_seqs` bounds how many requests are in flight. Each of them has a row in the engine's tables, and sooner or
# later all of them run at once. Who is in flight? Those who run, **and those who are half-filled**. A newcomer needs
# a free seat; who has one keeps it.


# %% name="plan-seats"
def plan_seats(running, prefilling, waiting, tokens, seats):
    step = plan_tokens(running, prefilling, [], tokens)
    free = seats - len(running) - len(prefilling)
    admitted = waiting[: max(0, free)]
    rest = tokens - sum(step.values())
    return step | plan_tokens([], [], admitted, rest)


D = Request("D", 10)
for seats in (2, 3, 4):
    print(f"{seats} seats:", plan_seats([A], [B], [C, D], tokens=128, seats=seats))

# %% [markdown]
# ## Budget three: blocks
#
# A chunk's K/V needs blocks, and they are taken just before it runs (lesson 02). A chunk of 1,024 tokens takes at most 64
# blocks of 16, fewer if the request's last block has room. If they aren't free, the chunk isn't scheduled.
#
# And then **nobody behind it gets prefill in this step**, even if there are blocks enough for a smaller request.
# Sounds wasteful?
#
# > **Predict, then run.** A pool has 24 blocks. A document waits with a chunk that needs 16 of them. In every step a
# > small prompt arrives that needs 2, runs for eight steps and goes. If small ones may pass, after how many
# > steps does the document go on?

# %% name="guess-passing"
my_guess_document_goes_on_after = 10  # steps; 0 for never: write yours


# %% name="passing"
def pool_of_24(may_pass: bool, steps: int = 200):
    """A pool as a number: the step in which a document's chunk of 16 blocks goes in, or 0."""
    free, ends = 24, []
    for step in range(1, steps):
        free += 2 * sum(end == step for end in ends)  # small ones that end
        if step > 12 and free >= 16:  # the document is there from step 13 on
            return step
        if (may_pass or step <= 12) and free >= 2:  # one small newcomer in each step
            free, ends = free - 2, [*ends, step + 8]
    return 0


for may_pass in (True, False):
    goes_on = pool_of_24(may_pass)
    print(
        f"small ones may pass: {str(may_pass):6} the document's chunk goes in",
        f"after {goes_on - 12} steps" if goes_on else "never (in 200 steps)",
    )
print(f"\nYou said {my_guess_document_goes_on_after} steps, if they may pass.")

# %% [markdown]
# Each newcomer takes what the one before gave back, and sixteen blocks are never free at the same time. Who
# stops the queue behind the one that waits can waste much of a step, and everybody is served. (In the last timeline of
# this lesson, steps 15 to 27: one waits for blocks, three wait behind it, and 4 or 5 tokens of a budget of 64 are
# computed.)
#
# ### Now you: three budgets, in order
#
# The lines below are the inside of `plan(running, prefilling, waiting, tokens, seats, blocks)`, shuffled. `blocks` is
# the number of free blocks, and `blocks_for(n)` says how many blocks n tokens need. Put the lines in order. If
# something isn't right, the puzzle names a line and asks you a question about it. More than one order is right.

# %% name="puzzle"
from course_lib.checks.lesson_08 import three_budgets

puzzle = three_budgets()
print(puzzle)

# %% [markdown]
# In a running notebook the next cell is the list with two buttons that move the chosen line, and a field in which you
# can type the letters in your order instead (then Enter, Tab to *Check*, Space). Without widgets, write
# `puzzle.put("ACB…")` and `print(puzzle.verdict())`.

# %% name="parsons" tags=["nbval-ignore-output"]
assert len(puzzle.order) == 10
puzzle

# %% [markdown]
# When it's in order, the cell below runs your lines beside the engine: before each step of a busy engine it asks your
# `plan`, and compares.

# %% name="beside"
BODY = puzzle.code.splitlines()


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // 16)


def beside_the_engine(plan) -> None:
    config = EngineConfig(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=96, max_prefill_chunk_size=CHUNK,
                          enable_prefix_caching=False, kv_watermark=0.0)  # fmt: skip
    engine = Engine(FakeRunner(vocab_size=50_000), config)
    for number, (prompt, answer) in enumerate([(9, 40), (400, 3), (30, 9), (200, 3), (60, 3)]):
        engine.add_request(tokens(number, prompt), SamplingParams(max_tokens=answer), request_id="ABCDE"[number])
    same = 0
    while engine.has_unfinished_requests():
        scheduler = engine.scheduler
        queues = [
            [Request(s.request_id, s.known_token_count, s.cached_token_count) for s in queue]
            for queue in (scheduler.running, scheduler.prefilling, scheduler.waiting)
        ]
        planned = plan(*queues, 96, 4, engine.block_manager.num_free)
        engine.step()
        done = {chunk.request: chunk.num_tokens for chunk in engine.trace.steps[-1].chunks}
        same += planned == done
        if planned != done:
            print(f"step {engine.trace.steps[-1].index}: you planned {planned}, the engine did {done}")
    print(f"{same} of {len(engine.trace.steps)} steps as the engine planned them.")


if puzzle.is_solved:
    place = {"CHUNK": CHUNK, "blocks_for": blocks_for}
    exec(
        "def plan(running, prefilling, waiting, tokens, seats, blocks):\n    " + "\n    ".join([*BODY, "return step"]),
        place,
    )
    beside_the_engine(place["plan"])
else:
    print("Not in order yet.", puzzle.verdict())

# %% [markdown]
# The engine's own `schedule()` has the same three parts, and one more. A decode needs a block at every sixteenth
# token, and none may be free. Then the newest request gives its blocks back and starts again later: it's *preempted*.
# And if memory should leave a step empty, the oldest request that holds blocks goes on at the others' expense, so
# that the engine can't stand still:

# %% name="source"
source(Scheduler.schedule, mark=("_schedule_decodes", "_schedule_prefills", "_force_progress"))

# %% [markdown]
# ## A table to predict
#
# Eight cases. Blocks have 16 tokens and are plentiful, decode goes first, the chunk size is 64 where nothing else is
# said.
#
# 1. Budget 64. Prompts of 40, 40 and 40 tokens (A, B, C) arrive together, each wants 3 tokens. Which chunks has the
#    first step?
# 2. Budget 64, chunk size 128, a prompt of 150 tokens. Its chunks?
# 3. Budget 64. A with 70 tokens and B with 200 arrive together. Which chunks has the second step?
# 4. Budget 128, chunk size 128. A runs, and B arrives with 1,000 tokens. In how many steps is B prefilled?
# 5. A prompt of 1,000 tokens in chunks of 256. How many blocks does it hold after each chunk?
# 6. A prompt of 8,192 tokens in chunks of 1,024, alone. After which chunk does its first token appear?
# 7. (Ahead: lesson 09.) A prompt of 12,000 tokens, of which the first 8,000 are in the prefix cache, in chunks of 1,000. How
#    many chunks, and at which position does the first one begin?
# 8. Budget 64, prompts go in whole (`max_prefill_chunk_size=None`), a prompt of 65 tokens. What happens?
#
# > **Predict, then run.**

# %% name="guess-table"
my_guesses = {
    1: {"A": 40},  # the first step: write yours
    2: [128, 22],  # the chunks: write yours
    3: {"A": 6},  # the second step: write yours
    4: 9,  # steps: write yours
    5: [16, 32, 48, 64],  # blocks: write yours
    6: 1,  # the number of the chunk, from 1: write yours
    7: (12, 0),  # chunks, first position: write yours
    8: "waits for ever",  # write yours
}


# %% name="table"
def trace_of(prompts: dict[str, int], max_tokens: int = 3, budget: int = 64, chunk: int = 64, late: str = ""):
    """The steps of these prompts; the one called `late` arrives after the first step."""
    config = EngineConfig(
        max_num_batched_tokens=budget, max_prefill_chunk_size=chunk, max_num_seqs=8, enable_prefix_caching=False
    )
    engine = Engine(FakeRunner(vocab_size=50_000), config)
    for number, (name, prompt) in enumerate(prompts.items()):
        if name == late:
            engine.step()
        engine.add_request(tokens(number, prompt), SamplingParams(max_tokens=max_tokens), request_id=name)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace.steps


def chunks_of(steps, name: str) -> list[int]:
    return [
        chunk.num_tokens for step in steps for chunk in step.chunks if chunk.request == name and chunk.kind == "prefill"
    ]


def in_step(step) -> dict[str, int]:
    return {chunk.request: chunk.num_tokens for chunk in step.chunks}


first = trace_of({"A": 40, "B": 40, "C": 40})
fourth = trace_of({"A": 20, "B": 1000}, budget=128, chunk=128, max_tokens=20, late="B")
truth = {
    1: in_step(first[0]),
    2: chunks_of(trace_of({"A": 150}, chunk=128), "A"),
    3: in_step(trace_of({"A": 70, "B": 200})[1]),
    4: len(chunks_of(fourth, "B")),
    5: [step.blocks_used for step in trace_of({"A": 1000}, budget=256, chunk=256, max_tokens=1)],
    6: [bool(step.tokens) for step in trace_of({"A": 8192}, budget=1024, chunk=1024, max_tokens=1)].index(True) + 1,
}
engine = Engine(FakeRunner(), EngineConfig(max_num_batched_tokens=1000, max_prefill_chunk_size=1000))
for length in (8001, 12_000):
    engine.generate([tokens(0, length)], SamplingParams(max_tokens=1))
warm = [chunk for step in engine.trace.steps for chunk in step.chunks if chunk.request == "r1"]
truth[7] = len(warm), warm[0].start_pos
try:
    Engine(FakeRunner(), EngineConfig(max_num_batched_tokens=64, max_prefill_chunk_size=None)).add_request(tokens(0, 65))
except ValueError as refusal:
    truth[8] = "refused when it's added"
    print(f"8. in the engine's words: {refusal}\n")
for case, answer in truth.items():
    print(f"{case}.  {answer!s:30} you said {my_guesses[case]}")
print("\nAll of case 1:", " | ".join(str(in_step(step)) for step in first))
print("B's chunks in case 4:", chunks_of(fourth, "B"))

# %% [markdown]
# The first case is the one to look at. Step 0 isn't `A: 40` with 24 tokens left over: B begins in A's step. Step 1
# holds A's second token, B's last 16 and all of C. Nobody decided that a step is "for" somebody. In the third case B
# gets 58 because A left 58. And in the fifth the last number is the blocks of 1,000 tokens, not of four chunks.
#
# ## When PREFILLING first isn't best
#
# Back to the beginning of this lesson: what was begun goes first, because it holds memory. It isn't the best order for
# everybody. A document of 640 tokens has just been begun when six short questions arrive. (`fair_share` gives all of them
# even parts of the step, but no smaller than a block.)


# %% name="policies"
def six_questions(policy: str) -> Engine:
    config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=64, max_prefill_chunk_size=64, enable_prefix_caching=False,
                          policy=policy)  # fmt: skip
    engine = Engine(FakeRunner(vocab_size=50_000), config)
    engine.add_request(tokens(0, 640), SamplingParams(max_tokens=4), request_id="document")
    engine.step()
    for number in range(6):
        engine.add_request(tokens(number + 1, 20), SamplingParams(max_tokens=4), request_id=f"question {number}")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


print("steps to the first token   document   questions                   mean")
for policy in ("prefilling_first", "shortest_first", "fair_share"):
    ttft = {name: request.ttft for name, request in six_questions(policy).metrics().requests.items()}
    questions = [round(value) for name, value in ttft.items() if name != "document"]
    print(f"{policy:25}{ttft['document']:10.0f}   {questions!s:28}{sum(ttft.values()) / len(ttft):.1f}")

# %% [markdown]
# With *shortest first* the questions are answered at once, and the document is three steps late. The mean is
# the best of the three, until short questions never stop coming: then the document waits for ever, holding its blocks. (The
# engine's `shortest_first` has ageing against that.) `prefilling_first` is a first version with one virtue: it can be
# said in four words, and it holds no more memory than it must. Lesson 11 lets you try others, and write one.
#
# ## When decode first isn't best
#
# 62 chats run, the budget is 64 tokens. Decode first leaves 2 tokens in each step for a document of 512.
#
# `max_decode_share` caps what decode may take **while prefill waits**. With 0.5, 32 of the chats get their token in one
# step, and the others in the next: those who have gone longest without come first.
#
# > **Predict, then run.** In how many steps is the document prefilled, without a cap and with 0.5? And what does the
# > cap cost the chats?

# %% name="guess-cap"
my_guess_steps_without = 8  # write yours
my_guess_steps_with = 8  # write yours
my_guess_gap_with = 1  # a chat's longest gap in steps, with the cap: write yours


# %% name="cap"
def crowded(share: float):
    config = EngineConfig(num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=64, max_prefill_chunk_size=64,
                          enable_prefix_caching=False, max_decode_share=share)  # fmt: skip
    engine = Engine(FakeRunner(vocab_size=50_000), config)
    for chat in range(62):
        engine.add_request([chat], SamplingParams(max_tokens=300), request_id=f"chat {chat}")
    engine.step()
    engine.add_request(tokens(1, 512), SamplingParams(max_tokens=1), request_id="document")
    while "document" in engine.snapshot():
        engine.step()
    return engine.metrics().requests


print("share   document's first token after   longest gap of a chat (in steps)")
for share in (1.0, 0.75, 0.5, 0.25):
    requests = crowded(share)
    gaps = [request.stall for name, request in requests.items() if name != "document"]
    print(f"{share:5}{requests['document'].ttft:31.0f}{max(gaps):24.0f}")
print(
    f"\nYou said {my_guess_steps_without} steps without a cap, {my_guess_steps_with} with 0.5, and gaps of {my_guess_gap_with}."
)

# %% [markdown]
# From 256 steps to 16, and every chat gets a token in every second step: half its speed, for 16 steps. With 0.25 the
# document is five steps earlier still, and the chats pay with gaps of four. There's no right value here; there is a
# promise that you can choose: *no running request waits more than
# ceil(running / (share × budget)) steps*, with the product rounded down, and at least 1.
#
# ## Less and less a queue
#
# A queue knows one thing, who came first. Count why requests wait in a busy engine; the reasons are in every trace:

# %% name="reasons"
from collections import Counter

config = EngineConfig(num_blocks=36, max_num_seqs=6, max_num_batched_tokens=64, max_prefill_chunk_size=48,
                      enable_prefix_caching=False, max_decode_share=0.03)  # fmt: skip
engine = Engine(FakeRunner(vocab_size=50_000), config)
for number, prompt in enumerate((30, 20, 300, 40, 25, 120, 60, 15, 35)):
    engine.add_request(tokens(number, prompt), SamplingParams(max_tokens=24), request_id=f"R{number}")
while engine.has_unfinished_requests():
    engine.step()
    engine.check_invariants()
waits = Counter(reason for place in range(len(engine.trace.steps)) for reason in engine.trace.reasons_at(place).values())
for reason, count in sorted(waits.items()):
    print(f"{reason:13} {count:3} times")
show(timeline(engine.trace, title="Nine requests, and what each of them waits for", by="step"), alt_text(engine.trace))

# %% [markdown]
# Five reasons, and only `queue` has to do with standing in line. The others name a resource: tokens of this step
# (`token_budget`), seats (`seq_budget`), blocks (`kv_blocks`), the share of decode (`decode_share`). The further a scheduler goes, the less it is a queue and the more a **resource
# allocator**: it has three things to give, everybody needs some of each, and it must see that nobody holds one while
# waiting for ever for another.
#
# ## The rule
#
# > **A step spends tokens, seats and blocks. Whoever was promised tokens comes first, then whoever holds memory, then
# > whoever waits; a chunk is as long as all budgets allow, and never zero.**
#
# Splitting a long prompt made it schedulable. Everything in this lesson is a choice that a whole prompt didn't leave you.
#
# ## Your turn
#
# [Exercise 08](../exercises/08_chunk_scheduling.ipynb): write how long a chunk may be, a scheduler with three budgets, and
# whose turn it is when not all can decode. All three run on the engine's own structures.
#
# ## What production does
#
# - **vLLM** V1, `Scheduler.schedule()` in `vllm/v1/core/sched/scheduler.py`: first the running requests (a
#   half-filled one is among them), then the waiting ones, under `max_num_batched_tokens`, `max_num_seqs` and the free
#   blocks. A running request without blocks preempts another. `--long-prefill-token-threshold`
#   bounds a chunk.
# - **Sarathi-Serve** (Agrawal et al., OSDI 2024) calls decode first with chunks in what is left *stall-free batching*.
# - **SGLang** has `--chunked-prefill-size` and `--schedule-policy`; with `--enable-mixed-chunk` a chunk and decodes
#   share a step.
# - The names of the trouble are older than all of them: starvation, head-of-line blocking, convoy. Any book on operating
#   systems has a chapter on them.
#
# ## Three questions
#
# 1. The token budget is 64 and 64 chats run. A prompt arrives. When is it begun, if `max_decode_share` is 1.0?
#
#    <details><summary>Answer</summary>
#
#    When the first chat ends. Not a token of the budget is left, and with `max_num_seqs` = 64 there's no seat either.
#    The share can give it tokens; it can't give it a seat. Two budgets can bind at the same time.
#
#    </details>
#
# 2. In the first picture, newcomers first: forty requests are half-filled. What happens if the pool has 150 blocks
#    and all of them are held?
#
#    <details><summary>Answer</summary>
#
#    No chunk finds its blocks, nobody decodes, so the step would be empty. The engine's progress rule lets the oldest
#    request that holds blocks go on, and takes the blocks of the newest ones for it. What those had computed is lost,
#    and will be computed again. A scheduler without such a rule stands still for ever, with a full memory.
#
#    </details>
#
# 3. Why is a chunk shrunk to the tokens that are left, but not to the blocks that are free?
#
#    <details><summary>Answer</summary>
#
#    Tokens come back with the next step, whatever happens. Blocks come back only when somebody ends. A chunk that
#    nibbles at the last free blocks leaves none for those who decode, and they are the ones who will end. (In an
#    emergency, when the step would be empty, our engine does shrink it.)
#
#    </details>
#
# **Lesson 09** makes the work smaller before anybody schedules it: what another prompt has computed is computed once.

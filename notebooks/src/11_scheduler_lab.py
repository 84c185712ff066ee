# %% [markdown]
# # 11 · The scheduler lab
#
# **After this lesson you can**
#
# - turn every dial of the scheduler, and predict who gains and who pays;
# - say why a chunk costs next to nothing up to a certain size, and read that size off a roofline;
# - tell from a workload whether chunk size will matter at all;
# - write a scheduling policy in a dozen lines, and find out whom it starves.
#
# **Time** 45 minutes · **You need** lessons 08 to 10 · **Adds to the engine** the simulator, the lab, and a policy of
# your own.

# %% name="map"
from course_lib.lab import house

house("policies", "lab")

# %% [markdown]
# ## A GPU that you don't have
#
# The scheduler doesn't know what computes its steps. So give it something that computes nothing and only says how
# long the step *would* have taken: Llama-3-8B on an H100, say. Scheduler, block manager, queues and trace are the real
# ones, and an hour of traffic runs in a minute. That is the **simulator**, and the lab below runs it again each time you
# move a dial. (Without a kernel you see one line of it here; the pictures further down are saved.)

# %% name="lab" tags=["nbval-ignore-output"]
from course_lib.lab import compare, compare_alt, lab, show, show_figure, source

the_lab = lab(running=128, chunk=None)
assert the_lab is not None
the_lab

# %% [markdown]
# 128 streams are decoding, and a prompt of 8,192 tokens arrives. Press *play*, or drag along the timeline. Then try the
# buttons in the lab: each is an experiment, and each has a sentence that says what to look for. Guess before you press.

# %% name="presets"
from course_lib.lab.scheduler_lab import PRESETS, Settings

for _, label, idea, _ in PRESETS:
    print(f"{label:16} {idea}")

# %% [markdown]
# The lab's settings are also a class, so that an experiment can be written down. Here are the first two presets,
# on one axis:

# %% name="stall-and-chunks"
whole = Settings(running=128, chunk=None).run()
chunks = Settings(running=128, chunk=512).run()
titles = ("whole prompt", "chunks of 512")
show(compare(whole, chunks, titles=titles), compare_alt(whole, chunks, titles=titles))

# %% [markdown]
# ## How small?
#
# Lesson 00 showed on your own machine that chunks of 16 are too small. There a step is expensive, and few people are
# there. Now for an H100 with 128 streams.
#
# > **Predict, then run.** All eight runs compute the same tokens. With which chunk size is *everybody* done first, the
# > streams and the long one: the whole prompt, 4096, 2048, 1024, 512, 256, 128 or 64?

# %% name="guess-fastest"
my_guess_fastest = "whole"  # or a number: write yours

# %% name="sweep"
from course_lib.metrics import of_requests


def readouts(trace):
    """The longest stall of all but the long one, its TTFT, the newcomers' mean TTFT, the end of the run; in ms."""
    requests = of_requests(trace)
    long = requests.pop("long")
    late = [request.ttft for name, request in requests.items() if name.startswith("new")]
    stall = max(request.stall for request in requests.values())
    return [1e3 * seconds for seconds in (stall, long.ttft, sum(late) / max(1, len(late)), trace.steps[-1].end)]


SIZES = (None, 4096, 2048, 1024, 512, 256, 128, 64)
numbers = {size: readouts(Settings(running=128, chunk=size, budget=8192 + 128).run()) for size in SIZES}

print("chunk size   longest stall   TTFT of long   all done after")
for size, (stall, ttft, _, end) in numbers.items():
    print(f"{size or 'whole':>10}{stall:13.1f} ms{ttft:12.0f} ms{end:14.0f} ms")
fastest = min(SIZES, key=lambda size: numbers[size][-1])
print(f"\nEverybody is done first with {fastest or 'whole'}. You said {my_guess_fastest}.")

# %% name="draw-sweep"
from matplotlib import pyplot

sizes = [size or 8192 for size in SIZES]
stalls, ttfts, *_ = zip(*numbers.values())
figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
axes.loglog(sizes, stalls, "o-", color="#d55e00", label="longest stall of the streams")
axes.loglog(sizes, ttfts, "s--", color="#0072b2", label="TTFT of the long prompt")
axes.set_xticks(sizes, ["whole", *map(str, SIZES[1:])])
axes.minorticks_off()
axes.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1000"])
axes.set_xlabel("chunk size, tokens")
axes.set_ylabel("milliseconds")
axes.legend()
words = ", ".join(f"{size or 'whole'}: {a:.0f} and {b:.0f} ms" for size, a, b in zip(SIZES, stalls, ttfts))
show_figure(figure, f"Longest stall of the streams and TTFT of the long prompt against the chunk size. {words}.")

# %% [markdown]
# Not the whole prompt. From 8,192 down to 128 everybody is done *earlier*, although there are more steps. Below that it
# goes wrong at once: from 128 to 64 the stall has nothing left to fall to, and the long prompt's TTFT nearly doubles. (Lesson 10
# had an even longer TTFT with chunks of 64. The streams here end earlier, and the long prompt has the last steps to itself.)
#
# | | large chunks | small chunks |
# |---|---|---|
# | streams | stand still for as long as a chunk takes | flow |
# | the long prompt | is done soonest | waits for many steps |
# | the chip | uses each reading of the weights for many tokens | reads all weights again for a few tokens |
# | overhead (scheduling, kernel launches, state) | a few times | in every step |
#
# ## Why a chunk can be free
#
# The simulator's clock is a **roofline**: a step takes as long as the longer of two things, reading bytes from memory and
# computing. Here is all of it:

# %% name="roofline"
from course_lib.cost_model import StepWork, pairs_of, step_cost
from course_lib.hardware import find_chip, find_model

source(step_cost, mark=("compute, memory", "longer ="))

# %% [markdown]
# > **Predict, then run.** A step with 128 decodes takes 7.2 ms. Now 128 prompt tokens come along, so the step holds twice
# > as many tokens. How long does it take?

# %% name="guess-step"
my_guess_ms = 14.4  # write yours

# %% name="steps"
model, chip = find_model("llama3-8b"), find_chip("h100")


def step_with(chunk, running=128, context=100, prompt=4096):
    """The cost of a step with `running` decodes and a chunk in the middle of a prompt."""
    end = (prompt + chunk) if chunk else 0
    work = StepWork(running + chunk, running, running * context + pairs_of(chunk, end), running * context + end)
    return step_cost(model, chip, work)


print("prompt tokens      step   bound by   µs per token")
for chunk in (0, 64, 128, 192, 256, 512, 1024, 2048, 4096):
    cost = step_with(chunk)
    print(f"{chunk:13}{1e3 * cost.seconds:7.1f} ms   {cost.bound:8}{1e6 * cost.seconds / (128 + chunk):15.1f}")
print(f"\nWith 128 prompt tokens: {1e3 * step_with(128).seconds:.1f} ms. You said {my_guess_ms}.")

# %% [markdown]
# A decode step reads 15 GB of weights to compute 128 tokens, and the chip's arithmetic is idle most of that time.
# Prompt tokens that come along use the weights that are being read anyway. So the first few hundred tokens of a step
# cost next to nothing, until the arithmetic is busy (`compute`); from there on, each costs its share.
#
# That is why 128 was fastest above. With a whole prompt, the streams' steps are as idle as before, and the prompt's step comes
# on top. In small chunks the prompt rides in the shadow of the decode steps. Sarathi calls it *piggybacking*. And it is why the right size belongs to a chip and a model, not to a paper. In
# [exercise 11.1](../exercises/11_scheduler_lab.ipynb) you compute it from the cost model.
#
# ## It depends on who comes
#
# Two workloads on the same chip, 150 requests each: short questions only, and the same with a long document as every
# fifth request.
#
# > **Predict, then run.** By what factor does the P99 inter-token latency fall from whole prompts to chunks of 256, with
# > short questions only, and with documents among them?

# %% name="guess-workloads"
my_guess_short = 2.0  # P99 ITL whole / chunks of 256: write yours
my_guess_documents = 2.0  # write yours

# %% name="workloads"
from course_lib import EngineConfig
from course_lib.metrics import metrics as metrics_of
from course_lib.workloads import chat, long_documents, simulate

sizes = {"prompt_tokens": (16, 128), "output_tokens": (16, 128)}
WORKLOADS = {
    "short questions": chat(20, 150, seed=1, **sizes),
    "with documents": long_documents(20, 150, seed=1, every=5, **sizes),
}
p99 = {}
print("workload          chunk size   median TTFT    P99 TTFT    median ITL     P99 ITL   tokens/s")
for name, requests in WORKLOADS.items():
    for size in (None, 1024, 256, 64):
        config = EngineConfig(
            num_blocks=20_000, max_num_seqs=128, max_num_batched_tokens=16_384,
            max_prefill_chunk_size=size, enable_prefix_caching=False,
        )  # fmt: skip
        m = metrics_of(simulate(config, requests))
        p99[name, size] = m.itl.p99
        values = (m.ttft.p50, m.ttft.p99, m.itl.p50, m.itl.p99)
        row = "".join(f"{1e3 * value:{width}.1f} ms" for value, width in zip(values, (11, 9, 11, 9)))
        print(f"{name:18}{size or 'whole':>10}{row}{m.output_tokens_per_second:11,.0f}")

factors = {name: p99[name, None] / p99[name, 256] for name in WORKLOADS}
print(f"\nShort questions: {factors['short questions']:.1f} times. You said {my_guess_short}.")
print(f"With documents: {factors['with documents']:.1f} times. You said {my_guess_documents}.")

# %% [markdown]
# If prompts are short, a chunk size is a limit that nobody reaches; only one that is absurdly small does anything, and
# then it hurts. If long prompts are frequent, it decides what the service feels like. So before you tune, look at your
# traffic; and while you tune, look at all of these numbers together: the long prompts' **TTFT**, the others' **ITL**, at
# the **P90 and P99**, the **throughput**, and how busy the chip is. Each of them alone has a setting that makes it perfect
# and everything else bad.
#
# ## Who goes first
#
# The second dial of a scheduler is an order. When two prompts could use the budget, who gets it? Sixteen streams are
# running, a prompt of 4,096 tokens comes, and behind it 32 short ones of 128 tokens, one a step. The budget is 256.
#
# > **Predict, then run.** First come, first served (`prefilling_first`) gives the newcomers a mean TTFT of 84 ms. What
# > does `shortest_first` give them, and by what factor does the long one's TTFT grow?

# %% name="guess-policies"
my_guess_newcomers_ms = 60  # write yours
my_guess_long_factor = 4.0  # write yours

# %% name="policies"
NAMES = ("prefilling_first", "waiting_first", "shortest_first", "fair_share")
settings = {"running": 16, "newcomers": 32, "budget": 256, "chunk": 256, "prompt": 4096}
behind = {name: Settings(**settings, policy=name).run() for name in NAMES}
rows = {name: readouts(trace) for name, trace in behind.items()}
print("policy             TTFT of newcomers   TTFT of long   longest stall")
for name, (stall, long, late, _) in rows.items():
    print(f"{name:18}{late:15.1f} ms{long:12.0f} ms{stall:13.1f} ms")
grew = rows["shortest_first"][1] / rows["prefilling_first"][1]
print(f"\nThe newcomers' mean with shortest_first: {rows['shortest_first'][2]:.1f} ms. You said {my_guess_newcomers_ms} ms.")
print(f"The long one's TTFT: {grew:.1f} times. You said {my_guess_long_factor}.")

# %% name="draw-policies"
titles = ("prefilling_first", "shortest_first")
pair = (behind["prefilling_first"], behind["shortest_first"])
show(compare(*pair, titles=titles), compare_alt(*pair, titles=titles))

# %% [markdown]
# Thirty-two people wait a ninth of the time, one waits twice as long. Nothing was computed faster: an order only
# *moves* waiting from some to others. Shortest first moves it to those who wait long anyway, which is why the mean looks so
# good, and it has a famous flaw: while short requests keep coming, the long one never gets a turn. It **starves**. (`shortest_first`
# of this course has a remedy built in, which you write yourself in exercise 11.2.)
#
# All five policies that come with the engine are in one file, each a few lines, each with its promise:

# %% name="policy-source"
from IPython.display import display

from course_lib.policies import PrefillingFirst, WaitingFirst

display(source(PrefillingFirst), source(WaitingFirst))

# %% [markdown]
# ## The arena
#
# A policy is an object with an `order` method. It gets the half-filled requests, the waiting ones and the number of the
# step, and returns them in another order. Here is an idea that isn't stupid: people who have just sent something look at
# their screens; whoever has waited for ten seconds has left. So serve the newest first.

# %% name="newest"
from course_lib.policies import Policy


class NewestFirst(Policy):
    """Whoever came last is served first."""

    name = "newest_first"

    def order(self, prefilling, waiting, step):
        return sorted([*prefilling, *waiting], key=lambda s: s.arrival, reverse=True)


# %% [markdown]
# The **arena** runs it on four workloads, the same for everybody: a rush of short chats with documents among them, bursts of
# retrieval, agents with common instructions in a small pool, and traffic shaped like a public trace. A round's points are the
# percentage of requests that had their first token within 0.5 s and no gap above 0.1 s. If somebody **starved** (no chunk for
# four seconds, while twenty or more who came later began to get their answers), the round counts half.
#
# > **Predict, then run.** `NewestFirst` in the rush: what percentage of the requests meets both targets? (First come, first
# > served reaches 25 %.) And does anybody starve?

# %% name="guess-arena"
my_guess_met = 40  # per cent: write yours
my_guess_starved = False  # write yours

# %% name="arena"
from course_lib.arena import arena

result = arena(NewestFirst(), save=False)  # save=True, the default, puts it on your leaderboard
rush = result.scores["rush"]
print(f"{100 * rush.attainment:.0f} % met both targets. You said {my_guess_met} %.")
print(f"{len(rush.starved)} starved. You said {'somebody' if my_guess_starved else 'nobody'}.\n")
print(result)

# %% [markdown]
# 94 per cent, nearly four times as many as first come, first served. Whoever looks at goodput alone would ship it. Then look
# at the one whom it served worst:

# %% name="worst"
result.worst("rush")

# %% [markdown]
# That request wasn't long: 499 tokens. It got a chunk, and then there was always somebody newer, for eight seconds. It holds its
# blocks all the while. Goodput doesn't see it, since it is lost after half a second anyway, and the median TTFT doesn't see it either. That's why
# the arena counts who got nothing, and shows fairness (Jain's index of the slowdowns: 1 if all are slowed down alike).

# %% name="bars"
result.bars()

# %% [markdown]
# No policy wins everywhere: the best of one round is the last in another. And the referee is strict. A policy may look, and
# return; it can't change a request, nor take more than the step has, nor know how long an answer will be:

# %% name="foul"
class Oracle(Policy):
    name = "oracle"

    def order(self, prefilling, waiting, step):
        return sorted([*prefilling, *waiting], key=lambda s: s.max_new_tokens)


print(arena(Oracle(), save=False))

# %% [markdown]
# Write one that gets more points than all of these. `s.remaining_token_count`, `s.arrival_step`, `s.last_step`, `s.status` and
# the prompt's tokens are what you can look at. `from course_lib.arena import leaderboard; print(leaderboard())` shows what you
# have tried.
#
# ## The rule
#
# > **A chunk is free until the arithmetic is busy, and an order only moves waiting from one to another. So know your chip, know
# > your traffic, and name the one who pays.**
#
# ## Your turn
#
# [Exercise 11](../exercises/11_scheduler_lab.ipynb): compute the chunk size for a target, and write a policy under which
# nobody starves.
#
# ## What production does
#
# - vLLM has two policies, `--scheduling-policy fcfs` and `priority`, and lets you bring a scheduler class of your own
#   (`--scheduler-cls`). SGLang has more, in `python/sglang/srt/managers/schedule_policy.py`; `--schedule-policy lpm` takes the
#   longest prefix match first, so that requests which share a prefix meet in the cache, and falls back to first come when more
#   than 128 requests wait.
# - Choosing the token budget from a latency target is what Sarathi-Serve does (Agrawal et al., OSDI 2024): it profiles the
#   chip, and takes the largest budget whose step is within the target for the time between tokens.
# - Fairness between users, counted in tokens: *Fairness in Serving Large Language Models* (Sheng et al., OSDI 2024).
# - A simulator in place of a cluster: *Vidur* (Agrawal et al., MLSys 2024) predicts step times from profiles, and searches
#   settings in hours of CPU time.
#
# ## Three questions
#
# 1. The same model runs on a chip with twice the bandwidth and the same arithmetic. Does the best chunk size grow or shrink?
#
#    <details><summary>Answer</summary>
#
#    It shrinks. The weights are read in half the time, so the shadow in which prompt tokens ride along is half as long: the
#    arithmetic is busy at fewer tokens. You can try it in the lab: an H200 has an H100's arithmetic and more bandwidth.
#
#    </details>
#
# 2. A policy improves the mean TTFT by half, and no request is computed any faster. Where did the time go?
#
#    <details><summary>Answer</summary>
#
#    To a few who wait much longer: many short waits were exchanged for a few long ones. The mean counts requests, not the
#    seconds that each of them can bear.
#
#    </details>
#
# 3. Your arena result says that nobody starved, and a user of yours complains that long documents are slow since your
#    policy was switched on. Is there a contradiction?
#
#    <details><summary>Answer</summary>
#
#    No. Starving is getting nothing. Fair share gives a document a small share in every step: it never starves, and it is as
#    late as under a policy that made it wait. Look at the slowdown of the documents, not only at whether they moved.
#
#    </details>
#
# **Lesson 12** leaves the simulator, and measures what each part of the engine is worth. `make bench` does so on your
# machine.

# %% [markdown]
# # 12 · Measure it
#
# **After this lesson you can**
#
# - say what each step of this course improves, by how much, and what it makes worse;
# - name, for a given traffic, the step that does nothing, and show why from a measurement;
# - measure a server so that the numbers mean something: the same requests, in turns, from their arrival, tail and all;
# - choose a chunk size from a sweep, and say how far a simulator of the same engine can be trusted.
#
# **Time** 40 minutes · **You need** lessons 05, 08, 09 and 10 · **Adds to the engine** nothing. It has all its rooms. Today
# you find out what they were worth, from the record that the engine keeps of every step.

# %% name="map"
from course_lib.lab import house

house("trace")

# %% [markdown]
# ## The ladder
#
# Lesson 01 began with a loop that knew nothing. Every lesson since has added one idea. Here they are as a ladder, each rung the one before
# and **one** thing more:

# %% name="ladder"
import json
from statistics import median

from course_lib.bench import machine
from course_lib.bench.ladder_measures import COMPARED, value_at, values_of

saved = json.loads((machine.RESULTS / "ladder.json").read_text(encoding="utf-8"))
for number, rung in enumerate(saved["rungs"], start=1):
    print(f"{number} {rung['name']:20} {rung['adds']}")
print(f"\nThe pool of rungs 3 to 7: {saved['kv_slots']:,} slots of {saved['kv_bytes_per_slot'] / 1024:.0f} kB, "
      f"{saved['kv_slots'] * saved['kv_bytes_per_slot'] / 2**20:,.0f} MB")

# %% [markdown]
# Rung 3 is one that no lesson announced. The engine doesn't only schedule better, it also has a faster forward pass of its own
# (`model/packed.py`, and the kernels in `model/cpu_kernels.c`). Without that rung, the next idea would get the credit for it.
#
# All rungs serve the same four workloads. The requests come at fixed times, ready or not:

# %% name="workloads"
for name, workload in saved["workloads"].items():
    requests = workload["requests"].values()
    prompts = [request["prompt_tokens"] for request in requests]
    print(f"{name:10} {workload['about']}")
    last, new = max(request["arrival_s"] for request in requests), sum(request["new_tokens"] for request in requests)
    print(f"{'':10} {len(prompts)} requests within {last:.1f} s, prompts of {min(prompts)} to {max(prompts):,} tokens, "
          f"{new} tokens to generate\n")

# %% [markdown]
# Seven engines, four workloads, several rounds: minutes of work for your machine. So this lesson reads what such a run left in
# [bench/results/ladder.json](../bench/results/ladder.json), and you measure a part of it yourself further down.
#
# ## Everything gets better, step by step?
#
# Take the workload of lesson 00: a few chats stream, and a long document arrives. From rung 3 to rung 4 the engine stops serving
# people one after another, and computes all of them in each step.
#
# > **Predict, then run.** From one request at a time to continuous batching: by what factor do the output tokens per second change? And by
# > what factor the **longest gap** that somebody sees inside an answer? (2 means twice as much, 0.5 half.)

# %% name="guess-batching"
my_guess_rate = 2.0  # write yours
my_guess_gap = 0.5  # write yours
print(f"Noted: tokens per second × {my_guess_rate}, longest gap × {my_guess_gap}.")


# %% name="batching"
def effect(workload, rung, measure):
    """What the rung changes against the one before: ratio (a median), min and max over the rounds, and a verdict."""
    found = saved["workloads"][workload]["effects"]
    return next(each for each in found if each["to"] == rung and each["measure"] == measure)


def medians(workload, measures=("median TTFT", "longest TTFT", "P99 ITL", "longest gap", "output tokens/s")):
    """Medians over the rounds, in seconds; ">": a lower bound, since the run was cut."""
    runs = saved["workloads"][workload]["runs"]
    print(f"{workload:19}" + "".join(f"{measure.removeprefix('output '):>13}" for measure in measures))
    for rung in saved["rungs"]:
        mine = [row for row in runs if row["rung"] == rung["name"]]
        cells = []
        for measure in measures:
            mark = ">" if "TTFT" in measure and any(row["cut"] for row in mine) else ""
            cells.append(f"{mark}{median(value_at(row, COMPARED[measure][0]) for row in mine):.3g}")
        print(f"{rung['name']:19}" + "".join(f"{cell:>13}" for cell in cells))


medians("document")
rate = effect("document", "continuous batching", "output tokens/s")
gap = effect("document", "continuous batching", "longest gap")
print(f"\nTokens per second: × {rate['ratio']:.2f}. You said {my_guess_rate}.")
print(f"Longest gap: × {gap['ratio']:.1f} ({gap['verdict']} in every round). You said {my_guess_gap}.")
assert rate["verdict"] == "better" and gap["verdict"] == "worse"

# %% [markdown]
# The best idea of serving makes the worst thing worse. Think about why the rung before it is so smooth: whoever has their turn has the
# whole machine, and nobody can get in between. They have paid before: look at the first two columns. A benchmark that shows
# only the times *between* tokens would tell you to serve people one by one.
#
# Here is the whole workload in one picture. Read a column from above, and ask at each step: left, right, or not at all?

# %% name="draw-document"
from course_lib.bench.ladder_measures import figure
from course_lib.lab import show_figure


def draw(workload):
    """The picture of one workload, with its medians in words."""
    result = saved["workloads"][workload]
    words = []
    for measure in ("median TTFT", "longest gap", "output tokens/s"):
        values = {rung["name"]: values_of(result["runs"], rung["name"], COMPARED[measure][0]) for rung in saved["rungs"]}
        words.append(f"{measure}: " + ", ".join(f"{name} {median(each):.2g}" for name, each in values.items() if each))
    drawn = figure(result, f"{workload}: {result['about']}")
    return show_figure(drawn, f"The rungs by three measures, and the KV slots that they reserve. {'. '.join(words)}.")


draw("document")

# %% [markdown]
# (An open mark is a lower bound. The naive loop was stopped after some seconds, and whoever was still waiting then counts with the
# time that they had waited. Leaving them out would have made the worst rung look good.)
#
# The last step takes back most of what batching did to the gap. So what does it cost? The document is now computed in pieces, beside the others.
#
# > **Predict, then run.** The document's own time to first token, chunked against whole: by what factor does it change?

# %% name="guess-document"
my_guess_document = 1.5  # write yours
print(f"Noted: the document waits {my_guess_document} times as long.")

# %% name="document"
for measure in ("longest gap", "P99 ITL", "document's TTFT", "output tokens/s"):
    each = effect("document", "chunked prefill", measure)
    print(f"{measure:18} × {each['ratio']:.2f}   ({each['min']:.2f} to {each['max']:.2f} in single rounds)   "
          f"{each['verdict']}")
own = effect("document", "chunked prefill", "document's TTFT")
print(f"\nThe document's first token: × {own['ratio']:.2f}. You said {my_guess_document}.")
assert effect("document", "chunked prefill", "longest gap")["verdict"] == "better"

# %% [markdown]
# Chunked prefill doesn't make a long prompt faster, and isn't meant to. It has to share its steps with the others' decodes, and each
# chunk reads the keys and values of all chunks before it again. What that costs depends on the machine: on a CPU, 256 tokens keep the arithmetic
# busy, and a larger piece would not be computed any better. (On the chips at the end of this lesson it costs more.) What it buys is that the others don't
# stand still.
#
# ## A rung that does nothing
#
# Now short chats. No two begin alike, and none is long.
#
# > **Predict, then run.** Which rung improves the **P99 ITL** most for short chats? And which of the last two, prefix cache and
# > chunked prefill, changes anything there?

# %% name="guess-chat"
my_guess_best = "chunked prefill"  # the name of a rung: write yours
my_guess_useful = "both"  # "prefix cache", "chunked prefill", "both" or "neither": write yours
print(f"Noted: {my_guess_best} improves it most; of the last two, {my_guess_useful} changes something.")

# %% name="chat"
medians("chat")
effects = saved["workloads"]["chat"]["effects"]
best = min((each for each in effects if each["measure"] == "P99 ITL"), key=lambda each: each["ratio"])
print(f"\nThe P99 ITL improves most with: {best['to']} (× {best['ratio']:.2f}). You said {my_guess_best}.\n")
for rung in ("prefix cache", "chunked prefill"):
    clear = [f"{each['measure']} × {each['ratio']:.2f}" for each in effects
             if each["to"] == rung and each["verdict"] in ("better", "worse")]  # fmt: skip
    print(f"{rung}: {', '.join(clear) or 'nothing that all rounds agree on'}")
print(f"You said {my_guess_useful}.")

# %% [markdown]
# "No change" is a result, and it should have a cause that can be measured too. Here it is:

# %% name="why-nothing"
chats = saved["workloads"]["chat"]
hits = {row["prefix_hit_tokens"] for row in chats["runs"] if row["rung"] == "prefix cache"}
longest = max(request["prompt_tokens"] for request in chats["requests"].values())
chunk = saved["rungs"][-1]["settings"]["max_prefill_chunk_size"]
print(f"prompt tokens found in the prefix cache: {hits}")
print(f"longest prompt: {longest} tokens; a chunk: {chunk} tokens, so no prompt is ever cut")
assert hits == {0} and longest < chunk

# %% [markdown]
# Where small differences remain all the same, they come from *when* requests meet in a step, and next time they will be others. That is what
# rounds are for: a change that one round shows and another doesn't is not a change. (The last rung also has a smaller budget of tokens for a
# step. If several short prompts come at the same moment, that can spread them over two steps, though none is cut.)
#
# The same rung, other traffic. Questions about shared documents:

# %% name="rag"
medians("rag")
for measure in ("median TTFT", "longest gap", "output tokens/s"):
    each = effect("rag", "prefix cache", measure)
    print(f"prefix cache, {measure}: × {each['ratio']:.2f}, {each['verdict']}")
hits = median(row["prefix_hit_tokens"] for row in saved["workloads"]["rag"]["runs"] if row["rung"] == "prefix cache")
asked = sum(request["prompt_tokens"] for request in saved["workloads"]["rag"]["requests"].values())
print(f"\n{hits:,.0f} of {asked:,} prompt tokens were found and not computed")
assert effect("rag", "prefix cache", "median TTFT")["verdict"] == "better"

# %% [markdown]
# Compute less, and everybody's first token is there sooner. Now look one row further down, at chunked prefill under the same questions. Two
# of its columns disagree:

# %% name="which-tail"
tails = {measure: effect("rag", "chunked prefill", measure) for measure in ("longest gap", "P99 ITL")}
for measure, each in tails.items():
    print(f"{measure:12} × {each['ratio']:.2f}   {each['verdict']}")
gaps = sum(request["new_tokens"] - 1 for request in saved["workloads"]["rag"]["requests"].values())
print(f"\ngaps between two tokens in a run: {gaps}. The P99 lies near the largest but one.")
assert tails["longest gap"]["verdict"] == "better" and tails["P99 ITL"]["verdict"] == "worse"

# %% [markdown]
# Nobody lies. A document in one piece makes **one** long gap for whoever is streaming, and of so few gaps one in a hundred is hardly one: the
# P99 looks past it. Cut into two chunks it makes **two** gaps of about half the length, and now the P99 sees one of them. A percentile counts how many gaps are
# bad, the maximum how bad they are. With few gaps, report both, and say how many there were.

# %% [markdown]
# ## What memory buys
#
# Paging computes nothing faster. Its column is another one: how many slots are reserved, how many of them hold something, and how many
# people fit at once.

# %% name="memory"
print(f"{'chat':20}{'reserved':>10}{'used':>8}{'waste':>8}{'requests at once':>18}{'longest TTFT':>15}")
for rung in saved["rungs"][1:]:
    mine = [row for row in chats["runs"] if row["rung"] == rung["name"]]
    keys = ("reserved_peak", "used_peak", "waste", "requests_peak")
    reserved, used, waste, at_once = (median(row["kv_slots"][key] for row in mine) for key in keys)
    wait = median(row["ttft_s"]["max"] for row in mine)
    print(f"{rung['name']:20}{reserved:10,.0f}{used:8,.0f}{waste:8.0%}{at_once:18.0f}{wait:13.2f} s")
price = effect("chat", "paged attention", "median ITL")
print(f"\nWhat paging changes in the median ITL of the chats: × {price['ratio']:.2f}, {price['verdict']}")

# %% [markdown]
# A reservation for the longest request that is allowed fills the pool with nothing. With blocks of 16 the same pool has room for everybody
# who comes, and the one who came last waits less. (More people in a step make it longer, but not by much: a step of eight reads the
# same weights as a step of four. The last line says what of it could be measured.)
#
# ## How to fool yourself
#
# Three ways, all of them common. **Start the clock when the server is ready for a request**, not when the request came. Here is rung 3
# once more, in virtual time: a step takes 30 ms, whoever is in it.

# %% name="two-clocks"
import random

from course_lib.bench import ladder
from course_lib.runners import FakeRunner

rng = random.Random(0)
prompts = ladder.workloads([rng.randrange(32_000) for _ in range(2_000)])["chat"].requests
trace = ladder.run(FakeRunner(step_seconds=0.03), ladder.rungs()[2], prompts)

print("request    TTFT from its arrival    from its first step")
begins = {}
for step in trace.steps:
    for name in step.admitted:
        begins[name] = step.start
for name, times in trace.token_times().items():
    print(f"{name:10}{times[0] - trace.requests[name].arrival_time:17.2f} s{times[0] - begins[name]:21.2f} s")

# %% [markdown]
# The right column is a machine that never keeps anybody waiting. The same happens to a load generator that sends the next request only
# when the last one is answered (a *closed loop*): it waits politely whenever the server is slow, and asks nothing while asking
# would hurt. It has a name, *coordinated omission*. In this lesson requests come when they come: an *open loop*.
#
# **Measure each thing once.** Between two rounds on the same machine, how far apart can the ratio of the same two rungs be?

# %% name="single-rounds"
print("the pairs of rungs whose ratio differed most between the rounds")
pairs = [(name, each) for name, workload in saved["workloads"].items() for each in workload["effects"] if not each["bound"]]
for name, each in sorted(pairs, key=lambda pair: -pair[1]["max"] / pair[1]["min"])[:5]:
    print(f"{name:10}{each['to']:21}{each['measure']:18} × {each['min']:.2f} in one round, × {each['max']:.2f} in another")
on = saved["machine"]
print(f"\nmeasured in {saved['rounds']} rounds, in turns, on: {on['processor']}, {on['cores']} cores, "
      f"{saved['threads']} threads, torch {on['versions']['torch']}")

# %% [markdown]
# So: every rung once a round, in turns, so that a slow minute of the machine meets all of them; compare within a round; report the
# median and the range; and say which machine it was.
#
# **Compare different work.** If one of the seven gave other tokens, it did something else, perhaps less. The benchmark compares all
# answers with those of the plain loop:

# %% name="same-tokens"
from course_lib.bench.ladder_measures import different_text

for name, workload in saved["workloads"].items():
    print(f"{name:10} {different_text(workload)}")

# %% [markdown]
# ## Your machine
#
# Two rungs, one workload, once each (twice would be better; now you know why). Your times will be others. Are the ratios?

# %% name="measure" tags=["nbval-ignore-output"]
from course_lib import ModelRunner
from course_lib.demo import document_text

runner = ModelRunner("smollm2")
workload = ladder.workloads(runner.tokenizer.encode(document_text()))["document"]
live = ladder.measure(runner, ladder.rungs()[-2:], workload, rounds=1)
print(f"\n{'':18}{'here':>10}{'saved':>10}")
for each in live["effects"]:
    if each["measure"] in ("longest gap", "document's TTFT", "output tokens/s"):
        before = effect("document", "chunked prefill", each["measure"])
        print(f"{each['measure']:18}{each['ratio']:8.2f} ×{before['ratio']:8.2f} ×")
print(different_text(live))
assert not live["different_tokens"] or max(each["logit_gap"] for each in live["different_tokens"]) < 1e-3

# %% [markdown]
# The rest is one command: `python -m course_lib bench ladder --rounds 3` measures everything, some twelve minutes long, and writes the
# file that this lesson reads: run it again then, and it shows your machine. With `--workloads chat` it measures a part, into a file of its own.
#
# ## The sweep
#
# The last rung has a dial. The demo of lesson 00 once more, under eight chunk sizes, in turns. In brackets: what the **simulator** says. Its cost
# model was fitted to this machine a minute before, from other steps than these (`course_lib/calibrate.py`).

# %% name="sweep"
from course_lib.bench import chunks

swept = json.loads((machine.RESULTS / "chunks.json").read_text(encoding="utf-8"))
print("chunk" + "".join(f"{title:>16}" for title in ("document's TTFT", "others' P99 ITL", "longest gap", "tokens/s")))
for row in swept["runs"]:
    cells = []
    for key, form in chunks.COLUMNS.values():
        cells.append(f"{median(run[key] for run in row['measured']):{form}} [{row['predicted'][key]:{form}}]")
    print(f"{row['max_prefill_chunk_size'] or 'whole':>5}" + "".join(f"{cell:>16}" for cell in cells))
print(f"\n{chunks.errors_text(swept['errors'])}")

# %% name="draw-sweep"
words = ", ".join(
    f"{row['max_prefill_chunk_size'] or 'whole'}: {median(run[chunks.GAP] for run in row['measured']):.2f} and "
    f"{median(run[chunks.TTFT] for run in row['measured']):.2f} s"
    for row in swept["runs"]
)
show_figure(chunks.figure(swept["runs"], swept["document"]), f"Longest gap and document's TTFT by chunk size. {words}.")

# %% [markdown]
# The gap grows with the chunk; the document's own wait falls, and soon hardly. In between is a broad region where both are good, and
# throughput doesn't care. Left of it, every chunk pays the fixed price of a step for little work.
#
# The simulator has never seen a chunk of this document. It knows five prices: of a step, a row, a token, a pair of attention, a
# token of context. That they suffice to say what the engine will do is what lets you believe it for machines that you don't have, as far as its
# numbers about *them* are right. The load of the article that this course grew out of, on such machines:

# %% name="at-scale"
for each in swept["at_scale"]:
    print(f"{each['model']} on {each['chip']}: {each['running']} streams, then a prompt of {each['prompt_tokens']:,} tokens")
    print("chunk   long one's TTFT   P99 ITL of the others   all tokens/s")
    for row in each["sizes"]:
        if row["max_prefill_chunk_size"] in (32, 128, 512, 2048, None):
            size, ttft, itl = row["max_prefill_chunk_size"] or "whole", 1e3 * row["long_ttft_s"], 1e3 * row["itl_p99_s"]
            print(f"{size:>5}{ttft:15.0f} ms{itl:21.1f} ms{row['tokens_per_second']:15,.0f}")
    print()

# %% [markdown]
# Each chip has its own bend, where smaller chunks stop helping the others and only hurt the long one. Finding it from a target is
# [exercise 11.1](../exercises/11_scheduler_lab.ipynb).
#
# ## The rule
#
# > **A number belongs to a rung, a workload and a machine: measure in turns, on the same requests, from their arrival, report the tail beside
# > the rate, and say what did not get better.**
#
# ## What production does
#
# - vLLM has a command for each question ([its benchmark pages](https://docs.vllm.ai/en/latest/benchmarking/cli/)): `vllm bench latency` for one batch, `vllm bench throughput` for a
#   heap of prompts that are all there, `vllm bench serve` for requests over time: `--request-rate` and `--burstiness` make an open loop,
#   `--max-concurrency` closes it. The rate is infinite if you don't set it: then all requests arrive at once, and TTFT is mostly queueing.
# - `vllm bench sweep` starts a server per setting and measures each ([parameter sweeps](https://docs.vllm.ai/en/latest/benchmarking/sweeps/)): the sweep above, for flags. The
#   datasets of `vllm bench serve` include one with shared beginnings (`prefix_repetition`): as you saw, a prefix cache can't be measured without.
# - For servers in production vLLM's documentation recommends GuideLLM. `python -m course_lib bench --url …` measures any server with lesson 00's workload (lesson 13).
# - MLPerf Inference, the industry's benchmark, has a *server* scenario: requests come as a Poisson process, and what counts is the highest rate at which the
#   tail of the latencies stays within a limit. That's goodput, and lesson 11's `capacity.py` searches it.
#
# ## Three questions
#
# 1. At one request a minute, all rungs above the naive one give the same tokens per second. Is the engine useless there? What would you
#    measure instead?
#
#    <details><summary>Answer</summary>
#
#    In an open loop that isn't overloaded, the arrivals set the throughput, not the engine: it can't deliver what nobody asks for. Measure
#    latencies, or raise the rate until they break a target, and compare those rates.
#
#    </details>
#
# 2. A colleague shows you that chunked prefill improves throughput by 3 %: 51.0 tokens per second against 49.5. What do you ask?
#
#    <details><summary>Answer</summary>
#
#    How many rounds, in which order, and what their range was; whether the tokens were the same; and by which mechanism. (There can be one: prompt tokens
#    ride in decode steps whose weights are read anyway. Then it should show where decodes and chunks meet, and vanish where they don't.)
#
#    </details>
#
# 3. The naive loop was cut, and three requests never got a token. Somebody proposes to report the median TTFT of those that did. What is
#    wrong with it?
#
#    <details><summary>Answer</summary>
#
#    The ones left out are the worst. The slower the server, the fewer count, and the better it looks. Their true times aren't known, but a
#    lower bound is: what they had waited when the run was cut.
#
#    </details>
#
# Next: [lesson 13](13_to_production.ipynb), the same engine in the words of vLLM, and where one machine ends.

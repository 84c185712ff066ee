# %% [markdown]
# # 10 · Streaming and monitoring
#
# **After this lesson you can**
#
# - say why a token can't be sent to the user as it comes, and what a stream holds back, and for how long;
# - predict what temperature, top-k, top-p and min-p do to a row of real logits;
# - tell a request that waits from one that is being prefilled, although both show nothing;
# - measure what users feel (TTFT, the gaps, the longest of them), and say which numbers hide a stall.
#
# **Time** 45 minutes · **You need** lessons 06 to 09 · **Adds to the engine** what happens behind the forward pass:
# from logits to a token, from tokens to text, and the record of it all.

# %% name="map"
from course_lib.lab import house

house("sampler", "engine", "trace")

# %% [markdown]
# ## An answer that breaks
#
# The engine of the last lesson gives a token per step and request. The user wants to read. So decode each token as it
# comes, and send it. What could be simpler?

# %% name="set-up"
from IPython.display import display

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.lab import alt_text, show, show_figure, source, timeline
from course_lib.lab.pieces import pieces, pieces_alt
from course_lib.runners import FakeRunner

runner = ModelRunner(load_model("smollm2"))
tokenizer = runner.tokenizer


def stream(question, **params):
    """All outputs of one answer, one per token."""
    return list(Engine(runner).stream(demo.chat_prompt(tokenizer, question), SamplingParams(**params)))


# %% [markdown]
# > **Predict, then run.** SmolLM2 is asked: *Send me five emoji of animals, nothing else.* We let it produce 12 tokens.
# > How many animals does the reader see, if each token is decoded and sent by itself?

# %% name="guess-animals"
my_guess_animals = 12  # write yours

# %% name="animals"
animals = stream("Send me five emoji of animals, nothing else.", max_tokens=12)
token_ids = animals[-1].token_ids
sent = "".join(tokenizer.decode([token_id]) for token_id in token_ids)

print(f"each token by itself:  {sent}")
print(f"all tokens together:   {animals[-1].text}")
print(f"\nThe reader sees {sent.count('🐦')} animals. You said {my_guess_animals}.")

# %% [markdown]
# Not one. (And it isn't five birds either: a model this small repeats itself.) A token of this model is a piece of
# **bytes**, and the bird takes four bytes, which are three tokens here. Decoded alone, each piece is no character at
# all, and the decoder writes `�` in its place. What has been sent can't be taken back.
#
# So a stream holds text back until it can no longer change. In this answer, the Chinese characters take two or three
# tokens each:

# %% name="pieces"
outputs = stream("Write the Chinese characters for 'hello'.", max_tokens=20)
alone = [tokenizer.decode([token_id]) for token_id in outputs[-1].token_ids]
row = (outputs[-1].token_ids, alone, [output.new_text for output in outputs])
show(pieces(*row), pieces_alt(*row))

# %% [markdown]
# (The first character is wrong for "hello". We look at how it arrives, not at what it says.)
#
# Look at the space, too: it sits at the *beginning* of most tokens. Some tokenizers drop such a space when they decode
# a token alone, and a careless stream then prints `Goodmorning`. The rule is the same for both: **a token's text
# depends on its neighbours.** In [exercise 10.1](../exercises/10_streaming_and_monitoring.ipynb) you write the stream.
#
# ## The text that must not come
#
# There is a second reason to hold back. A request may name a **stop string**: the answer ends before it, and the user
# must never see it. Here it is `"\n2."`: we want the first item of a list and no second.
#
# > **Predict, then run.** Every line end might be the beginning of `"\n2."`. The answer has a paragraph break (one
# > token, two line ends) before its `1.`, and another before its `2.`. With how many tokens of the whole answer does the
# > user get *less* than the token says?

# %% name="guess-held"
my_guess_tokens_held = 3  # write yours

# %% name="stop"
outputs = stream("List three fruits.", max_tokens=40, stop="\n2.")
alone = [tokenizer.decode([token_id]) for token_id in outputs[-1].token_ids]
less = [number for number, output in enumerate(outputs) if len(output.new_text) < len(alone[number])]
print(f"With {len(less)} of {len(outputs)} tokens. You said {my_guess_tokens_held}.")
print(f"finish_reason={outputs[-1].finish_reason!r}, and the text ends in {outputs[-1].text[-20:]!r}")

near = [number for number in range(len(outputs)) if any(0 <= number - place < 3 for place in less)]
for title, part in (("the first break", near[:3]), ("the second break", near[3:])):
    print(f"\nTokens {part[0] + 1} to {part[-1] + 1}, around {title}:")
    row = ([outputs[-1].token_ids[n] for n in part], [alone[n] for n in part], [outputs[n].new_text for n in part])
    display(show(pieces(*row), pieces_alt(*row)))

# %% [markdown]
# After the first break the stream kept one line end back, saw a `1`, and let both go. After the second it kept the
# line end, then the `2`, and when the `.` came it threw the three away. It holds back exactly as much as could still
# become a stop string, here never more than two characters:

# %% name="stop-source"
from course_lib.text import TextStream

source(TextStream._release, mark=("keep =", "text, self._held"))

# %% [markdown]
# ## From a row of numbers to a token
#
# One station before the text, the model gives a row of 49,152 numbers, the **logits**: one per token of its vocabulary.
# Until now we always took the largest. Here is what SmolLM2 thinks of the first word of a story:

# %% name="row"
import torch

question = demo.chat_prompt(tokenizer, "Tell me a story.")
first = Engine(runner).generate([question], SamplingParams(max_tokens=1, logprobs=49_152), progress=False)[0]
row = torch.tensor([first.logprobs[0][token_id] for token_id in range(49_152)])  # logits, up to a constant

for token_id in row.argsort(descending=True)[:6].tolist():
    print(f"{tokenizer.decode([token_id])!r:>10}  {row[token_id].exp():.3f}")

# %% [markdown]
# To draw from this row instead, there are four dials. The **temperature** divides the logits: below 1 the likely ones
# get likelier, above 1 everything comes closer, 0 means the largest. The other three cut the tail off: **top-k** keeps
# the k most likely tokens, **top-p** the smallest set whose probabilities add up to p, **min-p** those that have at
# least that part of the most likely one's probability.
#
# > **Predict, then run.** `top_p=0.9` means: keep the tokens that make up 90 % of the probability. At temperature 1 that
# > are 32 of the 49,152. How many are kept at temperature 2?

# %% name="guess-kept"
my_guess_kept = 64  # write yours

# %% name="kept"
from course_lib.model.sampler import filtered_probabilities
from course_lib.sequence import Sequence


def probabilities(**params):
    """What the engine draws from: probabilities in falling order, 0 where a token was cut off."""
    return filtered_probabilities(row[None], [Sequence("x", [1], SamplingParams(**params))])[0][0]


print("temperature   likeliest    top_k=50   top_p=0.9   min_p=0.1")
for temperature in (0.5, 1.0, 1.5, 2.0):
    likeliest = probabilities(temperature=temperature)[0]
    cuts = ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1})
    counts = [int((probabilities(temperature=temperature, **cut) > 0).sum()) for cut in cuts]
    print(f"{temperature:11}{likeliest:12.3f}" + "".join(f"{count:12,}" for count in counts))
print(f"\nAt temperature 2, top_p=0.9 keeps {counts[1]:,}. You said {my_guess_kept:,}.")

# %% name="draw-row"
from matplotlib import pyplot

figure, axes = pyplot.subplots(figsize=(7.5, 3.4))
for temperature, colour, style in ((0.5, "#0072b2", "-"), (1.0, "#009e73", "--"), (2.0, "#d55e00", "-.")):
    ranked = probabilities(temperature=temperature)
    kept = int((probabilities(temperature=temperature, top_p=0.9) > 0).sum())
    label = f"temperature {temperature}: top-p keeps {kept:,}"
    axes.loglog(range(1, len(ranked) + 1), ranked, style, color=colour, label=label)
    axes.axvline(kept, color=colour, linestyle=":")
axes.set_xlabel("tokens, the most likely first")
axes.set_ylabel("probability")
axes.set_ylim(1e-9, 1)
axes.legend()
show_figure(
    figure,
    "Probability against rank, both logarithmic, for temperatures 0.5, 1 and 2. The hotter, the flatter: "
    "top-p of 0.9 cuts after 5, 32 and about 5,900 tokens.",
)

# %% [markdown]
# A hot row is flat, and nine tenths of a flat row are thousands of tokens, each of which fits about as badly as the
# next. Top-k doesn't look at the row at all. Min-p measures from the top, so it grows with the temperature only a
# little; that is what it was made for. You write the draw itself in exercise 10.2.
#
# ## The same draw, whoever else is there
#
# A random draw needs a random number, and where that comes from is the engine's business. A generator that all requests
# share would give each request numbers that depend on who else was drawn before it, and on how its prompt was cut. The
# engine takes the number from two things that belong to the request alone:

# %% name="uniform"
from course_lib.model.sampler import uniform_of

source(uniform_of)

# %% name="seeds"
params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7)
mates = [demo.chat_prompt(tokenizer, text) for text in ("Name a colour.", "Count to ten.")]
texts = []
for chunk_size, others in ((256, []), (16, []), (16, mates)):
    engine = Engine(runner, EngineConfig(max_prefill_chunk_size=chunk_size))
    outputs = engine.generate([question, *others], params, progress=False)
    texts.append(outputs[0].text)
    same = "the same text" if texts[-1] == texts[0] else "ANOTHER TEXT"
    print(f"chunks of {chunk_size:3}, {len(others)} batch mates: {same}")
assert texts[0]

# %% [markdown]
# Without this, no test of chunked prefill with sampling could exist: you could never tell a bug from bad luck.
#
# ## What the user sees, and what the engine knows
#
# Now step back and look at the whole stream of events. A prompt in four chunks is four steps of work, and the first
# three bring its user **nothing**: only the last row of the last chunk has logits that mean "what comes after this
# prompt". (Lesson 07 is about that.) So there are two kinds of progress. *Inside*, `prefilled_token_count` grows and
# K/V is written. *Outside*, a first token appears, or it doesn't.
#
# Ana streams. Ben and Cleo each send a long prompt, one right after the other. (To make it plain, this engine has at most one
# half-filled prompt at a time.) Here are both sides, step by step:

# %% name="two-sides"
config = EngineConfig(max_num_batched_tokens=256, max_prefill_chunk_size=250, max_num_partial_prefills=1)
engine = Engine(FakeRunner(), config)
engine.add_request([1] * 8, SamplingParams(max_tokens=20), request_id="Ana")
engine.step()
for name in ("Ben", "Cleo"):
    engine.add_request([len(name)] * 1000, SamplingParams(max_tokens=4), request_id=name)

print("      on their screens             inside the engine")
print("step  Ana     Ben     Cleo         Ben                        Cleo")
while engine.scheduler.step < 10:
    step = engine.scheduler.step
    got = {output.request_id for output in engine.step()}
    inside = {name: f"{state.status} {state.prefilled_token_count}" for name, state in engine.snapshot().items()}
    screen = "".join(f"{'a token' if name in got else '-':8}" for name in ("Ana", "Ben", "Cleo"))
    print(f"{step:4}  {screen}     {inside.get('Ben', 'FINISHED'):27}{inside.get('Cleo', '')}")

# %% [markdown]
# For three steps the screens of Ben and Cleo are the same: empty. Ben's request is being computed all the time, Cleo's
# hasn't begun. (In step 4 Cleo has 5 tokens, since that is what is left of the budget: 256 − 1 for Ana − 250 for Ben's last
# chunk. Ben is no longer half-filled then, so her turn has come.) Their **time to first token keeps growing in both cases**, and only the inside view tells waiting
# from prefilling. That matters when you look for a cause. Many requests that *wait* ask for another engine; many that
# *prefill* ask for larger chunks, or for a prefix cache.
#
# The engine writes that view down as it goes, in its **trace**: every chunk, every token, and for everyone who got
# nothing, why. All pictures of this course are drawn from it.

# %% name="trace"
show(timeline(engine.trace, by="step", title="What the trace knows"), alt_text(engine.trace))

# %% name="split"
for name in ("Ben", "Cleo"):
    arrival = engine.trace.requests[name].arrival_time
    begun = next(step.start for step in engine.trace.steps if any(chunk.request == name for chunk in step.chunks))
    first = next(step.end for step in engine.trace.steps if name in step.tokens)
    print(f"{name:5} TTFT {first - arrival:.0f} s = {begun - arrival:.0f} s waiting + {first - begun:.0f} s of prefill")

# %% [markdown]
# (One step of `FakeRunner` takes a second.)
#
# ## Four numbers, and what they hide
#
# | | from | to | one value per |
# |---|---|---|---|
# | **TTFT**, time to first token | arrival | end of the step that sampled the first token | request |
# | **ITL**, inter-token latency | a token | the next token of the same request | gap |
# | **TPOT**, time per output token | first token | last token, divided by the tokens between | request |
# | **stall** | | | the longest gap of a request |
#
# Take the case of this course at full size: 128 streams on an H100 (simulated, so that your numbers are ours), and a
# prompt of 8,192 tokens arrives. Once whole, once in chunks of 512. Each stream gets 200 tokens.
#
# > **Predict, then run.** In the whole run every stream stands still for about 28 of its usual steps. How much larger
# > is the **mean** ITL of the streams in that run than in the chunked one? And in which of the two is the **median** larger?

# %% name="guess-mean"
my_guess_mean_factor = 2.0  # mean ITL, whole against chunks of 512: write yours
my_guess_larger_median = "whole"  # or "chunks": write yours

# %% name="hidden"
from course_lib.metrics import Summary, of_requests
from course_lib.workloads import simulate, stall


def serve(chunk_size):
    """128 streams, then a prompt of 8,192 tokens: metrics of the long one and of a stream, all streams' gaps in ms."""
    config = EngineConfig(
        num_blocks=8192, max_num_seqs=256, max_num_batched_tokens=8192 + 128,
        max_prefill_chunk_size=chunk_size, enable_prefix_caching=False,
    )  # fmt: skip
    requests = stall(128, 8192, arrival=0.3, context=16, output_tokens=200)
    trace = simulate(config, requests, model="llama3-8b", chip="h100")
    requests = of_requests(trace)
    long = requests.pop("long")
    return long, requests["chat0"], [1e3 * gap for request in requests.values() for gap in request.itl]


whole, chunked = serve(None), serve(512)
print("ITL of the streams       mean   median      P90      P99  longest    TPOT of one stream")
for title, (_, one, gaps) in (("whole", whole), ("chunks of 512", chunked)):
    s = Summary.of(gaps)
    values = "".join(f"{value:6.1f} ms" for value in (s.mean, s.p50, s.p90, s.p99, s.max))
    print(f"{title:20}{values}{1e3 * one.tpot:19.1f} ms")
a, b = Summary.of(whole[2]), Summary.of(chunked[2])
print(f"\nThe mean is {a.mean / b.mean:.2f} times as large. You said {my_guess_mean_factor}.")
larger = "whole" if a.p50 > b.p50 else "chunks"
print(f"The median is larger in the run {larger!r}. You said {my_guess_larger_median!r}.")

# %% [markdown]
# Mean, median, P90 and even P99 prefer neither, or the wrong one: by the P99 the *chunked* run is worse, since 16 steps
# with a chunk are 8 % of the gaps, while one frozen step is half a percent. The stall is in the last column but one,
# and nowhere else. TPOT, which many benchmarks print, is a mean again: the freeze is spread over 199 gaps.
#
# Why do the means differ by only 3 %? The same prompt is computed in both runs, while the same streams wait for it. Chunks don't
# make that time go away: they spread it over 16 gaps, where it was in one. A mean adds up all gaps, and can't see how they
# were cut. (The 3 % are what the chunks save, since they use weights that a decode step reads anyway: lesson 11.)
#
# Drawn, every gap a stream had, in order of its length:

# %% name="draw-gaps"
figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
for title, run, colour, style in (("whole", whole, "#d55e00", "-"), ("chunks of 512", chunked, "#0072b2", "--")):
    ordered = sorted(run[2])
    percents = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
    axes.plot(percents, ordered, style, color=colour, label=title, linewidth=2)
for percent in (50, 90, 99):
    axes.axvline(percent, color="#999999", linestyle=":")
    axes.text(percent, 260, f"P{percent}", ha="center", color="#555555")
axes.set_yscale("log")
axes.set_xlabel("per cent of the gaps that are not longer")
axes.set_ylabel("gap, ms")
axes.legend(loc="upper left")
show_figure(
    figure,
    "Sorted gaps of the streams. Both runs lie near 8 ms; the last twelfth of the chunked run rises to about 18 ms, "
    "the last half per cent of the whole run jumps to about 210 ms.",
)

# %% [markdown]
# ## What the long prompt pays
#
# And the sender of the long prompt? With a whole prompt, once it begins, it has the engine to itself until its first
# token is there. In chunks, other people's tokens ride along in each of its steps, and each step costs its own reading
# of the weights. Its own TTFT gets longer. That is the trade.
#
# > **Predict, then run.** Chunks of 512 instead of one piece: what happens to the long prompt's TTFT? And with chunks of 64?

# %% name="guess-ttft"
my_guess_512 = 3.0  # times the TTFT of the whole prompt: write yours
my_guess_64 = 20.0  # write yours

# %% name="trade"
base, factors = whole[0].ttft, {}
print("chunk size   TTFT of the long one         longest gap of the others")
for chunk_size in (None, 4096, 2048, 1024, 512, 256, 128, 64):
    long, _, gaps = serve(chunk_size)
    factors[chunk_size] = long.ttft / base
    print(f"{chunk_size or 'whole':>10}{1e3 * long.ttft:12.0f} ms ({long.ttft / base:.2f} ×){max(gaps):30.0f} ms")
print(f"\n512: {factors[512]:.2f} times, you said {my_guess_512}. 64: {factors[64]:.2f} times, you said {my_guess_64}.")

# %% [markdown]
# From 8,192 down to 512 the stall shrinks to less than a tenth, and the long prompt's TTFT grows by more than a quarter. From 512
# to 64 the stall shrinks by another ten milliseconds that nobody feels, and the long prompt waits more than four times as
# long as at the start. (Lesson 11 has the same sweep with smaller numbers for the small chunks: its streams end earlier, so
# more of the long prompt's steps are without them.) If you look at that one request alone, chunked prefill always makes it slower. If you look at the service, it is what
# keeps everybody else's text flowing.
#
# ## The rule
#
# > **A user sees tokens, not work. Measure from the arrival to the first token and from token to token, look at the longest
# > gap, and keep the inside view for the question why.**
#
# ## Your turn
#
# [Exercise 10](../exercises/10_streaming_and_monitoring.ipynb): write the stream of text, the draw of a token, and the
# numbers that say what each user waited for.
#
# ## What production does
#
# - **Text.** vLLM's `FastIncrementalDetokenizer` (`vllm/v1/engine/detokenizer.py`) wraps the `DecodeStream` of Hugging Face's
#   `tokenizers`, which keeps a window of tokens as ours does; `check_stop_strings` is in the same file, and
#   `--stream-interval` sends several tokens at once. SGLang runs detokenizing in a process of its own
#   (`python/sglang/srt/managers/detokenizer_manager.py`).
# - **Sampling.** `vllm/v1/sample/sampler.py`. Top-p is from *The Curious Case of Neural Text Degeneration* (Holtzman et al.,
#   ICLR 2020), min-p from *Turning Up the Heat* (Nguyen et al., ICLR 2025).
# - **Monitoring.** vLLM exports, for Prometheus, `vllm:time_to_first_token_seconds`, `vllm:inter_token_latency_seconds` and
#   `vllm:request_time_per_output_token_seconds`, and for the inside view `vllm:request_queue_time_seconds`,
#   `vllm:request_prefill_time_seconds` and `vllm:num_requests_waiting`. How far a half-filled prompt has come isn't among
#   them: its documentation of `max_num_queued_tokens` says that the process which talks to the users hears nothing of a
#   request until it produces tokens.
#
# ## Three questions
#
# 1. A stream releases nothing for 40 tokens in a row, and the engine's trace shows a token in every step. Name two
#    causes.
#
#    <details><summary>Answer</summary>
#
#    The model produces bytes that never become a character (or special tokens, which have no text). Or the request has a long
#    stop string, and the text looks like its beginning, a line of dashes for instance. In both cases the gap that the user
#    sees is longer than any ITL of the trace, which counts tokens.
#
#    </details>
#
# 2. A dashboard shows TTFT rising from 1 s to 4 s since this morning. Which two numbers from inside do you look at, and
#    what do they tell you?
#
#    <details><summary>Answer</summary>
#
#    The time until the first chunk and the time from there to the first token. If the first grew, requests queue: more of them,
#    or fewer free blocks. If the second grew, prompts got longer, or hit the prefix cache less often, or share their steps with
#    more others.
#
#    </details>
#
# 3. Two runs of the same prompt with temperature 1 and the same seed give different texts, but only when the server is
#    busy. What is the first thing to check?
#
#    <details><summary>Answer</summary>
#
#    Where the random number comes from: one generator for the whole batch would give each request a number that depends on its
#    batch mates. If it belongs to the request, look at the logits: another batch size can change the order of floating-point
#    sums, and a draw near a border then falls on the other side.
#
#    </details>
#
# **Lesson 11** gives you all the dials at once, and lets you write the policy that decides who is served.

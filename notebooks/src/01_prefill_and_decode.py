# %% [markdown]
# # 01 · Prefill and decode
#
# **After this lesson you can**
#
# - say what `generate()` asks a model, and count the tokens it sends through for one answer;
# - show on paper and on a real model why the keys and values of a text can be kept, and what keeping them costs;
# - fill a KV cache in one piece or in any pieces, and get the same logits;
# - measure when a forward pass waits for memory and when it waits for arithmetic, and tell prefill from decode by it.
#
# **Time** 40 minutes · **You need** lesson 00, and attention as `softmax(QKᵀ)V` · **Adds to the engine** its reason to
# exist. You write `generate()` twice, first without a KV cache, then with one. What the engine does from lesson 02 on
# is to keep that cache, for many requests at once.

# %% name="house"
from course_lib.lab import house, show, show_figure, source

house("model")

# %% [markdown]
# ## One question, asked again and again
#
# A language model answers a single question: *after these tokens, which one comes next?* Everything else is asking
# again. Here is SmolLM2 behind the thinnest wrapper that this course has, and what transformers' own `generate()`
# makes of a prompt with it. That answer is our reference for the rest of the lesson.

# %% name="set-up"
import time
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.lab.calls import calls_map, calls_map_alt
from course_lib.model.plain import PlainModel

loaded = load_model("smollm2", device="cpu")
tokenizer = loaded.tokenizer
model = PlainModel(loaded)

prompt = demo.chat_prompt(tokenizer, "What is a lighthouse for?")
ids = torch.tensor([prompt], device=loaded.device)
output = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
answer = output[0, len(prompt) :].tolist()
text = prompt + answer  # token ids: all that was ever there

print(f"prompt: {len(prompt)} tokens, answer: {len(answer)} tokens")
print(tokenizer.decode(answer))

# %% name="source-plain"
source(PlainModel.logits, mark=("positions", "_cache_argument"))

# %% [markdown]
# Tokens, the position of the first of them, and a cache, of which more soon. Out come the *logits*: a score for each
# of the 49,152 tokens that might follow. `model(...)` is the same and returns the best one's id; to choose otherwise
# is called sampling, and waits until lesson 10.
#
# Without a cache, the model knows only what you send. So you send everything:

# %% name="by-hand"
first = model(prompt, 0)
second = model([*prompt, first], 0)
third = model([*prompt, first, second], 0)

print(tokenizer.batch_decode([[first], [second], [third]]))
print("as generate() said:", [first, second, third] == answer[:3])
print("(position of the first token, tokens) of each call:", model.calls)

# %% [markdown]
# Three calls, three tokens. The model read the prompt three times.
#
# > **Predict, then run.** The whole answer has 24 tokens, the prompt 36. To produce the answer like this, how many
# > tokens go through the model in all?

# %% name="guess-naive"
my_guess_tokens = 60  # write yours

# %% name="without-cache"
model.calls.clear()
for length in range(len(prompt), len(text)):
    assert model(text[:length], 0) == text[length], "not the token that generate() chose"
no_cache = list(model.calls)

print(f"{sum(count for _, count in no_cache)} tokens in {len(no_cache)} calls. You said {my_guess_tokens}.")
print(f"The last call alone: {no_cache[-1][1]} tokens, of which {no_cache[-1][1] - 1} had been in the call before.")

# %% [markdown]
# Each call repeats the one before and adds one token. With a prompt of P tokens and an answer of N that is
# P + (P + 1) + … + (P + N − 1) tokens: the answer's length goes in *squared*. An answer of 1,000 tokens to this prompt
# would send half a million through.
#
# What does the second call compute that the first one hadn't? To see that, we need a model small enough to look into.
#
# ## Attention in twenty lines
#
# One layer, one head, eight numbers per token. Each token makes three vectors of itself: a **query** (what it looks
# for), a **key** (what it can be found by) and a **value** (what it hands over). The *causal mask* lets a token see
# itself and what stands before it.

# %% name="toy"
D = 8
torch.manual_seed(0)
embedding, place = torch.randn(2, 100, D)
W_Q, W_K, W_V = torch.randn(3, D, D) / D**0.5


def attention(token_ids):
    """Queries, keys, values and outputs of one attention layer, each [tokens, D]."""
    n = len(token_ids)
    x = embedding[token_ids] + place[:n]  # what the token is, and where it stands
    q, k, v = x @ W_Q, x @ W_K, x @ W_V
    scores = q @ k.T / D**0.5
    may_see = torch.ones(n, n).tril().bool()
    weights = scores.masked_fill(~may_see, float("-inf")).softmax(dim=-1)
    return q, k, v, weights @ v


q, k, v, out = attention([31, 41, 59, 26])
print("keys of four tokens, the first three numbers of each:")
print("\n".join("   ".join(f"{number:6.2f}" for number in row[:3]) for row in k.tolist()))

# %% [markdown]
# > **Predict, then run.** A fifth token comes. Of the four old tokens' queries, keys, values and outputs, which are
# > different afterwards? And which of them are *needed* to compute the fifth token's output?

# %% name="guess-toy"
my_guess_changed = "all of them"  # write yours: any of queries, keys, values, outputs
my_guess_needed = "all of them"

# %% name="toy-five"
new_q, new_k, new_v, new_out = attention([31, 41, 59, 26, 53])

for name, old, new in (("queries", q, new_q), ("keys", k, new_k), ("values", v, new_v), ("outputs", out, new_out)):
    print(f"old {name:8} changed: {not torch.allclose(old, new[:4], atol=1e-6)}")

# The fifth token alone, with the keys and values that are there already:
x = embedding[53] + place[4]
keys, values = torch.vstack([k, x @ W_K]), torch.vstack([v, x @ W_V])
alone = ((x @ W_Q) @ keys.T / D**0.5).softmax(dim=-1) @ values
same = torch.allclose(alone, new_out[4], atol=1e-6)
print("\nthe fifth output from its own query, all keys and all values: same as above:", same)
print(f"You said: changed {my_guess_changed}, needed {my_guess_needed}.")

# %% [markdown]
# Nothing old changes. A token can't see what comes after it, so nothing that comes after can alter it. And of the old
# tokens only the keys and values are needed: an old query has asked its question, an old output has been passed on.
#
# So keep K and V, and compute each token **once**. That memory is the **KV cache**. In a model of 30 layers the
# argument holds layer by layer: what a layer is given for an old token doesn't change, so what it makes of it doesn't.
#
# ## The cache of a real model
#
# > **Predict, then run.** In the prompt, a token is a number below 49,152: two bytes would do. How many bytes does
# > SmolLM2 keep for it in the KV cache? (It has 30 layers; each keeps the keys and values of 3 heads, 64 numbers a head,
# > 4 bytes a number.)

# %% name="guess-bytes"
my_guess_bytes = 2  # write yours

# %% name="real-cache"
model.calls.clear()
cache = model.new_cache()
assert model(prompt, 0, cache) == answer[0]

layer = cache.layers[0]
print(f"keys of one layer: {tuple(layer.keys.shape)} = 1 text, K/V heads, tokens, numbers per head")
total = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
weights = sum(weight.nbytes for weight in set(loaded.model.parameters()))
per_token = total // len(prompt)
print(f"{per_token:,} bytes for each token, in {len(cache.layers)} layers. You said {my_guess_bytes:,}.")
print(f"The weights have {weights / 1e6:.0f} MB: as much as the cache of {weights / per_token:,.0f} tokens.")

# %% [markdown]
# 30 layers × 2 (a key and a value) × 3 heads × 64 numbers × 4 bytes = 46,080 bytes. A page of text, some 600 tokens,
# takes 28 MB: more than a photograph. This is why the next lesson is about memory, and the one after it, and the one
# after that.
#
# Our cache now holds the prompt. From here on, each call gets **one** token, the one that has no keys and values yet.

# %% name="with-cache"
for position in range(len(prompt), len(text) - 1):
    assert model([text[position]], position, cache) == text[position + 1], "not the token that generate() chose"
with_cache = list(model.calls)

panels = {"Without a cache": no_cache, "With a KV cache": with_cache}
show(calls_map(panels), calls_map_alt(panels))

# %% [markdown]
# The same 24 tokens, as the assertions say. On the right you see the two phases that this course is about:
#
# - **prefill**: the prompt, many tokens in one call; it fills the cache, and its last row gives the first token;
# - **decode**: one token a call; it reads the whole cache and adds one entry.
#
# Look at the last call: it brings the last-but-one token of the answer. The newest token, the one just chosen, is known
# but not cached. It will be the *input* of a next step, if there is one. Most off-by-one errors of this course live
# in that gap.
#
# And in time? Below, the next token is asked for at growing lengths of a text, with everything sent again and with all
# but the last token in a cache. (The saved numbers are from two cores of a server processor; yours differ.)

# %% name="time-per-token" tags=["nbval-ignore-output"]
document = tokenizer.encode(demo.document_text())


def seconds(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


# Of three times in a row, the shortest: the one that other programs disturbed least.
lengths = [64, 128, 256, 384, 512]
cache, cached = model.new_cache(), 0
sent_again, one_token = [], []
for length in lengths:
    sent_again.append(min(seconds(lambda: model(document[:length], 0)) for _ in range(3)))
    model(document[cached : length - 1], cached, cache)  # all but the last token: not timed
    nexts = range(length - 1, length + 2)
    one_token.append(min(seconds(lambda: model([document[at]], at, cache)) for at in nexts))
    cached = length + 2

figure, axes = plt.subplots(figsize=(8, 3.4), facecolor="white")
axes.plot(lengths, [1e3 * t for t in sent_again], "o-", color="#d55e00", label="whole text sent again")
axes.plot(lengths, [1e3 * t for t in one_token], "s--", color="#0072b2", label="one token, the rest cached")
axes.set(xlabel="length of the text, tokens", ylabel="time for the next token, ms", ylim=0)
axes.legend(frameon=False)
assert sent_again[-1] > 3 * one_token[-1], "something else kept the machine busy: run the cell again"
show_figure(figure, "Time for the next token against the length of the text. Whole text sent again: "
            f"from {sent_again[0] * 1e3:.0f} ms at 64 tokens to {sent_again[-1] * 1e3:.0f} ms at 512. "
            f"With a cache: {min(one_token) * 1e3:.0f} to {max(one_token) * 1e3:.0f} ms.")

# %% [markdown]
# ## The cache can be filled bit by bit
#
# Prefill put the whole prompt in with one call. Did it have to? A second piece of the prompt finds the keys and values
# of the first piece in the cache, exactly as a decode finds those of everything before it. Decode *is* filling the cache
# bit by bit, in pieces of one. So cut the prompt anywhere:

# %% name="pieces"
whole = model.logits(prompt, 0)

print("cut at              calls   largest difference of a logit   most likely next token")
for cuts in ([], [20], [1, 2, 3], [35], [7, 8, 30, 33]):
    cache = model.new_cache()
    for start, end in pairwise([0, *cuts, len(prompt)]):
        logits = model.logits(prompt[start:end], start, cache)
    difference = (logits - whole).abs().max().item()
    shown = "below 0.001" if difference < 1e-3 else f"{difference:.3f}"
    print(f"{str(cuts):20}{len(cuts) + 1:5}{shown:>32}   {tokenizer.decode([int(logits.argmax())])!r}")

# %% [markdown]
# The logits differ by rounding, if at all: sums of floats in another order. The model can't tell how its cache came to
# be. This one fact carries the whole course. Lesson 00's document went through in eight chunks because of it, and
# nobody's answer changed. Seen like this, a chunk stands between the two phases:
#
# | | tokens in | reads from the cache | attends inside |
# |---|---|---|---|
# | prefill of a whole prompt | all of them | nothing | each token to those before it |
# | **chunk of a prefill** | the next few of the prompt | all chunks before it | each token to those before it |
# | decode | one | everything before it | there is nobody else |
#
# Two things have to be right: the piece must find *all* keys and values before it, and its tokens must be numbered as
# they stand in the whole text. `start_pos` is that number.
#
# > **Predict, then run.** Suppose you forget the second. The prompt is cut in two, and the second piece is numbered from
# > 0 again. What happens: an error, the same token, or another one?

# %% name="guess-positions"
my_guess_positions = "an error"  # write yours

# %% name="wrong-positions"
cache = model.new_cache()
model(prompt[:28], 0, cache)
logits = model.logits(prompt[28:], 0, cache)  # should be 28

print(f"largest difference of a logit: {'above 1' if (logits - whole).abs().max() > 1 else 'small'}")
print(f"next token: {tokenizer.decode([int(logits.argmax())])!r} instead of {tokenizer.decode([answer[0]])!r}")
print(f"You said: {my_guess_positions}.")

# %% [markdown]
# No error, and nothing in the code that looks wrong. The model simply reads a different text, one in which two tokens
# stand at each of the first eight positions. Most mistakes in a serving engine are of this kind: the answer is
# still fluent, and it is the answer to another question. That is why this course compares tokens with an independent
# engine wherever it can.
#
# ## What each phase costs
#
# Prefill and decode run the same code: some tokens go through all the weights. What differs is *how many* tokens per
# pass.
#
# > **Predict, then run.** One token takes some time t. How many times t do 8 tokens take in one pass? And 256?

# %% name="guess-cost"
my_guess_8 = 8  # times as long as one token: write yours
my_guess_256 = 256

# %% [markdown]
# The measurement uses the engine's own runner, which wastes less time around the arithmetic than our wrapper does. And
# one more number, for comparison: how long it takes to read as many bytes as the model has weights, doing nothing with
# them but adding up.

# %% name="cost" tags=["nbval-ignore-output"]
runner = ModelRunner(loaded)


def step_seconds(num_tokens: int) -> float:
    """One step of the engine that takes `num_tokens` tokens: the shortest of several, the least disturbed."""
    times = []
    for _ in range(4 if num_tokens <= 64 else 2):
        engine = Engine(runner, EngineConfig(num_blocks=64, max_prefill_chunk_size=None, enable_prefix_caching=False))
        engine.add_request(document[:num_tokens], SamplingParams(max_tokens=1))
        engine.step()
        step = engine.trace.steps[0]
        times.append(step.end - step.start)
    return min(times)


step_seconds(8)  # warm up
counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
times = [step_seconds(count) for count in counts]
for _ in range(2):  # again, where another program disturbed the first time
    times = [min(t, step_seconds(count)) for t, count in zip(times, counts)]
memory = torch.ones(weights // 4)  # as many bytes as the weights have
read = min(seconds(memory.sum) for _ in range(8))
del memory

print("tokens in the pass   time, ms   tokens/s")
for count, t in zip(counts, times):
    print(f"{count:18}{t * 1e3:11.1f}{count / t:11.0f}")
print(f"\nReading the weights once: {read * 1e3:.1f} ms; one token takes {times[0] / read:.1f} times as long.")
print(f"8 tokens take {times[3] / times[0]:.1f} times as long as one (you said {my_guess_8}), "
      f"256 take {times[8] / times[0]:.1f} times (you said {my_guess_256}).")
rates = [count / t for count, t in zip(counts, times)]
busy = "something else kept the machine busy: run it again"
assert times[3] < 2.5 * times[0], busy  # 8 tokens: far from 8 times as long
assert times[8] > 4 * times[0], busy  # 256 tokens: much longer
assert 0.6 < rates[9] / rates[6] < 1.6, busy  # from 64 to 512 tokens the rate hardly changes

figure, axes = plt.subplots(figsize=(8, 3.8), facecolor="white")
axes.loglog(counts, [1e3 * t for t in times], "o-", color="#0072b2", label="one forward pass")
axes.axhline(1e3 * read, ls="--", color="#009e73", label="reading the weights once")
rate = times[-1] / counts[-1]
proportional = [1e3 * rate * count for count in counts]
axes.loglog(counts, proportional, ":", color="#d55e00", label=f"{1e3 * rate:.1f} ms × tokens")
axes.set(xlabel="tokens in the pass", ylabel="time, ms", ylim=(1e3 * read / 2, None))
axes.set(xticks=counts, xticklabels=counts)
axes.minorticks_off()
axes.legend(frameon=False)
show_figure(figure, "Time of one forward pass against its tokens, both axes logarithmic: "
            + ", ".join(f"{t * 1e3:.0f} ms for {count}" for count, t in zip(counts, times))
            + f". 8 tokens take {times[3] / times[0]:.1f} times as long as 1, "
            f"512 take {times[9] / times[6]:.1f} times as long as 64. Dashed: reading the weights once, "
            f"{read * 1e3:.0f} ms. Dotted: proportional to the tokens, through the last point.")

# %% [markdown]
# Two regimes, and a knee between them.
#
# - On the left, the pass waits for **memory**. Every weight must come from memory once, and is used for one token or
#   for eight: eight tokens take far less than eight times as long. A decode step of one request lives here.
# - On the right, the pass waits for **arithmetic**. Tokens per second hardly change any more, and twice the prompt takes
#   about twice the time. Prefill lives here.
#
# (The cell asserts this much: 8 tokens in less than 2.5 times the time of one, and at 512 tokens a rate between 0.6 and
# 1.6 times that at 64. The exact numbers belong to the machine.)
#
# That is why decodes of many requests go into one pass (lesson 05), and why a long prefill is felt by all of them
# (lesson 00). On a GPU the knee lies further right, since arithmetic is cheaper there. From the data sheet of an H100
# and the shape of Llama-3-8B, by the cost model that the course's simulator uses:

# %% name="roofline"
from course_lib.cost_model import StepWork, pairs_of, step_cost
from course_lib.hardware import CHIPS, MODELS

print("tokens in the pass   time, ms   waits for")
for count in (1, 8, 64, 128, 256, 512, 1024, 8192):
    work = StepWork(tokens=count, rows=1, pairs=pairs_of(count, count), context=count)
    cost = step_cost(MODELS["llama3-8b"], CHIPS["h100"], work)
    print(f"{count:18}{cost.seconds * 1e3:11.1f}   {cost.bound}")
kept = MODELS["llama3-8b"].kv_values_per_token * CHIPS["h100"].bytes_per_value
print(f"\nkept in the KV cache: {kept:,} bytes per token, {kept * 8192 / 1e9:.1f} GB for a prompt of 8,192")

# %% [markdown]
# Here are the 128 streams and the prompt of 8,192 tokens from lesson 00. A pass with 128 tokens takes as long as one
# with a single token. A pass with 8,192 takes about thirty times as long.
#
# ## The rule
#
# > **Compute every token once, keep its keys and values, and send only the tokens that have none yet, numbered as they
# > stand in the whole text. In how many pieces you send them changes the time and nothing else.**
#
# ## Your turn
#
# [Exercise 01](../exercises/01_prefill_and_decode.ipynb): write `generate()` without a cache, then with one, then a
# prefill in pieces. Each runs on SmolLM2 in the end, and you see your calls drawn as above.
#
# ## What production does
#
# - transformers' `generate()` keeps the cache in `DynamicCache`, the class that our wrapper uses too: one tensor per
#   layer that is copied to a longer one with every token. Engines allocate once instead; lesson 02 is about how.
# - vLLM and SGLang have no `generate` loop per request. Every step computes, for many requests, the tokens that have no
#   keys and values yet; vLLM calls the two counts `num_computed_tokens` and `num_tokens_with_spec` in
#   `vllm/v1/core/sched/scheduler.py`, and says there that it knows no prefill phase and no decode phase.
# - *Efficiently Scaling Transformer Inference* (Pope et al., 2022) works out the costs of both phases and what bounds
#   them. *DistServe* (Zhong et al., OSDI 2024) and *Splitwise* (Patel et al., ISCA 2024) draw the consequence and put
#   the two phases on different GPUs, each with hardware and batch sizes that fit it.
#
# ## Three questions
#
# 1. BERT has no causal mask: every token sees the whole text. Could you keep its keys and values when a token is
#    appended?
#
#    <details><summary>Answer</summary>
#
#    Those of the first layer, yes: they come from the token itself. But the first layer's outputs change for every
#    token, since all of them see the new one, and so do all keys and values from the second layer on. The causal mask is
#    what makes the cache possible.
#
#    </details>
#
# 2. You stop a chat after 24 tokens. How many tokens have keys and values in the cache: 36 + 24 or 36 + 23?
#
#    <details><summary>Answer</summary>
#
#    36 + 23. The last token came out of the last call and never went into one. To continue the chat you
#    would send it first, together with whatever the user writes next: a piece of several tokens, as in a prefill.
#
#    </details>
#
# 3. A decode step of one request waits for memory. Somebody offers you a chip with twice the arithmetic and the same
#    memory. Who notices?
#
#    <details><summary>Answer</summary>
#
#    Prefill does: up to twice the tokens per second, so long prompts get their first token sooner. A single stream
#    doesn't get its tokens any faster. A server notices once it decodes so many requests together that the pass has
#    reached the knee.
#
#    </details>
#
# **Lesson 02** asks where all those bytes go, when forty people share the memory and nobody knows how long their
# answers will be.

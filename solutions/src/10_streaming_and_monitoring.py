# %% [markdown]
# # Exercises 10 · Streaming and monitoring
#
# [Lesson 10](../notebooks/10_streaming_and_monitoring.ipynb) followed a token from the logits to the user's screen. Now you
# write the three stations: text that can be shown while it grows, the choice of a token, and the numbers that say what each
# user waited for.

# %% name="set-up"
import torch

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo
from course_lib.checks import NotDone, check, plug
from course_lib.lab import alt_text, show, show_figure, timeline
from course_lib.lab.pieces import pieces, pieces_alt
from course_lib.metrics import percentile
from course_lib.runners import Sample
from course_lib.workloads import simulate, stall

# %% [markdown] name="task-10-1"
# ## 10.1 Text while it grows
#
# `push` takes one more token of an answer and returns the text that can be shown because of it; `flush` is called once, when
# the answer has ended, and returns what was held back. Nothing that is shown may change later, and nothing may be lost: all
# pieces together are what the tokenizer makes of all tokens together.
#
# ```text
# token    what it is                        push returns
#
#  28589   "中", a whole character           "中"
#  10813   the first two bytes of a bird     ""
#    234   its third byte                    ""
#    116   its last byte                     "🐦"
#  10813   two bytes of another bird         ""
#          here the answer is cut off        flush: "�"
#
# "�" for the first two bytes would be wrong, and can't be taken back.
# At the end it's right: nothing more will come, this is all there is.
# ```
#
# A decoder writes `"\N{REPLACEMENT CHARACTER}"` (`"�"`) for bytes that are no whole character. Some never become one:
# once other text follows them, nothing is left to wait for, and they are shown as `"�"`. One more trap: some tokenizers
# (Llama 2's, Mistral's) drop a space *in front of a text*. Decode `" morning"` alone, and you get `"morning"`.

# %% name="your-10-1"
class TextStream:
    """Turns an answer's token ids into text, piece by piece.

    tokenizer  has decode(token_ids, skip_special_tokens=True), which returns a text
    stop       stop strings; not your task here
    text       what was shown so far: all that push and flush returned
    """

    def __init__(self, tokenizer, stop=()):
        self.tokenizer = tokenizer
        self.token_ids = []
        self.text = ""
        self.stopped = False  # a stop string was met

    def push(self, token_id):
        """Take one more token (an int); return the text that can be shown now, "" if there is none."""
        ### BEGIN SOLUTION
        self.token_ids.append(token_id)
        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = whole[len(self.text) :]
        self.text = whole
        return piece
        ### END SOLUTION

    def flush(self):
        """The answer has ended; return what was held back, "" if nothing was."""
        ### BEGIN SOLUTION
        everything = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        rest = everything[len(self.text) :]
        self.text = everything
        return rest
        ### END SOLUTION

# %% name="check-10-1"
check("10.1", TextStream)

# %% [markdown] name="hints-10-1"
# <details><summary>Hint 1: the rule</summary>
#
# A token's text isn't a property of the token. It depends on its neighbours. So decode a row of tokens, not one, and show what
# the newest one added.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# You keep the tokens that were not shown yet, decode only those, and forget them once they gave whole characters. That is right
# for emoji. Now the tokens are "Good" and " morning", and the tokenizer drops a space in front of a text: what does it make of
# " morning" alone?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Keep all tokens. On each push decode all of them. If the text ends in the middle of a character, show nothing. Else show what is
# longer than the text shown so far, and remember the new length. At the end there is nothing to wait for: show the rest, broken or
# not.
#
# </details>

# %% name="run-10-1" tags=["needs-your-code"]
runner = ModelRunner("smollm2")
TextStream(runner.tokenizer).flush()  # alone first: in the engine, a text that fails ends its request, and nothing else
question = demo.chat_prompt(runner.tokenizer, "Write the Chinese characters for 'hello'.")

with plug(TextStream=TextStream):
    outputs = list(Engine(runner).stream(question, SamplingParams(max_tokens=20)))

print("|".join(output.new_text for output in outputs))
token_ids = outputs[-1].token_ids
alone = [runner.tokenizer.decode([token_id]) for token_id in token_ids]
row = (token_ids, alone, [output.new_text for output in outputs])
show(pieces(*row), pieces_alt(*row))

# %% [markdown] name="task-10-2"
# ## 10.2 One token from a row of logits
#
# Choose the next token of one request: divide by the temperature, keep the smallest set of most likely tokens whose
# probabilities add up to `top_p`, and draw one of them, each as often as its probability says. The draw may depend on the
# request's seed and on how many tokens it has, and on nothing else, so that a request gives the same answer in every batch.
#
# ```text
# temperature 1, top_p 0.8
#
# token           0      1      2      3
# probability    0.10   0.50   0.05   0.35
#
# most likely first:    token 1   token 3   token 0   token 2
#                         0.50      0.35      0.10      0.05
# added up                0.50      0.85      0.95      1.00
# kept                    yes       yes       no        no
# drawn                   59 %      41 %
#
# 0.85 is the first sum that reaches 0.8.
# ```

# %% name="your-10-2"
def sample_token(logits, temperature, top_p, seed, num_generated):
    """The id of the next token of one request, an int (or what int() takes: a tensor or array of one whole number).

    logits         tensor [vocab] of floats; it isn't changed
    temperature    0: the most likely token; below 1 sharper, above 1 flatter
    top_p          above 0, at most 1
    seed           of the request, an int (0 too); another seed gives other draws, not the same ones shifted
    num_generated  tokens that the request has so far: which draw of this seed it is
    """
    ### BEGIN SOLUTION
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    before = ranked.cumsum(dim=-1) - ranked
    ranked[before >= top_p] = 0
    dice = torch.Generator().manual_seed(seed * 1_000_003 + num_generated)
    place = torch.multinomial(ranked, 1, generator=dice)
    return int(ids[place])
    ### END SOLUTION

# %% name="check-10-2"
check("10.2", sample_token)

# %% [markdown] name="hints-10-2"
# <details><summary>Hint 1: the rule</summary>
#
# Logits become probabilities by softmax, after they were divided by the temperature. A token is kept when the tokens before it, in
# falling order, have not reached p yet.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Probabilities 0.9 and 0.1, p = 0.5. "Keep while the sum is below p" keeps nothing: the first sum is 0.9 already. And after a sort,
# place 0 is the most likely token, not token 0.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Temperature 0 is a case of its own. Otherwise: softmax; sort, and keep the ids beside the values; for each place, the sum of all
# places before it; set to zero where that sum has reached p; a random generator made from the seed and the number of tokens, both;
# draw a place; look up whose id it is.
#
# </details>

# %% name="run-10-2" tags=["needs-your-code"]
from matplotlib import pyplot


def sample(logits, sequences):
    """What the runner calls: a row of logits per request."""
    return [
        Sample(sample_token(row, s.params.temperature, s.params.top_p, s.seed, len(s.generated_token_ids)))
        for row, s in zip(logits.float(), sequences)
    ]


engine = Engine(ModelRunner("smollm2"))
tokenizer = engine.runner.tokenizer
question = demo.chat_prompt(tokenizer, "Tell me a story.")
truth = engine.generate([question], SamplingParams(max_tokens=1, logprobs=8), progress=False)[0].logprobs[0]

with plug(sample=sample):
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in range(64)]
    firsts = [output.token_ids[0] for output in engine.generate([question] * 64, params, progress=False)]

words = sorted(truth, key=truth.get, reverse=True)[:8]
figure, axes = pyplot.subplots(figsize=(7, 3))
places = range(len(words))
model, yours = [float(torch.tensor(truth[word]).exp()) for word in words], [firsts.count(word) / 64 for word in words]
axes.bar([place - 0.2 for place in places], model, 0.4, color="#bbbbbb", label="the model's probability")
axes.bar([place + 0.2 for place in places], yours, 0.4, color="#0072b2", hatch="//", label="your share of 64 draws")
axes.set_xticks(places, [tokenizer.decode([word]) for word in words])
axes.set_xlabel("first word of the story")
axes.set_ylabel("share of the answers")
axes.legend()
shares = ", ".join(f"{tokenizer.decode([word])} {firsts.count(word)}" for word in words)
show_figure(figure, f"The first words of 64 answers with your sampler beside the model's probabilities: {shares}.")

# %% [markdown] name="task-10-3"
# ## 10.3 What each user waited for
#
# Make three numbers of a trace for every request: the time to its first token, a percentile of the gaps between its tokens, and
# its longest gap. They are what the *user* sees, so a step in which a request only had a chunk of its prompt computed counts for
# nothing.
#
# ```text
# a document arrives at 0.5 s
#
#   steps end at    1.0     2.0     3.0     3.2     3.4     4.4
#   computed of it  chunk   chunk   chunk   decode  decode  decode
#   its user gets   -       -       token   token   token   token
#
# TTFT  3.0 - 0.5 = 2.5 s
# gaps  0.2  0.2  1.0: median 0.2 s, longest 1.0 s
# ```
#
# `trace.requests[name].arrival_time` says when a request came. `trace.steps` are the steps in order; a step has an `end`, in
# seconds, and `tokens`, a dictionary with the requests that got a token in it. `percentile(values, percent)` is there already.

# %% name="your-10-3"
def latencies(trace, percent):
    """{request: (TTFT, percentile of its gaps, longest gap)}, in seconds, for every request of the trace.

    percent  0 … 100
    A request without a token has no TTFT, one with fewer than two tokens has no gaps: None in their place.
    """
    ### BEGIN SOLUTION
    times = {name: [] for name in trace.requests}
    for step in trace.steps:
        for name in step.tokens:
            times[name].append(step.end)
    result = {}
    for name, moments in times.items():
        gaps = [after - before for before, after in zip(moments, moments[1:])]
        ttft = moments[0] - trace.requests[name].arrival_time if moments else None
        result[name] = (ttft, percentile(gaps, percent) if gaps else None, max(gaps, default=None))
    return result
    ### END SOLUTION

# %% name="check-10-3"
check("10.3", latencies)

# %% [markdown] name="hints-10-3"
# <details><summary>Hint 1: the rule</summary>
#
# A user sees tokens, nothing else. A token is there when its step has ended. Everything is a difference of two moments: arrival and
# first token, token and next token of the same request.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# You take the length of the steps as the gaps. A request is preempted for three steps: how long did its user wait?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# First a list of moments per request: go through the steps, and append the end to the list of everyone who got a token. Then, per
# request: the differences of neighbours; the first moment minus the arrival; None where a list is too short.
#
# </details>

# %% name="run-10-3" tags=["needs-your-code"]
config = EngineConfig(num_blocks=4096, max_num_seqs=32, max_num_batched_tokens=8192 + 32, max_prefill_chunk_size=None)
trace = simulate(config, stall(running=8, prompt_tokens=8192, arrival=0.2, output_tokens=200))

print(f"{'':8}{'TTFT':>9}{'median gap':>13}{'P99 gap':>10}{'longest gap':>14}")
for name, (ttft, median, longest) in latencies(trace, 50).items():
    p99 = latencies(trace, 99)[name][1]
    print(f"{name:8}{ttft * 1e3:6.0f} ms{median * 1e3:10.1f} ms{p99 * 1e3:7.1f} ms{longest * 1e3:11.1f} ms")
show(timeline(trace), alt_text(trace))

# %% [markdown]
# # 07 · The chunk
#
# **After this lesson you can**
#
# - say what a model must be told about a piece of a prompt, so that the answer is that of the whole prompt;
# - lay out a step's chunks and decodes as one flat batch of tokens, and read such a batch;
# - say which rows of it give a token, and why a request in the middle of its prompt gives none;
# - test that cutting changes nothing: the cases that matter, and the number to compare.
#
# **Time** 40 minutes · **You need** lessons 03, 04 and 06 · **Adds to the engine** the batch, and the model behind it.

# %% name="map"
from course_lib.lab import house

house("batch", "model")

# %% [markdown]
# ## The same tokens, in two pieces
#
# A prompt of 101 tokens: the notes of a meeting, and a question about them. We compute it in two chunks, 64 tokens and
# 37. The second chunk reads the keys and values of the first from the cache, as it should. We change **one** thing:
# the second chunk's positions begin at 0 again. In code it looks harmless, it's the index in the list that one holds:

# %% name="restart"
from dataclasses import replace

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model

model = load_model("smollm2")


class Restart(ModelRunner):
    """Each chunk numbers its tokens from 0."""

    def forward_plainly(self, batch):
        borders = zip(batch.query_start_loc, batch.query_start_loc[1:])
        local = [batch.positions[a:b] if b - a == 1 else range(b - a) for a, b in borders]  # decodes as they are
        return super().forward_plainly(replace(batch, positions=[position for piece in local for position in piece]))


NOTES = """Notes of the meeting. The group met on Monday in the old library. Anna brought coffee and cake. They talked \
about the summer trip and the budget. The trip goes to the city of Lisbon. Tom will buy the tickets. The next meeting \
is on Friday at noon. Everybody should bring a pen.

Which city does the trip go to?"""


def answer(runner, chunk_size):
    config = EngineConfig(num_blocks=64, max_prefill_chunk_size=chunk_size, enable_prefix_caching=False)
    prompt = demo.chat_prompt(runner.tokenizer, NOTES)
    [output] = Engine(runner, config).generate([prompt], SamplingParams(max_tokens=20), progress=False)
    return " ".join(output.text.split())


print("in one piece:", answer(ModelRunner(model), None))

# %% [markdown]
# > **Predict, then run.** What happens when the second chunk numbers its tokens from 0: an exception, the same answer,
# > another plausible answer, or nonsense?

# %% name="guess-restart"
my_guess = "..."  # write yours

# %% name="positions-wrong"
for chunk_size in (64, 48):
    print(f"chunks of {chunk_size}, positions go on:     ", answer(ModelRunner(model), chunk_size))
    print(f"chunks of {chunk_size}, positions start at 0:", answer(Restart(model), chunk_size), "\n")
print(f"You said: {my_guess}")

# %% [markdown]
# No exception, no warning, every shape is right. And the model has lost its mind, in another way for each cut.
#
# A transformer doesn't see an order in its tokens. It is told each token's **position**, and SmolLM2, like most models
# of today, turns its queries and keys by an angle that grows with the position. What attention then sees is the
# *difference* of two positions: how far back is that word? With restarted positions those distances are false:

# %% name="distances"
print("                                         distance in chunks")
print("token   looks at token   true distance   of 64 that restart")
for token, earlier in ((20, 10), (70, 60), (100, 63)):
    print(f"{token:5}{earlier:17}{token - earlier:16}{token % 64 - earlier % 64:21}")

# %% [markdown]
# Token 70 looks for the word 10 places back, and the arithmetic says that it lies 54 places in the *future*.
#
# So a chunk must know where in the prompt it stands. That is the third argument of the entry that this lesson is
# about:
#
# ## `run_prefill_chunk(sequence, chunk_token_ids, start_pos)`

# %% name="contract"
import inspect

print(inspect.getdoc(ModelRunner.run_prefill_chunk))

# %% [markdown]
# It is neither of the two things that you know, and has something of both:
#
# | | goes in | reads from the cache | looks inside itself |
# |---|---|---|---|
# | prefill in one piece | the whole prompt | nothing | causally |
# | a **chunk** | a piece of the prompt | all pieces before it | causally |
# | a decode | one token | everything before it | (only itself) |
#
# Read the table from below: a decode is a chunk of one token. From above: a prompt in one piece is one chunk that
# begins at 0. The engine has one path for all three. To run a chunk it needs
#
# 1. the chunk's token ids;
# 2. its **positions**, from `start_pos` on (this lesson);
# 3. the sequence's **block table**, so that it can attend to what came before (lesson 04);
# 4. the **slots** where its own keys and values go, from the index in the whole sequence (lesson 03);
# 5. to know whether it is the **last** chunk: only then is there a row whose logits anybody wants.
#
# Here it is by hand, without a scheduler. The free blocks are shuffled, as they are in a server that has run for a
# while.

# %% name="by-hand"
from course_lib.block_manager import BlockManager
from course_lib.sequence import Sequence

runner = ModelRunner(model)
prompt = demo.chat_prompt(runner.tokenizer, NOTES)


def last_logits(prompt, pieces, show=False, runner=runner):
    """The logits of the last token of a prompt that is computed in pieces of these sizes."""
    runner.init_kv_cache(num_blocks=16, block_size=16)
    blocks = BlockManager(16, 16)
    blocks.shuffle_free_blocks(seed=0)
    sequence, done = Sequence("r", prompt), 0
    for size in pieces:
        blocks.allocate(sequence, done + size)
        logits = runner.run_prefill_chunk(sequence, prompt[done : done + size], start_pos=done)
        if show:
            result = "nothing" if logits is None else f"{len(logits)} logits"
            print(f"tokens {done:3} to {done + size - 1:3}   block table {sequence.block_table!s:28} returned {result}")
        done += size
    return logits


logits = last_logits(prompt, [40, 40, 21], show=True)
print("\nlikeliest first token:", repr(runner.tokenizer.decode([int(logits.argmax())])))

# %% [markdown]
# Nothing, nothing, and then one logit per token of the vocabulary. An intermediate chunk has logits too, if one insists:
# its last row predicts the token that comes next *in the prompt*. But that token is known, it's in the prompt. Sampling
# there would insert a word of the model's own into the user's text.
#
# ```text
# chunk 0 done    no output
# chunk 1 done    no output
# chunk 2 done    no output
# chunk 3 done    the first token is sampled: output
# ```
#
# ## Is it the same?
#
# One-shot and chunked have to agree. The logits can't be equal to the last bit: floating-point sums come out a little
# different when they are added up in another order. But they must agree within 1e-4, and the likeliest
# token must be the same. These are the cases that catch mistakes, with blocks of 16:

# %% name="same"
CASES = (
    ("shorter than a chunk", 20, 32),
    ("exactly one chunk", 32, 32),
    ("just over one chunk", 33, 32),
    ("several chunks", 101, 32),
    ("chunk no multiple of the block", 101, 25),
    ("chunks end in the middle of blocks", 101, 7),
    ("a block per chunk", 96, 16),
    ("a token per chunk", 40, 1),
)
print(f"{'case':36}prompt  chunk  pieces   within 1e-4   same token")
for case, length, size in CASES:
    pieces = [size] * (length // size) + [length % size] * (length % size > 0)
    whole, cut = last_logits(prompt[:length], [length]), last_logits(prompt[:length], pieces)
    close, same = bool((whole - cut).abs().max() < 1e-4), bool(whole.argmax() == cut.argmax())
    print(f"{case:36}{length:6}{size:7}{len(pieces):8}   {close!s:>11}   {same!s:>10}")
    assert close and same

# %% [markdown]
# And pieces of any sizes, because a scheduler gives what is left of its budget, which is never a round number. The
# cuts are drawn at random:

# %% name="random-cuts"
import random

rng = random.Random(7)
whole = last_logits(prompt, [len(prompt)])
for _ in range(6):
    cuts = sorted(rng.sample(range(1, len(prompt)), 4))
    pieces = [b - a for a, b in zip([0, *cuts], [*cuts, len(prompt)])]
    cut = last_logits(prompt, pieces)
    assert (whole - cut).abs().max() < 1e-4
    print(f"{pieces!s:26} within 1e-4")

# %% [markdown]
# Would such a table have found the mistake at the beginning of this lesson? The same cases, with `Restart`, against the
# prompt in one piece:

# %% name="restart-found"
print(f"{'case':36}prompt  chunk  pieces   within 1e-4")
found = 0
for case, length, size in CASES:
    pieces = [size] * (length // size) + [length % size] * (length % size > 0)
    whole = last_logits(prompt[:length], [length])
    cut = last_logits(prompt[:length], pieces, runner=Restart(model))
    close = bool((whole - cut).abs().max() < 1e-4)
    found += not close
    print(f"{case:36}{length:6}{size:7}{len(pieces):8}   {close!s:>11}")
assert 0 < found < len(CASES)
print(f"\nThe mistake shows in {found} of {len(CASES)} cases.")

# %% [markdown]
# Not in every case, and that is why there are several: a prompt that fits into one chunk has nothing to restart, and
# `Restart` leaves chunks of a single token alone. Take such a table to any engine that you don't trust.
#
# ## One flat batch for everybody
#
# A step holds more than one chunk. Three people read along while a document is in the middle of its prompt and a note
# begins and ends in this very step. The model runs **once**. So all their tokens lie in one flat batch, one request
# after the other, and a few lists say what is whose:

# %% name="batch-source"
from course_lib.batch import Batch, build_batch
from course_lib.lab import source

source(Batch, mark=("query_start_loc  [S+1]", "sample_rows      [R]"), last="sampled          [R]")

# %% [markdown]
# Let the real engine plan that step, and stop before the model runs. Blocks have 4 tokens, a chunk has at most 12.
#
# > **Predict, then run.** Ana, Ben and Chen decode. The document's tokens 12 to 23 of 30 are computed, and all 10 of the
# > note. That is 25 tokens of five requests. How many tokens come out of this step, and from which row of the flat
# > batch (the first is 0) comes the note's?

# %% name="guess-rows"
my_guess_tokens_out = 5  # write yours
my_guess_row_of_the_note = 4  # write yours

# %% name="flat-batch"
from course_lib.lab import show
from course_lib.lab.flat_batch import flat_batch, flat_batch_alt
from course_lib.runners import FakeRunner

plans = []
config = EngineConfig(block_size=4, num_blocks=32, max_prefill_chunk_size=12, enable_prefix_caching=False)
engine = Engine(FakeRunner(), config, on_step=lambda output: plans.append(build_batch(output)))
engine.block_manager.shuffle_free_blocks(seed=5)  # as in a pool that has been in use
for name, length in (("Ana", 5), ("Ben", 7), ("Chen", 9)):
    engine.add_request([1] * length, SamplingParams(max_tokens=8), request_id=name)
engine.step()
engine.add_request([2] * 30, SamplingParams(max_tokens=8), request_id="document")
engine.step()
engine.add_request([3] * 10, SamplingParams(max_tokens=8), request_id="note")
outputs = engine.step()

batch = plans[-1]
print(f"tokens out of this step: {len(outputs)}; the note's comes from row {batch.sample_rows[-1]}")
print(f"You said: {my_guess_tokens_out}, and row {my_guess_row_of_the_note}.")
title = "step 2: three decodes, one chunk in the middle of a prompt, one whole prompt"
show(flat_batch(batch, title=title), flat_batch_alt(batch))

# %% [markdown]
# Read the picture line by line.
#
# - **position**: each request counts its own tokens, in its whole sequence. The document goes on at 12.
# - **slot**: where the K/V is written. Neighbours in the row aren't neighbours in memory when a block ends between them.
# - **query_start_loc**: the borders, one more than there are requests. Request *s* has the rows from
#   `query_start_loc[s]` to just before `query_start_loc[s + 1]`. Attention keeps within them: nobody reads another
#   request's tokens, although they lie side by side.
# - **sample_rows**: the diamonds. Each decode has one, each *last* chunk has one at its last row. The document has none.
#
# The head of the model, a product with the whole vocabulary, is computed for the sampled rows alone: 4 rows here, not
# 25. Two more lists are not in the picture, the block table of each request and how much context each has:

# %% name="tables"
for sequence, table, context in zip(batch.sequences, batch.block_tables, batch.context_lens):
    print(f"{sequence.request_id:>9}: attends to {context:2} tokens in the blocks {table}")

# %% [markdown]
# ## Whose row is it?
#
# One more wrong answer, because it passes every test that has a single request in it. *The last row of the batch gives
# the token.* With one request in the batch, that is right.
#
# > **Predict, then run.** Five people ask five questions at once, and everybody is given the last row's token, in every
# > step. What will the first of them read?

# %% name="guess-last-row"
my_guess = "..."  # write yours

# %% name="last-row"
class LastRow(ModelRunner):
    def forward(self, batch):
        return super().forward(replace(batch, sample_rows=[len(batch.token_ids) - 1] * len(batch.sample_rows)))


QUESTIONS = (
    "What is the capital of France?",
    "Write a poem about the sea.",
    "What is 2 + 2?",
    "Explain how a bicycle works.",
    "What colour is the sky?",
)
prompts = [demo.chat_prompt(runner.tokenizer, question) for question in QUESTIONS]
config = EngineConfig(num_blocks=64, max_prefill_chunk_size=16, enable_prefix_caching=False)
for word, count in (("alone", 1), ("together", 5)):
    engine = Engine(LastRow(model), config)
    outputs = engine.generate(prompts[:count], SamplingParams(max_tokens=12), progress=False)
    for question, output in zip(QUESTIONS, outputs):
        print(f"{word:9}  {question:31} {output.text}")
print(f"\nYou said: {my_guess!r}")

# %% [markdown]
# Everybody gets the answer to the last one's question. In a real service that would be a breach of privacy, and every
# test with one request was green. Test with company: two chunks and three decodes in one step find what one request never will.
#
# ## After the forward pass
#
# The runner returns one sample per sampled row, and the engine hands each to its owner. `sampled` is the batch's list of
# owners; who stands in it was decided when the chunks were planned, by comparing a chunk's end with the tokens that are
# known.

# %% name="samples"
source(Engine._take_samples, mark=("zip(sampled", "generated.append"), first="zip(sampled", last="generated.append")

# %% [markdown]
# If the chunk doesn't complete the prompt: the counter has moved (lesson 06), no sample, no output. If it does: a token
# from its last row, the state RUNNING, an output.
#
# ## The rule
#
# > **A chunk is computed as if it had never been cut out, with positions, slots and context by its place in the whole
# > sequence, and only the last row of the last chunk gives a token.**
#
# ## Your turn
#
# [Exercise 07](../exercises/07_prefill_chunk.ipynb): lay out a step as one flat batch, and run one chunk of one request.
# Both compute in the real engine.
#
# ## What production does
#
# - The flat batch is how vLLM, SGLang and FlashAttention's variable-length interface do it; `cu_seqlens_q` there is our
#   `query_start_loc`. In vLLM, `_prepare_inputs()` of `vllm/v1/worker/gpu_model_runner.py` builds it: positions are each
#   request's `num_computed_tokens` plus its offset in the step, and `logits_indices` are the sampled rows.
# - vLLM does sample the last row of an unfinished prompt, and throws the token away afterwards (`discard_request_mask`):
#   on a GPU it is easier to have a row for everybody. Ours has no such row, so there is nothing to forget.
# - SGLang calls a chunk an *extend*; a batch that holds chunks and decodes has the mode `MIXED`.
#
# ## Three questions
#
# 1. Prompt 10, chunks of 5, one token to generate. How many steps, and in which is the token sampled?
#
#    <details><summary>Answer</summary>
#
#    Two, and in the second. The chunk that completes the prompt also gives the first token: its last row has seen all of
#    the prompt. A third step would be for a second token.
#
#    </details>
#
# 2. `query_start_loc` of a step is `[0, 1, 2, 258]`, `sample_rows` is `[0, 1]`. What do you know about the step?
#
#    <details><summary>Answer</summary>
#
#    Three requests. Two have one token each (decodes, most likely) and get their next token. The third has a chunk of 256
#    tokens and isn't done with its prompt.
#
#    </details>
#
# 3. Somebody tests chunked prefill with prompt 1,024, chunk 256, block 16, alone, and finds the same tokens. What may
#    still be wrong?
#
#    <details><summary>Answer</summary>
#
#    Everything that needs a chunk border inside a block (256 is a multiple of 16), a last chunk that is shorter than the
#    others, or a second request in the batch: slots by local index, rounding, borders, sampled rows.
#
#    </details>
#
# **Lesson 08** decides how long a chunk is, and who gets it: a scheduler that spends three budgets.

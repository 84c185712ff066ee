# %% [markdown]
# # Exercises 07 · The chunk
#
# Two exercises to [lesson 07](../notebooks/07_prefill_chunk.ipynb): lay out a step as one flat batch, and run one chunk of
# one request on a real model. Run the set-up cell first; then every exercise works by itself.

# %% name="set-up"
import torch
from IPython.display import display

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, demo, load_model
from course_lib.batch import Batch
from course_lib.block_manager import BlockManager
from course_lib.checks import NotDone, check, plug
from course_lib.lab import show
from course_lib.lab.flat_batch import flat_batch, flat_batch_alt
from course_lib.runners import FakeRunner
from course_lib.sequence import Sequence
from course_lib.slots import slot_mapping

tiny = load_model("tiny")  # brings transformers along, which takes a few seconds the first time

# %% [markdown] name="task-07-1"
# ## 07.1 One flat batch
#
# The scheduler says who gets which tokens. Write `build_batch()`, which lays them side by side in one flat batch and says
# what is whose: positions, slots, borders, and the rows that give a token.
#
# ```text
# blocks of 4
#   Ana        decodes                   block table [6]
#   document   tokens 4-7 of 10          block table [2, 0]
#   note       all of its 3 tokens       block table [5]
#
#                   Ana   document          note
# row                 0 |   1   2   3   4 |   5   6   7 |
# positions           2 |   4   5   6   7 |   0   1   2 |
# slot_mapping       26 |   0   1   2   3 |  20  21  22 |
# query_start_loc     0     1                 5             8
# context_lens        3     8                 3
# sample_rows       ◆ 0                             ◆ 7
#                         none of the document: it isn't done
# ```

# %% name="your-07-1"
def build_batch(output, slot_mapping=slot_mapping) -> Batch:
    """Lay out the chunks of a step. T tokens in all, S chunks, R rows to sample. Changes nothing that it is given.

    output.block_size   tokens a block
    output.chunks       each has .sequence, .start_pos, .num_tokens, and .is_last: its end is the last known token
    chunk.sequence      .token_ids(start, count) gives its known tokens from a position on; .block_table
    slot_mapping(block_table, start_pos, num_tokens, block_size)    the slots of lesson 03

    Returns a Batch with
        token_ids, positions, slot_mapping   [T]    chunk after chunk; a position counts in the whole sequence
        block_tables                         [S]    each chunk's sequence's
        context_lens                         [S]    tokens that the chunk's last token can attend to, with itself
        query_start_loc                      [S+1]  the row where each chunk begins, and at the end T
        sample_rows, sampled                 [R]    rows that give a token, and the sequences that get it
    """
    row, where, slots = [], [], []  # [T] token ids, positions, slots
    tables, contexts, borders = [], [], [0]  # [S], [S], [S+1]
    rows, takers = [], []  # [R] rows to sample, and whose they are
    ### BEGIN SOLUTION
    for chunk in output.chunks:
        owner, begin, count = chunk.sequence, chunk.start_pos, chunk.num_tokens
        row.extend(owner.token_ids(begin, count))
        where.extend(range(begin, begin + count))
        slots.extend(slot_mapping(owner.block_table, begin, count, output.block_size))
        borders.append(len(row))
        tables.append(list(owner.block_table))
        contexts.append(begin + count)
        if chunk.is_last:
            rows.append(len(row) - 1)
            takers.append(owner)
    ### END SOLUTION
    return Batch(
        token_ids=row,
        positions=where,
        slot_mapping=slots,
        block_tables=tables,
        context_lens=contexts,
        query_start_loc=borders,
        sample_rows=rows,
        sampled=takers,
        sequences=[chunk.sequence for chunk in output.chunks],
        block_size=output.block_size,
    )


# %% name="check-07-1"
check("07.1", build_batch)

# %% [markdown] name="hints-07-1"
# <details><summary>Hint 1: the rule</summary>
#
# Two kinds of numbers meet here. What says *which token of the sequence* (position, slot, context) counts in the
# sequence. What says *which row* (borders, rows to sample) counts in the flat batch.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Two requests, 3 tokens each, both with their last chunk. If you sample the last row of the batch twice, the first
# request gets the second one's token, and with a single request you never notice.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Start with empty lists and the border 0. For each chunk: its tokens, its positions from start to end, its slots; then the
# length of the batch so far is the next border. If it is the chunk that reaches the last known token, the last row
# just laid is one to sample.
#
# </details>

# %% name="run-07-1" tags=["needs-your-code"]
# Your layout in the real engine: three people decode, a document is in the middle of its prompt, a note comes and goes.
plans = []


def keep(output):
    plans.append(build_batch(output))


config = EngineConfig(block_size=4, num_blocks=64, max_prefill_chunk_size=12, enable_prefix_caching=False)
with plug(build_batch=build_batch):
    engine = Engine(FakeRunner(), config, on_step=keep)
    arrivals = {0: {"Ana": 5, "Ben": 7, "Chen": 9}, 1: {"document": 30}, 2: {"note": 10}}
    tokens, step = {}, 0
    while step < 3 or engine.has_unfinished_requests():
        for name, length in arrivals.get(step, {}).items():
            engine.add_request([len(name)] * length, SamplingParams(max_tokens=6), request_id=name)
        for out in engine.step():
            tokens[out.request_id] = out.token_ids
        step += 1

lengths = {name: length for group in arrivals.values() for name, length in group.items()}
display(show(flat_batch(plans[2], title="your flat batch, step 2"), flat_batch_alt(plans[2])))
wrong = [name for name, length in lengths.items() if tokens[name] != FakeRunner().solo([len(name)] * length, 6)]
assert not wrong, f"other tokens than alone: {', '.join(wrong)}"
print("five requests, in company, and each got the tokens that it would have got alone")

# %% [markdown] name="task-07-2"
# ## 07.2 `run_prefill_chunk`
#
# Write the entry that computes one chunk of one request on a real model: a batch of one, which you hand to `runner.forward`. If the
# chunk completes the prompt, return the logits of its last token; if not, there is nothing to return.
#
# ```text
# prompt of 10 tokens, blocks of 4, block table [3, 1, 2]
#
# tokens  start_pos  positions  slots           attends to  returns
#  0-3        0       0 … 3     12 13 14 15      4 tokens   None
#  4-8        4       4 … 8      4  5  6  7  8   9 tokens   None
#   9         9       9          9              10 tokens   logits
#
# logits: those of token 9, a row [vocab]
# ```

# %% name="your-07-2"
def run_prefill_chunk(runner, sequence, chunk_token_ids, start_pos):
    """Compute the tokens start_pos … of one sequence. Their K/V is stored on the way; no counter moves.

    runner.forward(batch)            one forward pass; returns the logits of batch.sample_rows, a tensor [R, vocab]
    Batch(...)                       takes the ten fields of 07.1; slot_mapping(...) is the function used there
    runner.kv_cache.block_size       tokens a block
    sequence.block_table             covers the chunk already
    sequence.known_token_count       the prompt's length here

    Returns the logits [vocab] of the last token if the chunk reaches the last known token of the sequence, else None.
    """
    ### BEGIN SOLUTION
    size, count = runner.kv_cache.block_size, len(chunk_token_ids)
    stop = start_pos + count
    completes = stop == sequence.known_token_count
    batch = Batch(
        token_ids=list(chunk_token_ids),
        positions=list(range(start_pos, stop)),
        slot_mapping=slot_mapping(sequence.block_table, start_pos, count, size),
        block_tables=[list(sequence.block_table)],
        context_lens=[stop],
        query_start_loc=[0, count],
        sample_rows=[count - 1] if completes else [],
        sequences=[sequence],
        sampled=[sequence] if completes else [],
        block_size=size,
    )
    logits = runner.forward(batch)
    return logits[0] if completes else None
    ### END SOLUTION


# %% name="check-07-2"
check("07.2", run_prefill_chunk)

# %% [markdown] name="hints-07-2"
# <details><summary>Hint 1: the rule</summary>
#
# A chunk is computed as if it had never been cut out. Everything about its tokens goes by their place in the whole
# sequence; only its rows are counted from 0.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# The chunk with the tokens 4 to 8 of 10. Its first token has the position 4, and its context begins at token 0. Its
# last row predicts token 9, which the user has written already.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Where does the chunk end, and is that the end of what is known? Fill in a Batch with one sequence: borders 0 and the
# length; one row to sample, or none. Run it. Return its one row of logits, or None.
#
# </details>

# %% name="run-07-2" tags=["needs-your-code"]
# Your entry on SmolLM2: the same question in one piece and in pieces, first token by first token.
runner = ModelRunner(load_model("smollm2"))
text = "The trip goes to the city of Lisbon. Tom will buy the tickets.\n\nWhich city does the trip go to?"
prompt = demo.chat_prompt(runner.tokenizer, text)


def in_pieces(size):
    runner.init_kv_cache(num_blocks=16, block_size=16)
    blocks, sequence = BlockManager(16, 16), Sequence("r", prompt)
    blocks.shuffle_free_blocks(seed=1)
    results = []
    for start in range(0, len(prompt), size):
        piece = prompt[start : start + size]
        blocks.allocate(sequence, start + len(piece))
        results.append(runner.run_prefill_chunk(sequence, piece, start_pos=start))
    return results


with plug(run_prefill_chunk=run_prefill_chunk), torch.inference_mode():
    [whole] = in_pieces(len(prompt))
    print(f"prompt of {len(prompt)} tokens; ▒ a chunk that gives nothing, ◆ the one that gives a token")
    for size in (len(prompt), 40, 16, 7):
        results = in_pieces(size)
        drawn = "".join("▒" if logits is None else "◆" for logits in results)
        close = bool((results[-1] - whole).abs().max() < 1e-4)
        token = runner.tokenizer.decode([int(results[-1].argmax())])
        print(f"chunks of {size:2}  {drawn:<12} first token {token!r}, logits within 1e-4: {close}")
        assert close, f"in chunks of {size} the logits are others than in one piece"

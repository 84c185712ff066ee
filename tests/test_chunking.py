"""Chunked prefill changes when tokens are computed, never which tokens come out.

Every prompt length around a block border × every chunk size × every block size, alone and in
company. Before every step all free slots hold garbage, and free blocks come in a random order.
"""

import random

import pytest
from helpers import RecordingRunner, Watch, is_idle, limit, make_engine, prompt, step

from course_lib.slots import slot_mapping as right

PROMPTS = (1, 15, 16, 17, 31, 32, 33, 100)  # around one and two blocks of 16, and many blocks
CHUNKS = (1, 7, 16, 25, 33, None)  # None: whole prompts
BLOCKS = (1, 4, 16)
NEW_TOKENS = 5


def run_poisoned(engine, seed, later=()):
    """Run to the end over poisoned free slots; `later`: (step, request) to add on the way. All terminal outputs."""
    rng = random.Random(seed)
    ended, number = {}, 0
    later = list(later)
    while later or engine.has_unfinished_requests():
        while later and later[0][0] <= number:
            _, (name, tokens, count) = later.pop(0)
            engine.add_request(tokens, limit(count), request_id=name)
        engine.block_manager.shuffle_free_blocks(rng.randrange(1 << 30))
        engine.runner.poison(engine.block_manager.free_blocks(), engine.config.block_size)
        ended |= {output.request_id: output for output in step(engine) if output.finished}
        number += 1
        assert number < 2000
    assert is_idle(engine)
    return ended


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPTS)
def test_a_chunked_prompt_alone_gives_the_same_tokens(length, chunk, block_size):
    engine = make_engine(
        RecordingRunner(), block_size=block_size, num_blocks=128 // block_size, max_prefill_chunk_size=chunk,
        enable_prefix_caching=False,
    )  # fmt: skip
    tokens = prompt(length, length)
    engine.add_request(tokens, limit(NEW_TOKENS), request_id="A")
    output = run_poisoned(engine, seed=length)["A"]
    assert output.token_ids == engine.runner.solo(tokens, NEW_TOKENS)
    calls = [(start, count) for call in engine.runner.calls for _, start, count in call]
    size = length if chunk is None else chunk
    prefill = [(start, min(size, length - start)) for start in range(0, length, size)]
    assert calls == prefill + [(length + i, 1) for i in range(NEW_TOKENS - 1)]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPTS)
def test_a_chunked_prompt_in_company_gives_the_same_tokens(length, chunk, block_size, prefix_caching):
    # One request decodes already, one prefills beside it, one begins like it, one comes later. The
    # pool of 192 tokens doesn't hold them all at their longest, so some are preempted.
    engine = make_engine(
        block_size=block_size, num_blocks=192 // block_size, max_num_seqs=6, max_prefill_chunk_size=chunk,
        max_num_batched_tokens=110, enable_prefix_caching=prefix_caching,
    )  # fmt: skip
    Watch(engine)
    tokens = prompt(length, length)
    requests = [
        (0, ("decoding", prompt(3, 1), 40)),
        (1, ("beside", prompt(60, 2), 7)),
        (1, ("A", tokens, NEW_TOKENS)),
        (2, ("alike", tokens[: length // 2] + prompt(20, 3), 8)),
        (4, ("later", prompt(45, 4), 3)),
        (6, ("same", tokens, NEW_TOKENS)),
    ]
    ended = run_poisoned(engine, seed=length, later=requests)
    for _, (name, request_tokens, count) in requests:
        assert ended[name].token_ids == engine.runner.solo(request_tokens, count), name


@pytest.mark.parametrize("chunk", [c for c in CHUNKS if c])
@pytest.mark.parametrize("budget", [4, 13])
def test_chunks_that_the_budget_cuts_again_give_the_same_tokens(chunk, budget):
    engine = make_engine(
        block_size=4, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=budget, max_prefill_chunk_size=chunk
    )
    requests = [(i, (str(i), prompt(length, i), 4)) for i, length in enumerate((33, 17, 100, 1, 16))]
    ended = run_poisoned(engine, seed=budget, later=requests)
    for _, (name, tokens, count) in requests:
        assert ended[name].token_ids == engine.runner.solo(tokens, count)


def test_the_oracle_sees_what_it_should():
    """The tests above are worth something only if FakeRunner's output changes with every kind of mistake."""
    def tokens_with(slot_mapping=right, spoil=None):
        class Runner(RecordingRunner):
            def execute(self, batch):
                if spoil:
                    spoil(batch)
                return super().execute(batch)

        engine = make_engine(
            Runner(), parts={"slot_mapping": slot_mapping}, block_size=4, num_blocks=16, max_prefill_chunk_size=7
        )
        engine.block_manager.shuffle_free_blocks(5)
        engine.runner.poison(engine.block_manager.free_blocks(), 4)
        engine.add_request(prompt(20), limit(4), request_id="A")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs[-1].token_ids

    solo = make_engine().runner.solo(prompt(20), 4)
    assert tokens_with() == solo

    def local_index(table, start, count, size):  # the chunk's index instead of the sequence's
        return right(table, 0, count, size)

    def offset_twice(table, start, count, size):  # past the first chunk
        return right(table * 3, 2 * start, count, size)

    def shift_positions(batch):
        batch.positions[:] = [p - batch.positions[0] for p in batch.positions]

    def swap_tokens(batch):
        batch.token_ids[:] = batch.token_ids[::-1]

    def short_context(batch):
        batch.context_lens[:] = [n - 1 for n in batch.context_lens]

    def swap_blocks(batch):
        batch.block_tables[:] = [table[::-1] for table in batch.block_tables]

    assert tokens_with(local_index) != solo
    assert tokens_with(offset_twice) != solo
    for spoil in (shift_positions, swap_tokens, short_context, swap_blocks):
        assert tokens_with(spoil=spoil) != solo, spoil.__name__

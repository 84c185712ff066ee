"""From the scheduler's decision to what a forward pass needs: one flat row of tokens.

Prefill chunks and decodes lie side by side in the row; a decode is a chunk of one token.
Names and layout are those of vLLM and of FlashAttention's variable-length interface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import NamedTuple

from .cost_model import StepWork, count_work
from .scheduler import SchedulerOutput, columns_of
from .sequence import Sequence
from .slots import slot_mapping as default_slot_mapping

SlotMapping = Callable[[list[int], int, int, int], list[int]]


@dataclass
class Batch:
    """One step's work. T tokens in all, S scheduled sequences, R rows to sample.

    token_ids        [T]   input tokens, chunk after chunk
    positions        [T]   index of each token in its own sequence
    slot_mapping     [T]   slot where the token's K/V is written
    block_tables     [S]   physical blocks of each sequence (a list of their own lengths)
    context_lens     [S]   tokens each sequence can attend to: cached ones and this chunk
    query_start_loc  [S+1] chunk s is rows query_start_loc[s] … query_start_loc[s + 1] - 1
    sample_rows      [R]   rows whose logits give a token: the last row of last chunks and decodes
    sequences        [S]   the scheduled sequences
    sampled          [R]   the sequences of sample_rows
    """

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    block_tables: list[list[int]]
    context_lens: list[int]
    query_start_loc: list[int]
    sample_rows: list[int]
    sequences: list[Sequence]
    sampled: list[Sequence]
    block_size: int

    @property
    def work(self) -> StepWork:
        """What there is to compute, counted."""
        sizes = [end - start for start, end in pairwise(self.query_start_loc)]
        starts = [length - size for length, size in zip(self.context_lens, sizes, strict=True)]
        rows = set(self.sample_rows)
        return count_work(starts, sizes, [end - 1 in rows for end in self.query_start_loc[1:]])


class Sample(NamedTuple):
    """The token chosen for one row of `Batch.sample_rows`.

    logprobs: {token id: log-probability} when the request asked for it, else None.
    error: why no token could be chosen for this request; it then ends with reason "error".
    """

    token_id: int
    logprobs: dict[int, float] | None = None
    error: str | None = None


class CountedBatch(NamedTuple):
    """One step's work for a runner that computes nothing (`reads_tokens = False`): how much there is, and whose tokens it gives.

    sampled [R] as in Batch
    """

    work: StepWork
    sampled: list[Sequence]


def count_batch(output: SchedulerOutput) -> CountedBatch:
    """Count the scheduled chunks instead of laying them out."""
    sequences, starts, sizes, _, is_last = columns_of(output.chunks)
    return CountedBatch(count_work(starts, sizes, is_last), list(compress(sequences, is_last)))


def build_batch(output: SchedulerOutput, slot_mapping: SlotMapping = default_slot_mapping) -> Batch:
    """Lay out the scheduled chunks as one batch. Pure: changes neither `output` nor the sequences.

    An intermediate chunk has no row in `sample_rows`: it is never sampled, not even to throw the
    token away. `slot_mapping(block_table, start_pos, num_tokens, block_size)` can be your own.
    """
    block_size = output.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc, context_lens, block_tables, sequences = [0], [], [], []
    sample_rows, sampled = [], []
    for sequence, start, num_tokens, _kind, is_last in output.chunks:
        end = start + num_tokens
        table = sequence.block_table
        token_ids += sequence.token_ids(start, num_tokens)
        positions += range(start, end)
        slots += slot_mapping(table, start, num_tokens, block_size)
        query_start_loc.append(len(token_ids))
        context_lens.append(end)
        block_tables.append(table.copy())
        sequences.append(sequence)
        if is_last:
            sample_rows.append(len(token_ids) - 1)
            sampled.append(sequence)
    return Batch(
        token_ids, positions, slots, block_tables, context_lens, query_start_loc, sample_rows, sequences, sampled, block_size
    )

"""How long a step takes on a chip, from what it computes: the roofline.

    seconds = fixed + max(FLOPs / rate, bytes / bandwidth)

    FLOPs   2 × weights of the layers per token
          + 2 × weights of the head per row that is sampled
          + 4 × heads × head_dim × layers per (query, key) pair under the causal mask
    bytes   the weights, once a step
          + K/V of the whole context of every scheduled sequence, read
          + K/V of every token of the step, written

Arithmetic intensity, FLOPs / bytes, decides which side is longer. A decode step reads all weights to compute a
few tokens: memory bounds it. A chunk uses the same weights for a thousand tokens: computing bounds it. In a step
with both, the weights are read once, and the memory traffic of the decodes hides behind the computing of the
chunk: 128 decodes beside a chunk of 1,024 cost little more than their 128 tokens' share of the FLOPs.
(S. Williams et al., "Roofline", 2009; for decode and prefill: Agrawal et al., Sarathi-Serve, 2024, section 3.)

Left out: activations (on Llama-3-8B less than a tenth of the bytes of a decode step), the embedding lookup, and
that a matrix product of few rows runs below the chip's rate, except as far as memory bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .columns import Columns
from .hardware import Chip, ModelShape


class StepWork(NamedTuple):
    """What a step computes, counted.

    tokens   in the flat row: of all chunks and decodes
    rows     sampled: last chunks and decodes
    pairs    (query, key) pairs under the causal mask
    context  tokens whose K/V is read: of every scheduled sequence, this step's own included
    """

    tokens: int
    rows: int
    pairs: int
    context: int


def pairs_of(num_tokens: int, context_len: int) -> int:
    """(query, key) pairs of a chunk of `num_tokens` that ends at `context_len`: each token sees all before it and itself."""
    return num_tokens * context_len - num_tokens * (num_tokens - 1) // 2


def work_of(chunks: Iterable) -> StepWork:
    """Counts the work of ScheduledChunks or of a trace's ChunkRecords."""
    columns = chunks.columns if isinstance(chunks, Columns) else [*zip(*chunks, strict=True)] or [()] * 5
    _, starts, sizes, _, is_last = columns
    return count_work(starts, sizes, is_last)


def count_work(starts: Sequence[int], sizes: Sequence[int], is_last: Sequence[bool]) -> StepWork:
    """The same from the chunks' columns: where each begins, how many tokens it has, whether its last row is sampled."""
    tokens = sum(sizes)
    context = pairs = sum(starts) + tokens  # a chunk of one token sees its whole context
    if sizes.count(1) < len(sizes):
        pairs = sum(pairs_of(size, start + size) for start, size in zip(starts, sizes, strict=True))
    return StepWork(tokens, sum(is_last), pairs, context)


class StepCost(NamedTuple):
    """A step's price, in FLOPs, bytes and seconds."""

    flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def bound(self) -> str:
        """Which side the step waits for: "compute" or "memory"."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def step_cost(model: ModelShape, chip: Chip, work: StepWork) -> StepCost:
    """What the step costs on the chip; `.seconds` is its time."""
    head = model.head_parameters if work.rows else 0
    flops = (
        2 * model.linear_parameters * work.tokens
        + 2 * model.head_parameters * work.rows
        + model.attention_flops_per_pair * work.pairs
    )
    values = model.linear_parameters + head + model.kv_values_per_token * (work.context + work.tokens)
    nbytes = values * chip.bytes_per_value
    compute, memory = flops / chip.flops, nbytes / chip.bandwidth
    longer = max(compute, memory) if chip.overlap else compute + memory
    return StepCost(flops, nbytes, compute, memory, chip.fixed_seconds + longer)


@dataclass(frozen=True)
class RooflineCost:
    """The roofline of one model on one chip."""

    model: ModelShape
    chip: Chip

    def seconds(self, work: StepWork) -> float:
        return step_cost(self.model, self.chip, work).seconds

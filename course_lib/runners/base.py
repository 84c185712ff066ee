"""The contract between the engine and whatever computes a step."""

from __future__ import annotations

from typing import Protocol

from ..batch import Batch, Sample


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of transformers fit."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Runner(Protocol):
    """Computes batches. One runner serves one engine at a time.

    A runner with KV memory of its own also has `init_kv_cache(num_blocks, block_size)`, which the
    engine calls once, when it is made. One that knows how much of it there is also has
    `blocks_that_fit(config) -> int`: the size of the pool for EngineConfig(num_blocks=None).
    One that computes nothing says `reads_tokens = False`, and gets CountedBatches: no tokens, no tables.
    """

    vocab_size: int
    max_model_len: int  # most tokens of one request that it can take
    tokenizer: Tokenizer | None

    def execute(self, batch: Batch) -> list[Sample]:
        """Run one forward pass; one Sample per row of `batch.sample_rows`, in that order."""
        ...

    def now(self) -> float:
        """Seconds, from any fixed start: wall clock, or virtual in a simulation."""
        ...

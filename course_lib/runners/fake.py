"""FakeRunner: a model without a network, whose output depends on everything that can go wrong.

What it stores in a slot is a hash of (what the slot of the token before holds, token, position),
so like real K/V it depends on everything before it. The next token is a hash of all that it reads
back through the block table. A wrong slot, position, table, order or border, or a block adopted
behind the wrong prefix, changes the output.
"""

from __future__ import annotations

from ..batch import Batch, Sample

_MASK = (1 << 61) - 1


def _store(before: int, token_id: int, position: int) -> int:
    """What a slot holds. (Hashes of integers are the same in every Python process.)"""
    return hash((before, token_id, position)) & _MASK


class FakeRunner:
    """The oracle: no torch, about 0.02 µs per token of context read.

    `solo(prompt, n)` says what a request must produce. `calls` records, per execute, a list of
    (request id, start position, tokens). Its clock is virtual: each call takes `step_seconds`.
    `fail_at`: numbers of the calls (from 0) that raise a RuntimeError instead.
    """

    tokenizer = None

    def __init__(
        self,
        vocab_size: int = 32000,
        max_model_len: int = 1 << 20,
        step_seconds: float = 1.0,
        fail_at: set[int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.fail_at = fail_at or set()
        self.calls: list[list[tuple[str, int, int]]] = []
        self.num_calls = 0
        self._time = 0.0
        self.kv_cache: list[int] = []

    def init_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Memory of num_blocks × block_size slots; an unwritten slot holds -1."""
        self.kv_cache = [-1] * (num_blocks * block_size)

    def poison(self, blocks: list[int], block_size: int) -> None:
        """Overwrite blocks that nobody should read."""
        for block in blocks:
            self.kv_cache[block * block_size : (block + 1) * block_size] = [-7 - block] * block_size

    def execute(self, batch: Batch) -> list[Sample]:
        self.num_calls += 1
        if self.num_calls - 1 in self.fail_at:
            raise RuntimeError(f"FakeRunner was told to fail at call {self.num_calls - 1}")
        self._time += self.step_seconds
        starts, size, memory = batch.query_start_loc, batch.block_size, self.kv_cache
        self.calls.append(
            [
                (sequence.request_id, batch.positions[row], starts[s + 1] - row)
                for s, (sequence, row) in enumerate(zip(batch.sequences, starts, strict=False))
            ]
        )
        samples = []
        rows_to_sample = set(batch.sample_rows)
        for s, table in enumerate(batch.block_tables):
            for row in range(starts[s], starts[s + 1]):
                position = batch.positions[row]
                before = position - 1
                seen = memory[table[before // size] * size + before % size] if position else 0
                memory[batch.slot_mapping[row]] = _store(seen, batch.token_ids[row], position)
            if row in rows_to_sample:
                token_id = self._next_token(self._read(table, batch.context_lens[s], size))
                asked = batch.sequences[s].params.logprobs is not None
                samples.append(Sample(token_id, {token_id: 0.0} if asked else None))  # it is certain of its token
        return samples

    def now(self) -> float:
        return self._time

    def advance_to(self, time: float) -> None:
        """Let the virtual clock jump forward, as a driver does while nothing is there to compute."""
        self._time = max(self._time, time)

    def solo(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The `num_tokens` tokens that a request with this prompt must produce, however it is scheduled."""
        context: list[int] = []
        tokens = list(prompt)
        while True:
            for position in range(len(context), len(tokens)):
                context.append(_store(context[-1] if context else 0, tokens[position], position))
            if len(tokens) == len(prompt) + num_tokens:
                return tokens[len(prompt) :]
            tokens.append(self._next_token(context))

    def _read(self, table: list[int], context_len: int, size: int) -> list[int]:
        context: list[int] = []
        for block in table[: -(-context_len // size)]:
            context += self.kv_cache[block * size : (block + 1) * size]
        return context[:context_len]

    def _next_token(self, context: list[int]) -> int:
        return hash(tuple(context)) % self.vocab_size

"""What the engine gives back: a request's output of one step, its state, and the iterator over its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .sequence import FINISHED, Sequence


@dataclass
class RequestOutput:
    """What a step brought to one request. Times in seconds on the runner's clock.

    new_token_ids and new_text are this step's; token_ids, text and logprobs are all up to now.
    finish_reason: stop (end-of-sequence, stop token or stop string), length, cancelled or error.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    text: str
    finished: bool
    finish_reason: str | None
    num_cached_tokens: int  # prompt tokens that the prefix cache gave
    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    error: str | None
    _generated: list[int] = field(repr=False)
    _logprobs: list[dict[int, float]] | None = field(repr=False)
    _num_generated: int = field(repr=False)

    @classmethod
    def of(cls, s: Sequence, new_token_ids: list[int], new_text: str, error: str | None = None) -> RequestOutput:
        return cls(
            s.request_id, new_token_ids, new_text, "" if s.detokenizer is None else s.detokenizer.text,
            s.status is FINISHED, s.finish_reason, s.prefix_hit_tokens,
            s.arrival_time, s.first_token_time, s.finish_time, error,
            s.generated_token_ids, None if s.params.logprobs is None else s.logprobs, len(s.generated_token_ids),
        )  # fmt: skip

    @property
    def token_ids(self) -> list[int]:
        """All tokens generated up to this output."""
        return self._generated[: self._num_generated]

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Per generated token {token id: log-probability}; None when the request didn't ask for them."""
        return None if self._logprobs is None else self._logprobs[: self._num_generated]


@dataclass(frozen=True)
class RequestState:
    """What `Engine.snapshot()` says of an unfinished request; `reason`: why the last step gave it nothing."""

    status: str
    prompt_tokens: int
    prefilled_token_count: int
    cached_token_count: int
    generated_tokens: int
    block_table: list[int]
    num_preemptions: int
    reason: str | None

    @classmethod
    def of(cls, s: Sequence, reason: str | None) -> RequestState:
        return cls(
            s.status.name, len(s.prompt_token_ids), s.prefilled_token_count, s.cached_token_count,
            len(s.generated_token_ids), list(s.block_table), s.num_preemptions, reason,
        )  # fmt: skip


class Stream:
    """Iterates over one request's outputs, stepping the engine as needed; see `Engine.stream`."""

    def __init__(self, engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._sequence = engine._sequences[request_id]
        self._closed = False

    @property
    def _is_open(self) -> bool:
        """The end hasn't been delivered. (The id alone doesn't tell: a later request may have it.)"""
        return not self._closed and self._engine._sequences.get(self.request_id) is self._sequence

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        while self._is_open:
            outputs = self._engine._outputs_for({self.request_id}, at_most=1)
            if outputs:
                return outputs[0]
        raise StopIteration

    def close(self) -> None:
        """Stop listening; cancels the request if it hasn't ended."""
        if self._is_open:
            self._closed = True
            self._engine.cancel(self.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

"""What the engine gives back: a request's output of one step, its state, and the iterator over its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .sequence import FINISHED, Sequence


class RequestOutput:
    """What a step brought to one request. Times in seconds on the runner's clock.

    new_token_ids and new_text are this step's; token_ids, text and logprobs are all up to now.
    finish_reason: stop (end-of-sequence, stop token or stop string), length, cancelled or error.
    """

    __slots__ = ("new_token_ids", "new_text", "text", "finished", "error", "sequence", "_num_generated")

    def __init__(self, sequence: Sequence, new_token_ids: list[int], new_text: str = "", error: str | None = None) -> None:
        detokenizer = sequence.detokenizer
        self.new_token_ids = new_token_ids
        self.new_text = new_text
        self.text = "" if detokenizer is None else detokenizer.text
        self.finished = sequence.status is FINISHED
        self.error = error
        self.sequence = sequence
        self._num_generated = len(sequence.generated_token_ids)

    # What of a sequence is settled by its first output is read from it when asked for: most outputs are never asked.

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def finish_reason(self) -> str | None:
        return self.sequence.finish_reason if self.finished else None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache gave."""
        return self.sequence.prefix_hit_tokens

    @property
    def arrival_time(self) -> float:
        return self.sequence.arrival_time

    @property
    def first_token_time(self) -> float | None:
        return self.sequence.first_token_time

    @property
    def finish_time(self) -> float | None:
        return self.sequence.finish_time if self.finished else None

    @property
    def token_ids(self) -> list[int]:
        """All tokens generated up to this output."""
        return self.sequence.generated_token_ids[: self._num_generated]

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Per generated token {token id: log-probability}; None when the request didn't ask for them."""
        return None if self.sequence.params.logprobs is None else self.sequence.logprobs[: self._num_generated]

    def __repr__(self) -> str:
        shown = ("request_id", "new_token_ids", "new_text", "text", "finished", "finish_reason", "num_cached_tokens",
                 "arrival_time", "first_token_time", "finish_time", "error")  # fmt: skip
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


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

"""One request on its way through the engine: its tokens, its counters, its blocks, its state."""

from __future__ import annotations

from enum import Enum

from .config import SamplingParams


class SequenceStatus(Enum):
    """Where a request is.

    WAITING     nothing computed, no blocks
    PREFILLING  part of its known tokens is in the KV cache; it holds blocks, it can't decode yet
    RUNNING     all but its newest token are in the KV cache; one token a step
    FINISHED    ended; holds nothing
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


WAITING, PREFILLING, RUNNING, FINISHED = SequenceStatus

TRANSITIONS = {
    WAITING: {
        PREFILLING,  # first chunk done, more to come
        RUNNING,  # everything fitted in one chunk
        FINISHED,  # cancelled or error
    },
    PREFILLING: {
        PREFILLING,  # another chunk
        RUNNING,  # last chunk: first token sampled
        WAITING,  # preempted
        FINISHED,  # cancelled or error
    },
    RUNNING: {
        WAITING,  # preempted
        FINISHED,  # stop, length, cancelled or error
    },
    FINISHED: set(),
}


class Sequence:
    """The state of one request.

    prompt_token_ids      what the user sent
    generated_token_ids   what was sampled; the newest of them has no K/V yet
    cached_token_count    tokens of any kind whose K/V is in the cache
    block_table           physical block of each logical block
    arrival               place in the order of arrival: the smaller, the more senior
    """

    __slots__ = (
        "request_id", "prompt_token_ids", "params", "priority", "cache_salt", "arrival", "max_new_tokens",
        "stop_token_ids", "seed", "generated_token_ids", "cached_token_count", "block_table", "block_keys", "status",
        "finish_reason", "num_preemptions", "prefix_hit_tokens", "last_step", "arrival_step", "arrival_time",
        "first_token_time", "finish_time", "detokenizer", "logprobs", "trace_name",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        arrival: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        arrival_step: int = 0,
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params or SamplingParams()
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.max_new_tokens = self.params.max_tokens if max_new_tokens is None else max_new_tokens
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.generated_token_ids: list[int] = []
        self.cached_token_count = 0
        self.block_table: list[int] = []
        self.block_keys: list = []  # the prefix cache's entries of the blocks filled so far
        self.status = WAITING
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0  # prompt tokens that the prefix cache gave at the first admission
        self.last_step = -1  # the step that last computed tokens of this sequence
        self.arrival_step = arrival_step
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.detokenizer = None
        self.logprobs: list = []
        self.trace_name = request_id

    @property
    def prefilled_token_count(self) -> int:
        """Prompt tokens whose K/V is in the cache; stops at the prompt's length."""
        return min(self.cached_token_count, len(self.prompt_token_ids))

    @property
    def known_token_count(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def remaining_token_count(self) -> int:
        """Known tokens that still have no K/V. For a RUNNING sequence: 1."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids) - self.cached_token_count

    def token_ids(self, start: int, num_tokens: int) -> list[int]:
        """The known tokens at positions start … start + num_tokens - 1."""
        behind_prompt = start - len(self.prompt_token_ids)
        if behind_prompt >= 0:
            return self.generated_token_ids[behind_prompt : behind_prompt + num_tokens]
        tokens = self.prompt_token_ids[start : start + num_tokens]
        if len(tokens) < num_tokens:  # a recomputation that crosses from the prompt into the output
            tokens = tokens + self.generated_token_ids[: num_tokens - len(tokens)]
        return tokens

    def transition_to(self, status: SequenceStatus) -> None:
        """Change the state; raises RuntimeError for a change that TRANSITIONS doesn't list."""
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"{self.request_id}: {self.status.name} -> {status.name} is not a legal transition")
        self.status = status

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, prompt={len(self.prompt_token_ids)}, "
            f"cached={self.cached_token_count}, generated={len(self.generated_token_ids)}, blocks={self.block_table})"
        )

"""What can be set: `EngineConfig` for the engine, `SamplingParams` for one request.

Both are frozen dataclasses that check themselves when they are made, so a wrong value is
reported where it was written, with the field, the value and the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .validation import Checked, check_int, check_number
from .vllm_flags import VllmFlags, flags_of

# The names that EngineConfig.policy takes; the classes are in policies.py.
POLICY_NAMES = ("prefilling_first", "waiting_first", "shortest_first", "priority", "fair_share")


@dataclass(frozen=True)
class EngineConfig(Checked):
    """Sizes, budgets and switches of one engine.

    block_size              tokens per KV block, a power of two
    num_blocks              blocks in the pool; None: as many as fit into the memory that the runner has free
    max_num_seqs            most sequences in flight (PREFILLING + RUNNING)
    max_num_batched_tokens  most tokens in one forward pass: the token budget of a step
    max_prefill_chunk_size  most prompt tokens of one request in one step; None: whole prompts
    enable_prefix_caching   reuse the blocks of equal prompt prefixes
    max_model_len           most tokens of one request, prompt and output together; None: the
                            smaller of the pool and the model's own limit
    max_decode_share        part of the token budget that decode may take while prefill waits
    kv_watermark            part of the pool that an admission must leave free
    max_num_partial_prefills  most sequences in PREFILLING at once; None: no cap
    policy                  who gets the prefill budget first: one of POLICY_NAMES, or a policy
                            object of your own (see policies.py)
    """

    block_size: int = 16
    num_blocks: int | None = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_chunk_size: int | None = 256
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    max_decode_share: float = 1.0
    kv_watermark: float = 0.01
    max_num_partial_prefills: int | None = None
    policy: Any = "prefilling_first"

    def __post_init__(self) -> None:
        self._check_int("block_size", 1)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} is not a power of two")
        self._check_int("num_blocks", 1, optional=True)
        self._check_int("max_num_seqs", 1)
        self._check_int("max_num_batched_tokens", 1)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is more than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: a step could not give every sequence its token"
            )
        self._check_int("max_prefill_chunk_size", 1, optional=True)
        self._check_int("max_num_partial_prefills", 1, optional=True)
        if not isinstance(self.enable_prefix_caching, bool):
            raise TypeError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        self._check_int("max_model_len", 2, optional=True)
        if None not in (self.max_model_len, self.num_blocks) and self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than the pool holds: "
                f"num_blocks × block_size = {self.num_blocks * self.block_size} tokens"
            )
        share = check_number("max_decode_share", self.max_decode_share, "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._set("max_decode_share", share)
        mark = check_number("kv_watermark", self.kv_watermark, "at least 0 and below 1", lambda x: 0 <= x < 1)
        self._set("kv_watermark", mark)
        if isinstance(self.policy, str):
            if self.policy not in POLICY_NAMES:
                raise ValueError(f"policy={self.policy!r} is unknown: it must be one of {', '.join(POLICY_NAMES)}")
        elif isinstance(self.policy, type) or not callable(getattr(self.policy, "order", None)):
            raise TypeError(f"policy must be a name or an object with an order() method, got {self.policy!r}")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free."""
        return int(self.kv_watermark * self.num_blocks)

    def resolve_max_model_len(self, model_limit: int) -> int:
        """The one limit on a request's tokens, given what the model itself can take (tokens)."""
        own = self.num_blocks * self.block_size if self.max_model_len is None else self.max_model_len
        if self.max_model_len is not None and self.max_model_len > model_limit:
            raise ValueError(f"max_model_len={self.max_model_len} is more than the model takes: {model_limit} tokens")
        return min(own, model_limit)

    def to_vllm(self) -> VllmFlags:
        """The flags of `vllm serve` that mean the same, and in `differs` what has no equal there."""
        return flags_of(self)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How one request's tokens are chosen and when it ends. The default is greedy.

    max_tokens          most tokens to generate
    temperature         0 is greedy; below 1 sharper, above 1 flatter
    top_k               keep the k most likely tokens; None or 0: all
    top_p               keep the smallest set of tokens whose probabilities add up to p
    min_p               drop tokens below min_p × the probability of the likeliest
    repetition_penalty  above 1: tokens already in prompt or output become less likely
    seed                fixes the random draws of this request; None: drawn by the engine
    stop                strings that end the output (the string itself isn't shown)
    stop_token_ids      token ids that end the output (the token stays in token_ids, as an end-of-sequence token does)
    ignore_eos          go on after the model's end-of-sequence token
    logprobs            how many alternatives to report per token (0: the token's own); None: none
    final_only          one output, at the end, instead of one per token
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    final_only: bool = False

    def __post_init__(self) -> None:
        self._check_int("max_tokens", 1)
        at_least_zero = ("at least 0", lambda x: x >= 0)
        above_zero = ("above 0", lambda x: x > 0)
        self._set("temperature", check_number("temperature", self.temperature, *at_least_zero))
        self._check_int("top_k", 0, optional=True)
        self._set("top_p", check_number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1))
        self._set("min_p", check_number("min_p", self.min_p, "between 0 and 1", lambda x: 0 <= x <= 1))
        self._set("repetition_penalty", check_number("repetition_penalty", self.repetition_penalty, *above_zero))
        self._check_int("seed", 0, optional=True)
        self._check_int("logprobs", 0, optional=True)
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", "strings")
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must hold strings, got {text!r} ({type(text).__name__})")
            if not text:
                raise ValueError("stop='' is not allowed: a stop string must have at least 1 character")
        self._set("stop", stop)
        ids = self._tuple("stop_token_ids", "token ids")
        self._set("stop_token_ids", tuple(check_int("stop_token_ids", i, 0) for i in ids))
        for name in ("ignore_eos", "final_only"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

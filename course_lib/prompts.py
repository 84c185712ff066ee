"""From what a user gives to what the engine takes: a prompt as token ids that can be served to its end."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from .config import EngineConfig, SamplingParams
from .slots import blocks_needed
from .validation import check_int

Prompt = str | SequenceOf[int]


def check_prompt(
    prompt: Prompt, params: SamplingParams | None, runner, config: EngineConfig, max_model_len: int, field: str = "prompt"
) -> tuple[list[int], SamplingParams, int]:
    """The prompt as token ids, its parameters, and how many tokens it may generate.

    Raises TypeError or ValueError, naming `field`, for what an engine of this configuration could never serve.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {params!r}")
    if params.stop and runner.tokenizer is None:
        raise ValueError(f"stop={params.stop} needs texts, but this runner has no tokenizer: use stop_token_ids")
    token_ids = _token_ids(prompt, runner, field)
    length = len(token_ids)
    if length == 0:
        raise ValueError(f"{field} is empty (0 tokens): it must have at least 1 token")
    if length >= max_model_len:
        raise ValueError(
            f"{field} has {length} tokens, max_model_len is {max_model_len}: at most {max_model_len - 1} fit, "
            f"since one must be left for the output (the pool holds {config.num_blocks * config.block_size})"
        )
    chunk = config.max_prefill_chunk_size or length
    if config.max_prefill_chunk_size is None and length > config.max_num_batched_tokens:
        raise ValueError(
            f"{field} has {length} tokens, max_num_batched_tokens is {config.max_num_batched_tokens}: "
            f"with max_prefill_chunk_size=None a prompt must fit in one step"
        )
    first = blocks_needed(min(length, chunk, config.max_num_batched_tokens), config.block_size)
    if first + config.watermark_blocks > config.num_blocks:
        raise ValueError(
            f"{field} has {length} tokens: its first chunk needs {first} blocks, and kv_watermark="
            f"{config.kv_watermark} keeps {config.watermark_blocks} free, but num_blocks is {config.num_blocks}"
        )
    return token_ids, params, min(params.max_tokens, max_model_len - length)


def _token_ids(prompt: Prompt, runner, field: str) -> list[int]:
    if isinstance(prompt, str):
        if runner.tokenizer is None:
            raise TypeError(f"{field} is a text, but this runner has no tokenizer: give a list of token ids")
        token_ids = list(runner.tokenizer.encode(prompt))
    else:
        if isinstance(prompt, (bytes, dict, set)) or not isinstance(prompt, Iterable):
            raise TypeError(f"{field} must be a text or a list of token ids, got {prompt!r}")
        token_ids = list(prompt)
    vocab_size = runner.vocab_size
    if set(map(type, token_ids)) == {int} and 0 <= min(token_ids) and max(token_ids) < vocab_size:
        return token_ids
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            token_ids[place] = check_int(f"{field}[{place}]", token_id, 0, vocab_size - 1)
    return token_ids

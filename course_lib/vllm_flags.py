"""An engine's configuration as flags of `vllm serve`: what means the same, and what has no equal there.

Read from vLLM 0.32's own sources: `engine/arg_utils.py` for the flags, `v1/core/sched/scheduler.py` and
`config/scheduler.py` for what they do.
"""

from __future__ import annotations

from typing import NamedTuple


class VllmFlags(NamedTuple):
    """args: flags and values, in order. differs: {our field: why vLLM doesn't do the same}."""

    args: tuple[str, ...]
    differs: dict[str, str]

    def command(self, model: str) -> str:
        """The whole command line for a model (a folder or a hub id)."""
        return " ".join(["vllm serve", model, *self.args])

    def __str__(self) -> str:
        lines = [f"{'' if arg.startswith('--') else ' '}{arg}" for arg in self.args]
        lines = "\n".join(lines).replace("\n ", " ").splitlines()  # a value behind its flag
        return "\n".join(lines + [f"# {field}: {why}" for field, why in self.differs.items()])


def flags_of(config) -> VllmFlags:
    """The flags for an `EngineConfig`."""
    args: list[tuple[str, object]] = [
        ("--block-size", config.block_size),
        ("--num-gpu-blocks-override", config.num_blocks),
        ("--max-num-seqs", config.max_num_seqs),
        ("--max-num-batched-tokens", config.max_num_batched_tokens),
        ("--watermark", config.kv_watermark),
    ]
    switches = ["--enable-prefix-caching" if config.enable_prefix_caching else "--no-enable-prefix-caching"]
    # By default vLLM admits a prompt only when all of it fits into the pool; we ask for the first chunk alone.
    switches.append("--no-scheduler-reserve-full-isl")
    differs = {}
    if config.block_size % 32:
        differs["block_size"] = "vLLM's CPU backend takes multiples of 32 only; on a GPU it depends on the attention backend"
    if config.max_model_len is not None:
        args.append(("--max-model-len", config.max_model_len))
    if config.max_prefill_chunk_size is None:
        switches.append("--no-enable-chunked-prefill")
        differs["max_prefill_chunk_size"] = "with whole prompts vLLM refuses a max-num-batched-tokens below its max-model-len"
    else:
        switches.append("--enable-chunked-prefill")
        args.append(("--long-prefill-token-threshold", config.max_prefill_chunk_size))
        differs["max_prefill_chunk_size"] = "a request that is alone in vLLM isn't cut to it: it takes the whole token budget"
    name = config.policy if isinstance(config.policy, str) else type(config.policy).__name__
    if name in ("prefilling_first", "priority"):
        args.append(("--scheduling-policy", "fcfs" if name == "prefilling_first" else "priority"))
        differs["policy"] = "vLLM serves what has begun in one order, prefills and decodes alike; ours serves decodes first"
    else:
        differs["policy"] = f"vLLM has fcfs and priority, nothing like {name}"
    if config.max_decode_share < 1:
        differs["max_decode_share"] = "vLLM has no cap on decode"
    if config.max_num_partial_prefills is not None:
        differs["max_num_partial_prefills"] = "vLLM has no cap on half-filled requests"
    flat = [str(part) for pair in args for part in pair]
    return VllmFlags((*flat, *switches), differs)

"""The sweep over chunk sizes at the size of the text that the course is built on: 128 streams, a prompt of 8,192 tokens.

Simulated, on chips that serve such loads: what real hardware would do, as far as the roofline of cost_model.py says.
The same numbers come out on every machine.
"""

from __future__ import annotations

from itertools import pairwise

from ..config import EngineConfig
from ..hardware import find_chip, find_model, num_blocks_for
from ..metrics import percentile
from ..trace import Trace
from ..workloads import simulate, stall

PAIRS = (("llama3-8b", "h100"), ("mistral-7b", "a100"), ("qwen3-0.6b", "rtx4090"))
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
RUNNING, PROMPT, CONTEXT = 128, 8192, 128  # streams, and tokens of the long prompt and of each stream's own
HEAD_START = 8  # tokens that each stream has when the long prompt arrives


def sweeps(running: int = RUNNING, prompt: int = PROMPT, sizes=SIZES, pairs=PAIRS) -> list[dict]:
    """One entry per model and chip: the measures by chunk size, in `sizes`' order."""
    found = []
    for model, chip in pairs:
        rows = [{"max_prefill_chunk_size": size, **measures(_serve(model, chip, running, prompt, size))} for size in sizes]
        about = {"model": model, "chip": chip, "running": running, "prompt_tokens": prompt, "context_tokens": CONTEXT}
        found.append(about | {"sizes": rows})
    return found


def _serve(model: str, chip: str, running: int, prompt: int, size: int | None) -> Trace:
    """The stall under one chunk size; every stream lasts longer than the long prompt's prefill."""
    config = EngineConfig(
        num_blocks=num_blocks_for(find_model(model), find_chip(chip)), max_num_seqs=running + 1,
        max_num_batched_tokens=prompt + running + 1, max_prefill_chunk_size=size, enable_prefix_caching=False,
    )  # fmt: skip
    first = simulate(
        config, stall(running, 1, arrival=0.0, context=CONTEXT, output_tokens=HEAD_START)[:-1], model=model, chip=chip
    )
    chunks = -(-prompt // (size or prompt))
    requests = stall(
        running, prompt, arrival=first.steps[-1].end, context=CONTEXT, output_tokens=HEAD_START + chunks + 32
    )  # fmt: skip
    return simulate(config, requests, model=model, chip=chip)


def measures(trace: Trace) -> dict[str, float]:
    """The long prompt's time to first token; from its arrival to that token, the gaps of the streams and all tokens
    (the prompt's and the streams') per second."""
    times, arrival = trace.token_times(), trace.requests["long"].arrival_time
    first = times.pop("long")[0]
    gaps = [
        end - begin
        for row in times.values()
        for begin, end in pairwise(row)
        if end > arrival and begin < first
    ]  # fmt: skip
    streamed = sum(arrival < time <= first for row in times.values() for time in row)
    return {
        "long_ttft_s": first - arrival,
        "itl_p50_s": percentile(gaps, 50),
        "itl_p99_s": percentile(gaps, 99),
        "stall_s": max(gaps),
        "tokens_per_second": (trace.requests["long"].prompt_tokens + streamed) / (first - arrival),
    }


def table(found: list[dict]) -> str:
    """All of it in text, in milliseconds."""
    lines = []
    for each in found:
        lines.append(
            f"Simulated: {each['model']} on {each['chip']}, {each['running']} streams, a prompt of {each['prompt_tokens']:,}"
        )
        lines.append(f"{'chunk':>6}{'long TTFT':>13}{'P99 ITL':>13}{'longest gap':>13}{'tokens/s':>12}")
        for row in each["sizes"]:
            cells = "".join(f"{1e3 * row[key]:10,.1f} ms" for key in ("long_ttft_s", "itl_p99_s", "stall_s"))
            lines.append(f"{row['max_prefill_chunk_size'] or 'whole':>6}{cells}{row['tokens_per_second']:12,.0f}")
    return "\n".join(lines)

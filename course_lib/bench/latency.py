"""`python -m course_lib bench latency`: a decode step of one request, beside reading the weights once.

With one row, a step does two operations per weight: it can't be faster than the weights come from
memory. Both are measured in turns, in one process.
"""

from __future__ import annotations

import os
import time
from statistics import median

from . import machine

PROMPT, STEPS, ROUNDS = 128, 20, 9


def main(args) -> None:
    import torch

    from .. import Engine, EngineConfig, ModelRunner, SamplingParams

    threads = args.threads or os.cpu_count()
    torch.set_num_threads(threads)
    runner = ModelRunner("smollm2")
    weights = sum(p.numel() * p.element_size() for p in set(runner.model.parameters()))  # a tied head counts once
    engine = Engine(runner, EngineConfig(num_blocks=64), record_trace=False)
    engine.add_request(list(range(1000, 1000 + PROMPT)), SamplingParams(max_tokens=ROUNDS * STEPS + 10, ignore_eos=True))
    for _ in range(5):
        engine.step()
    memory = torch.ones(weights // 4)  # as many bytes as the weights
    steps, reads = [], []
    for _ in range(ROUNDS):
        reads += [_seconds(memory.sum) for _ in range(3)]
        steps += [_seconds(engine.step) for _ in range(STEPS)]
    step, read = median(steps), median(reads)
    print(f"decode step of one request (SmolLM2, float32, {threads} threads, attention {runner.attention})")
    print(f"  {step * 1e3:6.1f} ms a step (median of {len(steps)}; context {PROMPT}-{PROMPT + ROUNDS * STEPS} tokens)")
    print(f"  {read * 1e3:6.1f} ms to read {weights / 1e6:.0f} MB once, at {weights / read / 1e9:.1f} GB/s (median of {len(reads)})")
    print(f"  {step / read:6.2f} × the time of reading the weights")
    path = machine.save("latency", {"threads": threads, "weights_bytes": weights, "step_s": steps, "read_s": reads}, args.out)
    print(f"raw numbers: {path}")


def _seconds(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin

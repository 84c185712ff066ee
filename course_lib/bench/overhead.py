"""`python -m course_lib bench overhead`: what a step costs beside the model.

The time to schedule, to build the batch and to commit, per decode step, for growing numbers of
running requests. Medians, in microseconds, on one thread.
"""

from __future__ import annotations

import statistics
import time

from ..batch import build_batch
from ..block_manager import BlockManager
from ..config import EngineConfig
from ..scheduler import Scheduler
from ..sequence import Sequence

PHASES = ("schedule", "build_batch", "commit")


def step_overhead(num_running: int, num_steps: int = 200, prompt_len: int = 100) -> dict[str, float]:
    """Median seconds of each phase of a step in which `num_running` requests decode one token each."""
    config = EngineConfig(
        num_blocks=num_running * (prompt_len + 16 + num_steps) // 16 + num_running,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * (prompt_len + 16),  # all prompts in the first step
    )
    block_manager = BlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(config, block_manager)
    for i in range(num_running):  # lengths differ, so that not all need a block in the same step
        scheduler.add(Sequence(f"r{i}", [i] * (prompt_len + i % 16), arrival=i))
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    while len(times["commit"]) < num_steps:
        decoding = len(scheduler.running) == num_running
        marks = [time.perf_counter()]
        output = scheduler.schedule()
        marks.append(time.perf_counter())
        batch = build_batch(output)
        marks.append(time.perf_counter())
        scheduler.commit(output)
        for sequence in batch.sampled:
            sequence.generated_token_ids.append(1)
        marks.append(time.perf_counter())
        block_manager.drain_changes()
        if decoding:
            for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False):
                times[phase].append(end - begin)
    return {phase: statistics.median(values) for phase, values in times.items()}


def main(args=None) -> None:
    print("Microseconds per decode step beside the model (median of 200 steps, prefix caching on)")
    print(f"{'running':>8}" + "".join(f"{phase:>13}" for phase in PHASES) + f"{'total':>9}{'per request':>13}")
    for num_running in (32, 128, 512, 1024):
        values = step_overhead(num_running)
        total = sum(values.values())
        columns = "".join(f"{values[phase] * 1e6:13.0f}" for phase in PHASES)
        print(f"{num_running:8}{columns}{total * 1e6:9.0f}{total * 1e6 / num_running:13.2f}")

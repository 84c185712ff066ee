"""The measurements of `python -m course_lib gpu-check`, one after another, as JSON lines on standard output.

gpu_check.py starts this in a process of its own, because after some errors a GPU can be used by a new process only.
Arguments: the number of the job to begin with, and --dry-run: tiny sizes on the CPU, in Triton's interpreter.

Each line is {"machine": {...}}, {"job": number, ...} when one begins, or {"row": {...}}. A time is the median of many
runs of one call, in seconds.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from .config import EngineConfig, SamplingParams
from .engine import Engine

JOB_LIMIT = 240  # seconds after which a job that hangs ends the process
MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}  # heads, K/V heads, head size

# name -> groups of equal sequences: (how many, context length, of which the last … are queries)
SHAPES = (
    {f"decode {n} × {c}": [(n, c, 1)] for n in (1, 16, 128) for c in (512, 2048, 8192, 32768)}
    | {f"chunk {n} at {s}": [(1, s + n, n)] for n in (256, 512, 2048) for s in (0, 4096, 30000)}
    | {f"mixed: chunk 512 at 4096, {n} decodes × 4096": [(n, 4096, 1), (1, 4608, 512)] for n in (16, 64)}
)
FLEX_SHAPES = ("decode 16 × 8192", "chunk 512 at 4096")  # FlexAttention is compiled anew for each: long
STORE_TOKENS = (1, 64, 512, 8192)
ENGINE_BATCHES = (1, 16, 64)
# What if the plan chose otherwise? shape -> attributes of the plan to try
VARIANTS = {f"decode {n} × {c}": {"num_splits": (1, 4, 16, 64)} for n, c in ((1, 32768), (16, 8192), (128, 2048))}
VARIANTS |= {f"chunk {n} at 4096": {"max_rows": (16, 32, 64, 128), "num_splits": (1, 2, 4, 8)} for n in (256, 2048)}

DRY_VARIANTS = {"decode 2 × 40": {"num_splits": (1, 4)}, "chunk 8 at 20": {"max_rows": (16, 64)}}
DRY_MODELS = {"tiny": (4, 2, 16)}
DRY_SHAPES = {
    "decode 2 × 40": [(2, 40, 1)],
    "decode 1 × 600": [(1, 600, 1)],  # split
    "chunk 8 at 0": [(1, 8, 8)],
    "chunk 8 at 20": [(1, 28, 8)],
    "mixed: chunk 8 at 20, 2 decodes × 20": [(2, 20, 1), (1, 28, 8)],
}


@dataclass
class Job:
    """One or more rows of the report. `run` gives them as dicts: who, seconds, bytes, flops, …"""

    kind: str
    model: str
    shape: str
    run: Callable[[], Iterator[dict]]


def engine_rows(load, attention, batch_size, prompt_len, num_steps) -> Iterator[dict]:
    """Decode steps of the whole engine; the floor of a step is to read the weights once."""
    from .model import gpu_bench
    from .runners.model import ModelRunner

    who = "ours" if attention == "triton_paged" else attention
    try:
        loaded = load()
    except OSError as problem:  # the model isn't here
        yield {"who": who, "left out": gpu_bench.words(problem)}
        return
    runner = ModelRunner(loaded, attention=attention)
    budget = batch_size * prompt_len  # all prompts in the first step
    engine = Engine(runner, EngineConfig(
        block_size=gpu_bench.BLOCK_SIZE, num_blocks=batch_size * -(-(prompt_len + num_steps + 20) // gpu_bench.BLOCK_SIZE) + 100,
        max_num_seqs=batch_size, max_num_batched_tokens=budget, max_prefill_chunk_size=prompt_len,
        enable_prefix_caching=False,
    ))  # fmt: skip
    rng = random.Random(gpu_bench.SEED)
    for _ in range(batch_size):
        prompt = [rng.randrange(runner.vocab_size) for _ in range(prompt_len)]
        engine.add_request(prompt, SamplingParams(max_tokens=num_steps + 5, ignore_eos=True))
    seconds = []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        engine.step()  # ends when its tokens are on the host
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[5:])  # without the prompts and the first decodes
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    yield {"who": who, "seconds": step, "bytes": weights, "flops": 0, "tokens per second": batch_size / step}


def jobs(dry_run: bool) -> list[Job]:
    """Everything that is measured, in a fixed order."""
    import torch

    from .model import gpu_bench, load_model

    timer, dtype = gpu_bench.Timer(torch.device("cpu" if dry_run else "cuda")), torch.bfloat16
    models, shapes = (DRY_MODELS, DRY_SHAPES) if dry_run else (MODELS, SHAPES)
    todo = [Job("ceiling", "", "", partial(gpu_bench.ceiling_rows, timer, dry_run))]
    for model, sizes in models.items():
        for shape, groups in shapes.items():
            with_flex = dry_run or shape in FLEX_SHAPES
            todo.append(
                Job("attention", model, shape, partial(gpu_bench.attention_rows, timer, dtype, sizes, groups, with_flex))
            )
        for shape, variants in (DRY_VARIANTS if dry_run else VARIANTS).items():
            run = partial(gpu_bench.variant_rows, timer, dtype, sizes, shapes[shape], variants)
            todo.append(Job("attention, what if", model, shape, run))
        for tokens in (1, 5) if dry_run else STORE_TOKENS:
            todo.append(
                Job("store_kv", model, f"{tokens} tokens", partial(gpu_bench.store_rows, timer, dtype, *sizes[1:], tokens))
            )
    name, type_, lengths = ("tiny", "float32", (8, 2)) if dry_run else ("smollm2", "bfloat16", (512, 64))
    load = cache(partial(load_model, name, device=timer.device, dtype=type_))
    for batch_size, attention in itertools.product((1, 2) if dry_run else ENGINE_BATCHES, ("triton_paged", "torch_paged")):
        run = partial(engine_rows, load, attention, batch_size, *lengths)
        todo.append(Job("engine", f"{name} {type_}", f"decode {batch_size}", run))
    return todo


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main(first: int, dry_run: bool) -> int:
    from .model import gpu_bench

    say(machine=gpu_bench.machine(dry_run))
    for number, job in enumerate(jobs(dry_run)):
        if number < first:
            continue
        about = {"kind": job.kind, "model": job.model, "shape": job.shape}
        say(job=number, **about)
        faulthandler.dump_traceback_later(JOB_LIMIT, exit=True)
        try:
            for row in job.run():
                say(row={**about, **row})
        except Exception as problem:  # reported, and the next job is tried
            say(row={**about, "who": "ours", "error": gpu_bench.words(problem)})
            if gpu_bench.is_fatal(problem):
                return 3
        gpu_bench.give_memory_back()
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "--dry-run" in sys.argv))

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
# Decode steps: on CUDA graphs, without, compiled by PyTorch, and with PyTorch's own attention
WAYS = ("ours", "ours, without graphs", "ours, torch_paged", "torch.compile")
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
    """One or more rows of the report. `run` gives them as dicts: who, seconds, bytes, flops, …

    who: whose error it is when it fails
    """

    kind: str
    model: str
    shape: str
    run: Callable[[], Iterator[dict]]
    who: str = "ours"


def graphs_of(way: str, dry_run: bool) -> Callable | None:
    """How a ModelRunner captures its decode steps in this way of running them; None: not at all."""
    import torch

    from .model.decode_graphs import capture_on

    if way == "ours":
        return (lambda call: call) if dry_run else capture_on(torch.device("cuda"))
    return partial(torch.compile, mode="reduce-overhead") if way == "torch.compile" else None


def engine_rows(load, way, dry_run, batch_size, prompt_len, num_steps) -> Iterator[dict]:
    """Decode steps of the whole engine, in one of WAYS; the floor of a step is to read the weights once."""
    from .model import gpu_bench
    from .runners.model import ModelRunner

    try:
        loaded = load()
    except OSError as problem:  # the model isn't here
        yield {"who": way, "left out": gpu_bench.words(problem)}
        return
    if dry_run and way == "torch.compile":
        yield {"who": way, "left out": "it can't look into the interpreter"}
        return
    runner = ModelRunner(loaded, attention="torch_paged" if "torch_paged" in way else "triton_paged", cuda_graphs=False)
    runner.capture = graphs_of(way, dry_run)
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
    yield {"who": way, "seconds": step, "bytes": weights, "flops": 0, "tokens per second": batch_size / step}


def parity_rows(load, attention, num_prompts, prompt_len, num_tokens) -> Iterator[dict]:
    """Are the engine's greedy tokens in bfloat16 as good as rounding allows?

    Equal tokens can't be asked for: in bfloat16 the two best logits are often equal or next to each other. So the same
    model in float32 judges each token, given those before it: its logit may lie below the best one by `gap`. Two
    computations that are each off by e can disagree over a gap of 2e. transformers' own forward in bfloat16 shows what
    e is here, and ours may be off by twice as much: `bound` is 4e.
    """
    import torch

    from .model import gpu_bench
    from .runners.model import ModelRunner

    try:
        loaded, exact = load(dtype="bfloat16"), load(dtype="float32")
    except OSError as problem:  # the model isn't here
        yield {"who": "ours", "left out": gpu_bench.words(problem)}
        return
    rng = random.Random(gpu_bench.SEED)
    prompts = [[rng.randrange(loaded.model.config.vocab_size) for _ in range(prompt_len)] for _ in range(num_prompts)]
    engine = Engine(ModelRunner(loaded, attention=attention), EngineConfig(max_num_seqs=num_prompts, max_prefill_chunk_size=100))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True), progress=False)
    gaps, error = [], 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = torch.tensor([prompt + output.token_ids], device=loaded.device)
        with torch.inference_mode():
            wanted, theirs = (one.model(token_ids).logits[0, prompt_len - 1 : -1].float() for one in (exact, loaded))
        error = max(error, (theirs - wanted).abs().max().item())
        gaps += (wanted.max(dim=-1).values - wanted.gather(-1, token_ids[0, prompt_len:, None])[:, 0]).tolist()
    yield {"who": "ours", "tokens": len(gaps), "best": gaps.count(0.0), "gap": max(gaps), "bound": 4 * error}


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
    for batch_size, way in itertools.product((1, 2) if dry_run else ENGINE_BATCHES, WAYS):
        run = partial(engine_rows, load, way, dry_run, batch_size, *lengths)
        todo.append(Job("engine", f"{name} {type_}", f"decode {batch_size}", run, way))
    either = partial(load_model, name, device=timer.device)
    sizes = (2, 9, 3) if dry_run else (8, 300, 64)  # prompts, tokens of each, new tokens
    todo.append(Job("parity", f"{name} bfloat16", "greedy", partial(parity_rows, either, "triton_paged", *sizes)))
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
        say(job=number, **about, who=job.who)
        faulthandler.dump_traceback_later(JOB_LIMIT, exit=True)
        try:
            for row in job.run():
                say(row={**about, **row})
        except Exception as problem:  # reported, and the next job is tried
            say(row={**about, "who": job.who, "error": gpu_bench.words(problem)})
            if gpu_bench.is_fatal(problem):
                return 3
        gpu_bench.give_memory_back()
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "--dry-run" in sys.argv))

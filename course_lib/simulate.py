"""`python -m course_lib simulate`: traffic on a chip that you don't have, in virtual time. No model, no torch.

Without --trace and --rate it is the course's case: many answers are streaming when one long prompt arrives.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .capacity import Targets, goodput
from .config import POLICY_NAMES, EngineConfig
from .contrast import PrefillFirstScheduler
from .hardware import CHIPS, MODELS, find_chip, find_model, num_blocks_for
from .metrics import of_requests, percentile
from .scheduler import Scheduler
from .trace import Trace
from .validation import check_int
from .workloads import Request, at_rate, long_documents, read_azure, read_mooncake, simulate, stall

HEAD_START = 8  # tokens that each stream has when the long prompt arrives
BLOCK_SIZE = 16
MAX_TIMELINE = 400  # steps that a timeline in characters can still show
MAX_ROWS = 8  # in it; neighbours share a row, a long prompt has its own

Chunk = int | None


def chunk_size(text: str) -> Chunk:
    """An argparse type: tokens, or "whole"."""
    if text == "whole":
        return None
    try:
        return check_int("chunk size", int(text), 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens from 1 on nor the word whole") from None


def title_of(chunk: Chunk, scheduler: type) -> str:
    size = "whole" if chunk is None else f"chunks of {chunk}"
    return f"{size}, prefill first" if scheduler is PrefillFirstScheduler else size


def add_arguments(parser: argparse.ArgumentParser, positive) -> None:
    """The options of the command; `positive` is the argparse type of a whole number from 1 on."""
    add = parser.add_argument
    add("--model", default="llama3-8b", help=f"{', '.join(MODELS)} (default llama3-8b)")
    add("--chip", default="h100", help=f'{", ".join(CHIPS)}, or several: "2x-a100" (default h100)')
    add("--chunk", type=chunk_size, nargs="+", default=[None, 1024], metavar="SIZE",
        help='chunk sizes to compare, in tokens or "whole" (default: whole 1024)')  # fmt: skip
    add("--contrast", action="store_true", help="for each chunk size also prefill alone, before decode: what not to do")
    add("--running", type=int, default=128, help="streams that are decoding when the long prompt arrives (default 128)")
    add("--prompt", type=positive, default=8192, help="tokens of the long prompt (default 8192)")
    add("--context", type=positive, default=32, help="prompt tokens of each stream (default 32)")
    add("--budget", type=positive, help="most tokens in one step (default: the longest prompt and every stream fit)")
    add("--policy", default="prefilling_first", help=f"{', '.join(POLICY_NAMES)} (default prefilling_first)")
    add("--decode-share", type=float, default=1.0, help="part of the budget for decode while prefill waits (default 1.0)")
    add("--blocks", type=positive, help=f"KV blocks of {BLOCK_SIZE} tokens in the pool (default: what fits beside the weights)")
    add("--max-seqs", type=positive, default=256, help="most sequences in flight (default 256)")
    add("--trace", metavar="FILE", help="replay a public trace instead: Azure's .csv or Mooncake's .jsonl")
    add("--rate", type=float, help="requests a second: the trace's arrivals are stretched to it; without --trace, "
        "chats with a long document among every ten of them")  # fmt: skip
    add("--requests", type=positive, help="how many requests of the trace (default all) or of --rate (default 200)")
    add("--seed", type=int, default=0, help="of the arrivals and sizes with --rate (default 0)")
    add("--ttft", type=float, default=1.0, help="target in seconds that goodput counts with (default 1.0)")
    add("--itl", type=float, default=0.1, help="target in seconds that goodput counts with (default 0.1)")
    add("--json", metavar="FILE", help="write the trace; with several runs, one file each, the run's name appended")


def main(args: argparse.Namespace) -> int:
    """Run every setting, show the table; 2 for options that can't be."""
    try:
        runs = run(args)
    except BrokenPipeError:
        raise  # of the output, not of a file
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_stall = args.trace is None and args.rate is None
    if is_stall:
        from .demo import terminal_width
        from .lab import timeline_text

        for title, trace in runs.items():
            if len(trace.steps) <= MAX_TIMELINE:
                print(f"\n{title}")
                print(timeline_text(trace, width=terminal_width(), color=sys.stdout.isatty(), max_rows=MAX_ROWS))
    print(f"\n{table(runs, stall_columns if is_stall else traffic_columns(Targets(args.ttft, args.itl)))}")
    return 0


def run(args: argparse.Namespace) -> dict[str, Trace]:
    """Title -> trace, in the order asked for; writes what --json names."""
    model, chip = find_model(args.model), find_chip(args.chip)
    Targets(args.ttft, args.itl)
    settings = [(chunk, scheduler) for chunk in args.chunk for scheduler in _schedulers(chunk, args.contrast)]
    requests = requests_of(args)
    num_blocks = args.blocks or num_blocks_for(model, chip, BLOCK_SIZE)
    max_seqs = max(args.running + 1, 1) if requests is None else args.max_seqs
    longest = args.prompt if requests is None else max(request.num_prompt_tokens for request in requests)
    budget = args.budget or longest + max_seqs
    if budget < max_seqs:
        raise ValueError(f"--budget {budget} is less than the {max_seqs} sequences that may be in flight: each needs its token")

    def serve(chunk: Chunk, scheduler: type, requests: list[Request]) -> Trace:
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=max_seqs, max_num_batched_tokens=budget,
            max_prefill_chunk_size=chunk, enable_prefix_caching=_share(requests), policy=args.policy,
            max_decode_share=args.decode_share,
        )  # fmt: skip
        return simulate(config, requests, model=model, chip=chip, scheduler=scheduler)

    if requests is None:
        requests = _the_stall(args, settings, budget, serve)
    print(f"{model.name} on {chip.name}: {describe(args, requests)}; {num_blocks:,} KV blocks, {budget:,} tokens a step")
    runs = {title_of(*setting): serve(*setting, requests) for setting in settings}
    if args.json:
        for title, trace in runs.items():
            path = Path(args.json)
            if len(runs) > 1:
                path = path.with_stem(f"{path.stem}-{title.replace(', ', '-').replace(' ', '-')}")
            path.write_text(trace.to_json(), encoding="utf-8")
            print(f"Trace written to {path}")
    return runs


def _schedulers(chunk: Chunk, contrast: bool) -> list[type]:
    return [PrefillFirstScheduler, Scheduler] if contrast and chunk is not None else [Scheduler]


def requests_of(args: argparse.Namespace) -> list[Request] | None:
    """The workload that the options name; None for the stall, whose times depend on the chip."""
    if args.trace is not None:
        suffix = os.path.splitext(args.trace)[1].lower()
        if suffix not in (".csv", ".jsonl"):
            raise ValueError(f"--trace {args.trace}: the name must end in .csv (Azure) or .jsonl (Mooncake)")
        requests = (read_azure if suffix == ".csv" else read_mooncake)(args.trace, args.requests)
        return requests if args.rate is None else at_rate(requests, args.rate)
    return None if args.rate is None else long_documents(args.rate, args.requests or 200, args.seed)


def _share(requests: list[Request]) -> bool:
    """Do two prompts begin alike? Else a prefix cache is only work."""
    return len({request.prompt[0].content for request in requests}) < len(requests)


def _the_stall(args: argparse.Namespace, settings, budget: int, serve) -> list[Request]:
    """The long prompt arrives when every stream has HEAD_START tokens, whatever the setting; they outlast it."""
    check_int("--running", args.running, 0)
    smallest = min(chunk or args.prompt for chunk in args.chunk)
    steps = -(-args.prompt // min(smallest, max(1, budget - args.running)))
    output_tokens = HEAD_START + steps + 32
    head_start = stall(args.running, args.prompt, arrival=0.0, context=args.context, output_tokens=HEAD_START)[:-1]
    arrival = max(serve(*setting, head_start).steps[-1].end for setting in settings) if head_start else 0.0
    return stall(args.running, args.prompt, arrival=arrival, context=args.context, output_tokens=output_tokens)


def describe(args: argparse.Namespace, requests: list[Request]) -> str:
    if args.trace is None and args.rate is None:
        return f"{args.running} streams, then a prompt of {args.prompt:,} tokens"
    origin = "made with --seed " + str(args.seed) if args.trace is None else Path(args.trace).name
    span = requests[-1].arrival_time
    return f"{len(requests):,} requests in {span:,.0f} s ({origin})"


# ---- the table ------------------------------------------------------------------------------------


def stall_columns(trace: Trace) -> dict[str, str]:
    """The long prompt's TTFT, and the gaps of the others from its arrival on."""
    times, arrival = trace.token_times(), trace.requests["long"].arrival_time
    ttft = times.pop("long")[0] - arrival
    gaps = [end - begin for row in times.values() for begin, end in zip(row, row[1:], strict=False) if end > arrival]
    return {"long prompt's TTFT": _ms(ttft), **_gap_columns(gaps), **_throughput_columns(trace)}


def traffic_columns(targets: Targets):
    """The columns for a stream of requests, with the goodput under these targets."""

    def columns(trace: Trace) -> dict[str, str]:
        requests = of_requests(trace).values()
        ttfts = sorted(request.ttft for request in requests if request.ttft is not None)
        gaps = [gap for request in requests for gap in request.itl]
        return {
            "median TTFT": _ms(percentile(ttfts, 50)),
            "P99 TTFT": _ms(percentile(ttfts, 99)),
            **_gap_columns(gaps),
            "goodput, req/s": f"{goodput(trace, targets).requests_per_second:.2f}",
            **_throughput_columns(trace),
        }

    return columns


def _gap_columns(gaps: list[float]) -> dict[str, str]:
    if not gaps:
        return {"longest gap": "-", "P99 ITL": "-", "median ITL": "-"}
    gaps = sorted(gaps)  # once: `percentile` finds it in order
    return {"longest gap": _ms(gaps[-1]), "P99 ITL": _ms(percentile(gaps, 99)), "median ITL": _ms(percentile(gaps, 50))}


def _throughput_columns(trace: Trace) -> dict[str, str]:
    tokens = sum(len(step.tokens) for step in trace.steps)
    begin = min(request.arrival_time for request in trace.requests.values())
    return {"tokens/s": f"{tokens / (trace.steps[-1].end - begin):,.0f}", "steps": f"{len(trace.steps):,}"}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def table(runs: dict[str, Trace], columns_of) -> str:
    """One row per run."""
    rows = [{"prefill": title, **columns_of(trace)} for title, trace in runs.items()]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )

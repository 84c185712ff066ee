"""`python -m course_lib bench`: what the engine costs, beside what a user would pick instead.

    overhead     schedule, build the batch, commit: microseconds per step, without a model
    throughput   SmolLM2 on this CPU: ours, transformers in three ways, vLLM's CPU build
    latency      one decode step of one request, beside reading the weights once
    chunks       the demo's longest gap and throughput against the chunk size
    traffic      public traces in the simulator: the rate up to which targets are met (with --traces)
    endpoint     the demo's stall on vLLM's own server, seen from its clients
    --url        the demo's workload on an OpenAI-compatible server, instead of the parts above

Contenders of one table run in turns, within one call, so that they meet the same machine.
"""

from __future__ import annotations

PARTS = ("overhead", "latency", "throughput", "chunks", "traffic", "endpoint")


def main(args) -> int:
    """Run the parts that were asked for (none named: all of them); returns the exit code."""
    if args.url:
        from .endpoint import main as run

        return run(args)
    code = 0
    for part in args.parts or PARTS:
        if part == "overhead":
            from .overhead import main as run

            run()
        elif part == "latency":
            from .latency import main as run

            run(args)
        elif part == "throughput":
            from .throughput import main as run

            run(args)
        elif part == "traffic":
            from .traffic import main as run

            code = run(args)
        elif part == "endpoint":
            from .vllm_server import main as run

            code = run(args)
        else:
            from .chunks import main as run

            run(args)
        if code:
            return code
        print()
    return 0

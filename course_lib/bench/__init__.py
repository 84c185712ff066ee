"""`python -m course_lib bench`: what the engine costs, beside what a user would pick instead.

    overhead     schedule, build the batch, commit: microseconds per step, without a model
    throughput   SmolLM2 on this CPU: ours, transformers in three ways, vLLM's CPU build
    latency      one decode step of one request, beside reading the weights once
    chunks       the demo's longest gap and throughput against the chunk size
    ladder       naive generate, KV cache, … chunked prefill: each step of the course on the same requests
    traffic      public traces in the simulator: the rate up to which targets are met (with --traces)
    endpoint     the demo's stall on vLLM's own server, seen from its clients
    --url        the demo's workload on an OpenAI-compatible server, instead of the parts above

Contenders of one table run in turns, within one call, so that they meet the same machine.
"""

from __future__ import annotations

from importlib import import_module

# Part: the module here whose main(args) measures it; it returns an exit code or None.
PARTS = {
    "overhead": "overhead",
    "throughput": "throughput",
    "latency": "latency",
    "chunks": "chunks",
    "ladder": "ladder",
    "traffic": "traffic",
    "endpoint": "vllm_server",
}
WORKLOADS = {"throughput": ("short", "long"), "ladder": ("chat", "rag", "document", "mix")}


def main(args) -> int:
    """Run the parts that were asked for (none named: all of them); returns the exit code, of the first that fails."""
    if args.url:
        return import_module(".endpoint", __name__).main(args)
    for part in args.parts or PARTS:
        if args.workloads and part in WORKLOADS and not set(args.workloads) & set(WORKLOADS[part]):
            continue  # none of its own was asked for
        code = import_module(f".{PARTS[part]}", __name__).main(args)
        if code:
            return code
        print()
    return 0

"""python -m course_lib demo | simulate | check | bench | results | gpu-check | doctor | fetch"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from .bench import PARTS, WORKLOADS
from .validation import check_int


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        return check_int("value", int(text), 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def one_of(names: SequenceOf[str]) -> Callable[[str], str]:
    """An argparse type: one of the names. (`choices` would refuse an empty list of them.)"""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown: it must be one of {', '.join(names)}")
        return text

    return check


def main(argv: list[str] | None = None) -> int:
    from .simulate import add_arguments

    parser = argparse.ArgumentParser(prog="python -m course_lib", description="A small LLM serving engine to learn from.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="four chats stream, a long document arrives: with and without chunked prefill")
    demo.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, a folder or a hub id")
    demo.add_argument("--chunk", type=positive, default=256, help="chunk size of the second run, in tokens (default 256)")
    demo.add_argument("--repeat", type=positive, default=1, help="how often to measure each setting, in turns (default 1)")
    demo.add_argument("--json", metavar="FILE", help="also write the measurements of every run as JSON")
    demo.add_argument("--svg", metavar="FILE", help="also write both timelines as one SVG picture")
    simulation = commands.add_parser("simulate", help="the stall on a chip that you don't have: virtual time, no model, no torch")
    add_arguments(simulation, positive)
    checking = commands.add_parser("check", help="your exercises: what is done; or check notebooks, one's own or a class's")
    checking.add_argument("paths", nargs="*", metavar="PATH", help="notebooks, or folders of them, to run and check")
    checking.add_argument("--all", action="store_true", help="the table of all exercises, as remembered from their check cells")
    checking.add_argument("--csv", metavar="FILE", help="with PATH: where the results go (default: the terminal)")
    bench = commands.add_parser("bench", help="measure the engine, beside what you would pick instead")
    bench.add_argument("parts", nargs="*", type=one_of(PARTS), metavar="PART", help=f"{', '.join(PARTS)} (default: all of them)")
    bench.add_argument("--threads", type=positive, help="threads of every contender (default: the number of cores)")
    bench.add_argument("--rounds", type=positive, default=5, help="runs of each contender, in turns (default 5)")
    names = [name for part in WORKLOADS.values() for name in part]
    bench.add_argument("--workloads", nargs="+", choices=names, metavar="NAME",
        help="; ".join(f"of {part}: {', '.join(names)}" for part, names in WORKLOADS.items()) + " (default: all of them)")  # fmt: skip
    bench.add_argument("--quick", action="store_true",
        help="ladder and chunks with the tiny model and small sizes: only to see whether all of it runs")  # fmt: skip
    bench.add_argument("--contenders", nargs="+", metavar="NAME", help="of throughput (default: all that are installed)")
    bench.add_argument("--at-most", type=float, metavar="SECONDS",
        help="of throughput: another engine that has computed for longer sits out the other rounds (default: none does)")  # fmt: skip
    bench.add_argument("--vllm-venv", default=".venv-vllm", metavar="FOLDER", help="where vLLM's CPU build is (default .venv-vllm)")
    bench.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="of traffic: Azure's .csv, Mooncake's .jsonl")
    bench.add_argument("--url", help="measure an OpenAI-compatible server with the demo's workload instead, from the client's side")
    bench.add_argument("--model", help="with --url: the model's name there (default: the first that it lists)")
    bench.add_argument("--chunk", type=positive, help="with --url: this engine's chunk size beside it (default: whole prompts)")
    bench.add_argument("--svg", metavar="FILE", help="with --url: also write both timelines as one SVG picture")
    bench.add_argument("--out", metavar="FOLDER", help="where the raw numbers go (default bench/results)")
    gpu = commands.add_parser("gpu-check", help="test the GPU kernels on this GPU and measure them beside other libraries")
    gpu.add_argument("--out", metavar="FILE", help="where the measurements go, as JSON (default bench/results/gpu_check.json)")
    gpu.add_argument("--dry-run", action="store_true", help="on the CPU with tiny sizes: only to see whether all of it runs")
    commands.add_parser("results", help="write docs/results.md and its pictures from the measurements in bench/results")
    commands.add_parser("doctor", help="what is installed, what will be used, what to do about anything missing")
    commands.add_parser("fetch", help="get the small model and convert it, once")
    args = parser.parse_args(argv)
    if args.command == "demo":
        from .demo import main as command

        return command(args)
    if args.command == "check":
        from .checks.command import main as command

        if args.all == bool(args.paths) or (args.csv and not args.paths):
            checking.error("give either --all, or one PATH or more (with --csv FILE, if you like)")
        return command(args)
    if args.command == "gpu-check":
        from .gpu_check import main as command

        return command(args)
    if args.command == "simulate":
        from .simulate import main as command

        return command(args)
    if args.command == "bench":
        from .bench import main as command

        return command(args)
    if args.command == "results":
        from .bench.results_page import main as command

        return command()
    from . import doctor

    return doctor.run() if args.command == "doctor" else doctor.fetch()


def run() -> int:
    """`main`, but for a Python without what the course needs, and a reader that has seen enough (`… | head`)."""
    try:
        try:
            return main()
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("course_lib"):
                raise
            print(f"{sys.executable} has no package {error.name!r}. The course's own Python has it: .venv/bin/python, or activate .venv", file=sys.stderr)
            return 2
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return 141  # what a shell shows for a program that SIGPIPE ended


if __name__ == "__main__":
    sys.exit(run())

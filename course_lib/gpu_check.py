"""`python -m course_lib gpu-check`: are the GPU kernels right on this GPU, and how fast are they?

Runs the tests marked gpu, then measures: first what the machine can do (copying memory, multiplying matrices), then
each kernel in many shapes beside what other libraries take, then decode steps of the whole engine, and whether its
tokens in bfloat16 are as good as rounding allows. The share of the ceiling is the time that the machine's own rates
would allow, divided by the time taken. The measuring itself is in gpu_jobs.py, in a process of its own: a kernel that
breaks the GPU for one process costs one row, not the report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
TESTS = [CHECKOUT / "tests" / name for name in ("test_triton_paged.py", "test_decode_graphs.py")]
DEFAULT_OUT = "bench/results/gpu_check.json"
MAX_DIFFERENCE = 2**-6  # of two bfloat16 results, as a part of the largest value: the bound of the tests
MAX_RESTARTS = 5


def main(args) -> int:
    """Returns 0; 1 if a test failed, a result was wrong or a kernel of ours did not run; 2 where there is no GPU."""
    if missing := what_is_missing(args.dry_run):
        print(f"gpu-check: {missing}")
        return 2
    if args.dry_run:
        print("Dry run on the CPU, in Triton's interpreter, with tiny sizes: the times mean nothing.")
    report = {"dry run": args.dry_run, "date": time.strftime("%Y-%m-%d"), "tests": run_tests(args.dry_run), "rows": []}
    print(f"tests     {report['tests']['summary']}", flush=True)
    ceilings: dict[str, float] = {}
    title = None
    for line in measurements(args.dry_run):
        if "machine" in line:
            report["machine"] = line["machine"] | {"driver": driver_version()}
            print("machine   " + ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value is not None))
        if "row" not in line:
            continue
        row = line["row"]
        report["rows"].append(row)
        if row["kind"] == "ceiling" and "seconds" in row:
            name = "flops" if "flops" in row else "bytes"
            ceilings[name] = row[name] / row["seconds"]
        if "absent" in row:
            continue
        if title != (title := (row["kind"], row["model"])):
            print(f"\n{', '.join(filter(None, title))}", flush=True)
        print(row_text(row, ceilings), flush=True)
    absent = {row["who"]: row["absent"] for row in report["rows"] if "absent" in row}
    print("\nNot installed, so not measured: " + ("; ".join(f"{who} ({why})" for who, why in absent.items()) or "nothing"))
    problems = problems_of(report)
    print("\n".join(["", *problems]) if problems else "\nAll results agree.")
    out = args.out or (None if args.dry_run else DEFAULT_OUT)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"Measurements written to {out}")
    return 1 if problems else 0


def what_is_missing(dry_run: bool) -> str | None:
    """Without which nothing can be measured, and what to do about it."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton isn't installed here. PyTorch's CUDA builds for Linux bring it along."
    import torch

    if not dry_run and not torch.cuda.is_available():
        return "torch sees no CUDA GPU here. With --dry-run everything runs on the CPU, and the times mean nothing."
    return None


def driver_version() -> str | None:
    """Of NVIDIA's driver, where its own tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def environment(dry_run: bool) -> dict[str, str]:
    """For a process of ours: the kernels interpreted in a dry run, else compiled."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "TRITON_INTERPRET": "1" if dry_run else "0", "PYTHONPATH": path}


def run_tests(dry_run: bool) -> dict:
    """The tests marked gpu (all skipped in a dry run): {"exit code", "summary", "output"}."""
    if missing := [str(path) for path in TESTS if not path.exists()]:
        return {"exit code": None, "summary": f"not run: {', '.join(missing)} isn't here", "output": ""}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-m", "gpu", *map(str, TESTS)]
    if not dry_run and importlib.util.find_spec("xdist"):  # most of the time goes to compiling, which can be shared out
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment(dry_run), capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        print("\n".join(lines[-60:]))
    return {"exit code": done.returncode, "summary": lines[-1] if lines else "", "output": "\n".join(lines[-200:])}


def measurements(dry_run: bool) -> Iterator[dict]:
    """The lines of gpu_jobs.py. If its process dies, the job it was at gets a row that says so, and the next begin anew."""
    first = 0
    for _ in range(MAX_RESTARTS):
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                jobs_command(first, dry_run), env=environment(dry_run), stdout=subprocess.PIPE, stderr=errors, text=True
            )
            job = {"job": None, "kind": "start", "model": "", "shape": "", "who": "ours"}
            is_reported = False
            for text in process.stdout:
                if not text.startswith("{"):  # something that a library prints
                    continue
                line = json.loads(text)
                if "job" in line:
                    job, is_reported = line, False
                is_reported |= "error" in line.get("row", {})
                yield line
            if process.wait() == 0:
                return
            errors.seek(0)
            last_words = " ".join(errors.read().split())[-300:]
        if not is_reported:
            error = f"the process ended with {process.returncode}: {last_words}"
            yield {"row": {name: job[name] for name in ("kind", "model", "shape", "who")} | {"error": error}}
        if job["job"] is None:
            return
        first = job["job"] + 1


def jobs_command(first: int, dry_run: bool) -> list[str]:
    return [sys.executable, "-m", "course_lib.gpu_jobs", str(first), *(["--dry-run"] if dry_run else [])]


def row_text(row: dict, ceilings: dict[str, float]) -> str:
    """One line of the table."""
    text = f"  {row['shape']:<42} {row['who']:<28}"
    if "gap" in row:
        return (
            f"{text} {row['best']} of {row['tokens']} tokens are the best in float32, the others at most "
            f"{row['gap']:.3f} below it (allowed: {row['bound']:.3f})"
        )
    if "seconds" not in row:
        return f"{text} {row.get('left out') or row['error']}"
    seconds = row["seconds"]
    rates = {name: row.get(name, 0) / seconds for name in ("bytes", "flops")}
    shares = {name: rates[name] / ceilings[name] for name in rates if name in ceilings}
    limit = max(shares or rates, key=(shares or rates).get)
    rate = f"{rates[limit] / 1e9:7.0f} GB/s   " if limit == "bytes" else f"{rates[limit] / 1e12:7.1f} TFLOP/s"
    text += f"{seconds * 1e6:10.1f} µs {rate}"
    if row["kind"] != "ceiling" and shares:
        text += f" {shares[limit]:5.0%} of the ceiling"
    if "tokens per second" in row:
        text += f"  {row['tokens per second']:.0f} tokens/s"
    if row.get("difference", 0) > MAX_DIFFERENCE:
        text += f"  DIFFERS from ours by {row['difference']:.1%}"
    return text


def problems_of(report: dict) -> list[str]:
    """What makes the check fail, a line each."""
    problems = []
    if report["tests"]["exit code"]:
        problems.append(f"The tests failed: {report['tests']['summary']}")
    elif not report["dry run"] and "passed" not in report["tests"]["summary"]:
        problems.append(f"No test ran: {report['tests']['summary']}")
    for row in report["rows"]:
        where = f"{row['kind']} {row['model']} {row['shape']}"
        if "error" in row and row["who"].startswith("ours"):
            problems.append(f"{where}: {row['error']}")
        if "gap" in row and not row["gap"] <= row["bound"]:
            problems.append(f"{where}: a token is {row['gap']:.3f} below the best, rounding explains {row['bound']:.3f}")
        # A NaN is no number that is small enough.
        if not row.get("difference", 0) <= MAX_DIFFERENCE and re.match("SDPA|PyTorch", row["who"]):
            problems.append(f"{where}: our result differs from {row['who']} by {row['difference']:.1%}")
    return problems

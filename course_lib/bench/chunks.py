"""`python -m course_lib bench chunks`: what the chunk size does to the demo, measured and simulated.

Measured on SmolLM2, every size once a round, in turns; and predicted by the simulator, whose cost
model was fitted to this machine just before (calibrate.py), from steps of another workload. How far
the two are apart is part of the result. The same sweep at a data centre's size is in at_scale.py.
"""

from __future__ import annotations

import os
from statistics import median

from .. import demo
from ..metrics import percentile
from . import at_scale, machine

SIZES = (16, 32, 64, 128, 256, 512, 1024, None)
JUDGED = SIZES[1:]  # the sizes that the errors are taken over: steps of 16 tokens are hardly longer than decodes
GAP, P99 = "longest gap in a stream, s", "P99 inter-token latency, s"
TTFT, RATE = "document's time to first token, s", "output tokens per second"
TARGETS = {"step_time": 0.15, "stall": 0.20}  # errors that the simulator should keep within
PLOT = machine.RESULTS.parents[1] / "docs" / "chunk_size.png"


def main(args) -> None:
    import torch

    from .. import ModelRunner
    from ..calibrate import calibrate
    from ..runners.simulated import SimulatedRunner

    threads = args.threads or os.cpu_count()
    torch.set_num_threads(threads)
    runner = ModelRunner("tiny" if args.quick else "smollm2")
    workload = demo.Workload.standard(runner.tokenizer)
    if args.quick:
        workload.document, workload.chats = workload.document[:256], {n: ids[:32] for n, ids in workload.chats.items()}
    demo.run(runner, workload, 256)  # warm up
    cost = calibrate(runner, seconds=0.1 if args.quick else 15.0)
    print(f"Fitted to this machine: {cost}")
    rows = []
    for size in SIZES:
        predicted = demo.run(SimulatedRunner("smollm2-135m", "laptop", cost), workload, size).measures()
        rows.append({"max_prefill_chunk_size": size, "predicted": predicted, "measured": [], "step_errors": []})
    for index in range(args.rounds):
        turn = index % len(rows)
        for row in rows[turn:] + rows[:turn]:
            measured = demo.run(runner, workload, row["max_prefill_chunk_size"])
            row["measured"].append(measured.measures())
            row["step_errors"].append(step_errors(cost, measured.trace))
    errors = errors_of(rows)
    print(f"\nThe demo by chunk size: medians of {args.rounds} runs in turns, {threads} threads, attention {runner.attention};")
    print(f"in brackets what the simulator said\n{table(rows)}\n\n{errors_text(errors)}")
    simulated = at_scale.sweeps()
    print(f"\n{at_scale.table(simulated)}")
    if args.quick and args.out is None:
        return  # not a measurement
    results = {
        "threads": threads, "rounds": args.rounds, "model": runner.name, "attention": runner.attention, "cost_model": str(cost),
        "document": len(workload.document), "runs": rows, "errors": errors, "at_scale": simulated,
    }  # fmt: skip
    print(f"raw numbers: {machine.save('chunks', results, args.out)}")
    if args.out is None:
        PLOT.parent.mkdir(exist_ok=True)
        figure(rows, len(workload.document)).savefig(PLOT, dpi=110, metadata={"Software": None})
        print(f"plot: {PLOT}")


# ---- how far off the simulator is -----------------------------------------------------------------


def step_errors(cost, trace) -> dict[str, float]:
    """Relative errors of the predicted step times in one run: their median and 90th percentile."""
    from ..calibrate import observations, relative_errors

    errors = relative_errors(cost, observations(trace))
    return {"median": percentile(errors, 50), "p90": percentile(errors, 90), "steps": len(errors)}


def errors_of(rows: list[dict]) -> dict:
    """How far the simulator was off, by chunk size and over the sizes in JUDGED (as parts: 0.1 is 10 %).

    step_time  a typical step's error: its median in each run, then the median over the rounds
    stall      of the longest gap: predicted against the median over the rounds
    """
    by_size = {}
    for row in rows:
        stall = median(run[GAP] for run in row["measured"])
        by_size[str(row["max_prefill_chunk_size"] or "whole")] = {
            "step_time": median(run["median"] for run in row["step_errors"]),
            "stall": abs(row["predicted"][GAP] - stall) / stall,
        }
    judged = [by_size[str(size or "whole")] for size in JUDGED]
    summary = {}
    for kind, target in TARGETS.items():
        values = [each[kind] for each in judged]
        summary[kind] = {"median": median(values), "max": max(values), "target": target, "met": median(values) <= target}
    return {"sizes": f"{JUDGED[0]} to whole", "by_size": by_size, **summary}


def errors_text(errors: dict) -> str:
    """The simulator's errors in words, beside their targets."""
    lines = [f"How far off the simulator was, over chunks of {errors['sizes']}:"]
    for kind, words in (("step_time", "time of a step"), ("stall", "longest gap")):
        each = errors[kind]
        verdict = "met" if each["met"] else "MISSED"
        lines.append(
            f"  {words}: median {each['median']:.1%} (target {each['target']:.0%}: {verdict}), worst size {each['max']:.1%}"
        )
    return "\n".join(lines)


# ---- shown ----------------------------------------------------------------------------------------

COLUMNS = {
    "document's TTFT": (TTFT, ".2f"),
    "P99 ITL of the others": (P99, ".3f"),
    "longest gap": (GAP, ".3f"),
    "tokens/s": (RATE, ".1f"),
}


def table(rows: list[dict]) -> str:
    """Per chunk size the median, its range over the rounds, and in brackets the simulator's value."""
    lines = [f"{'chunk':>6}" + "".join(f"{title:>30}" for title in COLUMNS)]
    for row in rows:
        cells = []
        for key, form in COLUMNS.values():
            values = [run[key] for run in row["measured"]]
            spread = f"{min(values):{form}}-{max(values):{form}}"
            cells.append(f"{median(values):{form}} {spread} [{row['predicted'][key]:{form}}]")
        lines.append(f"{row['max_prefill_chunk_size'] or 'whole':>6}" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)


def figure(rows: list[dict], document: int):
    """Two pictures on one axis of chunk sizes: the two times that pull against each other, and the throughput.

    Filled marks: medians, with a line from the lowest to the highest run. Open marks: the simulator.
    Returns a matplotlib figure.
    """
    from matplotlib.figure import Figure

    sizes = [row["max_prefill_chunk_size"] or document for row in rows]
    drawn = Figure(figsize=(8, 6), layout="constrained")
    times, rates = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    series = (
        (times, GAP, "longest gap of the streams", "#d55e00", "o"),
        (times, TTFT, "document's time to first token", "#009e73", "^"),
        (rates, RATE, "output tokens per second", "#0072b2", "s"),
    )
    for axes, key, label, colour, marker in series:
        measured = [[run[key] for run in row["measured"]] for row in rows]
        for size, values in zip(sizes, measured, strict=True):
            axes.plot([size, size], [min(values), max(values)], color=colour, linewidth=1)
        axes.plot(sizes, [median(values) for values in measured], marker + "-", color=colour, label=f"{label}, measured")
        axes.plot(
            sizes, [row["predicted"][key] for row in rows], marker + ":", color=colour, mfc="white", label=f"{label}, simulated"
        )
    times.set_ylabel("seconds")
    rates.set_ylabel("tokens per second")
    for axes in (times, rates):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    rates.set_xscale("log", base=2)
    rates.set_xticks(sizes, [str(size) for size in sizes[:-1]] + [f"whole\n({document})"])
    rates.set_xlabel("chunk size, tokens")
    times.set_title(f"Four chats stream, a document of {document:,} tokens arrives (SmolLM2, CPU)")
    return drawn

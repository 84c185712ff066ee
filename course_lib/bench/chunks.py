"""`python -m course_lib bench chunks`: the demo's longest gap, and its throughput, against the chunk size.

Measured on SmolLM2, every size once a round, in turns; and predicted by the simulator, whose cost
model was fitted to this machine just before (calibrate.py), from steps of another workload.
"""

from __future__ import annotations

import os
from statistics import median

from .. import demo
from . import machine

SIZES = (32, 64, 128, 256, 512, 1024, None)
GAP, RATE = "longest gap in a stream, s", "output tokens per second"
PLOT = machine.RESULTS.parents[1] / "docs" / "chunk_size.png"


def main(args) -> None:
    import torch

    from .. import ModelRunner
    from ..calibrate import calibrate
    from ..runners.simulated import SimulatedRunner

    threads = args.threads or os.cpu_count()
    torch.set_num_threads(threads)
    runner = ModelRunner("smollm2")
    workload = demo.Workload.standard(runner.tokenizer)
    demo.run(runner, workload, 256)  # warm up
    cost = calibrate(runner)
    print(cost)
    rows = []
    for size in SIZES:
        predicted = demo.run(SimulatedRunner("smollm2-135m", "laptop", cost), workload, size).measures()
        rows.append({"max_prefill_chunk_size": size, "predicted": predicted, "measured": []})
    for index in range(args.rounds):
        for row in rows[index % len(rows) :] + rows[: index % len(rows)]:
            row["measured"].append(demo.run(runner, workload, row["max_prefill_chunk_size"]).measures())
    print(f"\nThe demo by chunk size: medians of {args.rounds} runs in turns, {threads} threads, attention {runner.attention}")
    print(f"{'chunk':>8}{'longest gap':>14}{'predicted':>12}{'output tokens/s':>18}{'predicted':>12}")
    for row in rows:
        gap, rate = (median(run[key] for run in row["measured"]) for key in (GAP, RATE))
        size = row["max_prefill_chunk_size"] or "whole"
        print(f"{size:>8}{gap:12.2f} s{row['predicted'][GAP]:10.2f} s{rate:18.1f}{row['predicted'][RATE]:12.1f}")
    path = machine.save("chunks", {"threads": threads, "cost_model": str(cost), "document": len(workload.document), "runs": rows}, args.out)
    print(f"raw numbers: {path}")
    if args.out is None:
        plot(rows, len(workload.document))
        print(f"plot: {PLOT}")


def plot(rows: list[dict], document: int) -> None:
    """Longest gap and throughput on one picture, both against the chunk size."""
    from matplotlib.figure import Figure

    sizes = [row["max_prefill_chunk_size"] or document for row in rows]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    gaps = figure.subplots()
    rates = gaps.twinx()
    lines = []
    for axes, key, colour, marker in ((gaps, GAP, "#d55e00", "o"), (rates, RATE, "#0072b2", "s")):
        measured = [[run[key] for run in row["measured"]] for row in rows]
        for size, values in zip(sizes, measured, strict=True):
            axes.plot([size, size], [min(values), max(values)], color=colour, linewidth=1)
        lines += axes.plot(sizes, [median(values) for values in measured], marker + "-", color=colour, label=f"{key}, measured")
        lines += axes.plot(sizes, [row["predicted"][key] for row in rows], marker + ":", color=colour, mfc="white", label=f"{key}, predicted")
        axes.set_ylabel(key, color=colour)
        axes.set_ylim(bottom=0)
    gaps.set_xscale("log", base=2)
    gaps.set_xticks(sizes, [str(size) for size in sizes[:-1]] + [f"whole\n({document})"])
    gaps.set_xlabel("chunk size, tokens")
    gaps.set_title(f"Four chats stream, a document of {document} tokens arrives (SmolLM2, CPU)")
    figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110, metadata={"Software": None})

"""The ladder in numbers: what is read off each run's trace, what a rung changes, and the tables that say so.

Times are in seconds, memory in slots (a slot holds the keys and values of one token).

A run that was cut tells less than a whole one. Its times to first token are then lower bounds: a request that was
still waiting counts with the time that it had waited. The tables mark them with ">".
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from ..metrics import Summary, of_requests
from ..trace import Trace
from ..workloads import Request

CLEAR = 0.1  # a change of less than 10 % is none: single rounds differ by about as much

# What rungs are compared by: name -> (path in a run's numbers, True where more is better).
COMPARED = {
    "median TTFT": (("ttft_s", "p50"), False),
    "longest TTFT": (("ttft_s", "max"), False),
    "document's TTFT": (("per_request", "document", "ttft_s"), False),
    "median ITL": (("itl_s", "p50"), False),
    "P99 ITL": (("itl_s", "p99"), False),
    "longest gap": (("stall_s",), False),
    "output tokens/s": (("output_tokens_per_second",), True),
    "KV slots reserved": (("kv_slots", "reserved_peak"), False),
}


def tokens_of(trace: Trace) -> dict[str, list[int]]:
    """Request -> the token ids that it got, in order."""
    tokens: dict[str, list[int]] = {name: [] for name in trace.requests}
    for step in trace.steps:
        for name, token_id in step.tokens.items():
            tokens[name].append(token_id)
    return tokens


def measures(trace: Trace, requests: list[Request]) -> dict:
    """One run's numbers, as they are kept in JSON."""
    end, asked = trace.steps[-1].end, sum(request.max_tokens for request in requests)
    begin = min(record.arrival_time for record in trace.requests.values())
    of_each, tokens = of_requests(trace), tokens_of(trace)
    arrived = {name: each for name, each in of_each.items() if trace.requests[name].arrival_time < end}
    waiting = [name for name, each in arrived.items() if each.ttft is None]
    output = sum(map(len, tokens.values()))
    served = sum(trace.requests[name].prompt_tokens for name, ids in tokens.items() if ids) + output
    ttfts = [end - trace.requests[name].arrival_time if each.ttft is None else each.ttft for name, each in arrived.items()]
    gaps = [gap for each in of_each.values() for gap in each.itl]
    return {
        "cut": None if output == asked else {"after_s": end - begin, "tokens": output, "of": asked, "waiting": len(waiting)},
        "ttft_s": _summary(ttfts),
        "itl_s": _summary(gaps),
        "stall_s": max(gaps, default=None),
        "duration_s": end - begin,
        "output_tokens": output,
        "output_tokens_per_second": output / (end - begin),
        "total_tokens_per_second": served / (end - begin),
        "computed_tokens": sum(chunk.num_tokens for step in trace.steps for chunk in step.chunks),
        "steps": len(trace.steps),
        "kv_slots": kv_slots(trace),
        "preemptions": sum(len(step.preempted) for step in trace.steps),
        "prefix_hit_tokens": sum(record.prefix_hit_tokens for record in trace.requests.values()),
        "per_request": {name: {"ttft_s": each.ttft, "stall_s": each.stall} for name, each in of_each.items()},
    }


def _summary(values: list[float]) -> dict[str, float | None]:
    summary = Summary.of(values)
    return {"p50": summary.p50, "p90": summary.p90, "p99": summary.p99, "max": summary.max}


def kv_slots(trace: Trace) -> dict[str, float]:
    """Slots reserved and used while the steps ran: their peak, their mean over the time of the steps, and the part of
    the reserved ones that was waste: reserved inside someone's blocks, and empty. Also the most requests that held any.

    Only the last block of a request has empty slots, and shared blocks are full: so what is used is what is reserved
    less each holder's waste.
    """
    size = trace.config["block_size"]
    held: dict[str, int] = {}  # request -> its tokens with this step's
    reserved, used, seconds, most = [], [], [], 0
    for step in trace.steps:
        for name in step.preempted:
            held.pop(name, None)
        for name, start, num_tokens, _kind, _is_last in step.chunks:
            held[name] = start + num_tokens
        reserved.append(step.blocks_used * size)
        used.append(reserved[-1] - sum(-tokens % size for tokens in held.values()))
        seconds.append(step.end - step.start)
        most = max(most, len(held))
        for name in step.finished:
            held.pop(name, None)

    def mean(values: list[int]) -> float:
        return sum(value * time for value, time in zip(values, seconds, strict=True)) / sum(seconds)

    waste = 1 - mean(used) / mean(reserved) if any(reserved) else 0.0
    return {
        "reserved_peak": max(reserved), "reserved_mean": mean(reserved), "used_peak": max(used), "used_mean": mean(used),
        "waste": waste, "requests_peak": most,
    }  # fmt: skip


def value_at(row: dict, path: tuple[str, ...]):
    """row[path[0]][path[1]]…; None where there is no such thing."""
    for key in path:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def values_of(runs: list[dict], rung: str, path: tuple[str, ...]) -> list[float]:
    """One measure of one rung, round by round; rounds that haven't it are left out."""
    values = [value_at(row, path) for row in runs if row["rung"] == rung]
    return [value for value in values if value is not None]


def effects(runs: list[dict], names: list[str]) -> list[dict]:
    """What each rung changes against the one before, by every measure: the ratio of both within a round.

    "better" or "worse" where every round says so, and the median ratio by at least 10 %; else "no clear change".
    bound: the rung before was cut, its times to first token are lower bounds, and the ratio is at most this: enough to
    see that something got better, else "not known".
    """
    found = []
    for before, after in pairwise(names):
        was_cut = any(row["cut"] for row in runs if row["rung"] == before)
        for measure, (path, more_is_better) in COMPARED.items():
            pairs = zip(values_of(runs, before, path), values_of(runs, after, path), strict=False)
            ratios = [new / old for old, new in pairs if old]
            if not ratios:
                continue
            bound = was_cut and "TTFT" in measure
            gains = [ratio if more_is_better else 1 / ratio for ratio in ratios]
            verdict = "no clear change"
            if min(gains) > 1 and median(gains) >= 1 + CLEAR:
                verdict = "better"
            elif bound:
                verdict = "not known"
            elif max(gains) < 1 and 1 / median(gains) >= 1 + CLEAR:
                verdict = "worse"
            found.append({
                "from": before, "to": after, "measure": measure, "ratio": median(ratios),
                "min": min(ratios), "max": max(ratios), "verdict": verdict, "bound": bound,
            })  # fmt: skip
    return found


# ---- tables ---------------------------------------------------------------------------------------

TIMES = {
    "TTFT P50": ("ttft_s", "p50"), "TTFT max": ("ttft_s", "max"), "ITL P50": ("itl_s", "p50"), "ITL P90": ("itl_s", "p90"),
    "ITL P99": ("itl_s", "p99"), "longest gap": ("stall_s",),
}  # fmt: skip
MEMORY = {
    "reserved": ("kv_slots", "reserved_peak"), "mean": ("kv_slots", "reserved_mean"), "used": ("kv_slots", "used_peak"),
    "mean ": ("kv_slots", "used_mean"), "waste": ("kv_slots", "waste"), "at once": ("kv_slots", "requests_peak"),
    "hits": ("prefix_hit_tokens",), "preempted": ("preemptions",),
}  # fmt: skip


def table(result: dict) -> str:
    """One workload in text: a table of times and rates, and one of memory. Medians over the rounds (and their range)."""
    runs = result["runs"]
    names = list(dict.fromkeys(row["rung"] for row in sorted(runs, key=lambda row: row["round"])))
    rounds = 1 + max(row["round"] for row in runs)
    lines = [
        f"seconds, median of {rounds} rounds (and range)",
        f"{'':20}" + "".join(f"{name:>21}" for name in TIMES) + f"{'output tokens/s':>24}",
    ]
    notes = []
    for name in names:
        cut = [row["cut"] for row in runs if row["rung"] == name and row["cut"]]
        cells = []
        for title, path in TIMES.items():
            is_bound = cut and title.startswith("TTFT")
            cells.append(f"{_spread(values_of(runs, name, path), '.3f', '>' if is_bound else ''):>21}")
        rate = _spread(values_of(runs, name, ("output_tokens_per_second",)), ".1f")
        lines.append(f"{name:20}{''.join(cells)}{rate:>24}")
        if cut:
            worst = min(cut, key=lambda each: each["tokens"])
            notes.append(
                f"{name}: cut after {worst['tokens']} of {worst['of']} tokens ({worst['after_s']:.0f} s), {worst['waiting']} requests still waiting"
            )
    lines += [
        *notes,
        "",
        "KV slots, peak and mean; waste: reserved and empty",
        f"{'':20}" + "".join(f"{name:>11}" for name in MEMORY),
    ]
    for name in names:
        cells = [_number(median(values_of(runs, name, path)), title) for title, path in MEMORY.items()]
        lines.append(f"{name:20}" + "".join(f"{cell:>11}" for cell in cells))
    busy = {name: values_of(runs, name, ("gpu_utilisation_percent",)) for name in names}
    if any(busy.values()):
        lines.append("GPU busy: " + ", ".join(f"{name} {median(values):.0f} %" for name, values in busy.items() if values))
    return "\n".join([*lines, "", different_text(result)])


def different_text(result: dict) -> str:
    """Whether all runs gave the same tokens; if not, how near to a tie the two tokens were."""
    found = result["different_tokens"]
    if not found:
        return f"Token ids are equal in all {len(result['runs'])} runs."
    gap = max(each["logit_gap"] for each in found)
    rungs = ", ".join(sorted({each["rung"] for each in found}))
    return f"Token ids differ in {len(found)} answers ({rungs}); where they part, the two logits are at most {gap:.1e} apart."


def effects_text(found: list[dict]) -> str:
    """What each rung improves and what it doesn't, with the ratio to the rung before."""
    lines = ["What each rung changes (the ratio to the rung before)"]
    for name in dict.fromkeys(each["to"] for each in found):
        lines.append(f"  {name}")
        for verdict in ("better", "worse", "no clear change", "not known"):
            words = [
                f"{each['measure']} × {'<' if each['bound'] else ''}{each['ratio']:.2f}"
                for each in found
                if each["to"] == name and each["verdict"] == verdict
            ]
            if words:
                lines.append(f"    {verdict}: {', '.join(words)}")
    return "\n".join(lines)


def _spread(values: list[float], form: str, mark: str = "") -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{mark}{values[0]:{form}}"
    return f"{mark}{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _number(value: float, title: str) -> str:
    return f"{value:.0%}" if title == "waste" else f"{value:,.0f}"


# ---- a picture ------------------------------------------------------------------------------------

SHOWN = {
    "median TTFT": ("seconds", "#009e73", "^"),
    "longest gap": ("seconds", "#d55e00", "o"),
    "output tokens/s": ("tokens per second", "#0072b2", "s"),
    "KV slots reserved": ("slots, at the peak", "#cc79a7", "D"),
}


def figure(result: dict, title: str):
    """One workload: a row per rung, from the bottom of the ladder to its top downwards, and a column per measure.

    Marks are medians, lines reach from the lowest to the highest round. An open mark is a lower bound (a run that was
    cut). Logarithmic axes; a value of 0 has no mark. Returns a matplotlib figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    runs = result["runs"]
    names = list(dict.fromkeys(row["rung"] for row in sorted(runs, key=lambda row: row["round"])))
    drawn = Figure(figsize=(9.5, 3.4), layout="constrained")
    panels = drawn.subplots(1, len(SHOWN), sharey=True)
    for axes, (measure, (unit, colour, marker)) in zip(panels, SHOWN.items(), strict=True):
        for y, name in enumerate(names):
            values = [value for value in values_of(runs, name, COMPARED[measure][0]) if value]
            if values:
                is_bound = "TTFT" in measure and any(row["cut"] for row in runs if row["rung"] == name)
                axes.plot([min(values), max(values)], [y, y], color=colour, linewidth=1)
                axes.plot(median(values), y, marker, color=colour, mfc="white" if is_bound else colour)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        if high < 4 * low:  # nearly equal values should look so
            middle = (low * high) ** 0.5
            low, high = axes.set_xlim(middle / 2, middle * 2)
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 30 * low else (1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(measure, fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    drawn.suptitle(title, fontsize=11)
    return drawn

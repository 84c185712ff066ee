"""The section of docs/results.md about real traffic in the simulator."""

from __future__ import annotations

from .bars import Bar, bars
from .markdown import origin, picture, table, verdict
from .traffic import DESCENT, MAX_DELAY, MAX_SEQS, SLOS, Setting, decode_step

WHOLE_TRACE = 60.0  # seconds of one core that replaying Azure's trace may take
TITLES = {"azure": "Azure", "mooncake": "Mooncake"}

ABOUT = """
Public traces of production traffic, replayed on simulated chips. *Simulated* means: this engine's scheduler and block manager, step by step,
and for the time of each step a roofline of the chip's data sheet. No chip was run. The traces hold sizes and times, no texts. They aren't in
this repository; download them yourself:

- Azure LLM inference trace 2023, conversation: [description and file](https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md),
  CC-BY; P. Patel et al., "Splitwise", ISCA 2024.
- Mooncake, conversation: [FAST25-release/traces](https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces), Apache-2.0;
  R. Qin et al., "Mooncake", FAST 2025.
"""

DIFFERENCES = """
What differs from Sarathi-Serve's own evaluation (Agrawal et al., OSDI 2024, section 5.1), which measured on real A100s that its capacity is 3.5 times
vLLM's under the strict target (Mistral-7B on one A100, openchat_sharegpt4, token budget 512; section 5.2):

- a simulator with a cost model, not a chip: no kernel that is slow for odd sizes, no cost of the CPU beyond a fixed millisecond a step;
- one chip, no pipeline stages, so none of what chunks do for pipeline bubbles;
- the traces' own sizes and arrivals, squeezed or stretched to each rate, where the paper drew Poisson arrivals for sizes of openchat_sharegpt4 and
  arxiv_summarization. Real arrivals come in bursts;
- a target for the P99 of TTFT, which the paper has not: it only keeps the median scheduling delay within its limit. The column *by their rule* takes that
  instead, for first come, first served: a policy that gives every newcomer a little at once looks good by it, whatever its first tokens do. And a median over
  a short slice says little of a queue that has just begun to grow;
- their vLLM of 2023 ran prefill alone, before decode: that is *whole prompts, prefill first* here. *Whole prompts* alone mixes them with decodes, as
  today's vLLM does with chunked prefill off.
"""


def traffic(file: str, content: dict) -> tuple[str, tuple[tuple[str, str], ...]]:
    traces = content["traces"]
    text = ABOUT + "\n" + _traces(traces)
    if content["replays"]:
        text += _replays(content)
    text += _targets(content)
    pictures, on_all = [], _on_all(content) if content["on_all"] else ""
    for search in sorted(content["searches"], key=lambda search: search["trace"]):
        if search["trace"] != "azure" and on_all:
            text, on_all = text + on_all, ""
        text += _search(search)
        svg = file.replace(".json", f"_{search['trace']}_{search['chip']}.svg")
        pictures.append((svg, _picture(search)))
        text += f"\n{picture(svg, _title(search))}\n"
    text += on_all + DIFFERENCES
    files = " ".join(each["file"] for each in traces.values())
    text += f"\nSeeds: {content['seeds']}. All of it took {content['cpu_seconds']:.0f} s of one core ({content['wall_seconds']:.0f} s by the clock).\n"
    return f"{text}\n{origin(file, content, f'python -m course_lib bench traffic --traces {files}')}\n", tuple(pictures)


def _traces(traces: dict[str, dict]) -> str:
    rows = []
    for name, each in traces.items():
        sizes = [f"{each[kind]['mean']:,.0f} / {each[kind]['p50']:,.0f} / {each[kind]['p99']:,.0f} / {each[kind]['max']:,}" for kind in ("prompt_tokens", "output_tokens")]
        rows.append([TITLES[name], f"{each['requests']:,}", f"{each['seconds']:,.0f}", f"{each['requests_per_second']:.2f}", *sizes])
    head = ["trace", "requests", "seconds", "requests/s", "prompt tokens: mean / P50 / P99 / max", "output tokens: the same"]
    return table(head, rows) + "\n"


def _replays(content: dict) -> str:
    rows = [
        [f"{run['name']}", f"{run['steps']:,}", f"{run['output_tokens']:,}", *_latencies(run), f"{run['cpu_seconds']:.1f} ({run['wall_seconds']:.1f})"]
        for run in content["replays"]
    ]
    first = content["replays"][0]
    slowest = max(run["cpu_seconds"] for run in content["replays"])
    return f"""
**All {content['traces'][first['trace']]['requests']:,} requests of Azure's trace at its own rate**, {first['setting']['model']} on {first['setting']['chip']} (simulated). The
target for replaying it, numbers included, is {WHOLE_TRACE:.0f} s of one core of the machine below: {verdict(slowest <= WHOLE_TRACE)}.

{table(["", "steps", "tokens", *LATENCIES, "replayed in s of one core (by the clock)"], rows)}
"""


LATENCIES = ("P50 TTFT, s", "P99 TTFT, s", "P50 ITL, ms", "P99 ITL, ms", "longest gap, ms")


def _latencies(run: dict) -> list[str]:
    times = [f"{1e3 * run[name]:,.0f}" for name in ("p50_itl", "p99_itl", "longest_gap")]
    return [f"{run['p50_ttft']:.2f}", f"{run['p99_ttft']:.2f}", *times]


def _targets(content: dict) -> str:
    steps = ", ".join(
        f"{1e3 * decode_step(chip, model):.1f} ms for {model} on {chip}"
        for chip, model in dict.fromkeys((search["chip"], search["model"]) for search in content["searches"])
    )
    slos = " and ".join(f"{times} × ({name}, with a token budget of {budget:,})" for name, (times, budget) in SLOS.items())
    return f"""
**Capacity** is the highest request rate at which the P99 of ITL and the P99 of TTFT are within their targets, found by bisection to within
{content['tolerance']:.0%}. The ITL targets are those of Sarathi-Serve: {slos} the time of a step with 32 decodes at a context of 4k tokens and no prefill, which
is {steps}; at most {content['max_num_seqs']} requests in flight. A search replays the first {content['slice']:,} requests of the trace, not all of it: its queues have less time to grow,
which flatters, and a P99 of TTFT stands on ten of them. The column *first missed above it* says which target failed at the next higher rate tried, and whether
the limit on the requests in flight was reached there: where steps are long, requests stay long, and that limit ends the capacity before a larger token
budget pays. Every rate tried is in the raw numbers.
"""


def _title(search: dict) -> str:
    return f"{TITLES[search['trace']]}, {search['model']} on {search['chip']}, simulated"


def _search(search: dict) -> str:
    """A table for each SLO, a row for each setting."""
    text = ""
    for slo in dict.fromkeys(row["slo"] for row in search["capacities"]):
        rows = [row for row in search["capacities"] if row["slo"] == slo]
        lines = []
        for row in rows:
            theirs = ["", ""] if row["rate_by_delay"] is None else [_rate(row["rate_by_delay"], search), _gain(row, rows, "rate_by_delay")]
            lines.append([row["name"], _rate(row["rate"], search), _gain(row, rows, "rate"), *theirs])
            lines[-1].append(_end(row, search))
            if search["trace"] == "mooncake":
                lines[-1].append(f"{_hit_rate(row, search):.1%}")
        head = ["", "requests/s", "to whole prompts", f"by their rule (P50 delay within {MAX_DELAY:g} s)", "to whole prompts", "first missed above it"]
        head += ["prefix hits there"] if search["trace"] == "mooncake" else []
        text += f"\n{_title(search)}, **{slo}**: P99 ITL within {1e3 * rows[0]['itl']:.0f} ms, P99 TTFT within {search['ttft']:g} s.\n\n{table(head, lines)}\n"
    if search["trace"] == "mooncake":
        text += """
Blocks are as long as Mooncake's hashes reach, 512 tokens. The chip's own memory keeps too few blocks for what comes again in this trace; the rows with
1,000 GB show what a larger pool would find (Mooncake's is in the hosts' memory; here its K/V costs no transfer). The TTFT target is ours, and only the relaxed ITL target was searched.
"""
    else:
        text += "\nNo request of this trace has a priority, so the policy `priority` is first come, first served there. Policies without another note work on chunks.\n"
    return text


def _rate(rate: float, search: dict) -> str:
    return f"{rate:.2f}" if rate else f"below {search['lowest_rate']:.2f}"


def _gain(row: dict, rows: list[dict], key: str) -> str:
    """Against whole prompts with the same cache and memory, beside decodes; nothing where either capacity wasn't found."""
    setting = Setting(**row["setting"])
    base = next((other for other in rows if Setting(**other["setting"]) == _baseline(setting)), None)
    if setting == _baseline(setting) or base is None or not base[key] or not row[key]:
        return ""
    return f"{row[key] / base[key]:.2f} ×"


def _baseline(setting: Setting) -> Setting:
    same = {name: getattr(setting, name) for name in ("prefix_cache", "block_size", "memory_bytes")}
    return Setting(setting.chip, setting.model, None, **same)


def _tried(row: dict, search: dict) -> list[dict]:
    return next(each["tried"] for each in search["points"] if each["setting"] == row["setting"])


def _end(row: dict, search: dict) -> str:
    """At the next rate tried above the capacity: the targets missed, and the requests in a step when it was full of them."""
    above = min((point for point in _tried(row, search) if point["rate"] > row["rate"]), key=lambda point: point["rate"])
    missed = ["ITL"] * (above["p99_itl"] > row["itl"]) + ["TTFT"] * (above["p99_ttft"] > search["ttft"])
    return " and ".join(missed) + (f", {MAX_SEQS} at once" if above["most_at_once"] == MAX_SEQS else "")


def _hit_rate(row: dict, search: dict) -> float:
    tried = _tried(row, search)
    at = row["rate"] or min(point["rate"] for point in tried)
    return next(point["prefix_hit_rate"] for point in tried if point["rate"] == at)


def _picture(search: dict) -> str:
    groups = {}
    for row in search["capacities"]:
        group = groups.setdefault(f"{row['slo']}: requests a second with P99 ITL within {1e3 * row['itl']:.0f} ms", [])
        group.append(Bar(row["name"], row["rate"], _rate(row["rate"], search)))
    return bars(f"Capacity: {_title(search)}", groups)


def _on_all(content: dict) -> str:
    """Every replay, and the highest rate that met the targets; the slice flatters by as much as the two differ."""
    runs = content["on_all"]
    rows = [[run["name"], f"{run['rate']:.2f}", *_latencies(run), verdict(run["met"])] for run in runs]
    found = {run["name"]: run["rate"] for run in runs if run["met"]}
    said = [f"{name}: {rate:.2f} requests/s" for name, rate in found.items()]
    if len(found) == 2:
        whole, chunked = found.values()
        said.append(f"chunks to whole prompts: {chunked / whole:.2f} ×")
    first = runs[0]
    return f"""
**The same on all {content['traces'][first['trace']]['requests']:,} requests**, {first['setting']['model']} on {first['setting']['chip']}, strict: from the slice's capacity downwards, each rate {DESCENT:g} of the one before, until
both targets are met. In an hour there are busier minutes than in the slice, and queues have time to grow.

{table(["", "requests/s", *LATENCIES, "both targets"], rows)}

Met on the whole trace: {'; '.join(said) or 'at none of these rates'}.
"""


"""The sections of docs/results.md that real clocks measured: each function gets a file's name and content, returns Markdown and pictures."""

from __future__ import annotations

from statistics import median

from .. import demo
from ..lab import compare
from .bars import Bar, bars
from .endpoint import client_trace, restored
from .markdown import origin, picture, ratios, spread, table, verdict
from .throughput import OURS, rates_of

Section = tuple[str, tuple[tuple[str, str], ...]]
GAP = "longest gap in a stream, s"


def stall(file: str, content: dict) -> Section:
    (first, before), (second, after) = content["runs"].items()
    rows = []
    for name in before[0]:
        pair = [[run[name] for run in runs] for runs in (before, after)]
        rows.append([name, *map(spread, pair), ratios(*pair)])
    command = f"python -m course_lib demo --repeat {len(before)} --json FILE --svg FILE"
    text = f"""
Four chats stream from {content['model']}, then a document arrives ([demo.py](../course_lib/demo.py)): runs of each setting: {len(before)}, in turns.

{table(["", first, second, "ratio"], rows)}

![Timelines of both runs](stall.svg)

{origin(file, content, command)}
"""
    return text, ()


def chunks(file: str, content: dict) -> Section:
    rows = []
    columns = {"document's time to first token, s": ".2f", "P99 inter-token latency, s": ".3f", GAP: ".3f", "output tokens per second": ".1f"}
    for row in content["runs"]:
        cells = [f"{spread([run[name] for run in row['measured']], form)}; {row['predicted'][name]:{form}}" for name, form in columns.items()]
        rows.append([str(row["max_prefill_chunk_size"] or "whole"), *cells])
    rounds = len(content["runs"][0]["measured"])
    text = f"""
The demo with every chunk size; rounds: {rounds}, the sizes in turns. Behind the semicolon what the simulator says, with a cost model that
was fitted to this machine just before. A document of {content['document']:,} tokens, {content['threads']} threads.

{table(["chunk, tokens", *columns], rows)}

![Measured and simulated times against the chunk size](chunk_size.png)

Fitted cost model: {content['cost_model']}.
"""
    if "errors" in content:
        text += _errors(content["errors"])
    text += f"\n{origin(file, content, f'python -m course_lib bench chunks --rounds {rounds}')}\n"
    for each in content.get("at_scale", ()):
        text += _at_scale(each)
    return text, ()


def _errors(errors: dict) -> str:
    rows = []
    for kind, words in (("step_time", "time of a step"), ("stall", "longest gap")):
        each = errors[kind]
        rows.append([words, f"{each['median']:.1%}", f"{each['max']:.1%}", f"{each['target']:.0%}", verdict(each["met"])])
    return f"\nHow far off the simulator was, over chunks of {errors['sizes']}:\n\n{table(['', 'median', 'worst size', 'target', ''], rows)}\n"


def _at_scale(each: dict) -> str:
    rows = [
        [str(row["max_prefill_chunk_size"] or "whole"), *(f"{1e3 * row[key]:,.1f}" for key in ("long_ttft_s", "itl_p99_s", "stall_s")), f"{row['tokens_per_second']:,.0f}"]
        for row in each["sizes"]
    ]
    head = ["chunk, tokens", "long prompt's TTFT, ms", "P99 ITL, ms", "longest gap, ms", "tokens/s"]
    return f"\n*Simulated*: {each['model']} on {each['chip']}, {each['running']} streams, then a prompt of {each['prompt_tokens']:,} tokens:\n\n{table(head, rows)}\n"


# What the project asks of itself: ours this many times as fast as a contender.
FASTER_THAN = {"vllm_cpu": 1.2, "transformers_generate_batch": 2.5}


def throughput(file: str, content: dict) -> Section:
    text, pictures = "", []
    for name, workload in content["workloads"].items():
        rates, rows, fewer = rates_of(workload["runs"]), [], ""
        rounds = len(rates[OURS])
        for who, by_round in rates.items():
            cells, values = ["", "", ""], list(by_round.values())
            if len(values) < rounds:
                fewer += f" {who} sat out all but {len(values)}: a run of it takes {workload['total_tokens'] / median(values) / 60:.0f} minutes."
            if who != OURS:
                ours = [rates[OURS][index] for index in by_round]
                ratio, target = median(a / b for a, b in zip(ours, values, strict=True)), FASTER_THAN.get(who)
                goal = f"{target:.1f} ×: {verdict(ratio >= target)}" if target else ""
                differ = workload["differences"][who]
                cells = [ratios(values, ours) + " ×", goal]
                cells.append(f"{differ['requests']} of {workload['prompts']}" + (f" (logits {differ['largest_logit_gap']:.0e} apart)" if differ["requests"] else ""))
            rows.append([f"{who} ({content['contenders'][who]})", spread(values, ".0f"), *cells])
        low, high = workload["prompt_tokens"]
        text += f"""
**{name}**: {workload['prompts']} prompts of {low} to {high:,} tokens, {workload['new_tokens']} new each, SmolLM2 in float32, greedy. Rounds: {rounds}, in turns.{fewer}

{table(["", "total tokens/s", "ours is", "target: at least", "requests with other tokens"], rows)}
"""
        chart = []
        for who, by_round in rates.items():
            values = list(by_round.values())
            chart.append(Bar(who, median(values), f"{median(values):.0f} tokens/s", min(values), max(values)))
        svg = f"throughput_{name}.svg"
        pictures.append((svg, bars(f"Throughput, {name} prompts", {"total tokens per second": chart})))
        text += f"\n{picture(svg, f'Total tokens per second of each contender, {name} prompts')}\n"
    options = f"--workloads {' '.join(content['workloads'])} --contenders {' '.join(content['contenders'])} --rounds {rounds} --threads {content['threads']}"
    options += f" --at-most {content['at_most']:g}" if content.get("at_most") else ""
    return f"{text}\n{origin(file, content, f'python -m course_lib bench throughput {options}')}\n", tuple(pictures)


def latency(file: str, content: dict) -> Section:
    step, read = ([1e3 * value for value in content[name]] for name in ("step_s", "read_s"))
    rows = [
        ["a decode step of one request", f"{spread(step, '.1f')} ms"],
        [f"reading the weights once ({content['weights_bytes'] / 1e6:.0f} MB)", f"{spread(read, '.1f')} ms"],
        ["ratio of the medians", f"{median(step) / median(read):.2f}"],
    ]
    return f"""
With one row a step can't be faster than the weights come from memory. {len(step)} steps and {len(read)} readings in turns, {content['threads']} threads.

{table(["", "median (lowest to highest)"], rows)}

{origin(file, content, f"python -m course_lib bench latency --threads {content['threads']}")}
""", ()


LADDER = {  # column -> (where in a run, format)
    "TTFT P50, s": (("ttft_s", "p50"), ".2f"),
    "longest TTFT, s": (("ttft_s", "max"), ".2f"),
    "ITL P50, s": (("itl_s", "p50"), ".3f"),
    "P99 gap, s": (("itl_s", "p99"), ".3f"),
    "longest gap, s": (("stall_s",), ".3f"),
    "output tokens/s": (("output_tokens_per_second",), ".1f"),
    "KV slots reserved": (("kv_slots", "reserved_peak"), ",.0f"),
    "of them empty": (("kv_slots", "waste"), ".0%"),
}


def ladder(file: str, content: dict) -> Section:
    adds = "\n".join(f"{number}. **{rung['name']}**: {rung['adds']}" for number, rung in enumerate(content["rungs"], start=1))
    text = f"""
The course's steps one after another, each measured on the same requests, which arrive at fixed times. Rounds: {content['rounds']}, the rungs in turns.
Model {content['model']}, {content['threads']} threads, a pool of {content['kv_slots']:,} slots.

{adds}
"""
    groups = {}
    for name, workload in content["workloads"].items():
        runs = {rung["name"]: [run for run in workload["runs"] if run["rung"] == rung["name"]] for rung in content["rungs"]}
        runs = {rung: rows for rung, rows in runs.items() if rows}
        rows, notes = [], []
        for rung, measured in runs.items():
            cuts = [run["cut"] for run in measured if run["cut"]]
            mark = ">" if cuts else ""
            rows.append([rung, *((mark if "TTFT" in column else "") + spread(_at(measured, path), form) for column, (path, form) in LADDER.items())])
            if cuts:
                worst = min(cuts, key=lambda cut: cut["tokens"])
                notes.append(f"{rung} was stopped after {worst['after_s']:.0f} s with {worst['tokens']} of {worst['of']} tokens: its times to first token are lower bounds.")
        different = workload["different_tokens"]
        notes.append(
            f"Token ids are equal in all {len(workload['runs'])} runs." if not different else
            f"Token ids differ in {len(different)} answers; where they part, the two logits are at most {max(each['logit_gap'] for each in different):.1e} apart."
        )
        text += f"\n**{name}**: {workload['about']}.\n\n{table(['', *LADDER], rows)}\n\n{' '.join(notes)}\n\n{_effects(workload['effects'])}\n"
        groups[f"{name}: longest gap, seconds"] = [_bar(rung, _at(measured, ("stall_s",)), ".2f") for rung, measured in runs.items() if _at(measured, ("stall_s",))]
    svg = file.replace(".json", ".svg")
    chosen = "" if file == "ladder.json" else f" --workloads {' '.join(content['workloads'])}"
    command = f"python -m course_lib bench ladder{chosen} --rounds {content['rounds']} --threads {content['threads']}"
    text += f"\n{picture(svg, 'Longest gap between two tokens on each rung')}\n\n{origin(file, content, command)}\n"
    return text, ((svg, bars("The ladder", groups, "prefill")),)


def _at(runs: list[dict], path: tuple[str, ...]) -> list[float]:
    """One value of each run; rounds that haven't it are left out."""
    found = []
    for run in runs:
        value = run
        for key in path:
            value = None if value is None else value.get(key)
        if value is not None:
            found.append(value)
    return found


def _bar(label: str, values: list[float], form: str) -> Bar:
    return Bar(label, median(values), f"{median(values):{form}}", min(values), max(values))


def _effects(effects: list[dict]) -> str:
    """What each rung changes against the one before: the ratios, by verdict."""
    lines = []
    for rung in dict.fromkeys(each["to"] for each in effects):
        parts = []
        for said in ("better", "worse", "no clear change", "not known"):
            words = [f"{each['measure']} × {'<' if each['bound'] else ''}{each['ratio']:.2f}" for each in effects if (each["to"], each["verdict"]) == (rung, said)]
            parts += [f"{said}: {', '.join(words)}"] if words else []
        lines.append(f"- {rung}: {'; '.join(parts)}")
    return "Ratios to the rung before:\n\n" + "\n".join(lines)


def endpoint(file: str, content: dict) -> Section:
    settings = content["settings"]
    titles = [demo.title_of(each["max_prefill_chunk_size"]) for each in settings]
    text = f"""
The demo's workload on vLLM's own server ({content['vllm']}, its CPU build), seen from the clients: four streams over HTTP, then the document of
{content['document']:,} tokens. Rounds: {content['rounds']}, both servers and this engine in turns, {content['threads']} threads.
"""
    for who, words in (("server", "vLLM's server, from its clients' side"), ("this engine", "This engine, in process (no HTTP; the demo's own configuration)")):
        rows = []
        for name in settings[0][who][0]:
            pair = [[run[name] for run in each[who]] for each in settings]
            rows.append([name, *map(spread, pair), ratios(*pair)])
        text += f"\n{words}:\n\n{table(['', *titles, 'ratio'], rows)}\n"
    compared = [f"{each['tokens']:,} tokens of the server with {title}: {_compared(each['differing'])}" for each, title in zip(settings, titles, strict=True)]
    text += f"\nCompared with this engine's, {'; '.join(compared)}.\n\nThe servers were started with the flags that `EngineConfig.to_vllm()` prints:\n\n"
    text += "```bash\n" + "\n".join(each["command"] for each in settings) + "\n```\n\n"
    reasons = {field: why for each in settings for field, why in each["differs"].items()}
    text += "What these flags can't say: " + "; ".join(f"{field}: {why}" for field, why in reasons.items()) + ".\n"
    traces = [client_trace(restored(each["typical_run"])) for each in settings]
    svg = file.replace(".json", ".svg")
    drawn = compare(*traces, titles=tuple(f"vLLM, {title}, seen from the clients" for title in titles))
    command = f"python -m course_lib bench endpoint --rounds {content['rounds']} --threads {content['threads']}"
    text += "\nWhen a server computed a prompt can't be seen from outside: in the picture it counts to the step of its first token.\n"
    text += f"\n{picture(svg, 'Timelines of both servers, as their clients saw them')}\n\n{origin(file, content, command)}\n"
    return text, ((svg, drawn),)


def _compared(differing: list[str] | None) -> str:
    if differing is None:
        return "not told by the server"
    return f"**different** in {', '.join(differing)}" if differing else "all equal"


def gpu(file: str, content: dict) -> Section:
    """What gpu-check found: its tests, and every row that has a time, by kind."""
    if "rows" not in content:  # another tool's file: nothing is known of it
        return f"{origin(file, content, 'python -m course_lib gpu-check')}\n", ()
    ceilings: dict[str, float] = {}
    for row in content["rows"]:
        if row["kind"] == "ceiling" and "seconds" in row:
            name = "flops" if "flops" in row else "bytes"
            ceilings[name] = row[name] / row["seconds"]
    text = f"\nTests: {content['tests']['summary']}.\n"
    for kind in dict.fromkeys(row["kind"] for row in content["rows"] if "seconds" in row):
        rows = [[row["model"], row["shape"], row["who"], *_gpu_cells(row, ceilings)] for row in content["rows"] if row["kind"] == kind and "seconds" in row]
        text += f"\n{kind}:\n\n{table(['model', 'shape', 'who', 'median, µs', 'rate', 'of the ceiling'], rows)}\n"
    for row in content["rows"]:
        if "gap" in row:
            text += (f"\n{row['model']}: {row['best']} of {row['tokens']} greedy tokens are the best in float32, the others at most {row['gap']:.3f} below "
                     f"(allowed {row['bound']:.3f}: {verdict(row['gap'] <= row['bound'])}).\n")  # fmt: skip
        if "error" in row:
            text += f"\n{row['kind']} {row['model']} {row['shape']}, {row['who']}: {row['error']}\n"
    absent = [row["who"] for row in content["rows"] if "absent" in row]
    text += f"\nNot installed, so not measured: {', '.join(dict.fromkeys(absent)) or 'nothing'}.\n"
    return f"{text}\n{origin(file, content, 'python -m course_lib gpu-check')}\n", ()


def _gpu_cells(row: dict, ceilings: dict[str, float]) -> list[str]:
    rates = {name: row.get(name, 0) / row["seconds"] for name in ("bytes", "flops")}
    shares = {name: rates[name] / ceilings[name] for name in rates if name in ceilings}
    limit = max(shares or rates, key=(shares or rates).get)
    rate = f"{rates[limit] / 1e9:,.0f} GB/s" if limit == "bytes" else f"{rates[limit] / 1e12:,.1f} TFLOP/s"
    return [f"{row['seconds'] * 1e6:,.1f}", rate, f"{shares[limit]:.0%}" if shares and row["kind"] != "ceiling" else ""]

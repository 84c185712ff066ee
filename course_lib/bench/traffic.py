"""`python -m course_lib bench traffic --traces …`: real traffic in the simulator, and how much of it an engine takes.

Azure's trace is replayed whole, then squeezed and stretched to find the capacity: the highest request rate at which
the P99 of TTFT and of ITL are within their targets, for whole prompts, for chunks, and for each policy. Mooncake's
says which prompts begin alike, so there the prefix cache is compared.

ITL targets as in Sarathi-Serve (Agrawal et al., OSDI 2024, section 5.1): 5 × (strict) and 25 × (relaxed) the time of a
step with 32 decodes at a context of 4k tokens and no prefill; and their token budgets, 512 and 2,048. They set no TTFT
target, but keep the median scheduling delay within 2 s: that capacity is given too. Everything here is computed: the
scheduler is the engine's own, the time of a step is the cost model's, and only "wall_seconds" and "cpu_seconds" are this machine's.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from ..capacity import highest_rate
from ..config import POLICY_NAMES, EngineConfig
from ..contrast import PrefillFirstScheduler
from ..cost_model import StepWork, step_cost
from ..hardware import GIGA, find_chip, find_model, num_blocks_for
from ..metrics import percentile
from ..scheduler import Scheduler
from ..trace import Trace
from ..workloads import Request, at_rate, read_azure, read_mooncake, simulate
from . import machine

SLOS = {"strict": (5, 512), "relaxed": (25, 2048)}  # name -> (ITL target in steps of 32 decodes, token budget)
MAX_DELAY = 2.0  # seconds: Sarathi-Serve's limit on the median scheduling delay
MAX_SEQS = 128  # Sarathi-Serve's batch size
SLICE = 1000  # requests of a trace that a search replays; whole traces would take hours
TOLERANCE = 0.05  # of the rate, where a search ends
DESCENT, MAX_REPLAYS = 0.85, 6  # of the whole trace: from rate to rate, and how many at most


@dataclass(frozen=True)
class Setting:
    """One way to serve. chunk None: whole prompts; else it is the token budget of a step too.

    prefill_first: prefill alone, before decode (contrast.py). memory_bytes: of the chip, where it isn't the real one's.
    """

    chip: str
    model: str
    chunk: int | None
    policy: str = "prefilling_first"
    prefill_first: bool = False
    prefix_cache: bool = False
    block_size: int = 16
    memory_bytes: float | None = None

    def __str__(self) -> str:
        words = ["whole prompts" if self.chunk is None else f"chunks of {self.chunk:,}"]
        words += ["prefill first"] * self.prefill_first + [self.policy] * (self.policy != "prefilling_first")
        words += ["prefix cache"] * self.prefix_cache
        words += [] if self.memory_bytes is None else [f"{self.memory_bytes / GIGA:,.0f} GB"]
        return ", ".join(words)

    def serve(self, requests: SequenceOf[Request], longest: int) -> Trace:
        """The trace of a run. Whole prompts get a token budget that `longest`, the longest prompt, fits in."""
        chip = find_chip(self.chip)
        if self.memory_bytes is not None:
            chip = replace(chip, memory_bytes=self.memory_bytes)
        config = EngineConfig(
            block_size=self.block_size, num_blocks=num_blocks_for(self.model, chip, self.block_size), max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=self.chunk or longest + MAX_SEQS, max_prefill_chunk_size=self.chunk,
            enable_prefix_caching=self.prefix_cache, policy=self.policy,
        )  # fmt: skip
        return simulate(
            config, requests, model=self.model, chip=chip, scheduler=PrefillFirstScheduler if self.prefill_first else Scheduler
        )


def decode_step(chip: str, model: str) -> float:
    """Seconds of a step with 32 decodes, each of which reads 4,096 tokens and its own."""
    context = 32 * 4097
    return step_cost(find_model(model), find_chip(chip), StepWork(tokens=32, rows=32, pairs=context, context=context)).seconds


def numbers(trace: Trace) -> dict[str, float]:
    """What a run is judged by, in seconds.

    delay: from a request's arrival to the step that first computes some of it;
    most_at_once: requests in one step.
    """
    ttfts, gaps = [], Counter()
    last: dict[str, float] = {}  # request -> when its latest token came
    for step in trace.steps:
        for before, count in Counter(map(last.get, step.tokens)).items():  # most of a step's requests were in the one before
            if before is None:
                ttfts += [step.end - trace.requests[name].arrival_time for name in step.tokens if name not in last]
            else:
                gaps[step.end - before] += count
        last |= dict.fromkeys(step.tokens, step.end)
    first_step: dict[str, float] = {}
    for step in trace.steps:
        for name in step.admitted:
            first_step.setdefault(name, step.start)
    delays = [start - trace.requests[name].arrival_time for name, start in first_step.items()]
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests.values())
    return {
        "p50_ttft": percentile(ttfts, 50),
        "p99_ttft": percentile(ttfts, 99),
        "p50_itl": percentile_of_counted(gaps, 50) if gaps else 0.0,
        "p99_itl": percentile_of_counted(gaps, 99) if gaps else 0.0,
        "longest_gap": max(gaps, default=0.0),
        "p50_delay": percentile(delays, 50),
        "prefix_hit_rate": sum(request.prefix_hit_tokens for request in trace.requests.values()) / prompt_tokens,
        "preemptions": sum(len(step.preempted) for step in trace.steps),
        "most_at_once": max(len(step.chunks) for step in trace.steps),
        "steps": len(trace.steps),
        "output_tokens": len(ttfts) + gaps.total(),
        "virtual_seconds": trace.steps[-1].end,
    }


def percentile_of_counted(counts: Counter, percent: float) -> float:
    """`metrics.percentile` of values of which each comes as often as `counts` says."""
    values = sorted(counts)
    places = list(accumulate(counts[value] for value in values))  # of a value and all below it
    place = (places[-1] - 1) * percent / 100
    low, high = (values[bisect_right(places, index)] for index in (int(place), min(int(place) + 1, places[-1] - 1)))
    return low + (high - low) * (place - int(place))


class Trials:
    """The rates tried with one setting: each is simulated once, whatever the targets."""

    def __init__(self, setting: Setting, requests: list[Request], longest: int) -> None:
        self.setting, self.requests, self.longest = setting, requests, longest
        self.points: dict[float, dict[str, float]] = {}

    def at(self, rate: float) -> dict[str, float]:
        if rate not in self.points:
            self.points[rate] = numbers(self.setting.serve(at_rate(self.requests, rate), self.longest))
        return self.points[rate]

    def capacity(self, limits: dict[str, float], start: float, doublings: int) -> float:
        """The highest rate, to within TOLERANCE, with each of these numbers within its limit; 0.0: less than start / 2**doublings."""

        def is_met(rate: float) -> bool:
            run = self.at(rate)
            return all(run[name] <= limit for name, limit in limits.items())

        return highest_rate(is_met, start, TOLERANCE, doublings)


@dataclass(frozen=True)
class Search:
    """Capacities on one trace, chip and model: which settings meet an SLO's targets up to which rate.

    settings(token budget) gives the settings of an SLO; ttft is its target in seconds. start, doublings: the rate tried
    first, and how often it may be halved or doubled. slos: of SLOS, those searched.
    """

    chip: str
    model: str
    ttft: float
    start: float
    doublings: int
    settings: Callable[[int], list[Setting]]
    slos: tuple[str, ...] = tuple(SLOS)

    def run(self, trace: str, requests: list[Request], longest: int, say: Callable[[str], object] = print) -> dict:
        tried: dict[Setting, Trials] = {}
        rows = []
        for slo in self.slos:
            times, budget = SLOS[slo]
            itl = times * decode_step(self.chip, self.model)
            say(f"\n{self.model} on {self.chip}, {trace}, {slo}: P99 ITL within {itl * 1e3:.0f} ms, P99 TTFT within {self.ttft:g} s")
            for setting in self.settings(budget):
                trials = tried.setdefault(setting, Trials(setting, requests, longest))
                rate = trials.capacity({"p99_itl": itl, "p99_ttft": self.ttft}, self.start, self.doublings)
                theirs = None
                if setting.policy == "prefilling_first":  # Sarathi-Serve's own
                    theirs = trials.capacity({"p99_itl": itl, "p50_delay": MAX_DELAY}, self.start, self.doublings)
                rows.append({"slo": slo, "itl": itl, "setting": asdict(setting), "name": str(setting), "rate": rate, "rate_by_delay": theirs})
                say(f"  {setting!s:44}{rate:8.2f} requests/s" + ("" if theirs is None else f"{theirs:8.2f} by Sarathi-Serve's rule"))
        points = [
            {"setting": asdict(setting), "name": str(setting), "tried": [{"rate": rate} | run for rate, run in trials.points.items()]}
            for setting, trials in tried.items()
        ]
        return {
            "trace": trace, "chip": self.chip, "model": self.model, "ttft": self.ttft, "requests": len(requests),
            "lowest_rate": self.start / 2**self.doublings, "capacities": rows, "points": points,
        }  # fmt: skip


def policies_and_baselines(chip: str, model: str) -> Callable[[int], list[Setting]]:
    """For a token budget: whole prompts, prefill first as vLLM did then and beside decodes; then chunks, by each policy."""

    def settings(budget: int) -> list[Setting]:
        whole = [Setting(chip, model, None, prefill_first=True), Setting(chip, model, None)]
        return whole + [Setting(chip, model, budget, policy) for policy in POLICY_NAMES]

    return settings


def with_and_without_cache(chip: str, model: str) -> Callable[[int], list[Setting]]:
    """For a token budget: whole prompts and chunks, with and without the prefix cache; chunks also on a chip of 1 TB.

    The blocks are as long as Mooncake's, 512 tokens: its hashes tell no more.
    """

    def settings(budget: int) -> list[Setting]:
        variants = [(None, None), (budget, None), (budget, 1000 * GIGA)]
        return [
            Setting(chip, model, chunk, prefix_cache=cache, block_size=512, memory_bytes=memory)
            for chunk, memory in variants
            for cache in (False, True)
        ]

    return settings


CASES = (("a100", "mistral-7b"), ("h100", "llama3-8b"))
AZURE = tuple(Search(*case, ttft=2.0, start=4.0, doublings=4, settings=policies_and_baselines(*case)) for case in CASES)
MOONCAKE = (Search("h100", "llama3-8b", ttft=30.0, start=0.5, doublings=3, settings=with_and_without_cache("h100", "llama3-8b"), slos=("relaxed",)),)


class Stopwatch:
    """Seconds since it was made: those that passed, and those that this program computed."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        return {"wall_seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def describe(path: Path, requests: SequenceOf[Request]) -> dict:
    """A trace in numbers: tokens and seconds."""
    sizes = {}
    for name, values in (
        ("prompt_tokens", [request.num_prompt_tokens for request in requests]),
        ("output_tokens", [request.max_tokens for request in requests]),
    ):
        sizes[name] = {"mean": sum(values) / len(values), "p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values)}
    span = requests[-1].arrival_time
    rate = (len(requests) - 1) / span if span else None
    return {"file": path.name, "requests": len(requests), "seconds": span, "requests_per_second": rate, **sizes}


def replay_whole(trace: str, setting: Setting, requests: list[Request], longest: int, rate: float | None = None) -> dict:
    """The whole trace, at its own rate or at `rate`; wall_seconds and cpu_seconds are those of this machine, numbers included."""
    watch = Stopwatch()
    run = numbers(setting.serve(requests if rate is None else at_rate(requests, rate), longest))
    spent = watch.seconds()
    print(f"  {len(requests):,} requests, {setting} on {setting.chip}: {run['steps']:,} steps, {run['output_tokens']:,} tokens "
          f"in {spent['wall_seconds']:.1f} s; P99 TTFT {run['p99_ttft']:.2f} s, P99 ITL {run['p99_itl'] * 1e3:.0f} ms", flush=True)  # fmt: skip
    return {"trace": trace, "setting": asdict(setting), "name": str(setting), "rate": rate, **spent, **run}


def on_the_whole_trace(result: dict, requests: list[Request], longest: int) -> list[dict]:
    """Whole prompts and chunks on all of the trace, under the strict targets: from the capacity of the slice downwards,
    a step of DESCENT after another, until the targets are met. Every replay is kept."""
    runs = []
    for row in result["capacities"]:
        setting, rate = Setting(**row["setting"]), row["rate"]
        if row["slo"] == "strict" and rate and not setting.prefill_first and setting.policy == "prefilling_first":
            for _ in range(MAX_REPLAYS):
                run = replay_whole(result["trace"], setting, requests, longest, rate)
                runs.append(run | {"met": run["p99_itl"] <= row["itl"] and run["p99_ttft"] <= result["ttft"]})
                if runs[-1]["met"]:
                    break
                rate *= DESCENT
    return runs


def read(path: Path) -> tuple[str, list[Request]]:
    """A trace's name and requests. Raises ValueError or OSError, which name the file, for what is no trace."""
    readers = {".csv": ("azure", read_azure), ".jsonl": ("mooncake", read_mooncake)}
    if path.suffix.lower() not in readers:
        raise ValueError(f"--traces {path}: the name must end in .csv (Azure) or .jsonl (Mooncake)")
    name, reader = readers[path.suffix.lower()]
    return name, reader(path)


def main(args) -> int:
    """Replay and search; 2 for files that aren't traces, or are too short for a queue to grow."""
    if not args.traces:
        print("left out: traffic: it needs --traces with files that you download (docs/results.md#traffic says where)")
        return 2 if "traffic" in args.parts else 0
    try:
        results = measure({name: (path, requests) for path in map(Path, args.traces) for name, requests in [read(path)]})
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nAll of it took {results['wall_seconds']:.0f} s, {results['cpu_seconds']:.0f} s of them on a core.")
    print(f"raw numbers: {machine.save('traffic', results, args.out)}")
    return 0


def measure(traces: dict[str, tuple[Path, list[Request]]]) -> dict:
    """All replays and searches of the traces, by name."""
    watch = Stopwatch()
    replays, searches, on_all = [], [], []
    for name, (path, requests) in traces.items():
        longest = max(request.num_prompt_tokens for request in requests)
        print(f"{path.name}: {len(requests):,} requests in {requests[-1].arrival_time:,.0f} s; searches use the first {SLICE:,}")
        if name == "azure":
            print("The whole trace at its own rate:")
            replays += [replay_whole(name, Setting(*CASES[0], chunk), requests, longest) for chunk in (512, None)]
        for search in AZURE if name == "azure" else MOONCAKE:
            searches.append(search.run(name, requests[:SLICE], longest, lambda text: print(text, flush=True)))
        if name == "azure":
            print("\nThe whole trace, from the strict capacities of its slice downwards:")
            on_all = on_the_whole_trace(searches[0], requests, longest)
    return {
        "traces": {name: describe(path, requests) for name, (path, requests) in traces.items()},
        "seeds": "none, the arrivals are the traces' own, and nothing is drawn", "slice": SLICE, "max_num_seqs": MAX_SEQS,
        "tolerance": TOLERANCE, "replays": replays, "searches": searches, "on_all": on_all, **watch.seconds(),
    }  # fmt: skip

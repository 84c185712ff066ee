"""Numbers from a trace. All times in seconds on the runner's clock.

TTFT   time to first token: from arrival to the end of the step that sampled it
ITL    inter-token latency: between two tokens of one request
TPOT   time per output token: (last token - first token) / (tokens - 1), one value a request
stall  the longest ITL of one request, time spent preempted included

Report the tail: a mean hides the stall. (Definitions as in vLLM's serving benchmark; Sarathi-Serve
calls ITL "time between tokens".)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .trace import Trace


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of 100 lie, with linear interpolation (NumPy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """Mean, percentiles and maximum of some values; all None when there are none."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: list[float]) -> Summary:
        if not values:
            return cls(0)
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(len(values), sum(values) / len(values), p50, p90, p99, max(values))


@dataclass(frozen=True)
class RequestMetrics:
    """One request: seconds, and None where there is no such time (yet)."""

    ttft: float | None
    itl: list[float]
    tpot: float | None
    e2e: float | None
    stall: float | None


@dataclass(frozen=True)
class Metrics:
    """A run in numbers. kv_use is the used part of the pool (0 … 1) per step, weighted by its time."""

    requests: dict[str, RequestMetrics] = field(repr=False)
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    stall: float | None  # the longest of all gaps
    duration: float
    num_steps: int
    output_tokens: int
    computed_tokens: int  # tokens that went through the model
    recomputed_tokens: int  # of those, tokens that had been computed before a preemption
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None  # prompt and output tokens
    kv_use_mean: float | None
    kv_use_max: float | None
    prefix_hit_rate: float | None  # prompt tokens found in the prefix cache / prompt tokens
    num_preemptions: int
    finish_reasons: dict[str, int]

    def to_dict(self) -> dict:
        return asdict(self)


def of_requests(trace: Trace) -> dict[str, RequestMetrics]:
    """The metrics of each request, by its name in the trace."""
    result = {}
    for name, times in trace.token_times().items():
        request = trace.requests[name]
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        result[name] = RequestMetrics(
            ttft=times[0] - request.arrival_time if times else None,
            itl=gaps,
            tpot=sum(gaps) / len(gaps) if gaps else None,
            e2e=None if request.finish_time is None else request.finish_time - request.arrival_time,
            stall=max(gaps, default=None),
        )
    return result


def metrics(trace: Trace) -> Metrics:
    """All metrics of a run."""
    requests = of_requests(trace)
    steps = trace.steps
    duration = steps[-1].end - min(r.arrival_time for r in trace.requests.values()) if steps and requests else 0.0
    output_tokens = sum(len(step.tokens) for step in steps)
    computed = recomputed = 0
    reached: dict[str, int] = {}  # request -> first position never computed before
    for step in steps:
        for name, start, num_tokens, _kind, _is_last in step.chunks:
            computed += num_tokens
            high = reached.get(name, start)
            recomputed += max(0, min(high, start + num_tokens) - start)
            reached[name] = max(high, start + num_tokens)
    started = [trace.requests[name] for name in reached]
    prompt_tokens = sum(request.prompt_tokens for request in started)
    pool = trace.config.get("num_blocks")
    used = [(step.blocks_used / pool, step.end - step.start) for step in steps] if pool else []
    busy = sum(seconds for _, seconds in used)
    reasons: dict[str, int] = {}
    for request in trace.requests.values():
        if request.finish_reason:
            reasons[request.finish_reason] = reasons.get(request.finish_reason, 0) + 1
    values = list(requests.values())
    return Metrics(
        requests=requests,
        ttft=Summary.of([r.ttft for r in values if r.ttft is not None]),
        itl=Summary.of([gap for r in values for gap in r.itl]),
        tpot=Summary.of([r.tpot for r in values if r.tpot is not None]),
        e2e=Summary.of([r.e2e for r in values if r.e2e is not None]),
        stall=max((r.stall for r in values if r.stall is not None), default=None),
        duration=duration,
        num_steps=len(steps),
        output_tokens=output_tokens,
        computed_tokens=computed,
        recomputed_tokens=recomputed,
        output_tokens_per_second=output_tokens / duration if duration else None,
        total_tokens_per_second=(output_tokens + prompt_tokens) / duration if duration else None,
        kv_use_mean=sum(use * seconds for use, seconds in used) / busy if busy else None,
        kv_use_max=max((use for use, _ in used), default=None),
        prefix_hit_rate=sum(r.prefix_hit_tokens for r in started) / prompt_tokens if prompt_tokens else None,
        num_preemptions=sum(len(step.preempted) for step in steps),
        finish_reasons=reasons,
    )

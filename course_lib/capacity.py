"""How much traffic an engine takes while its answers stay quick: goodput and capacity.

Goodput   requests a second that are served *and* meet both latency targets. A server past its limit still has
          throughput, but hardly any goodput.
Capacity  the highest request rate at which the targets are met.

DistServe (Zhong et al., OSDI 2024) calls the capacity itself "goodput": the highest rate at which a given share of
the requests, 90 % say, meets its TTFT and its TPOT target. Sarathi-Serve (Agrawal et al., OSDI 2024) looks for the
highest rate with a P99 of the time between tokens under the target. vLLM's `bench serve --goodput` counts as here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from .metrics import of_requests, percentile
from .trace import Trace
from .validation import check_number
from .workloads import Request, at_rate


@dataclass(frozen=True)
class Targets:
    """Latency targets in seconds, for TTFT and for ITL (the gap between two tokens).

    percent: the share that has to meet them. 99 means the P99.
    """

    ttft: float
    itl: float
    percent: float = 99.0

    def __post_init__(self) -> None:
        for field in ("ttft", "itl"):
            check_number(field, getattr(self, field), "above 0 seconds", lambda x: x > 0)
        check_number("percent", self.percent, "above 0 and at most 100", lambda x: 0 < x <= 100)


@dataclass(frozen=True)
class Goodput:
    """Requests a second that met both targets; the share of all requests that they are (0 … 1); and the run's percentiles."""

    requests_per_second: float
    attainment: float
    ttft: float | None  # of all requests, at Targets.percent
    itl: float | None  # of all gaps, at Targets.percent
    finished: int
    requests: int

    def meets(self, targets: Targets) -> bool:
        """Did the run as a whole meet them? Every request must have ended; without any gap, the ITL target is met."""
        is_done = self.finished == self.requests and self.ttft is not None
        return is_done and self.ttft <= targets.ttft and (self.itl is None or self.itl <= targets.itl)


def goodput(trace: Trace, targets: Targets) -> Goodput:
    """A request meets the targets when it ended by itself, its TTFT is within `ttft`, and `percent` of its own gaps are within `itl`.

    Seconds are counted from the first arrival to the end of the last step.
    """
    metrics = of_requests(trace)
    good = finished = 0
    for name, request in metrics.items():
        if trace.requests[name].finish_reason not in ("stop", "length"):
            continue
        finished += 1
        slow_gap = percentile(request.itl, targets.percent) if request.itl else 0.0
        good += request.ttft <= targets.ttft and slow_gap <= targets.itl
    ttfts = [request.ttft for request in metrics.values() if request.ttft is not None]
    gaps = [gap for request in metrics.values() for gap in request.itl]
    begin = min((request.arrival_time for request in trace.requests.values()), default=0.0)
    duration = trace.steps[-1].end - begin if trace.steps else 0.0
    return Goodput(
        good / duration if duration else 0.0,
        good / len(metrics) if metrics else 0.0,
        percentile(ttfts, targets.percent) if ttfts else None,
        percentile(gaps, targets.percent) if gaps else None,
        finished,
        len(metrics),
    )


@dataclass(frozen=True)
class Capacity:
    """The highest rate found that meets the targets, and every rate tried, in order: (rate, goodput, met)."""

    rate: float
    tried: tuple[tuple[float, Goodput, bool], ...]


def capacity(
    requests: SequenceOf[Request],
    serve: Callable[[list[Request]], Trace],
    targets: Targets,
    *,
    start: float = 1.0,
    tolerance: float = 0.02,
) -> Capacity:
    """The highest request rate that meets the targets, found by bisection, to within `tolerance` of itself.

    requests  a workload or a public trace; each try squeezes or stretches its arrivals to the rate (`at_rate`), so a
              seed's pattern of arrivals stays the same from try to try
    serve     runs a workload from an idle engine: lambda requests: simulate(config, requests, model=..., chip=...)
    start     the rate tried first, in requests a second; doubled while the targets are met, halved while they aren't

    The rate is 0 when even start / 2**20 fails: then the targets are out of reach for a request alone. A short
    workload flatters: its queue has no time to grow. Raises ValueError when no rate fails up to start × 2**20.
    """
    tried: list[tuple[float, Goodput, bool]] = []

    def is_met(rate: float) -> bool:
        result = goodput(serve(at_rate(requests, rate)), targets)
        tried.append((rate, result, result.meets(targets)))
        return tried[-1][2]

    return Capacity(highest_rate(is_met, start, tolerance), tuple(tried))


def highest_rate(is_met: Callable[[float], bool], start: float, tolerance: float, doublings: int = 20) -> float:
    """The highest rate for which `is_met(rate)` holds, by bisection as in `capacity`, given that it holds for all below.

    0.0 when even start / 2**doublings fails; ValueError when no rate fails up to start × 2**doublings.
    """
    check_number("start", start, "above 0 requests a second", lambda x: x > 0)
    check_number("tolerance", tolerance, "above 0 and below 1", lambda x: 0 < x < 1)
    low, high = 0.0, start
    if is_met(start):
        low = start
        while is_met(high := low * 2):
            low = high
            if low >= start * 2**doublings:
                raise ValueError(f"start={start}: the targets are met at every rate up to {low:g}; give a longer workload")
    else:
        while high > start / 2**doublings:
            if is_met(high / 2):
                low = high / 2
                break
            high /= 2
    while low and high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low

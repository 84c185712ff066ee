"""What a policy did to those who waited: points, latencies, fairness, and who starved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from ..capacity import goodput
from ..config import EngineConfig
from ..cost_model import RooflineCost, StepWork, pairs_of
from ..hardware import find_chip, find_model
from ..metrics import of_requests, percentile
from ..policies import FairShare, PrefillingFirst, ShortestFirst, WaitingFirst
from ..trace import Trace
from ..workloads import Request, simulate
from .rounds import CHIP, MODEL, Round, rounds

BUILT_IN = (PrefillingFirst, WaitingFirst, ShortestFirst, FairShare)  # nobody has a priority: it would be the first of them
# Who gets no chunk for longer than PATIENCE TTFT targets, while CROWD later requests begin to answer, has starved.
PATIENCE = 8.0
CROWD = 20


@dataclass(frozen=True)
class Served:
    """How one request was served. Times in seconds.

    slowdown   TTFT, as a multiple of that on an idle engine
    hunger     the longest time before its first token in which it got no chunk
    overtaken  requests that came later and had their first token in that time
    """

    name: str
    prompt_tokens: int
    ttft: float
    slowdown: float
    hunger: float
    overtaken: int


@dataclass(frozen=True)
class Score:
    """One policy in one round. Times in seconds.

    points     attainment × 100, half of it when somebody starved
    goodput    requests a second that met both targets; attainment: their share of all (0 … 1)
    fairness   Jain's index of the slowdowns (Jain, Chiu and Hawe, 1984): 1 when all are slowed down alike
    """

    round: str
    points: float
    goodput: float
    attainment: float
    p99_itl: float
    median_ttft: float
    p99_ttft: float
    fairness: float
    worst: Served
    starved: tuple[Served, ...]
    trace: Trace = field(repr=False, compare=False)


def _alone(request: Request, config: EngineConfig, cost: RooflineCost) -> float:
    """The TTFT on an idle engine, without a prefix hit."""
    seconds, length = 0.0, request.num_prompt_tokens
    for start in range(0, length, config.max_prefill_chunk_size):
        end = min(start + config.max_prefill_chunk_size, length)
        seconds += cost.seconds(StepWork(end - start, end == length, pairs_of(end - start, end), end))
    return seconds


def _served(game: Round, trace: Trace) -> list[Served]:
    """Every request of a round, in order of arrival."""
    cost = RooflineCost(find_model(MODEL), find_chip(CHIP))
    firsts = {name: times[0] for name, times in trace.token_times().items()}
    chunks: dict[str, list[tuple[float, float]]] = {name: [] for name in firsts}  # (start, end) of the steps with a chunk of it
    for step in trace.steps:
        for chunk in step.chunks:
            if chunk.kind == "prefill" and step.start < firsts[chunk.request]:
                chunks[chunk.request].append((step.start, step.end))
    order = sorted(firsts, key=lambda name: trace.requests[name].arrival_time)
    prompts, served = {request.request_id: request for request in game.requests}, []
    for place, name in enumerate(order):
        arrival = trace.requests[name].arrival_time
        since = [arrival, *(end for _, end in chunks[name])]
        hungry = max(zip(since, (start for start, _ in chunks[name]), strict=False), key=lambda gap: gap[1] - gap[0])
        overtaken = sum(hungry[0] < firsts[other] <= hungry[1] for other in order[place + 1 :])
        ttft = firsts[name] - arrival
        slowdown = ttft / _alone(prompts[name], game.config, cost)
        served.append(Served(name, prompts[name].num_prompt_tokens, ttft, slowdown, max(0.0, hungry[1] - hungry[0]), overtaken))
    return served


def score(game: Round, policy: object) -> Score:
    """Run one round. Whatever the policy raises comes through."""
    trace = simulate(replace(game.config, policy=policy), game.requests, model=MODEL, chip=CHIP)
    good = goodput(trace, game.targets)
    requests, served = of_requests(trace), _served(game, trace)
    starved = tuple(s for s in served if s.hunger > PATIENCE * game.targets.ttft and s.overtaken >= CROWD)
    slowdowns = [s.slowdown for s in served]
    ttfts = sorted(s.ttft for s in served)
    return Score(
        round=game.name,
        points=100 * good.attainment * (0.5 if starved else 1),
        goodput=good.requests_per_second,
        attainment=good.attainment,
        p99_itl=percentile([gap for request in requests.values() for gap in request.itl], 99),
        median_ttft=percentile(ttfts, 50),
        p99_ttft=percentile(ttfts, 99),
        fairness=sum(slowdowns) ** 2 / (len(slowdowns) * sum(x * x for x in slowdowns)),
        worst=max(starved, key=lambda s: s.hunger) if starved else max(served, key=lambda s: s.ttft),
        starved=starved,
        trace=trace,
    )


@cache
def built_in_scores() -> dict[str, dict[str, Score]]:
    """Policy -> round -> score, of the policies that come with the course."""
    return {policy.name: {game.name: score(game, policy()) for game in rounds()} for policy in BUILT_IN}


def total(scores: dict[str, Score]) -> float:
    return sum(score.points for score in scores.values()) / len(scores) if scores else 0.0

"""The policy arena: your policy against the built-in ones, on fixed traffic, in virtual time.

    class Mine(Policy):
        name = "mine"

        def order(self, prefilling, waiting, step):
            return sorted([*prefilling, *waiting], key=lambda s: s.remaining_token_count)

    result = arena(Mine())     # in a notebook: the table; also print(result)
    result.bars()              # where it won and lost
    result.worst("rush")       # the request that it served worst, beside the best of the others
    leaderboard()              # what you tried so far

A round is a workload on a simulated chip. Its points are the percentage of requests that met both latency targets
(TTFT and ITL, as in `capacity.goodput`). A round in which somebody starved counts half: goodput alone rewards giving
up those who can't meet the target anyway.

A policy may look at what a real scheduler knows, and return the sequences in another order. It can't see how
long an answer will be, nor who is who: request ids are numbers here. One that raises, loops, invents or repeats
sequences, changes them, or asks for more than a step's budget gets no points, and is told why.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from pathlib import Path

from .capacity import Targets, goodput
from .checks.exercise import NotDone
from .checks.progress import progress_file
from .checks.run import TimeLimit, TimeUp, file_text
from .config import EngineConfig
from .cost_model import RooflineCost, StepWork, pairs_of
from .hardware import find_chip, find_model
from .lab.svg import PAD, Picture, Svg, box, hatch
from .lab.timeline import compare, compare_alt
from .metrics import of_requests, percentile
from .policies import FairShare, Policy, PrefillingFirst, ShortestFirst, WaitingFirst, make_policy
from .sequence import Sequence
from .trace import ChunkRecord, Trace
from .workloads import Request, agents, chat, merge, rag, simulate

MODEL, CHIP = "llama3-8b", "a100"
BUILT_IN = (PrefillingFirst, WaitingFirst, ShortestFirst, FairShare)  # nobody has a priority here: it would be the first of them
PATIENCE = 8.0  # times the TTFT target: whoever gets no chunk for longer, while CROWD later requests begin to answer, has starved
CROWD = 20
SECONDS = 20.0  # of this machine's time for a round; an honest policy needs less than one
LEADERBOARD = ".course_arena.json"


@dataclass(frozen=True)
class Round:
    """One workload of the arena, and the engine that serves it."""

    name: str
    what: str
    requests: tuple[Request, ...]
    config: EngineConfig
    targets: Targets


def _later(requests: list[Request], seconds: float) -> list[Request]:
    return [replace(request, arrival_time=request.arrival_time + seconds) for request in requests]


@cache
def rounds() -> tuple[Round, ...]:
    """The four workloads. All are made by rule and seed, so everybody's policy meets the same traffic."""
    rush = merge(
        chat(35, 350, 1, output_tokens=(8, 32)),
        _later(chat(2, 4, 2, prompt_tokens=(6000, 9000), output_tokens=(16, 64), name="doc"), 1.0),
    )
    bursts = merge(
        chat(4, 40, 5, output_tokens=(16, 128)),
        *(
            _later(rag(60, 16, 10 + i, documents=40, output_tokens=(16, 64), name=f"burst{i}-"), 1 + 2.5 * i)
            for i in range(4)
        ),
    )
    teams = merge(*(
        _later(
            agents(8, 8, 20 + i, turns=3, pause=1.2, system_tokens=2048, turn_tokens=(128, 1024), output_tokens=(16, 96), name=f"agent{i}-"),
            1.5 * i,
        )
        for i in range(4)
    ))  # fmt: skip
    # Quartiles and tail as in Azure's public conversation trace (half of the prompts up to 1,020 tokens, a tenth above
    # 2,700; half of the answers up to 129 tokens, the rest up to 424), at twice its rate.
    shape = (
        (0.25, (180, 400), (41, 129)),
        (0.25, (400, 1020), (41, 129)),
        (0.25, (1020, 1190), (129, 424)),
        (0.15, (1190, 2730), (129, 424)),
        (0.10, (2730, 4150), (41, 424)),
    )
    public = merge(*(
        chat(11 * share, round(140 * share), 30 + i, prompt_tokens=prompts, output_tokens=outputs, name=f"size{i}-")
        for i, (share, prompts, outputs) in enumerate(shape)
    ))  # fmt: skip
    targets = Targets(ttft=0.5, itl=0.1)
    config = EngineConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_prefill_chunk_size=512)
    small, alone = replace(config, num_blocks=1536), replace(config, enable_prefix_caching=False)  # alone: nothing is shared
    return (
        Round("rush", "350 short chats in ten seconds, and four long documents among them", tuple(rush), alone, targets),
        Round("bursts", "chats, and now and then sixteen questions about documents at once", tuple(bursts), config, targets),
        Round("agents", "agents with common instructions and growing prompts, in a small pool", tuple(teams), small, targets),
        Round("public", "prompt and answer lengths as in a public trace, twice as busy", tuple(public), alone, targets),
    )


# ---- what a policy gets to see --------------------------------------------------------------------


class Foul(Exception):
    """What a policy must not do; the message says what it did."""


class View:
    """A sequence as a policy sees it: to look at, not to change."""

    __slots__ = ("_View__sequence",)
    HIDDEN = ("params", "max_new_tokens")

    def __init__(self, sequence: Sequence) -> None:
        object.__setattr__(self, "_View__sequence", sequence)

    def __getattr__(self, name: str):
        if name in View.HIDDEN:
            raise Foul(f"it asked for {name}: a scheduler doesn't know how an answer will turn out")
        value = getattr(self.__sequence, name)
        if callable(value) and name != "token_ids":
            raise Foul(f"it asked for {name}() of a sequence: a policy orders sequences, it doesn't change them")
        return tuple(value) if type(value) is list else value

    def __setattr__(self, name: str, value: object) -> None:
        raise Foul(f"it tried to set {name} of a sequence: a policy orders sequences, it doesn't change them")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @property
    def request_id(self) -> str:
        return f"r{self.__sequence.arrival}"

    trace_name = request_id

    def __repr__(self) -> str:
        return f"<sequence {self.request_id}, {self.remaining_token_count} tokens to prefill>"


class Referee(Policy):
    """Stands between the scheduler and a policy: hands out views, checks what comes back."""

    def __init__(self, policy: object) -> None:
        self.policy = make_policy(policy)
        self._views: dict[int, tuple[View, Sequence]] = {}  # by the sequence's id(); it's kept, so the id stays its own

    def order(self, prefilling, waiting, step):
        given = [[self._view(s) for s in queue] for queue in (prefilling, waiting)]
        handed = [list(queue) for queue in given]
        answer = self.policy.order(*handed, step)
        if handed != given:
            raise Foul("it changed the list that it was given: return a new one, sorted(…) instead of .sort()")
        if answer is None:
            raise Foul("order() returned None: is there a return in it?")
        known = {id(view): s for views, queue in zip(given, (prefilling, waiting), strict=True) for view, s in zip(views, queue, strict=True)}
        result = []
        for view in answer:
            sequence = known.pop(id(view), None)
            if sequence is None:
                again = any(view is other for views in given for other in views)
                raise Foul(f"order() returned {view!r:.80} " + ("twice" if again else "which is not waiting for prefill"))
            result.append(sequence)
        return result

    def share(self, budget, left, candidates, block_size):
        share = self.policy.share(budget, left, candidates, block_size)
        if type(share) is not int:
            raise Foul(f"share() returned {share!r:.80}: it must be a whole number of tokens")
        if share > budget:
            raise Foul(f"share() returned {share} tokens of a step that has {budget}")
        return share

    def _view(self, sequence: Sequence) -> View:
        if id(sequence) not in self._views:
            self._views[id(sequence)] = (View(sequence), sequence)
        return self._views[id(sequence)][0]


# ---- the score ------------------------------------------------------------------------------------


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


# ---- a policy's result ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What `arena` found. problem: why there are no points; then there are no scores either."""

    name: str
    scores: dict[str, Score]
    problem: str = ""

    @property
    def points(self) -> float:
        """The mean over the rounds, 0 … 100."""
        return _total(self.scores)

    @property
    def verdict(self) -> list[str]:
        """What the numbers mean, in sentences."""
        if self.problem:
            return [f"{self.name}: no points. {self.problem}"]
        rivals = built_in_scores()
        best = max(rivals, key=lambda name: _total(rivals[name]))
        better = self.points > _total(rivals[best])
        relation = "more" if better else "not more"
        lines = [f"{self.name}: {self.points:.1f} points, {relation} than the best built-in policy, {best} with {_total(rivals[best]):.1f}."]
        for game in rounds():
            starved = self.scores[game.name].starved
            if starved:
                worst = self.scores[game.name].worst
                others = f" and {len(starved) - 1} more" if len(starved) > 1 else ""
                lines.append(
                    f"It starves somebody in {game.name}: {worst.name}{others}, a prompt of {worst.prompt_tokens:,} tokens, got nothing for "
                    f"{worst.hunger:.1f} s, while {worst.overtaken} requests that came later had their first token."
                )
        return lines

    def rows(self) -> list[list[str]]:
        """The table's lines, the header first."""
        table = [["round", "policy", "points", "met both", "goodput", "P99 ITL", "median TTFT", "P99 TTFT", "fairness", "starved"]]
        for game in rounds():
            entries = [(self.name, self.scores.get(game.name)), *((n, s[game.name]) for n, s in built_in_scores().items())]
            for name, result in entries:
                if result:
                    table.append([
                        game.name, name, f"{result.points:.1f}", f"{result.attainment:.0%}", f"{result.goodput:.1f}/s", f"{result.p99_itl * 1e3:.0f} ms",
                        f"{result.median_ttft:.2f} s", f"{result.p99_ttft:.2f} s", f"{result.fairness:.2f}", str(len(result.starved) or "-"),
                    ])  # fmt: skip
        return table

    def __str__(self) -> str:
        if self.problem:
            return self.verdict[0]
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines, before = [], ""
        for row in rows:
            cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join([" " * widths[0] if row[0] == before else cells[0], *cells[1:]]).rstrip())
            before = row[0]
        return "\n".join([*self.verdict, "", *lines])

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.verdict)
        if self.problem:
            return {"text/html": lines, "text/plain": str(self)}
        header, *rows = self.rows()
        body = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
        for row in rows:
            bold = ' style="font-weight:bold"' if row[1] == self.name else ""
            body.append(f"<tr{bold}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        return {"text/html": f"{lines}<table>{''.join(body)}</table>", "text/plain": str(self)}

    def bars(self) -> Picture:
        """The points of every round, this policy above the built-in ones."""
        self._must_have_scores()
        entries = {self.name: self.scores, **built_in_scores()}
        return _bars({name: {game: s.points for game, s in scores.items()} for name, scores in entries.items()}, self.name)

    def worst(self, round: str | None = None) -> Picture:
        """The request that this policy served worst, beside the same one under the built-in policy with the most points there.

        round: its name; None: where the policy lost the most against the best of the others.
        """
        self._must_have_scores()
        rivals = built_in_scores()
        best = {game: max(rivals, key=lambda name: rivals[name][game].points) for game in self.scores}
        if round is None:
            round = min(self.scores, key=lambda game: self.scores[game].points - rivals[best[game]][game].points)
        if round not in self.scores:
            raise ValueError(f"round={round!r} is no round of the arena: use {', '.join(self.scores)}")
        mine, other = self.scores[round], rivals[best[round]][round]
        name, titles = mine.worst.name, (f"{self.name} in {round}", f"{best[round]} in {round}")
        a, b = (_excerpt(trace, name) for trace in (mine.trace, other.trace))
        labels = {name: f"{name} (worst)"}
        return Picture(compare(a, b, titles=titles, labels=labels), compare_alt(a, b, titles=titles, labels=labels))

    def _must_have_scores(self) -> None:
        if self.problem:
            raise ValueError(f"{self.name} has no points and no picture. {self.problem}")


def _total(scores: dict[str, Score]) -> float:
    return sum(score.points for score in scores.values()) / len(scores) if scores else 0.0


def _excerpt(trace: Trace, name: str, neighbours: int = 6) -> Trace:
    """One request from its arrival to its first token, with those that overtook it; all others share a row."""
    times = {other: row[0] for other, row in trace.token_times().items() if row}
    arrival = trace.requests[name].arrival_time
    overtakers = [n for n, r in trace.requests.items() if r.arrival_time > arrival and times[n] < times[name]]
    shown = [name, *overtakers[:: -(-len(overtakers) // neighbours) or 1]]
    steps = [step for step in trace.steps if step.end > arrival and step.start <= times[name]]
    keep = set(shown)
    rest = "the others"
    part = Trace(trace.config, {n: trace.requests[n] for n in shown})
    part.requests[rest] = replace(trace.requests[name], name=rest, request_id=rest, prompt_tokens=1, finish_time=None, finish_step=None)
    for step in steps:
        chunks = [chunk for chunk in step.chunks if chunk.request in keep]
        for kind in ("prefill", "decode"):
            tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.request not in keep and chunk.kind == kind)
            if tokens:
                chunks.append(ChunkRecord(rest, 0, tokens, kind, False))
        part.steps.append(replace(
            step, chunks=chunks, owners=[], finished={n: r for n, r in step.finished.items() if n in keep},
            admitted=[n for n in step.admitted if n in keep], preempted=[n for n in step.preempted if n in keep],
            tokens={n: t for n, t in step.tokens.items() if n in keep}, reasons={n: r for n, r in step.reasons.items() if n in keep},
        ))  # fmt: skip
    return part


def _bars(points: dict[str, dict[str, float]], mine: str) -> Picture:
    """policy -> round -> points, as bars from the left; the one named `mine` is filled and hatched."""
    left, room, high, gap = 160, 560, 14, 22
    svg, y = Svg(left + room + 90), PAD + 14
    filled, others, pattern, axis = [], [], [], []
    svg.text(PAD, y, "Points by round (100: every request met both targets, and nobody starved)", "ink b")
    y += 16
    for game in next(iter(points.values())):
        svg.text(PAD, y + 10, game, "ink b")
        y += 16
        for name, rounds_ in points.items():
            width = round(room * rounds_[game] / 100)
            (filled if name == mine else others).append(box(left, left + width, y, high))
            if name == mine:
                pattern.append(hatch(left, left + width, y, high))
            svg.text(left - 8, y + 11, name, "ink e" + (" b" if name == mine else ""))
            svg.text(left + width + 6, y + 11, f"{rounds_[game]:.1f}", "ink" + (" b" if name == mine else ""))
            y += high + 3
        y += gap - high
    axis.append(f"M{left} {PAD + 26}V{y}")
    parts = svg.parts
    svg.parts = []
    svg.path("stream", others)
    svg.path("prefill", filled)
    svg.path("hatch", pattern)
    svg.path("limit", axis)
    svg.parts += parts
    words = "; ".join(f"{game}: " + ", ".join(f"{name} {row[game]:.1f}" for name, row in points.items()) for game in points[mine])
    alt = f"Bars of the points by round. {words}."
    return Picture(svg.page(y + PAD, "Points by round", alt), alt)


def arena(policy: object, *, save: bool = True) -> Result:
    """Score a policy in all rounds, against the built-in ones. It doesn't raise what the policy raises, but for a stub's NotDone.

    policy  an object with an `order` method, as EngineConfig(policy=…) takes it
    save    remember the points for `leaderboard()`
    """
    if isinstance(policy, type) or not callable(getattr(policy, "order", None)):
        hint = f": write {policy.__name__}() instead of {policy.__name__}" if isinstance(policy, type) else ""
        raise TypeError(f"policy must be an object with an order() method, got {policy!r:.100}{hint}")
    name = str(getattr(policy, "name", "custom"))
    name = type(policy).__name__ if name == "custom" else name
    name = f"{name} (yours)" if name in built_in_scores() else name
    scores: dict[str, Score] = {}
    problem = ""
    for game in rounds():
        try:
            with TimeLimit(SECONDS):
                scores[game.name] = score(game, Referee(copy.deepcopy(policy)))
        except TimeUp:
            problem = f"In {game.name} it was stopped after {SECONDS:g} seconds: does a loop in it ever end?"
        except Foul as foul:
            problem = f"In {game.name} {foul}"
        except (KeyboardInterrupt, NotDone):
            raise
        except BaseException as error:  # whatever its code raises, SystemExit too
            problem = f"In {game.name} it raised {_described(error)}"
        if problem:
            scores = {}
            break
    result = Result(name, scores, problem)
    if save:
        _remember(result)
    return result


def _described(error: BaseException) -> str:
    """What was raised, and the last line of the policy's own code on the way."""
    here = Path(__file__).resolve().parent
    own = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).resolve().is_relative_to(here)]
    text = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
    return f"{text}, in {own[-1].name}, line {own[-1].lineno} of {file_text(own[-1].filename)}:  {own[-1].line}" if own else text


# ---- the leaderboard ------------------------------------------------------------------------------


def leaderboard_file() -> Path:
    """Beside the file that remembers the exercises."""
    return progress_file().with_name(LEADERBOARD)


def read_leaderboard(path: Path | None = None) -> dict[str, dict]:
    """{policy: {"points", "rounds": {round: points}, "when"}}. A file that can't be read counts as empty."""
    try:
        found = json.loads((path or leaderboard_file()).read_text(encoding="utf-8"))
        return {str(name): {"points": float(e["points"]), "rounds": dict(e["rounds"]), "when": str(e["when"])} for name, e in found.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def _remember(result: Result) -> None:
    """Keep a policy's newest result, in one step. A folder that can't be written to is no reason to fail."""
    path, entries = leaderboard_file(), read_leaderboard()
    entries[result.name] = {
        "points": round(result.points, 2),
        "rounds": {name: round(s.points, 2) for name, s in result.scores.items()},
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        try:
            draft.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def leaderboard() -> str:
    """Your policies and the built-in ones, the most points first, as a text to print."""
    names = [game.name for game in rounds()]
    entries = {n: (_total(scores), {g: s.points for g, s in scores.items()}, "built in") for n, scores in built_in_scores().items()}
    entries |= {n: (e["points"], e["rounds"], e["when"]) for n, e in read_leaderboard().items()}
    lines = [f"{'':3} {'policy':<24}{'points':>8}" + "".join(f"{name:>9}" for name in names)]
    for place, (name, (points, by_round, when)) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1][0]), start=1):
        cells = "".join(f"{by_round[game]:9.1f}" if game in by_round else f"{'-':>9}" for game in names)
        lines.append(f"{place:2}. {name[:23]:<24}{points:8.1f}{cells}   {when}")
    return "\n".join(lines)

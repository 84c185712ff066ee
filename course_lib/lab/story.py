"""A trace, read as one `Life` per request: what every timeline is drawn from, and its numbers in words.

A request that decodes gets a token in step after step. Such a run is kept as (first place, last
place), so that reading and drawing cost what changes, not what goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from ..trace import Trace

Run = tuple[int, int]  # places in trace.steps, both included


@dataclass
class Life:
    """What happened to one request, or to several that share a row.

    Times are in the story's unit since the first arrival; decodes, prefills, preempted and tokens are places
    in `trace.steps`.
    """

    label: str
    prompt_tokens: int
    arrival: float
    decodes: list[Run] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)  # (place, first token, last token)
    waits: list[tuple[float, float, str]] = field(default_factory=list)  # (from, to, reason)
    preempted: list[int] = field(default_factory=list)  # as the step began
    tokens: list[Run] = field(default_factory=list)  # a token arrives as the step ends
    stall: float = 0.0  # the longest gap between two tokens
    ttft: float | None = None
    end: float | None = None
    is_cut: bool = False  # ended before its time: cancelled, or by an error
    size: int = 1  # requests
    first: str = ""  # of several, what the first is called

    @property
    def num_tokens(self) -> int:
        return sum(last - first + 1 for first, last in self.tokens)

    @property
    def breaks(self) -> list[Run]:
        """The places of the tokens before and after each pause of at least a step."""
        return [(before[1], after[0]) for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass
class Story:
    """A trace, read. Times since the first arrival are in seconds, or in steps: see `unit`."""

    lives: list[Life]  # in order of arrival
    starts: list[float]  # of the steps
    ends: list[float]
    steps: list[float]  # from the end of the step before to the end of this one
    numbers: list[int]  # what the engine calls the steps
    used: list[tuple[int, int]]  # (decode, prefill) tokens of each step
    budget: int  # tokens a step may have
    duration: float
    typical_gap: float  # the median gap between two tokens
    long_prompt: int  # a prompt of more tokens than this stands out
    stalled: Life | None  # the request with the longest gap
    unit: str  # of all times: "s" or "step"
    _slow: dict[float, list[int]] = field(default_factory=dict)
    _longest: dict[Run, float] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Every reason for which someone waited."""
        return sorted({reason for life in self.lives for _, _, reason in life.waits if reason})

    @property
    def has_stall(self) -> bool:
        """Is the longest gap out of the ordinary?"""
        return self.stalled is not None and 0 < self.stalled.stall >= 1.5 * self.typical_gap

    def gap(self, before: int, after: int) -> float:
        """The time between the tokens of two steps."""
        return round(self.ends[after] - self.ends[before], 9)

    def gaps(self, lives: list[Life]) -> list[tuple[Run, int]]:
        """The gaps between two tokens of these requests: the places of the two, and in how many requests.

        Counted step by step instead of one by one.
        """
        change = [0] * (len(self.steps) + 1)  # in how many requests' runs does a step lie?
        counts: list[tuple[Run, int]] = []
        for life in lives:
            counts += [(pair, 1) for pair in life.breaks]
            for first, last in life.tokens:
                change[first + 1] += 1
                change[last + 1] -= 1
        return counts + [((place - 1, place), count) for place, count in enumerate(accumulate(change[:-1])) if count]

    def say(self, time: float) -> str:
        """A time for people: 4.6 ms, or 6 steps."""
        if self.unit == "s":
            return seconds(time)
        return "1 step" if time == 1 else f"{round(time, 1):g} steps"

    def longest_step(self, run: Run) -> float:
        """The longest time between two neighbours in a run of tokens. (Many requests have the same runs.)"""
        if run not in self._longest:
            self._longest[run] = max(self.steps[run[0] + 1 : run[1] + 1], default=0.0)
        return self._longest[run]

    def long_gaps(self, life: Life, least: float) -> list[Run]:
        """The places of the two tokens around each gap of at least `least`, in order."""
        if life.num_tokens < 2 or life.stall < least:
            return []
        slow = self._slow_steps(least)
        gaps = [pair for pair in life.breaks if self.gap(*pair) >= least]
        for first, last in life.tokens:
            gaps += [(place - 1, place) for place in slow[bisect_right(slow, first) : bisect_right(slow, last)]]
        return sorted(gaps)

    def _slow_steps(self, least: float) -> list[int]:
        """The steps that keep whoever gets a token in each waiting for at least `least`."""
        if least not in self._slow:
            self._slow[least] = [place for place, gap in enumerate(self.steps) if gap >= least]
        return self._slow[least]


def read(trace: Trace, labels: dict[str, str] | None = None, by: str = "time") -> Story:
    """What a picture needs to know of a trace.

    labels  request -> what to call it
    by      "step": all times are counted in steps. So they are with a clock that moves by 1 s in every step, as
            FakeRunner's does: there are no seconds in such a trace.
    """
    labels, steps = labels or {}, trace.steps
    requests = sorted(trace.requests.values(), key=lambda request: request.arrival_time)
    zero = min([r.arrival_time for r in requests[:1]] + [step.start for step in steps[:1]], default=0.0)

    moments = [step.start for step in steps]

    def since(t: float) -> float:
        """In whole nanoseconds, so that a clock's offset can't move a pixel; by step, the place in the trace."""
        if by == "time":
            return round(t - zero, 9)
        place = bisect_right(moments, t) - 1
        if place < 0:
            return 0.0
        length = steps[place].end - steps[place].start
        return round(place + (min(1.0, (t - steps[place].start) / length) if length else 1.0), 9)

    lives = {r.name: Life(labels.get(r.name, r.name), r.prompt_tokens, since(r.arrival_time)) for r in requests}
    if by == "time":
        starts, ends = [since(step.start) for step in steps], [since(step.end) for step in steps]
    else:
        starts, ends = [float(place) for place in range(len(steps))], [float(place + 1) for place in range(len(steps))]
    finished = [since(request.finish_time) for request in requests if request.finish_time is not None]
    prompts = sorted(request.prompt_tokens for request in requests) or [0]
    story = Story(
        lives=list(lives.values()), starts=starts, ends=ends, numbers=[step.index for step in steps],
        steps=[round(end - before, 9) for before, end in zip([0.0, *ends], ends, strict=False)],
        used=_read_steps(trace, lives),
        budget=0, duration=max([*ends[-1:], *finished], default=0.0), typical_gap=0.0,
        long_prompt=max(4 * prompts[len(prompts) // 2], prompts[-9:][0]),  # so at most eight stand out
        stalled=None, unit="step" if by == "step" or _counts_steps(trace) else "s",
    )  # fmt: skip
    story.budget = trace.config.get("max_num_batched_tokens") or max((d + p for d, p in story.used), default=0)
    for request in requests:
        life = lives[request.name]
        life.stall = _longest_gap(story, life)
        life.ttft = ends[life.tokens[0][0]] - life.arrival if life.tokens else None
        life.end = None if request.finish_time is None else since(request.finish_time)
        life.is_cut = request.finish_reason in ("cancelled", "error")
    _read_waits(trace, lives, starts, story.duration)
    story.typical_gap = _typical_gap(story)
    streams = (life for life in story.lives if life.num_tokens > 1)
    story.stalled = max(streams, key=lambda life: life.stall, default=None)
    return story


def _counts_steps(trace: Trace) -> bool:
    """Does the clock just count the steps?"""
    ends = [trace.steps[0].start, *(step.end for step in trace.steps)] if trace.steps else []
    pairs = zip(ends, trace.steps, strict=False)
    return bool(ends) and all(step.start == before and step.end - before == 1 for before, step in pairs)


def _read_steps(trace: Trace, lives: dict[str, Life]) -> list[tuple[int, int]]:
    """Fill in chunks, tokens and preemptions; returns the (decode, prefill) tokens of each step."""
    used = []
    decoding: dict[str, int] = {}  # request -> where its present run began
    emitting: dict[str, int] = {}

    def follow(now, open_runs: dict[str, int], place: int, kind: str) -> None:
        """Begin and end the runs of those that changed."""
        if open_runs.keys() == now:
            return
        for name in open_runs.keys() - now:
            getattr(lives[name], kind).append((open_runs.pop(name), place - 1))
        for name in now - open_runs.keys():
            open_runs[name] = place

    before, decodes = None, set()
    for place, step in enumerate(trace.steps):
        requests, _, _, kinds, _ = step.chunks.columns
        if (requests, kinds) != before:  # most steps compute for the same requests as the one before
            before = requests, kinds
            decodes = {name for name, kind in zip(requests, kinds, strict=True) if kind == "decode"}
            follow(decodes, decoding, place, "decodes")
        prefilled = 0
        for name, start, num_tokens, kind, _ in step.chunks.tuples() if len(decodes) < len(kinds) else ():
            if kind != "decode":
                lives[name].prefills.append((place, start, start + num_tokens - 1))
                prefilled += num_tokens
        follow(step.tokens.keys(), emitting, place, "tokens")
        for name in step.preempted:
            lives[name].preempted.append(place)
        used.append((len(decodes), prefilled))
    follow(set(), decoding, len(used), "decodes")
    follow(set(), emitting, len(used), "tokens")
    return used


def _longest_gap(story: Story, life: Life) -> float:
    """The longest time between two tokens in a row; 0 when there are fewer than two."""
    longest = max((story.gap(*pair) for pair in life.breaks), default=0.0)
    return max([longest, *(story.longest_step(run) for run in life.tokens)])


def _typical_gap(story: Story) -> float:
    """The median of all gaps."""
    counts = [(story.gap(*pair), count) for pair, count in story.gaps(story.lives)]
    half = sum(count for _, count in counts) // 2
    for gap, count in sorted(counts):
        half -= count
        if half < 0:
            return gap
    return 0.0


def _read_waits(trace: Trace, lives: dict[str, Life], starts: list[float], duration: float) -> None:
    """Fill in when each request had to wait, and why. The first wait begins with its arrival."""
    waiting: dict[str, tuple[float, str]] = {}
    served = {name: starts[life.prefills[0][0]] if life.prefills else inf for name, life in lives.items()}

    def close(name: str, until: float) -> None:
        since, reason = waiting.pop(name)
        life = lives[name]
        until = until if life.end is None else min(until, life.end)
        if until > since:
            life.waits.append((since, until, reason))

    for step, start in zip(trace.steps, starts, strict=True):
        for name, reason in step.reasons.items():
            life = lives[name]
            is_first = start <= served[name] and not life.waits
            if name in waiting:
                close(name, start)
            if reason is not None:
                waiting[name] = (min(life.arrival, start) if is_first else start, reason)
    for name in list(waiting):
        close(name, duration)
    for name, life in lives.items():
        until = min(served[name], duration if life.end is None else life.end)
        if not life.waits and until > life.arrival:  # it came while a step ran, and the next one took it
            life.waits.append((life.arrival, until, ""))
        elif life.waits and life.arrival < until <= life.waits[0][0]:
            life.waits.insert(0, (life.arrival, until, ""))


def merged(lives: list[Life]) -> Life:
    """Several requests as one; its tokens are those of the request that stalled longest."""
    worst = max(lives, key=lambda life: life.stall)
    ends = [life.end for life in lives]
    return Life(
        label=lives[0].label if len(lives) == 1 else f"{lives[0].label} to {lives[-1].label}",
        prompt_tokens=max(life.prompt_tokens for life in lives),
        arrival=lives[0].arrival,
        decodes=_union(run for life in lives for run in life.decodes),
        prefills=sorted(prefill for life in lives for prefill in life.prefills),
        waits=sorted(wait for life in lives for wait in life.waits),
        preempted=sorted(place for life in lives for place in life.preempted),
        tokens=worst.tokens, stall=worst.stall, ttft=worst.ttft,
        end=None if None in ends else max(ends), is_cut=all(life.is_cut for life in lives), size=len(lives),
        first=lives[0].label,
    )  # fmt: skip


def _union(runs) -> list[Run]:
    """The places that lie in any of the runs, as runs."""
    union: list[Run] = []
    for first, last in sorted(runs):
        if union and first <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return union


def grouped(story: Story, most: int) -> list[Life]:
    """About `most` rows: neighbours in arrival share one when there are more. Prompts that stand out keep their own."""
    size = -(-len(story.lives) // most)
    if size <= 1:
        return story.lives
    rows: list[list[Life]] = []
    for life in story.lives:
        is_long = life.prompt_tokens > story.long_prompt
        if not rows or is_long or len(rows[-1]) == size or rows[-1][0].prompt_tokens > story.long_prompt:
            rows.append([])
        rows[-1].append(life)
    return [merged(row) for row in rows]


# ---- in words -------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A time for people: 12.3 s, 606 ms, 4.6 ms, 480 µs."""
    scaled, unit, most = value, "s", 100
    if value < 0.9995:
        scaled, unit, most = (value * 1e3, "ms", 10) if value >= 0.0009995 else (value * 1e6, "µs", 10)
    text = f"{scaled:.1f}" if scaled < most - 0.05 else f"{scaled:.0f}"
    return f"{text.removesuffix('.0')} {unit if value else 's'}"


def round_up(number: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= number:
                return factor * power
        power *= 10


def round_times(span: float, most: int, unit: str = "s") -> list[tuple[float, str]]:
    """At most `most` + 1 round moments from 0 to `span`, with their labels."""
    if unit == "step":
        return [(float(t), str(t)) for t in range(0, int(span) + 1, round_up(-(-int(span) // max(1, most))))]
    end = int(span * 1e6 + 0.5)  # whole microseconds: fractions don't add up
    every = round_up(-(-end // max(1, most)))
    factor, unit = (1e6, "s") if end >= 1_000_000 else (1e3, "ms")
    return [(t / 1e6, f"{t / factor:g} {unit}" if t else "0") for t in range(0, end + 1, every)]


def round_steps(numbers: list[int], most: int) -> list[tuple[int, str]]:
    """At most `most` + 1 steps with a round number: (place, label)."""
    every = round_up(-(-len(numbers) // max(1, most)))
    return [(place, str(number)) for place, number in enumerate(numbers) if number % every == 0]


def plural(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def joined_lines(words: list[str], width: int, join: str) -> list[str]:
    """Words side by side, in lines of at most `width` characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(join) + len(word) <= width:
            lines[-1] += join + word
        else:
            lines.append(word)
    return lines


def headline(story: Story) -> list[str]:
    """The numbers that sum up a run."""
    parts = [plural(len(story.lives), "request"), plural(len(story.ends), "step")]
    parts[1] += f" in {seconds(story.duration)}" if story.unit == "s" else ""
    longest = max(story.lives, key=lambda life: life.prompt_tokens, default=None)
    if longest and longest.ttft is not None and longest.prompt_tokens > story.long_prompt:
        parts.append(f"first token of {longest.label} after {story.say(longest.ttft)}")
    if story.stalled:
        parts.append(f"longest gap between two tokens {story.say(story.stalled.stall)}")
    return parts


def alt_text(trace: Trace, *, by: str = "time", labels: dict[str, str] | None = None) -> str:
    """What a timeline shows, in two sentences with its numbers: for alt= and for the ear. Arguments as of `timeline`."""
    return describe(read(trace, labels, by))


def describe(story: Story) -> str:
    """`alt_text` of a trace that was read already."""
    requests = plural(len(story.lives), "request")
    if not story.ends:
        return f"Timeline of {requests}: no step has run yet."
    decodes = sum(last - first + 1 for life in story.lives for first, last in life.decodes)
    sizes = [last - first + 1 for life in story.lives for _, first, last in life.prefills]
    preempted = sum(len(life.preempted) for life in story.lives)
    cut = sum(life.is_cut for life in story.lives)
    parts = [plural(decodes, "decode token"), plural(len(sizes), "prefill chunk")]
    parts[1] += f" of up to {plural(max(sizes), 'token')}" if sizes else ""
    parts += [plural(preempted, "preemption")] if preempted else []
    parts += [f"{cut} cancelled"] if cut else []
    took = f" ({seconds(story.duration)})" if story.unit == "s" else ""
    text = f"Timeline of {requests} over {plural(len(story.ends), 'step')}{took}: {', '.join(parts)}."
    return text if story.stalled is None else f"{text} {_describe_gap(story, story.stalled)}"


def _describe_gap(story: Story, life: Life) -> str:
    """The longest gap, whose it is, and what the engine did meanwhile."""
    before, after = story.long_gaps(life, life.stall)[0]
    text = f"The longest gap between two tokens is {story.say(life.stall)}"
    if not story.has_stall:
        return f"{text}: every stream flows."
    if any(before < place <= after for place in life.preempted):
        return f"{text}: {life.label} was preempted."
    chunks = [(last - first + 1, other.label) for other in story.lives for place, first, last in other.prefills
              if before < place <= after]  # fmt: skip
    size, label = max(chunks, default=(0, ""))
    if not size:
        return f"{text} ({life.label})."
    return f"{text}: {life.label} stands still while a step computes {size} prompt tokens of {label}."

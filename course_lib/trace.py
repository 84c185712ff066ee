"""What happened, step by step: the record that every picture and every metric is drawn from.

A real engine and a simulated one write the same trace. Reasons and block owners are stored as
changes, so a step costs what changed in it; `reasons_at` and `owners_at` play them back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from .columns import Columns


class ChunkRecord(NamedTuple):
    """Tokens start_pos … start_pos + num_tokens - 1 of a request; kind is "prefill" or "decode"."""

    request: str
    start_pos: int
    num_tokens: int
    kind: str
    is_last: bool


class Chunks(Columns):
    """The chunks of a step."""

    __slots__ = ()
    row = ChunkRecord


@dataclass
class RequestRecord:
    """One request's side of the story. Times in seconds on the runner's clock, steps as indices.

    name is unique in the trace: the request id, with #2, #3 … when the id was used again.
    """

    name: str
    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    arrival_time: float
    arrival_step: int
    priority: int = 0
    prefix_hit_tokens: int = 0
    finish_reason: str | None = None
    finish_time: float | None = None
    finish_step: int | None = None


@dataclass
class StepRecord:
    """One step of the engine.

    start, end   seconds on the runner's clock
    reasons      request -> why it got nothing, where that changed; None: it no longer waits
    tokens       request -> the token id that it emitted
    preempted    requests that lost their blocks since the record before
    finished     request -> finish reason, of those that ended since the record before
    blocks_*     the pool while the forward pass ran
    owners       (block, request, +1 taken or -1 given back) since the record before; request "" is the
                 prefix cache: the block is held by nobody, and its content can still be reused
    """

    index: int = 0
    start: float = 0.0
    end: float = 0.0
    chunks: Chunks = field(default_factory=Chunks)
    reasons: dict[str, str | None] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    blocks_used: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    owners: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, Chunks):
            self.chunks = Chunks(self.chunks)

    @property
    def decode_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind == "decode")

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind == "prefill")


@dataclass
class Trace:
    """The engine's settings, its requests by name, its steps in order."""

    config: dict = field(default_factory=dict)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)

    def unique_name(self, request_id: str) -> str:
        """The id itself, or id#2, id#3 … when a request of that id is in the trace already."""
        name, count = request_id, 1
        while name in self.requests:
            count += 1
            name = f"{request_id}#{count}"
        return name

    def reasons_at(self, index: int) -> dict[str, str]:
        """Every request that waited in steps[index], and why."""
        reasons: dict[str, str] = {}
        for step in self.steps[: index + 1]:
            for name, reason in step.reasons.items():
                if reason is None:
                    reasons.pop(name, None)
                else:
                    reasons[name] = reason
        return reasons

    def owners_at(self, index: int) -> dict[int, list[str]]:
        """Block -> the requests that held it while steps[index] ran. Blocks held by nobody are left out."""
        owners: dict[int, list[str]] = {}
        for step in self.steps[: index + 1]:
            for block, name, change in step.owners:
                if not name:
                    continue
                if change > 0:
                    owners.setdefault(block, []).append(name)
                else:
                    owners[block].remove(name)
                    if not owners[block]:
                        del owners[block]
        return owners

    def cached_at(self, index: int) -> set[int]:
        """The blocks held by nobody while steps[index] ran whose content could still be reused."""
        cached: set[int] = set()
        for step in self.steps[: index + 1]:
            for block, name, change in step.owners:
                if not name:
                    (cached.add if change > 0 else cached.discard)(block)
        return cached

    def token_times(self) -> dict[str, list[float]]:
        """When each request emitted its tokens, in seconds: the end of the step that sampled them."""
        times: dict[str, list[float]] = {name: [] for name in self.requests}
        for step in self.steps:
            for name in step.tokens:
                times[name].append(step.end)
        return times

    def to_json(self) -> str:
        """The whole trace as a JSON text; `from_json` reads it back."""
        return json.dumps(
            {
                "format": "course_lib.trace/1",
                "config": self.config,
                "requests": [asdict(request) for request in self.requests.values()],
                "steps": [vars(step) | {"chunks": list(step.chunks)} for step in self.steps],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != "course_lib.trace/1":
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a trace of this engine: format is {found!r}, expected 'course_lib.trace/1'")
        try:
            trace = cls(data["config"])
            for fields in data["requests"]:
                trace.requests[fields["name"]] = RequestRecord(**fields)
            for fields in data["steps"]:
                fields["chunks"] = [ChunkRecord(*chunk) for chunk in fields["chunks"]]
                fields["owners"] = [tuple(change) for change in fields["owners"]]
                trace.steps.append(StepRecord(**fields))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a whole trace of this engine: {error!r}") from None
        return trace

    def to_perfetto(self) -> str:
        """The trace in the Trace Event Format: open it at Perfetto's UI or in chrome://tracing.

        One track for the steps, one per request (chunks, decodes, waits with their reason, first
        token), counters for KV blocks and tokens.
        """
        return json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms", "otherData": self.config})

    def _events(self):
        def microseconds(seconds: float) -> float:
            return round(seconds * 1e6, 3)

        def slice_(track: int, name: str, start: float, end: float, **args):
            start, end = microseconds(start), microseconds(end)
            return {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": start, "dur": round(end - start, 3), "args": args}

        def label(kind: str, track: int, **args):
            return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": args}

        yield label("process_name", 0, name="engine")
        yield label("thread_name", 1, name="steps")
        tracks = {name: number for number, name in enumerate(self.requests, start=2)}
        for name, track in tracks.items():
            yield label("thread_name", track, name=name)
            yield label("thread_sort_index", track, sort_index=track)
        waiting: dict[str, tuple[str, float]] = {}  # request -> (reason, since)
        free_at = {name: request.arrival_time for name, request in self.requests.items()}
        emitted: set[str] = set()

        def end_wait(name: str, until: float):
            reason, since = waiting.pop(name)
            since = max(since, free_at[name])
            finish = self.requests[name].finish_time
            until = until if finish is None else min(until, finish)
            if until > since:
                yield slice_(tracks[name], f"wait: {reason}", since, until, reason=reason)

        for step in self.steps:
            title = f"step {step.index}: {step.prefill_tokens} prefill + {step.decode_tokens} decode"
            yield slice_(1, title, step.start, step.end, tokens=step.prefill_tokens + step.decode_tokens)
            for name, reason in step.reasons.items():
                if name in waiting:
                    yield from end_wait(name, step.start)
                if reason is not None:
                    waiting[name] = (reason, step.start if step.index else self.requests[name].arrival_time)
            for name, start_pos, num_tokens, kind, _is_last in step.chunks.tuples():
                last = start_pos + num_tokens - 1
                title = f"decode {start_pos}" if kind == "decode" else f"prefill {start_pos}-{last}"
                yield slice_(tracks[name], title, step.start, step.end, start_pos=start_pos, num_tokens=num_tokens)
                free_at[name] = step.end
            for name in step.tokens:
                if name not in emitted:
                    emitted.add(name)
                    yield {"ph": "i", "s": "t", "pid": 1, "tid": tracks[name], "name": "first token",
                           "ts": microseconds(step.end)}  # fmt: skip
            blocks = {"used": step.blocks_used, "cached": step.blocks_cached, "free": step.blocks_free - step.blocks_cached}
            tokens = {"decode": step.decode_tokens, "prefill": step.prefill_tokens}
            for counter, values in (("KV blocks", blocks), ("tokens", tokens)):
                yield {"ph": "C", "pid": 1, "tid": 0, "name": counter, "ts": microseconds(step.start), "args": values}
        for name in list(waiting):
            yield from end_wait(name, self.steps[-1].end)

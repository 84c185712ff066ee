"""The scheduler lab: streams are running, a long prompt arrives. What does each setting do to whom?

    lab()                      in a notebook
    Lab().frame()              the same without one: a frame for view.js
    Lab(chunk=None).trace      the trace of these settings

Every setting is run through the real scheduler on a simulated chip, so that a change shows at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property

from ..config import POLICY_NAMES, EngineConfig
from ..cost_model import StepWork, step_cost
from ..hardware import CHIPS, MODELS, find_chip, find_model
from ..metrics import percentile
from ..trace import Trace
from ..workloads import Piece, Request, simulate
from .budget import budget
from .frame import frame
from .story import Story, read, seconds
from .timeline import compare, timeline

CONTEXT, OUTPUT = 1, 80  # tokens of each stream: so short a prompt that all decode from the second step on, and answer
LONG_OUTPUT = 16
SHORT_PROMPT, SHORT_OUTPUT = 128, 16  # of each newcomer
ROWS = 260  # pixels for the rows of a picture: controls, numbers and picture fit on a projector
HEAD_START = 12  # tokens that the streams have when the long prompt arrives


@dataclass(frozen=True)
class Settings:
    """What can be set in the lab.

    running    streams that are decoding when the long prompt arrives
    prompt     tokens of the long prompt
    newcomers  short requests that keep coming behind it, one a step
    known      tokens at the beginning of the long prompt that an earlier request had: the prefix cache has them
    chunk, budget, decode_share, num_blocks, policy     as in EngineConfig; chunk None: whole prompts
    """

    running: int = 64
    prompt: int = 8192
    newcomers: int = 0
    known: int = 0
    chunk: int | None = 1024
    budget: int = 2048
    decode_share: float = 1.0
    num_blocks: int = 4096
    policy: str = "prefilling_first"
    chip: str = "h100"
    model: str = "llama3-8b"

    @cached_property
    def config(self) -> EngineConfig:
        """With whole prompts the budget has room for the longest and the streams: else nobody could serve it."""
        budget = self.budget if self.chunk is not None else max(self.budget, self.prompt + self.running)
        return EngineConfig(
            num_blocks=self.num_blocks,
            max_num_seqs=min(budget, max(1, self.running + self.newcomers + 2)),
            max_num_batched_tokens=budget,
            max_prefill_chunk_size=self.chunk,
            enable_prefix_caching=self.known > 0,
            max_decode_share=self.decode_share,
            policy=self.policy,
        )

    @cached_property
    def step_seconds(self) -> float:
        """About what a step of all streams takes, in whole microseconds."""
        return round(self._seconds(max(1, self.running), CONTEXT + HEAD_START), 6)

    @cached_property
    def arrival(self) -> float:
        """When the long prompt comes: the streams' prompts are computed, and some tokens have come out."""
        prompts = self._seconds(self.running * CONTEXT + min(self.known, self.prompt), 0)
        return round(prompts + HEAD_START * self.step_seconds, 6)

    def _seconds(self, tokens: int, context: int) -> float:
        work = StepWork(tokens, tokens, tokens * context, tokens * context)
        return step_cost(find_model(self.model), find_chip(self.chip), work).seconds

    def requests(self) -> list[Request]:
        """The workload. `code` says the same in Python."""
        requests = [Request("earlier", 0.0, (Piece(0, self.known),), 1)] if self.known else []
        requests += [Request(f"chat{i}", 0.0, (Piece(1 + i, CONTEXT),), OUTPUT) for i in range(self.running)]
        requests += [Request("long", self.arrival, (Piece(0, self.prompt),), LONG_OUTPUT, priority=1)]
        return requests + [
            Request(f"new{i}", round(self.arrival + (1 + i) * self.step_seconds, 6), (Piece(1000 + i, SHORT_PROMPT),), SHORT_OUTPUT)
            for i in range(self.newcomers)
        ]

    def run(self) -> Trace:
        """Raises ValueError for settings that no engine could serve."""
        return simulate(self.config, self.requests(), model=self.model, chip=self.chip)

    def code(self) -> str:
        """Python that makes the same trace."""
        config = self.config
        default = EngineConfig()
        names = [f.name for f in fields(EngineConfig) if getattr(config, f.name) != getattr(default, f.name)]
        lines = [f"    {name}={getattr(config, name)!r}," for name in names]
        parts = [f'    Request("earlier", 0.0, (Piece(0, {self.known}),), max_tokens=1),'] if self.known else []
        if self.running:
            parts.append(f'    *(Request(f"chat{{i}}", 0.0, (Piece(1 + i, {CONTEXT}),), max_tokens={OUTPUT}) for i in range({self.running})),')
        parts.append(f'    Request("long", {self.arrival}, (Piece(0, {self.prompt}),), max_tokens={LONG_OUTPUT}, priority=1),')
        if self.newcomers:
            parts.append(
                f'    *(Request(f"new{{i}}", round({self.arrival} + (1 + i) * {self.step_seconds}, 6), (Piece(1000 + i, {SHORT_PROMPT}),), '
                f"max_tokens={SHORT_OUTPUT})\n      for i in range({self.newcomers})),"
            )
        return "\n".join([
            "from course_lib import EngineConfig",
            "from course_lib.lab import alt_text, show, timeline",
            "from course_lib.workloads import Piece, Request, simulate",
            "",
            "config = EngineConfig(", *lines, ")",
            "requests = [", *parts, "]",
            f"trace = simulate(config, requests, model={self.model!r}, chip={self.chip!r})",
            "show(timeline(trace), alt_text(trace))",
        ]) + "\n"  # fmt: skip


def _numbers(values, unit: str = "") -> list:
    return [[value, f"{value:,}{unit}"] for value in values]


# key, label, [value, words] of every choice, what it does
CONTROLS = (
    ("running", "running streams", _numbers((0, 4, 8, 16, 32, 64, 96, 128, 192, 256)), "requests that decode when the long prompt arrives"),
    ("prompt", "long prompt", _numbers((512, 1024, 2048, 4096, 8192, 16384, 32768), " tokens"), "tokens of the long prompt"),
    ("chunk", "chunk size", [*_numbers((32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), " tokens"), [None, "whole prompt"]],
     "max_prefill_chunk_size: most prompt tokens of one request in a step"),
    ("budget", "token budget", _numbers((64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), " tokens"),
     "max_num_batched_tokens: most tokens in a step"),
    ("decode_share", "decode share", [[share / 100, f"{share} %"] for share in (5, 10, 25, 50, 75, 100)],
     "max_decode_share: part of the budget that decode may take while prefill waits"),
    ("num_blocks", "KV pool", _numbers((64, 128, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 16384), " blocks"),
     "num_blocks, of 16 tokens each"),
    ("newcomers", "short newcomers", _numbers((0, 4, 8, 16, 32, 64)), "short requests that keep coming behind the long one, one a step"),
    ("known", "known prefix", _numbers((0, 1024, 2048, 4096, 6144), " tokens"),
     "tokens at the beginning of the long prompt that the prefix cache has from an earlier request"),
    ("policy", "policy", [[name, name] for name in POLICY_NAMES], "who gets the prefill budget first"),
    ("chip", "chip", [[name, name] for name in CHIPS], "what the simulation runs on"),
    ("model", "model", [[name, name] for name in MODELS], "what the simulation computes"),
)  # fmt: skip

# key, label, the idea in a sentence, settings that differ from the defaults
PRESETS = (
    ("stall", "the stall", "A whole prompt is one long step: every stream stands still until it is done.",
     {"running": 128, "chunk": None}),
    ("chunks", "chunks", "The same work in chunks: the streams get a token with each of them.", {"running": 128}),
    ("too_big", "chunk too big", "A chunk of half the prompt still stops everybody for half of the time.",
     {"running": 128, "chunk": 4096, "budget": 8192}),
    ("too_small", "chunk too small", "Each step costs the reading of all weights: tiny chunks pay it over and over, and the long one waits.",
     {"running": 128, "chunk": 64}),
    ("decode_cap", "the decode cap", "A budget that decode nearly fills: with a cap of a quarter, the streams take turns while the prompt waits.",
     {"running": 96, "prompt": 4096, "budget": 128, "chunk": 128, "decode_share": 0.25}),
    ("starvation", "waiting first", "Who admits newcomers before it goes on with what was begun lets the half-filled prompt starve.",
     {"running": 16, "newcomers": 64, "budget": 128, "chunk": 128, "policy": "waiting_first", "prompt": 2048}),
    ("pressure", "KV pressure", "The pool is too small for all: the newest are preempted, and compute everything again.",
     {"running": 96, "num_blocks": 384, "prompt": 2048, "chunk": 512}),
    ("prefix", "prefix hit", "What the prefix cache has is not computed again: the long prompt comes in a few chunks.",
     {"running": 64, "known": 6144}),
    ("fair", "fair share", "The budget is split among all that wait: short prompts aren't stuck behind the long one.",
     {"running": 32, "newcomers": 32, "budget": 512, "chunk": 512, "policy": "fair_share"}),
)  # fmt: skip

ACTIONS = (
    ("pin", "Pin as A", "keep this run as A, and compare it with the settings that follow"),
    ("json", "Trace (JSON)", "download the trace: Trace.from_json reads it"),
    ("perfetto", "Trace (Perfetto)", "download the trace for ui.perfetto.dev or chrome://tracing"),
    ("svg", "Picture (SVG)", "download the timeline"),
    ("budget", "Budget (SVG)", "download the token budget of every step"),
    ("code", "Copy as code", "the same run in Python"),
)


class Lab:
    """The lab without a screen: settings in, frames out. `handle` takes what view.js sends."""

    def __init__(self, **settings) -> None:
        self._show(Settings(**settings))
        self.pinned: tuple[Settings, Trace, Story] | None = None
        self._answers = 0

    def handle(self, message: dict) -> dict:
        """The answer to a message: a frame, or {"kind": "download" or "code", …}."""
        kind = message.get("kind")
        if kind == "set":
            return self.change(message["values"])
        if kind == "preset":
            changes = next(changes for key, *_, changes in PRESETS if key == message["key"])
            return self.change(asdict(Settings()) | changes, preset=message["key"])
        if kind == "action" and message["key"] == "pin":
            self.pinned = None if self.pinned else (self.settings, self.trace, self._story)
            return self.frame()
        if kind == "action":
            return self.export(message["key"])
        raise ValueError(f"kind={kind!r} is no message of the lab")

    def change(self, values: dict, preset: str = "") -> dict:
        """New settings; ones that can't be run leave the picture as it is, and say why."""
        try:
            self._show(Settings(**values), preset)
        except (TypeError, ValueError) as error:
            return self._answer({"error": str(error), "values": values, "preset": preset, "pinned": self.pinned is not None})
        return self.frame()

    def _show(self, settings: Settings, preset: str = "") -> None:
        trace = settings.run()
        self.settings, self.trace, self.preset, self._story = settings, trace, preset, read(trace)

    def setup(self) -> dict:
        """What view.js needs once: the controls, the presets and the buttons."""
        return {
            "controls": [
                {"key": key, "label": label, "values": self._choices(key, values), "help": help}
                for key, label, values, help in CONTROLS
            ],
            "presets": [{"key": k, "label": label, "idea": idea} for k, label, idea, _ in PRESETS],
            "actions": [{"key": k, "label": label, "help": h} for k, label, h in ACTIONS],
        }

    def _choices(self, key: str, values: list) -> list:
        """The choices of a control, and among them the value that it has now."""
        now = getattr(self.settings, key)
        if any(value == now for value, _ in values):
            return values
        return sorted([*values, [now, str(now)]], key=lambda choice: (choice[0] is None, choice[0]))

    def frame(self) -> dict:
        """What view.js shows of these settings."""
        runs = [*([self.pinned] if self.pinned else []), (self.settings, self.trace, self._story)]
        _, traces, stories = zip(*runs, strict=True)
        return self._answer(
            frame(*traces, titles=self._titles(runs), room=ROWS // len(runs), stories=stories)
            | {"values": asdict(self.settings), "preset": self.preset, "pinned": self.pinned is not None, "newest": True,
               "readouts": self._readouts(runs)}
        )  # fmt: skip

    def export(self, key: str) -> dict:
        """A file for the browser to save, or the code."""
        if key == "code":
            return {"kind": "code", "text": self.settings.code()}
        files = {
            "json": ("trace.json", "application/json", lambda: self.trace.to_json()),
            "perfetto": ("trace.perfetto.json", "application/json", lambda: self.trace.to_perfetto()),
            "svg": ("timeline.svg", "image/svg+xml", self._picture),
            "budget": ("budget.svg", "image/svg+xml", lambda: budget(self.trace)),
        }
        name, mime, text = files[key]
        return {"kind": "download", "name": name, "type": mime, "text": text()}

    def _picture(self) -> str:
        if self.pinned is None:
            return timeline(self.trace)
        titles = self._titles([self.pinned, (self.settings, self.trace, self._story)])
        return compare(self.pinned[1], self.trace, titles=titles)

    def _answer(self, data: dict) -> dict:
        self._answers += 1
        return data | {"seq": self._answers}

    def _titles(self, runs) -> tuple[str, ...]:
        """A and B, each with the settings in which they differ."""
        if len(runs) == 1:
            return ("",)
        a, b = (asdict(settings) for settings, *_ in runs)
        different = [(key, label, values) for key, label, values, _ in CONTROLS if a[key] != b[key]]

        def words(name: str, settings: dict) -> str:
            parts = [f"{label} {dict(values).get(settings[key], settings[key])}" for key, label, values in different]
            return f"{name}: {', '.join(parts)}" if parts else name

        return words("A", a), words("B", b)

    def _readouts(self, runs) -> dict:
        """The numbers of each run, a row each."""
        measured = [measures(trace, story) for _, trace, story in runs]
        names = ["A", "B"] if len(runs) == 2 else ["this run"]
        rows = [[name, *numbers.values()] for name, numbers in zip(names, measured, strict=True)]
        return {"columns": ["", *measured[0]], "rows": rows}


def measures(trace: Trace, story: Story) -> dict[str, str]:
    """What the lab is about, in words: the stall of the streams, and what the long prompt pays for less of it.

    Stall and ITL (inter-token latency) are of all but the long prompt; newcomers' TTFT is their mean.
    """
    ends = [step.end for step in trace.steps]
    counts = story.gaps([life for life in story.lives if life.label != "long"])
    gaps: list[float] = []
    for gap, count in sorted((ends[after] - ends[before], count) for (before, after), count in counts):
        gaps += [gap] * count
    duration = trace.steps[-1].end - min(request.arrival_time for request in trace.requests.values())
    output = sum(len(step.tokens) for step in trace.steps)
    long = next(life.ttft for life in story.lives if life.label == "long")
    late = [life.ttft for life in story.lives if life.label.startswith("new") and life.ttft is not None]
    return {
        "longest stall": seconds(gaps[-1]) if gaps else "–",
        "P99 ITL": seconds(percentile(gaps, 99)) if gaps else "–",
        "TTFT of long": seconds(long) if long is not None else "–",
        "TTFT of newcomers": seconds(sum(late) / len(late)) if late else "–",
        "tokens/s": f"{output / duration:.0f}",
        "preemptions": str(sum(len(step.preempted) for step in trace.steps)),
    }


def lab(**settings):
    """The scheduler lab as a widget. settings: those of `Settings`, to begin with others than the defaults.

    Where anywidget can't be imported it is a panel of ipywidgets, with the same controls.
    """
    from .view import LabView

    return LabView(Lab(**settings))

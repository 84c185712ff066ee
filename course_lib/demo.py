"""The course's main job: four people read a streaming answer, then a long document arrives.

Run twice on a real model, first with the document's prefill in one piece, then in chunks. Lesson 00
and `python -m course_lib demo` use the same functions; what they show is read off the traces.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from statistics import median

from .config import EngineConfig, SamplingParams
from .engine import Engine, RequestOutput
from .metrics import of_requests, percentile
from .slots import blocks_needed
from .trace import Trace

CHATS = {
    "Ana": "Write a story about a lighthouse keeper who finds a message in a bottle.",
    "Ben": "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "Chen": "How do I bake a loaf of bread? Describe every step.",
    "Dora": "Give me advice for learning to play the piano as an adult.",
}
DOCUMENT = "document"  # the request id of the long prompt
QUESTION = "Summarise the text above in three sentences."


def document_text() -> str:
    """The long text that arrives: how a language model server works, about 1,500 words."""
    return resources.files("course_lib").joinpath("data/how_a_server_works.txt").read_text("utf-8").strip()


def chat_prompt(tokenizer, message: str) -> list[int]:
    """Token ids of one user message in the model's chat template; plain text where it has none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer.encode(message)
    messages = [{"role": "user", "content": message}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


@dataclass
class Workload:
    """Prompts as token ids. The document arrives once each stream has `head_start` tokens."""

    chats: dict[str, list[int]]
    document: list[int]
    stream_tokens: int = 64
    document_tokens: int = 40
    head_start: int = 16

    @classmethod
    def standard(cls, tokenizer, **settings) -> Workload:
        """The four chats and the document: 2,048 tokens with SmolLM2's tokenizer and chat template."""
        chats = {name: chat_prompt(tokenizer, message) for name, message in CHATS.items()}
        return cls(chats, chat_prompt(tokenizer, f"{document_text()}\n\n{QUESTION}"), **settings)

    @property
    def num_tokens(self) -> dict[str, int]:
        """How many tokens each request generates."""
        return dict.fromkeys(self.chats, self.stream_tokens) | {DOCUMENT: self.document_tokens}


def title_of(max_prefill_chunk_size: int | None) -> str:
    """A run's setting in words."""
    return "prefill in one piece" if max_prefill_chunk_size is None else f"prefill in chunks of {max_prefill_chunk_size}"


@dataclass
class StallRun:
    """One run of the workload: its trace and each request's last output. Times in seconds."""

    max_prefill_chunk_size: int | None
    trace: Trace
    outputs: dict[str, RequestOutput]

    @property
    def title(self) -> str:
        return title_of(self.max_prefill_chunk_size)

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {name: output.token_ids for name, output in self.outputs.items()}

    def measures(self) -> dict[str, float]:
        """The numbers of the table, see `measures_of`."""
        return measures_of(self.trace, sum(len(ids) for ids in self.token_ids.values()))


def measures_of(trace: Trace, num_tokens: int) -> dict[str, float]:
    """The numbers of the table for a trace that emitted `num_tokens`; gaps are between two tokens of one stream (not
    of the document)."""
    requests = of_requests(trace)
    gaps = [gap for name, request in requests.items() if name != DOCUMENT for gap in request.itl]
    total = trace.steps[-1].end - trace.steps[0].start
    return {
        "longest gap in a stream, s": max(gaps),
        "median inter-token latency, s": percentile(gaps, 50),
        "P99 inter-token latency, s": percentile(gaps, 99),
        "document's time to first token, s": requests[DOCUMENT].ttft,
        "total time, s": total,
        "output tokens per second": num_tokens / total,
    }


def run(
    runner,
    workload: Workload,
    max_prefill_chunk_size: int | None,
    on_outputs: Callable[[Engine, list[RequestOutput]], object] | None = None,
) -> StallRun:
    """Serve the workload on a fresh engine; `on_outputs(engine, outputs)` is called after every
    step, and when the document has arrived.

    Runs with different chunk sizes have the same configuration otherwise, and the same work to do.
    """
    num_tokens = workload.num_tokens
    prompts = workload.chats | {DOCUMENT: workload.document}
    blocks = sum(blocks_needed(len(prompt) + num_tokens[name], 16) for name, prompt in prompts.items())
    config = EngineConfig(
        block_size=16,
        num_blocks=blocks + 8,  # room for all at once: this is about time, not about memory
        max_num_seqs=8,
        max_num_batched_tokens=len(workload.document) + 8,
        max_prefill_chunk_size=max_prefill_chunk_size,
        enable_prefix_caching=False,
        kv_watermark=0.0,
    )
    engine = Engine(runner, config)

    def add(name: str, prompt: list[int]) -> None:
        engine.add_request(prompt, SamplingParams(max_tokens=num_tokens[name]), request_id=name)

    for name, prompt in workload.chats.items():
        add(name, prompt)
    outputs: dict[str, RequestOutput] = {}
    waiting_for_document = True
    while engine.has_unfinished_requests():
        new = engine.step()
        for output in new:
            outputs[output.request_id] = output
        if on_outputs is not None:
            on_outputs(engine, new)
        started = [len(output.token_ids) for output in outputs.values()]
        if waiting_for_document and len(started) == len(workload.chats) and min(started) >= workload.head_start:
            waiting_for_document = False
            add(DOCUMENT, workload.document)
            if on_outputs is not None:
                on_outputs(engine, [])  # it is there now, and its step may take long
    engine.check_invariants()
    return StallRun(max_prefill_chunk_size, engine.trace, outputs)


def transformers_tokens(runner, workload: Workload) -> dict[str, list[int]]:
    """What transformers' own generate() gives for each prompt alone, greedily: the independent answer."""
    import torch

    tokens = {}
    for name, prompt in (workload.chats | {DOCUMENT: workload.document}).items():
        ids = torch.tensor([prompt], device=runner.model.device)
        count = workload.num_tokens[name]
        with torch.inference_mode():
            answer = runner.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        tokens[name] = answer[0, len(prompt) :].tolist()
    return tokens


def typical_pair(whole: list[StallRun], chunked: list[StallRun]) -> tuple[StallRun, StallRun]:
    """The pair of runs whose ratio of longest gaps is the median one."""

    def ratio(pair: tuple[StallRun, StallRun]) -> float:
        gaps = [each.measures()["longest gap in a stream, s"] for each in pair]
        return gaps[1] / gaps[0]

    pairs = sorted(zip(whole, chunked, strict=True), key=ratio)
    return pairs[len(pairs) // 2]


def table(whole: list[StallRun], chunked: list[StallRun]) -> str:
    """Both settings side by side, in plain text: medians over the runs, and the median of the pairs' ratios."""
    pairs = [(a.measures(), b.measures()) for a, b in zip(whole, chunked, strict=True)]
    names = list(pairs[0][0])
    width = max(len(name) for name in names)
    sizes = [runs[0].max_prefill_chunk_size for runs in (whole, chunked)]
    first, second = ("one piece" if size is None else f"chunks of {size}" for size in sizes)
    lines = [f"{'':{width}}   {first:>14}   {second:>14}   {'ratio':>6}"]
    for name in names:
        columns = [median(a[name] for a, _ in pairs), median(b[name] for _, b in pairs)]
        ratio = median(b[name] / a[name] for a, b in pairs)
        lines.append(f"{name:{width}}   {columns[0]:14.2f}   {columns[1]:14.2f}   {ratio:6.3f}")
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns that a line may take without wrapping, at most 100."""
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns - 1))


class LivePanel:
    """Shows the streams while they grow: one line a request, rewritten after each step on a terminal.

    Where the output is no terminal, it prints each text once, when the run is over.
    """

    def __init__(self, out=None, width: int | None = None) -> None:
        self.out = out or sys.stdout
        self.width = (width or terminal_width()) - 13  # the label; a line that wraps would count as two
        self._texts: dict[str, str] = {}
        self._drawn = 0
        self._live = self.out.isatty()

    def __call__(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._texts[output.request_id] = output.text
        if self._live:
            self._draw(engine)
        elif not engine.has_unfinished_requests():
            for name, text in self._texts.items():
                print(f"  {name:>8} | {' '.join(text.split())}", file=self.out)

    def _draw(self, engine: Engine) -> None:
        states = engine.snapshot()
        rows = {name: f"{self._texts.get(name, '')}" for name in [*self._texts, *states]}
        lines = []
        for name, text in rows.items():
            state = states.get(name)
            if state is not None and state.status != "RUNNING":
                text = f"[{state.status}: {state.prefilled_token_count} of {state.prompt_tokens} prompt tokens]"
            lines.append(f"  {name:>8} | {' '.join(text.split())[-self.width :]}")
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self.out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        self.out.flush()
        self._drawn = len(lines)


class Watch:
    """Prints one request's text as it streams, and marks where a reader had to wait for it.

    A wait is a gap between two of its tokens of more than three times the median gap.
    """

    def __init__(self, name: str, width: int = 90) -> None:
        self.name, self.width = name, width
        self._last: float | None = None
        self._gaps: list[float] = []
        self._column = 0

    def __call__(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        now = engine.runner.now()
        for output in outputs:
            if output.request_id == self.name:
                if self._last is not None:
                    gap = now - self._last
                    if self._gaps and gap > 3 * median(self._gaps):
                        self._print(f" [... {gap:.1f} s ...]")
                    self._gaps.append(gap)
                self._last = now
                self._print(output.new_text)
                if output.finished:
                    print()
            elif output.request_id == DOCUMENT and len(output.token_ids) == 1:
                self._print(" [the document's first token]")

    def _print(self, text: str) -> None:
        text = text.replace("\n", " ")
        if self._column + len(text) > self.width and text.startswith(" "):
            text, self._column = "\n" + text[1:], -1
        print(text, end="", flush=True)
        self._column += len(text)


def main(args) -> int:
    """`python -m course_lib demo`: run, show, compare."""
    from .lab import compare, timeline_text
    from .runners.model import ModelRunner

    runner = ModelRunner(args.model)
    workload = Workload.standard(runner.tokenizer)
    if len(workload.document) >= runner.max_model_len:  # a byte tokenizer needs more tokens for the same text
        workload.document = workload.document[: runner.max_model_len // 2]
    print(f"{len(workload.chats)} chats stream from {runner.name}; then a document of {len(workload.document):,} tokens arrives.")
    print("First, what transformers' own generate() answers to each prompt alone …", flush=True)
    expected = transformers_tokens(runner, workload)
    whole: list[StallRun] = []
    chunked: list[StallRun] = []
    for repeat in range(args.repeat):  # in turns, so that a slow moment of the machine meets both
        for chunk, runs in ((None, whole), (args.chunk, chunked)):
            if repeat == 0:
                print(f"\n--- {title_of(chunk)}: watch the chats", flush=True)
            runs.append(run(runner, workload, chunk, LivePanel() if repeat == 0 else None))
    pair = typical_pair(whole, chunked)
    for each in pair:
        print(f"\n{each.title}")
        print(timeline_text(each.trace, width=terminal_width(), color=sys.stdout.isatty()))
    print(f"\n{table(whole, chunked)}")
    if args.repeat > 1:
        print(f"(medians of {args.repeat} runs each, taken in turns)")
    same = all(each.token_ids == whole[0].token_ids for each in whole + chunked)
    right = whole[0].token_ids == expected
    print(f"\nToken ids of all runs are {'equal' if same else 'DIFFERENT'}; ", end="")
    print(f"they are {'equal to' if right else 'DIFFERENT from'} those of transformers' generate().")
    if args.svg:
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write(compare(pair[0].trace, pair[1].trace, titles=(pair[0].title, pair[1].title)))
        print(f"Timelines written to {args.svg}")
    if args.json:
        results = {title_of(runs[0].max_prefill_chunk_size): [each.measures() for each in runs] for runs in (whole, chunked)}
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "model": runner.name, "runs": results}, file, indent=1)
        print(f"Measurements written to {args.json}")
    return 0 if same and right else 1

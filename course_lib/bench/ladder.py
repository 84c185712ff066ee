"""`python -m course_lib bench ladder`: the course's steps one after another, each measured on the same requests.

A rung is the one before it and one idea more, from a loop that recomputes every token to chunked prefill. All rungs
serve the same four workloads: requests arrive at fixed times, whether or not anybody is ready for them (open loop),
and a time to first token counts from the arrival. Within a round every rung runs once; the order turns from round to
round. Token ids are compared with those of transformers' own forward (the rung "KV cache").
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Self

from ..config import EngineConfig
from ..demo import document_text
from ..engine import Engine
from ..trace import ChunkRecord, RequestRecord, StepRecord, Trace
from ..workloads import Request, poisson_arrivals, replay
from . import machine
from .ladder_measures import effects, effects_text, measures, table, tokens_of

SEED = 0
MAX_MODEL_LEN = 2048  # tokens of one request, at most: what a reservation up front must have room for
KV_SLOTS = 8192  # tokens that the pool of every engine rung holds: four such reservations
SEQS = 16  # requests in flight, at most, from continuous batching on
CHUNK = 256  # the demo's
LIMIT = 12.0  # seconds after which the naive loop is stopped
QUICK = 8  # --quick divides all sizes by it


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    adds         what it has that the rung before hasn't
    settings     of its EngineConfig; None: the plain loop of lesson 01, one request after another
    keeps_cache  the plain loop keeps keys and values; else it computes the whole text again for every token
    limit        seconds after which a run is cut; None: it ends when all is served
    """

    name: str
    adds: str
    settings: dict | None = None
    keeps_cache: bool = True
    limit: float | None = None


def rungs(scale: int = 1) -> list[Rung]:
    """The ladder, from the bottom. All token counts are divided by `scale` (1: as measured)."""
    longest, slots, chunk = MAX_MODEL_LEN // scale, KV_SLOTS // scale, CHUNK // scale
    reserved = {
        "block_size": longest, "num_blocks": slots // longest, "max_num_seqs": SEQS, "max_model_len": longest,
        "max_num_batched_tokens": longest + SEQS, "max_prefill_chunk_size": None, "enable_prefix_caching": False,
        "kv_watermark": 0.0,
    }  # fmt: skip
    paged = reserved | {"block_size": 16, "num_blocks": slots // 16}
    shared = paged | {"enable_prefix_caching": True}
    chunked = shared | {"max_prefill_chunk_size": chunk, "max_num_batched_tokens": chunk + SEQS}
    return [
        Rung("naive", "a loop: the whole text through the model for every token, one request at a time", None, False, LIMIT),
        Rung("KV cache", "keys and values are kept: a token costs one token"),
        Rung(
            "own forward",
            "the engine with room for one request: packed weights, attention of our own",
            reserved | {"max_num_seqs": 1},
        ),
        Rung("continuous batching", f"all that fit in one step, each with {longest:,} slots reserved up front", reserved),
        Rung("paged attention", "blocks of 16 slots, taken when they are needed; the same pool", paged),
        Rung("prefix cache", "blocks of equal beginnings are shared", shared),
        Rung("chunked prefill", f"at most {chunk} prompt tokens in a step, beside the decodes", chunked),
    ]


@dataclass(frozen=True)
class Workload:
    """Requests with their times of arrival, and what they are in words."""

    about: str
    requests: list[Request]


def workloads(token_ids: list[int], scale: int = 1) -> dict[str, Workload]:
    """The four workloads; prompts are cut out of `token_ids`. All token counts and times are divided by `scale`."""
    rng = random.Random(SEED)

    def text(num_tokens: int) -> list[int]:
        start = rng.randrange(len(token_ids) - num_tokens // scale + 1)
        return token_ids[start : start + num_tokens // scale]

    def request(name: str, arrival: float, prompt: list[int], max_tokens: int) -> Request:
        return Request(name, arrival / scale, prompt, max(2, max_tokens // scale))

    chat = [
        request(f"chat{i}", at, text(rng.randrange(32, 97)), 24) for i, at in enumerate(poisson_arrivals(4.0, 8, SEED))
    ]  # fmt: skip
    shared = [text(400), text(400)]
    rag = [request(f"rag{i}", 0.9 * i, shared[i % 2] + text(24), 16) for i in range(6)]
    document = [request(f"chat{i}", 0.0, text(rng.randrange(32, 97)), 48) for i in range(3)]
    document.append(request("document", 0.5, text(1920), 16))
    mix = []
    for i, at in enumerate(poisson_arrivals(1.6, 10, SEED)):
        if i == 4:
            mix.append(request("document", at, text(1200), 16))
        elif i in (1, 3, 6):
            mix.append(request(f"rag{i}", at, shared[0] + text(24), 16))
        else:
            mix.append(request(f"chat{i}", at, text(rng.randrange(32, 97)), 24))
    return {
        "chat": Workload("eight short chats", chat),
        "rag": Workload("six questions, about two documents in turn", rag),
        "document": Workload("three chats stream, then a long document arrives", document),
        "mix": Workload("six chats, three questions about one document, and a long document", mix),
    }


# ---- one run --------------------------------------------------------------------------------------


def run(runner, rung: Rung, requests: list[Request]) -> Trace:
    """Serve the requests on one rung, in real time; a run that was cut has requests that didn't finish."""
    if rung.settings is not None:
        return replay(Engine(runner, EngineConfig(**rung.settings)), requests)
    from ..model.plain import PlainModel

    return one_by_one(PlainModel(runner), requests, rung.keeps_cache, rung.limit)


def one_by_one(
    model, requests: list[Request], keeps_cache: bool, limit: float | None = None, now: Callable[[], float] = time.perf_counter
) -> Trace:
    """Lesson 01's loop as a server: first come, first served, each to its end. `model`: a PlainModel.

    Writes the trace that an engine would write; a "block" is one token, and none is held without a cache.
    """
    trace, begin = Trace({"block_size": 1}), now()
    requests = sorted(requests, key=lambda request: request.arrival_time)
    for request in requests:
        trace.requests[request.request_id] = RequestRecord(
            request.request_id, request.request_id, len(request.prompt), request.max_tokens, begin + request.arrival_time, 0
        )
    for request in requests:
        time.sleep(max(0.0, begin + request.arrival_time - now()))
        known, cached, cache = list(request.prompt), 0, model.new_cache() if keeps_cache else None
        for number in range(request.max_tokens):
            start = now()
            if limit is not None and start - begin >= limit:
                return _with_arrivals(trace)
            token_id = model(known[cached:], cached, cache)
            kind = "decode" if number and keeps_cache else "prefill"
            chunk = ChunkRecord(request.request_id, cached, len(known) - cached, kind, True)
            held = len(known) if keeps_cache else 0
            trace.steps.append(
                StepRecord(len(trace.steps), start, now(), [chunk], tokens={request.request_id: token_id}, blocks_used=held)
            )
            cached = len(known) if keeps_cache else 0
            known.append(token_id)
        record, last = trace.requests[request.request_id], trace.steps[-1]
        last.finished[request.request_id] = record.finish_reason = "length"
        record.finish_time, record.finish_step = last.end, last.index
    return _with_arrivals(trace)


def _with_arrivals(trace: Trace) -> Trace:
    """Each request's arrival as a step: the first that ended after it."""
    for record in trace.requests.values():
        record.arrival_step = sum(step.end <= record.arrival_time for step in trace.steps)
    return trace


class Utilisation:
    """Asks a GPU five times a second, while the block runs, how busy it is. `.mean`: per cent; None where nobody answers."""

    def __init__(self, ask: Callable[[], float] | None = None) -> None:
        self._ask = ask or _gpu_utilisation()
        self._values: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def mean(self) -> float | None:
        return fmean(self._values) if self._values else None

    def __enter__(self) -> Self:
        if self._ask is not None:
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._ask is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._values.append(self._ask())


def _gpu_utilisation() -> Callable[[], float] | None:
    """torch.cuda.utilization where there is a GPU and the package that it asks (nvidia-ml-py); else None."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.utilization()
    except (ImportError, RuntimeError):
        return None
    return torch.cuda.utilization


# ---- the whole measurement ------------------------------------------------------------------------


def measure(runner, ladder: list[Rung], workload: Workload, rounds: int, say: Callable[[str], object] = print) -> dict:
    """Each rung once to warm up on a few tokens, then `rounds` times in turns. Returns what is kept as JSON."""
    first = workload.requests[0]
    for rung in ladder:
        run(runner, rung, [Request("warm-up", 0.0, first.prompt, 2)])
    runs, tokens = [], []
    for index in range(rounds):
        turn = index % len(ladder)
        for rung in ladder[turn:] + ladder[:turn]:
            with Utilisation() as gpu:
                trace = run(runner, rung, workload.requests)
            runs.append({"round": index, "rung": rung.name, **measures(trace, workload.requests)})
            if gpu.mean is not None:
                runs[-1]["gpu_utilisation_percent"] = gpu.mean
            tokens.append(tokens_of(trace))
            say(f"  round {index + 1} of {rounds}: {rung.name:20} {runs[-1]['duration_s']:6.1f} s")
    return {
        "about": workload.about,
        "requests": {
            r.request_id: {"arrival_s": r.arrival_time, "prompt_tokens": len(r.prompt), "new_tokens": r.max_tokens}
            for r in workload.requests
        },
        "runs": runs,
        "different_tokens": differences(runner, workload.requests, runs, tokens),
        "effects": effects(runs, [rung.name for rung in ladder]),
    }  # fmt: skip


def differences(runner, requests: list[Request], runs: list[dict], tokens: list[dict[str, list[int]]]) -> list[dict]:
    """Where a run gave another token than the reference: per run and request the place, and both tokens' logits' gap.

    The reference is the rung "KV cache", transformers' own forward; without it in `runs`, the first run. Up to that
    place both have the same text, and the gap says how far from equally likely the two were: of a tie, next to nothing.
    """
    reference = next((t for r, t in zip(runs, tokens, strict=True) if r["rung"] == "KV cache"), tokens[0])
    found = []
    for row, given in zip(runs, tokens, strict=True):
        for request in requests:
            expected, mine = reference[request.request_id], given[request.request_id]
            place = next((i for i, (a, b) in enumerate(zip(expected, mine, strict=False)) if a != b), None)
            if place is not None:
                gap = _logit_gap(runner, list(request.prompt) + expected[:place], expected[place], mine[place])
                where = {"round": row["round"], "rung": row["rung"], "request": request.request_id, "place": place}
                found.append(where | {"logit_gap": gap})
    return found


def _logit_gap(runner, text: list[int], one: int, other: int) -> float:
    """How far apart the model finds two tokens after `text`."""
    from ..model.plain import PlainModel

    logits = PlainModel(runner).logits(text, 0)
    return abs(logits[one] - logits[other]).item()


def main(args) -> None:
    import torch

    from .. import ModelRunner

    threads = args.threads or os.cpu_count()
    torch.set_num_threads(threads)
    scale = QUICK if args.quick else 1
    runner = ModelRunner("tiny" if args.quick else "smollm2")
    known = workloads(runner.tokenizer.encode(document_text()), scale)
    chosen = {name: workload for name, workload in known.items() if name in (args.workloads or known)}
    ladder = rungs(scale)
    about = {
        "threads": threads, "seed": SEED, "rounds": args.rounds, "model": runner.name, "attention": runner.attention,
        "max_model_len": MAX_MODEL_LEN // scale, "kv_slots": KV_SLOTS // scale, "rungs": [asdict(rung) for rung in ladder],
    }  # fmt: skip
    print(f"The ladder: {runner.name}, {threads} threads, attention {runner.attention}; a pool of {about['kv_slots']:,} slots")
    for number, rung in enumerate(ladder, start=1):
        print(f"  {number} {rung.name}: {rung.adds}")
    results = {}
    for name, workload in chosen.items():
        print(f"\n{name}: {workload.about}", flush=True)
        results[name] = measure(runner, ladder, workload, args.rounds)
        print(f"\n{table(results[name])}\n\n{effects_text(results[name]['effects'])}", flush=True)
    if args.quick and args.out is None:
        return  # not a measurement
    cache = runner.kv_cache
    about["kv_bytes_per_slot"] = (cache.k.nbytes + cache.v.nbytes) // (cache.num_blocks * cache.block_size)
    name = "ladder" if len(chosen) == len(known) else "_".join(["ladder", *chosen])  # a part doesn't replace the whole
    print(f"raw numbers: {machine.save(name, about | {'workloads': results}, args.out)}")

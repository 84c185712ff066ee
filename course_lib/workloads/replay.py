"""One driver for every engine: it hands in each request when its time has come, and steps until all is done."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import lru_cache

from ..config import EngineConfig, SamplingParams
from ..engine import Engine, RequestOutput
from ..hardware import Chip, ModelShape
from ..runners.simulated import SimulatedRunner
from ..scheduler import Scheduler
from ..trace import Trace
from ..validation import check_int
from .request import Request


def replay(
    engine: Engine,
    requests: Iterable[Request],
    *,
    max_steps: int | None = None,
    on_outputs: Callable[[list[RequestOutput]], object] | None = None,
) -> Trace:
    """Serve a workload; returns the engine's trace. Time 0 of the workload is the runner's clock as it is now.

    While nothing is there to do, a virtual clock jumps to the next arrival (`runner.advance_to`), and a real one is
    waited for. In the trace a request arrives at its own time, also when a step was running then; so its TTFT
    counts the rest of that step.
    max_steps: stop there; what isn't finished stays in the engine. on_outputs: called with each step's outputs.
    Raises ValueError, with the request's id, for one that the engine refuses.
    """
    check_int("max_steps", 1 if max_steps is None else max_steps, 1)
    runner, start, steps = engine.runner, engine.runner.now(), 0
    final_only = on_outputs is None and max_steps is None  # nobody looks at the others
    pending = sorted(requests, key=lambda request: request.arrival_time)[::-1]  # the next one last
    while pending or engine.has_unfinished_requests():
        now = runner.now()
        while pending and start + pending[-1].arrival_time <= now:
            _add(engine, pending.pop(), start, final_only)
        if engine.has_unfinished_requests():
            outputs = engine.step()
            steps += 1
            if on_outputs is not None:
                on_outputs(outputs)
            if steps == max_steps:
                break
        else:
            _wait(runner, start + pending[-1].arrival_time)
    return engine.trace


def _add(engine: Engine, request: Request, start: float, final_only: bool) -> None:
    name = engine.trace.unique_name(request.request_id)
    try:
        engine.add_request(
            request.prompt_for(engine.runner.vocab_size),
            _params(request.max_tokens, final_only),
            request_id=request.request_id, priority=request.priority, cache_salt=request.cache_salt,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise type(error)(f"request {request.request_id!r}: {error}") from None
    if name in engine.trace.requests:
        engine.trace.requests[name].arrival_time = start + request.arrival_time


@lru_cache
def _params(max_tokens: int, final_only: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, final_only=final_only)


def _wait(runner, until: float) -> None:
    if hasattr(runner, "advance_to"):
        runner.advance_to(until)
        return
    before = runner.now()
    time.sleep(max(0.0, until - before))
    if runner.now() <= before < until:
        raise RuntimeError(f"{type(runner).__name__}'s clock stands still while it waits: it needs advance_to(seconds)")


def simulate(
    config: EngineConfig,
    requests: Iterable[Request],
    *,
    model: ModelShape | str = "llama3-8b",
    chip: Chip | str = "h100",
    cost=None,
    scheduler: type = Scheduler,
    max_steps: int | None = None,
) -> Trace:
    """Serve a workload on a simulated chip; the same arguments give the same trace. See SimulatedRunner and `replay`."""
    engine = Engine(SimulatedRunner(model, chip, cost), config, scheduler=scheduler)
    with garbage_collection_paused():
        return replay(engine, requests, max_steps=max_steps)


_pauses = 0  # how many are under way, in whatever threads
_was_enabled = False  # before the first of them
_counting = threading.Lock()


@contextmanager
def garbage_collection_paused():
    """As `timeit` does. A trace is millions of records, which the collector would walk through again and again.

    Nothing here refers to itself, so reference counting frees all that goes. Pauses may overlap: the last one to end
    turns the collector on again.
    """
    global _pauses, _was_enabled
    with _counting:
        if not _pauses:
            _was_enabled = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _counting:
            _pauses -= 1
            if _was_enabled and not _pauses:
                gc.enable()

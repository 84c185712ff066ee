"""Watch an engine while it runs: the timeline grows, text streams beside it, any request can be cancelled.

    outputs = live(engine, {"Ana": "Tell me a story.", "doc": long_text}, SamplingParams(max_tokens=64))

The loop is an ordinary one, `while …: engine.step()`, in the cell that calls it. It shows a new frame at most every
50 ms, and spends at most a fifth of its time on that, so that looking doesn't change much of what is seen.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Mapping

from ..config import SamplingParams, check_int
from ..engine import Engine, RequestOutput
from .frame import frame
from .story import plural

LEAST_PAUSE = 0.05  # seconds between two frames
SHARE = 5  # a frame that took t seconds to make is followed by a pause of at least SHARE × t

_runs = itertools.count(1)  # a late click must not stop the next run


class LiveRun:
    """One run to be watched: the requests, their texts, what was asked to be cancelled."""

    def __init__(self, engine: Engine, prompts, params, arrive: Mapping[str, int] | None) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, got {engine!r:.80}")
        if isinstance(prompts, str):
            raise TypeError(f"prompts is one text: for a single prompt write live(engine, [{prompts[:20]!r}…])")
        named = prompts if isinstance(prompts, Mapping) else {f"r{number}": prompt for number, prompt in enumerate(prompts)}
        each = params if isinstance(params, Mapping) else dict.fromkeys(named, params)
        for what, names in (("params", each), ("arrive", arrive or {})):
            strange = [name for name in names if name not in named]
            if strange:
                raise ValueError(f"{what} names {strange[0]!r}, but the prompts are {', '.join(named)}")
        self.engine, self.number = engine, next(_runs)
        self.outputs: dict[str, RequestOutput] = {}
        self._requests = {name: (prompt, each.get(name)) for name, prompt in named.items()}
        steps = {name: check_int(f"arrive[{name!r}]", step, 0) for name, step in (arrive or {}).items()}
        self._to_come = sorted(named, key=lambda name: steps.get(name, 0))
        self._steps, self._num_steps = steps, 0
        self._states = dict.fromkeys(named, "not yet here")

    def is_over(self) -> bool:
        return not self._to_come and not self.engine.has_unfinished_requests()

    def step(self) -> None:
        """Add who arrives now, and compute a step."""
        while self._to_come and (self._is_due(self._to_come[0]) or not self.engine.has_unfinished_requests()):
            name = self._to_come.pop(0)
            prompt, params = self._requests[name]
            self.engine.add_request(prompt, params, request_id=name)
            self._states[name] = "waiting"
        for output in self.engine.step():
            self.outputs[output.request_id] = output
            self._states[output.request_id] = output.finish_reason if output.finished else "decoding"
        for name, state in self.engine.snapshot().items():
            self._states[name] = {"RUNNING": "decoding"}.get(state.status, state.status.lower())
        self._num_steps += 1

    def _is_due(self, name: str) -> bool:
        return self._steps.get(name, 0) <= self._num_steps

    def cancel(self, name: str, run: int) -> bool:
        """End a request of this run, from any thread; False for one of another run, or one that has ended."""
        return run == self.number and self.engine.cancel(name)

    def stop(self) -> None:
        """End all: those that are there, and those that would still come."""
        self._to_come.clear()
        for name in self.engine.snapshot():
            self.engine.cancel(name)

    def frame(self) -> dict:
        """What view.js shows now."""
        texts = []
        for name in self._requests:
            output = self.outputs.get(name)
            text = "" if output is None else output.text.lstrip() or plural(len(output.token_ids), "token")
            state = self._states[name]
            is_live = not (output is not None and output.finished) and state != "not yet here"
            texts.append({"id": name, "text": text, "state": state, "can_cancel": is_live})
        return frame(self.engine.trace, room=200) | {"texts": texts, "run": self.number, "follow": True}


def live(engine: Engine, prompts, params: SamplingParams | Mapping[str, SamplingParams] | None = None, *,
         arrive: Mapping[str, int] | None = None) -> dict[str, RequestOutput]:  # fmt: skip
    """Run prompts to their end and show it; returns each request's last output, by its name.

    prompts  {name: prompt}, or a list (then called r0, r1 …)
    params   one SamplingParams for all, or {name: SamplingParams}
    arrive   {name: step}: who comes later than at once

    The button beside each request cancels it. The notebook's interrupt button ends the run between two steps.
    """
    from IPython.display import display

    from .view import LiveView

    run = LiveRun(engine, prompts, params, arrive)
    view = LiveView(run)
    display(view)
    pause, shown = LEAST_PAUSE, time.perf_counter()
    with _interrupts() as asked:
        try:
            while not run.is_over():
                if asked:
                    run.stop()
                run.step()
                if time.perf_counter() - shown >= pause:
                    begun = time.perf_counter()
                    view.show_frame(run.frame())
                    shown = time.perf_counter()
                    pause = max(LEAST_PAUSE, SHARE * (shown - begun))
        finally:
            view.show_frame(run.frame())
    return run.outputs


@contextlib.contextmanager
def _interrupts():
    """While this lasts, an interrupt fills the list instead of raising in the middle of a step; a second one raises."""
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number, stack) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)

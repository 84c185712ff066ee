"""The interactive view in a notebook: `TraceView(trace)`.

What it shows is view.js; this file hands it a frame (see frame.py) and the messages. Where anywidget
can't be imported, `TraceView` is made of ipywidgets: the same pictures, drawn by Python for each step.
"""

from __future__ import annotations

import json
from importlib import resources

from ..trace import Trace
from .block_map import block_map, block_map_alt
from .budget import budget, budget_alt
from .frame import frame
from .svg import show

try:
    import anywidget
    import traitlets
except ImportError:  # the fallback below needs ipywidgets alone
    anywidget = None


def script() -> str:
    """view.js, which draws a frame in any web page."""
    return resources.files(__package__).joinpath("view.js").read_text("utf-8")


if anywidget is not None:

    class FrameView(anywidget.AnyWidget):
        """Shows the frame in `frame`, a JSON text, and calls `on_message(message)` for what the reader does."""

        _esm = script()
        frame = traitlets.Unicode("{}").tag(sync=True)

        def __init__(self, data: dict) -> None:
            super().__init__(frame=_to_json(data))
            self._summary = data["summary"]
            # ipykernel 7.4 hands a widget's messages to the shell that wrote to it last. During a run
            # that is the busy cell, and a button would be heard only at its end. (A private name: if
            # it goes, only that is lost.)
            if hasattr(self.comm, "_reply_subshell_for"):
                self.comm._reply_subshell_for = lambda data, default: default
            self.on_msg(lambda _, message, buffers: self.on_message(message))

        def show_frame(self, data: dict) -> None:
            self._summary = data.get("summary", self._summary)
            self.frame = _to_json(data)

        def on_message(self, message: dict) -> None:
            """Nothing to do for a trace that is finished."""

        def __repr__(self) -> str:
            return f"{type(self).__name__}({self._summary})"

    class TraceView(FrameView):
        """A trace to play, scrub and look into; two traces are compared on one axis.

        by, width, titles, labels: as of `timeline` and `compare`.
        """

        def __init__(self, *traces: Trace, **how) -> None:
            check_traces(traces)
            super().__init__(frame(*traces, **how))

else:
    import ipywidgets

    class TraceView(ipywidgets.VBox):
        """A trace to step through, of ipywidgets alone: the slider asks Python for the block map of its step."""

        def __init__(self, *traces: Trace, **how) -> None:
            check_traces(traces)
            data, trace = frame(*traces, **how), traces[-1]
            self._summary = data["summary"]
            picture = show(data["svg"], data["alt"])._repr_mimebundle_()["text/html"]
            parts = [ipywidgets.HTML(picture)]
            if trace.steps:
                slider = ipywidgets.IntSlider(description="step", max=len(trace.steps) - 1, continuous_update=True)
                pool = ipywidgets.HTML()

                def draw(change=None) -> None:
                    picture = show(block_map(trace, slider.value), block_map_alt(trace, slider.value))
                    pool.value = picture._repr_mimebundle_()["text/html"]

                slider.observe(draw, "value")
                draw()
                tokens = show(budget(trace), budget_alt(trace))._repr_mimebundle_()["text/html"]
                parts += [ipywidgets.HTML(tokens), slider, pool]
            super().__init__(parts)

        def __repr__(self) -> str:
            return f"TraceView({self._summary})"


def check_traces(traces: tuple) -> None:
    for trace in traces:
        if not isinstance(trace, Trace):
            raise TypeError(f"TraceView shows traces (engine.trace), got {trace!r:.80}")
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"TraceView shows one trace, or two to compare: got {len(traces)}")


def _to_json(data: dict) -> str:
    return json.dumps(data, separators=(",", ":"))

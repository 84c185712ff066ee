"""The interactive views in a notebook: `TraceView(trace)`; `LabView` and `LiveView`, which `lab()` and `live()` make.

What they show is view.js; this file hands it frames (see frame.py) and takes its messages. Where
anywidget can't be imported, they are made of ipywidgets: the same pictures, drawn by Python for each step.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from ..trace import Trace
from ..workloads.replay import garbage_collection_paused
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
        setup = traitlets.Unicode("{}").tag(sync=True)  # what stays: the controls
        frame = traitlets.Unicode("{}").tag(sync=True)

        def __init__(self, data: dict, setup: dict | None = None) -> None:
            super().__init__(frame=_to_json(data), setup=_to_json(setup or {}))
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

    class LabView(FrameView):
        """Shows a `Lab`: hands it what the reader does, and shows what it answers."""

        def __init__(self, lab) -> None:
            self.lab = lab
            super().__init__(lab.frame(), lab.setup())

        def on_message(self, message: dict) -> None:
            with garbage_collection_paused():  # a notebook's kernel has so many objects that a collection can take 0.1 s
                answer = self.lab.handle(message)
                if "kind" in answer:
                    self.send(answer)
                else:
                    self.show_frame(answer)

    class LiveView(FrameView):
        """Shows a `LiveRun`, and passes on what its buttons ask for. (Printing or raising there would be seen by nobody.)"""

        def __init__(self, run) -> None:
            self.run = run
            super().__init__(run.frame())

        def on_message(self, message: dict) -> None:
            if message.get("kind") == "cancel" and self.run.cancel(message["request"], message["run"]):
                self.send({"kind": "cancelled", "request": message["request"]})

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

    class LabView(ipywidgets.VBox):
        """The controls of a `Lab` as ipywidgets, its numbers and its picture below."""

        def __init__(self, lab) -> None:
            self.lab = lab
            self._numbers, self._picture = ipywidgets.HTML(), ipywidgets.HTML()
            self._controls, self._values = {}, {}
            for control in lab.setup()["controls"]:
                values = [value for value, _ in control["values"]]
                options = [(words, place) for place, (_, words) in enumerate(control["values"])]
                choose = ipywidgets.SelectionSlider if len(options) > 5 else ipywidgets.Dropdown
                widget = choose(options=options, description=control["label"], style={"description_width": "initial"},
                                value=values.index(getattr(lab.settings, control["key"])))  # fmt: skip
                self._values[control["key"]] = values
                widget.observe(self._change, "value")
                self._controls[control["key"]] = widget
            self._show(lab.frame())
            boxes = list(self._controls.values())
            rows = [ipywidgets.HBox(boxes[i : i + 3]) for i in range(0, len(boxes), 3)]
            super().__init__([*rows, self._numbers, self._picture])

        def _change(self, change) -> None:
            self._show(self.lab.change({key: self._values[key][widget.value] for key, widget in self._controls.items()}))

        def _show(self, data: dict) -> None:
            if "error" in data:
                self._numbers.value = escape(data["error"])
                return
            self._summary = data["summary"]
            rows = [f"<td>{'</td><td>'.join(map(escape, row))}</td>" for row in data["readouts"]["rows"]]
            self._numbers.value = f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"
            self._picture.value = show(data["svg"], data["alt"])._repr_mimebundle_()["text/html"]

        def __repr__(self) -> str:
            return f"LabView({self._summary})"

    class LiveView(ipywidgets.VBox):
        """The timeline of a `LiveRun`, the texts, and a button to cancel each request."""

        def __init__(self, run) -> None:
            self.run = run
            self._picture, self._rows = ipywidgets.HTML(), {}
            data = run.frame()
            for request in data["texts"]:
                name = request["id"]
                button = ipywidgets.Button(description=f"Cancel {name}")
                button.on_click(lambda _, name=name: run.cancel(name, run.number))
                self._rows[name] = (ipywidgets.HTML(), button)
            self.show_frame(data)
            super().__init__([self._picture, *(ipywidgets.HBox(row[::-1]) for row in self._rows.values())])

        def show_frame(self, data: dict) -> None:
            self._summary = data["summary"]
            self._picture.value = show(data["svg"], data["alt"])._repr_mimebundle_()["text/html"]
            for request in data["texts"]:
                text, button = self._rows[request["id"]]
                text.value = f"<b>{escape(request['id'])}</b> ({request['state']}): {escape(request['text'])}"
                button.disabled = not request["can_cancel"]

        def __repr__(self) -> str:
            return f"LiveView({self._summary})"


def check_traces(traces: tuple) -> None:
    for trace in traces:
        if not isinstance(trace, Trace):
            raise TypeError(f"TraceView shows traces (engine.trace), got {trace!r:.80}")
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"TraceView shows one trace, or two to compare: got {len(traces)}")


def _to_json(data: dict) -> str:
    return json.dumps(data, separators=(",", ":"))

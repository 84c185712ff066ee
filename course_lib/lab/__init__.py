"""What one looks at: pictures of a trace, as SVG for notebooks and as text for terminals.

    show(timeline(engine.trace), alt_text(engine.trace))
    show(compare(a, b, titles=("whole", "chunks")), compare_alt(a, b, titles=("whole", "chunks")))
    show(budget(engine.trace), budget_alt(engine.trace))
    show(block_map(engine.trace, step=12), block_map_alt(engine.trace, step=12))
    print(timeline_text(engine.trace))

    house("slots")                          the map of course_lib, with a room lit
    source(Scheduler.schedule, mark="min(") the library's own source, with the lines that matter marked
    show_figure(figure, "alt text")         a matplotlib figure

    TraceView(engine.trace)          to play and to look into
    lab()                            the scheduler lab
    live(engine, prompts)            an engine while it runs

The pictures need the standard library alone, so that they run in a browser as well; the views need anywidget.
"""

from .block_map import block_map, block_map_alt, block_map_text
from .budget import budget, budget_alt, budget_text
from .figure import show_figure
from .house import house
from .source import source
from .story import alt_text
from .svg import Picture, show
from .timeline import compare, compare_alt, timeline
from .timeline_text import timeline_text

__all__ = [
    "Lab", "Picture", "TraceView", "alt_text", "block_map", "block_map_alt", "block_map_text", "budget", "budget_alt", "budget_text",
    "compare", "compare_alt", "house", "lab", "live", "show", "show_figure", "source", "timeline", "timeline_text",
]  # fmt: skip


def __getattr__(name: str):
    """The views bring ipywidgets along, and the lab the simulator: they are imported when first asked for."""
    if name == "TraceView":
        from .view import TraceView

        return TraceView
    if name == "live":
        from .live_run import live

        return live
    if name in ("lab", "Lab"):
        from . import scheduler_lab

        return getattr(scheduler_lab, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

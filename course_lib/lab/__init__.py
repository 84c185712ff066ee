"""What one looks at: pictures of a trace, as SVG for notebooks and as text for terminals.

    show(timeline(engine.trace), alt_text(engine.trace))
    show(compare(a, b, titles=("whole prompt", "chunks")), "...")
    show(budget(engine.trace), budget_alt(engine.trace))
    show(block_map(engine.trace, step=12), block_map_alt(engine.trace, step=12))
    print(timeline_text(engine.trace))

Needs the standard library alone, so that it runs in a browser as well.
"""

from .block_map import block_map, block_map_alt, block_map_text
from .budget import budget, budget_alt, budget_text
from .story import alt_text
from .svg import Picture, show
from .timeline import compare, timeline
from .timeline_text import timeline_text

__all__ = [
    "Picture", "alt_text", "block_map", "block_map_alt", "block_map_text", "budget", "budget_alt", "budget_text",
    "compare", "show", "timeline", "timeline_text",
]  # fmt: skip

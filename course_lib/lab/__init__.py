"""What one looks at: pictures of a trace, as SVG for notebooks and as text for terminals.

    show(timeline(engine.trace), alt_text(engine.trace))
    show(compare(a, b, titles=("whole prompt", "chunks")), "...")
    print(timeline_text(engine.trace))

Needs the standard library alone, so that it runs in a browser as well.
"""

from .story import alt_text
from .svg import Picture, show
from .timeline import compare, timeline
from .timeline_text import timeline_text

__all__ = ["Picture", "alt_text", "compare", "show", "timeline", "timeline_text"]

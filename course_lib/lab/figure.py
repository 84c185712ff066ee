"""A matplotlib figure with its alt text, as an image that every viewer shows."""

from __future__ import annotations

import base64
import io
from html import escape


class Figure:
    """A finished plot: PNG in an <img> with alt text."""

    def __init__(self, png: bytes, alt: str, width: int) -> None:
        self.png, self.alt, self.width = png, alt, width

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        data = base64.b64encode(self.png).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="{escape(self.alt)}" width="{self.width}">'
        return {"text/html": image, "text/plain": self.alt}


def show_figure(figure, alt: str, *, dpi: int = 144) -> Figure:
    """The figure on a white ground, closed, so that the notebook doesn't show it twice.

    alt  what the plot says, in words; required
    """
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt={alt!r}: say in words what the plot shows")
    from matplotlib import pyplot

    png = io.BytesIO()
    figure.savefig(png, dpi=dpi, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    inches = figure.get_size_inches()[0]
    return Figure(png.getvalue(), alt, round(inches * 96))

"""The library's own source in a lesson, with the lines that matter marked: prose and code can't drift apart."""

from __future__ import annotations

import inspect
import keyword
import re
import textwrap
from html import escape

TOKEN = re.compile(r"(?P<comment>#.*)|(?P<string>\"[^\"]*\"|'[^']*')|(?P<word>[A-Za-z_]\w*)")


class Source:
    """Source text that a notebook shows in colours and a terminal as text; marked lines have a bar in front."""

    def __init__(self, title: str, lines: list[str], marked: set[int]) -> None:
        self.title, self.lines, self.marked = title, lines, marked

    def __str__(self) -> str:
        numbered = (("▌ " if number in self.marked else "  ") + line for number, line in enumerate(self.lines))
        return "\n".join([f"# {self.title}", *(line.rstrip() for line in numbered)])

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        rows = []
        doc = False
        for number, line in enumerate(self.lines):
            quotes = line.count('"""')
            inside = doc or quotes > 0
            doc = doc != (quotes == 1)
            body = f'<span style="opacity:.65">{escape(line)}</span>' if inside else _coloured(line)
            edge = "#d55e00" if number in self.marked else "transparent"
            ground = ";background:rgba(213,94,0,.13)" if number in self.marked else ""
            rows.append(f'<span style="display:block;border-left:4px solid {edge};padding-left:8px{ground}">{body or " "}</span>')
        frame = "font-family:var(--jp-code-font-family,monospace);overflow-x:auto;line-height:1.35;font-size:var(--jp-code-font-size,13px)"
        html = f'<div style="opacity:.7;font-size:smaller">{escape(self.title)}</div><pre style="{frame}">{"".join(rows)}</pre>'
        return {"text/html": html, "text/plain": str(self)}


def _coloured(line: str) -> str:
    """Keywords bold, comments and strings pale; the page's own colours, so that it's legible in every theme."""
    parts, end = [], 0
    for match in TOKEN.finditer(line):
        parts.append(escape(line[end : match.start()]))
        text, end = escape(match.group()), match.end()
        if match.lastgroup == "comment":
            text = f'<i style="opacity:.65">{text}</i>'
        elif match.lastgroup == "string":
            text = f'<span style="opacity:.75">{text}</span>'
        elif keyword.iskeyword(match.group()):
            text = f"<b>{text}</b>"
        parts.append(text)
    return "".join([*parts, escape(line[end:])])


def source(thing, mark: tuple[str, ...] | str = (), *, first: str | None = None, last: str | None = None, docstring: bool = True) -> Source:
    """The source of a function, class or method, as it is in the file.

    mark         texts; every line that contains one of them is marked
    first, last  show only from the first line with one text to the next line with the other
    docstring    False leaves the docstring out
    Raises ValueError when one of the texts is in no line: the library changed, and the lesson must follow.
    """
    thing = getattr(thing, "fn", thing)  # a Triton kernel wraps its function
    lines = textwrap.dedent(inspect.getsource(thing)).splitlines()
    module = getattr(thing, "__module__", None) or ""
    if not docstring:
        lines = _without_docstring(lines)
    start = _find(lines, first, 0) if first else 0
    stop = _find(lines, last, start) + 1 if last else len(lines)
    lines = textwrap.dedent("\n".join(lines[start:stop])).splitlines()
    marks = (mark,) if isinstance(mark, str) else tuple(mark)
    marked: set[int] = set()
    for text in marks:
        hits = {number for number, line in enumerate(lines) if text in line}
        if not hits:
            raise ValueError(f"mark={text!r} is in no line of {thing.__qualname__}")
        marked |= hits
    return Source(f"{module.replace('.', '/')}.py · {thing.__qualname__}", lines, marked)


def _find(lines: list[str], text: str, start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"{text!r} is in no line of the source from line {start + 1} on")


def _without_docstring(lines: list[str]) -> list[str]:
    """Leave out the first thing in triple quotes, if it follows the signature."""
    for begin, line in enumerate(lines):
        if line.strip().startswith(('"""', 'r"""')):
            end = begin if line.count('"""') == 2 else next(n for n in range(begin + 1, len(lines)) if '"""' in lines[n])
            return lines[:begin] + lines[end + 1 :]
        if line.rstrip().endswith(":") and not line.lstrip().startswith(("def ", "class ", "async def ", ")", "@")):
            break
    return lines

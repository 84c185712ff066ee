"""What the sections of docs/results.md share: tables, medians with their spread, and where a file's numbers are from."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from statistics import median


def spread(values: SequenceOf[float], form: str = ".2f") -> str:
    """The median, and in brackets the lowest and the highest; "-" of nothing."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(before: SequenceOf[float], after: SequenceOf[float], form: str = ".2f") -> str:
    """The ratios after / before of the rounds, as `spread` shows them."""
    return spread([b / a for a, b in zip(before, after, strict=True)], form)


def table(head: SequenceOf[str], rows: Iterable[SequenceOf[str]]) -> str:
    """A Markdown table; the first column to the left, all others to the right."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def origin(file: str, content: dict, command: str) -> str:
    """Two lines: the machine and its versions, and the command with the file that holds its raw numbers."""
    return f"{_machine(content.get('machine') or {})}.  \n`{command}` · [raw numbers](../bench/results/{file})"


def _machine(machine: dict) -> str:
    known = dict(machine)
    words = [known.pop("processor", None), known.pop("gpu", None)]
    words.append(f"{cores} cores" if (cores := known.pop("cores", None)) else None)
    words += [known.pop("system", None) or known.pop("platform", None), f"Python {python}" if (python := known.pop("python", None)) else None]
    words += [f"{name} {version}" for name, version in known.pop("versions", {}).items() if version]
    words += [f"{name} {value}" for name, value in known.items() if value is not None]
    return "Machine: " + (", ".join(filter(None, words)) or "not recorded")


def picture(name: str, alt: str) -> str:
    """A picture of the page, from docs/results."""
    return f"![{alt}](results/{name})"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"

"""`python -m course_lib results`: docs/results.md and its pictures, written from the measurements in bench/results.

No number of the page is typed: each is read from a file, and a test writes the page again and compares. A section
appears when its file is there; every file of a kind (throughput.json, throughput_long.json) becomes a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import results_measured, results_traffic
from .machine import RESULTS

DOCS = RESULTS.parents[1] / "docs"
PICTURES = "results"  # the folder of the page's pictures, in docs

HEAD = """# Results

What was measured, on which machine, and the command that measures it again. This page is written by
`python -m course_lib results` from the files in [bench/results](../bench/results); don't edit it, a test writes it again and compares.

Unless a table says otherwise: a number is the median of the runs, with the lowest and the highest in brackets, and a ratio is the
median of the ratios within the rounds, since contenders of one table take turns on the same machine. Machines are shared; absolute times
on yours will differ, ratios less. Parts that say *simulated* are no measurements of a chip: the scheduler is the engine's own, and the
time of a step is computed from the chip's data sheet ([cost_model.py](../course_lib/cost_model.py))."""


class Part(NamedTuple):
    """What a file gives: Markdown, and pictures as (file name, SVG)."""

    text: str
    pictures: tuple[tuple[str, str], ...] = ()


# title, names of its files, and what makes a (text, pictures) of one file's name and content
SECTIONS: tuple[tuple[str, str, Callable[[str, dict], tuple]], ...] = (
    ("Stall", "stall*.json", results_measured.stall),
    ("Chunk size", "chunks*.json", results_measured.chunks),
    ("Throughput", "throughput*.json", results_measured.throughput),
    ("Latency", "latency*.json", results_measured.latency),
    ("Ladder", "ladder*.json", results_measured.ladder),
    ("Traffic", "traffic*.json", results_traffic.traffic),
    ("Endpoint", "endpoint*.json", results_measured.endpoint),
    ("GPU", "gpu*.json", results_measured.gpu),
)


def page(folder: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """The page's Markdown, and its pictures: name -> SVG. Raises ValueError for a file that is no JSON."""
    blocks, pictures = [HEAD], {}
    for title, pattern, section in SECTIONS:
        paths = sorted(folder.glob(pattern))
        if paths:
            blocks.append(f"## {title}")
        for path in paths:
            part = Part(*section(path.name, _read(path)))
            blocks.append(part.text.strip())
            pictures |= dict(part.pictures)
    return "\n\n".join(blocks) + "\n", pictures


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def main() -> int:
    """Write the page and its pictures; pictures of sections that are gone go too."""
    text, pictures = page()
    folder = DOCS / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.name not in pictures:
            path.unlink()
    for name, svg in pictures.items():
        (folder / name).write_text(svg, encoding="utf-8", newline="\n")
    (DOCS / "results.md").write_text(text, encoding="utf-8", newline="\n")
    print(f"{DOCS / 'results.md'}: {len(pictures)} pictures in {folder}")
    return 0

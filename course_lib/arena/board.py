"""The leaderboard: one JSON file beside the one that remembers the exercises."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ..checks.progress import progress_file, write_entries
from .result import Result
from .rounds import rounds
from .score import built_in_scores, total

NAME = ".course_arena.json"


def leaderboard_file() -> Path:
    """Beside the file that remembers the exercises."""
    return progress_file().with_name(NAME)


def read_leaderboard(path: Path | None = None) -> dict[str, dict]:
    """{policy: {"points", "rounds": {round: points}, "when"}}. A file that can't be read counts as empty."""
    try:
        found = json.loads((path or leaderboard_file()).read_text(encoding="utf-8"))
        return {
            str(name): {
                "points": float(e["points"]),
                "rounds": {g: float(p) for g, p in e["rounds"].items()},
                "when": str(e["when"]),
            }
            for name, e in found.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def remember(result: Result) -> None:
    """Keep a policy's newest result, in one step. A folder that can't be written to is no reason to fail."""
    path, entries = leaderboard_file(), read_leaderboard()
    entries[result.name] = {
        "points": round(result.points, 2),
        "rounds": {name: round(s.points, 2) for name, s in result.scores.items()},
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    write_entries(path, entries)


def leaderboard() -> str:
    """Your policies and the built-in ones, the most points first, as a text to print."""
    names = [game.name for game in rounds()]
    entries = {
        n: (total(scores), {g: s.points for g, s in scores.items()}, "built in") for n, scores in built_in_scores().items()
    }
    entries |= {n: (e["points"], e["rounds"], e["when"]) for n, e in read_leaderboard().items()}
    lines = [f"{'':3} {'policy':<24}{'points':>8}" + "".join(f"{name:>9}" for name in names)]
    for place, (name, (points, by_round, when)) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1][0]), start=1):
        cells = "".join(f"{by_round[game]:9.1f}" if game in by_round else f"{'-':>9}" for game in names)
        lines.append(f"{place:2}. {name[:23]:<24}{points:8.1f}{cells}   {when}")
    return "\n".join(lines)

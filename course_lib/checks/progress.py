"""What a learner has done so far: one small JSON file beside the exercises."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from .exercise import EXERCISES
from .run import Report

NAME = ".course_progress.json"


def progress_file() -> Path:
    """The file named by COURSE_PROGRESS, else the one in the course's folder (the one that holds exercises/), else here."""
    named = os.environ.get("COURSE_PROGRESS")
    if named:
        return Path(named)
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / NAME).exists() or (folder / "exercises").is_dir():
            return folder / NAME
    return here / NAME


def read_progress(path: Path | None = None) -> dict[str, dict]:
    """{exercise id: {"state", "held", "of", "concept", "when"}}. A file that can't be read counts as empty."""
    try:
        found = json.loads((path or progress_file()).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(report: Report) -> None:
    """Write a report's state into the file, in one step. A folder that can't be written to is no reason to fail."""
    path = progress_file()
    entries = read_progress(path)
    failed = report.failed or next(iter(report.remarks), None)
    entries[report.exercise.id] = {
        "state": report.state,
        "held": sum(result.outcome in ("holds", "cost") for result in report.results),
        "of": len(report.exercise.tests),
        "concept": (failed and failed.concept_id) or "",
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    write_entries(path, entries)


def write_entries(path: Path, entries: dict) -> None:
    """Replace a small JSON file in one step; where it can't be written, nothing happens."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        try:
            draft.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def table(entries: dict[str, dict]) -> tuple[str, bool]:
    """All exercises with their state as text, and whether every one is green."""
    marks = {"green": "✓", "red": "✗", "not done": "○"}
    rows, done = [], 0
    for identifier, exercise in sorted(EXERCISES.items()):
        entry = entries.get(identifier, {})
        state = entry.get("state", "not done")
        done += state == "green"
        held = f"{entry['held']} of {entry['of']}" if state in ("green", "red") and "held" in entry else ""
        concept = f"  {entry.get('concept', '')}" if entry.get("concept") else ""
        rows.append(f"{marks.get(state, '?')} {identifier}  {exercise.title:<52} {state:<9} {held:>8}{concept:<6} {entry.get('when', '')}".rstrip())
    rows.append(f"{done} of {len(EXERCISES)} done")
    return "\n".join(rows), done == len(EXERCISES)

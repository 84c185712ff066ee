"""What the numbers were measured on: part of every result file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def describe() -> dict:
    """Processor, cores, Python and the versions of what computes."""
    versions = {}
    for name in ("torch", "transformers", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def save(name: str, results: dict, folder: str | os.PathLike | None = None) -> Path:
    """Write results as JSON, with the machine; returns the file."""
    path = Path(folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **results}, indent=1) + "\n", encoding="utf-8")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

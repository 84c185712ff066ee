"""Where converted models are kept, and how a folder gets there whole or not at all.

A model folder is written under a temporary name beside its place and renamed at the end, so an interrupted
conversion leaves nothing half-made. A small manifest with the size of every file tells a damaged folder from
a good one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
_LEFTOVER_AGE = 3600.0  # seconds after which a temporary folder belongs to no running process any more


def cache_dir() -> Path:
    """The cache folder of this package: $COURSE_LIB_CACHE, else `course_lib` in the user's cache folder."""
    if own := os.environ.get("COURSE_LIB_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        base = Path(xdg)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base.expanduser() / "course_lib"


def read_manifest(folder: Path) -> dict | None:
    """The manifest of `folder` if every file that it lists is there with its size (bytes), else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"].items()
        if all((folder / name).stat().st_size == size for name, size in sizes):
            return manifest
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass
    return None


def build_folder(target: Path, fill: Callable[[Path], None], source: str) -> None:
    """Let `fill(folder)` write the files of a model, then put the folder at `target` in one step.

    source: where the model came from, in words; kept in the manifest.
    Two processes may build the same target: the one that comes second finds a good folder and drops its own.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    temporary = _temporary_name(target)
    temporary.mkdir()
    try:
        fill(temporary)
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        manifest = {"source": source, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete `folder`. It is renamed first, so that nobody meets it half-deleted."""
    doomed = _temporary_name(folder)
    try:
        os.rename(folder, doomed)
    except FileNotFoundError:
        return  # another process was faster
    shutil.rmtree(doomed, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    while True:
        try:
            os.rename(temporary, target)  # fails when a folder with content is there
            return
        except OSError:
            if not target.exists():
                raise
        if read_manifest(target):
            return
        discard(target)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}-{uuid.uuid4().hex}")


def _remove_leftovers(parent: Path) -> None:
    """Delete temporary folders that a killed process left behind (each can be hundreds of MB)."""
    for path in parent.glob(".*-*"):
        try:
            if path.is_dir() and time.time() - path.stat().st_mtime > _LEFTOVER_AGE:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another process deleted it meanwhile

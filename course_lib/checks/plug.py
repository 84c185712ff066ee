"""Put a part of your own into the engine, for as long as a `with` block runs.

    with plug(build_batch=build_batch):
        engine = Engine(FakeRunner())
        ...

Three parts need no plug, they are arguments of Engine: scheduler=, block_manager=, slot_mapping=.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

# The learner's part -> the module and the name (with a dot: a class's attribute) where the engine finds it.
PARTS: dict[str, str] = {
    "build_batch": "course_lib.engine:build_batch",
    "run_prefill_chunk": "course_lib.runners.model:ModelRunner.run_prefill_chunk",
    "TextStream": "course_lib.engine:TextStream",
    "sample": "course_lib.runners.model:sample",
}


@contextlib.contextmanager
def plug(**parts: object) -> Iterator[None]:
    """Replace parts of the engine by yours while the block runs; afterwards everything is as it was.

    Raises ValueError for a name that is no part, and says which there are.
    """
    for name in parts:
        if name not in PARTS:
            raise ValueError(f"{name!r} is no part of the engine that can be replaced: use {', '.join(sorted(PARTS))}")
    before = []
    try:
        for name, part in parts.items():
            holder, attribute = _find(PARTS[name])
            before.append((holder, attribute, vars(holder)[attribute]))
            setattr(holder, attribute, part)
        yield
    finally:
        for holder, attribute, part in reversed(before):
            setattr(holder, attribute, part)


def _find(place: str) -> tuple[object, str]:
    """The module or class that holds a part, and its name there."""
    module, _, path = place.partition(":")
    holder: object = importlib.import_module(module)
    *owners, attribute = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    return holder, attribute

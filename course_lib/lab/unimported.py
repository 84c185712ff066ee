"""A function of a module that can't be imported everywhere, to be shown and not to be called.

    source(unimported("course_lib.model.attention.triton_paged", "attention_kernel"), mark="block_table")

Triton has packages for Linux alone; its kernels can be read on every machine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import CodeType, FunctionType


def unimported(module: str, name: str) -> FunctionType:
    """The function `name` of `module`, compiled from its file without running anything of it.

    Raises ValueError where the module has no such function.
    """
    file = importlib.util.find_spec(module).origin
    whole = compile(Path(file).read_text(encoding="utf-8"), file, "exec", dont_inherit=True)
    for part in whole.co_consts:
        if isinstance(part, CodeType) and part.co_name == name:
            return FunctionType(part, {"__name__": module})
    raise ValueError(f"name={name!r} is no function of {module}")

"""A function of a module that can't be imported everywhere, to be shown and not to be called.

    source(unimported("course_lib.model.attention.triton_paged", "attention_kernel"), mark="block_table")

Triton has packages for Linux alone; its kernels can be read on every machine.
"""

from __future__ import annotations

import __future__
import ast
import importlib.util
from pathlib import Path
from types import FunctionType


def unimported(module: str, name: str) -> FunctionType:
    """The function `name` of `module`, compiled from its file without running anything of it.

    Raises ValueError where the module has no such function.
    """
    file = importlib.util.find_spec(module).origin
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            break
    else:
        raise ValueError(f"name={name!r} is no function of {module}")
    node.decorator_list.clear()
    namespace = {"__name__": module}
    flags = __future__.annotations.compiler_flag  # so that no name in a signature is looked up
    exec(compile(ast.Module([node], []), file, "exec", flags=flags, dont_inherit=True), namespace)
    return namespace[name]

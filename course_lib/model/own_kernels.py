"""Run a Triton kernel of your own: in Triton's interpreter, compiled where there is a GPU, or without Triton.

    from course_lib.model.own_kernels import launch, tl, triton

Triton reads TRITON_INTERPRET once, when it is imported; this module sets it in time where there is no GPU. Where
there is no Triton, mini_triton.py stands in for it.
"""

from __future__ import annotations

import inspect
import os
import sys

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton
    import triton.language as tl
except ImportError:
    from .mini_triton import tl, triton

__all__ = ["launch", "tl", "triton"]


def launch(kernel, grid: tuple[int, ...], *args, **sizes) -> None:
    """kernel[grid](*args, **sizes). Tensors may be on the CPU: where kernels are compiled, they travel to the GPU and back.

    A kernel with a stub in it raises the stub's NotDone, whatever the interpreter or the compiler makes of that.
    """
    if not isinstance(kernel, getattr(triton, "JITFunction", ())):  # it is interpreted
        try:
            kernel[grid](*args, **sizes)
        except Exception as error:
            stub = _not_done(error)
            if stub is not None:
                raise stub from None
            raise
        return
    if "raise NotDone" in inspect.getsource(kernel.fn):  # which no compiler can compile
        raise kernel.fn.__globals__["NotDone"](kernel.fn.__name__)
    if not torch.cuda.is_available():
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1, and there is no GPU: restart the notebook's kernel")
    moved = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    kernel[grid](*moved, **sizes)
    for arg, result in zip(args, moved, strict=True):
        if isinstance(arg, torch.Tensor):
            arg.copy_(result)


def _not_done(error: BaseException | None) -> BaseException | None:
    """A stub's exception among those that led to this one."""
    while error is not None and type(error).__name__ != "NotDone":
        error = error.__cause__ or error.__context__
    return error

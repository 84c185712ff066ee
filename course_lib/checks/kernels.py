"""Run a learner's Triton kernel: in Triton's interpreter, or compiled where there is a GPU.

    from course_lib.checks.kernels import launch, tl, triton

Triton reads TRITON_INTERPRET once, when it is imported; this module sets it in time where there is no GPU.
"""

from __future__ import annotations

import inspect
import os
import sys

import torch

from .exercise import NotDone

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

__all__ = ["launch", "tl", "triton"]


def launch(kernel, grid: tuple[int, ...], *args, **sizes) -> None:
    """kernel[grid](*args, **sizes). Raises NotDone itself where the interpreter, or the compiler, wraps it.

    Tensors may be on the CPU: where the kernel is compiled, they travel to the GPU and back.
    """
    is_compiled = isinstance(kernel, triton.JITFunction)
    if is_compiled and "raise NotDone" in inspect.getsource(kernel.fn):
        raise NotDone("the kernel")  # a compiler doesn't know `raise`
    if not is_compiled:
        try:
            kernel[grid](*args, **sizes)
        except Exception as error:
            stub = _not_done(error)
            if stub is not None:
                raise stub from None
            raise
        return
    if not torch.cuda.is_available():
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1, and there is no GPU: restart the kernel")
    moved = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    kernel[grid](*moved, **sizes)
    for arg, result in zip(args, moved, strict=True):
        if isinstance(arg, torch.Tensor):
            arg.copy_(result)


def _not_done(error: BaseException | None) -> NotDone | None:
    """The stub's exception among those that led to this one."""
    while error is not None and not isinstance(error, NotDone):
        error = error.__cause__ or error.__context__
    return error

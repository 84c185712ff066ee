"""As much of Triton as the kernel of lesson 04 needs, for systems that Triton has no package for (macOS, Windows).

A kernel runs on the CPU, one program after the other; tiles are tensors, a pointer is a tensor and where in it.
Names and meanings are Triton's; nothing here is fast, and nothing is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


class Pointer:
    """The address of one element of a tensor, or of a tile of them."""

    def __init__(self, tensor: torch.Tensor, at: int | torch.Tensor = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offset: int | torch.Tensor) -> Pointer:
        return Pointer(self.tensor, self.at + offset)


class Kernel:
    """What `@triton.jit` makes of a function: kernel[grid](arguments) runs it once for every place of the grid."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def run(*args, **sizes) -> None:
            pointers = [Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            for tl.program in itertools.product(*map(range, grid)):
                self.fn(*pointers, **sizes)

        return run


class triton:
    """The module triton."""

    jit = Kernel

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


class tl:
    """The module triton.language."""

    program: tuple[int, ...] = ()
    constexpr = int
    float16, float32, int32, int64 = torch.float16, torch.float32, torch.int32, torch.int64
    where, exp, exp2, log, log2, abs, sqrt = torch.where, torch.exp, torch.exp2, torch.log, torch.log2, torch.abs, torch.sqrt
    arange = torch.arange

    @staticmethod
    def program_id(axis: int) -> int:
        return tl.program[axis]

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=dtype)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        return tl.full(shape, 0, dtype)

    @staticmethod
    def load(pointer: Pointer, mask: torch.Tensor | bool = True, other: float = 0.0) -> torch.Tensor:
        at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
        return torch.where(mask, pointer.tensor.view(-1)[torch.where(mask, at, 0)], other)

    @staticmethod
    def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor | bool = True) -> None:
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(value), torch.as_tensor(mask))
        pointer.tensor.view(-1)[at[mask]] = value[mask].to(pointer.tensor.dtype)

    @staticmethod
    def dot(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | float = 0.0, input_precision: str = "") -> torch.Tensor:
        return acc + a @ b

    @staticmethod
    def trans(x: torch.Tensor) -> torch.Tensor:
        return x.T

    @staticmethod
    def maximum(a, b) -> torch.Tensor:
        return torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    @staticmethod
    def minimum(a, b) -> torch.Tensor:
        return torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    @staticmethod
    def max(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(dim=axis)

    @staticmethod
    def min(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amin(dim=axis)

    @staticmethod
    def sum(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(dim=axis)

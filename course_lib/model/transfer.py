"""From Python lists to the device: many lists in one copy, for which the host doesn't wait.

Copying to a GPU from ordinary memory makes the host wait until the copy is done, and a copy takes some microseconds
however small it is. So a step's lists are laid one after another in one array; on a GPU that array is pinned (memory
that the GPU can read by itself), and the copy runs while the host goes on. On a CPU nothing is copied at all.
"""

from __future__ import annotations

from array import array

import torch


def pack(lists: dict[str, list[int]]) -> torch.Tensor:
    """The lists one after another, int64, in the host's memory.

    Each begins at a multiple of 16 bytes, two numbers: Triton compiles a kernel once for such addresses, and anew for others.
    """
    numbers = array("q")
    for one in lists.values():
        numbers.fromlist(one)
        if len(one) % 2:
            numbers.append(0)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def unpack(buffer: torch.Tensor, lengths: dict[str, int]) -> dict[str, torch.Tensor]:
    """Views of the lists in a buffer that pack() laid out."""
    views, start = {}, 0
    for name, length in lengths.items():
        views[name] = buffer[start : start + length]
        start += length + length % 2
    return views


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor where a copy to `device` needs no waiting. Torch keeps this memory until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(lists: dict[str, list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """The lists as int64 tensors on the device, all in one copy."""
    buffer = pinned(pack(lists), device).to(device, non_blocking=True)
    return unpack(buffer, {name: len(one) for name, one in lists.items()})

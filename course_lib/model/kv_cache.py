"""The memory that block tables point into: one K and one V row per slot and layer."""

from __future__ import annotations

import math
import mmap
import os
import re
from pathlib import Path

import torch

from ..validation import check_number

MEMORY_FRACTION = 0.9  # of the free memory, for a pool that is sized by it; vLLM's default for a whole GPU
MAX_CPU_POOL = 4 * 2**30  # bytes: a laptop has other work to do


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of the device; None where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory(device: torch.device) -> int | None:
    """Bytes that a pool could take now; None where the system doesn't say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else what torch keeps for later would count as taken
        return torch.cuda.mem_get_info(device)[0]
    try:
        available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        return int(available[1]) * 1024
    except (OSError, TypeError):  # not Linux
        return total_memory(device)


def blocks_that_fit(bytes_per_block: int, free: int, step_bytes: int = 0, memory_fraction: float = MEMORY_FRACTION) -> int:
    """Blocks in `memory_fraction` of the free memory, when a step takes step_bytes of it for a moment (all in bytes).

    Raises ValueError when not even one fits.
    """
    check_number("memory_fraction", memory_fraction, "above 0 and at most 1", lambda x: 0 < x <= 1)
    blocks = int((memory_fraction * free - step_bytes) // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"num_blocks=None: no block of {bytes_per_block / 1e6:.1f} MB fits: {free / 1e9:.2f} GB are free, "
            f"memory_fraction is {memory_fraction}, and a step takes up to {step_bytes / 1e9:.2f} GB"
        )
    return blocks


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, without writing them: on a CPU the system hands out zeroed pages, each when it is first touched.

    torch.zeros would fill the whole pool now: 0.4 s for 1,024 blocks of SmolLM2, most of which no one ever uses.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class KVCache:
    """K and V of all layers, each [layers, num_slots, kv_heads, head_dim]; slot = block × block_size + offset."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = self.bytes_per_token(num_layers, num_kv_heads, head_dim, dtype) * num_blocks * block_size
        memory = total_memory(device)
        if memory is not None and size > memory:
            raise ValueError(
                f"num_blocks={num_blocks} with block_size={block_size} needs {size / 1e9:.1f} GB for K and V, "
                f"this device has {memory / 1e9:.1f} GB: at most {num_blocks * memory // size} blocks would fit"
            )
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.k, self.v = (_zeros(shape, dtype, device) for _ in range(2))

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers, K and V together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write key and value [T, kv_heads, head_dim] of one layer into the slots [T]."""
        self.k[layer, slot_mapping] = key
        self.v[layer, slot_mapping] = value

    def poison(self, blocks: list[int]) -> None:
        """Fill blocks that nobody should read with NaN."""
        for block in blocks:
            slots = slice(block * self.block_size, (block + 1) * self.block_size)
            self.k[:, slots] = self.v[:, slots] = float("nan")

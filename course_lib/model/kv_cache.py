"""The memory that block tables point into: one K and one V row per slot and layer."""

from __future__ import annotations

import os

import torch


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of the device; None where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


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
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

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

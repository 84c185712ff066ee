"""How the attention of one step is cut into the programs of a GPU kernel (triton_paged.py).

The host knows every length, so it writes the list of the work and the GPU finds nothing out: the kernel is started with
exactly as many programs as there are tiles, whatever mix of chunks and decodes the batch holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...batch import Batch
from ..transfer import to_device

MAX_ROWS = 64  # of a query tile: what Hopper's matrix unit wants. In float32, which it can't multiply, half as many
PROGRAMS_PER_SM = 4  # while one waits for memory, others compute
MIN_SPLIT_KEYS, MAX_SPLITS = 256, 64


@dataclass
class Plan:
    """The programs of one step; every layer uses the same.

    tiles         [num_tiles, 4] int64: a tile's first row in the batch, its number of tokens, the position of the
                  first of them, and where the block table of its sequence begins in block_tables
    block_tables  int64, the block tables of all sequences one after another
    block_m       rows of a tile: some tokens × the query heads that share a K/V head
    num_splits    parts that the keys of each tile are cut into
    """

    tiles: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    block_m: int
    num_tiles: int
    num_splits: int


class Cut(NamedTuple):
    """How a batch is cut, while it is still on the host; `tiles` as in Plan."""

    tiles: list[tuple[int, int, int, int]]
    block_m: int
    num_splits: int

    def plan(self, tiles: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> Plan:
        """The same with its numbers on the device."""
        return Plan(tiles, block_tables, block_size, self.block_m, len(self.tiles), self.num_splits)


def cut(batch: Batch, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> Cut:
    """Cut the attention of a batch for a model with these numbers of heads."""
    group = heads // kv_heads
    block_m = tile_height(max(end - start for start, end in itertools.pairwise(batch.query_start_loc)), group, dtype)
    tiles = make_tiles(batch, block_m // group)
    return Cut(tiles, block_m, choose_num_splits(len(tiles) * kv_heads, max(batch.context_lens), num_sms(device)))


def make_plan(batch: Batch, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan of a batch by itself, for tests and measurements. (In a step its numbers travel with all others.)"""
    work = cut(batch, heads, kv_heads, dtype, device)
    numbers = to_device({"tiles": flat(work.tiles), "block_tables": flat(batch.block_tables)}, device)
    return work.plan(**numbers, block_size=batch.block_size)


def flat(rows: Iterable[Iterable[int]]) -> list[int]:
    """The numbers of all rows, one row after another."""
    return list(itertools.chain.from_iterable(rows))


def tile_height(num_queries: int, group: int, dtype: torch.dtype) -> int:
    """Rows of a tile, when the longest chunk has num_queries tokens and `group` query heads share a K/V head."""
    max_rows = MAX_ROWS if dtype.itemsize == 2 else MAX_ROWS // 2
    return max(tile_size(group), min(tile_size(num_queries * group), max_rows))


def num_sms(device: torch.device) -> int:
    """The multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def make_tiles(batch: Batch, num_queries: int) -> list[tuple[int, int, int, int]]:
    """The batch in tiles of up to num_queries tokens, each of one sequence: the rows of `Plan.tiles`."""
    tiles, table_start = [], 0
    for s, table in enumerate(batch.block_tables):
        start, end = batch.query_start_loc[s : s + 2]
        for row in range(start, end, num_queries):
            position = batch.context_lens[s] - (end - row)  # a chunk ends where its context ends
            tiles.append((row, min(num_queries, end - row), position, table_start))
        table_start += len(table)
    return sorted(tiles, key=lambda tile: -(tile[1] + tile[2]))  # most keys first: no long one is left for the end


def choose_num_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Into how many parts to cut the keys: 1, 2, 4 … MAX_SPLITS (Flash-Decoding, Dao et al. 2023).

    The decode of one request makes one program a K/V head: 3, say, on a GPU with 132 multiprocessors (SMs), and each
    would go through 32,768 keys tile by tile. So the parts are doubled until there are programs enough for all SMs, or
    until a part would be shorter than MIN_SPLIT_KEYS: writing and joining the parts takes time too.
    """
    splits = 1
    while num_programs * splits < PROGRAMS_PER_SM * num_sms and 2 * splits * MIN_SPLIT_KEYS <= max_keys:
        splits *= 2
    return min(splits, MAX_SPLITS)


def tile_size(size: int) -> int:
    """The next power of two; at least 16, as tl.dot wants it on a GPU."""
    return max(16, 1 << (size - 1).bit_length())

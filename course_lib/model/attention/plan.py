"""How the attention of one step is cut into the programs of a GPU kernel (triton_paged.py).

The host knows every length, so it writes the list of the work and the GPU finds nothing out: the kernel is started with
exactly as many programs as there are tiles, whatever mix of chunks and decodes the batch holds.
"""

from __future__ import annotations

import itertools
from array import array

import torch

from ...batch import Batch

MAX_ROWS = 64  # of a query tile: what Hopper's matrix unit wants. In float32, which it can't multiply, half as many
PROGRAMS_PER_SM = 4  # while one waits for memory, others compute
MIN_SPLIT_KEYS, MAX_SPLITS = 256, 64


class Plan:
    """The programs of one step; made once, used by every layer with these numbers of heads.

    tiles         [num_tiles, 4] int32: a tile's first row in the batch, its number of tokens, the position of the
                  first of them, and where the block table of its sequence begins in block_tables
    block_tables  int32, the block tables of all sequences one after another
    block_m       rows of a tile: some tokens × the query heads that share a K/V head
    num_splits    parts that the keys of each tile are cut into
    """

    def __init__(self, batch: Batch, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        group = heads // kv_heads
        longest = max(end - start for start, end in itertools.pairwise(batch.query_start_loc))
        max_rows = MAX_ROWS if dtype.itemsize == 2 else MAX_ROWS // 2
        self.block_size = batch.block_size
        self.block_m = max(tile_size(group), min(tile_size(longest * group), max_rows))
        tiles = make_tiles(batch, self.block_m // group)
        self.num_tiles = len(tiles)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.num_splits = choose_num_splits(len(tiles) * kv_heads, max(batch.context_lens), num_sms)
        self.tiles = to_device(list(itertools.chain.from_iterable(tiles)), device)
        self.block_tables = to_device(list(itertools.chain.from_iterable(batch.block_tables)), device)


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


def to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """As int32. By way of an array, a third of torch.tensor's time; from pinned memory, so that the host needn't wait."""
    tensor = torch.frombuffer(array("i", numbers), dtype=torch.int32)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

"""Decode steps as CUDA graphs: a forward recorded once and started again with a single call.

A decode step of a small model is some hundred small kernels. Starting one takes the host a few microseconds, about as
long as the GPU takes to run it. A CUDA graph is the whole list of kernels with their arguments; replaying it costs one
start. The arguments are addresses, so every replay reads the same buffers:

    the batch, 3 rows                a graph of 4 rows
    token_ids   5  9  2      ->      5  9  2  0
    positions  40  7 12      ->     40  7 12  0
    slots      88 23 12      ->     88 23 12 -1      -1: the row's K/V is stored nowhere
    tiles      …             ->      …        0      a tile of 0 tokens: nothing is read, nothing is written

Each row of a forward depends on itself alone but for the attention, and there a row that only fills up has no part: the
other rows get what they would get without it.

A graph is recorded when it is first needed, for a number of rows and a number of splits (see attention/plan.py): these
two fix the grid of every kernel. A graph ends at the logits; sampling, with each request's own parameters, comes after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..batch import Batch
from ..slots import blocks_needed
from .attention import PagedAttention, attend_with_triton
from .attention.plan import Plan, choose_num_splits, flat, make_tiles, num_sms, tile_height
from .kv_cache import KVCache
from .transfer import pack, pinned, unpack

MAX_ROWS = 512  # of a graph, as in vLLM; larger batches take the plain way

Call = Callable[[], torch.Tensor]


def capture_on(device: torch.device) -> Callable[[Call], Call]:
    """A function that records on this GPU what a call starts, and returns a call that starts it again.

    What that one returns lies in the same memory each time. All graphs share one pool of memory for what they compute
    on the way, since no two of them run at once.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(call: Call) -> Call:
        # First without recording: kernels are compiled then, and workspaces made.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = call()
        torch.cuda.current_stream(device).wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return capture


def graph_rows(num_rows: int) -> int:
    """Rows of the graph that serves a batch of num_rows: 1, 2, 4, 8, 16, 24, 32, …"""
    return next((rows for rows in (1, 2, 4) if num_rows <= rows), -(-num_rows // 8) * 8)


class DecodeGraphs:
    """The graphs of one model over one KV cache.

    forward  (token_ids [T], positions [T], rows [R], PagedAttention) -> logits [R, vocab]
    capture  what capture_on(device) returns, or where there is no GPU: `lambda call: call`, which records nothing
    """

    def __init__(self, forward, kv_cache: KVCache, num_heads: int, max_model_len: int, capture) -> None:
        self.forward, self.capture, self.kv_cache = forward, capture, kv_cache
        self.num_heads, self.num_kv_heads, self.max_model_len = num_heads, kv_cache.k.shape[2], max_model_len
        self._num_sms = num_sms(kv_cache.k.device)
        self.graphs: dict[tuple[int, int], DecodeGraph] = {}  # (rows, splits) -> graph

    def serves(self, batch: Batch) -> bool:
        """Does every sequence of the batch compute one token, and is each of them sampled?"""
        return len(batch.sample_rows) == len(batch.token_ids) <= MAX_ROWS

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of such a batch, as forward() computes them. The next run overwrites them."""
        rows = graph_rows(len(batch.token_ids))
        splits = choose_num_splits(rows * self.num_kv_heads, max(batch.context_lens), self._num_sms)
        if (rows, splits) not in self.graphs:
            self.graphs[rows, splits] = DecodeGraph(self, rows, splits, batch)
        return self.graphs[rows, splits].run(batch)


class DecodeGraph:
    """One graph and the buffer that it reads; recorded with a first batch."""

    def __init__(self, owner: DecodeGraphs, rows: int, splits: int, batch: Batch) -> None:
        kv_cache = owner.kv_cache
        device, dtype = kv_cache.k.device, kv_cache.k.dtype
        most_blocks = min(kv_cache.num_blocks, blocks_needed(owner.max_model_len, kv_cache.block_size))  # of one sequence
        lengths = {"token_ids": rows, "positions": rows, "slot_mapping": rows, "tiles": 4 * rows}
        lengths["block_tables"] = rows * most_blocks  # the last one: what isn't used of it isn't copied either
        self.rows = rows
        self.buffer = torch.zeros(sum(lengths.values()) + len(lengths), dtype=torch.int64, device=device)
        numbers = unpack(self.buffer, lengths)
        all_rows = torch.arange(rows, device=device)
        block_m = tile_height(1, owner.num_heads // owner.num_kv_heads, dtype)
        plan = Plan(numbers["tiles"], numbers["block_tables"], kv_cache.block_size, block_m, rows, splits)
        paged = PagedAttention(kv_cache, attend_with_triton, numbers["slot_mapping"], owner.max_model_len, plan)
        self._fill(batch)
        self._replay = owner.capture(lambda: owner.forward(numbers["token_ids"], numbers["positions"], all_rows, paged))

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of up to `rows` decodes."""
        self._fill(batch)
        return self._replay()[: len(batch.token_ids)]

    def _fill(self, batch: Batch) -> None:
        """Copy a batch into the buffer, with rows that do nothing behind its own."""
        spare = self.rows - len(batch.token_ids)
        numbers = pack({
            "token_ids": batch.token_ids + [0] * spare,
            "positions": batch.positions + [0] * spare,
            "slot_mapping": batch.slot_mapping + [-1] * spare,
            "tiles": flat(make_tiles(batch, 1)) + [0] * 4 * spare,
            "block_tables": flat(batch.block_tables),
        })  # fmt: skip
        self.buffer[: len(numbers)].copy_(pinned(numbers, self.buffer.device), non_blocking=True)

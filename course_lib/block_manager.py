"""The pool of KV blocks: who holds which block, and which ones can be taken.

A block is in exactly one of three states:

    used     in the block table of one or more live sequences (its reference count)
    cached   held by nobody, its content can still be reused; counts as free
    free     held by nobody, nothing in it worth keeping

Blocks are allocated per chunk, just before it runs, so that after every step a sequence holds
exactly blocks_needed(cached_token_count) of them.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque

from .prefix_cache import Entry, PrefixCache
from .sequence import Sequence
from .slots import blocks_needed


class BlockManager:
    """Allocates, shares and frees the blocks 0 … num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size) if enable_prefix_caching else None
        self.ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # (block, sequence, +1 or -1) since last asked: for the memory map. "" stands for the prefix cache,
        # which keeps what is in a block that nobody holds.
        self._changes: list[tuple[int, str, int]] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody whose content can still be reused."""
        return len(self._cached)

    def capacity_left(self, sequence: Sequence) -> int:
        """Tokens that `sequence` could still add to the cache with its own and all free blocks."""
        return (len(sequence.block_table) + self.num_free) * self.block_size - sequence.cached_token_count

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the block table until it holds `num_tokens` tokens. All or nothing: False changes nothing."""
        need = blocks_needed(num_tokens, self.block_size) - len(sequence.block_table)
        if need > self.num_free:
            return False
        for _ in range(need):
            self._hold(self._take(), sequence)
        return True

    def match(self, sequence: Sequence) -> list[Entry]:
        """Cached blocks that hold the beginning of `sequence`, without taking them."""
        return self.prefix_cache.match(sequence) if self.prefix_cache else []

    def num_idle(self, entries: list[Entry]) -> int:
        """How many of the matched blocks nobody holds: adopting each of those costs a free block."""
        return sum(not self.ref_counts[entry.block] for entry in entries)

    def adopt(self, sequence: Sequence, entries: list[Entry]) -> None:
        """Put matched blocks at the head of the empty block table of `sequence`."""
        for entry in entries:
            if entry.block in self._cached:
                self._forget(entry.block)
            self._hold(entry.block, sequence)
        sequence.block_keys = list(entries)

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that `sequence` has filled reusable; called after the forward pass."""
        if self.prefix_cache:
            self.prefix_cache.register(sequence)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks that `sequence` doesn't need for `num_tokens` tokens, tail first.

        The tail goes first because a head can be reused by more requests than a tail: of the idle
        blocks, the one freed first is overwritten first.
        """
        keep = blocks_needed(num_tokens, self.block_size)
        while len(sequence.block_table) > keep:
            block = sequence.block_table.pop()
            self._changes.append((block, sequence.trace_name, -1))
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self.prefix_cache and block in self.prefix_cache:
                    self._cached[block] = None
                    self._changes.append((block, "", 1))
                else:
                    self._free.append(block)
        del sequence.block_keys[len(sequence.block_table) :]

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of `sequence`. A second call finds nothing to free."""
        self.truncate(sequence, 0)

    def drain_changes(self) -> list[tuple[int, str, int]]:
        """(block, sequence's name or "" for the prefix cache, +1 taken or -1 given back) since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def free_blocks(self) -> list[int]:
        """The blocks with nothing in them worth keeping, in the order in which they will be taken."""
        return list(self._free)

    def shuffle_free_blocks(self, seed: int) -> None:
        """Take free blocks in a random order from now on: shows code that counts on neighbours."""
        blocks = list(self._free)
        random.Random(seed).shuffle(blocks)
        self._free = deque(blocks)

    def _take(self) -> int:
        """A free block; when there is none, the cached one that was idle longest."""
        if self._free:
            return self._free.popleft()
        block = next(iter(self._cached))
        self._forget(block)
        for forgotten in self.prefix_cache.evict(block):
            if forgotten in self._cached:
                self._forget(forgotten)
                self._free.append(forgotten)
        return block

    def _forget(self, block: int) -> None:
        """Somebody takes this idle block, or what is in it can't be found any more."""
        del self._cached[block]
        self._changes.append((block, "", -1))

    def _hold(self, block: int, sequence: Sequence) -> None:
        self.ref_counts[block] += 1
        sequence.block_table.append(block)
        self._changes.append((block, sequence.trace_name, 1))

    def check(self, live: list[Sequence]) -> None:
        """Raise AssertionError unless the books are right, given all live sequences."""
        counts = [0] * self.num_blocks
        for sequence in live:
            held = sequence.block_table
            assert len(set(held)) == len(held), f"{sequence}: a block twice in one table"
            need = blocks_needed(sequence.cached_token_count, self.block_size)
            assert len(held) == need, f"{sequence}: holds {len(held)} blocks, needs {need}"
            for block in held:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the block tables"
        idle = list(self._free) + list(self._cached)
        assert len(set(idle)) == len(idle), "a block is listed as free twice"
        assert all(counts[block] == 0 for block in idle), "a block that is in use is listed as free"
        assert len(idle) + sum(count > 0 for count in counts) == self.num_blocks, "free + used != num_blocks"
        if self.prefix_cache:
            assert all(block in self.prefix_cache for block in self._cached), "a cached block lost its entry"
            assert not any(block in self.prefix_cache for block in self._free), "a free block still has an entry"

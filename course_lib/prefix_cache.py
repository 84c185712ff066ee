"""Prefix cache: which block already holds the K/V of this block of tokens, after this prefix?

K/V of a token depends on everything before it, so a block's identity is a chain: the block before
it, its own token ids, and (at the first block) the request's salt. The cache is a dictionary from
the hash of that to an `Entry`; on a hit the parts themselves are compared, so two prefixes that
happen to hash alike are never taken for one another.

Ideas from vLLM's automatic prefix caching (hash chain, one LRU order for idle blocks).
"""

from __future__ import annotations

from .sequence import Sequence


def hash_block(parent_hash: int, token_ids: tuple[int, ...], salt: str | None) -> int:
    """Hash of a full block behind a parent block. `salt` counts at the first block only."""
    return hash((parent_hash, token_ids, salt))


class Entry:
    """A full block whose K/V is in the pool: what it holds, behind which block, and where."""

    __slots__ = ("key", "parent", "token_ids", "salt", "block", "children")

    def __init__(self, key: int, parent: Entry | None, token_ids: tuple[int, ...], salt: str | None, block: int):
        self.key, self.parent, self.token_ids, self.salt, self.block = key, parent, token_ids, salt, block
        self.children: list[Entry] = []

    def holds(self, parent: Entry | None, token_ids: tuple[int, ...], salt: str | None) -> bool:
        """Is this exactly that block of tokens behind that prefix?"""
        return self.parent is parent and self.token_ids == token_ids and self.salt == salt


class PrefixCache:
    """Chained block hashes: match a sequence's prefix, register filled blocks, evict reused ones.

    Every registered entry's parent is registered too, so each is reachable from the first block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._by_key: dict[int, Entry] = {}
        self._by_block: dict[int, Entry] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, sequence: Sequence) -> list[Entry]:
        """Entries of the longest cached prefix: full blocks only, and never all known tokens.

        At least one token is left to compute, because its logits give the next token:
        at most floor((known - 1) / block_size) blocks.
        """
        entries: list[Entry] = []
        parent = None
        for index in range((sequence.known_token_count - 1) // self.block_size):
            key, tokens, salt = self._identity(sequence, index, parent)
            entry = self._by_key.get(key)
            if entry is None or not entry.holds(parent, tokens, salt):
                break
            entries.append(entry)
            parent = entry
        return entries

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that `sequence` has filled findable. Called after their forward pass.

        `sequence.block_keys` holds the entry of each full block (its own, or an older one with the
        same content). None ends the chain: behind a collision, or behind a block that was evicted
        meanwhile, nothing more is registered.
        """
        entries = sequence.block_keys
        for index in range(len(entries), sequence.cached_token_count // self.block_size):
            parent = entries[-1] if entries else None
            if index and (parent is None or self._by_block.get(parent.block) is not parent):
                entries.append(None)
                continue
            key, tokens, salt = self._identity(sequence, index, parent)
            entry = self._by_key.get(key)
            if entry is None:
                entry = Entry(key, parent, tokens, salt, sequence.block_table[index])
                self._by_key[key] = self._by_block[entry.block] = entry
                if parent is not None:
                    parent.children.append(entry)
            entries.append(entry if entry.holds(parent, tokens, salt) else None)

    def evict(self, block: int) -> list[int]:
        """Forget what `block` holds, because it is about to be overwritten, and all that continues it.

        Returns the blocks forgotten.
        """
        forgotten = []
        stack = [self._by_block[block]] if block in self._by_block else []
        if stack and stack[0].parent is not None:
            stack[0].parent.children.remove(stack[0])
        while stack:
            entry = stack.pop()
            del self._by_key[entry.key], self._by_block[entry.block]
            forgotten.append(entry.block)
            stack += entry.children
            entry.children = []  # no reference cycle with them: the entries are freed at once
        return forgotten

    def _identity(self, sequence: Sequence, index: int, parent: Entry | None):
        """Key, token ids and salt of the sequence's block number `index` behind `parent`."""
        tokens = tuple(sequence.token_ids(index * self.block_size, self.block_size))
        salt = sequence.cache_salt if index == 0 else None
        return hash_block(parent.key if parent else 0, tokens, salt), tokens, salt

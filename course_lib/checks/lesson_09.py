"""Checks of lesson 09: chained hashes, matching, shared blocks. And how those parts go into the engine."""

from __future__ import annotations

from ..block_manager import BlockManager
from ..prefix_cache import Entry, PrefixCache, hash_block
from ..slots import blocks_needed
from .exercise import Exercise, require, shown

A, B, C = [11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]  # three blocks of four tokens

# ---- 09.1 -----------------------------------------------------------------------------------------

chain = Exercise("09.1", "block_hashes", "A hash for each full block")


def hashes(block_hashes, token_ids, salt=None) -> list:
    got = block_hashes(list(token_ids), 4) if salt is None else block_hashes(list(token_ids), 4, salt)
    require(
        hasattr(got, "__len__"),
        "a list with one hash per full block",
        given=f"block_hashes({token_ids}, 4)",
        got=f"returned {shown(got)}",
    )
    return list(got)


@chain.test("one hash for each full block")
def _(block_hashes):
    for tokens, count in ((A + B, 2), (A + B + [31], 2), (A, 1), ([11, 12, 13], 0), ([], 0)):
        got = hashes(block_hashes, tokens)
        require(
            len(got) == count,
            f"{count} hashes: a block that isn't full has none",
            given=f"{len(tokens)} tokens, block_size=4",
            got=f"returned {len(got)} of them",
        )


@chain.test("the same tokens, the same hashes")
def _(block_hashes):
    given = "block_hashes(tokens, 4), twice"
    require(hashes(block_hashes, A + B) == hashes(block_hashes, A + B), "equal both times", given=given)
    short, long = hashes(block_hashes, A + B), hashes(block_hashes, A + B + C)
    require(
        short == long[:2],
        "a longer prompt begins with the hashes of its beginning",
        given="8 tokens, and 12 that begin with them",
    )
    require(
        hashes(block_hashes, A) == hashes(block_hashes, tuple(A)),
        "a tuple of tokens is as good as a list",
        given="a list, a tuple",
    )


@chain.test("other tokens, another hash")
def _(block_hashes):
    for other in (B, [11, 12, 13, 99], [12, 11, 13, 14]):
        require(
            hashes(block_hashes, A) != hashes(block_hashes, other),
            "different hashes",
            given=f"tokens {A} and tokens {other}",
        )


@chain.test("the same block behind another one is another block", concept="X2")
def _(block_hashes):
    first, second = hashes(block_hashes, A + C), hashes(block_hashes, B + C)
    require(
        first[1] != second[1],
        "different hashes for the second block: its K/V differs",
        given=f"{A + C} and {B + C}",
        got="the second hashes are equal",
    )
    twice = hashes(block_hashes, A + A)
    require(
        twice[0] != twice[1],
        "different hashes for the first and the second block",
        given=f"{A + A}",
        got="the two hashes are equal",
    )


@chain.test("all that came before counts, not only the block before", concept="X2")
def _(block_hashes):
    first, second = hashes(block_hashes, A + B + C), hashes(block_hashes, C + B + C)
    require(
        first[2] != second[2],
        "different hashes for the third block: the first ones differ",
        given=f"{A + B + C} and {C + B + C}",
        got="the third hashes are equal",
    )


@chain.test("the order of what came before counts", concept="X2")
def _(block_hashes):
    first, second = hashes(block_hashes, A + B + C), hashes(block_hashes, B + A + C)
    require(
        first[2] != second[2],
        "different hashes for the third block",
        given=f"{A + B + C} and {B + A + C}",
        got="the third hashes are equal",
    )
    require(
        first[1] != second[1],
        "different hashes for the second block",
        given=f"{A + B} and {B + A}",
        got="the second hashes are equal",
    )


@chain.test("a salt has no hash of its own")
def _(block_hashes):
    got = hashes(block_hashes, A + B, "Ana")
    require(len(got) == 2, "2 hashes, one for each full block", given="8 tokens, block_size=4, salt='Ana'", got=f"returned {len(got)} of them")


@chain.test("another salt, other hashes", concept="X2")
def _(block_hashes):
    plain, salted = hashes(block_hashes, A + B), hashes(block_hashes, A + B, "Ana")
    require(
        plain[0] != salted[0],
        "the salt belongs to what came before the first block",
        given="no salt, and salt='Ana'",
        got="the first hashes are equal",
    )
    require(
        plain[1] != salted[1],
        "what is behind the first block is behind the salt",
        given="no salt, and salt='Ana'",
        got="the second hashes are equal",
    )
    require(salted != hashes(block_hashes, A + B, "Ben"), "another salt, other hashes", given="salt='Ana' and salt='Ben'")
    require(salted == hashes(block_hashes, A + B, "Ana"), "the same salt, the same hashes", given="salt='Ana', twice")


# ---- 09.2 -----------------------------------------------------------------------------------------

matching = Exercise("09.2", "match_prefix", "What can be reused")


def cached(*blocks: list[int]) -> list[Entry]:
    """Entries of a cached prefix, in blocks 70, 71, 72 … of the pool."""
    entries: list[Entry] = []
    for number, tokens in enumerate(blocks):
        entries.append(Entry(number, entries[-1] if entries else None, tuple(tokens), None, 70 + number))
    return entries


class Lookup:
    """A cache of these entries. collides: what is given for any block that isn't there, as if it had the same hash."""

    def __init__(self, *prefixes: list[Entry], collides: Entry | None = None) -> None:
        self.entries, self.collides = [entry for prefix in prefixes for entry in prefix], collides

    def __call__(self, parent, token_ids):
        if not isinstance(token_ids, tuple):
            raise TypeError(f"lookup(parent, tokens): tokens must be a tuple, not {shown(token_ids)}")
        for entry in self.entries:
            if entry.parent is parent and entry.token_ids == token_ids:
                return entry
        return self.collides

    def __repr__(self) -> str:
        return f"lookup in a cache of {len(self.entries)} blocks" + (
            ", one with a hash that others have too" if self.collides else ""
        )


def expect_match(match_prefix, token_ids, lookup, blocks, start, saying: str, concept: str | None = None) -> None:
    got = match_prefix(list(token_ids), lookup, 4)
    given = f"match_prefix({token_ids}, {lookup!r}, block_size=4)"
    require(
        hasattr(got, "__len__") and len(got) == 2,
        "two things: the blocks, and the positions left to compute",
        given=given,
        got=f"returned {shown(got)}",
    )
    got_blocks, positions = list(got[0]), list(got[1])
    require(
        [int(block) for block in got_blocks] == blocks,
        saying,
        given=given,
        got=f"returned the blocks {shown(got_blocks)}",
        concept=concept,
    )
    say = (
        f"the tokens that are left have the positions that they have in the whole prompt: {len(token_ids) - start} of them"
    )
    require(
        [int(p) for p in positions] == list(range(start, len(token_ids))),
        say,
        given=given,
        got=f"returned the positions {shown(positions)}",
        concept="P5",
    )


@matching.test("an empty cache")
def _(match_prefix):
    expect_match(match_prefix, [*A, 1], Lookup(), [], 0, "nothing is cached, nothing is reused")


@matching.test("a cached beginning")
def _(match_prefix):
    expect_match(
        match_prefix, [*A, *B, 1], Lookup(cached(A, B)), [70, 71], 8, "the two blocks that hold the first 8 tokens"
    )


@matching.test("full blocks only")
def _(match_prefix):
    expect_match(
        match_prefix, [*A, 21, 22, 23], Lookup(cached(A, B)), [70], 4, "one block: the second is not filled by this prompt"
    )
    expect_match(match_prefix, [11, 12, 13], Lookup(cached(A, B)), [], 0, "no block is filled by three tokens")


@matching.test("positions go on behind the hit", concept="P5")
def _(match_prefix):
    expect_match(match_prefix, [*A, 1, 2, 3], Lookup(cached(A)), [70], 4, "the block that holds the first four tokens")


@matching.test("something is left to compute", concept="X1")
def _(match_prefix):
    expect_match(match_prefix, [*A, *B], Lookup(cached(A, B)), [70], 4, "not the whole prompt, though all of it is cached")
    expect_match(match_prefix, A, Lookup(cached(A, B)), [], 0, "not the whole prompt, though all of it is cached")
    expect_match(match_prefix, [*A, *B, 31], Lookup(cached(A, B)), [70, 71], 8, "one token is left: that's enough")


@matching.test("it ends at the first miss", concept="X2")
def _(match_prefix):
    expect_match(
        match_prefix, [*A, *C, *B, 1], Lookup(cached(A, B)), [70], 4, "what comes behind a miss isn't what comes behind the hit"
    )
    other = cached(B)
    other.append(Entry(9, None, tuple(C), None, 90))  # C as the first block of a prompt
    expect_match(
        match_prefix, [*A, *B, *C, 1], Lookup(cached(A), other), [70], 4, "what comes behind a miss has another past"
    )


@matching.test("two blocks with one hash: the tokens are compared", concept="X6")
def _(match_prefix):
    prefix = cached(A, B)
    expect_match(
        match_prefix,
        [*C, 1],
        Lookup(prefix, collides=prefix[0]),
        [],
        0,
        "the cache gives an entry with other tokens: it's no hit",
    )
    expect_match(
        match_prefix,
        [*A, *C, 1],
        Lookup(prefix, collides=prefix[1]),
        [70],
        4,
        "the cache gives an entry with other tokens: it's no hit",
    )


@matching.test("two blocks with one hash: what came before is compared", concept="X6")
def _(match_prefix):
    prefix = cached(A, B)
    expect_match(
        match_prefix,
        [*B, 1],
        Lookup(prefix, collides=prefix[1]),
        [],
        0,
        "those tokens are cached, but behind another block: it's no hit",
    )
    other = cached(C)
    expect_match(
        match_prefix,
        [*C, *B, 1],
        Lookup(prefix, other, collides=prefix[1]),
        [70],
        4,
        "those tokens are cached, but behind another block: it's no hit",
    )
    long, other = cached(A, B, C), cached(C, B)
    expect_match(
        match_prefix,
        [*C, *B, *C, 1],
        Lookup(long, other, collides=long[2]),
        [70, 71],
        8,
        "the block before has the same tokens, but isn't the same: there's another one before it",
    )


# ---- 09.3 -----------------------------------------------------------------------------------------

sharing = Exercise("09.3", "SharedBlocks", "Blocks with several holders")


def filled(shared_blocks: type, num_blocks: int, *keys: str):
    """A pool in which one request took and filled a block for each key; the pool, and the request's blocks."""
    pool = shared_blocks(num_blocks)
    table = [pool.take(key) for key in keys]
    for block in table:
        pool.filled(block)
    return pool, table


@sharing.test("each block is taken once")
def _(shared_blocks):
    pool = shared_blocks(3)
    got = [pool.take("k1"), pool.take("k2"), pool.take(None)]
    require(
        sorted(got) == [0, 1, 2],
        "three different blocks of the three",
        given="take, three times, from 3 blocks",
        got=f"took {shown(got)}",
    )
    got = pool.take("k4")
    require(got is None, "None: all are held", given="take, four times, from 3 blocks", got=f"the fourth is {shown(got)}")


@sharing.test("a block that was given back can be taken again")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 1, "k1")
    pool.give_back(table)
    got = pool.take("k2")
    require(got == 0, "the block", given="1 block: take, filled, give_back, take", got=f"took {shown(got)}")


@sharing.test("found once it's filled", concept="X5")
def _(shared_blocks):
    pool = shared_blocks(2)
    block = pool.take("k1")
    got = pool.find("k1")
    require(got is None, "None: nothing has been computed yet", given="take('k1'), find('k1')", got=f"found {shown(got)}")
    pool.filled(block)
    got = pool.find("k1")
    require(
        got == block,
        "the block, now that it's filled",
        given="take('k1'), filled(block), find('k1')",
        got=f"found {shown(got)}",
    )
    got = pool.find("k2")
    require(got is None, "None: no such block", given="take('k1'), filled(block), find('k2')", got=f"found {shown(got)}")


@sharing.test("found while nobody holds it, and not after somebody overwrote it", concept="X5")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 1, "k1")
    pool.give_back(table)
    require(
        pool.find("k1") == table[0],
        "the block: what is in it is still true",
        given="1 block: take('k1'), filled, give_back, find('k1')",
        got=f"found {shown(pool.find('k1'))}",
    )
    pool.take("k2")
    got = pool.find("k1")
    require(
        got is None,
        "None: the block is going to hold something else",
        given="1 block: take('k1'), filled, give_back, take('k2'), find('k1')",
        got=f"found {shown(got)}",
    )


@sharing.test("a block without a key is never found", concept="X5")
def _(shared_blocks):
    pool, _table = filled(shared_blocks, 2, None)
    got = pool.find(None)
    require(
        got is None,
        "None: nobody knew what was going to be in it",
        given="take(None), filled, find(None)",
        got=f"found {shown(got)}",
    )


@sharing.test("a block that was found, then taken without a key", concept="X5")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 1, "k1")
    pool.give_back(table)
    block = pool.take(None)
    given = "1 block: take('k1'), filled, give_back, take(None)"
    got = pool.find("k1")
    require(got is None, "None: it's going to hold something else", given=f"{given}, find('k1')", got=f"found {shown(got)}")
    pool.filled(block)
    got = pool.find("k1")
    require(got is None, "None: it holds something else", given=f"{given}, filled, find('k1')", got=f"found {shown(got)}")


@sharing.test("two holders, one of them leaves", concept="X4")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 1, "k1")
    pool.share(table[0])
    pool.give_back(table)
    got = pool.take("k2")
    require(
        got is None,
        "None: the second holder still reads it",
        given="1 block: take, filled, share, give_back by the first holder, take",
        got=f"took {shown(got)}",
    )
    pool.give_back(table)
    got = pool.take("k2")
    require(
        got == table[0],
        "the block: both have given it back",
        given="the same, and give_back by the second holder",
        got=f"took {shown(got)}",
    )


@sharing.test("a hit on a block that nobody holds", concept="X4")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 1, "k1")
    pool.give_back(table)
    pool.share(table[0])
    got = pool.take("k2")
    require(
        got is None,
        "None: it's held again",
        given="1 block: take, filled, give_back, share, take",
        got=f"took {shown(got)}",
    )


@sharing.test("two requests that computed the same block at the same time", concept="X5")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 2, "k1", "k1")
    pool.give_back([table[0]])
    pool.give_back([table[1]])
    first = pool.take("k2")
    got = pool.find("k1")
    require(
        got in (None, table[1 - table.index(first)]),
        "the other block or none, never the one that was taken",
        given="2 blocks: take('k1') twice, filled both, give_back both, take('k2'), find('k1')",
        got=f"found {shown(got)}",
    )
    pool.take("k3")
    got = pool.find("k1")
    require(got is None, "None: both were overwritten", given="the same, take('k3'), find('k1')", got=f"found {shown(got)}")


@sharing.cost("of one request's blocks the tail goes first", concept="X10")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 3, "k1", "k2", "k3")
    pool.give_back(table)
    pool.take("new")
    kept = [key for key in ("k1", "k2", "k3") if pool.find(key) is not None]
    require(
        kept == ["k1", "k2"],
        "k3 is lost: without k1 nobody could use it anyway",
        given="3 blocks k1, k2, k3 of one prompt, given back; one is taken",
        got=f"still found: {', '.join(kept)}",
    )


@sharing.cost("what another block holds is still found", concept="X10")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 2, "k1", "k1")
    kept = pool.find("k1")
    pool.give_back([block for block in table if block != kept])
    pool.take("k2")
    got = pool.find("k1")
    require(
        got == kept,
        f"block {kept}: only the other one is overwritten",
        given="2 blocks: take('k1') twice, filled both, give_back the one that find('k1') doesn't give, take('k2'), find('k1')",
        got=f"found {shown(got)}",
    )


@sharing.cost("the one that was idle longest goes first", concept="X10")
def _(shared_blocks):
    pool, table = filled(shared_blocks, 2, "k1", "k2")
    pool.give_back([table[0]])
    pool.give_back([table[1]])
    pool.share(table[0])
    pool.give_back([table[0]])
    pool.take("new")
    kept = [key for key in ("k1", "k2") if pool.find(key) is not None]
    require(
        kept == ["k1"],
        "k2 is lost: k1 was used after it",
        given="2 blocks given back, k1 then k2; k1 is hit and given back; one is taken",
        got=f"still found: {', '.join(kept)}",
    )


# ---- the parts in the engine ----------------------------------------------------------------------


def engine_with(*, block_hashes=None, match_prefix=None, shared_blocks=None) -> type:
    """A class for `Engine(..., block_manager=...)` in which the given parts of a prefix cache are the learner's."""
    if shared_blocks is not None:
        return type("OnSharedBlocks", (_OnSharedBlocks,), {"shared_blocks": shared_blocks})

    class WithParts(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
            super().__init__(num_blocks, block_size, True)
            self.prefix_cache = _Cache(block_size, block_hashes, match_prefix)

    return WithParts


class _Cache(PrefixCache):
    """The engine's cache, with the learner's hashes or the learner's match."""

    def __init__(self, block_size: int, block_hashes, match_prefix) -> None:
        super().__init__(block_size)
        self.block_hashes, self.match_prefix = block_hashes, match_prefix

    def _identity(self, sequence, index, parent):
        key, tokens, salt = super()._identity(sequence, index, parent)
        if self.block_hashes is not None:
            known = sequence.token_ids(0, (index + 1) * self.block_size)
            key = list(self.block_hashes(known, self.block_size, sequence.cache_salt))[index]
        return key, tokens, salt

    def match(self, sequence):
        if self.match_prefix is None:
            return super().match(sequence)

        def lookup(parent, token_ids):
            salt = sequence.cache_salt if parent is None else None
            entry = self._by_key.get(hash_block(parent.key if parent else 0, tuple(token_ids), salt))
            return entry if entry is not None and entry.salt == salt else None

        known = sequence.token_ids(0, sequence.known_token_count)
        blocks, _positions = self.match_prefix(known, lookup, self.block_size)
        return [self._by_block[int(block)] for block in blocks]


class _OnSharedBlocks(BlockManager):
    """The engine's block manager, on a learner's `SharedBlocks`: which block is taken and which is found is theirs."""

    shared_blocks: type

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, True)
        self.pool = self.shared_blocks(num_blocks)
        self._keys: dict[int, int | None] = {}  # what each block was taken for
        self._kept: set[int] = set()  # held by nobody and found, when last asked

    @property
    def num_free(self) -> int:
        return self.ref_counts.count(0)

    @property
    def num_cached(self) -> int:
        return len(self._idle_and_found())

    def _idle_and_found(self) -> set[int]:
        return {
            block
            for block, key in self._keys.items()
            if not self.ref_counts[block] and key is not None and self.pool.find(key) == block
        }

    def _key(self, sequence, index: int):
        """The chained hash of a block of known tokens; None if it will hold tokens that nobody knows yet."""
        key = 0
        if (index + 1) * self.block_size > sequence.known_token_count:
            return None
        for number in range(index + 1):
            tokens = tuple(sequence.token_ids(number * self.block_size, self.block_size))
            key = hash_block(key, tokens, sequence.cache_salt if number == 0 else None)
        return key

    def allocate(self, sequence, num_tokens: int) -> bool:
        need = blocks_needed(num_tokens, self.block_size) - len(sequence.block_table)
        if need > self.num_free:
            return False
        for _ in range(need):
            key = self._key(sequence, len(sequence.block_table))
            block = self.pool.take(key)
            if block is None or self.ref_counts[block]:
                raise RuntimeError(f"take() gave block {block}, which is held: {self.num_free} others are free")
            self._keys[block] = key
            self._hold(block, sequence)
        return True

    def match(self, sequence):
        entries = []
        for index in range((sequence.known_token_count - 1) // self.block_size):
            key = self._key(sequence, index)
            block = self.pool.find(key)
            if block is None:
                break
            entries.append(Entry(key, None, (), None, block))
        return entries

    def adopt(self, sequence, entries) -> None:
        for entry in entries:
            self.pool.share(entry.block)
            self._hold(entry.block, sequence)
        sequence.block_keys = list(entries)

    def register(self, sequence) -> None:
        for index in range(len(sequence.block_keys), sequence.cached_token_count // self.block_size):
            self.pool.filled(sequence.block_table[index])
            sequence.block_keys.append(None)

    def truncate(self, sequence, num_tokens: int) -> None:
        keep = blocks_needed(num_tokens, self.block_size)
        blocks = sequence.block_table[keep:]
        del sequence.block_table[keep:], sequence.block_keys[keep:]
        if blocks:
            self.pool.give_back(blocks)
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            self._changes.append((block, sequence.trace_name, -1))

    def drain_changes(self):
        kept = self._idle_and_found()
        self._changes += [(block, "", -1) for block in sorted(self._kept - kept)] + [
            (block, "", 1) for block in sorted(kept - self._kept)
        ]
        self._kept = kept
        return super().drain_changes()

    def check(self, live) -> None:
        counts = [0] * self.num_blocks
        for sequence in live:
            need = blocks_needed(sequence.cached_token_count, self.block_size)
            assert len(sequence.block_table) == need, f"{sequence}: needs {need} blocks"
            for block in sequence.block_table:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the block tables"

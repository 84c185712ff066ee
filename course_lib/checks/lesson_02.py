"""Checks of lesson 02: the new blocks of a chunk, a block manager, who is let in."""

from __future__ import annotations

import random
from collections import deque

from ..block_manager import BlockManager
from ..sequence import Sequence
from .exercise import Exercise, Wrong, expect, plain, require

new_blocks = Exercise("02.1", "new_blocks_needed", "How many new blocks a chunk needs")
manager = Exercise("02.2", "MyBlockManager", "Hand out blocks, share them, take them back")
admission = Exercise("02.3", "can_admit", "Who is let in")


# ---- 02.1: the right numbers are counted by hand, token by token


def new_by_counting(cached_tokens: int, new_tokens: int, block_size: int) -> int:
    """Fill blocks one token at a time, and count the blocks that had to be opened for the new ones."""
    opened = 0
    for position in range(cached_tokens + new_tokens):
        opened += position >= cached_tokens and position % block_size == 0
    return opened


def needs(function, saying: str, cached_tokens: int, new_tokens: int, block_size: int, concept: str | None = None) -> None:
    held_blocks = new_by_counting(0, cached_tokens, block_size)
    expect(function, cached_tokens=cached_tokens, new_tokens=new_tokens, held_blocks=held_blocks, block_size=block_size,
           gives=new_by_counting(cached_tokens, new_tokens, block_size), saying=saying, concept=concept)  # fmt: skip


def needs_rounded_up(function, saying: str, new_tokens: int) -> None:
    """The first chunk of a request, in blocks of 4. A wrong count is either rounded down (B2) or takes room for free that isn't held (B1)."""
    try:
        needs(function, saying, 0, new_tokens, 4)
    except Wrong as wrong:
        if plain(function(cached_tokens=0, new_tokens=8, held_blocks=0, block_size=4)) == 2:
            wrong.concept = "B2"
        else:
            wrong.concept = "B1"
            wrong.saying += "; how many slots are free when it holds no block yet, or when its last one is full?"
        raise


@new_blocks.test("a chunk smaller than a block", concept="B2")
def _(new_blocks_needed):
    needs_rounded_up(new_blocks_needed, "three tokens need a place, though they don't fill it", 3)


@new_blocks.test("a chunk of several blocks, the last one not full", concept="B2")
def _(new_blocks_needed):
    needs_rounded_up(new_blocks_needed, "every token has a place, the last ones too", 10)


@new_blocks.test("a chunk that fits into the last block", concept="B1")
def _(new_blocks_needed):
    needs(new_blocks_needed, "it goes into the slots that are still free, and into new blocks only when those are used up", 1, 2, 4)


@new_blocks.test("a chunk that begins in the middle of a block", concept="B1")
def _(new_blocks_needed):
    needs(new_blocks_needed, "the request holds as many blocks as all its tokens fill, not a block more for every border of a chunk", 10, 5, 4)


@new_blocks.test("a decode whose token opens a block", concept="B5")
def _(new_blocks_needed):
    needs(new_blocks_needed, "the last block is full; the token of this step needs a place in this step", 4, 1, 4)


@new_blocks.test("a decode whose token still has room", concept="B5")
def _(new_blocks_needed):
    needs(new_blocks_needed, "a token for which the last block has a slot needs no new one", 5, 1, 4)


@new_blocks.test("a prompt of 350 in chunks of 100, blocks of 16", concept="B1")
def _(new_blocks_needed):
    for start in (0, 100, 200, 300):
        needs(new_blocks_needed, "after each chunk it holds as many blocks as its tokens fill", start, min(100, 350 - start), 16)


@new_blocks.test("blocks that it holds already")
def _(new_blocks_needed):
    expect(new_blocks_needed, cached_tokens=0, new_tokens=10, held_blocks=7, block_size=4, gives=0,
           saying="a request that was given more than it needs by now asks for none (and not for fewer than none)")  # fmt: skip


@new_blocks.cost("a chunk that fills its last block exactly", concept="B3")
def _(new_blocks_needed):
    for new_tokens in (4, 8, 12):
        needs(new_blocks_needed, "no block for a token that isn't there yet", 0, new_tokens, 4)
    for start in (0, 256, 512, 768):
        needs(new_blocks_needed, "a prompt of 1,000 in chunks of 256 takes no more than it fills", start, min(256, 1000 - start), 16)


@new_blocks.cost("a decode that fills its last block", concept="B5")
def _(new_blocks_needed):
    needs(new_blocks_needed, "the next token isn't there yet, and may never come", 15, 1, 16)


# ---- 02.2


class Books:
    """A learner's manager with some sequences: what happens to it, in words, and what must be true of it."""

    def __init__(self, manager_class: type, num_blocks: int, block_size: int = 4) -> None:
        self.manager = manager_class(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sequences: dict[str, Sequence] = {}
        self.story = [f"{num_blocks} blocks of {block_size} tokens"]

    def __getitem__(self, name: str) -> Sequence:
        return self.sequences.setdefault(name, Sequence(name, [1]))

    def table(self, name: str) -> list[int]:
        return [int(block) for block in self[name].block_table]

    def allocate(self, name: str, num_tokens: int) -> bool:
        self.story.append(f"{name} gets room for {num_tokens} tokens")
        got = self.manager.allocate(self[name], num_tokens)
        require(got is not None, "allocate says True or False", given=self.given, got=got)
        return bool(got)

    def share(self, name: str, blocks: list[int]) -> None:
        self.story.append(f"{name} shares blocks {blocks}")
        self.manager.share(self[name], list(blocks))

    def free(self, name: str) -> None:
        self.story.append(f"{name} gives back all")
        self.manager.free(self[name])

    @property
    def given(self) -> str:
        return "; ".join(self.story)

    def held(self) -> dict[int, list[str]]:
        """Block -> who has it in its table."""
        holders: dict[int, list[str]] = {}
        for name in self.sequences:
            for block in self.table(name):
                holders.setdefault(block, []).append(name)
        return holders

    def expect_free(self, count: int, saying: str, concept: str | None = None) -> None:
        got = int(self.manager.num_free)
        require(got == count, saying, given=self.given, got=f"num_free is {got}", concept=concept)

    def expect_blocks(self, name: str, count: int, saying: str, concept: str | None = None) -> None:
        table = self.table(name)
        in_pool = all(0 <= block < self.num_blocks for block in table)
        require(len(table) == count and in_pool and len(set(table)) == count, saying, given=self.given,
                got=f"{name}'s block table is {table}", concept=concept)  # fmt: skip

    def expect_one_owner(self, allowed: set[int] = frozenset(), concept: str | None = None) -> None:
        """No block in two tables, but for those that were shared on purpose."""
        for block, names in self.held().items():
            require(len(names) == 1 or block in allowed, "a block is handed out to one request at a time", given=self.given,
                    got=f"block {block} is in the tables of {' and '.join(names)}", concept=concept)  # fmt: skip


@manager.test("room for a few tokens")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=4)
    books.expect_free(4, "in the beginning all blocks are free")
    require(books.allocate("Ana", 3), "there is room: True", given=books.given, got=False)
    books.expect_blocks("Ana", 1, "three tokens get a block of four")
    books.expect_free(3, "the block is no longer free")


@manager.test("a table that grows", concept="B1")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=8)
    for tokens, blocks in ((3, 1), (4, 1), (6, 2), (15, 4)):
        before = books.table("Ana")
        books.allocate("Ana", tokens)
        books.expect_blocks("Ana", blocks, "as many blocks as all tokens of the request fill: num_tokens counts the cached ones too")
        require(books.table("Ana")[: len(before)] == before, "what it had before stays where it was: there are keys and values in it",
                given=books.given, got=f"from {before} to {books.table('Ana')}")  # fmt: skip


@manager.test("two requests")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=6)
    for name, tokens in (("Ana", 5), ("Ben", 9), ("Ana", 9)):
        books.allocate(name, tokens)
    books.expect_one_owner()
    books.expect_free(0, "six blocks, three for each: none is left")


@manager.test("more than there is", concept="B12")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=3)
    books.allocate("Ana", 4)
    require(not books.allocate("Ben", 12), "three blocks are needed and two are free: False", given=books.given, got=True)
    books.expect_blocks("Ben", 0, "a refusal changes nothing, also not a table")
    books.expect_free(2, "a refusal changes nothing, also not what is free")
    require(books.allocate("Ben", 8), "two blocks are needed and two are free: True", given=books.given, got=False)


@manager.test("a request that comes back after it gave back its blocks", concept="B9")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=4)
    books.allocate("Ana", 8)
    books.free("Ana")
    books.expect_blocks("Ana", 0, "whoever has given back its blocks has none in its table")
    twice = "B8" if books.manager.num_free > 4 else None
    books.expect_free(4, "what was given back can be handed out again, once", concept=twice)
    books.allocate("Ben", 8)
    books.allocate("Ana", 8)
    books.expect_blocks("Ana", 2, "it begins anew")
    books.expect_one_owner()


@manager.test("a shared block, and one of its owners leaves", concept="B6")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=4)
    books.allocate("Ana", 8)
    shared = books.table("Ana")[:1]
    books.share("Ben", shared)
    require(books.table("Ben") == shared, "a shared block is in both tables", given=books.given, got=f"Ben's block table is {books.table('Ben')}")
    books.allocate("Ben", 6)
    books.expect_blocks("Ben", 2, "one block shared, one of its own")
    books.free("Ana")
    books.expect_free(2, "of 4 blocks Ben still has two, so two are free")
    books.allocate("Chen", 8)
    books.expect_one_owner()
    books.free("Ben")
    books.expect_free(2, "when the last owner leaves, the shared block is free as well")


@manager.test("who shares has a table of its own", concept="B6")
def _(MyBlockManager):
    for grows, stays in (("Ana", "Ben"), ("Ben", "Ana")):
        books = Books(MyBlockManager, num_blocks=6)
        books.allocate("Ana", 8)
        before = books.table("Ana")
        books.story.append("Ben shares all of Ana's blocks: share(Ben, Ana.block_table)")
        books.manager.share(books["Ben"], books["Ana"].block_table)
        books.allocate(grows, 12)
        require(books.table(stays) == before, f"a block for {grows} comes into {grows}'s table and into no other", given=books.given,
                got=f"{stays}'s block table grew, too: from {before} to {books.table(stays)}")  # fmt: skip


@manager.test("the same blocks given back a second time", concept="B8")
def _(MyBlockManager):
    books = Books(MyBlockManager, num_blocks=4)
    books.allocate("Ana", 8)
    copy = list(books["Ana"].block_table)
    books.free("Ana")
    books.free("Ana")
    books.expect_free(4, "four blocks, each of them free once")
    books["Ana"].block_table = copy
    books.story.append("somebody kept a copy of Ana's table, and it is given back again")
    try:
        books.manager.free(books["Ana"])
    except ValueError:
        pass  # the clearest answer
    books["Ana"].block_table = []
    books.expect_free(4, "four blocks, each of them free once")
    books.allocate("Ben", 8)
    books.allocate("Chen", 8)
    books.expect_one_owner()
    books.free("Ben")
    books.free("Chen")
    books.expect_free(4, "afterwards everything goes on as if the second time had not been")


@manager.test("a table with a block that nobody holds", concept="B8")
def _(MyBlockManager):
    for is_last in (True, False):
        books = Books(MyBlockManager, num_blocks=4)
        books.allocate("Ana", 4)
        [held] = books.table("Ana")
        books.share("Ben", [held])
        other = (held + 1) % 4
        table = [held, other] if is_last else [other, held]
        books["Ana"].block_table = list(table)
        books.story += [f"by some mistake, Ana's table is {table}, though nobody holds block {other}", "Ana gives back all"]
        try:
            books.manager.free(books["Ana"])
        except ValueError:
            pass
        else:
            raise Wrong("free raises ValueError, because a block in the table is held by nobody", given=books.given, got="no error")
        nothing = "free raised ValueError, so nothing has changed"
        require(books.table("Ana") == table, nothing + ": not the table", given=books.given, got=f"Ana's block table is {books.table('Ana')}")
        books.expect_free(3, nothing + ": not what is free")
        books["Ana"].block_table = [held]
        books.story.append(f"Ana's table is mended to [{held}]")
        books.free("Ben")
        books.expect_free(3, nothing + f": block {held} still counted two owners, and Ana is left")
        books.free("Ana")
        books.expect_free(4, "now its last owner has left")


@manager.test("a long day")
def _(MyBlockManager):
    books, rng = Books(MyBlockManager, num_blocks=12), random.Random(2)
    length: dict[str, int] = {}
    for _ in range(300):
        name = f"r{rng.randrange(6)}"
        if rng.random() < 0.3:
            books.free(name)
            length.pop(name, None)
        elif name not in length and length and rng.random() < 0.5:
            other = rng.choice(sorted(length))
            full = books.table(other)[: length[other] // 4]
            books.share(name, full)
            length[name] = 4 * len(full)
        else:
            more = length.get(name, 0) + rng.randint(1, 9)
            room = len(books.table(name)) + books.num_blocks - len(books.held())
            if books.allocate(name, more) != (-(-more // 4) <= room):
                raise Wrong("it says True exactly when there is room", given=books.story[-1], got=f"{room} blocks could be had")
            if -(-more // 4) <= room:
                length[name] = more
        books.story = books.story[:1] + books.story[-3:]
        books.expect_free(books.num_blocks - len(books.held()), "a block that nobody holds is free, and no other")


# ---- 02.3


def admit(function, saying: str, gives: bool, concept: str | None = None, **situation) -> None:
    situation = {"prompt_tokens": 0, "max_tokens": 1, "chunk_size": 256, "block_size": 4, "num_free": 0, "reserve": 0} | situation
    got = function(**situation)
    given = f"{getattr(function, '__name__', 'can_admit')}({', '.join(f'{key}={value}' for key, value in situation.items())})"
    require(bool(got) == gives, saying, given=given, got=got, concept=concept)


@admission.test("an empty pool and a short prompt")
def _(can_admit):
    admit(can_admit, "there is room for all of it: let it in", True, prompt_tokens=6, max_tokens=2, num_free=100)


@admission.test("some blocks are free, but too few", concept="B12")
def _(can_admit):
    admit(can_admit, "its first step would find no place for most of its tokens", False, prompt_tokens=14, num_free=1)


@admission.test("the last tokens need a block too", concept="B2")
def _(can_admit):
    admit(can_admit, "nine tokens don't fit in two blocks of four", False, prompt_tokens=9, num_free=2)


@admission.test("those who run keep a reserve", concept="C9")
def _(can_admit):
    admit(can_admit, "after it is let in, the reserve must still be free: those who run need blocks for their next tokens", False,
          prompt_tokens=7, num_free=2, reserve=1)  # fmt: skip
    admit(can_admit, "there are many more free blocks than it and the reserve need", True, prompt_tokens=7, max_tokens=4, num_free=20, reserve=3)


@admission.cost("a long prompt needs room for its first chunk", concept="B4")
def _(can_admit):
    admit(can_admit, "what it doesn't fill in its first step can serve others meanwhile", True,
          prompt_tokens=1000, max_tokens=500, chunk_size=100, block_size=16, num_free=8)  # fmt: skip


@admission.cost("an answer needs no room before it is written", concept="B4")
def _(can_admit):
    admit(can_admit, "nobody knows how long the answer will be", True, prompt_tokens=30, max_tokens=2000, block_size=16, num_free=3)


@admission.cost("an exact fit", concept="B3")
def _(can_admit):
    admit(can_admit, "eight tokens, two blocks of four: they fit", True, prompt_tokens=8, max_tokens=1, num_free=2)
    admit(can_admit, "one block for it, one in reserve: they fit", True, prompt_tokens=3, max_tokens=1, num_free=2, reserve=1)


# ---- the learner's manager inside the engine


def for_engine(manager_class: type) -> type:
    """A block manager for `Engine(block_manager=...)` that leaves every decision to the learner's class.

    It keeps the books that the trace and `check` are made from. Without prefix caching, and a request gives back all
    of its blocks or none.
    """

    class ForEngine(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False) -> None:
            if enable_prefix_caching:
                raise ValueError("enable_prefix_caching=True: this block manager has no prefix cache")
            super().__init__(num_blocks, block_size)
            self.yours = manager_class(num_blocks, block_size)

        @property
        def num_free(self) -> int:
            return self.yours.num_free

        def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
            before = list(sequence.block_table)
            is_done = self.yours.allocate(sequence, num_tokens)
            self._note(sequence, sequence.block_table[len(before) :], 1)
            return is_done

        def truncate(self, sequence: Sequence, num_tokens: int) -> None:
            if num_tokens == 0:
                self.free(sequence)

        def free(self, sequence: Sequence) -> None:
            before = list(sequence.block_table)
            self.yours.free(sequence)
            self._note(sequence, before, -1)

        def _note(self, sequence: Sequence, blocks: list[int], change: int) -> None:
            for block in blocks:
                self.ref_counts[block] += change
                self._changes.append((block, sequence.trace_name, change))
            if blocks:
                self._free = deque(block for block, count in enumerate(self.ref_counts) if count == 0)

        def check(self, live: list[Sequence]) -> None:
            super().check(live)
            assert self.yours.num_free == len(self._free), f"num_free is {self.yours.num_free}, and {len(self._free)} blocks are in no table"

    return ForEngine

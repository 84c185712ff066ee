"""Checks of lesson 03: where the K/V of a token goes, and whose token lies in a slot."""

from __future__ import annotations

from .exercise import Exercise, expect, require

# ---- 03.1

mapping = Exercise("03.1", "slot_mapping", "Where each token's K/V goes")


@mapping.test("one slot for each token of a chunk")
def _(slot_mapping):
    expect(slot_mapping, block_table=[0], start_pos=0, num_tokens=3, block_size=4, gives=[0, 1, 2],
           saying="three tokens in the first three slots of block 0")  # fmt: skip


@mapping.test("a chunk that goes on in the next block", concept="S3")
def _(slot_mapping):
    expect(slot_mapping, block_table=[0, 1], start_pos=0, num_tokens=6, block_size=4, gives=[0, 1, 2, 3, 4, 5],
           saying="token 4 begins block 1, whose first slot is 4")  # fmt: skip


@mapping.test("blocks that lie anywhere in the pool", concept="S2")
def _(slot_mapping):
    expect(slot_mapping, block_table=[3, 1], start_pos=0, num_tokens=6, block_size=4, gives=[12, 13, 14, 15, 4, 5],
           saying="tokens 0 to 3 in the slots of physical block 3, tokens 4 and 5 in those of physical block 1")  # fmt: skip


@mapping.test("a second chunk that goes on where the first one ended", concept="S1")
def _(slot_mapping):
    expect(slot_mapping, block_table=[3, 1], start_pos=2, num_tokens=3, block_size=4, gives=[14, 15, 4],
           saying="tokens 2, 3 and 4 of the sequence; tokens 0 and 1 came with the chunk before")  # fmt: skip


@mapping.test("a decode is a chunk of one token", concept="S1")
def _(slot_mapping):
    expect(slot_mapping, block_table=[7, 3, 9], start_pos=10, num_tokens=1, block_size=4, gives=[38],
           saying="token 10 alone, two places into its block")  # fmt: skip


@mapping.test("chunk 1000, block 16: the border is inside a block", concept="S1")
def _(slot_mapping):
    table = [(37 * number) % 128 for number in range(128)]  # 62 -> 118, 63 -> 27
    expect(slot_mapping, block_table=table, start_pos=1000, num_tokens=10, block_size=16,
           gives=[1896, 1897, 1898, 1899, 1900, 1901, 1902, 1903, 432, 433],
           saying="chunk 1 fills the second half of the block that chunk 0 began, then the next one")  # fmt: skip


@mapping.test("every chunking writes the same slots, each once", concept="S1")
def _(slot_mapping):
    table = [11, 4, 7, 0, 9, 2]
    pool = iter([slot for block in table for slot in range(8 * block, 8 * block + 8)])
    whole = [next(pool) for _ in range(45)]
    for chunk_size in (1, 5, 8, 12, 13, 45):
        slots = []
        for start in range(0, 45, chunk_size):
            slots += list(slot_mapping(list(table), start, min(chunk_size, 45 - start), 8))
        same = [int(slot) for slot in slots] == whole
        require(same, "45 tokens must have the same slots, however they are cut into chunks",
                given=f"block_table={table}, block_size=8, chunks of {chunk_size}")  # fmt: skip


@mapping.test("the engine's tokens don't depend on the chunk size", concept="S1")
def _(slot_mapping):
    for chunk_size in (5, 16, 20):
        for length in (4, 5, 6, 16, 17, 40):
            got, must = engine_tokens(slot_mapping, length, chunk_size)
            require(got == must, "the tokens must be those of a prefill in one piece",
                    given=f"a prompt of {length} tokens in chunks of {chunk_size}, blocks of 4, free list shuffled",
                    got=f"the engine gave {got}")  # fmt: skip


def engine_tokens(slot_mapping, length: int, chunk_size: int) -> tuple[list[int], list[int]]:
    """Five tokens of a prompt from an engine with this slot mapping, and as they must be."""
    from ..config import EngineConfig, SamplingParams
    from ..engine import Engine
    from ..runners import FakeRunner

    config = EngineConfig(block_size=4, num_blocks=32, max_prefill_chunk_size=chunk_size, enable_prefix_caching=False)
    engine = Engine(FakeRunner(), config, slot_mapping=lambda *args: [int(slot) for slot in slot_mapping(*args)])
    engine.block_manager.shuffle_free_blocks(seed=length)
    prompt = list(range(100, 100 + length))
    return engine.generate([prompt], SamplingParams(max_tokens=5))[0].token_ids, FakeRunner().solo(prompt, 5)


# ---- 03.2

decodes = Exercise("03.2", "decode_slots", "The slots of a decode step")


@decodes.test("the newest of three tokens", concept="S5")
def _(decode_slots):
    expect(decode_slots, block_tables=[[0]], lengths=[3], block_size=4, gives=[2],
           saying="three tokens, 0, 1 and 2: the newest is the third")  # fmt: skip


@decodes.test("a token that fills its block", concept="S5")
def _(decode_slots):
    expect(decode_slots, block_tables=[[0]], lengths=[4], block_size=4, gives=[3],
           saying="the fourth token has the last slot of the block")  # fmt: skip


@decodes.test("a token in the second block", concept="S3")
def _(decode_slots):
    expect(decode_slots, block_tables=[[0, 1]], lengths=[6], block_size=4, gives=[5],
           saying="the second token of block 1")  # fmt: skip


@decodes.test("blocks that lie anywhere in the pool", concept="S2")
def _(decode_slots):
    expect(decode_slots, block_tables=[[5, 2]], lengths=[6], block_size=4, gives=[9],
           saying="the second token of the block that the table names")  # fmt: skip


@decodes.test("several sequences, each with its own table")
def _(decode_slots):
    expect(decode_slots, block_tables=[[5, 2], [7], [1, 3, 0]], lengths=[6, 1, 9], block_size=4, gives=[9, 28, 0],
           saying="one slot for each sequence")  # fmt: skip


@decodes.test("the engine's tokens are right", concept="S5")
def _(decode_slots):
    from ..slots import slot_mapping

    def both(table, start, num_tokens, block_size):
        if num_tokens == 1:
            return list(decode_slots([list(table)], [start + 1], block_size))
        return slot_mapping(table, start, num_tokens, block_size)

    got, must = engine_tokens(both, 6, 64)
    require(got == must, "each decode must write its token's K/V where the next one looks for it",
            given="a prompt of 6 tokens, then four decodes, blocks of 4", got=f"the engine gave {got}")  # fmt: skip


# ---- 03.3

owner = Exercise("03.3", "who_owns", "Whose token lies in this slot?")


@owner.test("a block that nobody holds")
def _(who_owns):
    expect(who_owns, slot=9, block_tables={"Ana": [0]}, cached={"Ana": 3}, block_size=4, gives=[],
           saying="nobody holds the block of slot 9")  # fmt: skip


@owner.test("a token in the second block", concept="S3")
def _(who_owns):
    expect(who_owns, slot=5, block_tables={"Ana": [0, 1]}, cached={"Ana": 8}, block_size=4, gives=[("Ana", 5)],
           saying="slot 5 is the second place of block 1, which is the second of Ana's blocks")  # fmt: skip


@owner.test("blocks that lie anywhere in the pool", concept="S2")
def _(who_owns):
    expect(who_owns, slot=13, block_tables={"Ana": [3, 1]}, cached={"Ana": 8}, block_size=4, gives=[("Ana", 1)],
           saying="slot 13 is in physical block 3, the first of Ana's blocks")  # fmt: skip


@owner.test("the slot behind the newest token", concept="S5")
def _(who_owns):
    expect(who_owns, slot=6, block_tables={"Ana": [3, 1]}, cached={"Ana": 6}, block_size=4, gives=[],
           saying="six tokens are cached, and slot 6 is where the next one will go: there is no token in it")  # fmt: skip


@owner.test("a block with two holders", concept="B6")
def _(who_owns):
    expect(who_owns, slot=21, block_tables={"Ana": [5, 2], "Ben": [7], "Chen": [5, 0]}, cached={"Ana": 6, "Ben": 3, "Chen": 5},
           block_size=4, gives=[("Ana", 1), ("Chen", 1)], saying="Ana and Chen share physical block 5")  # fmt: skip


@owner.test("every slot of a pool")
def _(who_owns):
    tables, cached = {"Ana": [5, 2, 11], "Ben": [7], "Chen": [5, 2, 0, 9]}, {"Ana": 9, "Ben": 4, "Chen": 14}
    places = {name: [s for b in table for s in range(4 * b, 4 * b + 4)][: cached[name]] for name, table in tables.items()}
    for slot in range(48):
        lies = [(name, slots.index(slot)) for name, slots in places.items() if slot in slots]
        expect(who_owns, slot, tables, cached, 4, gives=lies, saying="the tokens whose K/V is in this slot")

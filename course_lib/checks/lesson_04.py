"""Checks of lesson 04: the mask of a chunk, paged attention, and the heart of a Triton kernel.

The judge of attention is `judge`: plain Python, one query, one head and one key at a time.
"""

from __future__ import annotations

import math

from .exercise import Exercise, Wrong, plain, require, shown

# ---- 04.1

masks = Exercise("04.1", "causal_mask", "The mask of a chunk")


def rows_of(causal_mask, start_pos: int, num_tokens: int) -> list[list[int]]:
    """The learner's mask as ones and zeros; Wrong if it isn't num_tokens rows of start_pos + num_tokens columns."""
    mask, columns = plain(causal_mask(start_pos, num_tokens)), start_pos + num_tokens
    given = f"causal_mask(start_pos={start_pos}, num_tokens={num_tokens})"
    fits = isinstance(mask, list) and len(mask) == num_tokens
    fits = fits and all(isinstance(row, list) and len(row) == columns for row in mask)
    require(fits, f"a row for each of {num_tokens} queries, a column for each of {columns} keys", given=given, got=mask)
    return [[int(bool(value)) for value in row] for row in mask]


@masks.test("a row for each query, a column for each key")
def _(causal_mask):
    require(rows_of(causal_mask, 0, 1) == [[1]], "a single token sees itself", given="causal_mask(0, 1)")
    rows_of(causal_mask, 5, 3)


@masks.test("row i belongs to token i of the chunk", concept="M10")
def _(causal_mask):
    ones = [sum(row) for row in rows_of(causal_mask, 0, 3)]
    is_moved = sorted(ones) == [1, 2, 3] != ones
    require(not is_moved, "the first token of a prompt sees one key, the second two, the third three",
            given="causal_mask(start_pos=0, num_tokens=3)", got=f"the rows have {ones} ones")  # fmt: skip


@masks.test("row 0 of a 3 × 8 mask", concept="M1")
def _(causal_mask):
    row = rows_of(causal_mask, 5, 3)[0]
    require(all(row[:6]), "the chunk's first token is token 5: it sees all five before it, and itself",
            given="causal_mask(start_pos=5, num_tokens=3)", got=f"row 0 is {row}")  # fmt: skip


@masks.test("nobody sees the future", concept="M2")
def _(causal_mask):
    for start_pos, num_tokens in ((0, 3), (5, 3), (2, 4)):
        for number, row in enumerate(rows_of(causal_mask, start_pos, num_tokens)):
            later = row[start_pos + number + 1 :]
            require(not any(later), f"token {start_pos + number} can't look at later ones",
                    given=f"causal_mask(start_pos={start_pos}, num_tokens={num_tokens})", got=f"row {number} is {row}")  # fmt: skip


@masks.test("each row has one more than the row before", concept="M1")
def _(causal_mask):
    for start_pos, num_tokens in ((0, 4), (5, 3), (9, 1), (1, 6), (30, 7)):
        ones = [sum(row) for row in rows_of(causal_mask, start_pos, num_tokens)]
        must = list(range(start_pos + 1, start_pos + num_tokens + 1))
        require(ones == must, "every token sees all before it, and itself",
                given=f"causal_mask(start_pos={start_pos}, num_tokens={num_tokens})", got=f"the rows have {ones} ones")  # fmt: skip


# ---- attention: cases and the judge


class Case:
    """Requests with random K/V in a shuffled pool. requests: (context length, of which the last … are queries)."""

    def __init__(self, *requests: tuple[int, int], tables=None, heads: int = 2, size: int = 4, block_size: int = 4,
                 num_blocks: int = 12, fill: float = 0.0, scale: float = 1.0) -> None:  # fmt: skip
        import torch

        draw = torch.Generator().manual_seed(0)
        blocks = iter([7, 2, 9, 0, 5, 11, 3, 8, 1, 10, 4, 6])
        self.tables = tables or [[next(blocks) for _ in range(-(-length // block_size))] for length, _ in requests]
        self.lens, self.block_size, self.scaling = [length for length, _ in requests], block_size, 0.5
        self.starts = [0]
        for _, num_queries in requests:
            self.starts.append(self.starts[-1] + num_queries)
        self.query = torch.randn(self.starts[-1], heads, size, generator=draw) * scale
        self.keys, self.values = (torch.full((num_blocks * block_size, heads, size), fill) for _ in range(2))
        self.places = []  # of each request: where its tokens lie
        for table, length in zip(self.tables, self.lens, strict=True):
            own = [block * block_size + offset for block in table for offset in range(block_size)]
            self.places.append(own[:length])
        for slots in self.places:
            self.keys[slots] = torch.randn(len(slots), heads, size, generator=draw)
            self.values[slots] = torch.randn(len(slots), heads, size, generator=draw)

    def run(self, paged_attention) -> list:
        """The learner's output as lists [T][H][D]; Wrong if it has another shape."""
        import torch

        tables = [list(table) for table in self.tables]
        got = paged_attention(self.query.clone(), self.keys.clone(), self.values.clone(), tables, list(self.lens),
                              list(self.starts), self.block_size, self.scaling)  # fmt: skip
        shape = tuple(torch.as_tensor(got).shape)
        require(shape == tuple(self.query.shape), f"the output has the shape of the query, {list(self.query.shape)}",
                given=self.words, got=f"the shape {list(shape)}")  # fmt: skip
        return plain(got)

    @property
    def words(self) -> str:
        return (f"context_lens={self.lens}, query_start_loc={self.starts}, block_tables={self.tables}, "
                f"block_size={self.block_size}")  # fmt: skip

    def judge(self) -> list:
        """The output as it must be, in float64: for each query and head, one visible token after the other."""
        query, keys, values = self.query.double().tolist(), self.keys.double().tolist(), self.values.double().tolist()
        output = []
        for s, slots in enumerate(self.places):
            num_queries = self.starts[s + 1] - self.starts[s]
            for number in range(num_queries):
                seen = slots[: self.lens[s] - num_queries + number + 1]
                row = query[self.starts[s] + number]
                output.append([
                    one_head(row[h], [keys[slot][h] for slot in seen], [values[slot][h] for slot in seen], self.scaling)
                    for h in range(len(row))
                ])  # fmt: skip
        return output

    def differs(self, got: list, must: list | None = None) -> bool:
        """Is any number off by more than 1e-4 of the largest? NaN is off."""
        a, b = flat(got), flat(must or self.judge())
        bound = 1e-4 * max(1.0, *(abs(x) for x in b))
        return len(a) != len(b) or not all(abs(x - y) <= bound for x, y in zip(a, b, strict=True))


def one_head(query: list[float], keys: list[list[float]], values: list[list[float]], scaling: float) -> list[float]:
    """Softmax attention of one query over what it sees."""
    weights = [math.exp(scaling * sum(a * b for a, b in zip(query, key, strict=True))) for key in keys]
    return [sum(w * value[i] for w, value in zip(weights, values, strict=True)) / sum(weights) for i in range(len(query))]


def flat(value) -> list[float]:
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [float(value)]


def changed(run, case: Case, slot: int, row: int) -> bool:
    """Does the output of a row depend on the value in a slot?"""
    before = flat(run(case)[row])
    case.values[slot] += 1000
    after = flat(run(case)[row])
    case.values[slot] -= 1000
    return any(abs(a - b) > 1e-3 for a, b in zip(before, after, strict=True))


def see_rows(run, concept_late: str, concept_early: str, case: Case, row: int, what: str) -> None:
    """Row `row` of the only request must depend on every token up to its own, and on none after it."""
    slots, first = case.places[0], case.lens[0] - (case.starts[1] - case.starts[0])
    for token in range(first + row + 1):
        if not changed(run, case, slots[token], row):
            raise Wrong(f"query {first + row} must see key {token}", given=what, concept=concept_early,
                        got=f"another value at token {token} changes nothing in row {row}")  # fmt: skip
    for token in range(first + row + 1, case.lens[0]):
        if changed(run, case, slots[token], row):
            raise Wrong(f"query {first + row} can't look at key {token}", given=what, concept=concept_late,
                        got=f"another value at token {token} changes row {row}")  # fmt: skip


# ---- 04.2

paged = Exercise("04.2", "paged_attention", "Attention through the block table")


@paged.test("a request of one token: it sees its own value")
def _(paged_attention):
    case = Case((1, 1), tables=[[0]])
    got = case.run(paged_attention)
    require(not case.differs(got), "with a single key, its weight is 1", given=f"{case.words}, values[0] = {shown(plain(case.values[0]))}", got=got)


@paged.test("a decode reads what earlier steps left", concept="M4")
def _(paged_attention):
    case = Case((6, 1), tables=[[0, 1]])
    reads = any(changed(lambda case: case.run(paged_attention), case, slot, 0) for slot in case.places[0][:5])
    require(reads, "the newest of six tokens attends to the five before it, too", given=case.words,
            got="the output depends on the newest token's K/V alone")  # fmt: skip


@paged.test("a block that lies anywhere in the pool", concept="S2")
def _(paged_attention):
    case = Case((1, 1), tables=[[2]])
    got = case.run(paged_attention)
    require(not case.differs(got), "the first token lies in physical block 2", given=case.words, got=got)


@paged.test("the weights of a row add up to 1", concept="M7")
def _(paged_attention):
    case = Case((4, 4))
    case.values[:] = 1.0
    sums = [row[0][0] for row in case.run(paged_attention)]
    require(all(abs(total - 1) < 1e-3 for total in sums), "if all values are 1, so is every output",
            given="a prompt of 4 tokens, all values 1", got=f"the outputs are {[round(total, 3) for total in sums]}")  # fmt: skip


@paged.test("row i is the output of query i", concept="M10")
def _(paged_attention):
    case = Case((4, 4))
    got, must = case.run(paged_attention), case.judge()
    places = [next((i for i in range(4) if not case.differs([row], [must[i]])), None) for row in got]
    is_moved = None not in places and places != [0, 1, 2, 3]
    require(not is_moved, "the rows of the output are in the order of the queries", given=case.words,
            got=f"the right rows, in the order {places}")  # fmt: skip


@paged.test("row 0 of a chunk sees all earlier tokens", concept="M1")
def _(paged_attention):
    see_rows(lambda case: case.run(paged_attention), "M2", "M1", Case((8, 3)), 0, "a chunk of 3 tokens after 5 cached ones")
    see_rows(lambda case: case.run(paged_attention), "M2", "M1", Case((6, 1)), 0, "a decode after 5 cached tokens")


@paged.test("nobody sees the future", concept="M2")
def _(paged_attention):
    see_rows(lambda case: case.run(paged_attention), "M2", "M1", Case((4, 4)), 1, "a prompt of 4 tokens in one piece")
    see_rows(lambda case: case.run(paged_attention), "M2", "M1", Case((8, 3)), 1, "a chunk of 3 tokens after 5 cached ones")


@paged.test("the weights are the softmax of the scaled scores")
def _(paged_attention):
    case = Case((4, 4))
    got = case.run(paged_attention)
    require(not case.differs(got), "each score is query · key · scaling, and the weights are the softmax of the scores",
            given=f"{case.words}, scaling={case.scaling}", got=got)  # fmt: skip


@paged.test("what lies in free slots doesn't matter")
def _(paged_attention):
    for requests in (((6, 1),), ((7, 3),), ((5, 5),)):
        case = Case(*requests, fill=math.nan)
        got = case.run(paged_attention)
        if not case.differs(got):
            continue
        is_nan = any(math.isnan(number) for number in flat(got))
        if is_nan or case.differs(Case(*requests, fill=0.0).run(paged_attention), Case(*requests, fill=9.0).run(paged_attention)):
            raise Wrong("the slots that hold none of the request's tokens aren't read", given=case.words + ", NaN in every other slot",
                        got=got, concept="M5")  # fmt: skip
        raise Wrong("the numbers must be those of softmax attention, to four digits", given=case.words, got=got)


@paged.test("two requests together are as each alone", concept="M8")
def _(paged_attention):
    for requests in (((3, 3), (2, 2)), ((6, 2), (3, 1)), ((5, 1), (9, 4), (1, 1))):
        case = Case(*requests)
        got = case.run(paged_attention)
        require(not case.differs(got), "each request sees its own tokens, through its own block table",
                given=case.words, got=got)  # fmt: skip


@paged.test("large batches, other sizes")
def _(paged_attention):
    mixed = Case((30, 30), (17, 1), (33, 9), heads=3, size=8, block_size=16, scale=3.0)
    for case in (mixed, Case((7, 2), (8, 8), block_size=2, heads=1)):
        got = case.run(paged_attention)
        require(not case.differs(got), "the numbers must be those of softmax attention, to four digits", given=case.words)


# ---- 04.3

kernel = Exercise("04.3", "chunk_attention", "Inside the kernel")


def run_kernel(chunk_attention, case: Case) -> list:
    """The learner's kernel on the only request of a case with one head of 16; rows as [T][1][D]."""
    import torch

    from ..model.own_kernels import launch

    end = case.starts[1]
    query, keys, values = (x[:, 0].contiguous() for x in (case.query, case.keys, case.values))
    output, table = torch.full((end, 16), math.nan), torch.tensor(case.tables[0], dtype=torch.int32)
    launch(chunk_attention, (-(-end // 16),), query, keys, values, output, table, case.lens[0] - end, end, case.scaling,
           D=16, BLOCK_SIZE=case.block_size, TILE_Q=16, TILE_K=16)  # fmt: skip
    return [[row] for row in output.tolist()]


def one_request(length: int, num_queries: int, **settings) -> Case:
    return Case((length, num_queries), heads=1, size=16, block_size=8, **settings)


@kernel.test("a request of one token: it sees its own value")
def _(chunk_attention):
    case = one_request(1, 1)
    got = run_kernel(chunk_attention, case)
    require(not case.differs(got), "with a single key, its weight is 1", given="one token, one key", got=got)


@kernel.test("the weights of a row add up to 1", concept="M7")
def _(chunk_attention):
    for length in (10, 40):
        case = one_request(length, length, scale=3.0)
        case.values[:] = 1.0
        sums = [row[0][0] for row in run_kernel(chunk_attention, case)]
        require(all(abs(total - 1) < 1e-3 for total in sums), "if all values are 1, so is every output",
                given=f"a prompt of {length} tokens in tiles of 16, all values 1",
                got=f"the outputs are {[round(total, 3) for total in sums]}")  # fmt: skip


@kernel.test("nobody sees the future", concept="M2")
def _(chunk_attention):
    case = one_request(4, 4)
    see_rows(lambda case: run_kernel(chunk_attention, case), "M2", "M1", case, 1, "a prompt of 4 tokens in one piece")


@kernel.test("row 0 of a chunk sees all earlier tokens", concept="M1")
def _(chunk_attention):
    case = one_request(22, 3)
    for token in (0, 15, 16, 19):
        require(changed(lambda case: run_kernel(chunk_attention, case), case, case.places[0][token], 0),
                f"query 19 must see key {token}", given="a chunk of 3 tokens after 19 cached ones, tiles of 16",
                got=f"another value at token {token} changes nothing in row 0")  # fmt: skip


@kernel.test("what was summed before shrinks when a larger score comes", concept="M7")
def _(chunk_attention):
    case = one_request(40, 4, scale=3.0)
    got = run_kernel(chunk_attention, case)
    require(not case.differs(got), "both sums shrink by the same factor, in every tile that brings a larger score",
            given="a chunk of 4 tokens after 36 cached ones, in tiles of 16", got=got[0][0])  # fmt: skip


@kernel.test("chunks of every kind, in a shuffled pool with NaN in the free slots")
def _(chunk_attention):
    for length, num_queries in ((16, 16), (33, 17), (40, 1), (20, 5)):
        case = one_request(length, num_queries, fill=math.nan)
        got = run_kernel(chunk_attention, case)
        require(not case.differs(got), "the numbers must be those of softmax attention, to four digits",
                given=f"{num_queries} queries, {length} keys, tiles of 16", got=got)  # fmt: skip

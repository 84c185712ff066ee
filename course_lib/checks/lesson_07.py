"""Checks of lesson 07: the flat batch of a step, and one chunk of one request."""

from __future__ import annotations

from types import SimpleNamespace

from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..runners import FakeRunner
from ..scheduler import ScheduledChunk, SchedulerOutput
from ..sequence import Sequence
from .exercise import Exercise, Wrong, is_same, plain, require, shown
from .plug import plug

# ---- 07.1

layout = Exercise("07.1", "build_batch", "One flat batch")


def request(name: str, prompt: int, table: list[int], generated: int = 0) -> Sequence:
    """A request whose tokens say whose they are: Ana's are 'A' × 1000 + place."""
    sequence = Sequence(name, [ord(name[0]) * 1000 + place for place in range(prompt)])
    sequence.generated_token_ids = [ord(name[0]) * 1000 + prompt + place for place in range(generated)]
    sequence.block_table = list(table)
    return sequence


class Layout:
    """The learner's batch for some chunks (sequence, start, tokens), and what was asked, in words."""

    def __init__(self, build_batch, chunks: list[tuple[Sequence, int, int]], block_size: int = 4) -> None:
        planned, words = [], []
        for sequence, start, count in chunks:
            end = start + count
            sequence.cached_token_count = start
            is_decode = start >= len(sequence.prompt_token_ids)
            is_last = end == sequence.known_token_count
            planned.append(ScheduledChunk(sequence, start, count, "decode" if is_decode else "prefill", is_last))
            what = f"decodes token {start}" if is_decode else f"prefills tokens {start} to {end - 1} of {sequence.known_token_count}"
            words.append(f"{sequence.request_id} {what}, block table {sequence.block_table}")
        self.given = f"blocks of {block_size}; " + "; ".join(words)
        self.batch = build_batch(SchedulerOutput(0, block_size, planned))
        if not hasattr(self.batch, "token_ids"):
            raise Wrong("build_batch returns a Batch", given=self.given, got=f"returned {shown(self.batch)}")

    def expect(self, field: str, value, saying: str, concept: str | None = None) -> None:
        got = getattr(self.batch, field)
        if not is_same(plain(got), plain(value), 0.0):
            raise Wrong(saying, given=self.given, got=f"{field} = {shown(got)}", concept=concept)

    def expect_names(self, field: str, names: list[str], saying: str) -> None:
        got = [getattr(sequence, "request_id", sequence) for sequence in getattr(self.batch, field)]
        require(got == names, saying, given=self.given, got=f"{field}: {got}")


@layout.test("one prompt in one piece: its tokens, positions and slots")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 3, [0]), 0, 3)])
    row.expect("token_ids", [65000, 65001, 65002], "the prompt's tokens, in their order")
    row.expect("positions", [0, 1, 2], "the first token is at position 0")
    row.expect("slot_mapping", [0, 1, 2], "the slots that slot_mapping gives for it")
    row.expect("query_start_loc", [0, 3], "one chunk: it begins at row 0, and the batch ends at 3")
    row.expect("context_lens", [3], "its last token can attend to three tokens", concept="M4")
    row.expect("block_tables", [[0]], "the block table of the one sequence")
    row.expect("block_size", 4, "the block size of the step")
    row.expect_names("sequences", ["Ana"], "the scheduled sequences")


@layout.test("the second chunk of a prompt: its positions", concept="P1")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 12, [3, 1]), 4, 4)])
    row.expect("token_ids", [65004, 65005, 65006, 65007], "the tokens of this chunk, not the first ones", concept="S1")
    row.expect("positions", [4, 5, 6, 7], "each token has the position that it has in the whole prompt")


@layout.test("the second chunk of a prompt: its slots", concept="S1")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 12, [3, 1]), 3, 4)])
    row.expect("slot_mapping", [15, 4, 5, 6], "each token has the slot of its place in the whole prompt: token 3 is the last of block 3")


@layout.test("the second chunk of a prompt: its context", concept="M4")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 12, [3, 1]), 4, 4)])
    row.expect("context_lens", [8], "its last token can attend to everything before it, in the chunks before too")


@layout.test("two requests side by side: the borders", concept="M8")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 3, [0]), 0, 3), (request("Ben", 2, [5]), 0, 2)])
    row.expect("token_ids", [65000, 65001, 65002, 66000, 66001], "one request's tokens, then the other's")
    row.expect("query_start_loc", [0, 3, 5], "where each request begins, and where the batch ends")
    row.expect("context_lens", [3, 2], "a context per request")
    row.expect("block_tables", [[0], [5]], "a block table per request")


@layout.test("a chunk in the middle of a prompt gives no token", concept="I1")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 12, [3, 1]), 4, 4)])
    row.expect("sample_rows", [], "none of its rows is sampled")
    row.expect_names("sampled", [], "nobody gets a token")


@layout.test("the chunk that completes the prompt gives one", concept="I7")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 12, [3, 1, 0]), 8, 4)])
    row.expect_names("sampled", ["Ana"], "its sequence gets the first token")
    row.expect("sample_rows", [3], "its last row gives it; rows count from 0, so the last of four is row 3", concept="I3")


@layout.test("a decode gives one, too", concept="I7")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 5, [3, 1], generated=2), 6, 1)])
    row.expect("token_ids", [65006], "the newest token goes in")
    row.expect("positions", [6], "its position goes on behind the prompt", concept="P1")
    row.expect("sample_rows", [0], "its only row gives the next token")


@layout.test("two prompts in one step: whose row is whose", concept="I3")
def _(build_batch):
    row = Layout(build_batch, [(request("Ana", 3, [0]), 0, 3), (request("Ben", 2, [5]), 0, 2)])
    row.expect("sample_rows", [2, 4], "each request's token comes from its own last row")
    row.expect_names("sampled", ["Ana", "Ben"], "in the order of the rows")


@layout.test("everything together: a decode, a chunk in the middle, a whole prompt", concept="I3")
def _(build_batch):
    ana, doc, note = request("Ana", 2, [6], generated=1), request("Doc", 10, [2, 0]), request("Note", 3, [5])
    row = Layout(build_batch, [(ana, 2, 1), (doc, 4, 4), (note, 0, 3)])
    row.expect("positions", [2, 4, 5, 6, 7, 0, 1, 2], "each request counts for itself", concept="P1")
    row.expect("slot_mapping", [26, 0, 1, 2, 3, 20, 21, 22], "each by its own block table", concept="S1")
    row.expect("query_start_loc", [0, 1, 5, 8], "three requests, four borders", concept="M8")
    row.expect("context_lens", [3, 8, 3], "each one's last token attends to everything up to itself, and to nothing that isn't computed yet", concept="M4")
    row.expect("sample_rows", [0, 7], "the decode and the whole prompt give a token, the chunk in the middle doesn't")
    row.expect_names("sampled", ["Ana", "Note"], "who gets a token")


@layout.test("in the real engine everybody gets the tokens that they would get alone")
def _(build_batch):
    config = EngineConfig(block_size=4, num_blocks=64, max_num_batched_tokens=24, max_num_seqs=6, max_prefill_chunk_size=7,
                          enable_prefix_caching=False)  # fmt: skip
    runner = FakeRunner()
    prompts = {f"r{n}": [n] * length for n, length in enumerate((9, 30, 3, 17, 5))}
    with plug(build_batch=build_batch):
        engine = Engine(runner, config)
        engine.block_manager.shuffle_free_blocks(seed=3)
        for name, prompt in prompts.items():
            engine.add_request(prompt, SamplingParams(max_tokens=4), request_id=name)
        got: dict[str, list[int]] = {name: [] for name in prompts}
        for _ in range(100):
            for output in engine.step():
                got[output.request_id] += output.new_token_ids
    for name, prompt in prompts.items():
        require(got[name] == runner.solo(prompt, 4), "its tokens are those of a run alone",
                given="five prompts, chunks of 7, blocks of 4", got=f"{name}, {len(prompt)} prompt tokens, differs")  # fmt: skip


# ---- 07.2

chunk = Exercise("07.2", "run_prefill_chunk", "One chunk of one request")


class Memory(list):
    """FakeRunner's memory with the name of its block size, as a KVCache has it."""

    block_size = 4


class Listener(FakeRunner):
    """A FakeRunner with the forward() of a ModelRunner: a row of numbers per sampled row, from all that was read. Keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = Memory([-1] * 64)
        self.batches: list = []

    def forward(self, batch):
        if not all(hasattr(batch, name) for name in ("token_ids", "positions", "sample_rows", "query_start_loc")):
            raise Wrong("runner.forward gets a Batch", got=f"it got {shown(batch)}")
        fields = ("token_ids", "positions", "slot_mapping", "context_lens", "query_start_loc", "sample_rows", "block_tables")
        self.batches.append(SimpleNamespace(**{name: plain(getattr(batch, name)) for name in fields}))
        rows = [[sample.token_id] for sample in self.execute(batch)]
        return rows + [[-1]] * (len(batch.sample_rows) - len(rows))  # for rows that are nobody's last


class Alone:
    """One request, computed in pieces by the learner's function on a Listener."""

    def __init__(self, run_prefill_chunk, pieces: list[int], length: int = 10) -> None:
        table = [3, 1, 2]
        self.runner, self.sequence = Listener(), request("Ana", length, table)
        self.results, start = [], 0
        for size in pieces:
            tokens = self.sequence.prompt_token_ids[start : start + size]
            self.results.append(run_prefill_chunk(self.runner, self.sequence, tokens, start))
            start += size
        words = f"prompt of {length}, blocks of 4, block table {table}, chunks of {', '.join(map(str, pieces))}"
        self.given = words + ("" if start == length else f"; {length - start} tokens are still to come")
        require(len(self.runner.batches) == len(pieces), "runner.forward is called once for each chunk", given=self.given,
                got=f"it was called {len(self.runner.batches)} times")  # fmt: skip

    def expect(self, field: str, value, saying: str, concept: str | None = None) -> None:
        """A field of the last batch."""
        got = getattr(self.runner.batches[-1], field)
        said = f"{field} = {shown(got)} for the last of these chunks"
        require(is_same(got, value, 0.0), saying, given=self.given, got=said, concept=concept)


@chunk.test("a whole prompt: one batch of one sequence")
def _(run_prefill_chunk):
    alone = Alone(run_prefill_chunk, [10])
    alone.expect("token_ids", [65000 + place for place in range(10)], "the chunk's tokens")
    alone.expect("query_start_loc", [0, 10], "one sequence, ten rows")
    alone.expect("positions", list(range(10)), "positions from 0")
    alone.expect("block_tables", [[3, 1, 2]], "the sequence's block table")


@chunk.test("the second chunk's positions", concept="P1")
def _(run_prefill_chunk):
    Alone(run_prefill_chunk, [4, 5]).expect("positions", [4, 5, 6, 7, 8], "they go on behind the chunk before")


@chunk.test("the second chunk's slots", concept="S1")
def _(run_prefill_chunk):
    Alone(run_prefill_chunk, [4, 5]).expect("slot_mapping", [4, 5, 6, 7, 8], "they go by the place in the whole prompt, through the block table")


@chunk.test("the second chunk's context", concept="M4")
def _(run_prefill_chunk):
    Alone(run_prefill_chunk, [4, 5]).expect("context_lens", [9], "its last token attends to all nine tokens up to itself")


@chunk.test("a chunk in the middle: no row is sampled", concept="I1")
def _(run_prefill_chunk):
    Alone(run_prefill_chunk, [4]).expect("sample_rows", [], "nobody wants to know what comes after token 3: the user has written it")


@chunk.test("a chunk in the middle: nothing to return", concept="I5")
def _(run_prefill_chunk):
    alone = Alone(run_prefill_chunk, [4])
    require(alone.results[0] is None, "None, and not something empty", given=alone.given, got=f"returned {shown(alone.results[0])}")


@chunk.test("the chunk that completes the prompt returns logits", concept="I7")
def _(run_prefill_chunk):
    alone = Alone(run_prefill_chunk, [5, 5])
    require(alone.results[-1] is not None, "two chunks of 5 are all of a prompt of 10: the second gives logits", given=alone.given,
            got="returned None for the second")  # fmt: skip
    alone.expect("sample_rows", [4], "those of its last row: a row of this batch, counted from 0, and not a position in the prompt", concept="I3")


@chunk.test("the logits are the sampled row's own")
def _(run_prefill_chunk):
    alone = Alone(run_prefill_chunk, [10])
    require(len(plain(alone.results[-1])) == 1 and not isinstance(plain(alone.results[-1])[0], list),
            "one row of logits, without the dimension of the batch", given=alone.given, got=f"returned {shown(alone.results[-1])}")  # fmt: skip


@chunk.test("any cut gives the same")
def _(run_prefill_chunk):
    whole = FakeRunner().solo(request("Ana", 10, []).prompt_token_ids, 1)
    for pieces in ([10], [4, 4, 2], [3, 3, 3, 1], [1] * 10, [9, 1], [2, 7, 1]):
        alone = Alone(run_prefill_chunk, pieces)
        require(is_same(plain(alone.results[-1]), whole, 0.0), "what comes out depends on the prompt, not on where it was cut",
                given=alone.given, got=f"another result than in one piece: {shown(alone.results[-1])}")  # fmt: skip


@chunk.test("on a real model: logits as in one piece")
def _(run_prefill_chunk):
    import torch

    from ..block_manager import BlockManager
    from ..model import load_model
    from ..runners.model import ModelRunner

    runner = ModelRunner(load_model("tiny"))
    prompt = [(7 * place + 3) % 200 for place in range(21)]

    def logits_in(pieces: list[int]):
        runner.init_kv_cache(8, 4)
        sequence, blocks, start = Sequence("r", prompt), BlockManager(8, 4), 0
        for size in pieces:
            blocks.allocate(sequence, start + size)
            result = run_prefill_chunk(runner, sequence, prompt[start : start + size], start)
            start += size
        return result

    with torch.inference_mode():
        whole, cut = logits_in([21]), logits_in([8, 7, 6])
    require(tuple(whole.shape) == (runner.vocab_size,), "one logit for each token of the vocabulary", got=f"shape {tuple(whole.shape)}")
    worst = float((whole - cut).abs().max())
    require(worst < 1e-4, "the same logits, whatever the cut", given="a tiny Llama, 21 tokens, chunks of 8, 7 and 6",
            got=f"they differ by {worst:.3g}")  # fmt: skip

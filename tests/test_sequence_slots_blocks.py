"""The small parts: a request's states and counters, the slot rule, the block pool, the prefix cache."""

import itertools

import pytest
from helpers import RecordingRunner, check_books, is_idle, limit, make_engine, prompt, run_to_end, step, steps

import course_lib.prefix_cache
from course_lib import SequenceStatus
from course_lib.block_manager import BlockManager
from course_lib.sequence import Sequence
from course_lib.slots import blocks_needed, slot_mapping

WAITING, PREFILLING, RUNNING, FINISHED = SequenceStatus

# --- states and counters ---

LEGAL = {
    (WAITING, PREFILLING),  # first chunk done, prompt not complete
    (WAITING, RUNNING),  # the prompt fitted in one chunk
    (PREFILLING, PREFILLING),  # another chunk
    (PREFILLING, RUNNING),  # last chunk
    (RUNNING, FINISHED),  # stop or length
    (PREFILLING, WAITING),  # preempted
    (RUNNING, WAITING),
    (WAITING, FINISHED),  # cancelled or error
    (PREFILLING, FINISHED),
}


def in_state(status):
    sequence = Sequence("A", [1, 2, 3])
    if status is not WAITING:
        sequence.transition_to(status)
    return sequence


@pytest.mark.parametrize("before, after", list(itertools.product(SequenceStatus, repeat=2)))
def test_only_the_listed_transitions_are_possible(before, after):
    sequence = in_state(before)
    if (before, after) in LEGAL:
        sequence.transition_to(after)
        assert sequence.status is after
    else:
        with pytest.raises(RuntimeError, match=f"A.*{before.name}.*{after.name}"):
            sequence.transition_to(after)
        assert sequence.status is before


def test_every_transition_of_a_run_goes_through_transition_to(monkeypatch):
    seen = set()
    original = Sequence.transition_to

    def spy(self, status):
        seen.add((self.status, status))
        original(self, status)

    monkeypatch.setattr(Sequence, "transition_to", spy)
    engine = make_engine(max_prefill_chunk_size=16)
    for name, length in (("long", 100), ("short", 5), ("gone", 5)):
        engine.add_request(prompt(length), limit(5), request_id=name)
    engine.cancel("gone")
    steps(engine, 3)
    engine.preempt("long")
    engine.preempt("short")
    steps(engine, 3)
    run_to_end(engine)
    states = dict(itertools.pairwise([WAITING, PREFILLING, RUNNING, FINISHED]))
    assert set(states.items()) <= seen and seen <= LEGAL
    assert {(WAITING, FINISHED), (PREFILLING, WAITING), (RUNNING, WAITING), (WAITING, RUNNING)} <= seen


def counters(engine, name="A"):
    state = engine.snapshot()[name]
    return state.status, state.prefilled_token_count, state.cached_token_count, state.generated_tokens


def test_the_newest_token_has_no_kv_yet():
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(40), limit(9), request_id="A")
    seen = []
    for _ in range(5):
        step(engine)
        seen.append(counters(engine))
    assert seen == [
        ("PREFILLING", 16, 16, 0),
        ("PREFILLING", 32, 32, 0),
        ("RUNNING", 40, 40, 1),  # one token, and its K/V isn't there yet
        ("RUNNING", 40, 41, 2),
        ("RUNNING", 40, 42, 3),
    ]


def test_prefilled_stops_at_the_prompt_and_cached_goes_on_in_a_recomputation():
    engine = make_engine(max_prefill_chunk_size=8, enable_prefix_caching=False)
    engine.add_request(prompt(10), limit(20), request_id="A")
    steps(engine, 8)  # 2 chunks, 6 decodes: 7 tokens
    engine.preempt("A")
    seen = [counters(engine)]
    for _ in range(3):  # 17 known tokens: 8, 8, 1
        step(engine)
        seen.append(counters(engine))
    assert seen == [
        ("WAITING", 0, 0, 7),
        ("PREFILLING", 8, 8, 7),
        ("PREFILLING", 10, 16, 7),
        ("RUNNING", 10, 17, 8),
    ]


def test_a_prefix_hit_counts_as_prefilled():
    engine = make_engine(max_prefill_chunk_size=8)
    engine.generate([prompt(64)], limit(1))
    engine.add_request(prompt(64), limit(2), request_id="A")
    step(engine)
    assert counters(engine) == ("PREFILLING", 56, 56, 0)  # 48 from the cache and a chunk of 8


@pytest.mark.parametrize("max_prefill_chunk_size", [16, 256])
def test_counters_move_only_after_the_forward_pass(max_prefill_chunk_size):
    engine = make_engine(max_prefill_chunk_size=max_prefill_chunk_size)
    engine.add_request(prompt(40), limit(9), request_id="A")
    for _ in range(6):
        before = engine.snapshot()["A"]
        during = []
        engine.on_step = lambda output, during=during: during.append(engine.snapshot()["A"])
        step(engine)
        assert counters(engine) != counters_of(before)
        assert counters_of(during[0]) == counters_of(before)


def counters_of(state):
    return state.status, state.prefilled_token_count, state.cached_token_count, state.generated_tokens


def test_known_tokens_can_be_read_across_the_end_of_the_prompt():
    sequence = Sequence("A", [10, 11, 12])
    sequence.generated_token_ids = [20, 21]
    everything = [10, 11, 12, 20, 21]
    for start in range(5):
        for count in range(1, 6 - start):
            assert sequence.token_ids(start, count) == everything[start : start + count]


# --- the slot rule ---


def test_slots_of_the_worked_example():
    table = [7, 3, 9, 1]  # blocks of 16; a prompt of 60 in chunks of 25
    assert slot_mapping(table, 0, 25, 16) == [*range(112, 128), *range(48, 57)]
    assert slot_mapping(table, 25, 25, 16) == [*range(57, 64), *range(144, 160), 16, 17]
    assert slot_mapping(table, 50, 10, 16) == list(range(18, 28))


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_slots_do_not_depend_on_where_chunks_begin_and_end(block_size):
    table = [5, 0, 9, 2, 7] if block_size > 1 else list(range(40, 0, -1))
    total = min(40, len(table) * block_size)
    whole = slot_mapping(table, 0, total, block_size)
    assert len(set(whole)) == total
    for chunk in range(1, total + 1):
        pieces = [slot_mapping(table, s, min(chunk, total - s), block_size) for s in range(0, total, chunk)]
        assert [slot for piece in pieces for slot in piece] == whole


def test_a_table_that_is_too_short_is_an_error():
    with pytest.raises(IndexError):
        slot_mapping([3], 10, 10, 16)  # index 19 is in the second block


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1000, 63)])
def test_blocks_needed_rounds_up(tokens, blocks):
    assert blocks_needed(tokens, 16) == blocks


def test_the_batch_is_built_by_the_slot_rule():
    slots = {}

    class Runner(RecordingRunner):
        def execute(self, batch):
            starts = batch.query_start_loc
            for s, a, b in zip(batch.sequences, starts, starts[1:], strict=False):
                slots.setdefault(s.request_id, []).extend(batch.slot_mapping[a:b])
            return super().execute(batch)

    engine = make_engine(Runner(), max_prefill_chunk_size=25, block_size=4, num_blocks=40)
    engine.block_manager.shuffle_free_blocks(3)
    for name, length in (("A", 60), ("B", 33)):
        engine.add_request(prompt(length), limit(2), request_id=name)
    steps(engine, 3)
    tables = {name: state.block_table for name, state in engine.snapshot().items()}
    for name, table in tables.items():
        assert slots[name] == slot_mapping(table, 0, len(slots[name]), 4)


# --- the block pool ---


def take(manager, num_tokens, name="A", tokens=None):
    """A sequence that holds the blocks of `num_tokens` tokens, all of them computed."""
    sequence = Sequence(name, prompt(num_tokens, hash(name)) if tokens is None else tokens)
    assert manager.allocate(sequence, num_tokens)
    sequence.cached_token_count = num_tokens
    return sequence


def test_allocation_is_all_or_nothing():
    manager = BlockManager(4, 16)
    sequence = take(manager, 40)
    before = (list(sequence.block_table), list(manager.ref_counts), manager.free_blocks())
    assert not manager.allocate(sequence, 5 * 16), "needs 2 more, 1 is free"
    assert (list(sequence.block_table), list(manager.ref_counts), manager.free_blocks()) == before
    assert manager.allocate(sequence, 4 * 16) and manager.num_free == 0
    assert not manager.allocate(Sequence("B", [1]), 1)


def test_an_allocation_that_is_held_already_takes_nothing():
    manager = BlockManager(4, 16)
    sequence = take(manager, 17)
    assert manager.allocate(sequence, 32) and manager.num_used == 2


def test_free_and_used_are_all():
    manager = BlockManager(10, 4, enable_prefix_caching=True)
    sequences = [take(manager, n, str(n)) for n in (3, 4, 9)]
    assert (manager.num_used, manager.num_free) == (1 + 1 + 3, 5)
    manager.check(sequences)
    for sequence in sequences:
        manager.free(sequence)
    assert (manager.num_used, manager.num_free) == (0, 10)


def test_freeing_twice_is_harmless():
    manager = BlockManager(4, 16)
    a, b = take(manager, 16, "A"), take(manager, 16, "B")
    manager.free(a)
    manager.free(a)
    assert manager.num_free == 3 and manager.ref_counts[b.block_table[0]] == 1
    c, d = take(manager, 16, "C"), take(manager, 16, "D")
    assert len({*b.block_table, *c.block_table, *d.block_table}) == 3
    manager.check([b, c, d])


def test_giving_back_a_part_begins_at_the_tail():
    manager = BlockManager(4, 16)
    sequence = take(manager, 60)
    head = sequence.block_table[:2]
    manager.truncate(sequence, 17)
    assert sequence.block_table == head and manager.num_free == 2


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    manager = BlockManager(8, 4, enable_prefix_caching=True)
    tokens = prompt(13)
    a = take(manager, 13, "A", tokens)
    manager.register(a)
    b, c = Sequence("B", tokens), Sequence("C", tokens)
    for sequence in (b, c):
        manager.adopt(sequence, manager.match(sequence))
        assert manager.allocate(sequence, 13)
        sequence.cached_token_count = 13
    assert [manager.ref_counts[block] for block in a.block_table] == [3, 3, 3, 1]  # 3 full blocks shared
    assert manager.num_used == 4 + 1 + 1
    manager.check([a, b, c])
    manager.free(a)
    assert [manager.ref_counts[block] for block in b.block_table] == [2, 2, 2, 1] and manager.num_used == 5
    manager.free(b)
    assert manager.num_used == 4
    manager.free(c)
    assert manager.num_free == 8 and not any(manager.ref_counts)


def test_an_idle_matched_block_costs_a_free_one():
    # 4 blocks. W is done and left 2 full blocks; R holds the other two.
    engine = make_engine(num_blocks=4, kv_watermark=0)
    warm = prompt(33)
    engine.generate([warm], limit(1))
    engine.add_request(prompt(32, 1), limit(9), request_id="R")
    step(engine)
    manager = engine.block_manager
    assert (manager.num_free, manager.num_cached) == (2, 2)
    engine.add_request(warm, limit(1), request_id="same")  # matches 2 idle blocks, and needs a third
    step(engine)
    assert engine.snapshot()["same"].status == "WAITING" and engine.snapshot()["same"].block_table == []
    run_to_end(engine)


def test_a_matched_block_in_use_costs_none():
    # 4 blocks. R holds 3 of them, and its first two are what the newcomer needs.
    engine = make_engine(num_blocks=4, kv_watermark=0)
    warm = prompt(33)
    engine.add_request(warm, limit(9), request_id="R")
    step(engine)
    engine.add_request(warm, limit(1), request_id="same")
    (mine,) = [output for output in step(engine) if output.request_id == "same"]
    assert (mine.finished, mine.num_cached_tokens) == (True, 32)
    assert mine.token_ids == engine.runner.solo(warm, 1)


def spoiled(engine, how):
    """Spoils the books in one way; returns what repairs them."""
    manager, running = engine.block_manager, engine.scheduler.running
    sequence = running[0]
    if how == "a block that it doesn't need":
        sequence.block_table.append(77)
        return lambda: sequence.block_table.pop()
    if how == "a reference count without a holder":
        manager.ref_counts[5] += 1
        return lambda: manager.ref_counts.__setitem__(5, 0)
    if how == "in two queues":
        engine.scheduler.waiting.append(sequence)
        return lambda: engine.scheduler.waiting.pop()
    if how == "a counter that is behind":
        sequence.cached_token_count -= 1
        return lambda: setattr(sequence, "cached_token_count", 40)
    if how == "in no queue":
        running.pop()
        return lambda: running.append(sequence)
    if how == "a block in use that is also free":
        manager._free.append(sequence.block_table[0])
        return lambda: manager._free.pop()
    sequence.status = WAITING
    return lambda: setattr(sequence, "status", RUNNING)


@pytest.mark.parametrize("how", [
    "a block that it doesn't need", "a reference count without a holder", "in two queues", "a counter that is behind",
    "in no queue", "a block in use that is also free", "another state than its queue's",
])  # fmt: skip
def test_check_invariants_finds(how):
    engine = make_engine()
    engine.add_request(prompt(40), limit(5), request_id="A")
    step(engine)
    repair = spoiled(engine, how)
    with pytest.raises(AssertionError):
        engine.check_invariants()
    repair()
    engine.check_invariants()


# --- the prefix cache ---


def probe(manager, tokens, salt=None):
    """How many blocks of `tokens` could be taken from the cache."""
    return len(manager.match(Sequence("probe", tokens, cache_salt=salt)))


def fill(manager, tokens, name="A", salt=None):
    """A sequence that has computed all of `tokens`, and what the cache had of them."""
    sequence = Sequence(name, tokens, cache_salt=salt)
    matched = manager.match(sequence)
    manager.adopt(sequence, matched)
    assert manager.allocate(sequence, len(tokens))
    sequence.cached_token_count = len(tokens)
    manager.register(sequence)
    return sequence


@pytest.mark.parametrize("length, blocks", [(64, 3), (65, 4), (63, 3), (15, 0), (16, 0), (17, 1), (33, 2)])
def test_a_match_is_of_full_blocks_and_leaves_a_token(length, blocks):
    manager = BlockManager(10, 16, enable_prefix_caching=True)
    fill(manager, prompt(65))
    assert probe(manager, prompt(65)[:length]) == blocks  # floor((length - 1) / 16)


def test_generated_tokens_are_matched_too():
    manager = BlockManager(10, 4, enable_prefix_caching=True)
    tokens = prompt(12)
    fill(manager, tokens)
    preempted = Sequence("B", tokens[:5])
    preempted.generated_token_ids = tokens[5:12]
    assert len(manager.match(preempted)) == 2  # 12 known tokens: floor(11 / 4)


def test_without_prefix_caching_nothing_is_ever_matched():
    engine = make_engine(enable_prefix_caching=False)
    outputs = [engine.generate([prompt(64)], limit(2))[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    assert engine.block_manager.num_cached == 0


def test_equal_blocks_behind_different_prefixes_are_different():
    manager = BlockManager(10, 4, enable_prefix_caching=True)
    same = prompt(4, 9)
    fill(manager, prompt(4, 1) + same + [0])
    assert probe(manager, prompt(4, 2) + same + [0]) == 0
    assert probe(manager, same + same + [0]) == 0
    assert probe(manager, prompt(4, 1) + same + [1]) == 2


def test_a_block_is_registered_after_the_forward_pass():
    manager = BlockManager(10, 4, enable_prefix_caching=True)
    sequence = Sequence("A", prompt(12))
    manager.allocate(sequence, 12)
    assert probe(manager, prompt(12)) == 0, "allocated, but nothing is written"
    sequence.cached_token_count = 7
    manager.register(sequence)
    assert probe(manager, prompt(12)) == 1, "one full block is written, and three tokens of the next"
    sequence.cached_token_count = 12
    manager.register(sequence)
    assert probe(manager, prompt(13)) == 3


def test_a_failed_forward_pass_registers_nothing():
    engine = make_engine()
    engine.runner.fail_at = {0}
    engine.add_request(prompt(64), limit(2))
    with pytest.raises(RuntimeError):
        engine.step()
    check_books(engine)
    assert probe(engine.block_manager, prompt(64)) == 0 and engine.block_manager.num_cached == 0


def test_freed_blocks_keep_their_content_until_they_are_reused():
    manager = BlockManager(6, 4, enable_prefix_caching=True)
    sequence = fill(manager, prompt(13))
    manager.free(sequence)
    assert (manager.num_free, manager.num_cached) == (6, 3)
    assert probe(manager, prompt(13)) == 3


def test_blocks_with_nothing_in_them_are_taken_first():
    manager = BlockManager(6, 4, enable_prefix_caching=True)
    manager.free(fill(manager, prompt(13)))  # 3 cached, 3 free
    take(manager, 12, "B")
    assert probe(manager, prompt(13)) == 3


def test_the_tail_of_a_sequence_is_overwritten_before_its_head():
    manager = BlockManager(4, 4, enable_prefix_caching=True)
    manager.free(fill(manager, prompt(17)[:16]))  # all four blocks are cached now
    left = []
    for i in range(4):
        take(manager, 1, f"B{i}")
        left.append(probe(manager, prompt(17)))
    assert left == [3, 2, 1, 0]


def test_the_least_recently_used_is_overwritten_first():
    manager = BlockManager(4, 4, enable_prefix_caching=True)
    first, second = prompt(9, 1), prompt(9, 2)
    sequences = [fill(manager, tokens[:8]) for tokens in (first, second)]
    for sequence in sequences:
        manager.free(sequence)
    left = []
    for i in range(4):
        take(manager, 1, f"B{i}")
        left.append((probe(manager, first), probe(manager, second)))
    assert left == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_a_use_makes_a_block_young_again():
    manager = BlockManager(4, 4, enable_prefix_caching=True)
    old, young = prompt(9, 1), prompt(9, 2)
    for tokens in (old, young):
        manager.free(fill(manager, tokens[:8]))
    reader = Sequence("R", old)
    manager.adopt(reader, manager.match(reader))
    manager.free(reader)
    take(manager, 8, "B")
    assert (probe(manager, old), probe(manager, young)) == (2, 0)


def test_a_block_that_is_overwritten_is_forgotten():
    manager = BlockManager(2, 4, enable_prefix_caching=True)
    manager.free(fill(manager, prompt(8)))
    manager.free(fill(manager, prompt(8, 1)))
    assert probe(manager, prompt(8) + [0]) == 0
    assert probe(manager, prompt(8, 1) + [0]) == 2


@pytest.mark.parametrize("salt, other, blocks", [
    ("a", "a", 2), ("a", "b", 0), ("a", None, 0), (None, "a", 0), (None, None, 2),
])  # fmt: skip
def test_a_salt_separates(salt, other, blocks):
    manager = BlockManager(8, 4, enable_prefix_caching=True)
    fill(manager, prompt(9), salt=salt)
    assert probe(manager, prompt(9), other) == blocks


def test_two_salts_live_side_by_side():
    manager = BlockManager(8, 4, enable_prefix_caching=True)
    tables = [fill(manager, prompt(8), name, salt=name).block_table for name in ("a", "b")]
    assert not set(tables[0]) & set(tables[1])
    for salt in ("a", "b"):
        assert probe(manager, prompt(9), salt) == 2


def constant_hash(monkeypatch):
    monkeypatch.setattr(course_lib.prefix_cache, "hash_block", lambda parent_hash, token_ids, salt: 7)


def test_a_collision_is_never_trusted(monkeypatch):
    constant_hash(monkeypatch)
    manager = BlockManager(12, 4, enable_prefix_caching=True)
    fill(manager, prompt(9, 1))
    assert probe(manager, prompt(9, 2)) == 0, "other token ids"
    assert probe(manager, prompt(9, 1), salt="a") == 0, "another salt"
    assert probe(manager, prompt(9, 1)) <= 2, "less than it could be is allowed, more is not"
    same = prompt(4, 1)  # the first block that is cached, behind itself: the right tokens, another parent
    assert probe(manager, same + same + [0]) <= 1


def test_what_continues_a_collision_is_not_found_behind_the_other_block(monkeypatch):
    original = course_lib.prefix_cache.hash_block
    monkeypatch.setattr(course_lib.prefix_cache, "hash_block", lambda parent, *rest: original(parent, *rest) if parent else 7)
    manager = BlockManager(8, 4, enable_prefix_caching=True)
    x, y = prompt(8, 1), prompt(8, 2)  # their first blocks have one hash
    fill(manager, x, "X")
    fill(manager, y, "Y")
    assert probe(manager, x + [0]) == 2
    assert probe(manager, x[:4] + y[4:] + [0]) == 1, "Y's second block was computed behind Y's first"


@pytest.mark.parametrize("modulus", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [6, 12])
def test_outputs_are_right_when_hashes_collide(monkeypatch, modulus, num_blocks):
    original = course_lib.prefix_cache.hash_block
    monkeypatch.setattr(course_lib.prefix_cache, "hash_block", lambda *parts: original(*parts) % modulus)
    engine = make_engine(block_size=4, num_blocks=num_blocks, max_prefill_chunk_size=5, kv_watermark=0)
    base = prompt(8)
    prompts = [base + prompt(n, n) for n in (1, 3, 6)] + [prompt(10, 5), base + prompt(3, 3), prompt(10, 5)]
    for i, tokens in enumerate(prompts):
        engine.add_request(tokens, limit(6), request_id=str(i), cache_salt="s" if i == 4 else None)
        steps(engine, 2)
    last = run_to_end(engine)
    engine_outputs = {name: output.token_ids for name, output in last.items()}
    for i, tokens in enumerate(prompts):
        if str(i) in engine_outputs:
            assert engine_outputs[str(i)] == engine.runner.solo(tokens, 6)
    assert is_idle(engine)


def test_a_block_can_be_overwritten_while_what_continues_it_is_in_use():
    # A and B compute the same two blocks in one step; A's are the ones that the cache knows. When A has ended and
    # its first block is overwritten, B's copy, which the cache never knew, lives on; what the cache has of
    # blocks behind the overwritten one must be forgotten, although B may hold it.
    manager = BlockManager(9, 4, enable_prefix_caching=True)
    tokens = prompt(17)
    a, b = Sequence("A", tokens), Sequence("B", tokens)
    for sequence in (a, b):
        manager.allocate(sequence, 8)
        sequence.cached_token_count = 8
    manager.register(a)
    manager.register(b)
    manager.allocate(b, 12)
    b.cached_token_count = 12
    manager.register(b)  # B's third block continues A's second
    assert probe(manager, tokens) == 3
    manager.free(a)
    manager.allocate(b, 16)
    others = [take(manager, 1, f"N{i}") for i in range(manager.num_free)]  # A's two are overwritten
    assert probe(manager, tokens) == 0
    b.cached_token_count = 16
    manager.register(b)  # its fourth block continues what the cache doesn't know any more
    manager.check([b, *others])
    manager.free(b)
    assert probe(manager, tokens) == 0, "its beginning isn't in the cache, so its end can't be found"
    manager.check(others)
    assert (manager.num_free, manager.num_cached) == (4, 0)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_are_right_when_the_cache_is_overwritten_all_the_time(seed):
    engine = make_engine(block_size=4, num_blocks=9, max_prefill_chunk_size=8, max_num_batched_tokens=16, max_num_seqs=4)
    engine.block_manager.shuffle_free_blocks(seed)
    shared = prompt(12, seed)
    expected, outputs = {}, {}
    for i in range(20):
        tokens = shared[: 4 * (i % 4)] + prompt(1 + i % 7, i % 3)
        expected[engine.add_request(tokens, limit(5))] = engine.runner.solo(tokens, 5)
        outputs |= {o.request_id: o for o in steps(engine, i % 5) if o.finished}
    outputs |= run_to_end(engine)
    assert {name: output.token_ids for name, output in outputs.items()} == expected
    assert any(output.num_cached_tokens for output in outputs.values())


def test_many_chunks_cost_no_more_than_few(monkeypatch):
    """Each full block is hashed once for each match and once when it is registered, however many chunks there are."""
    hashed = []
    original = course_lib.prefix_cache.hash_block

    def spy(*parts):
        hashed.append(1)
        return original(*parts)

    monkeypatch.setattr(course_lib.prefix_cache, "hash_block", spy)
    engine = make_engine(max_prefill_chunk_size=16)
    engine.add_request(prompt(1600), limit(1))
    run_to_end(engine)
    assert len(hashed) <= 2 * 100 + 10  # 100 blocks in 100 chunks

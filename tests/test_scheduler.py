"""The scheduler's decisions, step by step: budgets, order, reasons, preemption, progress, policies.

Steps are written as {request: tokens}. Blocks are of 16 tokens unless said.
"""

import random

import pytest
from helpers import Watch, is_idle, limit, make_engine, prompt, run_to_end, step, steps

from course_lib.config import POLICY_NAMES
from course_lib.policies import FairShare, Policy, Priority, ShortestFirst
from course_lib.scheduler import REASONS


def engine_and_watch(**settings):
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("enable_prefix_caching", False)
    engine = make_engine(**settings)
    return engine, Watch(engine)


def add(engine, name, num_tokens, max_tokens=1, **request):
    engine.add_request(prompt(num_tokens, sum(map(ord, name))), limit(max_tokens), request_id=name, **request)


def make_running(engine, count, max_tokens=1000):
    """`count` requests of one prompt token, all RUNNING: r0, r1 …"""
    for i in range(count):
        add(engine, f"r{i}", 1, max_tokens)
    while len(engine.scheduler.running) < count:
        step(engine)


def blocks_of(engine, name):
    return len(engine.snapshot()[name].block_table)


# --- the worked values ---


def test_left_over_budget_goes_to_the_next_prompt_and_decodes_run_beside_it():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=64)
    for name in "ABC":
        add(engine, name, 40, max_tokens=3)
    run_to_end(engine)
    assert watch.scheduled() == [
        {"A": 40, "B": 24},
        {"A": 1, "B": 16, "C": 40},  # decode first, then what was begun, then the next
        {"A": 1, "B": 1, "C": 1},
        {"B": 1, "C": 1},
    ]
    assert [list(tokens) for tokens in watch.scheduled()][1] == ["A", "B", "C"]


def test_the_budget_cuts_a_chunk():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=128)
    add(engine, "A", 150)
    run_to_end(engine)
    assert watch.scheduled() == [{"A": 64}, {"A": 64}, {"A": 22}]


def test_the_end_of_one_prompt_and_the_beginning_of_the_next_share_a_step():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=64)
    add(engine, "A", 70)
    add(engine, "B", 200)
    run_to_end(engine)
    assert watch.scheduled()[:2] == [{"A": 64}, {"A": 6, "B": 58}]


def test_decode_takes_its_token_out_of_every_chunk_of_a_long_prompt():
    engine, watch = engine_and_watch(max_num_batched_tokens=128, max_prefill_chunk_size=128)
    make_running(engine, 1)
    add(engine, "B", 1000)
    before = len(watch.outputs)
    outputs = [step(engine) for _ in range(8)]
    # 7 × 127 + 111 = 1000
    assert watch.scheduled()[before:] == [{"r0": 1, "B": 127}] * 7 + [{"r0": 1, "B": 111}]
    assert all("r0" in [o.request_id for o in out] for out in outputs)
    assert [o.request_id for o in outputs[-1]] == ["r0", "B"]


def test_a_prompt_of_8192_takes_8_chunks_of_1024_and_gives_a_token_after_the_last():
    engine, watch = engine_and_watch(num_blocks=520, max_num_batched_tokens=1024, max_prefill_chunk_size=1024)
    add(engine, "A", 8192)
    assert steps(engine, 7) == []
    (output,) = step(engine)
    assert [out.chunks[0].start_pos for out in watch.outputs] == list(range(0, 8192, 1024))
    assert output.token_ids == engine.runner.solo(prompt(8192, ord("A")), 1)


def test_chunks_of_a_prompt_begin_behind_its_cached_part():
    engine, watch = engine_and_watch(
        num_blocks=800, enable_prefix_caching=True, max_num_batched_tokens=1000, max_prefill_chunk_size=1000
    )
    tokens = prompt(12000)
    engine.generate([tokens[:8000]], limit(1))  # 8000 = 500 full blocks
    warm = len(watch.outputs)
    engine.add_request(tokens, limit(1), request_id="A")
    output = run_to_end(engine)["A"]
    chunks = [c for out in watch.outputs[warm:] for c in out.chunks]
    assert [(c.start_pos, c.num_tokens) for c in chunks] == [(8000 + 1000 * i, 1000) for i in range(4)]
    assert (output.num_cached_tokens, output.token_ids) == (8000, engine.runner.solo(tokens, 1))


@pytest.mark.parametrize("cancel_after", [1, 2, 3, 4])
def test_blocks_are_allocated_chunk_by_chunk(cancel_after):
    engine, _ = engine_and_watch(max_prefill_chunk_size=256)
    add(engine, "A", 1000, max_tokens=9)
    held = []
    for _ in range(cancel_after):
        step(engine)
        held.append(blocks_of(engine, "A"))
    assert held == [16, 32, 48, 63][:cancel_after]  # 256 / 16 each; ceil(1000 / 16) = 63 in all
    engine.cancel("A")
    assert engine.block_manager.num_free == engine.block_manager.num_blocks


def test_whole_prefill_refuses_a_prompt_longer_than_the_budget():
    engine, _ = engine_and_watch(max_prefill_chunk_size=None, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=r"65.*64"):
        add(engine, "A", 65)
    add(engine, "B", 64)
    assert len(step(engine)) == 1


@pytest.mark.parametrize("length, max_tokens", [(64, 1), (60, 10), (15, 2), (16, 1), (16, 2), (1, 33)])
def test_a_request_peaks_at_the_blocks_of_the_positions_it_writes(length, max_tokens):
    engine, _ = engine_and_watch(max_prefill_chunk_size=25)
    add(engine, "A", length, max_tokens)
    run_to_end(engine)
    # the last token is never written
    assert max(record.blocks_used for record in engine.trace.steps) == -(-(length + max_tokens - 1) // 16)


# --- budgets ---


def test_decode_is_scheduled_before_prefill():
    engine, watch = engine_and_watch(max_num_batched_tokens=8, max_num_seqs=8)
    make_running(engine, 5)
    add(engine, "P", 100)
    step(engine)
    assert list(watch.scheduled()[-1].items()) == [*((f"r{i}", 1) for i in range(5)), ("P", 3)]


def test_chunks_are_shrunk_to_what_is_left_of_the_budget():
    engine, watch = engine_and_watch(max_num_batched_tokens=10, max_prefill_chunk_size=8)
    for name in "ABC":
        add(engine, name, 8)
    run_to_end(engine)
    assert watch.scheduled() == [{"A": 8, "B": 2}, {"B": 6, "C": 4}, {"C": 4}]


@pytest.mark.parametrize("running, share, budget, cap", [
    (7, 0.5, 8, 4),
    (7, 0.4, 8, 3),  # floor(3.2)
    (4, 0.01, 8, 1),  # never less than 1
    (7, 0.25, 12, 3),
    (7, 0.99, 8, 7),
    (6, 0.99, 8, 6),  # the share of 7 is more than they need
])  # fmt: skip
def test_decode_takes_turns_when_it_may_not_use_the_whole_budget(running, share, budget, cap):
    engine, watch = engine_and_watch(max_num_batched_tokens=budget, max_num_seqs=8, max_decode_share=share)
    make_running(engine, running)
    add(engine, "P", 3000)  # takes all that decode leaves for the next 40 steps, so nothing is given back
    before = len(watch.outputs)
    steps(engine, 40)
    last = dict.fromkeys((f"r{i}" for i in range(running)), -1)
    bound = -(-running // cap)
    for number, (tokens, reasons) in enumerate(zip(watch.scheduled()[before:], watch.reasons()[before:], strict=True)):
        decodes = set(tokens) - {"P"}
        assert len(decodes) == cap and tokens["P"] == budget - cap
        assert reasons == dict.fromkeys(set(last) - decodes, "decode_share")
        last |= dict.fromkeys(decodes, number)
        assert all(number - since < bound for since in last.values()), f"more than ceil({running} / {cap}) steps"


def test_those_that_have_gone_longest_without_a_token_come_first():
    engine, watch = engine_and_watch(max_num_batched_tokens=8, max_num_seqs=6, max_decode_share=0.25)
    make_running(engine, 5)
    add(engine, "P", 1000)
    before = len(watch.outputs)
    steps(engine, 5)
    # 2 of 5 a step; ties in order of arrival
    turns = [[name for name in tokens if name != "P"] for tokens in watch.scheduled()[before:]]
    assert turns == [["r0", "r1"], ["r2", "r3"], ["r0", "r4"], ["r1", "r2"], ["r0", "r3"]]


def test_what_prefill_leaves_goes_back_to_decode():
    engine, watch = engine_and_watch(max_num_batched_tokens=8, max_num_seqs=8, max_decode_share=0.25)
    make_running(engine, 6)
    add(engine, "P", 3)
    before = len(watch.outputs)
    step(engine)
    # decode may take 2, the prompt takes 3, and of the 3 that are left three more decodes get one each
    assert watch.scheduled()[before] == {"r0": 1, "r1": 1, "P": 3, "r2": 1, "r3": 1, "r4": 1}
    assert watch.reasons()[before] == {"r5": "decode_share"}


def test_the_decode_share_counts_only_while_prefill_waits():
    engine, watch = engine_and_watch(max_num_batched_tokens=8, max_num_seqs=8, max_decode_share=0.25)
    make_running(engine, 6)
    before = len(watch.outputs)
    step(engine)
    assert watch.scheduled()[before] == {f"r{i}": 1 for i in range(6)}


def test_left_over_budget_is_given_back_at_nobodys_expense():
    # 4 blocks of 4; three requests fill one each, so each needs another one for its next token.
    engine, watch = engine_and_watch(
        block_size=4, num_blocks=4, max_num_batched_tokens=12, max_decode_share=0.1, kv_watermark=0
    )
    for i in range(3):
        add(engine, f"r{i}", 4, 9)
    step(engine)
    add(engine, "P", 3)
    step(engine)
    # decode may take 1 token: r0 gets it, and the last block. 11 tokens are left and no one can use them.
    assert watch.scheduled()[1] == {"r0": 1} and watch.preempted()[1] == []
    assert watch.reasons()[1] == {"P": "kv_blocks", "r1": "kv_blocks", "r2": "kv_blocks"}
    run_to_end(engine)


def test_the_watermark_is_left_free_by_an_admission():
    # 20 blocks, watermark 0.1: 2 of them. A holds 10.
    for need, goes_in in ((8, True), (9, False)):
        engine, watch = engine_and_watch(num_blocks=20, kv_watermark=0.1)
        add(engine, "A", 159, 3)
        step(engine)
        assert blocks_of(engine, "A") == 10
        add(engine, "B", need * 16 - 1)
        step(engine)
        assert ("B" in watch.scheduled()[1]) == goes_in
        assert watch.reasons()[1] == ({} if goes_in else {"B": "kv_blocks"})
        run_to_end(engine)
        assert is_idle(engine)


def test_the_watermark_is_rounded_down_and_not_asked_for_in_an_empty_pool():
    engine, watch = engine_and_watch(num_blocks=19, kv_watermark=0.1)  # floor(1.9) = 1
    add(engine, "A", 18 * 16)  # 18 + 1 = 19 blocks
    run_to_end(engine)
    engine, watch = engine_and_watch(num_blocks=4, kv_watermark=0.5, max_prefill_chunk_size=32)
    add(engine, "B", 63, 1)  # its first chunk needs 2 blocks and leaves 2, its second takes the rest
    run_to_end(engine, max_steps=2)


def test_only_what_was_begun_may_take_the_watermark():
    engine, watch = engine_and_watch(num_blocks=4, kv_watermark=0.5, max_prefill_chunk_size=16, max_num_batched_tokens=16)
    add(engine, "A", 63)
    add(engine, "B", 16)
    run_to_end(engine)
    assert watch.scheduled() == [{"A": 16}, {"A": 16}, {"A": 16}, {"A": 15}, {"B": 16}]


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_partial_prefill_cap_bounds_the_half_filled(cap, policy):
    engine, watch = engine_and_watch(
        max_num_batched_tokens=64, max_prefill_chunk_size=16, max_num_partial_prefills=cap, policy=policy
    )
    for i in range(6):
        add(engine, f"p{i}", 40 + 16 * (i % 3), 2)
    most = 0
    while engine.has_unfinished_requests():
        step(engine)
        most = max(most, len(engine.scheduler.prefilling))
    assert most == cap


def test_a_prompt_of_one_chunk_does_not_count_as_half_filled():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=16, max_num_partial_prefills=1)
    add(engine, "long", 100)
    add(engine, "short", 16)
    add(engine, "long2", 100)
    step(engine)
    assert watch.scheduled() == [{"long": 16, "short": 16}]
    assert watch.reasons() == [{"long2": "partial_prefill_cap"}]


def test_a_prompt_that_is_done_makes_room_for_another_half_filled_one_in_the_same_step():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=16, max_num_partial_prefills=1)
    add(engine, "A", 20)
    add(engine, "B", 40)
    steps(engine, 2)
    assert watch.scheduled() == [{"A": 16}, {"A": 4, "B": 16}]


# --- reasons ---


def test_reason_seq_budget():
    engine, watch = engine_and_watch(max_num_seqs=2)
    make_running(engine, 2)
    add(engine, "W", 5)
    add(engine, "X", 5)
    step(engine)
    assert watch.reasons()[-1] == {"W": "seq_budget", "X": "seq_budget"}


def test_reason_token_budget():
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy="waiting_first")
    add(engine, "A", 40)
    step(engine)
    add(engine, "B", 16)
    add(engine, "C", 16)
    step(engine)
    assert watch.scheduled()[-1] == {"B": 16}
    assert watch.reasons()[-1] == {"C": "token_budget", "A": "token_budget"}


def test_reason_token_budget_for_a_whole_prompt_that_does_not_fit_in_this_step():
    engine, watch = engine_and_watch(max_prefill_chunk_size=None, max_num_batched_tokens=64)
    add(engine, "A", 40)
    add(engine, "B", 30)
    add(engine, "C", 10)  # would fit, but WAITING is first come, first served
    step(engine)
    assert watch.scheduled() == [{"A": 40}]
    assert watch.reasons() == [{"B": "token_budget", "C": "queue"}]


def test_reason_kv_blocks_and_queue():
    engine, watch = engine_and_watch(num_blocks=10)
    add(engine, "A", 100, 3)  # 7 of 10 blocks
    step(engine)
    add(engine, "B", 64)  # needs 4
    add(engine, "C", 16)  # would fit, but is behind B
    step(engine)
    assert watch.scheduled()[-1] == {"A": 1}
    assert watch.reasons()[-1] == {"B": "kv_blocks", "C": "queue"}


def test_reason_partial_prefill_cap():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_prefill_chunk_size=16, max_num_partial_prefills=1)
    add(engine, "A", 100)
    add(engine, "B", 100)
    step(engine)
    assert watch.reasons() == [{"B": "partial_prefill_cap"}]


def test_reason_decode_share():
    engine, watch = engine_and_watch(max_num_batched_tokens=4, max_num_seqs=4, max_decode_share=0.5)
    make_running(engine, 3)
    add(engine, "P", 40)
    step(engine)
    assert watch.reasons()[-1] == {"r2": "decode_share"}


@pytest.mark.parametrize("max_num_seqs, budget, cap, reason", [
    (1, 16, 1, "seq_budget"),  # no place, no tokens, no more half-filled ones, no blocks
    (2, 16, 1, "token_budget"),
    (2, 32, 1, "partial_prefill_cap"),
    (2, 32, 2, "kv_blocks"),
])  # fmt: skip
def test_of_several_reasons_the_first_is_given(max_num_seqs, budget, cap, reason):
    engine, watch = engine_and_watch(
        num_blocks=3, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_prefill_chunk_size=16,
        max_num_partial_prefills=cap, kv_watermark=0.7,
    )  # fmt: skip
    add(engine, "A", 40)  # takes 1 block and leaves 2
    add(engine, "B", 40)  # would need 1 block and floor(0.7 × 3) = 2 left over
    step(engine)
    assert watch.reasons() == [{"B": reason}]


def test_snapshot_and_trace_say_why_a_request_waits():
    engine, _ = engine_and_watch(num_blocks=10)
    add(engine, "A", 100, 3)
    step(engine)
    add(engine, "B", 64)
    add(engine, "C", 16)
    assert [engine.snapshot()[name].reason for name in "ABC"] == [None, None, None]  # no step has passed them over yet
    step(engine)
    assert [engine.snapshot()[name].reason for name in "ABC"] == [None, "kv_blocks", "queue"]
    assert engine.trace.reasons_at(1) == {"B": "kv_blocks", "C": "queue"}
    run_to_end(engine)
    assert engine.trace.reasons_at(len(engine.trace.steps) - 1) == {}


def test_a_request_that_a_policy_leaves_out_has_a_reason_too():
    class OnlyTheFirst(Policy):
        def order(self, prefilling, waiting, step):
            return [*prefilling, *waiting][:1]

    engine = make_engine(policy=OnlyTheFirst())
    seen = []
    engine.on_step = lambda out: seen.append(dict(out.reasons))
    add(engine, "A", 10)
    add(engine, "B", 10)
    engine.step()
    assert seen[0].get("B") in REASONS


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_unfinished_request_gets_tokens_or_one_reason(policy):
    seen = set()
    for seed in range(30):
        rng = random.Random(seed)
        budget = (4, 16, 40)[seed % 3]
        engine = make_engine(
            block_size=4, num_blocks=rng.choice([12, 24]), max_num_seqs=(4, 2)[seed % 4 == 3],
            max_num_batched_tokens=budget, max_prefill_chunk_size=(3, 16, 3, None)[seed % 4], kv_watermark=0.1,
            max_decode_share=(0.1, 1.0)[seed % 2], max_num_partial_prefills=(1, None)[seed // 2 % 2], policy=policy,
            enable_prefix_caching=seed // 4 % 2 == 0,
        )  # fmt: skip
        watch = Watch(engine)  # checks each step: exactly the unfinished ones have tokens or a reason
        for i in range(10):
            length = min(rng.randint(1, 40), budget if engine.config.max_prefill_chunk_size is None else 40)
            engine.add_request(prompt(length, i), limit(rng.randint(1, 8)), priority=i % 3)
            steps(engine, rng.randint(0, 2))
        run_to_end(engine)
        seen |= {reason for reasons in watch.reasons() for reason in reasons.values()}
    assert seen == set(REASONS), "these runs meet every reason"


# --- preemption and progress ---


def full_pool(names="ABC", size=4, **settings):
    """Requests that hold two full blocks each, of a pool with no more: each needs a block for its next token."""
    settings.setdefault("kv_watermark", 0)
    engine, watch = engine_and_watch(block_size=size, num_blocks=2 * len(names), **settings)
    for name in names:
        add(engine, name, 2 * size, 6)
    step(engine)
    assert engine.block_manager.num_free == 0
    return engine, watch


def test_the_newest_holder_gives_way():
    engine, watch = full_pool()
    step(engine)
    # C's two blocks serve A and B
    assert watch.preempted()[1] == ["C"] and watch.scheduled()[1] == {"A": 1, "B": 1}
    assert watch.reasons()[1] == {"C": "kv_blocks"}
    last = run_to_end(engine)
    for name in "ABC":
        assert last[name].token_ids == engine.runner.solo(prompt(8, ord(name)), 6)


def test_the_newest_holder_gives_way_even_if_it_is_half_filled():
    engine, watch = engine_and_watch(block_size=4, num_blocks=4, max_prefill_chunk_size=4, kv_watermark=0)
    add(engine, "A", 4, 9)
    step(engine)
    add(engine, "B", 12)
    steps(engine, 2)  # A takes its 2nd block, B its 1st and 2nd: the pool of 4 is full
    assert engine.snapshot()["B"].status == "PREFILLING" and engine.block_manager.num_free == 0
    while not watch.preempted()[-1]:
        step(engine)
        assert "A" in watch.scheduled()[-1]
    assert watch.preempted()[-1] == ["B"]
    assert run_to_end(engine)["B"].token_ids == engine.runner.solo(prompt(12, ord("B")), 1)


def test_a_request_that_is_itself_the_newest_gives_way_and_the_others_get_their_token():
    # A and B have room in their second blocks, C's is full.
    engine, watch = engine_and_watch(block_size=4, num_blocks=6, kv_watermark=0)
    for name, length in (("A", 6), ("B", 6), ("C", 8)):
        add(engine, name, length, 5)
    step(engine)
    step(engine)
    assert watch.preempted()[1] == ["C"]
    assert watch.scheduled()[1] == {"A": 1, "B": 1}


def test_seniority_is_arrival_also_behind_a_preemption():
    engine, watch = engine_and_watch(block_size=4, num_blocks=6, kv_watermark=0)
    for name in "ABC":
        add(engine, name, 5, 12)
    step(engine)
    engine.preempt("A")  # and it comes back at the front, before newer ones
    add(engine, "D", 5)
    run_to_end(engine)
    victims = [name for names in watch.preempted() for name in names]
    assert victims and "A" not in victims, "A is the oldest, whenever it was admitted last"


def test_preempted_requests_wait_in_front_in_order_of_arrival():
    engine, _ = engine_and_watch()
    make_running(engine, 4)
    add(engine, "W", 5)
    for name in ("r2", "r0", "r3", "r1"):
        engine.preempt(name)
    assert [s.request_id for s in engine.scheduler.waiting] == ["r0", "r1", "r2", "r3", "W"]


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine, watch = engine_and_watch(block_size=4, num_blocks=8, kv_watermark=0)
    add(engine, "A", 4, 9)
    add(engine, "B", 28, 9)  # 1 + 7 blocks
    step(engine)
    add(engine, "W", 4)
    step(engine)
    # A's next token takes B's blocks: 6 are free now, and W, who needs one, has to wait all the same
    assert watch.preempted()[1] == ["B"]
    assert watch.scheduled()[1] == {"A": 1} and engine.block_manager.num_free == 6
    assert watch.reasons()[1] == {"B": "kv_blocks", "W": "queue"}


def test_a_preempted_request_comes_back_when_all_its_known_tokens_fit():
    engine, _ = engine_and_watch(block_size=4, num_blocks=8, max_prefill_chunk_size=4, kv_watermark=0)
    add(engine, "A", 12, 15)  # 3 blocks, in the end ceil(26 / 4) = 7
    add(engine, "B", 16, 5)
    came_back, passed_over = [], []

    def look(output):
        for sequence in engine.scheduler.waiting:
            if sequence.num_preemptions and sequence not in output.preempted:
                found = engine.block_manager.num_free + len(sequence.block_table)  # free blocks before its chunk
                (came_back if sequence in output.admitted else passed_over).append((found, sequence.known_token_count))

    engine.on_step = look
    run_to_end(engine)
    assert came_back and all(4 * found >= known for found, known in came_back)
    assert passed_over and all(4 * found < known for found, known in passed_over)
    assert max(found for found, _ in passed_over) >= 1, "its first chunk of 4 would have fitted"


def test_nobody_behind_a_chunk_without_blocks_gets_prefill():
    engine, watch = engine_and_watch(block_size=4, num_blocks=8, max_prefill_chunk_size=8, kv_watermark=0)
    add(engine, "A", 12, 9)
    steps(engine, 2)
    add(engine, "B", 20, 2)
    steps(engine, 2)
    before = len(watch.outputs)
    stopped = 0
    for i in range(30):
        add(engine, f"small{i}", 2)
        step(engine)
        reasons, tokens = watch.reasons()[-1], watch.scheduled()[-1]
        if reasons.get("B") == "kv_blocks":
            stopped += 1
            assert not any(name.startswith("small") for name in tokens)
    assert stopped and len(watch.outputs) > before
    last = run_to_end(engine)
    assert all(o.finished for o in last.values())


def test_when_blocks_stop_everyone_the_oldest_holder_takes_what_is_free():
    # A and B are half-filled, 1 block is free, and A's next chunk needs 2.
    engine, watch = engine_and_watch(
        block_size=4, num_blocks=5, max_prefill_chunk_size=8, max_num_batched_tokens=16, kv_watermark=0
    )
    add(engine, "A", 19)
    add(engine, "B", 16)
    steps(engine, 3)
    assert watch.scheduled() == [{"A": 8, "B": 8}, {"A": 4}, {"A": 7}]
    assert watch.reasons()[1] == {"B": "queue"}
    assert watch.preempted() == [[], [], ["B"]]  # in the 3rd step no block is free: the newest holder gives way
    last = run_to_end(engine)
    assert last["B"].token_ids == engine.runner.solo(prompt(16, ord("B")), 1)


def test_the_progress_rule_keeps_within_the_token_budget():
    # 10 blocks of 4, two prompts of 38; a share of 6 each leads to 18 + 18 tokens in 5 + 5 blocks.
    engine, watch = engine_and_watch(
        block_size=4, num_blocks=10, max_num_batched_tokens=12, policy="fair_share", kv_watermark=0
    )
    add(engine, "A", 38)
    add(engine, "B", 38)
    steps(engine, 6)
    assert watch.scheduled()[:3] == [{"A": 6, "B": 6}] * 3
    # 2 tokens fit in A's last block; then B gives way, and A gets 12 of its last 18, then 6
    assert watch.scheduled()[3:] == [{"A": 2}, {"A": 12}, {"A": 6}]
    assert watch.preempted()[3:] == [[], ["B"], []]


def test_a_recomputation_longer_than_the_budget_is_cut_when_prompts_go_in_whole():
    engine, watch = engine_and_watch(max_prefill_chunk_size=None, max_num_batched_tokens=16)
    add(engine, "A", 16, 30)
    steps(engine, 21)
    engine.preempt("A")  # 16 + 21 = 37 known tokens: 16 + 16 + 5
    before = len(watch.outputs)
    assert steps(engine, 2) == []
    assert len(step(engine)) == 1
    assert watch.scheduled()[before:] == [{"A": 16}, {"A": 16}, {"A": 5}]
    assert run_to_end(engine)["A"].token_ids == engine.runner.solo(prompt(16, ord("A")), 30)


def test_between_two_preemptions_of_a_request_another_one_has_ended():
    preempted = 0
    for seed in range(20):
        rng = random.Random(seed)
        engine, watch = engine_and_watch(
            block_size=rng.choice([1, 4]), num_blocks=rng.choice([12, 20, 30]), max_num_seqs=rng.choice([3, 6]),
            max_num_batched_tokens=rng.choice([8, 16, 40]), max_prefill_chunk_size=rng.choice([3, 8, 16]),
            kv_watermark=rng.choice([0.0, 0.1]), max_decode_share=rng.choice([1.0, 0.5]),
            max_num_partial_prefills=rng.choice([None, 1, 2]),
        )  # fmt: skip
        longest = engine.max_model_len - 1
        to_come, ended, ended_before = 40, 0, {}
        while to_come or engine.has_unfinished_requests():
            if to_come and rng.random() < 0.5:
                to_come -= 1
                engine.add_request(prompt(min(longest, rng.randint(1, 30)), to_come), limit(rng.randint(1, 25)))
            before = len(watch.outputs)
            outputs = step(engine)
            for name in (name for names in watch.preempted()[before:] for name in names):
                preempted += 1
                assert ended_before.get(name) != ended, f"{name} was preempted twice, and no one ended in between"
                ended_before[name] = ended
            ended += sum(output.finished for output in outputs)
        assert is_idle(engine)
    assert preempted > 250, "there was something to see"


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_oldest_request_is_never_given_up_for_a_younger_one(policy, prefix_caching):
    engine, watch = engine_and_watch(
        block_size=4, num_blocks=10, max_num_batched_tokens=16, max_prefill_chunk_size=8, policy=policy,
        enable_prefix_caching=prefix_caching,
    )  # fmt: skip
    for i in range(12):
        add(engine, f"q{i}", 5 + 2 * (i % 5), 10)
    while engine.has_unfinished_requests():
        holders = engine.scheduler.prefilling + engine.scheduler.running
        oldest = min(holders, key=lambda s: s.arrival, default=None)
        step(engine)
        if oldest is not None and len(holders) > 1:
            assert oldest.request_id not in watch.preempted()[-1]


# --- policies ---


def prefill_order(watch, since=0):
    return [[c.sequence.request_id for c in out.chunks if c.kind == "prefill"] for out in watch.outputs[since:]]


def test_prefilling_first_gives_nothing_to_a_later_prompt_while_an_older_one_could_use_it():
    engine, watch = engine_and_watch(max_num_batched_tokens=32, max_prefill_chunk_size=20)
    for i, length in enumerate((50, 7, 33, 90, 1)):
        add(engine, f"p{i}", length)
    run_to_end(engine)
    for out in watch.outputs:
        names = [c.sequence.request_id for c in out.chunks]
        assert names == sorted(names)
        for chunk in out.chunks[:-1]:  # whoever isn't the last took all that it could
            assert chunk.is_last or chunk.num_tokens == 20


def test_prefilling_first_finishes_what_was_begun():
    engine, watch = engine_and_watch(max_num_batched_tokens=16)
    add(engine, "A", 40)
    step(engine)
    add(engine, "B", 4)
    run_to_end(engine)
    assert watch.scheduled() == [{"A": 16}, {"A": 16}, {"A": 8, "B": 4}]


def test_waiting_first_starves_what_was_begun_and_says_so():
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy="waiting_first")
    add(engine, "A", 1000)
    step(engine)
    for i in range(50):  # a newcomer a step, each of which takes the whole budget
        add(engine, f"new{i}", 16)
        step(engine)
        assert watch.scheduled()[-1] == {f"new{i}": 16}
        assert watch.reasons()[-1] == {"A": "token_budget"}
        assert blocks_of(engine, "A") == 1, "and it holds its blocks all the while"
    assert "A" in run_to_end(engine), "when no one new comes, it goes on"


def test_shortest_first_serves_the_fewest_tokens_left():
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy="shortest_first")
    for name, length in (("long", 40), ("short", 8), ("middle", 16)):
        add(engine, name, length)
    run_to_end(engine)
    assert watch.scheduled() == [{"short": 8, "middle": 8}, {"middle": 8, "long": 8}, {"long": 16}, {"long": 16}]


def test_priority_serves_the_lowest_number_first_and_ties_by_arrival():
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy="priority")
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        add(engine, name, 16, priority=priority)
    run_to_end(engine)
    assert [list(tokens) for tokens in watch.scheduled()] == [["c"], ["b"], ["d"], ["a"]]


@pytest.mark.parametrize("policy", [ShortestFirst(max_age=10), Priority(max_age=10)])
def test_an_aged_request_goes_before_all_that_came_after_it(policy):
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy=policy)
    add(engine, "long", 160, priority=1)
    for i in range(30):  # a more urgent one a step, each of which takes the whole budget
        add(engine, f"new{i}", 16, priority=0)
        step(engine)
    served = [list(tokens) for tokens in watch.scheduled()]
    # it arrived before step 0, so it is 10 steps old in step 10; from then on its 160 tokens take 10 steps
    assert served[:10] == [[f"new{i}"] for i in range(10)]
    assert served[10:20] == [["long"]] * 10


def test_age_counts_from_arrival_not_from_the_last_chunk():
    # Were it counted from the last chunk, the long one would be young again after each of its chunks.
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy=ShortestFirst(max_age=5))
    add(engine, "long", 80)
    step(engine)
    assert watch.scheduled() == [{"long": 16}]
    for i in range(20):
        add(engine, f"new{i}", 16)
        step(engine)
    served = [list(tokens)[0] for tokens in watch.scheduled()]
    assert served[1:5] == [f"new{i}" for i in range(4)]
    assert served[5:9] == ["long"] * 4  # aged in step 5, then 64 tokens in a row
    # new0 … new3 were done; new4, 5 … are served by age from their arrival too
    assert served[9:12] == ["new4", "new5", "new6"]


def test_aged_requests_are_served_by_arrival():
    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy=Priority(max_age=1))
    for i, priority in enumerate((9, 5, 7)):
        add(engine, f"p{i}", 32, priority=priority)
    step(engine)
    assert list(watch.scheduled()[0]) == ["p1"], "nobody has aged: the most urgent"
    steps(engine, 5)
    assert [list(tokens) for tokens in watch.scheduled()[1:]] == [["p0"], ["p0"], ["p1"], ["p2"], ["p2"]]


@pytest.mark.parametrize("budget, lengths, expected", [
    (64, (1000, 1000), (32, 32)),  # 64 / 2
    (64, (3, 1000), (3, 61)),  # what the first can't use goes to the next
    (64, (1000, 3), (32, 3)),  # in the order of arrival, so the first can't know
    (64, (1000,) * 8, (16, 16, 16, 16)),  # never less than min(16, 32): four get a block each
    (64, (1000,) * 3, (22, 21, 21)),  # ceil(64 / 3) = 22, ceil(42 / 2) = 21
    (16, (1000,) * 8, (8, 8)),  # never less than min(16, 8)
    (8, (1000,) * 3, (4, 4)),
    (100, (10, 10, 10, 1000), (10, 10, 10, 70)),
])  # fmt: skip
def test_fair_share_splits_the_budget_but_does_not_shred_it(budget, lengths, expected):
    engine, watch = engine_and_watch(max_num_batched_tokens=budget, policy="fair_share")
    for i, length in enumerate(lengths):
        add(engine, f"p{i}", length)
    step(engine)
    assert tuple(watch.scheduled()[0].values()) == expected


def test_fair_share_counts_only_those_that_can_still_get_a_chunk():
    engine, watch = engine_and_watch(max_num_batched_tokens=64, max_num_seqs=2, policy="fair_share")
    for i in range(5):
        add(engine, f"p{i}", 1000)
    step(engine)
    assert watch.scheduled() == [{"p0": 32, "p1": 32}], "the other three have no place, so they don't count"


def test_fair_share_serves_first_who_has_gone_longest_without_a_chunk():
    engine, watch = engine_and_watch(max_num_batched_tokens=32, policy="fair_share")
    for i in range(5):
        add(engine, f"p{i}", 1000)
    steps(engine, 5)
    assert prefill_order(watch) == [["p0", "p1"], ["p2", "p3"], ["p4", "p0"], ["p1", "p2"], ["p3", "p0"]]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("budget, running", [(8, 0), (16, 0), (40, 0), (32, 8), (100, 8)])
def test_fair_share_gives_each_of_c_candidates_a_chunk_within_c_steps(count, budget, running):
    if running + count > budget:
        pytest.skip("not within the sequence budget")
    engine, watch = engine_and_watch(
        max_num_batched_tokens=budget, max_num_seqs=running + count, policy="fair_share", num_blocks=512
    )
    make_running(engine, running)
    for i in range(count):
        add(engine, f"p{i}", 900 + i)
    before, last = len(watch.outputs), {f"p{i}": -1 for i in range(count)}
    for number in range(60):
        step(engine)
        for name in prefill_order(watch, before)[number]:
            last[name] = number
        if engine.scheduler.prefilling == []:
            break
        unfinished = {s.request_id for s in engine.scheduler.prefilling + engine.scheduler.waiting}
        assert all(number - last[name] < count for name in unfinished & set(last))


@pytest.mark.parametrize("policy", sorted(set(POLICY_NAMES)))
def test_every_policy_serves_everyone_in_the_end(policy):
    engine, watch = engine_and_watch(max_num_batched_tokens=16, max_prefill_chunk_size=8, policy=policy, num_blocks=12)
    expected = {}
    for i in range(12):
        tokens = prompt(3 + 13 * (i % 4), i)
        engine.add_request(tokens, limit(4), request_id=f"p{i}", priority=-i)
        expected[f"p{i}"] = engine.runner.solo(tokens, 4)
        step(engine)
    last = run_to_end(engine)
    assert all(last[name].token_ids == tokens for name, tokens in expected.items() if name in last)
    assert is_idle(engine)


def test_a_policy_of_ones_own_needs_an_order_method_only():
    class NewestFirst:
        def order(self, prefilling, waiting, step):
            return [*prefilling, *waiting][::-1]

    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy=NewestFirst())
    for name in "AB":
        add(engine, name, 16)
    run_to_end(engine)
    assert watch.scheduled() == [{"B": 16}, {"A": 16}]
    assert engine.trace.to_json(), "and the trace can still be saved"


def test_a_policy_of_ones_own_may_cap_each_share():
    class AtMostFive(FairShare):
        def share(self, budget, left, candidates, block_size):
            return 5

    engine, watch = engine_and_watch(max_num_batched_tokens=16, policy=AtMostFive())
    for i in range(4):
        add(engine, f"p{i}", 20)
    step(engine)
    assert watch.scheduled() == [{"p0": 5, "p1": 5, "p2": 5, "p3": 1}]


def test_under_fair_share_newcomers_do_not_push_aside_what_was_begun():
    # Two newcomers of one share each in every step would take the whole budget of 16 (shares of 8) for ever.
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8, policy="fair_share", enable_prefix_caching=False)
    engine.add_request(prompt(100), limit(1), request_id="A")
    waited, longest = 0, 0
    for number in range(200):
        if "A" not in engine.snapshot():
            break
        for which in "xy":
            engine.add_request(prompt(8, number), limit(1), request_id=f"{which}{number}")
        candidates = len(engine.snapshot())
        engine.step()
        got = any(chunk.request == "A" for chunk in engine.trace.steps[-1].chunks)
        waited = 0 if got else waited + 1
        longest = max(longest, waited)
        assert waited <= candidates
    assert "A" not in engine.snapshot(), "it never ended"
    assert longest <= 8  # no more than max_num_seqs candidates can be ahead of it

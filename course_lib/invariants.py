"""What must hold between two steps, whatever happened before."""

from __future__ import annotations

from .sequence import FINISHED, PREFILLING, RUNNING, WAITING


def check(engine) -> None:
    """Raise AssertionError unless the engine's books are right: blocks, queues, requests, budgets."""
    scheduler = engine.scheduler
    live = scheduler.unfinished()
    engine.block_manager.check(live)
    for queue, status in ((scheduler.waiting, WAITING), (scheduler.prefilling, PREFILLING), (scheduler.running, RUNNING)):
        for s in queue:
            assert s.status is status, f"{s} is in the queue of {status.name}"
            assert engine._sequences.get(s.request_id) is s, f"{s} is scheduled, but the engine doesn't know it"
            assert len(s.generated_token_ids) < s.max_new_tokens, f"{s} has all its tokens and goes on"
            if status is WAITING:
                assert s.cached_token_count == 0 and not s.block_table, f"{s} waits and holds K/V"
            elif status is PREFILLING:
                assert 0 < s.cached_token_count < s.known_token_count, f"{s} is half-filled with nothing or all"
            else:
                assert s.remaining_token_count == 1 and s.generated_token_ids, f"{s} runs without one token to compute"
    assert len({id(s) for s in live}) == len(live), "a sequence is in two queues"
    unfinished = {i for i, s in engine._sequences.items() if s.status is not FINISHED}
    assert unfinished == {s.request_id for s in live}, "a request was lost"
    kept = {output.request_id for output in engine._outbox if output.finished}
    assert kept == engine._sequences.keys() - unfinished, "an end was lost before it was delivered"
    in_flight = len(scheduler.prefilling) + len(scheduler.running)
    assert in_flight <= engine.config.max_num_seqs, f"{in_flight} sequences in flight"
    if engine.trace.steps:
        tokens = sum(chunk.num_tokens for chunk in engine.trace.steps[-1].chunks)
        assert tokens <= engine.config.max_num_batched_tokens, f"a step of {tokens} tokens"

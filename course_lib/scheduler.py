"""Who gets which tokens computed in the next step.

There is no prefill phase and no decode phase. A sequence has known tokens (prompt and output) and
cached tokens (those whose K/V is stored); a step moves some sequences' cached count towards their
known count. Decode is the chunk of length one at the end of that road.

One step spends three budgets, tokens, sequences and KV blocks, in this order:

1. decode:   every RUNNING sequence gets its one token,
2. prefill:  then chunks, PREFILLING before WAITING (or as the policy says),
3. progress: if blocks left the step empty, the oldest holder goes on, at others' expense if need be.

Nothing is counted as done before the forward pass returned: `commit` moves the counters and the
queues, `rollback` gives back the blocks of a step that failed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from .block_manager import BlockManager
from .columns import Columns
from .config import EngineConfig
from .policies import make_policy
from .sequence import FINISHED, PREFILLING, RUNNING, WAITING, Sequence
from .slots import blocks_needed

by_arrival = attrgetter("arrival")

# Why a request got nothing in a step. Of several, the first that applies is given.
REASONS = (
    "seq_budget",  # as many sequences are in flight as max_num_seqs allows
    "token_budget",  # the step's tokens are spent
    "partial_prefill_cap",  # as many are PREFILLING as max_num_partial_prefills allows
    "kv_blocks",  # its blocks are not free, or it was just preempted
    "decode_share",  # decode may not take more of the budget while prefill waits
    "queue",  # behind one that can't go on
)


class ScheduledChunk(NamedTuple):
    """Tokens start_pos … start_pos + num_tokens - 1 of a sequence, to be computed in this step.

    kind is "prefill" or "decode"; is_last: the chunk reaches the last known token, so its last
    row's logits give the next token.
    """

    sequence: Sequence
    start_pos: int
    num_tokens: int
    kind: str
    is_last: bool


class ScheduledChunks(Columns):
    """The chunks of a step, in the order in which they lie in the batch: to its user a list of ScheduledChunk."""

    __slots__ = ()
    row = ScheduledChunk

    @classmethod
    def decodes(cls, sequences: list[Sequence]) -> ScheduledChunks:
        """A chunk of one token for each: the next one that has no K/V yet."""
        chunks, count = cls.__new__(cls), len(sequences)
        chunks.columns = [list(sequences), [s.cached_token_count for s in sequences], [1] * count, ["decode"] * count, [True] * count]
        return chunks


def columns_of(chunks: Iterable[ScheduledChunk]) -> list[list]:
    """The chunks by field: sequences, starts, sizes, kinds, is_last. Takes any list that a scheduler has made."""
    return (chunks if isinstance(chunks, ScheduledChunks) else ScheduledChunks(chunks)).columns


@dataclass
class SchedulerOutput:
    """What one step computes, and why the others have to wait."""

    step: int
    block_size: int
    chunks: MutableSequence[ScheduledChunk] = field(default_factory=ScheduledChunks)  # a list will do
    reasons: dict[str, str] = field(default_factory=dict)  # request id -> one of REASONS
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Keeps the queues and decides, step by step, what is computed.

    `waiting` holds preempted sequences in front, by arrival, then the new ones as they came;
    `prefilling` and `running` are in arrival order. To write your own scheduler, subclass this
    and override `schedule`.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.block_size = config.block_size
        self.policy = make_policy(config.policy)
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step = 0
        self._preempted: list[Sequence] = []  # since last asked

    # ---- deciding -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's chunks, and allocate the blocks that they write to."""
        out = SchedulerOutput(self.step, self.block_size)
        left_out = self._schedule_decodes(out)
        tokens = self._schedule_prefills(out, self.config.max_num_batched_tokens - len(out.chunks))
        for sequence in left_out:  # what prefill left goes back to decode, at nobody's expense
            if sequence.status is RUNNING:
                if tokens and self._has_room(sequence):
                    out.chunks.append(ScheduledChunk(sequence, sequence.cached_token_count, 1, "decode", True))
                    tokens -= 1
                else:
                    out.reasons[sequence.request_id] = "kv_blocks" if tokens else "decode_share"
        if not out.chunks and self.has_unfinished():
            self._force_progress(out)
        return out

    def _schedule_decodes(self, out: SchedulerOutput) -> list[Sequence]:
        """Give RUNNING sequences their token; returns those that the decode share leaves out.

        Promise: with cap = max(1, floor(max_decode_share * budget)) tokens for decode while prefill
        waits, no RUNNING sequence goes more than ceil(running / cap) steps without a token.
        """
        chosen, left_out, running = list(self.running), [], len(self.running)
        if self.prefilling or self.waiting:
            cap = max(1, int(self.config.max_decode_share * self.config.max_num_batched_tokens))
            if len(chosen) > cap:  # those that have gone longest without a token come first
                rotation = sorted(chosen, key=lambda s: (s.last_step, s.arrival))
                chosen, left_out = sorted(rotation[:cap], key=by_arrival), rotation[cap:]
        size = self.block_size
        for sequence in [s for s in chosen if s.cached_token_count == len(s.block_table) * size]:  # its blocks are full
            # oldest first, so that who is preempted is this one or still to come
            while sequence.status is RUNNING and not self._has_room(sequence):
                self._preempt(out, max(self._holders(), key=by_arrival))
        if len(self.running) < running:  # some were preempted
            chosen = [s for s in chosen if s.status is RUNNING]
        out.chunks += ScheduledChunks.decodes(chosen)
        return left_out

    def _has_room(self, sequence: Sequence) -> bool:
        """Room for one more token, in the blocks that a sequence has or in a free one, which it then gets."""
        start = sequence.cached_token_count
        return start < len(sequence.block_table) * self.block_size or self.block_manager.allocate(sequence, start + 1)

    def _schedule_prefills(self, out: SchedulerOutput, tokens: int) -> int:
        """Spend `tokens` on PREFILLING and WAITING sequences; returns how many are left."""
        if not self.prefilling and not self.waiting:
            return tokens
        config = self.config
        seqs = config.max_num_seqs - len(self.prefilling) - len(self.running)
        partial = len(self.prefilling)  # sequences that will be PREFILLING after this step
        candidates = self.policy.order(self.prefilling, self.waiting, self.step)
        ahead = {WAITING: len(self.waiting), PREFILLING: len(self.prefilling)}
        stopped = False  # someone's blocks are not free: no one behind it gets prefill
        closed = bool(out.preempted)  # no more admissions: the head can't go in
        for sequence in candidates:
            status = sequence.status
            is_new = status is WAITING
            reason = None
            if sequence.request_id in out.reasons:
                pass  # preempted in this step
            elif is_new and seqs == 0:
                reason = "seq_budget"
            elif tokens == 0:
                reason = "token_budget"
            elif stopped or (is_new and closed):
                reason = "queue"
            else:
                served = ahead[PREFILLING] + min(ahead[WAITING], 0 if closed else seqs)
                share = self.policy.share(config.max_num_batched_tokens, tokens, served, config.block_size)
                is_capped = config.max_num_partial_prefills is not None and partial >= config.max_num_partial_prefills
                reason = self._prefill(out, sequence, tokens, share, is_capped)
                if reason is None:
                    chunk = out.chunks[-1]
                    tokens -= chunk.num_tokens
                    seqs -= is_new
                    partial += is_new - chunk.is_last
                stopped = reason == "kv_blocks"
                closed |= is_new and reason is not None
            ahead[status] -= 1
            if reason:
                out.reasons[sequence.request_id] = reason
        if len(candidates) < len(self.prefilling) + len(self.waiting):  # the policy left someone out
            served = {id(sequence) for sequence in candidates}
            for sequence in self.prefilling + self.waiting:
                if id(sequence) not in served:
                    out.reasons.setdefault(sequence.request_id, "queue")
        return tokens

    def _prefill(self, out: SchedulerOutput, sequence: Sequence, tokens: int, share: int, is_capped: bool) -> str | None:
        """Schedule a chunk of at most `tokens` and at most `share` tokens, or return the reason why not."""
        is_new = sequence.status is WAITING
        matched = self.block_manager.match(sequence) if is_new else []
        start = sequence.cached_token_count + len(matched) * self.block_size
        size = self._chunk_size(sequence, start, tokens, share)
        is_last = start + size == sequence.known_token_count
        if size == 0:
            return "token_budget"
        if is_new and is_capped and not is_last:
            return "partial_prefill_cap"
        if is_new and not self._can_admit(sequence, matched, start + size):
            return "kv_blocks"
        if is_new:
            self.block_manager.adopt(sequence, matched)
            out.admitted.append(sequence)
        if not self.block_manager.allocate(sequence, start + size):
            return "kv_blocks"
        out.chunks.append(ScheduledChunk(sequence, start, size, "prefill", is_last))
        return None

    def _chunk_size(self, sequence: Sequence, start: int, tokens: int, share: int) -> int:
        """Tokens of the next chunk; 0 when a prompt that must go in whole doesn't fit."""
        remaining = sequence.known_token_count - start
        limit = self.config.max_prefill_chunk_size
        if limit is None:
            if not sequence.num_preemptions:
                return remaining if remaining <= tokens else 0
            limit = remaining  # prompt and output of a recomputation may be longer than the budget
        return min(remaining, limit, tokens, max(1, share))

    def _can_admit(self, sequence: Sequence, matched: list, end: int) -> bool:
        """Are the blocks for a first chunk up to `end` free, and the watermark beyond them?

        A preempted sequence asks for all its known tokens, or it would be preempted again at once.
        """
        goal = sequence.known_token_count if sequence.num_preemptions else end
        held_by_others = len(matched) - self.block_manager.num_idle(matched)
        need = blocks_needed(goal, self.block_size) - held_by_others
        spare = self.config.watermark_blocks if self.block_manager.num_used else 0
        return need + spare <= self.block_manager.num_free

    def _force_progress(self, out: SchedulerOutput) -> None:
        """Blocks left the step empty: the oldest holder gets what it can use, the newest give way."""
        tokens = self.config.max_num_batched_tokens
        holders = sorted(self._holders(), key=by_arrival)
        while holders:
            oldest = holders[0]
            start = oldest.cached_token_count
            size = min(self._chunk_size(oldest, start, tokens, tokens), self.block_manager.capacity_left(oldest))
            if size > 0:
                self.block_manager.allocate(oldest, start + size)
                kind = "decode" if oldest.status is RUNNING else "prefill"
                is_last = start + size == oldest.known_token_count
                out.chunks.append(ScheduledChunk(oldest, start, size, kind, is_last))
                out.reasons.pop(oldest.request_id, None)
                return
            self._preempt(out, holders.pop())
        if self._prefill(out, self.waiting[0], tokens, tokens, is_capped=False) is None:
            out.reasons.pop(self.waiting[0].request_id, None)

    def _holders(self) -> list[Sequence]:
        """The sequences that hold blocks."""
        return self.prefilling + self.running

    def _preempt(self, out: SchedulerOutput, victim: Sequence) -> None:
        self.preempt(victim)
        out.preempted.append(victim)
        out.reasons[victim.request_id] = "kv_blocks"

    # ---- keeping the queues ---------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def unfinished(self) -> list[Sequence]:
        return self.running + self.prefilling + self.waiting

    def commit(self, out: SchedulerOutput) -> None:
        """The forward pass returned: move the counters, and the sequences to their new queues."""
        block_size, step, is_caching = self.block_size, out.step, self.config.enable_prefix_caching
        for sequence, start, num_tokens, _kind, is_last in zip(*columns_of(out.chunks), strict=True):
            status = sequence.status
            if status is FINISHED:  # cancelled while the forward pass ran
                continue
            sequence.cached_token_count = cached = start + num_tokens
            sequence.last_step = step
            if is_caching and cached // block_size > len(sequence.block_keys):
                self.block_manager.register(sequence)
            if status is RUNNING:
                continue
            if status is WAITING and not sequence.num_preemptions:
                sequence.prefix_hit_tokens = start
            if is_last or status is WAITING:
                self._queue(sequence).remove(sequence)
                sequence.transition_to(RUNNING if is_last else PREFILLING)
                insort(self._queue(sequence), sequence, key=by_arrival)
        self.step += 1

    def rollback(self) -> None:
        """The step failed: give back the blocks that it took. What it preempted stays preempted."""
        for sequence in self.unfinished():
            self.block_manager.truncate(sequence, sequence.cached_token_count)

    def preempt(self, sequence: Sequence) -> None:
        """Give back the blocks of a PREFILLING or RUNNING sequence; its tokens are kept.

        It returns to the front of WAITING and recomputes all its known tokens before it goes on.
        """
        queue = self._queue(sequence)
        sequence.transition_to(WAITING)
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.cached_token_count = 0
        sequence.num_preemptions += 1
        self._preempted.append(sequence)
        place = 0
        for other in self.waiting:
            if not other.num_preemptions or other.arrival > sequence.arrival:
                break
            place += 1
        self.waiting.insert(place, sequence)

    def drain_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, whoever asked for it."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a request in whatever state it is, and give back its blocks."""
        self._queue(sequence).remove(sequence)
        sequence.transition_to(FINISHED)
        sequence.finish_reason = reason
        self.block_manager.free(sequence)

    def _queue(self, sequence: Sequence) -> list[Sequence]:
        return {WAITING: self.waiting, PREFILLING: self.prefilling, RUNNING: self.running}[sequence.status]

"""An engine out of the learner's parts: those that are green work in it, ours stand in for the others.

    engine = my_engine(FakeRunner(), EngineConfig(), my_parts())
    engine.calls        {"03.1": 57, …}: how often each of the learner's parts was asked

Most parts go where their exercise put them. Where two want the same place, this file puts them together. A part may
return tuples, tensors or NumPy numbers; the engine gets lists and ints.
"""

from __future__ import annotations

import contextlib
import copy
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from .. import slots
from ..batch import Batch, Sample, SlotMapping
from ..block_manager import BlockManager
from ..config import EngineConfig
from ..engine import Engine
from ..prefix_cache import Entry, hash_block
from ..runners.base import Runner
from ..scheduler import ScheduledChunk, Scheduler, SchedulerOutput, by_arrival
from ..sequence import FINISHED, RUNNING, WAITING, Sequence
from ..text import TextStream
from .exercise import plain
from .lesson_02 import for_engine
from .lesson_09 import _Cache, _OnSharedBlocks
from .my_parts import Parts
from .plug import plug

BACKEND = "yours"  # the name of the learner's attention among the backends

# Of a part that is a class: the methods whose calls are counted.
COUNTED = {
    "02.2": ("allocate", "free"), "06.2": ("finish", "preempt"), "08.2": ("schedule",), "09.3": ("take", "share", "give_back"),
    "10.1": ("push",),
}  # fmt: skip


def my_engine(runner: Runner, config: EngineConfig | None = None, parts: Parts | dict[str, object] | None = None) -> MyEngine:
    """An Engine with the learner's parts.

    parts  what my_parts() returned: its green ones are taken; or {exercise: part}. None: all of the engine is ours
    """
    green = parts.green if isinstance(parts, Parts) else dict(parts or {})
    return MyEngine(runner, config or EngineConfig(), green)


class MyEngine(Engine):
    """The course's engine with the learner's parts in it.

    calls  how often each of the parts was asked, by exercise
    title  how many were asked, in words
    """

    def __init__(self, runner: Runner, config: EngineConfig, parts: dict[str, object]) -> None:
        self.calls: Counter[str] = Counter()
        yours = {identifier: counted(self.calls, identifier, part) for identifier, part in parts.items()}
        self._attention = _attention(yours) if _is_a_model_on_a_cpu(runner) else None
        if self._attention is not None:
            runner = copy.copy(runner)  # the same weights; the caller's runner keeps its own attention
            runner.attention = BACKEND
        self._plugged: dict[str, object] = {}
        if "07.1" in yours:
            self._plugged["build_batch"] = _build_batch(yours["07.1"])
        if "10.1" in yours:
            self._plugged["TextStream"] = _text_stream(yours["10.1"])
        if "10.2" in yours and _is_a_model_on_a_cpu(runner):
            self._plugged["sample"] = _sampler(yours["10.2"])
        super().__init__(
            runner, config, scheduler=_scheduler(yours), block_manager=_block_manager(yours, config.enable_prefix_caching),
            slot_mapping=_slot_mapping(yours),
        )  # fmt: skip

    @property
    def title(self) -> str:
        return f"Your engine: {len(self.calls)} parts of yours at work" if self.calls else "Your engine: so far all of it is ours"

    def _add(self, *args, **kwargs) -> str:
        with self._parts_plugged_in():
            return super()._add(*args, **kwargs)

    def _compute(self) -> None:
        with self._parts_plugged_in():
            super()._compute()

    @contextlib.contextmanager
    def _parts_plugged_in(self) -> Iterator[None]:
        """Parts that have no argument of Engine: they are there while this engine works, and not for another one."""
        if self._attention is not None:
            from ..model.attention import BACKENDS

            BACKENDS[BACKEND] = self._attention
        with plug(**self._plugged):
            yield


def counted(calls: Counter[str], identifier: str, part):
    """The part, noting in `calls` each time that it is asked: a function, or the methods of a class in COUNTED."""

    def noting(function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls[identifier] += 1
            return function(*args, **kwargs)

        return call

    if isinstance(part, type):
        methods = {name: noting(getattr(part, name)) for name in COUNTED.get(identifier, ())}
        return type(part.__name__, (part,), methods)
    return noting(part)


def _is_a_model_on_a_cpu(runner: Runner) -> bool:
    """Parts that compute with tensors were written and checked on a CPU."""
    model = getattr(runner, "model", None)
    return model is not None and model.device.type == "cpu"


# ---- slots, and the batch


def _slot_mapping(yours: dict) -> SlotMapping:
    """03.2 for a single token, 03.1 for more."""
    of_chunk, of_decodes = yours.get("03.1", slots.slot_mapping), yours.get("03.2")

    def slot_mapping(block_table: list[int], start_pos: int, num_tokens: int, block_size: int) -> list[int]:
        if num_tokens == 1 and of_decodes is not None:
            return plain(of_decodes([block_table], [start_pos + 1], block_size))
        return plain(of_chunk(block_table, start_pos, num_tokens, block_size))

    return slot_mapping


def _build_batch(yours: Callable) -> Callable:
    numbers = ("token_ids", "positions", "slot_mapping", "block_tables", "context_lens", "query_start_loc", "sample_rows")

    def build_batch(output: SchedulerOutput, slot_mapping: SlotMapping) -> Batch:
        batch = yours(output, slot_mapping)
        return replace(batch, sampled=list(batch.sampled), **{name: plain(getattr(batch, name)) for name in numbers})

    return build_batch


# ---- blocks


def _block_manager(yours: dict, has_prefix_cache: bool) -> type:
    """02.2 without a prefix cache; with one, 09.3 or ours, with the names of 09.1 and the match of 09.2. 02.1 counts in each."""
    base: type = BlockManager
    if not has_prefix_cache and "02.2" in yours:
        base = for_engine(yours["02.2"])
    elif has_prefix_cache and "09.3" in yours:
        found = {"shared_blocks": yours["09.3"], "block_hashes": yours.get("09.1"), "match_prefix": yours.get("09.2")}
        base = type("OnYourBlocks", (_Pool,), {name: part if name == "shared_blocks" else _static(part) for name, part in found.items()})
    elif has_prefix_cache and ("09.1" in yours or "09.2" in yours):
        base = type("FoundByYou", (_WithCache,), {"block_hashes": _static(yours.get("09.1")), "match_prefix": _static(yours.get("09.2"))})
    count = yours.get("02.1")
    if count is None:
        return base

    class CountedByYou(base):
        def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
            cached, held = sequence.cached_token_count, len(sequence.block_table)
            new = int(count(cached, num_tokens - cached, held, self.block_size))
            return super().allocate(sequence, (held + new) * self.block_size)

    return CountedByYou


def _static(function: Callable | None):
    """A function that is kept in a class and isn't a method of it."""
    return None if function is None else staticmethod(function)


class _WithCache(BlockManager):
    """The engine's block manager, whose prefix cache goes by the learner's names or match."""

    block_hashes = match_prefix = None

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, True)
        self.prefix_cache = _YourCache(block_size, self.block_hashes, self.match_prefix)


class _YourCache(_Cache):
    """Both at once: the match looks for the learner's names."""

    def match(self, sequence: Sequence) -> list[Entry]:
        if self.block_hashes is None or self.match_prefix is None:
            return super().match(sequence)

        def lookup(parent: Entry | None, token_ids: tuple[int, ...]) -> Entry | None:
            known = [*_past(parent), *token_ids]
            return self._by_key.get(list(self.block_hashes(known, self.block_size, sequence.cache_salt))[-1])

        known = sequence.token_ids(0, sequence.known_token_count)
        blocks, _positions = self.match_prefix(known, lookup, self.block_size)
        return [self._by_block[int(block)] for block in blocks]


def _past(entry: Entry | None) -> list[int]:
    """The tokens from the beginning to the end of an entry's block."""
    tokens: list[int] = []
    while entry is not None:
        tokens[:0] = entry.token_ids
        entry = entry.parent
    return tokens


class _Pool(_OnSharedBlocks):
    """The learner's `SharedBlocks`, with the learner's names or ours, and the learner's match or ours."""

    block_hashes = match_prefix = None

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self._content: dict[int, tuple] = {}  # block -> (salt, all tokens to its end): what it was taken for

    def _name(self, token_ids: list[int], salt: str | None):
        """The key of the last block of these tokens."""
        if self.block_hashes is not None:
            return list(self.block_hashes(token_ids, self.block_size, salt))[-1]
        key = 0
        for start in range(0, len(token_ids), self.block_size):
            key = hash_block(key, tuple(token_ids[start : start + self.block_size]), None if start else salt)
        return key

    def _key(self, sequence: Sequence, index: int):
        end = (index + 1) * self.block_size
        if end > sequence.known_token_count:
            return None
        return self._name(sequence.token_ids(0, end), sequence.cache_salt)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        before = len(sequence.block_table)
        if not super().allocate(sequence, num_tokens):
            return False
        for index in range(before, len(sequence.block_table)):
            tokens = sequence.token_ids(0, min((index + 1) * self.block_size, sequence.known_token_count))
            self._content[sequence.block_table[index]] = (sequence.cache_salt, tokens)
        return True

    def match(self, sequence: Sequence) -> list[Entry]:
        if self.match_prefix is None:
            return super().match(sequence)
        size, salt, pasts = self.block_size, sequence.cache_salt, {None: []}

        def lookup(parent: Entry | None, token_ids: tuple[int, ...]) -> Entry | None:
            past = pasts[parent]
            key = self._name([*past, *token_ids], salt)
            block = self.pool.find(key)
            if block is None:
                return None
            its_salt, holds = self._content[block]
            is_behind_parent = (its_salt, holds[:-size]) == (salt, past)
            entry = Entry(key, parent if is_behind_parent else Entry(0, None, (), None, -1), tuple(holds[-size:]), salt, block)
            pasts[entry] = holds
            return entry

        known = sequence.token_ids(0, sequence.known_token_count)
        blocks, _positions = self.match_prefix(known, lookup, size)
        return [Entry(0, None, (), None, int(block)) for block in blocks]


# ---- the scheduler


def _scheduler(yours: dict) -> type:
    """06.1, 06.2, 08.1, 08.2, 08.3 and 02.3 in one class; ours decides what none of them decides."""
    bases = [yours[identifier] for identifier in ("06.2", "08.2") if identifier in yours]
    return type("MyScheduler", (_Together, *bases), {"yours": yours})


class _Together(Scheduler):
    """Asks the learner's functions where the engine's scheduler decides. The classes of 06.2 and 08.2 come behind it."""

    yours: dict[str, Callable]

    def schedule(self) -> SchedulerOutput:
        if "08.2" not in self.yours:
            return super().schedule()
        everyone, config = self.running, self.config
        chosen = self._turns()
        left_out = [sequence for sequence in everyone if sequence not in chosen]
        # Who is left out keeps its seat, and the learner's schedule doesn't see it.
        self.running, self.config = chosen, replace(config, max_num_seqs=config.max_num_seqs - len(left_out))
        try:
            out = super().schedule()
        finally:
            self.running, self.config = [sequence for sequence in everyone if sequence.status is RUNNING], config
        tokens = config.max_num_batched_tokens - sum(chunk.num_tokens for chunk in out.chunks)
        for sequence in left_out:
            if tokens > 0 and sequence.status is RUNNING and self._has_room(sequence):
                out.chunks.append(_decode(sequence))
                tokens -= 1
        if not out.chunks and self.has_unfinished():  # the exercise asks nobody to preempt: ours does
            self._force_progress(out)
        return out

    def _turns(self) -> list[Sequence]:
        """The RUNNING sequences that get their token, in the order of arrival."""
        choose = self.yours.get("08.3")
        if choose is None:
            return list(self.running)
        prefill_waits = bool(self.prefilling or self.waiting)
        chosen = choose(list(self.running), prefill_waits, self.config.max_num_batched_tokens, self.config.max_decode_share)
        return sorted(chosen, key=by_arrival)

    def _schedule_decodes(self, out: SchedulerOutput) -> list[Sequence]:
        if "08.3" not in self.yours:
            return super()._schedule_decodes(out)
        chosen = self._turns()
        left_out = [sequence for sequence in self.running if sequence not in chosen]
        for sequence in chosen:
            while sequence.status is RUNNING and not self._has_room(sequence):
                self._preempt(out, max(self._holders(), key=by_arrival))
            if sequence.status is RUNNING:
                out.chunks.append(_decode(sequence))
        return left_out

    def _chunk_size(self, sequence: Sequence, start: int, tokens: int, share: int) -> int:
        limit = self.config.max_prefill_chunk_size
        if "08.1" not in self.yours or limit is None:
            return super()._chunk_size(sequence, start, tokens, share)
        remaining, free = sequence.known_token_count - start, self.block_manager.num_free
        return int(self.yours["08.1"](remaining, start, min(tokens, max(1, share)), free, limit, self.block_size))

    def _can_admit(self, sequence: Sequence, matched: list[Entry], end: int) -> bool:
        if "02.3" not in self.yours or sequence.num_preemptions:  # it comes back: the engine's own rule
            return super()._can_admit(sequence, matched, end)
        idle = self.block_manager.num_idle(matched)
        reserve = self.config.watermark_blocks if self.block_manager.num_used else 0
        rest = len(sequence.prompt_token_ids) - len(matched) * self.block_size
        chunk_size = self.config.max_prefill_chunk_size or self.config.max_num_batched_tokens
        free = self.block_manager.num_free - idle
        return bool(self.yours["02.3"](rest, sequence.max_new_tokens, chunk_size, self.block_size, free, reserve))

    # What the schedule of 08.2 calls. It was written without a prefix cache, so a hit is put in here.

    def get_blocks(self, sequence: Sequence, size: int) -> bool:
        """Blocks for the next `size` tokens of a sequence; a new one is asked for at the door, and gets what is cached."""
        if sequence.status is not WAITING:
            return super().get_blocks(sequence, size)
        matched = self.block_manager.match(sequence)
        hit = len(matched) * self.block_size
        if not self._can_admit(sequence, matched, hit + min(size, sequence.known_token_count - hit)):
            return False
        self.block_manager.adopt(sequence, matched)
        sequence.cached_token_count = hit
        if super().get_blocks(sequence, min(size, sequence.remaining_token_count)):
            return True
        self.block_manager.free(sequence)
        sequence.cached_token_count = 0
        return False

    def add_chunk(self, out: SchedulerOutput, sequence: Sequence, size: int) -> None:
        super().add_chunk(out, sequence, min(size, sequence.remaining_token_count))

    # ---- after the forward pass

    def commit(self, out: SchedulerOutput) -> None:
        if "06.1" not in self.yours:
            super().commit(out)
            return
        for chunk in out.chunks:
            sequence = chunk.sequence
            if sequence.status is FINISHED:  # cancelled while the forward pass ran
                continue
            if sequence.status is WAITING and not sequence.num_preemptions:
                sequence.prefix_hit_tokens = chunk.start_pos
            self._queue(sequence).remove(sequence)
            self.yours["06.1"](chunk)
            insort(self._queue(sequence), sequence, key=by_arrival)
            sequence.last_step = out.step
            if self.config.enable_prefix_caching:
                self.block_manager.register(sequence)
        self.step += 1

    def rollback(self) -> None:
        for sequence in self.waiting:  # a hit of the step that failed
            sequence.cached_token_count = 0
        super().rollback()


def _decode(sequence: Sequence) -> ScheduledChunk:
    return ScheduledChunk(sequence, sequence.cached_token_count, 1, "decode", True)


# ---- attention, sampling, text


def _attention(yours: dict) -> Callable | None:
    """A backend by 04.2, or by 04.1 where 04.2 isn't there; None for ours."""
    if "04.2" in yours:
        return _by_your_attention(yours["04.2"])
    return _by_your_mask(yours["04.1"]) if "04.1" in yours else None


def _by_your_attention(paged_attention: Callable) -> Callable:
    import torch

    def attend(query, layer: int, paged, scaling: float):
        """Each K/V head is given to the function once for every query head that shares it."""
        batch, cache = paged.batch, paged.kv_cache
        group = query.shape[1] // cache.k.shape[2]
        keys, values = (x[layer].repeat_interleave(group, dim=1) for x in (cache.k, cache.v))
        sizes = batch.block_tables, batch.context_lens, batch.query_start_loc, batch.block_size
        return torch.as_tensor(paged_attention(query, keys, values, *sizes, scaling)).to(query.dtype)

    return attend


def _by_your_mask(causal_mask: Callable) -> Callable:
    import torch

    def attend(query, layer: int, paged, scaling: float):
        """Gather K/V, then PyTorch's attention with the learner's mask."""
        keys, values = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
        output = torch.empty_like(query)
        for s, length in enumerate(paged.context_lens):
            rows = slice(paged.query_start_loc[s], paged.query_start_loc[s + 1])
            count = rows.stop - rows.start
            mask = torch.as_tensor(causal_mask(length - count, count)).bool()
            places = paged.context_slots(s)
            q, k, v = (x.transpose(0, 1) for x in (query[rows], keys[places], values[places]))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
            output[rows] = attended.transpose(0, 1)
        return output

    return attend


def _sampler(sample_token: Callable) -> Callable:
    """10.2 knows temperature, top_p and seed; requests that ask for more are sampled by ours."""
    from ..model.sampler import sample as ours

    def sample(logits, sequences: list[Sequence]) -> list[Sample]:
        samples = []
        for row, sequence in zip(logits.float(), sequences, strict=True):
            params = sequence.params
            if params.top_k or params.min_p or params.repetition_penalty != 1 or params.logprobs is not None:
                samples += ours(row[None], [sequence])
            else:
                num_generated = len(sequence.generated_token_ids)
                samples.append(Sample(int(sample_token(row, params.temperature, params.top_p, sequence.seed, num_generated))))
        return samples

    return sample


def _text_stream(yours: type) -> Callable:
    """10.1 knows no stop strings; a request that has some gets ours."""

    def text_stream(tokenizer, stop: tuple[str, ...] = ()):
        return TextStream(tokenizer, stop) if stop else yours(tokenizer, stop)

    return text_stream

"""The engine: requests in, tokens out, one step at a time.

    step:  schedule  ->  build the batch  ->  one forward pass  ->  commit  ->  outputs

Whatever goes wrong in the forward pass, the step's blocks are given back, the exception is
raised, and the next step schedules the work again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from . import invariants
from . import metrics as metrics_module
from .batch import Sample, SlotMapping, build_batch, count_batch
from .block_manager import BlockManager
from .config import EngineConfig, SamplingParams
from .outputs import RequestOutput, RequestState, Stream
from .prompts import Prompt, check_prompt
from .recorder import Recorder
from .runners.base import Runner
from .scheduler import Scheduler, SchedulerOutput
from .sequence import FINISHED, PREFILLING, RUNNING, Sequence
from .slots import slot_mapping
from .text import TextStream
from .trace import Trace
from .validation import check_int


class Engine:
    """A serving engine over any runner.

    Parts of your own: `scheduler` and `block_manager` are classes built like ours, `slot_mapping`
    is a function like `slots.slot_mapping`. `on_step(scheduler_output)` is called in each step,
    after scheduling and before the forward pass. `record_trace=False` keeps no trace.

    One thread may step; `cancel` and `add_request` may come from others.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig | None = None,
        *,
        scheduler: type = Scheduler,
        block_manager: type = BlockManager,
        slot_mapping: SlotMapping = slot_mapping,
        on_step: Callable[[SchedulerOutput], object] | None = None,
        record_trace: bool = True,
    ) -> None:
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig, got {config!r}")
        if not callable(getattr(runner, "execute", None)):
            raise TypeError(f"runner must be a runner, like FakeRunner() or ModelRunner('smollm2'), got {runner!r:.200}")
        if config.num_blocks is None:
            if not callable(getattr(runner, "blocks_that_fit", None)):
                raise ValueError(f"num_blocks=None: a {type(runner).__name__} doesn't know its memory, so give it a number")
            config = replace(config, num_blocks=runner.blocks_that_fit(config))
        self.runner = runner
        self.config = config
        self.max_model_len = config.resolve_max_model_len(runner.max_model_len)
        if hasattr(runner, "init_kv_cache"):
            runner.init_kv_cache(config.num_blocks, config.block_size)
        self._kv_cache = getattr(runner, "kv_cache", None)
        self._reads_tokens = getattr(runner, "reads_tokens", True)
        self.block_manager = block_manager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = scheduler(config, self.block_manager)
        self.slot_mapping = slot_mapping
        self.on_step = on_step
        policy = config.policy if isinstance(config.policy, str) else getattr(config.policy, "name", type(config.policy).__name__)
        settings = {**vars(config), "policy": policy, "max_model_len": self.max_model_len}
        self._sequences: dict[str, Sequence] = {}  # live ones, and ended ones not yet delivered
        self._recorder = Recorder(settings, self._sequences, record_trace)
        self._outbox: list[RequestOutput] = []
        self._random = random.Random()  # seeds for requests without one
        self._num_added = 0
        self._num_empty = 0
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that holds the lock
        self._stepping = False
        self._broken = ""
        self._to_cancel: set[str] = set()

    # ---- requests in ----------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request; returns its id. A text is encoded with the runner's tokenizer.

        Raises ValueError or TypeError, and changes nothing, for what the engine could never serve.
        """
        return self._add(self._validate(prompt, params), request_id, priority, cache_salt)

    def _validate(self, prompt: Prompt, params: SamplingParams | None, field: str = "prompt"):
        return check_prompt(prompt, params, self.runner, self.config, self.max_model_len, field)

    def _add(self, validated, request_id: str | None, priority: int = 0, cache_salt: str | None = None) -> str:
        token_ids, params, max_new_tokens = validated
        priority = check_int("priority", priority)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt must be a string or None, got {cache_salt!r}")
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id == "":
            raise ValueError("request_id='' is not allowed: an id must have at least 1 character")
        with self._exclusive():
            if request_id is None:
                number = self._num_added
                while (request_id := f"r{number}") in self._sequences:
                    number += 1
            elif request_id in self._sequences:
                raise ValueError(f"request_id={request_id!r} is in use: ids of live requests must be unique")
            stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids())
            sequence = Sequence(
                request_id, token_ids, params, arrival=self._num_added, priority=priority, cache_salt=cache_salt,
                max_new_tokens=max_new_tokens, stop_token_ids=stop_ids,
                seed=self._random.getrandbits(63) if params.seed is None else params.seed,
                arrival_step=self.scheduler.step, arrival_time=self.runner.now(),
            )  # fmt: skip
            if self.runner.tokenizer is not None:
                sequence.detokenizer = TextStream(self.runner.tokenizer, params.stop)
            self._num_added += 1
            self._sequences[request_id] = sequence
            self._recorder.request_added(sequence)
            self.scheduler.add(sequence)
        return request_id

    def _eos_token_ids(self) -> frozenset[int]:
        """The model's end-of-sequence tokens: the runner's list, else the tokenizer's one."""
        ids = getattr(self.runner, "eos_token_ids", None)
        if ids is None:
            ids = [getattr(self.runner.tokenizer, "eos_token_id", None)]
        return frozenset(token_id for token_id in ids if token_id is not None)

    def cancel(self, request_id: str) -> bool:
        """End a request: True if it was live. One output with reason "cancelled" follows, no token after it.

        Between steps its blocks are free at once. During a step (from another thread, or from
        `on_step`) it returns at once and takes effect when the forward pass returns; the token in
        flight is dropped.
        """
        if self._owner == threading.get_ident():
            # This thread is inside the engine: the garbage collector is closing a forgotten stream.
            self._to_cancel.add(request_id)
            return True
        with self._exclusive():
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.status is FINISHED or request_id in self._to_cancel:
                return False
            self._to_cancel.add(request_id)  # carried out on leaving, or by the step that is under way
            return True

    @contextlib.contextmanager
    def _exclusive(self):
        """The lock; and before it is given back, the cancels that came meanwhile."""
        if self._owner == threading.get_ident():  # called by a part of this engine: it is held already
            yield
            return
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._leave()

    def _leave(self) -> None:
        """What is to be done before the lock is given back."""
        if self._to_cancel and not self._stepping:
            self._outbox.extend(self._apply_cancels())
        self._owner = None

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away, as a full pool would. For lessons and tests; between steps only."""
        with self._exclusive():
            if self._stepping:
                raise RuntimeError(f"request_id={request_id!r} can't be preempted while a step is running")
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.status not in (PREFILLING, RUNNING):
                state = "unknown" if sequence is None else sequence.status.name
                raise ValueError(f"request_id={request_id!r} is {state}: only PREFILLING and RUNNING can be preempted")
            self.scheduler.preempt(sequence)

    # ---- one step -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns an output per request that got a token or ended."""
        self._compute()
        return self._deliver() if self._outbox else []

    def _compute(self) -> None:
        """One step, its outputs put into the outbox."""
        with self._exclusive():
            if self._stepping:
                raise RuntimeError("step() was called while a step is running")
            if self._broken:
                raise RuntimeError(self._broken)
            if getattr(self.runner, "kv_cache", None) is not self._kv_cache:
                raise RuntimeError("this engine's runner now serves a newer engine: make a new Engine to go on")
            if not self.scheduler.has_unfinished():
                return
            self._stepping = True
            try:
                self._recorder.step_begins(self.scheduler.step, self.runner.now())
                scheduled = self.scheduler.schedule()
                self._recorder.blocks_taken(self.block_manager)
            except BaseException:
                self._give_up_step()
                raise
        try:
            sampled, samples = self._forward(scheduled)
        except BaseException:
            with self._exclusive():
                self._give_up_step()
            raise
        with self._lock:  # as `_exclusive`, without its generator: every step comes by here, and this thread hasn't the lock
            self._owner = threading.get_ident()
            try:
                outputs = self._apply_cancels()
                self.scheduler.commit(scheduled)
                new_outputs, tokens = self._take_samples(sampled, samples)
                outputs += new_outputs
                self._recorder.step_ended(scheduled, self.scheduler.drain_preempted(), tokens, outputs, self.runner.now())
                self._outbox.extend(outputs)
                self._stepping = False
            except BaseException:
                self._give_up_step()
                raise
            finally:
                self._leave()

    def _give_up_step(self) -> None:
        """A step failed: as if it had not begun, but for its preemptions.

        Wherever the forward pass fails, nothing is left of the step. An interrupt in the middle of
        the bookkeeping can leave it half-done: then the engine refuses to go on with wrong books.
        """
        self.scheduler.rollback()
        self._stepping = False
        try:
            self.check_invariants()
        except AssertionError as error:
            self._broken = f"a step was interrupted in the middle of its bookkeeping ({error}): make a new Engine"

    def _forward(self, scheduled: SchedulerOutput) -> tuple[list[Sequence], list[Sample]]:
        """Compute the step; returns whose tokens were sampled, and the samples."""
        if self.on_step is not None:
            self.on_step(scheduled)
        if not scheduled.chunks:
            self._num_empty += 1
            if self._num_empty >= 1000:
                raise RuntimeError(f"the scheduler gave {self._num_empty} steps nothing to do: {scheduled.reasons}")
            return [], []
        self._num_empty = 0
        batch = build_batch(scheduled, self.slot_mapping) if self._reads_tokens else count_batch(scheduled)
        samples = self.runner.execute(batch)
        if len(samples) != len(batch.sampled):
            raise RuntimeError(f"the runner returned {len(samples)} samples for {len(batch.sampled)} rows")
        kinds = set(map(type, samples))
        if kinds != {Sample} and not all(issubclass(kind, Sample) for kind in kinds):
            raise RuntimeError(f"the runner must return a Sample for each row, got {samples!r:.200}")
        return batch.sampled, samples

    def _take_samples(self, sampled: list[Sequence], samples: list[Sample]) -> tuple[list[RequestOutput], dict[str, int]]:
        """Append each sampled token to its request; end those that are done. Returns outputs, and trace name -> token."""
        now = self.runner.now()
        outputs, tokens = [], {}
        for sequence, (token_id, logprobs, error) in zip(sampled, samples, strict=True):
            if sequence.status is FINISHED:  # cancelled: its token is dropped
                continue
            if error is not None:
                outputs.append(self._finish(sequence, "error", error=error))
                continue
            generated, detokenizer = sequence.generated_token_ids, sequence.detokenizer
            generated.append(token_id)
            tokens[sequence.trace_name] = token_id
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            if sequence.first_token_time is None:
                sequence.first_token_time = now
            new_text, reason = "", None
            if detokenizer is not None:
                try:
                    new_text = detokenizer.push(token_id)
                    reason = "stop" if detokenizer.stopped else None
                except Exception as failure:  # this request's text fails, the others go on
                    reason, error = "error", f"text of token {token_id}: {failure!r}"
            if reason is not None:
                pass
            elif token_id in sequence.stop_token_ids:
                reason = "stop"
            elif len(generated) >= sequence.max_new_tokens:
                reason = "length"
            else:
                if not sequence.params.final_only:
                    outputs.append(RequestOutput(sequence, [token_id], new_text))
                continue
            outputs.append(self._finish(sequence, reason, [token_id], new_text, error))
        return outputs, tokens

    def _finish(self, sequence: Sequence, reason: str, new_token_ids=(), new_text="", error=None) -> RequestOutput:
        """End a request now; returns its one terminal output, with the text held back so far."""
        if sequence.detokenizer is not None and reason != "error":
            try:
                new_text += sequence.detokenizer.flush()
                reason = "stop" if sequence.detokenizer.stopped and reason == "length" else reason
            except Exception as failure:
                reason, error = "error", f"text at the end: {failure!r}"
        self.scheduler.finish(sequence, reason)
        sequence.finish_time = self.runner.now()
        self._to_cancel.discard(sequence.request_id)
        self._recorder.request_ended(sequence)
        return RequestOutput(sequence, list(new_token_ids), new_text, error)

    def _apply_cancels(self) -> list[RequestOutput]:
        """End the requests whose cancelling was asked for."""
        if not self._to_cancel:
            return []
        asked = [self._sequences.get(request_id) for request_id in list(self._to_cancel)]
        self._to_cancel.clear()
        ended = sorted((s for s in asked if s is not None and s.status is not FINISHED), key=lambda s: s.arrival)
        return [self._finish(sequence, "cancelled") for sequence in ended]

    def _deliver(self, request_ids: Collection[str] | None = None, at_most: int | None = None) -> list[RequestOutput]:
        """Take these requests' outputs, or all, out of the outbox; the ids of ended ones become free."""
        with self._exclusive():
            delivered, kept = [], []
            if request_ids is None:
                delivered = self._outbox
            else:
                for output in self._outbox:
                    wanted = output.request_id in request_ids and (at_most is None or len(delivered) < at_most)
                    (delivered if wanted else kept).append(output)
            ended = [output.request_id for output in delivered if output.finished]
            for request_id in ended:  # an interrupt in here loses nothing: the outbox still has it all
                self._sequences.pop(request_id, None)
            self._outbox = kept
            return delivered

    # ---- whole requests -------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **request) -> Stream:
        """Add a request now, and iterate over its outputs. Closing the iterator cancels the request.

        Asking for the next output is what steps the engine, so one thread at a time may iterate.
        Outputs of other requests that are computed meanwhile are kept for the next `step()`.
        Takes the keywords of `add_request`.
        """
        return Stream(self, self.add_request(prompt, params, **request))

    def generate(self, prompts: SequenceOf[Prompt], params=None, *, progress: bool = True) -> list[RequestOutput]:
        """Run all prompts to their end; returns their last outputs, in the order of the prompts.

        params: one SamplingParams for all, or a list with one for each. One bad prompt adds none.
        A progress bar appears when it takes longer than two seconds (`progress=False`: never).
        """
        if not isinstance(prompts, Iterable):
            raise TypeError(f"prompts must be a list of prompts, got {prompts!r}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and all(isinstance(prompt, int) for prompt in prompts):
            raise TypeError(f"prompts is one list of token ids: for a single prompt write generate([{prompts[:3]}…])")
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params has {len(each)} entries for {len(prompts)} prompts: give one, or one for each")
        validated = [self._validate(p, q, f"prompts[{i}]") for i, (p, q) in enumerate(zip(prompts, each, strict=True))]
        request_ids = [self._add(request, None) for request in validated]
        last: dict[str, RequestOutput] = {}
        try:
            with _progress_bar(len(prompts), progress) as bar:
                while len(last) < len(request_ids):
                    for output in self._outputs_for(set(request_ids)):
                        if output.finished:
                            last[output.request_id] = output
                            bar.update()
        finally:
            for request_id in request_ids:
                if request_id not in last:
                    self.cancel(request_id)
        return [last[request_id] for request_id in request_ids]

    def _outputs_for(self, request_ids: Collection[str], at_most: int | None = None) -> list[RequestOutput]:
        """Outputs of these requests: kept ones if there are any, else those of a new step."""
        kept = self._deliver(request_ids, at_most)
        if kept:
            return kept
        self._compute()
        return self._deliver(request_ids, at_most)

    # ---- looking inside -------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """True until the last terminal output was delivered."""
        return bool(self._sequences or self._outbox)

    @property
    def trace(self) -> Trace:
        """What happened so far, step by step."""
        return self._recorder.trace

    def metrics(self) -> metrics_module.Metrics:
        """The metrics of everything in the trace."""
        return metrics_module.metrics(self.trace)

    def snapshot(self) -> dict[str, RequestState]:
        """The state of every unfinished request, by id."""
        with self._exclusive():
            live = sorted(self.scheduler.unfinished(), key=lambda s: s.arrival)
            return {s.request_id: RequestState.of(s, self._recorder.reasons.get(s.request_id)) for s in live}

    def check_invariants(self) -> None:
        """Raise AssertionError unless the books are right. Between steps; used by tests and notebooks."""
        invariants.check(self)


class _NoBar:
    def update(self) -> None:
        pass


def _progress_bar(total: int, wanted: bool):
    """tqdm's bar where it is installed; it shows itself after two seconds."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return contextlib.nullcontext(_NoBar())
    return tqdm(total=total, disable=not wanted, delay=2, unit="request", leave=False)

"""Writes the trace while the engine runs: one record a step, reasons as changes.

What happens between two steps (a cancel, say) goes into the record of the step after it.
"""

from __future__ import annotations

from .scheduler import SchedulerOutput, columns_of
from .sequence import Sequence
from .trace import RequestRecord, StepRecord, Trace


class Recorder:
    """Keeps `trace`, and `reasons`: request id -> why the last step gave it nothing.

    `sequences` is the engine's, by request id. With enabled=False the trace stays empty; reasons
    are kept all the same.
    """

    def __init__(self, settings: dict, sequences: dict[str, Sequence], enabled: bool) -> None:
        self.trace = Trace(settings)
        self.reasons: dict[str, str] = {}
        self._sequences = sequences
        self._enabled = enabled
        self._record = StepRecord()  # the next step's
        self._computed: list[Sequence] = []  # whose chunks were in the last step, and their names
        self._names: tuple[str, ...] = ()

    def request_added(self, sequence: Sequence) -> None:
        if self._enabled:
            sequence.trace_name = self.trace.unique_name(sequence.request_id)
            self.trace.requests[sequence.trace_name] = RequestRecord(
                sequence.trace_name, sequence.request_id, len(sequence.prompt_token_ids), sequence.max_new_tokens,
                sequence.arrival_time, sequence.arrival_step, sequence.priority,
            )  # fmt: skip

    def step_begins(self, index: int, time: float) -> None:
        self._record.index, self._record.start = index, time

    def blocks_taken(self, blocks) -> None:
        """The pool as it is while the forward pass runs, and who took or gave back blocks since last time."""
        record = self._record
        record.blocks_used, record.blocks_free, record.blocks_cached = blocks.num_used, blocks.num_free, blocks.num_cached
        record.owners += blocks.drain_changes()

    def request_ended(self, sequence: Sequence) -> None:
        self._end_wait(sequence)
        if self._enabled:
            self._record.finished[sequence.trace_name] = sequence.finish_reason
            request = self.trace.requests[sequence.trace_name]
            request.finish_reason, request.finish_time = sequence.finish_reason, sequence.finish_time
            request.finish_step = self._record.index

    def step_ended(
        self, scheduled: SchedulerOutput, preempted: list[Sequence], tokens: dict[str, int], outputs: list, time: float
    ) -> None:
        """Complete the step's record and put it into the trace; a new one begins."""
        record, self._record = self._record, StepRecord(index=self._record.index + 1)
        before, self.reasons = self.reasons, scheduled.reasons
        if self._enabled:
            record.end = time
            self._note_changes(record, before)
            sequences, *columns = columns_of(scheduled.chunks)
            if sequences != self._computed:  # most steps compute for the same requests as the one before
                self._computed, self._names = list(sequences), tuple([sequence.trace_name for sequence in sequences])
            record.chunks.keep(self._names, *columns)
            record.admitted = [sequence.trace_name for sequence in scheduled.admitted]
            record.preempted = [sequence.trace_name for sequence in preempted]
            for sequence in scheduled.admitted:
                self.trace.requests[sequence.trace_name].prefix_hit_tokens = sequence.prefix_hit_tokens
            record.tokens = tokens
            self.trace.steps.append(record)
        for output in outputs:
            if output.finished:
                self._end_wait(output.sequence)

    def _note_changes(self, record: StepRecord, before: dict[str, str]) -> None:
        if before != self.reasons:
            known, reasons = self._sequences, record.reasons
            reasons |= {known[i].trace_name: None for i in before if i not in self.reasons}
            reasons |= {known[i].trace_name: reason for i, reason in self.reasons.items() if before.get(i) != reason}

    def _end_wait(self, sequence: Sequence) -> None:
        """An ended request waits no longer: forget its reason, and say so in the next record."""
        if self.reasons.pop(sequence.request_id, None) is not None:
            self._record.reasons[sequence.trace_name] = None

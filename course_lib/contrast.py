"""The scheduler that the course argues against: prefill alone, before decode. Only for comparing.

It cuts prompts into chunks as well, but a step is either all prefill or all decode, and prefill goes first: while a
prompt is pending, nobody gets a token. The long prompt pays for being cut (weights and earlier K/V are read again for
each chunk), and the others wait as long as before. That is how nano-vllm's scheduler chooses; Sarathi-Serve calls
its opposite "stall-free batching" (Agrawal et al., 2024, section 4).

    Engine(runner, config, scheduler=PrefillFirstScheduler)
"""

from __future__ import annotations

from .scheduler import Scheduler, SchedulerOutput


class PrefillFirstScheduler(Scheduler):
    """Chunks without mixing. Promise to decodes: none; while prompts keep coming, they wait."""

    def schedule(self) -> SchedulerOutput:
        out = SchedulerOutput(self.step, self.block_size)
        self._schedule_prefills(out, self.config.max_num_batched_tokens)
        if out.chunks:
            skipped = self.running
        else:  # no prompt is there, or its blocks are not free
            skipped = self._schedule_decodes(out)
        for sequence in skipped:
            out.reasons.setdefault(sequence.request_id, "decode_share")
        if not out.chunks and self.has_unfinished():
            self._force_progress(out)
        return out

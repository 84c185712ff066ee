"""Wrong and other right answers to the exercises of lesson 05: data for the tests."""

MUTANTS = [
    ("C1", "05.1", "for request in self.running:", "for request in self.running if not self.waiting else []:"),
    ("C2", "05.1", "for request in self.running:",
     "for request in self.running[: max(0, limit - sum(r.remaining_token_count for r in self.waiting))]:"),
    ("C3", "05.1", "fits = need <= left or not plan.chunks", "fits = need <= limit or not plan.chunks"),
    ("C3", "05.1", "fits = need <= left or not plan.chunks", "fits = need < left or not plan.chunks"),
    ("C3", "05.1", "if left > 0 and self", "if self"),
    ("C4", "05.1", "left -= need", "left -= 1"),
    ("C4", "05.1", "fits = need <= left or not plan.chunks", "fits = len(plan.chunks) < limit"),
    ("C8", "05.1", "fits = need <= left or not plan.chunks", "fits = need <= left"),
    ("C9", "05.1", "not fits or not self.block_manager.allocate(request, need):",
     "not fits:\n                break\n            if self.block_manager.allocate(request, need) is None:"),
    ("C9", "05.1", "if left > 0 and self.block_manager.allocate(request, place + 1):",
     "if left > 0 and self.block_manager.allocate(request, place + 1) is not None:"),
    ("C9", "05.1", "if seats == 0 or not fits or not self.block_manager.allocate(request, need):\n                break",
     "if seats == 0 or not fits:\n                break\n            if not self.block_manager.allocate(request, need):\n                continue"),
    ("C2", "05.1", "seats = self.config.max_num_seqs - len(self.running)\n",
     ("seats = self.config.max_num_seqs - len(self.running)\n"
     "        room = limit - len(self.running)\n"
     "        for request in self.waiting[: max(0, seats)]:\n"
     "            room -= request.remaining_token_count\n"
     "            if room < 0 or not self.block_manager.allocate(request, request.remaining_token_count):\n"
     "                break\n")),
    ("B7", "05.1", "if seats == 0 or not fits or not self.block_manager.allocate(request, need):",
     "if not self.block_manager.allocate(request, need) or seats == 0 or not fits:"),
    ("B7", "05.1", "if seats == 0 or not fits or not self.block_manager.allocate(request, need):",
     "if not fits or not self.block_manager.allocate(request, need) or seats == 0:"),
    ("C3", "05.1", "fits = need <= left or not plan.chunks", "fits = need <= left or (need > limit and not self.running)"),
    ("C3", "05.1", "fits = need <= left or not plan.chunks", "fits = need <= left or not self.running"),
    ("C18", "05.1", "seats = self.config.max_num_seqs - len(self.running)", "seats = self.config.max_num_seqs"),
]  # fmt: skip

COSTS = []

ALSO_RIGHT = {
    "05.1": [
        '''
class WholePrompts(Scheduler):
    def schedule(self):
        out = SchedulerOutput(self.step, self.block_size)
        used = 0
        for s in list(self.running):
            if used == self.config.max_num_batched_tokens:
                break
            if self.block_manager.allocate(s, s.known_token_count):
                out.chunks += [ScheduledChunk(s, s.known_token_count - 1, 1, kind="decode", is_last=True)]
                used += 1
        while len(self.running) + len(out.admitted) < self.config.max_num_seqs and len(out.admitted) < len(self.waiting):
            s = self.waiting[len(out.admitted)]
            count = len(s.prompt_token_ids)
            if out.chunks and used + count > self.config.max_num_batched_tokens:
                return out
            if not self.block_manager.allocate(s, count):
                return out
            out.admitted.append(s)
            out.chunks += [ScheduledChunk(s, 0, count, kind="prefill", is_last=True)]
            used += count
        return out
''',
        '''
import numpy as np

class Base(Scheduler):
    def grow(self, out, sequence, start, count, kind):
        if not self.block_manager.allocate(sequence, int(start + count)):
            return False
        out.chunks.append(ScheduledChunk(sequence, start, count, kind, True))
        return True

    def spent(self, out):
        return int(np.sum([chunk.num_tokens for chunk in out.chunks]))

class WholePrompts(Base):
    def schedule(self):
        out = SchedulerOutput(self.step, self.block_size, chunks=[])
        budget = np.int64(self.config.max_num_batched_tokens)
        for sequence in self.running:
            if self.spent(out) < budget:
                self.grow(out, sequence, sequence.cached_token_count, 1, "decode")
        for sequence in self.waiting:
            too_long = self.spent(out) + sequence.remaining_token_count > budget
            if len(self.running) + len(out.admitted) >= self.config.max_num_seqs or (too_long and out.chunks):
                break
            if not self.grow(out, sequence, 0, np.int64(sequence.remaining_token_count), "prefill"):
                break
            out.admitted.append(sequence)
        return out
''',
    ],
    "05.2": [
        '''
def longest_gaps(trace):
    result = {}
    for name in trace.requests:
        times = [step.end for step in trace.steps if name in step.tokens]
        result[name] = max((b - a for a, b in zip(times, times[1:])), default=None)
    return result
''',
        '''
import numpy as np

def longest_gaps(trace):
    times = {name: np.array(t) for name, t in trace.token_times().items()}
    return {name: np.diff(t).max() if len(t) > 1 else None for name, t in times.items()}
''',
    ],
}

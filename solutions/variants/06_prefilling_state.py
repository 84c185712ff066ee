"""Wrong and other right answers to the exercises of lesson 06: data for the tests."""

MUTANTS = [
    ("A2", "06.1", "    request.cached_token_count = chunk.start_pos + chunk.num_tokens",
     "    if chunk.is_last:\n        request.cached_token_count = chunk.start_pos + chunk.num_tokens"),
    ("A2", "06.1", "request.cached_token_count = chunk.start_pos + chunk.num_tokens", "request.cached_token_count += chunk.num_tokens"),
    ("A9", "06.1", "request.cached_token_count = chunk.start_pos + chunk.num_tokens",
     'advance.count = getattr(advance, "count", 0) + chunk.num_tokens\n    request.cached_token_count = advance.count'),
    ("I8", "06.1", "RUNNING if ready else PREFILLING", "RUNNING"),
    ("I8", "06.1", "    if request.status is not RUNNING:\n", "    if True:\n"),
    ("I8", "06.1", ">= request.known_token_count", ">= len(request.prompt_token_ids)"),
    ("A1", "06.1", "chunk.start_pos + chunk.num_tokens", "chunk.start_pos + chunk.num_tokens + chunk.is_last"),
    ("A5", "06.1", ">= request.known_token_count", "> request.known_token_count"),
    ("L2", "06.2", "        request.finish_reason = reason\n        self.block_manager.free(request)",
     "        request.finish_reason = reason\n        if request.generated_token_ids:\n            self.block_manager.free(request)"),
    ("L1", "06.2", "for queue in (self.waiting, self.prefilling, self.running):", "for queue in (self.prefilling, self.running):"),
    ("B7", "06.2", "        request.transition_to(WAITING)\n        self.block_manager.free(request)",
     "        if request.status is RUNNING:\n            self.block_manager.free(request)\n        request.transition_to(WAITING)"),
    ("A7", "06.2", "        request.cached_token_count = 0\n", ""),
    ("A7", "06.2", "        request.cached_token_count = 0\n", "        request.cached_token_count = len(request.prompt_token_ids)\n"),
    ("A4", "06.3", "    try:\n        samples = forward(plan)", "    scheduler.commit(plan)\n    scheduler.commit = lambda plan: None\n    try:\n        samples = forward(plan)"),
    ("A4", "06.3", "    except BaseException:\n        scheduler.rollback()", "    except BaseException:\n        scheduler.commit(plan)\n        scheduler.rollback()"),
    ("L4", "06.3", "        scheduler.rollback()\n        raise", "        raise"),
]  # fmt: skip

COSTS = []

ALSO_RIGHT = {
    "06.1": [
        '''
def advance(chunk):
    sequence, start, count, _, _ = chunk
    sequence.cached_token_count = start + count
    left = sequence.known_token_count - sequence.cached_token_count
    if left > 0:
        sequence.transition_to(PREFILLING)
    elif sequence.status in (WAITING, PREFILLING):
        sequence.transition_to(RUNNING)
''',
        '''
import numpy as np

def advance(chunk):
    s = chunk.sequence
    s.cached_token_count = int(np.max([s.cached_token_count, chunk.start_pos + chunk.num_tokens]))
    if s.status is RUNNING:
        return None
    s.transition_to({True: RUNNING, False: PREFILLING}[s.remaining_token_count == 0])
''',
    ],
    "06.2": [
        '''
class Ends(Scheduler):
    def _leave(self, sequence, status):
        {WAITING: self.waiting, PREFILLING: self.prefilling, RUNNING: self.running}[sequence.status].remove(sequence)
        self.block_manager.free(sequence)
        sequence.transition_to(status)

    def finish(self, sequence, reason):
        self._leave(sequence, FINISHED)
        sequence.finish_reason = reason

    def preempt(self, sequence):
        self._preempted.append(sequence)
        self._leave(sequence, WAITING)
        sequence.cached_token_count, sequence.num_preemptions = 0, sequence.num_preemptions + 1
        self.waiting[:0] = [sequence]
''',
        '''
class Ends(Scheduler):
    def finish(self, sequence, reason):
        self.waiting = [s for s in self.waiting if s is not sequence]
        self.prefilling = [s for s in self.prefilling if s is not sequence]
        self.running = [s for s in self.running if s is not sequence]
        if sequence.block_table:
            self.block_manager.truncate(sequence, 0)
        sequence.finish_reason = reason
        sequence.transition_to(FINISHED)

    def preempt(self, sequence):
        super().preempt(sequence)
''',
    ],
    "06.3": [
        '''
def one_step(scheduler, forward):
    plan, done = scheduler.schedule(), False
    try:
        samples = forward(plan)
        done = True
    finally:
        if not done:
            scheduler.rollback()
    scheduler.commit(plan)
    return samples
''',
        '''
def one_step(scheduler, forward):
    plan = scheduler.schedule()
    try:
        samples = forward(plan)
    except Exception as error:
        scheduler.rollback()
        raise error
    else:
        scheduler.commit(plan)
        return samples
''',
    ],
}

"""Wrong and other right answers to the exercises of lesson 11."""

MUTANTS = [
    ("C3", "11.1", "tokens = running + chunk", "tokens = chunk"),
    (None, "11.1", "high = prompt", "high = 4 * prompt"),
    ("M4", "11.1", "pairs_of(chunk, prompt)", "pairs_of(chunk, chunk)"),
    (None, "11.1", "running * context + pairs_of(chunk, prompt)", "running + pairs_of(chunk, prompt)"),
    (None, "11.1", "running * context + pairs_of(chunk, prompt)", "running * prompt + pairs_of(chunk, prompt)"),
    ("C6", "11.2", "for sequence in [*prefilling, *waiting]:", "for sequence in waiting:"),
    (
        "C6",
        "11.2",
        "return old + young",
        "return [s for s in young + old if s in waiting] + [s for s in young + old if s in prefilling]",
    ),
    ("C6", "11.2", "if step - sequence.arrival_step >= self.max_age:", "if False:"),
    ("C6", "11.2", "return old + young", "return young + old"),
    (
        "A2",
        "11.2",
        "young.sort(key=lambda s: (s.remaining_token_count, s.arrival))",
        "young.sort(key=lambda s: (len(s.prompt_token_ids), s.arrival))",
    ),
    (None, "11.2", "old.sort(key=lambda s: s.arrival)", "old.sort(key=lambda s: s.remaining_token_count)"),
    (None, "11.2", "return old + young", "return sorted(old + young, key=lambda s: s in waiting)"),
    (None, "11.2", "for sequence in [*prefilling, *waiting]:", "prefilling += waiting\n        for sequence in prefilling:"),
    (None, "11.2", "(s.remaining_token_count, s.arrival)", "(s.remaining_token_count, -s.arrival)"),
    (
        "C13",
        "11.2",
        "if step - sequence.arrival_step >= self.max_age:",
        "if step - sequence.last_step >= self.max_age:",
    ),
    (
        "C13",
        "11.2",
        "if step - sequence.arrival_step >= self.max_age:",
        "if step - max(sequence.last_step, sequence.arrival_step) >= self.max_age:",
    ),
]

COSTS = []

ALSO_RIGHT = {
    "11.1": [
        """
def chunk_for_target(cost, running, context, prompt, target):
    best = 0
    for chunk in range(1, prompt + 1):
        work = StepWork(running + chunk, running + 1, running * context + pairs_of(chunk, prompt), running * context + prompt)
        if cost.seconds(work) > target:
            break
        best = chunk
    return best
""",
        """
import bisect

def chunk_for_target(cost, running, context, prompt, target):
    def seconds(chunk):
        pairs = sum(prompt - i for i in range(chunk)) + sum([context] * running)
        return cost.seconds(StepWork(chunk + running, running + 1, pairs, context * running + prompt))

    return bisect.bisect_right(range(1, prompt + 1), target, key=seconds)
""",
        """
def chunk_for_target(cost, running, context, prompt, target):
    def promise_is_kept(size):
        for start in range(0, prompt, size):
            end = min(start + size, prompt)
            row = 1 if end == prompt else 0
            work = StepWork(end - start + running, running + row, running * context + pairs_of(end - start, end), running * context + end)
            if cost.seconds(work) > target:
                return False
        return True

    return max((size for size in range(1, prompt + 1) if promise_is_kept(size)), default=0)
""",
    ],
    "11.2": [
        """
class ShortestWithAgeing:
    name = "mine"

    def __init__(self, max_age=64):
        self.limit = max_age

    def order(self, prefilling, waiting, step):
        return sorted(
            list(waiting) + list(prefilling),
            key=lambda s: (1, s.remaining_token_count, s.arrival) if step - s.arrival_step < self.limit else (0, s.arrival, 0),
        )
""",
        """
import heapq

class ShortestWithAgeing(Policy):
    name = "heap"

    def __init__(self, max_age=64):
        self.max_age = max_age

    def order(self, prefilling, waiting, step):
        heap = []
        for s in (*prefilling, *waiting):
            left = len(s.prompt_token_ids) + len(s.generated_token_ids) - s.cached_token_count
            rank = -1 if s.arrival_step <= step - self.max_age else left
            heapq.heappush(heap, (rank, s.arrival, s))
        return tuple(heapq.heappop(heap)[-1] for _ in range(len(heap)))
""",
    ],
}

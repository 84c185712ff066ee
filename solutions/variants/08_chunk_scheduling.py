"""Wrong answers, costly ones and other right ones of lesson 08's exercises."""

MUTANTS = [
    ("C3", "08.1", "min(remaining, tokens_left, max_chunk)", "min(remaining, max_chunk)"),
    ("C8", "08.1", "    size = min(remaining, tokens_left, max_chunk)", "    size = min(remaining, max_chunk)\n    if size > tokens_left:\n        return 0"),
    ("C17", "08.1", "min(remaining, tokens_left, max_chunk)", "max(1, min(remaining, tokens_left, max_chunk))"),
    ("C9", "08.1", "needed - held > free_blocks", "False"),
    ("C9", "08.1", "    if needed - held > free_blocks:\n        return 0\n", "    while (cached + size + block_size - 1) // block_size - held > free_blocks:\n        size -= 1\n"),
    ("C9", "08.1", "needed - held > free_blocks", "free_blocks == 0 and needed > held"),
    ("C10", "08.1", "needed - held > free_blocks", "(size + block_size - 1) // block_size > free_blocks"),
    ("C10", "08.1", "needed - held > free_blocks", "needed > free_blocks"),
    ("C1", "08.2", "        for reader in self.running:", "        for reader in [] if self.prefilling or self.waiting else self.running:"),
    ("C2", "08.2", "        for reader in self.running:\n            if self.get_blocks(reader, 1):\n                self.add_chunk(out, reader, 1)\n                tokens -= 1\n        for sequence in self.prefilling + self.waiting:", "        for sequence in self.prefilling + self.waiting + self.running:"),
    ("C3", "08.2", "self.config.max_prefill_chunk_size, tokens)", "self.config.max_prefill_chunk_size)"),
    ("C3", "08.2", "                tokens -= 1\n", ""),
    ("C3", "08.2", "min(sequence.remaining_token_count, self.config.max_prefill_chunk_size, tokens)", "min(sequence.remaining_token_count, tokens)"),
    ("C9", "08.2", "            if self.get_blocks(reader, 1):\n                self.add_chunk(out, reader, 1)\n                tokens -= 1\n",
     "            if not self.get_blocks(reader, 1):\n                break\n            self.add_chunk(out, reader, 1)\n            tokens -= 1\n"),
    ("C9", "08.2", "            if self.get_blocks(reader, 1):\n                self.add_chunk(out, reader, 1)\n                tokens -= 1\n",
     "            self.add_chunk(out, reader, 1)\n            tokens -= 1\n"),
    ("C11", "08.2", "                self.add_chunk(out, reader, 1)\n                tokens -= 1\n", "                self.add_chunk(out, reader, 1)\n            tokens -= 1\n"),
    ("C18", "08.2", "            if size == 0 or (is_new and seats == 0):\n                break\n            if not self.get_blocks(sequence, size):\n                break\n",
     "            if size == 0 or not self.get_blocks(sequence, size):\n                break\n            if is_new and seats == 0:\n                break\n"),
    ("C4", "08.2", "            tokens -= size\n", "            tokens -= 1\n"),
    ("C6", "08.2", "in self.prefilling + self.waiting", "in self.waiting + self.prefilling"),
    ("C6", "08.2", "            if not self.get_blocks(sequence, size):\n                break", "            if not self.get_blocks(sequence, size):\n                continue"),
    ("C8", "08.2", "            is_new = sequence.status is WAITING\n", "            is_new = sequence.status is WAITING\n            if is_new and sequence.remaining_token_count > tokens:\n                continue\n"),
    ("C9", "08.2", "            if not self.get_blocks(sequence, size):\n                break\n", "            self.get_blocks(sequence, size)\n"),
    ("C13", "08.2", "in self.prefilling + self.waiting", "in sorted(self.prefilling, key=lambda s: s.last_step) + self.waiting"),
    ("C13", "08.2", "in self.prefilling + self.waiting", "in self.prefilling[::-1] + self.waiting"),
    ("C13", "08.2", "            seats -= is_new\n", "            seats -= is_new\n            if is_new and size < sequence.remaining_token_count:\n                self.waiting.append(self.waiting.pop(self.waiting.index(sequence)))\n                self.waiting.append(sequence)\n"),
    ("C14", "08.2", "len(self.waiting) + len(self.prefilling) + len(self.running)", "len(self.waiting) + len(self.running)"),
    ("C17", "08.2", "size == 0 or (is_new and seats == 0)", "is_new and seats == 0"),
    ("C18", "08.2", "- len(self.running) - len(self.prefilling)", "- len(self.running)"),
    ("C18", "08.2", "            seats -= is_new\n", ""),
    ("C18", "08.2", "(is_new and seats == 0)", "seats == 0"),
    ("C1", "08.3", "(reader.last_step, reader.arrival)", "reader.arrival"),
    ("C1", "08.3", "(reader.last_step, reader.arrival)", "(-reader.last_step, reader.arrival)"),
    ("C1", "08.3", "(reader.last_step, reader.arrival)", "(reader.last_step, -reader.arrival)"),
    ("C1", "08.3", "max(1, int(share * budget))", "int(share * budget)"),
]

COSTS = [
    ("C11", "08.2", "            seats -= is_new\n", "            seats -= is_new\n            break\n"),
    ("C11", "08.3", "if not prefill_waits:", "if not running:"),
]

ALSO_RIGHT = {
    "08.1": [
        '''
def chunk_length(remaining, cached, tokens_left, free_blocks, max_chunk, block_size):
    size = sorted([remaining, max_chunk, tokens_left])[0]
    slots_in_last_block = -cached % block_size
    new = max(0, size - slots_in_last_block)
    return size if -(-new // block_size) <= free_blocks else 0
''',
        '''
import numpy as np

def chunk_length(remaining, cached, tokens_left, free_blocks, max_chunk, block_size):
    room = (int(np.ceil(cached / block_size)) + free_blocks) * block_size - cached
    chunk = np.min([remaining, max_chunk, tokens_left])
    return chunk if chunk <= room else np.int64(0)
''',
    ],
    "08.2": [
        '''
class MyScheduler(Scheduler):
    def schedule(self):
        out = SchedulerOutput(self.step, self.block_size)
        budget = self.config.max_num_batched_tokens
        in_flight = len(self.running + self.prefilling)
        stop = False
        for s in [*self.running, *self.prefilling, *self.waiting]:
            decode = s.status is RUNNING
            if stop and not decode:
                continue
            n = 1 if decode else min(s.remaining_token_count, budget, self.config.max_prefill_chunk_size)
            if n < 1:
                continue
            if s.status is WAITING and in_flight >= self.config.max_num_seqs:
                out.reasons[s.request_id] = "seq_budget"
                continue
            if not self.block_manager.allocate(s, s.cached_token_count + n):
                stop = not decode
                continue
            out.chunks.append(ScheduledChunk(s, s.cached_token_count, n, "decode" if decode else "prefill", n == s.remaining_token_count))
            budget -= n
            in_flight += s.status is WAITING
        return out

    def has_unfinished(self):
        return any((self.running, self.prefilling, self.waiting))
''',
        '''
class MyScheduler(Scheduler):
    def schedule(self):
        out = SchedulerOutput(self.step, self.block_size)
        for s in self.running:
            if self.block_manager.capacity_left(s) > 0:
                self.block_manager.allocate(s, s.known_token_count)
                self.add_chunk(out, s, 1)
        left = self.config.max_num_batched_tokens - len(out.chunks)
        newcomers = max(0, self.config.max_num_seqs - len(self.running) - len(self.prefilling))
        line = self.prefilling + self.waiting[:newcomers]
        while line and left:
            s = line.pop(0)
            size = sorted([left, s.remaining_token_count, self.config.max_prefill_chunk_size])[0]
            if not self.get_blocks(s, size):
                line = []
            else:
                self.add_chunk(out, s, size)
                left -= size
        return out

    def has_unfinished(self):
        return bool(self.unfinished())

    def get_blocks(self, sequence, size):
        return self.block_manager.allocate(sequence, sequence.cached_token_count + size)

    def add_chunk(self, out, sequence, size):
        kind = "decode" if sequence.status is RUNNING else "prefill"
        out.chunks.append(ScheduledChunk(sequence, sequence.cached_token_count, size, kind, size == sequence.remaining_token_count))
        out.admitted += [sequence] * (sequence.status is WAITING)
''',
    ],
    "08.3": [
        '''
def choose_decodes(running, prefill_waits, budget, share):
    cap = len(running)
    if prefill_waits:
        cap = int(budget * share) or 1
    left, chosen = set(range(len(running))), []
    while left and len(chosen) < cap:
        first = min(left, key=lambda i: (running[i].last_step, running[i].arrival))
        left.remove(first)
        chosen.append(running[first])
    return chosen
''',
        '''
def choose_decodes(running, prefill_waits, budget, share):
    cap = max(1, int(share * budget)) if prefill_waits else len(running)
    turn = sorted(running, key=lambda s: s.arrival)
    turn.sort(key=lambda s: s.last_step)
    return tuple(turn[:cap])
''',
    ],
}

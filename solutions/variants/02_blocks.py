"""Wrong and other right answers to the exercises of lesson 02."""

MUTANTS = [
    ("B1", "02.1", "cached_tokens + new_tokens, block_size)", "new_tokens, block_size)\n    held_blocks = 0"),
    ("B1", "02.1", "- held_blocks)", "- cached_tokens // block_size)"),  # a partly filled block isn't counted as held
    ("B2", "02.1", "full += 1", "pass"),
    ("B5", "02.1", "cached_tokens + new_tokens, block_size)", "cached_tokens + new_tokens - 1, block_size)"),  # late
    ("B1", "02.2", "- len(sequence.block_table)", "- 0"),
    ("B12", "02.2", "if new > len(self.free_list):", "if not self.free_list:"),
    ("B12", "02.2", "if new > len(self.free_list):", "if new > len(self.free_list) + 1:"),
    ("B9", "02.2", "held.clear()", "pass"),
    ("B9", "02.2", "held.clear()", "held.pop()"),
    ("B6", "02.2", "if self.ref_counts[block] == 0:\n                self.free_list", "if True:\n                self.free_list"),
    ("B6", "02.2", "for block in blocks:\n            self.ref_counts[block] += 1", "pass"),  # sharing that doesn't count
    ("B6", "02.2", "self.ref_counts[block] -= 1", "self.ref_counts[block] = 0"),
    ("B8", "02.2", "if 0 in (self.ref_counts[block] for block in held):", "if False:"),
    ("B8", "02.2", "if 0 in (self.ref_counts[block] for block in held):\n            raise ValueError(f\"held by nobody: a block of {held}\")\n        for block in held:",
     "for block in held:\n            if not self.ref_counts[block]:\n                raise ValueError(block)"),  # half-way
    ("B6", "02.2", "sequence.block_table.extend(blocks)", "sequence.block_table = blocks"),
    ("B1", "02.1", "full, rest = divmod(cached_tokens + new_tokens, block_size)",
     "room = block_size - cached_tokens % block_size\n    held_blocks = 0\n    full, rest = divmod(max(0, new_tokens - room), block_size)"),
    ("B8", "02.2", "self.free_list.append(block)", "self.free_list += [block, block]"),
    ("B12", "02.3", "needed + reserve <= num_free", "num_free > reserve"),
    ("B2", "02.3", "needed += 1", "pass"),
    ("C9", "02.3", "needed + reserve <= num_free", "needed <= num_free"),
]

COSTS = [
    ("B3", "02.1", "if rest:", "if True:"),
    ("B3", "02.1", "cached_tokens + new_tokens, block_size)", "cached_tokens + new_tokens + 1, block_size)"),
    ("B5", "02.1", "cached_tokens + new_tokens, block_size)", "cached_tokens + new_tokens + (new_tokens == 1), block_size)"),  # early
    ("B4", "02.3", "min(prompt_tokens, chunk_size)", "prompt_tokens + max_tokens"),
    ("B4", "02.3", "min(prompt_tokens, chunk_size)", "prompt_tokens"),
    ("B3", "02.3", "if rest:", "if True:"),
    ("B3", "02.3", "needed + reserve <= num_free", "needed + reserve < num_free"),
]

ALSO_RIGHT = {
    "02.1": [
        '''
import math

def new_blocks_needed(cached_tokens, new_tokens, held_blocks, block_size):
    missing = cached_tokens + new_tokens - held_blocks * block_size
    return math.ceil(missing / block_size) if missing > 0 else 0
''',
        '''
import numpy as np

def new_blocks_needed(cached_tokens, new_tokens, held_blocks, block_size):
    new = np.int64(0)
    while (held_blocks + new) * block_size < cached_tokens + new_tokens:
        new += 1
    return new
''',
    ],
    "02.2": [
        '''
class MyBlockManager:
    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.owners = {block: 0 for block in range(num_blocks)}

    @property
    def num_free(self):
        return sum(count == 0 for count in self.owners.values())

    def allocate(self, sequence, num_tokens):
        idle = [block for block, count in self.owners.items() if count == 0]
        table = list(sequence.block_table)
        while len(table) * self.block_size < num_tokens:
            if not idle:
                return False
            table.append(idle.pop())
        for block in table[len(sequence.block_table):]:
            self.owners[block] = 1
        sequence.block_table = table
        return True

    def share(self, sequence, blocks):
        sequence.block_table = list(blocks)
        self.owners.update({block: self.owners[block] + 1 for block in blocks})

    def free(self, sequence):
        if not all(map(self.owners.get, sequence.block_table)):
            raise ValueError("a block without an owner")
        for block in sequence.block_table:
            self.owners[block] -= 1
        sequence.block_table = []
''',
        '''
from collections import Counter, deque

class Pool:
    def __init__(self, num_blocks, block_size):
        self.size, self.idle, self.count = block_size, deque(range(num_blocks)), Counter()

    @property
    def num_free(self):
        return len(self.idle)

class MyBlockManager(Pool):
    def allocate(self, sequence, num_tokens):
        need = blocks_needed(num_tokens, self.size) - len(sequence.block_table)
        fits = need <= self.num_free
        while fits and need > 0:
            self.share(sequence, [self.idle.popleft()])
            need -= 1
        return fits

    def share(self, sequence, blocks):
        sequence.block_table.extend(blocks)
        self.count.update(blocks)

    def free(self, sequence):
        if any(self.count[block] < 1 for block in sequence.block_table):
            raise ValueError("nobody holds this block")
        while sequence.block_table:
            block = sequence.block_table.pop()
            self.count.subtract([block])
            if not self.count[block]:
                self.idle.appendleft(block)
''',
    ],
    "02.3": [
        '''
import numpy as np

def can_admit(prompt_tokens, max_tokens, chunk_size, block_size, num_free, reserve):
    return np.bool_(block_size * (num_free - reserve) >= np.minimum(prompt_tokens, chunk_size))
''',
        '''
def can_admit(prompt_tokens, max_tokens, chunk_size, block_size, num_free, reserve):
    left = prompt_tokens if prompt_tokens < chunk_size else chunk_size
    for _ in range(num_free - reserve):
        left -= block_size
    return left <= 0
''',
    ],
}

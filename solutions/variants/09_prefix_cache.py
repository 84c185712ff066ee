"""Wrong answers, costly ones and other right ones of lesson 09's exercises."""

MUTANTS = [
    ("X2", "09.1", "hash((so_far, block))", "hash(block)"),
    ("X2", "09.1", "hash((so_far, block))", "hash((salt, block))"),
    ("X2", "09.1", "hash((so_far, block))", "hash((salt, block, tuple(token_ids[max(0, end - 2 * block_size) : end - block_size])))"),
    ("X2", "09.1", "hash((so_far, block))", "hash((salt, end, block))"),
    ("X2", "09.1", "hash((so_far, block))", "hash((salt, tuple(sorted(token_ids[: end - block_size])), block))"),
    ("X2", "09.1", "so_far = salt", "so_far = None"),
    ("X1", "09.2", "len(token_ids) - block_size, block_size)", "len(token_ids) - block_size + 1, block_size)"),
    ("P5", "09.2", "range(len(blocks) * block_size, len(token_ids))", "range(len(token_ids) - len(blocks) * block_size)"),
    ("P5", "09.2", "range(len(blocks) * block_size, len(token_ids))", "range(len(token_ids))"),
    ("X6", "09.2", "if entry.token_ids != tokens or entry.parent is not parent:", "if False:"),
    ("X6", "09.2", "entry.token_ids != tokens or entry.parent is not parent", "entry.token_ids != tokens"),
    ("X6", "09.2", "entry.token_ids != tokens or entry.parent is not parent", "entry.parent is not parent"),
    ("X2", "09.2", "        if entry is None:\n            break", "        if entry is None:\n            parent = None\n            continue"),
    ("X2", "09.2", "        if entry is None:\n            break", "        if entry is None:\n            continue"),
    ("X6", "09.2", "entry.parent is not parent", "getattr(entry.parent, 'token_ids', None) != getattr(parent, 'token_ids', None)"),
    ("X4", "09.3", "        self.holders[block] += 1\n", ""),
    ("X4", "09.3", "        if block in self.idle:\n            self.idle.remove(block)\n", ""),
    ("X4", "09.3", "            if self.holders[block] == 0:\n                self.idle.append(block)", "            self.idle.append(block)"),
    ("X5", "09.3", "        self.meant_for[block] = key\n", "        self.meant_for[block] = key\n        self.found[key] = block\n"),
    ("X5", "09.3", "            del self.found[before]", "            pass"),
    ("X5", "09.3", "        self.meant_for[block] = key\n", "        self.meant_for[block] = key or before\n"),
    ("X5", "09.3", "if self.found.get(before) == block:", "if key is not None and self.found.get(before) == block:"),
    ("X5", "09.3", "        if key is not None:\n            self.found.setdefault(key, block)", "        self.found[key] = block"),
    ("X5", "09.3", "            if self.holders[block] == 0:\n", "            if self.holders[block] == 0:\n                self.found.pop(self.meant_for[block], None)\n"),
]

COSTS = [
    ("X10", "09.3", "        if self.found.get(before) == block:\n            del self.found[before]\n", "        self.found.pop(before, None)\n"),
    ("X10", "09.3", "in reversed(blocks)", "in blocks"),
    ("X10", "09.3", "self.idle.pop(0)", "self.idle.pop()"),
]

ALSO_RIGHT = {
    "09.1": [
        '''
def block_hashes(token_ids, block_size, salt=None):
    full = len(token_ids) // block_size
    return [hash((salt, *token_ids[: (n + 1) * block_size])) for n in range(full)]
''',
        '''
import hashlib
import numpy as np

def block_hashes(token_ids, block_size, salt=None):
    digest = hashlib.sha256(repr(salt).encode())
    out = ()
    for n in range(len(token_ids) // block_size):
        digest.update(np.asarray(token_ids[n * block_size : (n + 1) * block_size], dtype=np.int64).tobytes())
        out += (digest.hexdigest(),)
    return out
''',
    ],
    "09.2": [
        '''
def match_prefix(token_ids, lookup, block_size):
    chain = []
    while (len(chain) + 1) * block_size < len(token_ids):
        first = len(chain) * block_size
        parent = chain[-1] if chain else None
        entry = lookup(parent, tuple(token_ids[first : first + block_size]))
        if not (entry and entry.holds(parent, tuple(token_ids[first : first + block_size]), None)):
            break
        chain.append(entry)
    return tuple(e.block for e in chain), range(len(chain) * block_size, len(token_ids))
''',
        '''
import numpy as np

def match_prefix(token_ids, lookup, block_size):
    def walk(parent, start):
        if start + block_size >= len(token_ids):
            return []
        tokens = tuple(token_ids[start : start + block_size])
        entry = lookup(parent, tokens)
        if entry is None or entry.token_ids != tokens or entry.parent != parent:
            return []
        return [entry.block, *walk(entry, start + block_size)]

    blocks = walk(None, 0)
    return blocks, np.arange(len(blocks) * block_size, len(token_ids))
''',
    ],
    "09.3": [
        '''
class SharedBlocks:
    def __init__(self, num_blocks):
        self.count = {}
        self.order = {block: None for block in range(num_blocks)}
        self.content = {}

    def find(self, key):
        if key is None:
            return None
        return next((block for block, (k, ready) in self.content.items() if ready and k == key), None)

    def take(self, key):
        for block in self.order:
            del self.order[block]
            self.content[block] = (key, False)
            self.count[block] = 1
            return block

    def filled(self, block):
        self.content[block] = (self.content[block][0], True)

    def share(self, block):
        self.order.pop(block, None)
        self.count[block] = self.count.get(block, 0) + 1

    def give_back(self, blocks):
        for block in blocks[::-1]:
            self.count[block] -= 1
            if not self.count[block]:
                self.order[block] = None
''',
        '''
from collections import Counter, deque

class SharedBlocks:
    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.refs = Counter()
        self.pending, self.by_key, self.by_block = {}, {}, {}

    def find(self, key):
        return self.by_key.get(key)

    def take(self, key):
        if not self.free:
            return None
        block = self.free.popleft()
        old = self.by_block.pop(block, None)
        if old is not None and self.by_key[old] == block:
            self.by_key.pop(old)
        self.pending[block] = key
        self.refs[block] += 1
        return block

    def filled(self, block):
        key = self.pending.pop(block, None)
        if key is not None and key not in self.by_key:
            self.by_key[key] = block
            self.by_block[block] = key

    def share(self, block):
        if not self.refs[block]:
            self.free.remove(block)
        self.refs[block] += 1

    def give_back(self, blocks):
        for block in reversed(list(blocks)):
            self.refs[block] -= 1
            if self.refs[block] < 1:
                self.free.append(block)
''',
    ],
}

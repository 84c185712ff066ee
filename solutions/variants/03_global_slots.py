"""Wrong answers to the exercises of lesson 03, with the idea that each misses, and other right ones."""

MUTANTS = [
    ("S1", "03.1", "token = start_pos + local", "token = local"),
    ("S1", "03.1", "token = start_pos + local", "token = local + (start_pos if num_tokens == 1 else 0)"),
    ("S1", "03.1", "token = start_pos + local", "token = local + -(-start_pos // block_size) * block_size"),
    ("S1", "03.1", "token = start_pos + local", "token = local + start_pos // block_size * block_size"),
    ("S2", "03.1", "block_table[logical] * block_size", "logical * block_size"),
    ("S2", "03.1", "slots.append(block_table[logical] * block_size + offset)", "slots.append(token)"),
    ("S3", "03.1", "* block_size + offset", "* block_size + token"),
    ("S5", "03.2", "newest = length - 1", "newest = length"),
    ("S2", "03.2", "block = table[newest // block_size]", "block = newest // block_size"),
    ("S3", "03.2", "newest % block_size", "newest"),
    ("S5", "03.3", "token < cached[name]", "token <= cached[name]"),
    ("S5", "03.3", "if token < cached[name]:", "if True:"),
    ("S2", "03.3", "table.index(block) * block_size + offset", "slot"),
    ("S3", "03.3", "* block_size + offset", "* block_size + slot"),
    ("B6", "03.3", "owners.append((name, token))", "return [(name, token)]"),
]

ALSO_RIGHT = {
    "03.1": [
        '''
def slot_mapping(block_table, start_pos, num_tokens, block_size):
    own = [block * block_size + offset for block in block_table for offset in range(block_size)]
    return own[start_pos:start_pos + num_tokens]
''',
        '''
import torch

def slot_mapping(block_table, start_pos, num_tokens, block_size):
    index = torch.arange(start_pos, start_pos + num_tokens)
    return torch.tensor(block_table)[index // block_size] * block_size + index % block_size
''',
        '''
import numpy as np

def slot_mapping(block_table, start_pos, num_tokens, block_size):
    index = start_pos + np.arange(num_tokens)
    return tuple(np.asarray(block_table)[index // block_size] * block_size + index % block_size)
''',
    ],
    "03.2": [
        '''
def decode_slots(block_tables, lengths, block_size):
    return tuple(table[(n - 1) // block_size] * block_size + (n - 1) % block_size for table, n in zip(block_tables, lengths))
''',
        '''
import numpy as np

def decode_slots(block_tables, lengths, block_size):
    out = np.zeros(len(lengths), dtype=int)
    for i in reversed(range(len(lengths))):
        rest, block = lengths[i], 0
        while rest > block_size:
            rest -= block_size
            block += 1
        out[i] = block_tables[i][block] * block_size + rest - 1
    return out
''',
    ],
    "03.3": [
        '''
def who_owns(slot, block_tables, cached, block_size):
    found = []
    for name in block_tables:
        for token in range(cached[name]):
            if block_tables[name][token // block_size] * block_size + token % block_size == slot:
                found.append([name, token])
    return found
''',
        '''
def who_owns(slot, block_tables, cached, block_size):
    def tokens(name, table):
        for logical, block in enumerate(table):
            token = logical * block_size + slot - block * block_size
            if block * block_size <= slot < (block + 1) * block_size and token < cached[name]:
                yield name, token
    return [pair for name, table in block_tables.items() for pair in tokens(name, table)]
''',
    ],
}

"""Wrong and other right answers to the exercises of lesson 07: data for the tests."""

MUTANTS = [
    ("P1", "07.1", "range(begin, begin + count)", "range(count)"),
    ("P1", "07.1", "range(begin, begin + count)", "range(len(where), len(where) + count)"),
    ("S1", "07.1", "slot_mapping(owner.block_table, begin, count,", "slot_mapping(owner.block_table, 0, count,"),
    ("S1", "07.1", "owner.token_ids(begin, count)", "owner.token_ids(0, count)"),
    ("M4", "07.1", "contexts.append(begin + count)", "contexts.append(count)"),
    ("M4", "07.1", "contexts.append(begin + count)", "contexts.append(begin)"),
    ("M4", "07.1", "contexts.append(begin + count)", "contexts.append(owner.known_token_count)"),
    ("M4", "07.1", "contexts.append(begin + count)", "contexts.append(len(owner.block_table) * output.block_size)"),
    ("I3", "07.1", "rows.append(len(row) - 1)", "rows.append(len(row))"),
    ("I3", "07.2", "sample_rows=[count - 1] if completes", "sample_rows=[stop - 1] if completes"),
    ("M8", "07.1", "borders.append(len(row))", "borders = [0, len(row)]"),
    ("M8", "07.1", "borders.append(len(row))", "borders.append(count)"),
    ("I1", "07.1", "if chunk.is_last:", "if True:"),
    ("I3", "07.1", "rows.append(len(row) - 1)", "rows.append(sum(c.num_tokens for c in output.chunks) - 1)"),
    ("I3", "07.1", "rows.append(len(row) - 1)", "rows.append(count - 1)"),
    ("I7", "07.1", "if chunk.is_last:", 'if chunk.kind == "decode":'),
    ("P1", "07.2", "list(range(start_pos, stop))", "list(range(count))"),
    ("S1", "07.2", "slot_mapping(sequence.block_table, start_pos, count, size)", "slot_mapping(sequence.block_table, 0, count, size)"),
    ("M4", "07.2", "context_lens=[stop]", "context_lens=[count]"),
    ("I1", "07.2", "completes = stop == sequence.known_token_count", "completes = True"),
    ("I5", "07.2", "return logits[0] if completes else None", "return logits[0] if completes else logits"),
    ("I7", "07.2", "completes = stop == sequence.known_token_count", "completes = stop > sequence.known_token_count"),
    ("I3", "07.2", "sample_rows=[count - 1] if completes", "sample_rows=[0] if completes"),
]

COSTS = []

ALSO_RIGHT = {
    "07.1": [
        '''
def build_batch(output, slot_mapping=slot_mapping):
    chunks, size = output.chunks, output.block_size
    flat = [(c.sequence, p) for c in chunks for p in range(c.start_pos, c.start_pos + c.num_tokens)]
    starts = [sum(c.num_tokens for c in chunks[:i]) for i in range(len(chunks) + 1)]
    last = [i for i, c in enumerate(chunks) if c.is_last]
    return Batch(
        [s.token_ids(p, 1)[0] for s, p in flat], [p for _, p in flat],
        [s.block_table[p // size] * size + p % size for s, p in flat],
        [c.sequence.block_table for c in chunks], [c.start_pos + c.num_tokens for c in chunks],
        starts, [starts[i + 1] - 1 for i in last], [c.sequence for c in chunks], [chunks[i].sequence for i in last], size,
    )
''',
        '''
import numpy as np

def build_batch(output, slot_mapping=slot_mapping):
    counts = np.array([c.num_tokens for c in output.chunks])
    borders = np.concatenate([[0], np.cumsum(counts)])
    tokens, positions, slots = (), (), ()
    for c in output.chunks:
        tokens += tuple(c.sequence.token_ids(c.start_pos, c.num_tokens))
        positions += tuple(np.arange(c.start_pos, c.start_pos + c.num_tokens))
        slots += tuple(slot_mapping(c.sequence.block_table, c.start_pos, c.num_tokens, output.block_size))
    is_last = np.array([c.is_last for c in output.chunks])
    return Batch(
        token_ids=tokens, positions=positions, slot_mapping=slots,
        block_tables=[tuple(c.sequence.block_table) for c in output.chunks],
        context_lens=np.array([c.sequence.cached_token_count for c in output.chunks]) + counts,
        query_start_loc=borders, sample_rows=borders[1:][is_last] - 1,
        sequences=tuple(c.sequence for c in output.chunks),
        sampled=[c.sequence for c in output.chunks if c.is_last], block_size=output.block_size,
    )
''',
    ],
    "07.2": [
        '''
from course_lib.batch import build_batch
from course_lib.scheduler import ScheduledChunk, SchedulerOutput

def run_prefill_chunk(runner, sequence, chunk_token_ids, start_pos):
    end = start_pos + len(chunk_token_ids)
    chunk = ScheduledChunk(sequence, start_pos, len(chunk_token_ids), "prefill", end == len(sequence.prompt_token_ids))
    result = runner.forward(build_batch(SchedulerOutput(0, runner.kv_cache.block_size, [chunk])))
    if chunk.is_last:
        return result[-1]
''',
        '''
def run_prefill_chunk(runner, sequence, chunk_token_ids, start_pos):
    n, B = len(chunk_token_ids), runner.kv_cache.block_size
    positions = [start_pos + i for i in range(n)]
    slots = [sequence.block_table[p // B] * B + p % B for p in positions]
    left = sequence.known_token_count - (positions[-1] + 1)
    rows, owners = ([], []) if left else ([n - 1], [sequence])
    out = runner.forward(Batch(chunk_token_ids, positions, slots, [sequence.block_table], [positions[-1] + 1], [0, n], rows,
                               [sequence], owners, B))
    return None if left else out[0]
''',
    ],
}

"""The global-index rule: where in the KV pool the token at a position belongs.

    global_token_index = start_pos + local_index_in_chunk
    logical_block      = global_token_index // block_size
    offset             = global_token_index %  block_size
    slot               = block_table[logical_block] * block_size + offset

Only the index in the *whole sequence* counts. Where a chunk begins or ends plays no part, so
chunk borders and block borders need not agree.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the quotient rounded up."""
    return -(-num_tokens // block_size)


def slot_mapping(block_table: SequenceOf[int], start_pos: int, num_tokens: int, block_size: int) -> list[int]:
    """Slots of the tokens start_pos … start_pos + num_tokens - 1 of one sequence.

    block_table: physical block of each logical block, at least as long as the last token needs.
    Returns `num_tokens` slots; slot s is row s % block_size of block s // block_size.
    Raises IndexError when the block table is too short.
    """
    slots = []
    index, end = start_pos, start_pos + num_tokens
    while index < end:
        slots.append(block_table[index // block_size] * block_size + index % block_size)
        index += 1
    return slots

"""The ideas that a wrong answer misses, each with the question that a good teacher would ask.

A check names the concept and asks; it doesn't print the answer. The ids group them: K KV cache, B blocks, S slots,
P positions, M mask, A counters, I intermediate chunk, C scheduler, X prefix cache, T sampling, L life of a request,
U streaming text.
"""

from __future__ import annotations

from typing import NamedTuple


class Concept(NamedTuple):
    """name: the idea in a few words. question: what to think about."""

    name: str
    question: str


CONCEPTS: dict[str, Concept] = {
    "K1": Concept("the cache saves work", "How many tokens went through the model for 10 new ones?"),
    "K2": Concept("only new tokens go in", "Which tokens have no K/V in the cache yet?"),
    "B1": Concept("the last block has room", "How many slots in your last block are still free when the next chunk comes?"),
    "B2": Concept("round up", "How many blocks do 9 tokens need if a block holds 4?"),
    "B3": Concept("an exact fit", "What about a prompt that fills its last block exactly?"),
    "B4": Concept("allocate on demand", "What did paging buy you, if everything is reserved at the start?"),
    "B5": Concept("when a decode needs a block", "Is the newest token already counted at the moment you ask for a block?"),
    "B6": Concept("reference counts", "Who else holds this block?"),
    "B7": Concept("who owns blocks", "Which states own blocks?"),
    "B8": Concept("free once", "Can this run twice for one request, and what does the free list hold then?"),
    "B9": Concept("forget what you gave back", "What does the sequence still remember after its blocks are gone?"),
    "B12": Concept("all or nothing", "Did you compare what is needed with what is free before you changed anything?"),
    "S1": Concept("the global index", "Which token of the *sequence* is this, not of the chunk?"),
    "S2": Concept("logical and physical blocks", "Where does the block table come in?"),
    "S3": Concept("the offset inside a block", "The offset inside a block is always below … what?"),
    "S5": Concept("the newest token's index", "Is the index of the newest token equal to the length?"),
    "P1": Concept("positions go on", "What position had this token when the prompt ran in one piece?"),
    "P5": Concept("positions after a prefix hit", "Should a cold and a warm run of the same prompt agree?"),
    "M1": Concept("a chunk's mask isn't square", "How many ones are in row 0 of a 3 × 8 mask, when five tokens came before the chunk?"),
    "M2": Concept("causality", "May token 5 look at token 6, just because its K/V is there?"),
    "M4": Concept("the earlier chunks", "How long is the context of token 9, wherever its chunk begins?"),
    "M5": Concept("stale slots", "What does your answer depend on, if the free slots hold NaN?"),
    "M7": Concept("mask before softmax", "What is the sum of a row of your attention weights?"),
    "M8": Concept("borders in a flat batch", "Two requests lie side by side in one row of tokens: who may read whom?"),
    "M10": Concept("the order inside a chunk", "Does the order of tokens inside a chunk matter?"),
    "A1": Concept("sampled isn't cached", "Which tokens have K/V after this step? Does the new one?"),
    "A2": Concept("every chunk counts", "What changed after the first chunk? What will the next step compute?"),
    "A4": Concept("count what is done", "What do your counters say if the model raises?"),
    "A5": Concept("done is done", "10 of 10 prompt tokens have K/V: is the prefill done?"),
    "A7": Concept("preemption forgets", "The blocks are given back: what is still in the cache now?"),
    "A9": Concept("whose progress", "Two requests are prefilled at once: whose progress is this number?"),
    "I1": Concept("an intermediate chunk gives no token", "How many tokens can a prefill in three chunks give?"),
    "I3": Concept("your own last row", "Several requests share the row of tokens: which row is yours?"),
    "I5": Concept("nothing to show yet", "What does the user see while the prompt is being read?"),
    "I7": Concept("the last chunk gives the first token", "How many steps does a prompt of 10 take in chunks of 5, for one token?"),
    "I8": Concept("RUNNING means a whole prompt", "Is the whole prompt in the cache when decoding begins?"),
    "C1": Concept("decode first", "What does a reader see whose answer is streaming, when a prompt arrives?"),
    "C2": Concept("decode is served from the budget first", "Who was promised tokens first in this step?"),
    "C3": Concept("what is left of the budget", "What is the sum of the tokens of this step?"),
    "C4": Concept("the unit of the budget", "What does the budget count: requests, or tokens?"),
    "C6": Concept("finish what holds memory", "Who holds memory and makes no progress?"),
    "C8": Concept("a prompt above the budget", "What is a chunk for, if a prompt is longer than the budget?"),
    "C9": Concept("the block budget", "The tokens fit: do the *blocks*?"),
    "C10": Concept("new blocks only", "How many *new* blocks does this chunk need?"),
    "C11": Concept("use the whole budget", "What is left of the budget, and who could use it?"),
    "C13": Concept("its place in line", "Which queue is a half-filled request in, and where?"),
    "C14": Concept("when the engine is idle", "WAITING and RUNNING are empty: is anyone PREFILLING?"),
    "C17": Concept("no empty chunk", "Can chunk_len be 0, and what would the model do with it?"),
    "C18": Concept("the sequence budget", "Who holds a sequence slot?"),
    "X1": Concept("something is left to compute", "Which logits give the first token, if every block was a hit?"),
    "X2": Concept("a block's whole past", "Do the same 16 tokens mean the same after another prefix?"),
    "X4": Concept("a hit is a holder", "Who else holds this block now?"),
    "X5": Concept("when K/V is true", "At what moment does this block's K/V become true?"),
    "X6": Concept("hashes collide", "What if two different prefixes hash alike?"),
    "X10": Concept("which block to keep", "Which block of a prompt is most worth keeping?"),
    "T1": Concept("temperature 0", "What does a temperature of 0 ask for?"),
    "T2": Concept("divide by the temperature", "Does a low temperature make the distribution sharper or flatter?"),
    "T3": Concept("the token that crosses p", "With p = 0.5 and probabilities 0.9 and 0.1, what is kept?"),
    "T5": Concept("back from sorted order", "Whose id is row 0 after the sort?"),
    "T7": Concept("one seed, many draws", "What does the generator give, if it's seeded again before each draw?"),
    "L1": Concept("cancel in the queue", "In which places can a request be, when it is cancelled?"),
    "L2": Concept("cancel in the middle of a prefill", "Which states own blocks?"),
    "L4": Concept("blocks after an error", "Who gives the blocks back, if the model raises?"),
    "U1": Concept("a token isn't a character", "Is every token a whole character?"),
    "U2": Concept("flush at the end", "What was held back, and who brings it?"),
    "U4": Concept("spaces between pieces", "What does the tokenizer do with a leading space, when pieces are decoded apart?"),
}

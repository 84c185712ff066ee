# %% [markdown]
# # Exercises 11 · The scheduler lab
#
# [Lesson 11](../notebooks/11_scheduler_lab.ipynb) turned the dials and looked what happened. Now the other way round: you
# have a target, and look for the setting. And then you write the policy.

# %% name="set-up"
from course_lib import EngineConfig
from course_lib.arena import arena
from course_lib.checks import NotDone, check
from course_lib.cost_model import RooflineCost, StepWork, pairs_of
from course_lib.hardware import find_chip, find_model
from course_lib.lab import alt_text, show, timeline
from course_lib.policies import Policy
from course_lib.workloads import simulate, stall

# %% [markdown] name="task-11-1"
# ## 11.1 A chunk size for a target
#
# `running` streams are decoding, each at a context of `context` tokens, when a prompt of `prompt` tokens comes. No gap
# between two tokens of a stream may be longer than `target` seconds. Which is the largest chunk size that keeps the promise?
#
# A gap of a stream is as long as the step in between, and `cost.seconds(StepWork(tokens, rows, pairs, context))` says how long
# a step takes. All steps with a full chunk hold the same number of tokens, but they aren't equally long:
#
# ```text
# a prompt of 1,000 tokens in chunks of 250;
# each token attends to all before it and to itself
#
#   chunk      tokens     (query, key) pairs:
#                         pairs_of(num_tokens, context_len)
#    0- 249      250        31,375
#  250- 499      250        93,875
#  500- 749      250       156,375
#  750- 999      250       218,875
#
# The last has as many tokens as the first, and seven times the pairs;
# and with it the first token is sampled.
# ```
#
# (If the size doesn't divide the prompt, the last chunk is shorter. You may count as if it were full and ended at the prompt's end.)
#
# A step also computes one token of each stream: one row to sample each, a pair for each token of its context.

# %% name="your-11-1"
def chunk_for_target(cost, running, context, prompt, target):
    """The largest chunk size, in tokens, with which no step takes longer than `target`; 0 if there is none.

    cost     has seconds(StepWork); a step with more work never takes less time
    running  streams, one token each in every step
    context  tokens that each stream's token attends to, itself included
    prompt   tokens of the long prompt; the answer is at most that
    target   seconds; a step that takes exactly that long is within the target
    """
    ### BEGIN SOLUTION
    low = 0
    high = prompt
    while low < high:
        chunk = (low + high + 1) // 2
        tokens = running + chunk
        work = StepWork(tokens, running + 1, running * context + pairs_of(chunk, prompt), running * context + prompt)
        if cost.seconds(work) <= target:
            low = chunk
        else:
            high = chunk - 1
    return low
    ### END SOLUTION

# %% name="check-11-1"
check("11.1", chunk_for_target)

# %% [markdown] name="hints-11-1"
# <details><summary>Hint 1: the rule</summary>
#
# A promise about every step is a promise about the slowest one. Find out which step that is, count its work, and ask the cost model.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# You count the pairs of a chunk as if it were the first of the prompt. The first step is within the target, and so is the second. And
# the last, of a prompt of 100,000 tokens?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Tokens: the chunk's and one per stream. Rows: one per stream, and one for the prompt's first answer token. Pairs: each stream's
# context, and those of a chunk that ends where the prompt ends. Context: all streams' and the whole prompt's. Then search: a larger
# chunk never takes less time, so halve the range, or try one size after the other.
#
# </details>

# %% name="run-11-1" tags=["needs-your-code"]
cost = RooflineCost(find_model("llama3-8b"), find_chip("h100"))
size = chunk_for_target(cost, running=64, context=100, prompt=8192, target=0.020)
print(f"chunks of {size} for steps of at most 20 ms")

config = EngineConfig(
    num_blocks=4096, max_num_batched_tokens=8192, max_prefill_chunk_size=size, max_num_seqs=128, enable_prefix_caching=False
)
trace = simulate(config, stall(64, 8192, arrival=0.1, context=16, output_tokens=60))
slowest = max((step for step in trace.steps if step.decode_tokens), key=lambda step: step.end - step.start)
took = 1e3 * (slowest.end - slowest.start)
print(f"the slowest step of the streams took {took:.1f} ms, with {slowest.prefill_tokens} tokens of the prompt in it")
show(timeline(trace, title=f"chunks of {size}"), alt_text(trace))

# %% [markdown] name="task-11-2"
# ## 11.2 Shortest first, and nobody starves
#
# Order the requests by what is left to prefill, the fewest tokens first; but whoever came `max_age` or more steps ago goes
# before all younger ones, the old ones among themselves in order of arrival. Ties (equally many tokens left): by arrival. With this a short question never stands behind a
# document for long, and a document never waits for ever.
#
# ```text
# step 100, max_age=64
#                                                came in
#                                         left      step   age
#   doc       PREFILLING, 2000 of 8000    6000        30    70
#   essay     WAITING                      900        34    66
#   question  WAITING                       40        99     1
#   note      WAITING                      200        97     3
#
# order: doc, essay        the old ones, by arrival
#        question, note    the young ones, by what is left
# ```
#
# A sequence has `remaining_token_count` (tokens without K/V), `arrival_step`, `arrival` (its place in the order of arrival) and
# `last_step` (the step in which it last had a chunk; -1 for a WAITING one that never had any).

# %% name="your-11-2"
class ShortestWithAgeing(Policy):
    """Fewest tokens left first, ties by arrival; requests of max_age steps and more go before, by arrival."""

    name = "shortest_with_ageing"

    def __init__(self, max_age=64):
        self.max_age = max_age

    def order(self, prefilling, waiting, step):
        """All sequences of both lists, in the order in which they get the step's prefill budget.

        prefilling, waiting  lists of Sequences; they aren't changed
        step                 number of the step that is being scheduled
        """
        ### BEGIN SOLUTION
        old, young = [], []
        for sequence in [*prefilling, *waiting]:
            if step - sequence.arrival_step >= self.max_age:
                old.append(sequence)
            else:
                young.append(sequence)
        old.sort(key=lambda s: s.arrival)
        young.sort(key=lambda s: (s.remaining_token_count, s.arrival))
        return old + young
        ### END SOLUTION

# %% name="check-11-2"
check("11.2", ShortestWithAgeing)

# %% [markdown] name="hints-11-2"
# <details><summary>Hint 1: the rule</summary>
#
# Two groups, each with an order of its own. Which group a request is in depends on when it came, and on nothing that happened since.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# Say age counts from the last chunk. The document gets old, gets one chunk, and is young again. Ten chunks take ten times max_age.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Go through both lists. Put each sequence into one of two lists of your own, by its age. Sort each by its own key. Return the old
# ones, then the others. Ties: by arrival, so the young ones' key has two parts. (One call of sorted with a key that is a tuple does the same.)
#
# </details>

# %% name="run-11-2" tags=["needs-your-code"]
result = arena(ShortestWithAgeing(max_age=64), save=False)  # without save=False it goes on your leaderboard
result

# %% [markdown] name="after-11-2"
# Now make it better. Which `max_age` gets the most points? What does it cost whom? Then forget this policy and write your own:
# a class with an `order` method is all that `arena` needs.

# %% name="bars-11-2" tags=["needs-your-code"]
arena(ShortestWithAgeing(max_age=16), save=False).bars()

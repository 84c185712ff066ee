# %% [markdown]
# # Exercises 06 · The state between
#
# Three exercises to [lesson 06](../notebooks/06_prefilling_state.ipynb): what moves after a step, how a request ends, and
# in which order a step happens. Run the set-up cell first; then every exercise works by itself.

# %% name="set-up"
from bisect import insort

from IPython.display import display

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import build_batch
from course_lib.block_manager import BlockManager
from course_lib.checks import NotDone, check
from course_lib.lab import alt_text, show, timeline
from course_lib.lab.state_machine import state_machine, state_machine_alt
from course_lib.runners import FakeRunner
from course_lib.scheduler import Scheduler, by_arrival
from course_lib.sequence import FINISHED, PREFILLING, RUNNING, WAITING, Sequence

# %% [markdown] name="task-06-1"
# ## 06.1 After the forward pass
#
# A chunk of a request has been computed: its K/V is in the cache. Write `advance(chunk)`, which moves the counter and the
# state of that chunk's request. (The token that a last chunk gives isn't sampled yet at this moment; the engine appends
# it afterwards.)
#
# ```text
# prompt 10, chunks of 4              known   cached   state
# before                                10        0    WAITING
# chunk 0-3 is done                     10        4    PREFILLING
# chunk 4-7 is done                     10        8    PREFILLING
# chunk 8-9 is done                     10       10    RUNNING
#   now the engine appends a token      11       10    RUNNING
# decode 10-10 is done                  11       11    RUNNING
#   and so on: another token            12       11    RUNNING
# ```

# %% name="your-06-1"
def advance(chunk) -> None:
    """Note that a chunk was computed.

    chunk.sequence     the request: .cached_token_count (tokens whose K/V is in the cache), .known_token_count (prompt and
                       generated tokens), .status, .transition_to(status). transition_to raises RuntimeError for a
                       change that isn't legal; RUNNING to RUNNING is none of the legal ones.
    chunk.start_pos    position of the chunk's first token in the sequence. It may lie beyond cached_token_count: a request
                       can begin behind what others have computed for it (lesson 09)
    chunk.num_tokens   tokens that were computed

    Don't rely on chunk.is_last. After a preemption a request computes its prompt and its own answer again, in chunks: it
    may decode only when all of its known tokens are cached.
    """
    ### BEGIN SOLUTION
    request = chunk.sequence
    request.cached_token_count = chunk.start_pos + chunk.num_tokens
    if request.status is not RUNNING:
        ready = request.cached_token_count >= request.known_token_count
        request.transition_to(RUNNING if ready else PREFILLING)
    ### END SOLUTION


# %% name="check-06-1"
check("06.1", advance)

# %% [markdown] name="hints-06-1"
# <details><summary>Hint 1: the rule</summary>
#
# The counter says what is in the cache. After a chunk, that is everything up to the chunk's end, and nothing more.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# A request of 6 prompt and 4 generated tokens was preempted and computes them again in chunks of 6. After the first
# chunk its prompt is complete. May it decode? Four of its tokens have no K/V.
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Set the counter to the position behind the chunk. If the request was decoding, that's all. Otherwise compare the
# counter with the tokens it knows: all of them there, it runs; else it is (or stays) in the middle.
#
# </details>

# %% name="run-06-1" tags=["needs-your-code"]
# Your advance() moves everything in the real engine.
class MyScheduler(Scheduler):
    def commit(self, out):
        for chunk in out.chunks:
            if chunk.sequence.status is not FINISHED:  # cancelled while the forward pass ran
                self._queue(chunk.sequence).remove(chunk.sequence)
                advance(chunk)
                insort(self._queue(chunk.sequence), chunk.sequence, key=by_arrival)
        self.step += 1


config = EngineConfig(
    block_size=4, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16, max_prefill_chunk_size=8,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config, scheduler=MyScheduler)
prompts = {"Ana": [1] * 5, "Ben": [2] * 20, "Chen": [3] * 17, "Dora": [4] * 8}
tokens = {name: [] for name in prompts}
for name, prompt in prompts.items():
    engine.add_request(prompt, SamplingParams(max_tokens=8), request_id=name)
while engine.has_unfinished_requests():
    for output in engine.step():
        tokens[output.request_id] += output.new_token_ids
    engine.check_invariants()
display(show(state_machine(engine.trace), state_machine_alt(engine.trace)))
wrong = [name for name, prompt in prompts.items() if tokens[name] != FakeRunner().solo(prompt, 8)]
assert not wrong, f"other tokens than alone: {', '.join(wrong)}"
print("every token of every request is the one that it would have got alone")

# %% [markdown] name="task-06-2"
# ## 06.2 The end, in any state
#
# Write `finish()` and `preempt()`. A request can end in every state: cancelled while it waits, cancelled in the middle of
# its prompt, done. And the pool can be so full that a request has to hand back its memory and begin again.
#
# | | is in queue | holds blocks | after `finish()` | after `preempt()` |
# |---|---|---|---|---|
# | WAITING | `self.waiting` | no | FINISHED, 0 blocks | (can't be preempted) |
# | PREFILLING | `self.prefilling` | **yes** | FINISHED, 0 blocks | WAITING, 0 blocks, 0 cached |
# | RUNNING | `self.running` | **yes** | FINISHED, 0 blocks | WAITING, 0 blocks, 0 cached |

# %% name="your-06-2"
class Ends(Scheduler):
    """A scheduler whose requests end, and lose their blocks, by your rules.

    self.waiting, self.prefilling, self.running    lists; a request is in the one of its status, until it ends
    self.block_manager.free(request)               gives back all blocks of a request, and empties its block_table
    request.transition_to(status)                  changes the status

    What you may set: request.finish_reason, request.cached_token_count, request.num_preemptions. What follows from
    them can't be set: prefilled_token_count is min(cached_token_count, prompt length).
    """

    def finish(self, request, reason: str) -> None:
        """End a request, whatever state it is in. `request.finish_reason` becomes `reason`; no queue holds it any more."""
        ### BEGIN SOLUTION
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        request.transition_to(FINISHED)
        request.finish_reason = reason
        self.block_manager.free(request)
        ### END SOLUTION

    def preempt(self, request) -> None:
        """Take the blocks of a PREFILLING or RUNNING request. Its tokens are kept, prompt and answer.

        It goes to the front of WAITING; request.num_preemptions counts up by 1. Later it computes all its known
        tokens again.
        """
        self._preempted.append(request)  # for the trace
        ### BEGIN SOLUTION
        origin = self.prefilling if request.status is PREFILLING else self.running
        origin.remove(request)
        self.waiting.insert(0, request)
        request.transition_to(WAITING)
        self.block_manager.free(request)
        request.cached_token_count = 0
        request.num_preemptions += 1
        ### END SOLUTION


# %% name="check-06-2"
check("06.2", Ends)

# %% [markdown] name="hints-06-2"
# <details><summary>Hint 1: the rule</summary>
#
# Who leaves a state leaves its queue, and gives back what that state holds. Giving back nothing costs nothing: free() of
# a request without blocks does no harm.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# A request with 12 cached tokens is preempted. Its blocks go to somebody else. If its counter still says 12, where will
# its next chunk begin, and whose K/V will it read?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# finish: out of whichever queue holds it; FINISHED; the reason; free. preempt: out of its queue, to the front of the
# waiting ones; WAITING; free; cached_token_count back to zero (prefilled_token_count is computed from it); one
# preemption more.
#
# </details>

# %% name="run-06-2" tags=["needs-your-code"]
# Your rules in the real engine, in a pool that is too small for all, with users who leave in every state.
config = EngineConfig(
    block_size=4, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=24, max_prefill_chunk_size=8,
    enable_prefix_caching=False,
)  # fmt: skip
engine = Engine(FakeRunner(), config, scheduler=Ends)
lengths = {"Ana": 9, "Ben": 14, "Chen": 7, "Dora": 16, "Emil": 12, "Finn": 10}
for name, length in lengths.items():
    engine.add_request([len(name)] * length, SamplingParams(max_tokens=12), request_id=name)
leave = {1: "Dora", 2: "Finn", 6: "Ana"}  # after this step: in the middle of the prompt, waiting, running
while engine.has_unfinished_requests():
    engine.step()
    engine.check_invariants()
    step = engine.trace.steps[-1].index
    if step in leave:
        state = engine.snapshot()[leave[step]].status
        before = engine.block_manager.num_free
        engine.cancel(leave[step])
        free = engine.block_manager.num_free
        print(f"after step {step}: {leave[step]} leaves while {state}, free blocks {before} → {free}")

print(f"at the end {engine.block_manager.num_free} of 14 blocks are free")
display(show(timeline(engine.trace, by="step", title="your ends and preemptions"), alt_text(engine.trace)))
show(state_machine(engine.trace), state_machine_alt(engine.trace))

# %% [markdown] name="task-06-3"
# ## 06.3 The order of a step
#
# Write `one_step(scheduler, forward)`: schedule, run the model, commit. The model may raise. Then it must be as if the step
# had not begun, and the caller must hear of it.
#
# ```text
# prompt 10                                            cached   blocks
# before                                                  4        1
# schedule()   takes blocks for the next chunk            4        2
# forward()    raises: device out of memory
# afterwards   the caller has the same error, and         4        1
# one_step()   again: the same chunk                      8        2
# ```

# %% name="your-06-3"
def one_step(scheduler, forward) -> list:
    """Plan a step, compute it, and only then count it as done.

    scheduler.schedule()    returns the plan; the blocks that it needs are taken
    forward(plan)           runs the model; returns the samples, or raises
    scheduler.commit(plan)  moves counters and states
    scheduler.rollback()    gives back the blocks that were taken since the last commit

    Returns the samples. What forward raises reaches the caller.
    """
    ### BEGIN SOLUTION
    plan = scheduler.schedule()
    try:
        samples = forward(plan)
    except BaseException:
        scheduler.rollback()
        raise
    scheduler.commit(plan)
    return samples
    ### END SOLUTION


# %% name="check-06-3"
check("06.3", one_step)

# %% [markdown] name="hints-06-3"
# <details><summary>Hint 1: the rule</summary>
#
# A counter says what is in the cache, not what should get there soon. So it may move when the model has returned.
#
# </details>
#
# <details><summary>Hint 2: a counter-example</summary>
#
# The counter moves, then the model raises. The next step plans the *following* chunk. Who computes the one that failed?
# And who gives back the block that it had taken?
#
# </details>
#
# <details><summary>Hint 3: a sketch</summary>
#
# Plan. Try to run it; if anything is raised, roll back and let the error go on its way. Otherwise commit, and return what
# the model returned.
#
# </details>

# %% name="run-06-3" tags=["needs-your-code"]
# Your step in an engine of five lines, with real queues, real blocks, and a model that fails twice.
config = EngineConfig(block_size=4, num_blocks=16, max_prefill_chunk_size=4, enable_prefix_caching=False)
scheduler = Scheduler(config, BlockManager(16, 4))
runner = FakeRunner(fail_at={1, 4})
runner.init_kv_cache(16, 4)
request = Sequence("r", list(range(100, 110)))
scheduler.add(request)

while len(request.generated_token_ids) < 4:
    try:
        samples = one_step(scheduler, lambda plan: runner.execute(build_batch(plan)))
        request.generated_token_ids += [sample.token_id for sample in samples]
        note = ""
    except NotDone:
        raise
    except RuntimeError as failure:
        note = str(failure)
    cached, known = request.cached_token_count, request.known_token_count
    cells = "■" * cached + "□" * (known - cached)
    print(f"call {runner.num_calls - 1}: {request.status.name:<10} {cells:<14} blocks: {len(request.block_table)}   {note}")

expected = FakeRunner().solo(list(range(100, 110)), 4)
assert request.generated_token_ids == expected, f"got {request.generated_token_ids}; without failures it's {expected}"
print("the same four tokens as without the failures")

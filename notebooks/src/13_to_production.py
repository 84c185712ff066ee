# %% [markdown]
# # 13 · To production
#
# **After this lesson you can**
#
# - find each room of your engine again in vLLM, and say what is different there;
# - start `vllm serve` with the settings of an `EngineConfig`, and name those that have no equal;
# - measure any server with the numbers and the pictures of this course;
# - say where one machine ends, and what tensor parallelism, pipeline parallelism and separate prefill change.
#
# **Time** 35 minutes · **You need** lessons 08 to 11 · **Adds to the engine** nothing. From here on it is somebody else's
# engine, and you can read it.

# %% name="map"
from course_lib.lab import house

house("scheduler", "block_manager", "batch", "engine")

# %% [markdown]
# ## The same house, larger
#
# Everything below about vLLM was read from the sources of **version 0.32**. It moves fast; if you have another version, the ideas
# will be where they were and some names won't. Here is your engine, and where the same thing lives there:
#
# | here | in vLLM (`vllm/v1/…`) | what is different |
# |---|---|---|
# | `sequence.py` | `request.py`: `Request`, `RequestStatus` | `num_computed_tokens` is our `cached_token_count` |
# | `slots.py` | `worker/block_table.py` | the slot mapping is made in a kernel, for the whole batch |
# | `block_manager.py` | `core/kv_cache_manager.py`, `core/block_pool.py` | several kinds of layers, each with blocks of its own |
# | `prefix_cache.py` | `core/kv_cache_utils.py` | hashes of blocks, chained as ours; also images, LoRA |
# | `scheduler.py` | `core/sched/scheduler.py`: `Scheduler.schedule()` | speculative tokens, encoders, remote K/V |
# | `policies.py` | `core/sched/request_queue.py` | first come, or by priority |
# | `batch.py`, `runners/model.py` | `worker/gpu_model_runner.py` | buffers that stay on the GPU, CUDA graphs |
# | `model/attention/` | `attention/backends/` | one backend per kind of hardware and of attention |
# | `model/sampler.py` | `sample/sampler.py` | penalties, grammars, many requests at once |
# | `text.py` | `engine/detokenizer.py` | in another process than the model |
# | `engine.py` | `engine/core.py`, `engine/async_llm.py` | steps overlap: the next one is scheduled while one runs |
# | `trace.py`, `metrics.py` | `metrics/loggers.py` | counters and histograms for Prometheus |
#
# > **Predict, then run.** A request of yours is WAITING, PREFILLING, RUNNING or FINISHED. One of these states has no equal in
# > vLLM: which one? And how many times as long is vLLM's `scheduler.py` as yours?

# %% name="guess-vllm"
my_guess_missing_state = "WAITING"  # write yours
my_guess_factor = 3  # write yours

# %% name="sizes"
from pathlib import Path

import course_lib.scheduler

VLLM_LINES = 3436  # vllm/v1/core/sched/scheduler.py in vLLM 0.32
VLLM_STATES = {"WAITING", "RUNNING", "PREEMPTED", "FINISHED"}  # RequestStatus, variants of WAITING and FINISHED together

ours = len(Path(course_lib.scheduler.__file__).read_text(encoding="utf-8").splitlines())
missing = {state.name for state in course_lib.sequence.SequenceStatus} - VLLM_STATES
print(f"No equal in vLLM: {', '.join(missing)}. You said {my_guess_missing_state}.")
print(f"vLLM's scheduler.py has {VLLM_LINES:,} lines, {VLLM_LINES / ours:.0f} times as many. You said {my_guess_factor}.")

# %% [markdown]
# In vLLM there is WAITING (of several kinds), RUNNING, PREEMPTED, and several kinds of FINISHED, but no PREFILLING. A half-filled request is RUNNING there from its first chunk on, and what tells it from one that decodes
# is a count: are its computed tokens fewer than its prompt? The comment at the top of its `schedule()` says it as the first lines
# of yours do: no prefill phase, no decode phase, only computed tokens that catch up with known ones. This course gave the state
# a name, because one can't talk about what has no name.
#
# It has a consequence. Since half-filled and decoding requests are one list, they are served in **one order**, that of their
# arrival, and the oldest goes first, whatever it needs. Yours gives every decode its token first. In vLLM, a decode can find the
# budget spent by a prompt that came before it.
#
# ## Your settings, its flags
#
# Here is what you have turned in this course, translated. The library knows how:

# %% name="flags"
from course_lib import EngineConfig

config = EngineConfig(block_size=32, max_num_seqs=128, max_num_batched_tokens=2048, max_prefill_chunk_size=512)
print(config.to_vllm().command("HuggingFaceTB/SmolLM2-135M-Instruct").replace(" --", " \\\n    --"))

# %% [markdown]
# > **Predict, then run.** `EngineConfig` has eleven fields. For how many of them does `vllm serve` have nothing that means the
# > same, or only something that differs in a way you could measure?

# %% name="guess-flags"
my_guess_without_equal = 2  # write yours

# %% name="all-flags"
from dataclasses import fields

EQUALS = {
    "block_size": ("--block-size", "the same; which sizes are allowed depends on the attention backend"),
    "num_blocks": ("--num-gpu-blocks-override", "the same; normally it is measured: --gpu-memory-utilization"),
    "max_num_seqs": ("--max-num-seqs", "the same limit on requests in flight"),
    "max_num_batched_tokens": ("--max-num-batched-tokens", "the same budget of a step"),
    "max_prefill_chunk_size": ("--long-prefill-token-threshold", "DIFFERS: a request that is alone isn't cut to it"),
    "enable_prefix_caching": ("--enable-prefix-caching", "the same idea"),
    "max_model_len": ("--max-model-len", "the same"),
    "max_decode_share": ("", "NOTHING: decode has no cap"),
    "kv_watermark": ("--watermark", "the same part of the pool, kept free on admission; 0 if not set"),
    "max_num_partial_prefills": ("", "NOTHING in 0.32; earlier versions had a flag of this name"),
    "policy": ("--scheduling-policy", "DIFFERS: fcfs or priority, over decodes and prefills alike"),
}
assert list(EQUALS) == [field.name for field in fields(EngineConfig)]
for name, (flag, words) in EQUALS.items():
    print(f"{name:26}{flag or '-':32}{words}")
count = sum(words.startswith(("DIFFERS", "NOTHING")) for _, words in EQUALS.values())
print(f"\nWithout an exact equal: {count} of {len(EQUALS)}. You said {my_guess_without_equal}.")
print("\nWhat the library says of the settings above:")
for field, why in config.to_vllm().differs.items():
    print(f"  {field}: {why}.")

# %% [markdown]
# Three more flags decide whether a comparison with your engine is fair. `--enable-chunked-prefill` is on by default.
# `--scheduler-reserve-full-isl`, on by default too, admits a prompt only when **all** of it fits into the pool, not only its first
# chunk: vLLM prefers to wait rather than to preempt. And `--async-scheduling` lets steps overlap, which your engine can't.
#
# In SGLang the chunk is `--chunked-prefill-size`, the order `--schedule-policy`.
#
# ## The same workload, the same numbers
#
# You can measure any server that speaks OpenAI's protocol from outside, with the demo of lesson 00, its table and its timeline. In one
# terminal a server, in another the measurement:
#
# ```bash
# vllm serve HuggingFaceTB/SmolLM2-135M-Instruct \
#     --max-num-batched-tokens 2048 \
#     --long-prefill-token-threshold 256
#
# python -m course_lib bench --url http://127.0.0.1:8000
# ```
#
# vLLM's own tool is `vllm bench serve`. It prints TTFT, TPOT and ITL with the percentiles you ask for, and goodput under targets
# (`--goodput ttft:500 tpot:50`, in milliseconds). Remember lesson 10: TPOT is a mean over an answer, and ITL isn't among the
# targets it takes. Ask for `--percentile-metrics ttft,tpot,itl --metric-percentiles 50,99,100`: the last is the longest gap.
#
# ## Where one machine ends: memory
#
# So far the model fitted, with room for K/V. How much room is a question of arithmetic, and the simulator's hardware table
# answers it: weights first, K/V in what is left.
#
# > **Predict, then run.** Yi-34B in 16 bits has 69 GB of weights, and an H100 has 80 GB of memory, of which nine tenths may be used.
# > It fits. With **two** H100, how many times as many tokens of K/V fit as with one?

# %% name="guess-memory"
my_guess_memory_factor = 2  # write yours

# %% name="memory"
from course_lib.hardware import find_chip, find_model, num_blocks_for

room = {}
print("model          chips    weights   tokens of K/V   prompts of 8,192 at a time")
for model in ("llama3-8b", "yi-34b"):
    for chip in ("h100", "2x-h100", "4x-h100"):
        room[model, chip] = tokens = 16 * num_blocks_for(model, chip)
        weights = 2 * find_model(model).parameters / 1e9
        print(f"{model:12}{chip:>8}{weights:8.0f} GB{tokens:16,}{tokens // 8192:29}")
print(f"\nTwo chips: {room['yi-34b', '2x-h100'] / room['yi-34b', 'h100']:.0f} times as much. You said {my_guess_memory_factor}.")

# %% [markdown]
# One chip is full of weights, and one long prompt fits beside them. The second brings only room. That is the first reason for
# **tensor parallelism**: each layer's matrices are cut, every chip holds a slice of the weights *and* of each token's K/V, and after each
# half of a layer they add up their results. For the scheduler nothing changes: one batch, one block table, a step that is
# shorter. (`--tensor-parallel-size 2`. It needs a fast link between the chips; within one node that is NVLink.)
#
# > **Predict, then run.** Llama-3-8B fits on one chip easily. Take four. A decode step of 64 streams, each at a context of 1,000
# > tokens (in lesson 11 it was 100), and the same step with a chunk of 512 beside it: which of the two gets closer to being four
# > times as fast?

# %% name="guess-four"
my_guess_closer = "the decodes"  # or "the chunk": write yours

# %% name="four-chips"
from course_lib.cost_model import StepWork, pairs_of, step_cost

STEPS = {
    "64 decodes": StepWork(64, 64, 64 * 1000, 64 * 1000),
    "64 decodes and a chunk of 512": StepWork(576, 64, 64 * 1000 + pairs_of(512, 4096), 64 * 1000 + 4096),
}
gains = {}
print(f"{'step':32}" + "".join(f"{chip:>12}" for chip in ("h100", "2x-h100", "4x-h100")))
for name, work in STEPS.items():
    seconds = [step_cost(find_model("llama3-8b"), find_chip(chip), work).seconds for chip in ("h100", "2x-h100", "4x-h100")]
    gains[name] = seconds[0] / seconds[-1]
    print(f"{name:32}" + "".join(f"{1e3 * value:9.1f} ms" for value in seconds) + f"   {gains[name]:.1f} × with four")
closer = "the chunk" if gains["64 decodes and a chunk of 512"] > gains["64 decodes"] else "the decodes"
print(f"\nCloser to four times: {closer}. You said {my_guess_closer}.")

# %% [markdown]
# Every step has a part that no chip takes over: launching kernels, scheduling, sampling (a millisecond here, an assumption of the model),
# and, which the model leaves out, the chips' talk with each other. The shorter the step, the more it weighs. That part is what
# production fights with **CUDA graphs** (many launches become one) and with **scheduling the next step while this one runs**.
#
# ## Pipelines, and why chunks were invented
#
# When a model doesn't fit into one node, its *layers* are dealt out: the first node computes layers 0 to 19, the next 20 to 39, and so
# on (`--pipeline-parallel-size`). A batch goes through the stages like a car through an assembly line, and while it is in stage 2,
# the next batch is in stage 1. That works as long as all cars take equally long. Here is such a line, in a dozen lines of Python. Four stages, and each batch
# takes as many ticks in every stage as it has tokens:

# %% name="pipeline"
def pipeline(batches, stages=4):
    """(Ticks until all batches are through, part of the stages' time that was idle)."""
    free_at = [0] * stages  # when each stage is done with what it has
    for tokens in batches:
        ready = 0  # when this batch leaves the stage before
        for stage in range(stages):
            ready = max(ready, free_at[stage]) + tokens
            free_at[stage] = ready
    total = free_at[-1]
    return total, 1 - sum(batches) / total


prompt, decodes = 2048, 64
whole = [decodes] * 8 + [prompt + decodes] + [decodes] * 8
chunked = [decodes] * 4 + [256 + decodes] * 8 + [decodes] * 5
for name, batches in (("a whole prompt in one batch", whole), ("the same in chunks of 256", chunked)):
    total, idle = pipeline(batches)
    print(f"{name:30}{sum(batches):6} tokens in {len(batches)} batches   {total:6} ticks   {idle:4.0%} of the stages' time idle")

# %% [markdown]
# The long batch goes through the line with an empty stretch before and behind it: a **bubble**. Batches of nearly the same size leave little. (Some of the idle
# time is in both runs, since a line must fill at the start and drain at the end; and the clock is simplified, since a real stage with few tokens
# takes as long as reading its weights.) This was the first
# use of chunked prefill: the first Sarathi paper is about pipeline bubbles as much as about stalls.
#
# ## Two machines, one for each phase
#
# Chunks make prefill and decode share a machine in peace. The other answer is to separate them: one group of machines only prefills, another only
# decodes, and the K/V of a finished prompt is sent over. No chunk ever rides in a decode step; each group gets the parallelism
# that suits its phase. It is called **disaggregated prefill**, and its price is the transfer.
#
# > **Predict, then run.** A prompt of 8,192 tokens takes about 210 ms to prefill (Llama-3-8B, an H100). Sending its K/V over a link of 400
# > Gbit/s: how many milliseconds?

# %% name="guess-transfer"
my_guess_transfer_ms = 200  # write yours

# %% name="transfer"
model = find_model("llama3-8b")
nbytes = 8192 * model.kv_values_per_token * 2
prefill = step_cost(model, find_chip("h100"), StepWork(8192, 1, pairs_of(8192, 8192), 8192)).seconds
print(f"K/V of 8,192 tokens: {nbytes / 1e9:.2f} GB. Prefill {1e3 * prefill:.0f} ms.")
for gigabits in (10, 100, 400):
    print(f"over {gigabits:3} Gbit/s: {1e3 * nbytes / (gigabits * 1e9 / 8):6.1f} ms")
print(f"You said {my_guess_transfer_ms} ms.")

# %% [markdown]
# On a fast network a tenth of the prefill; on an ordinary one, four times the prefill. vLLM's documentation is frank about what to expect: the feature is
# experimental, it lets TTFT and ITL be tuned apart and controls the tail of the ITL, and it **doesn't improve throughput**. The connectors are in
# `vllm/distributed/kv_transfer/kv_connector/v1/` (NIXL, Mooncake, LMCache and others), switched on by `--kv-transfer-config`; SGLang calls it PD
# disaggregation. For a handful of machines, chunked prefill with a good chunk size is the simpler tool, and it is what you now know how to choose.
#
# ## What else they do
#
# | | in a sentence | where |
# |---|---|---|
# | speculative decoding | a cheap guess of several tokens, checked in one step: a decode becomes a small chunk | `--speculative-config`; Leviathan et al., ICML 2023 |
# | quantized weights and K/V | fewer bytes per step, so decode is faster and more fits | `--quantization`, `--kv-cache-dtype` |
# | K/V beyond the GPU | evicted blocks go to host memory, and come back instead of being computed again | `--kv-offloading-size` |
# | structured output | tokens that a grammar forbids get a logit of minus infinity | `vllm/v1/structured_output/` |
# | many replicas | requests with the same prefix go to the replica that has it | `--data-parallel-size`, and a router in front |
# | refusing work | above a limit, a quick error is kinder than a long wait | `--max-num-queued-reqs`, `--max-num-queued-tokens` |
#
# Look at the first line again. A speculative step computes several tokens of one sequence over its cached prefix, with causal attention among them. You have
# written that: it's a chunk.
#
# ## The rule
#
# > **Production engines are your engine plus what hardware demands. Find the counter that says how far a request is, the budget of a
# > step, and the table of blocks, and you can read any of them.**
#
# ## What to read next, and where exactly
#
# 1. **Sarathi-Serve** (Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI 2024): the paper of this course.
#    Before it: *SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked Prefills* (2023), for pipelines.
# 2. **vLLM**: `Scheduler.schedule()` in `vllm/v1/core/sched/scheduler.py`, from its first comment to the end of the loop over running requests; then
#    `allocate_slots()` in `vllm/v1/core/kv_cache_manager.py`, which has a drawing of the blocks. The paper: Kwon et al., *Efficient Memory Management for Large
#    Language Model Serving with PagedAttention*, SOSP 2023.
# 3. **vLLM's documentation**: *Optimization and Tuning* (preemption, chunked prefill), *Parallelism and Scaling*, *Disaggregated Prefilling*.
# 4. **nano-vllm** (`nanovllm/engine/scheduler.py`, `block_manager.py`): the idea on two screens. Compare its order of prefill and decode with yours.
# 5. **SGLang**: `python/sglang/srt/managers/schedule_policy.py`, for policies that know the prefix cache. The paper: Zheng et al., *SGLang: Efficient Execution of
#    Structured Language Model Programs*, NeurIPS 2024.
# 6. **Orca** (Yu et al., OSDI 2022): where continuous batching comes from.
# 7. **DistServe** (Zhong et al., OSDI 2024) and **Splitwise** (Patel et al., ISCA 2024): the case for separate prefill. **Mooncake** (Qin et al., FAST 2025): an
#    architecture built around the K/V cache, and the trace that this course can replay.
#
# ## Three questions
#
# 1. Your vLLM server runs with `--max-num-batched-tokens 8192` and no other setting. A prompt of 8,192 tokens arrives while 100 chats
#    stream. Does chunked prefill, which is on, prevent the stall?
#
#    <details><summary>Answer</summary>
#
#    Hardly. A chunk is limited by what is left of the budget, here about 8,092 tokens: nearly all of the prompt goes into one step. The budget
#    is the chunk size, unless `--long-prefill-token-threshold` sets a smaller one.
#
#    </details>
#
# 2. You go from one chip to two by tensor parallelism, and the model is far from filling one. What gets better, and what doesn't?
#
#    <details><summary>Answer</summary>
#
#    Each step gets shorter, so TTFT and ITL do, though by less than half: the fixed part stays and the chips must talk. Tokens per second *and chip*
#    get worse. Two replicas would have served more requests; two chips as one serve each of them faster.
#
#    </details>
#
# 3. With separate prefill machines there is no chunk in any decode step. Would you still cut prompts into chunks on the prefill machines?
#
#    <details><summary>Answer</summary>
#
#    Yes, for two reasons: a short prompt behind a long one shouldn't wait for all of it, and a finished chunk's K/V can be on its way to the
#    decode machine while the next is computed. What is gone is the need to keep the chunks small for the sake of decodes.
#
#    </details>
#
# This was the last lesson. [Your engine](../exercises/99_my_engine.ipynb) puts the parts that you wrote together and lets them
# serve. Outside, the next step is number 2 of the list above: vLLM's `schedule()`, which you can read now.

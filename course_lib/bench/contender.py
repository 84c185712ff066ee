"""One contender of the throughput benchmark, in a process of its own: python contender.py NAME MODEL_FOLDER

Reads one job a line from standard input, {"prompts": [[token ids], …], "max_tokens": n}, and answers each with a line
{"seconds": s, "token_ids": [[…], …]}. The first line out, {"ready": version}, says that the model is loaded. Greedy,
float32, no end-of-sequence: every request gets exactly n tokens.

This file is run by other environments too (vLLM has one of its own), so it imports only what its contender needs.
"""

from __future__ import annotations

import json
import os
import sys
import time


def course_lib(folder: str):
    import torch
    from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams, __version__, load_model

    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu"))

    def run(prompts, max_tokens):
        blocks = sum(-(-(len(prompt) + max_tokens) // 16) for prompt in prompts)
        config = EngineConfig(
            num_blocks=blocks, max_num_seqs=64, max_num_batched_tokens=512, max_prefill_chunk_size=512,
            enable_prefix_caching=False, kv_watermark=0.0,
        )  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        outputs = Engine(runner, config, record_trace=False).generate(prompts, params, progress=False)
        return [output.token_ids for output in outputs]

    return f"course_lib {__version__}, attention {runner.attention}, torch {torch.__version__}", run


def _transformers(folder: str):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return f"transformers {transformers.__version__}, torch {torch.__version__}", torch, transformers, model


def transformers_one_by_one(folder: str):
    version, torch, _, model = _transformers(folder)

    def run(prompts, max_tokens):
        results = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
            results.append(output[0, len(prompt) :].tolist())
        return results

    return version, run


def transformers_padded(folder: str):
    version, torch, _, model = _transformers(folder)

    def run(prompts, max_tokens):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
        return output[:, longest:].tolist()

    return version, run


def transformers_generate_batch(folder: str):
    version, torch, transformers, model = _transformers(folder)

    def run(prompts, max_tokens):
        config = transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Room for all requests at once, as ours gets. By default the pool is sized from the free memory: several GB,
        # which are then filled with zeros in each call.
        blocks = sum(-(-(len(prompt) + max_tokens) // 256) for prompt in prompts)
        batching = transformers.ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512, use_cuda_graph=False)
        with torch.inference_mode():
            outputs = model.generate_batch(
                inputs=prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
            )
        found = sorted(outputs.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
        return [list(output.generated_tokens) for output in found]

    return version, run


def vllm_cpu(folder: str):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import torch
    import vllm

    engine = vllm.LLM(
        folder, dtype="float32", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048, enable_prefix_caching=False
    )

    def run(prompts, max_tokens):
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return f"vllm {vllm.__version__}, torch {torch.__version__}", run


CONTENDERS = {
    function.__name__: function
    for function in (course_lib, vllm_cpu, transformers_generate_batch, transformers_padded, transformers_one_by_one)
}


def main(name: str, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    version, run = CONTENDERS[name](folder)
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        token_ids = run(job["prompts"], job["max_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "token_ids": token_ids}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Compile the Triton kernels for a GPU that isn't here: `python tests/compile_kernels.py 90` (its compute capability).

Runs the launching code of triton_paged.py as it is, with a driver that says it has such a GPU and kernels that are
compiled to machine code instead of started. Prints a line of JSON per kernel: what was compiled and what it takes.
Needs triton and the assembler that comes with it, no GPU; TRITON_INTERPRET must not be set.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from course_lib.batch import Batch
from course_lib.model.attention import triton_paged as kernels
from course_lib.model.attention.plan import make_plan


class AbsentGpu:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


# heads, K/V heads, head size, query tokens of one sequence, splits
CASES = [
    (9, 3, 64, 1, 1),  # SmolLM2: a decode,
    (9, 3, 64, 50, 1),  # a chunk,
    (9, 3, 64, 1, 8),  # and a decode over a long context
    (8, 8, 128, 50, 1),
    (8, 1, 80, 1, 1),  # a head size that is no power of two
]


def launch_all(dtype, cases, launch):
    """Launch every kernel in shapes that differ once they are compiled. `launch.what` says in which."""
    for case in cases:
        heads, kv_heads, head_dim, tokens, splits = case
        launch.what = (str(dtype).removeprefix("torch."), *case)
        batch = Batch([], [], [], [[0] * 7], [100], [0, tokens], [], [], [], 16)
        query = torch.empty(tokens, heads, head_dim, dtype=dtype)
        key = torch.empty(tokens, kv_heads, head_dim, dtype=dtype)
        cache = torch.empty(7 * 16, kv_heads, head_dim, dtype=dtype)
        plan = make_plan(batch, heads, kv_heads, dtype, query.device)
        plan.num_splits = splits
        kernels.paged_attention(query, cache, cache, plan, 0.125)
        kernels.store_kv(key, key, cache, cache, torch.zeros(tokens, dtype=torch.int64))


class Compile:
    """Takes the place of JITFunction.run: compiles, prints what came out, starts nothing."""

    what = ()

    def __init__(self):
        self.run, self.seen = JITFunction.run, set()

    def __call__(self, kernel, *args, grid, **options):
        options["warmup"] = True
        result = self.run(kernel, *args, grid=grid, **options)
        if result.hash in self.seen:
            return
        self.seen.add(result.hash)
        ptx = result.asm["ptx"].splitlines()
        print(
            json.dumps(
                {
                    "kernel": kernel.fn.__name__,
                    "case": self.what,
                    "machine code": len(result.asm["cubin"]),  # bytes
                    "shared": result.metadata.shared,  # bytes
                    "wgmma": sum("wgmma.mma_async" in line for line in ptx),  # Hopper's matrix instructions
                    "mma": sum("mma.sync" in line for line in ptx),  # those of the GPUs before
                    "copies of 16 bytes": sum("cp.async.cg" in line and "0x10" in line for line in ptx),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(AbsentGpu(capability))
    kernels.readable = lambda tensor, name: tensor  # the real one refuses tensors on a CPU
    launch = Compile()
    JITFunction.run = lambda self, *args, **options: launch(self, *args, **options)
    launch_all(torch.bfloat16 if capability >= 80 else torch.float16, CASES, launch)
    launch_all(torch.float32, CASES[:3], launch)

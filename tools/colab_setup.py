"""On Colab: install what the lessons need and Colab doesn't have, and get the model. Nothing that Colab has is changed.

    python tools/colab_setup.py        the first cell of a lesson that `python tools/build_colab.py` made does this

Colab's torch, its kernel and its widgets fit its GPU and its page: they stay as they are, whatever version that is. So
does everything else that is in range; what is missing or too old is installed beside it.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
COLABS_OWN = ("torch", "numpy", "ipykernel", "ipywidgets", "jupyterlab")  # kept, or done without


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(dependencies: list[str], found=version_of) -> list[str]:
    """Those that have to be installed: not Colab's own, and not there in a version that will do."""
    requirements = [Requirement(text) for text in dependencies]
    return [str(one) for one in requirements
            if one.name not in COLABS_OWN and (found(one.name) is None or not one.specifier.contains(found(one.name), prereleases=True))]  # fmt: skip


def install(requirements: list[str], found=version_of) -> int:
    """Install them, and nothing that would change one of Colab's own. Returns pip's exit code."""
    pins = [f"{name}=={found(name)}" for name in COLABS_OWN if found(name)]
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept.txt")
        kept.write_text("\n".join(pins), encoding="utf-8")
        return subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(kept), *requirements], check=False).returncode


def main() -> int:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    needed = missing(dependencies)
    print(f"Installing {', '.join(needed) or 'nothing'}; as Colab has it: "
          f"{', '.join(f'{name} {version_of(name)}' for name in COLABS_OWN if version_of(name))}", flush=True)  # fmt: skip
    if needed and (code := install(needed)):
        return code
    return subprocess.run([sys.executable, "-m", "course_lib", "fetch"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

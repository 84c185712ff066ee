"""The copies for Colab: what their first cell does, where their links lead, and what is left as Colab has it."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build_colab
import colab_setup

COURSE = "https://github.com/OWNER/REPO"
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The folder of the copies."""
    out = tmp_path_factory.mktemp("build") / "colab"
    build_colab.build(out, COURSE, "colab")
    return out


def set_up_cell(folder, name):
    notebook = nbformat.read(folder / name, as_version=4)
    return next(cell for cell in notebook.cells if cell.cell_type == "code").source


def test_every_lesson_and_exercise_has_a_copy_and_a_badge(copies):
    page = (copies / "README.md").read_text(encoding="utf-8")
    badges = re.findall(r"\]\(https://colab.research.google.com/github/OWNER/REPO/blob/colab/([^)]+)\)", page)
    assert badges == [file.relative_to(copies).as_posix() for folder in ("notebooks", "exercises") for file in sorted((copies / folder).iterdir())]
    for folder in ("notebooks", "exercises"):
        assert sorted(file.name for file in (copies / folder).iterdir()) == sorted(file.name for file in (ROOT / folder).glob("*.ipynb"))
    for file in copies.rglob("*.ipynb"):
        nbformat.validate(nbformat.read(file, as_version=4))


def test_the_first_cell_gets_the_course_and_installs_through_one_script(copies):
    cell = set_up_cell(copies, "exercises/03_global_slots.ipynb")
    magics = [line for line in cell.splitlines() if line.startswith(("!", "%"))]
    python = "\n".join(line for line in cell.splitlines() if line not in magics)
    assert magics == [
        f"![ -d /content/course ] || git clone -q --depth 1 {COURSE} /content/course",
        "%cd -q /content/course/exercises",
        "!python ../tools/colab_setup.py",
    ]
    assert {node.name for statement in ast.parse(python).body if isinstance(statement, (ast.Import, ast.ImportFrom))
            for node in statement.names} == {"sys", "output"}  # fmt: skip
    assert "pip" not in cell and (ROOT / "tools" / "colab_setup.py").is_file()


def test_the_lessons_themselves_have_no_trace_of_it():
    for file in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "exercises").glob("*.ipynb")]:
        assert "google.colab" not in file.read_text(encoding="utf-8"), file.name


def test_every_link_of_a_copy_is_an_address_and_its_file_is_there(copies):
    seen = set()
    for file in copies.rglob("*.ipynb"):
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "markdown":
                seen |= set(re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", cell.source, flags=re.DOTALL)))
    colab, github = "https://colab.research.google.com/github/OWNER/REPO/blob/colab/", "https://github.com/OWNER/REPO/blob/HEAD/"
    assert any(link.startswith(colab) for link in seen) and any(link.startswith(github) for link in seen)
    for link in seen:
        assert link.startswith(("https://", "http://", "#")), f"{link} leads nowhere on Colab"
        for base in (colab, github):
            assert not link.startswith(base) or (ROOT / link.removeprefix(base).partition("#")[0]).is_file(), link


def test_the_readmes_badge_leads_to_the_branch_that_the_workflow_pushes(copies):
    """On GitHub `../../` leads from the README of a branch to the repository. (That the workflow runs can't be tried here.)"""
    workflow = (ROOT / ".github/workflows/colab.yml").read_text(encoding="utf-8")
    commands = re.findall(r"run: (python tools/build_colab.py .*)", workflow)
    assert commands == ['python tools/build_colab.py --course "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY" --branch colab']
    folder = build_colab.OUT.relative_to(ROOT).as_posix()
    assert f"git add -f {folder}\n" in workflow and f"--prefix={folder}/" in workflow and ":refs/heads/colab" in workflow
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (page,) = re.findall(rf"\[!\[[^]]+\]\({re.escape(build_colab.BADGE)}\)\]\(\.\./\.\./blob/colab/([^)]+)\)", readme)
    assert (copies / page).is_file()


@pytest.mark.parametrize("course", ["course.txt", "https://gitlab.com/OWNER/REPO", "https://github.com/OWNER", ""])
def test_another_place_than_github_is_refused(course, monkeypatch, capsys):
    monkeypatch.setattr(build_colab, "course_address", lambda: course)
    monkeypatch.setattr(sys, "argv", ["build_colab.py"])
    assert build_colab.main() == 1
    assert "give --course https://github.com/OWNER/REPO" in capsys.readouterr().err


# ---- what is installed


def versions(**changes):
    """A machine as Colab's may be: old kernel and widgets, a torch of its own."""
    there = {"torch": "2.5.0+cu124", "numpy": "2.0.2", "ipykernel": "6.17.1", "ipywidgets": "7.7.1", "matplotlib": "3.10.0", "tqdm": "4.67.1",
             "transformers": "4.57.1", "safetensors": "0.8.1"} | changes  # fmt: skip
    return there.get


def names(requirements):
    return {re.match(r"[\w-]+", text)[0] for text in requirements}


def test_what_is_missing_or_too_old_is_installed_and_colabs_own_is_not():
    assert names(colab_setup.missing(DEPENDENCIES, versions())) == {"transformers", "gguf", "tokenizers", "anywidget"}
    good = versions(transformers="5.24.0", gguf="0.19.0", tokenizers="0.23.3", anywidget="0.11.0")
    assert colab_setup.missing(DEPENDENCIES, good) == []
    assert names(colab_setup.missing(DEPENDENCIES, versions(matplotlib=None))) >= {"matplotlib"}


def test_pip_may_not_change_what_is_colabs_own(monkeypatch):
    seen = {}

    def pip(command, **options):
        at = command.index("-c")
        seen.update(kept=Path(command[at + 1]).read_text(), wanted=command[at + 2 :])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(colab_setup.subprocess, "run", pip)
    assert colab_setup.install(["gguf>=0.17"], versions()) == 0
    assert seen["kept"].splitlines() == ["torch==2.5.0+cu124", "numpy==2.0.2", "ipykernel==6.17.1", "ipywidgets==7.7.1"]
    assert seen["wanted"] == ["gguf>=0.17"]


def test_when_pip_fails_the_script_does_too(monkeypatch):
    commands = []

    def fails(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(colab_setup.subprocess, "run", fails)
    monkeypatch.setattr(colab_setup, "missing", lambda dependencies: ["gguf>=0.17"])
    assert colab_setup.main() == 3 and len(commands) == 1

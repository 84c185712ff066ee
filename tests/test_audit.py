"""The audit (`make audit`): the project keeps its rules, and each rule sees a fault that is planted for it."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import audit

NAMES = audit.files()


def test_the_project_keeps_every_rule():
    """What is installed may differ here from what is pinned; `make audit` looks at that as well."""
    found = audit.report()
    del found["dependencies are pinned, and installed as pinned"]
    assert not any(found.values()), found
    assert not list(audit.dependency_faults(version_of=audit.pins().__getitem__))


# ---- dependencies


@pytest.fixture
def project(tmp_path):
    """A project with two dependencies."""
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2"]\noptional-dependencies.test = ["nbval"]\n')
    (tmp_path / "constraints.txt").write_text("# a comment\ntorch==2.13.0\nnbval==0.11.0\nidna==3.20\n")
    return tmp_path


def faults_with(project, **changes):
    installed = {"torch": "2.13.0+cpu", "nbval": "0.11.0", "idna": "3.20"} | changes

    def version_of(name):
        if installed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return list(audit.dependency_faults(project, version_of))


def test_dependencies_are_compared_with_what_is_pinned_and_installed(project):
    assert faults_with(project) == []
    assert faults_with(project, idna=None) == [], "only what is declared must be there"
    assert faults_with(project, torch="2.12.1") == ["torch: pinned to 2.13.0, but 2.12.1 is installed"]
    assert faults_with(project, idna="3.19") == ["idna: pinned to 3.20, but 3.19 is installed"]
    assert faults_with(project, nbval=None) == ["nbval: pinned to 0.11.0, but not installed"]
    (project / "constraints.txt").write_text("torch==2.13.0\n")
    assert faults_with(project) == ["nbval: declared in pyproject.toml, but not pinned in constraints.txt"]


def test_a_package_without_a_licence_is_seen(monkeypatch):
    from email.message import Message

    def metadata_of(name):
        message = Message()
        if name == "expression":
            message["License-Expression"] = "MIT"
        if name == "classifier":
            message["Classifier"] = "License :: OSI Approved :: BSD License"
        if name == "field":
            message["License"] = "Apache 2.0\n\nIts whole text"
        return message

    assert audit.licences(["expression", "classifier", "field", "none"], metadata_of) == {
        "expression": "MIT", "classifier": "BSD License", "field": "Apache 2.0", "none": ""}  # fmt: skip
    monkeypatch.setattr(audit, "licences", lambda names: {"none": ""})
    assert audit.report()["every installed package says its licence"] == ["none: says no licence"]


# ---- code


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code"),
        ("AutoModel.from_pretrained(name, trust_remote_code=choice)", "trust_remote_code"),
        ("options = {'trust_remote_code': True}", "trust_remote_code"),
        ("import pickle", "imports pickle"),
        ("from dill import loads", "imports dill"),
        ("torch.load(file)", "weights_only"),
        ("torch.load(file, weights_only=False)", "weights_only"),
        ("numpy.load(file, allow_pickle=True)", "allow_pickle"),
        ("eval(text)", "eval()"),
        ("def f():\n    exec(text)", "exec()"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("os.system(text)", "shell"),
    ],
)
def test_code_that_runs_what_comes_from_elsewhere_is_seen(code, words):
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": ["%matplotlib inline\n", *code.splitlines(keepends=True)]}]})
    for name, text in (("x.py", code), ("x.ipynb", notebook)):
        [fault] = audit.code_faults(name, text)
        assert fault.startswith(f"{name}: ") and words in fault


@pytest.mark.parametrize(
    "code",
    [
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "torch.load(file, weights_only=True)",
        "model.eval()",
        "subprocess.run(['ls'], shell=False)",
        "# eval(text)\n'exec(text)'",
    ],
)
def test_code_that_only_looks_like_it_is_let_through(code):
    assert not list(audit.code_faults("x.py", code))


def test_a_text_run_as_javascript_is_seen():
    assert list(audit.code_faults("x.js", "eval(text)")) and list(audit.code_faults("x.html", "new Function(text)"))


def test_an_exception_that_is_not_needed_any_more_is_seen():
    name = next(iter(audit.EXEC_PLACES))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in audit.EXEC_PLACES}
    assert not list(audit.exec_place_faults(texts))
    assert list(audit.exec_place_faults({**texts, name: "model.eval()"})) == [f"{name}: named in EXEC_PLACES, but runs no text"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ("token: ghp_" + "a1B2" * 9, "an access token"),
        ("HF=hf_" + "a1B2" * 8, "an access token"),
        ("key is sk-" + "a1B2" * 10, "an API key"),
        ("AKIA" + "ABCD" * 4, "an API key"),
        ("https://me:" + "hunter2@example.org/x", "a password in an address"),
        ("password = " + "'hunter2hunter2'", "a password in code"),
    ],
)
def test_what_looks_like_a_secret_is_seen_and_not_repeated(line, what):
    [fault] = audit.secret_faults("x.md", f"first\n{line}\n")
    assert fault == f"x.md, line 2: looks like {what}"


def test_words_and_pictures_are_no_secrets():
    text = "a token_budget=2048; password = ''\nhttps://example.org:80/a@b\n<img src='data:image/png;base64,AKIA" + "ABCD" * 4 + "'>"
    assert not list(audit.secret_faults("x.md", text))


# ---- what is from others

THIRD_PARTY = "## Files that aren't code\n\n| file | what | from | licence |\n|---|---|---|---|\n| `data/*.txt` | texts | us | MIT |\n"


def test_a_file_of_unknown_origin_is_seen():
    assert not list(audit.origin_faults(["data/a.txt", "x.py", "Makefile"], THIRD_PARTY))
    assert list(audit.origin_faults(["data/a.txt", "b.png"], THIRD_PARTY)) == ["b.png: docs/third_party.md doesn't say whose it is"]
    assert "no such file" in next(audit.origin_faults(["x.py"], THIRD_PARTY))
    assert "no origin or no licence" in next(audit.origin_faults(["data/a.txt"], THIRD_PARTY.replace("MIT", "")))


@pytest.mark.parametrize("notice", ["Copyright (c) 2024 Somebody", "# SPDX-License-Identifier: MIT", "All rights reserved."])
def test_a_notice_of_somebody_else_is_seen(notice):
    assert list(audit.notice_faults("x.py", notice)) and not list(audit.notice_faults("LICENSE", notice))


# ---- known vulnerabilities


def answers(**done):
    return lambda command, **options: subprocess.CompletedProcess(command, 1, **{"stdout": "", "stderr": "", **done})


def test_known_vulnerabilities_are_told(monkeypatch):
    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: True)
    found = {"name": "idna", "version": "3.20", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.21"]}]}
    safe, unknown = {"name": "tqdm", "version": "4.70.1", "vulns": []}, {"name": "x", "skip_reason": "not on PyPI"}
    said = json.dumps({"dependencies": [safe, found, unknown]})
    assert audit.known_vulnerabilities(run=answers(stdout=said)) == (
        ["idna 3.20: PYSEC-1, fixed in 3.21"], "pip-audit's service knows nothing of 1 of 3 packages: x")  # fmt: skip
    assert audit.known_vulnerabilities(run=answers(stdout=json.dumps({"dependencies": [safe]}))) == ([], "")
    faults, why = audit.known_vulnerabilities(run=answers(stderr="WARNING: retry\nERROR: no route to host"))
    assert not faults and why == "pip-audit could not ask its service: ERROR: no route to host"


def test_without_pip_audit_a_plain_sentence_says_so_and_the_rest_decides(monkeypatch, capsys):
    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(audit, "report", lambda: {"no secrets": []})
    assert audit.main() == 0
    assert "LEFT OUT no known vulnerabilities: pip-audit isn't installed" in capsys.readouterr().out
    monkeypatch.setattr(audit, "report", lambda: {"no secrets": ["x.md, line 2: looks like an API key"]})
    assert audit.main() == 1
    assert "FAULTS   no secrets\n    x.md, line 2" in capsys.readouterr().out

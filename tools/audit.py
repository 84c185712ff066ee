"""Look the project over for what a stranger's machine should not be asked to trust.

    python tools/audit.py       prints what was looked at and what is wrong; exit 1 if anything is

- every declared dependency is pinned in constraints.txt, and what is installed is what is pinned;
- no code runs downloaded code or unpickles, none goes through a shell, and `eval` and `exec` stand in named places only;
- no file holds anything that looks like a secret;
- every file that isn't code is named in docs/third_party.md, with its origin and licence; no code carries a notice of others;
- every installed package says its licence (the list is printed);
- no pinned version has a known vulnerability: by pip-audit, where that is installed and can ask its service.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

# Where code is run that stands in a text, and whose text that is. A place that is gone is reported too.
EXEC_PLACES = {
    "course_lib/checks/my_parts.py": "the learner's own notebook, for the learner",
    "notebooks/src/08_chunk_scheduling.py": "the lines that the reader put in order",
    "notebooks/08_chunk_scheduling.ipynb": "built from the above",
    "tests/exercise_source.py": "the project's own solutions and wrong answers",
    "tests/test_checks.py": "the project's own solutions",
    "tests/test_parsons.py": "a puzzle of the test",
    "tests/test_views.py": "code that the lab wrote",
}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}
SHELL_CALLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
SECRETS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an access token": r"\b(ghp|gho|ghs|github_pat|glpat|hf|xox[abp]|pypi)[-_][A-Za-z0-9_-]{20,}",
    "an API key": r"\b(sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{35})\b",
    "a password in an address": r"\b[a-z]+://[^\s/:@{}'\"]+:(?!secret@)[^\s/:@{}'\"]+@",
    "a password in code": r"(?i)\b(password|passwd|secret|api_key|apikey)\s*=\s*[\"'][^\"'\s]{8,}[\"']",
}
PICTURES = (".png", ".jpg", ".gif", ".woff2")
CODE = {".py", ".ipynb", ".md", ".toml", ".yml", ".c", ".js", ".mjs", ".html", ".css", ".cfg"}
SETTINGS = ("Makefile", "postBuild", ".gitignore", ".gitattributes", ".ci/*", ".devcontainer/*", ".github/*")
NOTICE = re.compile(r"copyright (\(c\)|©|\d{4})|SPDX-License-Identifier|all rights reserved", re.IGNORECASE)
MAY_HOLD_A_NOTICE = ("LICENSE", "tools/audit.py", "tests/test_audit.py")
PIP_AUDIT_SECONDS = 300


def files(root: Path = ROOT) -> list[str]:
    """The project's files, as git knows them: not what a learner or a build adds."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


# ---- dependencies


def pins(root: Path = ROOT) -> dict[str, str]:
    """Package -> version, of constraints.txt."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.strip().partition("==") for line in lines if line.strip() and line[0] != "#"]
    return {canonicalize_name(name): version for name, _, version in parts}


def dependency_faults(root: Path = ROOT, version_of: Callable[[str], str] = importlib.metadata.version) -> Iterator[str]:
    """Declared and not pinned, pinned and another installed, declared and missing."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    declared = [canonicalize_name(Requirement(text).name) for texts in (project["dependencies"], *extras) for text in texts]
    pinned = pins(root)
    yield from (f"{name}: declared in pyproject.toml, but not pinned in constraints.txt" for name in declared if name not in pinned)
    for name, version in pinned.items():
        try:
            installed = version_of(name).partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        except importlib.metadata.PackageNotFoundError:
            if name in declared:
                yield f"{name}: pinned to {version}, but not installed"
            continue
        if installed != version:
            yield f"{name}: pinned to {version}, but {installed} is installed"


def licences(names: list[str], metadata_of=importlib.metadata.metadata) -> dict[str, str]:
    """Installed package -> what it says its licence is; "" where it says nothing."""
    found = {}
    for name in names:
        try:
            metadata = metadata_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        classifiers = [text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
        found[name] = metadata.get("License-Expression") or ", ".join(classifiers) or (metadata.get("License") or "").strip().partition("\n")[0]
    return found


# ---- code


def python_of(name: str, text: str) -> list[str]:
    """The Python in a file: the file, or a notebook's code cells without magics."""
    if name.endswith(".py"):
        return [text]
    if not name.endswith(".ipynb"):
        return []
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return ["\n".join(line for line in "".join(cell["source"]).splitlines() if not line.lstrip().startswith(("%", "!"))) for cell in cells]


def code_faults(name: str, text: str) -> Iterator[str]:
    """What the code of one file does that it should not."""
    for source in python_of(name, text):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                yield from (f"{name}: imports {module}, which can run what it reads" for module in modules if module.partition(".")[0] in UNPICKLERS)
            elif isinstance(node, ast.Dict):
                keys = {key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}
                if "trust_remote_code" in keys and not _is(keys["trust_remote_code"], False):
                    yield f"{name}: trust_remote_code that isn't False"
            elif isinstance(node, ast.Call):
                yield from (f"{name}: {fault}" for fault in _call_faults(node, may_exec=name in EXEC_PLACES))
    if name.endswith((".js", ".mjs", ".html")) and re.search(r"\beval\(|\bnew Function\(", text):
        yield f"{name}: runs a text as JavaScript"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _call_faults(call: ast.Call, may_exec: bool) -> Iterator[str]:
    called, given = ast.unparse(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    if "trust_remote_code" in given and not _is(given["trust_remote_code"], False):
        yield "trust_remote_code that isn't False"
    if called == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if "allow_pickle" in given and not _is(given["allow_pickle"], False):
        yield "allow_pickle that isn't False"
    if called in ("eval", "exec") and not may_exec:
        yield f"{called}() in a place that EXEC_PLACES doesn't name"
    if called in SHELL_CALLS or "shell" in given and not _is(given["shell"], False):
        yield f"{called}() goes through a shell"


def exec_place_faults(texts: dict[str, str]) -> Iterator[str]:
    """Named places that need no exception any more."""
    for name in EXEC_PLACES:
        nodes = [node for source in python_of(name, texts.get(name, "")) for node in ast.walk(ast.parse(source))]
        if not {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)} & {"eval", "exec"}:
            yield f"{name}: named in EXEC_PLACES, but runs no text"


def secret_faults(name: str, text: str) -> Iterator[str]:
    """Where something looks like a secret; it isn't printed."""
    text = re.sub(r"base64,[\w+/=\s]+", "", text)  # a picture may look like anything
    for number, line in enumerate(text.splitlines(), 1):
        yield from (f"{name}, line {number}: looks like {what}" for what, pattern in SECRETS.items() if re.search(pattern, line))


# ---- what is from others


def origins(text: str) -> dict[str, tuple[str, str]]:
    """Pattern of file names -> (origin, licence), from the first table of docs/third_party.md."""
    table = re.search(r"^## Files that aren't code\n\n(?:\|.*\n){2}((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[1].splitlines() if table else [])]
    return {file.strip("`"): (origin, licence) for file, _, origin, licence in rows}


def origin_faults(names: list[str], third_party: str) -> Iterator[str]:
    """Files without a row, rows without a file, rows that don't say whose it is."""
    named = origins(third_party)
    others = [name for name in names if Path(name).suffix not in CODE and not _matches(name, SETTINGS)]
    yield from (f"{name}: docs/third_party.md doesn't say whose it is" for name in others if not _matches(name, named))
    yield from (f"{pattern}: named in docs/third_party.md, but there is no such file" for pattern in named if not fnmatch.filter(others, pattern))
    yield from (f"{pattern}: docs/third_party.md names no origin or no licence" for pattern, words in named.items() if not all(words))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def notice_faults(name: str, text: str) -> Iterator[str]:
    if name not in MAY_HOLD_A_NOTICE and NOTICE.search(text):
        yield f"{name}: carries a copyright notice; name its origin and licence in docs/third_party.md"


# ---- known vulnerabilities


def known_vulnerabilities(root: Path = ROOT, run=subprocess.run) -> tuple[list[str], str]:
    """(faults, what was left out and why): by pip-audit, of the versions in constraints.txt."""
    if importlib.util.find_spec("pip_audit") is None:
        return [], "pip-audit isn't installed (pip install pip-audit)"
    command = [sys.executable, "-m", "pip_audit", "-r", "constraints.txt", "--no-deps", "--disable-pip", "--progress-spinner=off",
               "--format=json"]  # fmt: skip
    try:
        done = run(command, cwd=root, capture_output=True, text=True, check=False, timeout=PIP_AUDIT_SECONDS)
        packages = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return [], f"pip-audit had no answer from its service in {PIP_AUDIT_SECONDS} s"
    except ValueError:
        return [], f"pip-audit could not ask its service: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    count = f"{len(unknown)} of {len(packages)}"
    left_out = f"pip-audit's service knows nothing of {count} packages: {', '.join(unknown)}" if unknown else ""
    return [f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version yet'}"
            for package in packages for found in package.get("vulns", [])], left_out  # fmt: skip


# ---- all of it


def report(root: Path = ROOT) -> dict[str, list[str]]:
    """What was looked at -> what is wrong with it."""
    names = files(root)
    texts = {name: (root / name).read_text(encoding="utf-8") for name in names if not name.endswith(PICTURES)}
    said = licences(list(pins(root)))
    return {
        "dependencies are pinned, and installed as pinned": list(dependency_faults(root)),
        "no code runs what comes from elsewhere": [f for name, text in texts.items() for f in code_faults(name, text)] + list(exec_place_faults(texts)),
        "no secrets": [f for name, text in texts.items() for f in secret_faults(name, text)],
        "everything from others is named": list(origin_faults(names, texts.get("docs/third_party.md", "")))
        + [f for name, text in texts.items() for f in notice_faults(name, text)],
        "every installed package says its licence": [f"{name}: says no licence" for name, licence in said.items() if not licence],
    }


def main() -> int:
    found = report()
    said = licences(list(pins()))
    print("Licences of what is installed:")
    for licence in sorted(set(said.values())):
        print(f"  {licence or 'not said'}: {', '.join(sorted(name for name, own in said.items() if own == licence))}")
    found["no known vulnerabilities"], left_out = known_vulnerabilities()
    print()
    for title, faults in found.items():
        left = left_out if title == "no known vulnerabilities" else ""
        state = "FAULTS" if faults else "LEFT OUT" if left else "ok"
        print("\n    ".join([f"{state:8} {title}{': ' * bool(left)}{left}", *faults]))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())

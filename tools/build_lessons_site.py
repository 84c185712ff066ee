"""Build a JupyterLab that needs no server: the lesson and the exercises that need no torch run in the browser.

    python tools/build_lessons_site.py          into build/lessons (needs npm, and pip with a network)

Then serve the folder: python -m http.server --directory build/lessons

It is JupyterLite with its Pyodide kernel. Both, Pyodide and every package come into the folder, so that a browser asks
nobody else. Pyodide's own compiled packages (NumPy, matplotlib) are on neither registry, so no notebook here may need one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import build_site
from build_site import CannotBuild

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "lessons"
WORK = ROOT / "build" / "lessons-work"  # the environment, the packages, what JupyterLite is given
NOTEBOOKS = (
    "notebooks/08_chunk_scheduling.ipynb",
    "exercises/02_blocks.ipynb", "exercises/03_global_slots.ipynb", "exercises/06_prefilling_state.ipynb",
    "exercises/08_chunk_scheduling.ipynb", "exercises/09_prefix_cache.ipynb",
)  # fmt: skip
JUPYTERLITE = ("jupyterlite-core==0.8.6", "jupyterlite-pyodide-kernel==0.8.6", "jupyter-server", "jupyterlab_widgets", "anywidget")
KERNEL_NEEDS = ("micropip", "packaging", "ipython", "pyodide-http", "jedi", "typing-extensions")  # of Pyodide's own list
VIEWS_NEED = ("ipywidgets", "anywidget", "comm", "psygnal", "jupyterlab_widgets", "widgetsnbextension")
PYTHON = "3.14"  # Pyodide's
FIRST_CELL = '''\
# In the browser: the widgets' packages, from this site
%pip install -q ipywidgets anywidget
import sys

sys.path.insert(0, "..")'''


def run(program: str | Path, *arguments: str | Path) -> None:
    """Raises CannotBuild with what the program said."""
    done = subprocess.run([str(program), *map(str, arguments)], cwd=WORK, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-build_site.MOST_SAID :]
        raise CannotBuild(f"{Path(program).name} {' '.join(map(str, arguments[:2]))} failed: {said}")


def environment() -> Path:
    """A Python with JupyterLite, made once; nothing of it goes into the course's own."""
    python = WORK / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        venv.create(WORK / "env", with_pip=True)
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", *JUPYTERLITE)
    return python


def closure(packages: dict, names: tuple[str, ...]) -> list[str]:
    """The packages and all they depend on, by Pyodide's list."""
    todo, found = list(names), set()
    while todo:
        name = todo.pop().replace("_", "-").lower()
        if name not in found:
            found.add(name)
            todo += packages[name]["depends"]
    return sorted(found)


def download(python: Path, folder: Path, *requirements: str) -> None:
    """Wheels of pure Python, without what they depend on."""
    pure = ("--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "py", "--abi", "none", "--platform", "any")
    run(python, "-m", "pip", "download", "-q", "--disable-pip-version-check", *pure, "-d", folder, *requirements)


def pyodide(python: Path) -> Path:
    """Pyodide with the packages that the kernel needs, in the folder where JupyterLite looks for it."""
    folder = WORK / "static" / "pyodide"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(build_site.tarball(build_site.OUT.parent)) as archive:
        for member in archive:
            if member.isfile():
                (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    lock = json.loads((folder / "pyodide-lock.json").read_text("utf-8"))
    needed = closure(lock["packages"], KERNEL_NEEDS)
    download(python, folder, *(f"{name}=={lock['packages'][name]['version']}" for name in needed))
    for name in needed:  # Pyodide packs these files anew: PyPI's have other hashes
        lock["packages"][name]["sha256"] = hashlib.sha256((folder / lock["packages"][name]["file_name"]).read_bytes()).hexdigest()
    (folder / "pyodide-lock.json").write_text(json.dumps(lock), "utf-8")
    return folder


def for_browser(text: str) -> str:
    """A notebook's file for JupyterLite: its kernel, no outputs, and a first cell that gets the widgets."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    notebook["metadata"] = {"kernelspec": {"name": "python", "display_name": "Python (Pyodide)", "language": "python"}}
    first = {"cell_type": "code", "id": "browser", "metadata": {}, "outputs": [], "execution_count": None, "source": FIRST_CELL}
    notebook["cells"].insert(1, first)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def contents() -> None:
    """The notebooks, and course_lib beside their folders."""
    folder = WORK / "content"
    shutil.rmtree(folder, ignore_errors=True)
    for name in NOTEBOOKS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(for_browser((ROOT / name).read_text("utf-8")), "utf-8")
    left_out = shutil.ignore_patterns("__pycache__", *(part for part in build_site.LEFT_OUT if part != "checks"))
    shutil.copytree(ROOT / "course_lib", folder / "course_lib", ignore=left_out)
    shutil.copy(ROOT / "LICENSE", folder)


def build() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    python = environment()
    pyodide(python)
    shutil.rmtree(WORK / "wheels", ignore_errors=True)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line)
    download(python, WORK / "wheels", *(f"{name}=={pins[name]}" for name in VIEWS_NEED))
    contents()
    (WORK / "jupyter_lite_config.json").write_text(json.dumps({
        "LiteBuildConfig": {"contents": ["content"], "output_dir": str(OUT), "apps": ["lab"]},
        "PipliteAddon": {"piplite_urls": ["wheels"]},
    }), "utf-8")  # fmt: skip
    (WORK / "jupyter-lite.json").write_text('{"jupyter-lite-schema-version": 0, "jupyter-config-data": {"exposeAppInBrowser": true}}', "utf-8")
    shutil.rmtree(OUT, ignore_errors=True)
    (WORK / ".jupyterlite.doit.db").unlink(missing_ok=True)  # what it remembers of the last build: it would leave out steps
    run(python, "-m", "jupyterlite_core", "build")
    if '"pyodideUrl": "./static/pyodide/' not in (OUT / "jupyter-lite.json").read_text("utf-8"):
        raise CannotBuild("JupyterLite didn't take Pyodide in: its pages would ask another host")


def main() -> int:
    try:
        build()
    except CannotBuild as error:
        print(f"The lessons' site can't be built: {error}.", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in OUT.rglob("*") if file.is_file())
    print(f"The notebooks are in {OUT} ({size / 1e6:.0f} MB). To see them: python -m http.server --directory {OUT}")
    print(f"A lesson's address there: lab/index.html?path={NOTEBOOKS[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the scheduler lab as a static page: course_lib runs in the browser, under Pyodide.

    python tools/build_site.py                      into build/site
    python tools/build_site.py --out FOLDER
    python tools/build_site.py --offline            with what an earlier call or npm's cache has
    python tools/build_site.py --course ADDRESS     where the page's link to the course leads (default: where this
                                                    clone is from, else a copy of the README)

Then serve the folder from any web server, under any path: python -m http.server --directory build/site

Pyodide comes from npm, by way of `npm pack`; whatever registry npm is set to, the file must be the one whose hash is
written here.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "site"
SOURCE = ROOT / "site"

PYODIDE = "314.0.7"  # with Python 3.14
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="  # `npm view pyodide dist`
MODULES = ("pyodide.mjs", "pyodide.asm.mjs")
STDLIB = "python_stdlib.zip"
FETCHED = ("pyodide.asm.wasm", STDLIB, "pyodide-lock.json")
LEFT_OUT = ("model", "bench", "checks")  # parts of course_lib that need torch, or a terminal
MOST_SAID = 2000  # characters of what a program says when it fails
OLDEST = (1980, 1, 1, 0, 0, 0)  # the date in the zip: the same sources give the same bytes


class CannotBuild(Exception):
    """Says why, and what to do."""


def tarball(folder: Path, offline: bool = False) -> Path:
    """npm's file of Pyodide in the folder, fetched if it isn't there."""
    file = folder / f"pyodide-{PYODIDE}.tgz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _run("npm", "pack", f"pyodide@{PYODIDE}", "--pack-destination", str(folder), "--loglevel=error", *(["--offline"] if offline else []))
    found = f"sha512-{base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()}"
    if found != INTEGRITY:
        file.unlink()
        raise CannotBuild(f"{file.name} is not the file it should be: its hash is {found}, expected {INTEGRITY}. It is deleted: try again")
    return file


def _run(program: str, *arguments: str) -> None:
    found = shutil.which(program)
    if found is None:
        raise CannotBuild(f"{program} isn't here: it comes with Node.js")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{program} {' '.join(arguments[:2])} failed: {(done.stderr or done.stdout).strip()[-MOST_SAID:]}")


def unpacked(pyodide: Path) -> Path:
    """The parts of Pyodide that the site needs, in a folder beside the tarball, with the standard library compiled."""
    folder = pyodide.with_suffix("")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=pyodide.parent) as place:
            fresh = Path(place, "pyodide")
            fresh.mkdir()
            with tarfile.open(pyodide) as archive:
                for name in (*MODULES, *FETCHED, "package.json"):
                    (fresh / name).write_bytes(archive.extractfile(f"package/{name}").read())
            compiled = Path(place, STDLIB)
            _run("node", str(SOURCE / "compile_stdlib.mjs"), str(fresh), str(compiled))
            compiled.replace(fresh / STDLIB)
            fresh.rename(folder)
    return folder


def build(out: Path, pyodide: Path, course: str) -> int:
    """Write the site into a folder, over what is there of it; returns its size in bytes. pyodide: of `unpacked`."""
    shutil.copytree(pyodide, out / "pyodide", dirs_exist_ok=True)
    for name in ("page.js", "worker.js"):
        shutil.copy(SOURCE / name, out)
    shutil.copy(ROOT / "course_lib" / "lab" / "view.js", out)
    shutil.copy(ROOT / "README.md", out / "course.txt")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE.txt")
    (out / ".nojekyll").touch()  # GitHub Pages takes the files as they are
    zip_course_lib(out / "course_lib.zip")
    package = json.loads((out / "pyodide" / "package.json").read_text("utf-8"))
    fetched = [out / "course_lib.zip", *(out / "pyodide" / name for name in FETCHED)]
    words = {"course": course, "bytes": sum(file.stat().st_size for file in fetched), "pyodide_home": package["homepage"],
             "pyodide_version": package["version"], "pyodide_licence": package["license"]}  # fmt: skip
    page = (SOURCE / "index.html").read_text("utf-8")
    for name, value in words.items():
        page = page.replace(f"{{{{{name}}}}}", html.escape(str(value)))
    (out / "index.html").write_text(page, "utf-8")
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def zip_course_lib(file: Path) -> None:
    package = ROOT / "course_lib"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for source in sorted(package.rglob("*.py")):
            if source.relative_to(package).parts[0] not in LEFT_OUT:
                archive.writestr(zipfile.ZipInfo(source.relative_to(ROOT).as_posix(), OLDEST), source.read_bytes(), zipfile.ZIP_DEFLATED)


def course_address() -> str:
    """The web address of the repository that this clone is from; a name and a password in it are left out."""
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False)
    return web_address(done.stdout.strip()) or "course.txt"


def web_address(remote: str) -> str:
    """https://host/path of a git remote (https or ssh); "" for others."""
    if remote.startswith("git@"):  # git@host:path
        remote = "ssh://" + remote.replace(":", "/", 1)
    parts = urlsplit(remote)
    if parts.scheme not in ("https", "ssh") or not parts.hostname:
        return ""
    return f"https://{parts.hostname}{parts.path.removesuffix('.git')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default build/site)")
    parser.add_argument("--offline", action="store_true", help="only with what an earlier call or npm's cache has")
    parser.add_argument("--course", metavar="ADDRESS", help="where the link to the course leads")
    args = parser.parse_args()
    try:
        size = build(args.out, unpacked(tarball(OUT.parent, args.offline)), args.course or course_address())
    except CannotBuild as error:
        print(f"The site can't be built: {error}.", file=sys.stderr)
        return 1
    print(f"The lab is in {args.out} ({size / 1e6:.1f} MB). To see it: python -m http.server --directory {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

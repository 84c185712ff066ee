"""Make copies of the lessons and exercises for Colab: each gets the course in its first cell, its links lead somewhere.

    python tools/build_colab.py                             for the repository that this clone is from, into build/colab
    python tools/build_colab.py --course https://github.com/OWNER/REPO
    python tools/build_colab.py --branch NAME               where the copies will be (default: colab)

A notebook that is opened on Colab is alone there, on a machine of its own. The lessons themselves stay free of that: the
copies go on a branch of their own, and are made again when the lessons change. Their README.md, the page of that branch,
has a badge for each.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
from build_site import CannotBuild, course_address

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "colab"
FOLDERS = ("notebooks", "exercises")
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
COLAB = "https://colab.research.google.com/github"

PAGE = """\
# The course on Colab

Copies of the lessons and exercises of [this course]({course}), made by a command: please change the originals. Each one's
first cell fetches the course and installs what Colab lacks. A copy that you change is lost with its session unless you
save it to your Drive.

{rows}
"""

SET_UP = '''\
# Colab only: the course, and what Colab lacks of what it needs. Colab's own torch and widgets stay as they are.
![ -d /content/course ] || git clone -q --depth 1 {course} /content/course
%cd -q /content/course/{folder}
!python ../tools/colab_setup.py
import sys

from google.colab import output

sys.path.insert(0, "/content/course")
output.enable_custom_widget_manager()  # for this session: the lab and the other views'''


def repository(course: str) -> str:
    """OWNER/REPO of an address on GitHub: Colab opens notebooks from there."""
    parts = urlsplit(course)
    path = parts.path.strip("/").removesuffix(".git")
    if parts.hostname != "github.com" or path.count("/") != 1:
        raise CannotBuild(f"{course} is no repository on GitHub: give --course https://github.com/OWNER/REPO")
    return path


def linked(text: str, folder: str, place: str, branch: str) -> str:
    """Markdown whose links between files of the course lead to Colab (notebooks) or to GitHub (all else)."""

    def absolute(link: re.Match) -> str:
        target, _, anchor = link[2].partition("#")
        if urlsplit(target).scheme or not target:
            return link[0]
        file = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        notebook = file.endswith(".ipynb") and file.startswith(FOLDERS)
        address = f"{COLAB}/{place}/blob/{branch}/{file}" if notebook else f"https://github.com/{place}/blob/HEAD/{file}"
        return f"{link[1]}{address}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"(\]\()([^)\s]+)\)", absolute, text)


def for_colab(notebook: nbformat.NotebookNode, folder: str, course: str, branch: str) -> nbformat.NotebookNode:
    """The notebook with the set-up cell behind its title, and with its links made absolute."""
    place = repository(course)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, folder, place, branch)
    cell = nbformat.v4.new_code_cell(SET_UP.format(course=f"https://github.com/{place}", folder=folder))
    cell.id = "colab"
    notebook.cells.insert(1, cell)
    notebook.metadata.pop("course", None)  # what the builder knows its own notebooks by
    return notebook


def build(out: Path, course: str, branch: str) -> None:
    """Write all copies, and the page with their badges."""
    place, rows = repository(course), ["| | |", "|---|---|"]
    shutil.rmtree(out, ignore_errors=True)
    for folder in FOLDERS:
        (out / folder).mkdir(parents=True)
        for file in sorted((ROOT / folder).glob("*.ipynb")):
            notebook = for_colab(nbformat.read(file, as_version=4), folder, course, branch)
            nbformat.write(notebook, out / folder / file.name)
            rows.append(f"| {folder}/{file.stem} | [![Open {file.stem} in Colab]({BADGE})]({COLAB}/{place}/blob/{branch}/{folder}/{file.name}) |")
    page = PAGE.format(course=f"https://github.com/{place}", rows="\n".join(rows))
    (out / "README.md").write_text(page, encoding="utf-8", newline="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--course", metavar="ADDRESS", help="the repository on GitHub (default: where this clone is from)")
    parser.add_argument("--branch", default="colab", help="the branch that the copies will be on")
    args = parser.parse_args()
    try:
        build(OUT, args.course or course_address(), args.branch)
    except CannotBuild as error:
        print(f"No copies for Colab: {error}.", file=sys.stderr)
        return 1
    print(f"Push what is in {OUT} as the branch {args.branch}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

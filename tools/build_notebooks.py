"""Build the notebooks from their sources (py:percent).

    notebooks/src/NN_name.py -> notebooks/NN_name.ipynb    a lesson, executed
    solutions/src/NN_name.py -> solutions/NN_name.ipynb    the exercises solved, executed
                             -> exercises/NN_name.ipynb    the same with stubs, for the learner, not executed

    python tools/build_notebooks.py                 build all
    python tools/build_notebooks.py 03 07           build these lessons and their exercises only
    python tools/build_notebooks.py --check         write nothing; exit 1 if a built file differs from its source
    python tools/build_notebooks.py --refresh       measure again (cells tagged nbval-ignore-output)
    python tools/build_notebooks.py --force         overwrite notebooks that were edited by hand

The same source gives the same bytes: ids, counts and metadata depend on the source alone. Only measured outputs
(times, pictures of real runs) change from run to run; they live in cells tagged `nbval-ignore-output`, and stay as
they are until some code of their notebook changes.

An exercise is five cells, by name: task-NN-k (Markdown), your-NN-k (its body between "### BEGIN SOLUTION" and
"### END SOLUTION"), check-NN-k, hints-NN-k (three of them, folded), run-NN-k (tagged needs-your-code). A cell "set-up"
comes first. In the stub, what stands between the markers becomes `raise NotDone("NN.k name")`.

The capstone, 99_name.py, has no exercises of its own: it runs the parts that lie beside it. It is built last, the
learner's without being run.
"""

import argparse
import ast
import difflib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
import tokenize
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
MEASURED = "nbval-ignore-output"
CELL_TIMEOUT_S = 600
DIFF_LINES = 40
VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "nbconvert_exporter": "python",
            "pygments_lexer": "ipython3", "codemirror_mode": {"name": "ipython", "version": 3}}
NOTE = ("<small>Built from `{source}`. Type and run here as you like; to change the course's own version, edit that file "
        "and build again.</small>")
NOTE_FOR_WORK = ("<small>Built from `{source}`. This notebook is yours to work in: once you have changed it, the course "
                 "never overwrites it.</small>")
YOURS = "needs-your-code"  # the tag of a cell that fails as long as an exercise isn't done
STUBBED = re.compile(r"^([ \t]*)### (BEGIN|END) SOLUTION[ \t]*$")
CAPSTONE = "99"  # the lesson whose notebook has no exercises of its own
FENCE_WIDTH = 70  # characters: longer lines wrap in a JupyterLab window with its file browser
ALMOST = re.compile(r"#\s*(BEGIN|END)\s+SOLUTION", re.IGNORECASE)

# What a code cell must not contain, and why.
FORBIDDEN = {
    r"\bclear_output\b": "clear_output: the saved output would show only the last state",
    r"@interact|\binteract(ive|ive_output|_manual)?\s*\(": "interact(): use a widget with its own static picture",
    r"\bwidgets\.Output\b|ipywidgets import[^\n]*\bOutput\b": "widgets.Output: its text can't be compared",
    r"\bNBVAL_\w+|\bPYTEST_VALIDATE_\w+": "nbval comment: use a tag in the cell's marker",
}
MARKER = re.compile(r'# %%( \[markdown\])?( (name="[\w-]{1,64}"|tags=\[[^\]]*\]))*')
HEADER = re.compile(r"\A# ---\n(#.*\n)*?# ---\n")


class BuildError(Exception):
    """A notebook can't be built; the message says which, why, and what to do."""


class Edited(BuildError):
    """The file to write was edited by somebody."""


@dataclass(frozen=True)
class Kind:
    """A family of notebooks: the folder of its sources, the folder of what is built from them, and how."""
    sources: str
    built: str
    has_exercises: bool = False  # its sources hold tasks, checks and solutions between markers
    is_stubbed: bool = False  # the solutions are cut out, and nothing is run


LESSONS = Kind("notebooks/src", "notebooks")
SOLUTIONS = Kind("solutions/src", "solutions", has_exercises=True)
EXERCISES = Kind("solutions/src", "exercises", has_exercises=True, is_stubbed=True)
KINDS = (LESSONS, SOLUTIONS, EXERCISES)


@dataclass
class Job:
    """One notebook to build: its source's path in the repository, the notebook read from it, the file to write."""
    source: str
    nb: nbformat.NotebookNode
    target: Path
    name: str  # the target's path in the repository
    kind: Kind


# ---- cells

def code_cells(nb):
    """The code cells that run: JupyterLab may append empty ones, and nothing runs those."""
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def tags(cell):
    return cell.metadata.get("tags", [])


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(nb):
    """A hash of what a person edits: the cells' kinds and text. A run, or an empty last cell, doesn't change it."""
    return digest([(cell.cell_type, cell.source.rstrip()) for cell in nb.cells if cell.source.strip()])


def measured_digest(nb):
    return digest([cell.outputs for cell in code_cells(nb) if MEASURED in tags(cell)])


# ---- what a source must not contain

def hides_output(source):
    """True if a line of code ends in ';', which hides a result in Jupyter but not in nbval."""
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type != tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError):  # a magic or a shell line: not Python
        return source.rstrip().endswith(";")
    ends = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER)
    return any(a.string == ";" and b.type in ends for a, b in zip(tokens, tokens[1:]))


def images_without_alt(text):
    """The images in Markdown or HTML that have no alt text, each shortened to its beginning."""
    images = re.findall(r"""<img\b(?:"[^"]*"|'[^']*'|[^>"'])*>""", text, re.IGNORECASE)
    named = re.compile(r"""\balt\s*=\s*("\s*[^"\s]|'\s*[^'\s])""", re.IGNORECASE)
    return [image[:60] for image in images if not named.search(image)] + re.findall(r"!\[\s*\][(\[].{0,50}", text)


def wide_lines(text):
    """The lines inside ``` fences of Markdown that would wrap, as sentences."""
    fences = re.findall(r"^[ \t]*```.*?(?:^[ \t]*```|\Z)", text, re.DOTALL | re.MULTILINE)
    return [f"a line of {len(line)} characters in a fenced block, the limit is {FENCE_WIDTH}: {line.strip()[:40]}"
            for fence in fences for line in fence.splitlines() if len(line) > FENCE_WIDTH]


def unrendered_folds(text):
    """The tags of folds (<details>) behind which JupyterLab wouldn't render Markdown, as sentences."""
    tags_alone = re.findall(r"(</summary>|</details>)(?!\s*\Z|[ \t]*\n[ \t]*\n)", text)
    return [f"no blank line after {tag}: what follows isn't rendered" for tag in tags_alone]


def cell_problems(cell):
    """What is wrong with one cell's text and tags, as sentences."""
    if not cell.source.strip():
        return ["empty cell"]
    if cell.cell_type != "code":
        text = re.sub(r"```.*?```|`[^`\n]*`", "", cell.source, flags=re.DOTALL)  # code that is only quoted
        return [*(f"image without alt text: {image}" for image in images_without_alt(text)),
                *wide_lines(cell.source), *unrendered_folds(text)]
    found = [reason for pattern, reason in FORBIDDEN.items() if re.search(pattern, cell.source)]
    found += [f"tag {tag}: no cell is left out, only {MEASURED} is allowed" for tag in tags(cell)
              if tag.startswith(("nbval", "skip")) and tag != MEASURED]
    if hides_output(cell.source):
        found.append("';' at the end of a line: write `_ = ...` or leave it out")
    return found


def split_cells(text):
    """Percent text as [line number, marker, body]; what stands before the first marker has the marker ''."""
    cells = [[1, "", ""]]
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#\s*%%", line):
            cells.append([number, line.rstrip(), ""])
        else:
            cells[-1][2] += line + "\n"
    return cells


def is_markdown(body):
    """True if every line is behind '#', or all of it is inside one pair of triple quotes."""
    quoted = re.fullmatch(r'r?"""((?!""").)*"""', body.strip(), re.DOTALL)
    return bool(quoted) or all(line.startswith("#") for line in body.splitlines() if line.strip())


def marker_problems(text):
    """Cell markers that jupytext would take for something else without a word."""
    found = []
    for number, marker, body in split_cells(text):
        if not marker:
            if HEADER.sub("", body).strip():
                found.append("line 1: text before the first cell marker")
        elif not MARKER.fullmatch(marker):
            found.append(f"line {number}: unknown cell marker: {marker}")
        elif "[markdown]" in marker and not is_markdown(body):
            found.append(f"line {number}: Markdown that is not behind '#' (or an unclosed triple quote)")
    return found


# ---- exercises

def solution_regions(lines):
    """The (first, last) line numbers of each pair of markers; BuildError for any that don't pair up."""
    regions, begin = [], None
    for number, line in enumerate(lines):
        marker = STUBBED.match(line)
        if not marker:
            if ALMOST.search(line):
                raise BuildError(f"not a marker, but nearly one (### BEGIN SOLUTION, alone on its line): {line.strip()}")
            continue
        if (marker[2] == "BEGIN") == (begin is not None):
            raise BuildError("### BEGIN SOLUTION inside another" if begin is not None else "### END SOLUTION without its BEGIN")
        if begin is None:
            begin = number
            continue
        if marker[1] != STUBBED.match(lines[begin])[1]:
            raise BuildError("### BEGIN and ### END SOLUTION must have the same indentation")
        if not any(line.strip() and not line.strip().startswith("#") for line in lines[begin + 1 : number]):
            raise BuildError("no code between ### BEGIN and ### END SOLUTION")
        regions.append((begin, number))
        begin = None
    if begin is not None:
        raise BuildError("### BEGIN SOLUTION without its END")
    return regions


def enclosing(lines, number, indent):
    """The name of the function around a line: the last `def` above it with a smaller indentation."""
    for line in reversed(lines[:number]):
        found = re.match(r"([ \t]*)(?:async )?def (\w+)", line)
        if found and len(found[1]) < len(indent):
            return found[2]
    raise BuildError("### BEGIN SOLUTION outside a function")


def stub(source, identifier):
    """The learner's version of a cell: each solution becomes a NotDone that names the exercise and the function."""
    lines = source.splitlines()
    for begin, end in reversed(solution_regions(lines)):
        indent = STUBBED.match(lines[begin])[1]
        name = enclosing(lines, begin, indent)
        lines[begin : end + 1] = [f'{indent}raise NotDone("{identifier} {name}")']
    return "\n".join(lines)


def solved(source):
    """The cell without its markers."""
    return "\n".join(line for line in source.splitlines() if not STUBBED.match(line))


def exercise_problems(nb, names, lesson):
    """What is wrong with the exercises of a source, as sentences."""
    found = []
    place = dict(zip(names, nb.cells))
    if "set-up" not in place:
        found.append('no cell named "set-up"')
    elif next(name for name, cell in zip(names, nb.cells) if cell.cell_type == "code") != "set-up":
        found.append('the first code cell must be "set-up"')
    numbers = sorted({name.rpartition("-")[2] for name in names if re.fullmatch(rf"your-{lesson}-\d", name)})
    if not numbers:
        found.append(f"no exercise: no cell named your-{lesson}-1")
    for number in numbers:
        parts = [f"{part}-{lesson}-{number}" for part in ("task", "your", "check", "hints", "run")]
        missing = [part for part in parts if part not in place]
        if missing:
            found.append(f"exercise {lesson}.{number}: no cell named {', '.join(missing)}")
            continue
        task, yours, check, hints, run = (place[part] for part in parts)
        if [name for name in names if name in parts] != parts:
            found.append(f"exercise {lesson}.{number}: the order is {', '.join(parts)}")
        if not re.fullmatch(rf'check\("{lesson}\.{number}"(, [\w.]+)+\)', check.source.strip()):
            found.append(f'cell {parts[2]}: must be check("{lesson}.{number}", name) and nothing else')
        if hints.source.count("<details>") != 3 or hints.source.count("</details>") != 3:
            found.append(f"cell {parts[3]}: three folded hints (<details>)")
        if YOURS not in tags(run):
            found.append(f"cell {parts[4]}: must have the tag {YOURS}")
        if not ALMOST.search(yours.source):
            found.append(f"cell {parts[1]}: no solution between markers")
    for name, cell in place.items():
        if ALMOST.search(cell.source) and not re.fullmatch(rf"your-{lesson}-\d", name):
            found.append(f"cell {name}: solution markers belong into your-{lesson}-k cells only")
        elif ALMOST.search(cell.source):
            try:
                solution_regions(cell.source.splitlines())
                ast.parse(stub(cell.source, "00.0"))
            except (BuildError, SyntaxError) as error:
                found.append(f"cell {name}: {error}")
    return found


def make_exercises(nb, kind, lesson):
    """Turn the cells of a source into the learner's notebook, or into the solved one, whose title says so."""
    if not kind.is_stubbed:
        nb.cells[0].source = re.sub(r"\A# Exercises\b", "# Solutions", nb.cells[0].source)
    for cell in nb.cells:
        number = re.fullmatch(rf"your-{lesson}-(\d)", cell.id)
        if number:
            cell.source = stub(cell.source, f"{lesson}.{number[1]}") if kind.is_stubbed else solved(cell.source)
        if kind.is_stubbed and YOURS in tags(cell):
            cell.metadata["tags"] = [*tags(cell), "raises-exception"]  # "run all" goes on to the next exercise


def read_source(source, label, kind=LESSONS):
    """The notebook in a source file, checked, with its metadata, ids and note, not executed.

    `label` is the source's path in the repository, for the note and for messages.
    """
    text = source.read_text(encoding="utf-8")
    found = marker_problems(text)
    nb = jupytext.reads(HEADER.sub("", text).lstrip(), fmt="py:percent")
    names = [cell.metadata.get("name", f"{source.stem}-{number:02d}") for number, cell in enumerate(nb.cells)]
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", source.stem):
        found.append("file name: two digits, then lower case, digits and underscores")
    if not nb.cells or nb.cells[0].cell_type != "markdown":
        found.append("the first cell must be Markdown, with the title")
    found += [f"the name {name} is used twice" for name in sorted(set(names)) if names.count(name) > 1]
    found += [f"cell {name}: {problem}" for name, cell in zip(names, nb.cells) for problem in cell_problems(cell)]
    if kind.has_exercises and source.stem[:2] != CAPSTONE:
        found += exercise_problems(nb, names, source.stem[:2])
    else:
        found += [f"cell {name}: solution markers have no meaning here" for name, cell in zip(names, nb.cells) if ALMOST.search(cell.source)]
    if found:
        raise BuildError("\n  ".join([f"{label}: not built", *found]))
    for cell, name in zip(nb.cells, names):
        cell.id = name
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in ("name", "tags") if key in cell.metadata})
    if kind.has_exercises:
        make_exercises(nb, kind, source.stem[:2])
    nb.cells[0].source += "\n\n" + (NOTE_FOR_WORK if kind.is_stubbed else NOTE).format(source=label)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE,
                                      "course": {"source": label, "built": fingerprint(nb)}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    return nb


# ---- running

def kernel_environment(ipython_dir):
    """The builder's environment, less what would make outputs differ from one machine or run to the next."""
    env = {**os.environ, "PYTHONHASHSEED": "0", "IPYTHONDIR": ipython_dir,  # no start-up files of the user
           "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # a first load's bar is not for the saved file
    env.pop("MPLBACKEND", None)  # a set backend would keep figures out of the notebook
    return env


def execute(nb, folder, name):
    """Run all cells in `folder` with the Python that runs this file; outputs go into `nb`."""
    # With no folders to search, "python3" is this interpreter, whatever the user has installed under that name.
    km = AsyncKernelManager(kernel_name=KERNEL["name"], kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(nb, km=km, timeout=CELL_TIMEOUT_S, store_widget_state=False, record_timing=False,
                            resources={"metadata": {"path": str(folder)}}, extra_arguments=["--log-level=ERROR"])
    with tempfile.TemporaryDirectory() as ipython_dir:
        try:
            client.execute(env=kernel_environment(ipython_dir), cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            message = re.sub(r"\x1b\[[\d;]*m", "", str(error))
            raise BuildError(f"{name}: not built, a cell failed; the old file is as it was\n{message}") from None


def keep_measured(nb, old):
    """Take the measured outputs of the last build, all or none; False if `nb` must have its own."""
    def plan(notebook):
        return [(cell.source, MEASURED in tags(cell)) for cell in code_cells(notebook)]

    if old is None or plan(old) != plan(nb) or old.metadata.course.get("measured") != measured_digest(old):
        return False
    for cell, before in zip(code_cells(nb), code_cells(old)):
        if MEASURED in tags(cell):
            cell.outputs = before.outputs
    return True


def tidy_traceback(line, root):
    """A traceback line without this machine's folders and memory addresses (nbval doesn't compare tracebacks)."""
    for folder in sorted({str(root), sys.prefix, sys.base_prefix}, key=len, reverse=True):  # a .venv before its parent
        for shown in (folder, re.sub(f"^{re.escape(str(Path.home()))}", "~", folder)):
            line = line.replace(shown + os.sep, "")
    return re.sub(r"0x[0-9a-f]{6,}", "0x0", line)


def normalise(nb, root):
    """Remove from the outputs what differs between two runs of the same code."""
    for number, cell in enumerate(code_cells(nb), 1):
        cell.execution_count = number
        merged = []
        for output in cell.outputs:
            last = merged[-1] if merged else {}
            if output.output_type == "stream" == last.get("output_type") and output.name == last.name:
                last.text += output.text  # how a text is cut into messages depends on time
            else:
                merged.append(output)
        cell.outputs = merged
        for place, output in enumerate(merged):
            if "execution_count" in output:
                output.execution_count = number
            if "traceback" in output:
                output.traceback = [tidy_traceback(line, root) for line in output.traceback]
            if VIEW in output.get("data", {}):  # no widget state is saved: the id only has to be stable
                output.data[VIEW]["model_id"] = f"{number:016x}{place:016x}"
    nb.metadata.course.measured = measured_digest(nb)


def run(job, root, old=None):
    """Execute and normalise a job's notebook. Returns what was done with its measured outputs, in words."""
    nb = job.nb
    if job.kind.is_stubbed:
        nb.metadata.course.measured = measured_digest(nb)
        return ""
    execute(nb, job.target.parent, job.name)
    nb.metadata.language_info = nbformat.from_dict(LANGUAGE)  # the kernel adds its version
    nb.metadata.pop("widgets", None)
    kept = keep_measured(nb, old)
    normalise(nb, root)
    if not any(MEASURED in tags(cell) for cell in code_cells(nb)):
        return ""
    return ", measured outputs kept" if kept else ", measured outputs refreshed"


# ---- files

def to_text(nb):
    """The file's text: nbformat sorts keys, indents by 1, keeps non-ASCII letters."""
    nbformat.validate(nb)
    return nbformat.writes(nb, version=nbformat.NO_CONVERT) + "\n"


def read_text(path):
    return path.read_text(encoding="utf-8") if path.exists() else None


def read_target(job, force):
    """The text of the built file and its notebook (None, None if there is none); an edited one is an error."""
    text = read_text(job.target)
    if text is None:
        return None, None
    try:
        old = nbformat.reads(text, as_version=4)
        if old.metadata.course.built == fingerprint(old):
            return text, old
    except Exception:  # not a notebook, or not one of ours: somebody's work all the same
        pass
    if force:
        return text, None
    raise Edited(
        f"{job.name}: not overwritten, it was edited since it was built.\n"
        "  To keep that version, move it to another folder (my_work/, for instance) and build again.\n"
        "  To lose it, build with --force.")


def write(job, text, before):
    """Replace the target in one step, unless someone saved it while its cells were running."""
    if read_text(job.target) != before:
        raise BuildError(f"{job.name}: not overwritten, it was saved by someone during the build; build again.")
    draft = job.target.with_name(f".{job.target.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        os.replace(draft, job.target)
    finally:
        draft.unlink(missing_ok=True)


def comparable(text):
    """Lines of a notebook file without what may differ between machines: measured outputs, PNGs, tracebacks."""
    nb = nbformat.reads(text, as_version=4)
    nb.metadata.get("course", {}).pop("measured", None)
    for cell in code_cells(nb):
        if MEASURED in tags(cell):
            cell.outputs = []
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
            if "traceback" in output:
                output.traceback = []
    text = nbformat.writes(nb, version=nbformat.NO_CONVERT)
    return re.sub(r"data:image/png;base64,[\w+/=]+", "PNG", text).splitlines()


def difference(committed, built):
    """The first lines of a diff, each cut to a readable width; empty if the two are alike."""
    lines = list(difflib.unified_diff(comparable(committed), comparable(built), "committed", "built", n=1, lineterm=""))
    more = [f"... {len(lines) - DIFF_LINES} more lines"] if len(lines) > DIFF_LINES else []
    return [line[:160] for line in lines[:DIFF_LINES]] + more


# ---- commands

def find_jobs(kinds, root, names):
    """The jobs for all sources, or for those whose name begins with one of `names`; every source is checked."""
    wanted = [Path(name).stem for name in names]
    found = [(kind, source) for kind in kinds for source in sorted((root / kind.sources).glob("*.py"))]
    for name in wanted:
        if not any(source.stem.startswith(name) for _, source in found):
            raise BuildError(f"no source in {' or '.join(sorted({kind.sources for kind in kinds}))} begins with {name}")
    jobs = []
    for kind, source in found:
        if not wanted or source.stem.startswith(tuple(wanted)):
            label, name = source.relative_to(root).as_posix(), f"{kind.built}/{source.stem}.ipynb"
            jobs.append(Job(label, read_source(source, label, kind), root / name, name, kind))
    return jobs


def build(jobs, root, refresh, force):
    """Execute and write each job's notebook. A learner's own work in an exercise is left alone, and no error."""
    targets = []
    for job in jobs:  # all of them before the first, slow, run
        try:
            targets.append((job, *read_target(job, force)))
        except Edited:
            if not job.kind.is_stubbed:
                raise
            print(f"{job.name}: left as it is, somebody works in it (--force overwrites it)", flush=True)
    for job, before, old in targets:
        start = time.perf_counter()
        measured = run(job, root, old=None if refresh else old)
        text = to_text(job.nb)
        if text != before:
            job.target.parent.mkdir(exist_ok=True)
            write(job, text, before)
        done = "unchanged" if text == before else "built"
        print(f"{job.name}: {done}{measured} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 0


def check(jobs, root):
    """Build each notebook in memory; print how the committed file differs. Returns 1 if any does, else 0."""
    failed = 0
    for job in jobs:
        committed = read_text(job.target)
        lines = ["there is no such file"]
        if committed is not None:
            run(job, root)
            try:
                lines = difference(committed, to_text(job.nb))
            except nbformat.reader.NotJSONError:
                lines = ["it is not a notebook (left over from a merge?)"]
        failed |= bool(lines)
        print("\n  ".join([f"{job.name}: {'differs from' if lines else 'same as'} {job.source}", *lines]), flush=True)
    if failed:
        print("Build again (make notebooks) and commit what changes.")
    return int(failed)


def main(argv=None, root=ROOT, kinds=KINDS):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="what to build, by the beginning of the names (03); default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; compare built files with their sources")
    parser.add_argument("--refresh", action="store_true", help="take all measured outputs from this run")
    parser.add_argument("--force", action="store_true", help="overwrite notebooks that were edited by hand")
    args = parser.parse_args(argv)
    try:
        jobs = find_jobs(kinds, root, args.names)
        return check(jobs, root) if args.check else build(jobs, root, args.refresh, args.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

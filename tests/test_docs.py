"""The documents say what is: links lead somewhere, commands exist, tables agree with the lessons, the exercises and the lab."""

import contextlib
import functools
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from course_lib import checks
from course_lib.__main__ import main
from course_lib.checks.concepts import CONCEPTS
from course_lib.lab.scheduler_lab import PRESETS, Lab

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from build_notebooks import images_without_alt  # noqa: E402 (it is a script beside the package, not in it)

LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # not what a learner adds
FILES = [name for name in LISTED.stdout.splitlines() if (ROOT / name).is_file()]
DOCUMENTS = [name for name in FILES if name.endswith(".md")]
NOTEBOOKS = [name for name in FILES if name.endswith(".ipynb") and not name.startswith("exercises/")]  # solutions/ has the same text
TEACHING = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")


def markdown(name):
    """The Markdown of a document, or of a notebook's Markdown cells."""
    if name.endswith(".md"):
        return (ROOT / name).read_text(encoding="utf-8")
    cells = nbformat.read(ROOT / name, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def code(text):
    """The code that a text quotes, each block and each span as a string."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.S | re.M)
    return blocks + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def rows(text, heading):
    """The rows of the first table behind a heading, as lists of cells."""
    part = text[re.search(rf"^#+ {re.escape(heading)}$", text, re.M).end() :]
    table = re.search(r"^\|.*?(?=^(?!\|)|\Z)", part, re.M | re.S)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


# ---- links

def links(text):
    text = without_code(text)
    return re.findall(r"\]\(\s*<?([^)>\s]+)", text) + re.findall(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)""", text)


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S), re.M)}


COLAB_PAGE = ("README.md", "../../blob/colab/README.md")  # on another branch of the repository on GitHub; see test_colab.py


def broken(name, text):
    """What is wrong with the links of a text that stands in the file `name`."""
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto", "data", "attachment"):
            continue
        if (name, link) == COLAB_PAGE:
            continue
        target = (ROOT / name).parent / unquote(parts.path) if parts.path else ROOT / name
        if not target.exists():
            yield f"{link}: there is no such file"
        elif not target.resolve().is_relative_to(ROOT):
            yield f"{link}: leads out of the repository"
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("name", DOCUMENTS + NOTEBOOKS)
def test_links_lead_somewhere(name):
    assert not list(broken(name, markdown(name)))


@pytest.mark.parametrize("text", ["[x](docs/none.md)", "[x](docs/teaching.md#none)", "[x](#none)", "![x](none.png)", "<img alt='' src='none.png'>", "[x](../..)"])
def test_a_link_that_leads_nowhere_is_seen(text):
    assert list(broken("README.md", text))


# ---- pictures

@pytest.mark.parametrize("name", [*DOCUMENTS, "site/index.html"])
def test_every_picture_has_words(name):
    """(Those in notebooks: test_notebooks_guard.py.)"""
    assert not images_without_alt(without_code((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("text", ["![](a.png)", "![ ](a.png)", "<img src='a.png'>", "<img src='a.png' alt=''>"])
def test_a_picture_without_words_is_seen(text):
    assert images_without_alt(text)


# ---- names of files

RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}


def windows_problems(names):
    """Why these can't all be files on Windows, or on a Mac, as sentences."""
    seen = {}
    for name in names:
        for part in PurePosixPath(name).parts:
            if re.search(r'[<>:"\\|?*\x00-\x1f]', part) or part.endswith((" ", ".")) or part.split(".")[0].lower() in RESERVED:
                yield f"{name}: {part} is no name on Windows"
        if len(name) > 120:  # with a folder before it there must be room below 260
            yield f"{name}: too long"
        for path in (PurePosixPath(name), *PurePosixPath(name).parents):
            other = seen.setdefault(str(path).lower(), str(path))
            if other != str(path):
                yield f"{path} and {other} are the same but for capitals"


def test_file_names_are_legal_everywhere():
    assert not list(windows_problems(FILES))


@pytest.mark.parametrize("names", [["a:b.md"], ["aux.py"], ["docs/com1"], ["x."], ["Docs/a.md", "docs/b.md"], ["a.md", "A.md"], ["x" * 121]])
def test_an_illegal_file_name_is_seen(names):
    assert list(windows_problems(names))


# ---- commands

@functools.cache
def help_of(*command):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue()


COMMANDS = re.search(r"\{([\w,-]+)\}", help_of())[1].split(",")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split()
VARIABLES = set(re.findall(r"^(\w+) \?=", MAKEFILE, re.M))


def wrong_commands(text):
    """Commands in the quoted code of a text that don't exist, or have no such option, as sentences."""
    for part in code(text):
        for line in part.splitlines():
            line = line.partition(" #")[0]
            for command, rest in re.findall(r"python3? -m course_lib ([a-z][\w-]*)([^|;&>]*)", line):
                if command not in COMMANDS:
                    yield f"{line.strip()}: no command {command}"
                    continue
                yield from (f"{line.strip()}: no option {option}" for option in re.findall(r"(?<!\S)--[\w-]+", rest) if option not in help_of(command))
            for target, rest in re.findall(r"(?<![\w.-])make ([a-z][\w-]*)(?![\w ]*:)([^|;&>]*)", line):
                if target not in TARGETS:
                    yield f"{line.strip()}: no target {target}"
                yield from (f"{line.strip()}: no variable {name}" for name in re.findall(r"\b([A-Z_]+)=", rest) if name not in VARIABLES)
            for script, rest in re.findall(r"python3? ((?:tools|tests)/\w+\.py)([^|;&>]*)", line):
                if not (ROOT / script).is_file():
                    yield f"{line.strip()}: no file {script}"
                    continue
                source = (ROOT / script).read_text(encoding="utf-8")
                yield from (f"{line.strip()}: no option {option}" for option in re.findall(r"(?<!\S)--[\w-]+", rest) if f'"{option}"' not in source)


@pytest.mark.parametrize("name", DOCUMENTS + NOTEBOOKS)
def test_quoted_commands_exist(name):
    assert not list(wrong_commands(markdown(name)))


@pytest.mark.parametrize("command", ["python -m course_lib grade x", "python -m course_lib check x --json y", "make coffee", "make lab PYTHONS=3", "python tools/none.py",
                                     "python tools/build_notebooks.py --fast"])  # fmt: skip
def test_a_command_that_is_not_there_is_seen(command):
    assert list(wrong_commands(f"Run `{command}`.")) and list(wrong_commands(f"```bash\n{command}\n```\n"))


# ---- what is from others (the files themselves: test_audit.py)

THIRD_PARTY = (ROOT / "docs" / "third_party.md").read_text(encoding="utf-8")


def test_what_the_static_page_bundles_is_named():
    build = (ROOT / "tools" / "build_site.py").read_text(encoding="utf-8")
    fetched = set(re.findall(r'"npm", "pack", f"([\w-]+)@', build))
    named = rows(THIRD_PARTY, "What the static page carries along")
    assert fetched and all(any(f"`{package}`" in origin and licence for _, origin, licence in named) for package in fetched)


# ---- the teacher's tables

def test_the_plan_has_every_lesson_with_its_minutes_and_exercises():
    exercises = [identifier[:2] for identifier in checks.load() if not identifier.startswith("99")]
    said = {row[0][1:3]: row for row in rows(TEACHING, "What there is")}
    lessons = {path.stem[:2]: path.read_text(encoding="utf-8") for path in sorted((ROOT / "notebooks" / "src").glob("*.py"))}
    assert list(said) == list(lessons)
    for number, source in lessons.items():
        title, minutes, count, _ = said[number]
        assert re.search(r"^# # (.*)$", source, re.M)[1] in title
        assert re.search(r"\*\*Time\*\* (\d+) minutes", source)[1] == minutes, f"lesson {number}"
        assert (re.search(r"\[(\d)\]", count) or [0, "0"])[1] == str(exercises.count(number)), f"lesson {number}"


def test_the_six_weeks_hold_every_lesson_and_exercise_and_their_minutes():
    minutes = {row[0][1:3]: int(row[1]) for row in rows(TEACHING, "What there is")}
    weeks = rows(TEACHING, "Six weeks: two sessions of 90 minutes a week")
    assert sorted(number for week in weeks for number in week[1].split(", ")) == sorted(minutes)
    for week in weeks:
        assert int(week[2]) == sum(minutes[number] for number in week[1].split(", ")), f"week {week[0]}"
    found = set()
    for week in weeks:
        for first, last in re.findall(r"(\d\d\.\d)(?: to (\d\d\.\d))?", week[3]):
            found |= {f"{first[:3]}{k}" for k in range(int(first[3]), int((last or first)[3]) + 1)}
    assert found == {identifier for identifier in checks.load() if not identifier.startswith("99")}


def test_the_half_day_adds_up():
    plan = rows(TEACHING, "Half a day: 3½ hours")
    begins = [int(row[0].split(":")[0]) * 60 + int(row[0].split(":")[1]) for row in plan]
    ends = [begin + int(row[1]) for begin, row in zip(begins, plan)]
    assert begins == [0, *ends[:-1]] and ends[-1] == 210


def test_the_presets_show_what_the_plan_says():
    """Virtual time: the numbers are the same everywhere. "Instead of" names other settings."""
    said = {row[0]: row[2] for row in rows(TEACHING, "The scheduler lab")}
    assert list(said) == [label for _, label, *_ in PRESETS]
    for _, label, _, settings in PRESETS:
        readouts = Lab(**settings).frame()["readouts"]["rows"][0]
        shown = {number for text in readouts for number in re.findall(r"[\d.]+ ms", text)}
        named = set(re.findall(r"(?<!instead of )(?<![\d.])([\d.]+ ms)", said[label]))
        assert named and named <= shown, f"{label}: {named - shown} isn't in {shown}"


def test_the_table_of_wrong_answers_is_that_of_the_checks():
    caught = {}
    for path in sorted((ROOT / "solutions" / "variants").glob("*.py")):
        data = runpy.run_path(str(path))
        for kind, form in (("MUTANTS", "{}"), ("COSTS", "({})")):
            for concept, exercise, *_ in data.get(kind, []):
                caught.setdefault(concept, {}).setdefault(exercise, form.format(exercise))
    part = TEACHING[TEACHING.index("## What learners get wrong") : TEACHING.index("## Grading")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if re.match(r"\| [A-Z]\d+ ", line)]
    assert sorted(row[0] for row in table) == sorted(CONCEPTS)
    for concept, _, question, exercises, cells in table:
        assert question == CONCEPTS[concept].question
        assert exercises == ", ".join(form for _, form in sorted(caught.get(concept, {}).items())), concept
        for lesson, cell in re.findall(r"\(\.\./notebooks/(\w+)\.ipynb\) `([\w-]+)`", cells):
            assert f'name="{cell}"' in (ROOT / "notebooks" / "src" / f"{lesson}.py").read_text(encoding="utf-8"), f"{concept}: {lesson} has no cell {cell}"
        assert "`" in cells, concept


def test_every_test_file_has_its_row():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [name for row in rows(text, "TIMES") for name in re.findall(r"`(test_\w+\.py)`", row[0])]
    assert sorted(named) == sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))


# ---- the seed map and the glossary

def table_rows(name):
    """The cells of every row of the tables in a document, heads and rules left out."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines if line.startswith("| ")]
    return rows[1:]


def lesson_numbers():
    return {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_every_paragraph_of_the_seed_has_its_lesson():
    """The ranges follow one another without a hole, to the last paragraph; each names lessons and exercises that there are."""
    expected, current = 1, None
    exercises = {cell.split('"')[1] for path in (ROOT / "solutions" / "src").glob("*.py")
                 for cell in re.findall(r'^check\("\d\d\.\d"', path.read_text(encoding="utf-8"), re.MULTILINE)}  # fmt: skip
    for span, _, says, where in table_rows("seed_map.md"):
        first, _, last = span.partition("–")
        if first != current:
            assert int(first) == expected, f"paragraph {expected} has no row before {span}"
            current, expected = first, int(last or first) + 1
        assert says
        named = set(re.findall(r"(?:^|; )(\d\d) ·", where))
        assert named or "exercise" in where, where
        assert named <= lesson_numbers(), where
        assert set(re.findall(r"exercises? (\d\d\.\d)", where)) <= exercises, where
    assert expected == 359  # paragraphs of the article, the title counted


def test_the_glossary_has_one_row_a_term_and_a_lesson_for_each():
    rows = table_rows("glossary.md")
    terms = [row[0].lower() for row in rows]
    assert terms == sorted(set(terms), key=lambda term: term.replace("`", "")) and len(rows) > 100
    for term, chinese, line, lesson, _ in rows:
        assert re.search(r"[\u4e00-\u9fff]", chinese) or chinese, term
        assert line and set(re.findall(r"\d\d", lesson)) & lesson_numbers(), term

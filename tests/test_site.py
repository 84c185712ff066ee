"""The lab as a web page, without a browser: addresses, the page's Python, the build. (In a browser: test_site_browser.py.)"""

import json
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from course_lib.lab.address import CHOICES, read, write
from course_lib.lab.scheduler_lab import PRESETS, Settings
from course_lib.lab.web import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build_site

DEFAULTS = asdict(Settings())


# ---- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, *(changes for *_, changes in PRESETS), {"decode_share": 0.05, "running": 63}], ids=str)
def test_settings_come_back_from_their_address(changes):
    settings = Settings(**changes)
    address = read(write(settings))
    assert Settings(**address.settings) == settings and address.settings.keys() == DEFAULTS.keys()
    assert address.pinned is None and not address.complaints


def test_a_pinned_run_is_written_as_what_differs():
    now, then = Settings(chunk=256), Settings(chunk=None, running=8)
    query = write(now, then)
    assert "a.chunk=whole" in query and "a.running=8" in query and query.count("a.") == 2
    address = read(f"?{query}")
    assert Settings(**address.settings) == now and Settings(**address.pinned) == then
    assert write(now, now) == write(now)
    assert write(Settings(decode_share=1)) == write(Settings(decode_share=1.0)), "a browser sends 1.0 as 1"


def test_what_a_teacher_writes_by_hand_is_enough():
    assert read("?chunk=256&running=128").settings == {"chunk": 256, "running": 128}
    assert read("").settings == read("?").settings == {}


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("chunk=0", "chunk=0: it must be a whole number from 32 to 8,192, or whole. Instead of it: 1,024 tokens."),
        ("chunk=big", "chunk=big: it must be a whole number from 32 to 8,192, or whole. Instead of it: 1,024 tokens."),
        ("running=-1", "running=-1: it must be a whole number from 0 to 256. Instead of it: 64."),
        ("running=2.5", "running=2.5: it must be a whole number from 0 to 256. Instead of it: 64."),
        ("budget=", "budget=: it must be a whole number from 64 to 16,384. Instead of it: 2,048 tokens."),
        ("budget=whole", "budget=whole: it must be a whole number from 64 to 16,384. Instead of it: 2,048 tokens."),
        ("decode_share=nan", "decode_share=nan: it must be a number from 0.05 to 1.0. Instead of it: 100 %."),
        ("decode_share=1.5", "decode_share=1.5: it must be a number from 0.05 to 1.0. Instead of it: 100 %."),
        ("chip=abacus", "chip=abacus: it must be one of h100, h200, a100, rtx4090, laptop. Instead of it: h100."),
        ("chunks=64", "chunks: there is no such setting. Did you mean chunk?"),
        ("xyz=1", f"xyz: there is no such setting. There are: {', '.join(CHOICES)}."),
        ("a.chunk=1", "a.chunk=1: it must be a whole number from 32 to 8,192, or whole. A has it as this run does."),
        ("chunk=" + "9" * 5000, f"chunk={'9' * 40}…: it must be a whole number from 32 to 8,192, or whole. Instead of it: 1,024 tokens."),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_bad_address_is_answered_with_field_value_and_limits(query, complaint):
    address = read(query)
    assert address.complaints == [complaint]
    assert address.settings == {} and address.pinned is None
    good = read(f"{query}&prompt=512")
    assert good.settings == {"prompt": 512} and good.complaints == [complaint]


# ---- the page -------------------------------------------------------------------------------------


def start(query=""):
    page = Page(query)
    return page, json.loads(page.start())


def test_the_page_is_the_notebooks_lab():
    page, sent = start("running=8&prompt=512")
    assert sent["answer"] == json.loads(json.dumps(page.lab.setup() | page.lab.frame() | {"seq": 1}))
    sent = json.loads(page.handle(json.dumps({"kind": "set", "values": sent["answer"]["values"] | {"chunk": 256}})))
    assert sent["answer"]["values"]["chunk"] == 256 and "chunk=256" in sent["query"]
    assert sent["query"] == write(page.lab.settings)
    code = json.loads(page.handle('{"kind": "action", "key": "code"}'))["answer"]
    assert code == {"kind": "code", "text": page.lab.settings.code()}


def test_the_page_opens_the_comparison_that_its_address_holds():
    page, sent = start("running=8&prompt=512&chunk=128&a.chunk=whole")
    assert len(sent["answer"]["panels"]) == 2 and sent["answer"]["pinned"]
    assert page.lab.pinned[0] == replace(page.lab.settings, chunk=None)
    again, second = start(sent["query"])
    assert second["answer"]["svg"] == sent["answer"]["svg"]
    unpinned = json.loads(again.handle('{"kind": "action", "key": "pin"}'))
    assert "a." not in unpinned["query"]


def test_a_preset_is_found_by_its_settings():
    for key, *_, changes in PRESETS:
        assert start(write(Settings(**changes)))[1]["answer"]["preset"] == key
    assert start()[1]["answer"]["preset"] == ""


def test_what_cannot_be_used_is_said_with_the_picture():
    _, sent = start("running=8&prompt=512&chunk=0")
    assert sent["answer"]["error"].startswith("chunk=0: it must be")
    assert sent["answer"]["values"] == DEFAULTS | {"running": 8, "prompt": 512}
    assert "chunk=1024" in sent["query"], "the address says what is shown"
    _, sent = start("chip=laptop")
    assert "can't run together: " in sent["answer"]["error"] and "doesn't fit on" in sent["answer"]["error"]
    assert sent["answer"]["values"] == DEFAULTS
    _, sent = start("running=8&prompt=512&a.chip=laptop")
    assert "pinned as A can't run: " in sent["answer"]["error"] and len(sent["answer"]["panels"]) == 1


# ---- the build ------------------------------------------------------------------------------------


def test_the_zip_has_all_that_the_page_imports_and_nothing_else(tmp_path):
    """In a Python that sees the zip alone: no torch, no ipywidgets, no file of the course."""
    file = tmp_path / "course_lib.zip"
    build_site.zip_course_lib(file)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from course_lib.lab.web import Page\n"
        "assert Page('running=4&prompt=512').start()\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, file], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["__main__", "course_lib"]
    first = file.read_bytes()
    build_site.zip_course_lib(file)
    assert file.read_bytes() == first, "the same sources give the same bytes"


@pytest.fixture
def fake_pyodide(tmp_path):
    """A folder with the right names."""
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in (*build_site.MODULES, *build_site.FETCHED, "package.json"):
        (folder / name).write_text('{"version": "1.2.3", "license": "MPL-2.0", "homepage": "https://example.org/p"}')
    return folder


def test_the_site_names_no_other_host_but_in_links(tmp_path, fake_pyodide):
    out = tmp_path / "site"
    size = build_site.build(out, fake_pyodide, "https://example.org/course?a=1&b=2")
    page = (out / "index.html").read_text("utf-8")
    assert "{{" not in page and 'href="https://example.org/course?a=1&amp;b=2"' in page and "Pyodide 1.2.3</a> (MPL-2.0)" in page
    fetched = [out / "course_lib.zip", *(out / "pyodide" / name for name in build_site.FETCHED)]
    assert f'max="{sum(file.stat().st_size for file in fetched)}"' in page
    assert size == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    for name in ("page.js", "worker.js"):
        assert "://" not in (out / name).read_text("utf-8"), "relative addresses alone"
    assert (out / "view.js").read_bytes() == (ROOT / "course_lib" / "lab" / "view.js").read_bytes()
    assert "course_lib/lab/web.py" in zipfile.ZipFile(out / "course_lib.zip").namelist()


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    file = tmp_path / f"pyodide-{build_site.PYODIDE}.tgz"
    file.write_bytes(b"something else")
    with pytest.raises(build_site.CannotBuild, match="is not the file it should be: its hash is sha512-"):
        build_site.tarball(tmp_path, offline=True)
    assert not file.exists()


def test_without_npm_the_build_says_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build_site.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_site, "OUT", tmp_path / "build" / "site")
    monkeypatch.setattr(sys, "argv", ["build_site.py"])
    assert build_site.main() == 1
    assert "can't be built: npm isn't here: it comes with Node.js." in capsys.readouterr().err


def test_what_a_program_says_when_it_fails_is_passed_on():
    with pytest.raises(build_site.CannotBuild, match=r"python\S* -c .* failed: no such package"):
        build_site._run(sys.executable, "-c", "raise SystemExit('no such package')")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/me/course.git", "https://example.org/me/course"),
        ("https://me:secret@example.org/me/course", "https://example.org/me/course"),
        ("git@example.org:me/course.git", "https://example.org/me/course"),
        ("ssh://git@example.org/me/course.git", "https://example.org/me/course"),
        ("/home/me/course", ""),
        ("", ""),
    ],
)
def test_the_link_to_the_course_is_where_the_clone_is_from(remote, address):
    assert build_site.web_address(remote) == address

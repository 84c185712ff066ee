"""The lab as a web page, in Chromium: course_lib runs under Pyodide, from nothing but a local file server.

Needs Pyodide's file, which `make site` fetches once (or npm's cache), and what test_lab_browser.py needs; skipped
elsewhere. Nothing here asks the network.
"""

import contextlib
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from test_lab_browser import CHROMIUM, HEADLESS, playwright, tab_stops
from test_site import build_site

from course_lib.lab.address import read, write
from course_lib.lab.scheduler_lab import CONTROLS, PRESETS, Lab, Settings

SUBPATH = "school/site"  # as under GitHub Pages: not at the root of the server
START = "?running=16&prompt=2048&chunk=0&chips=h100"  # two things wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site from the present sources, in a folder of its own."""
    root = tmp_path_factory.mktemp("server")
    try:
        pyodide = build_site.unpacked(build_site.tarball(build_site.OUT.parent, offline=True))
    except build_site.CannotBuild as error:
        why = str(error).splitlines()[0]
        pytest.skip(f"the lab's web page can't be built without the network ({why}); `make site` fetches what it needs, once")
    build_site.build(root / SUBPATH, pyodide, "course.txt")
    return root / SUBPATH


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *message):
        pass


@contextlib.contextmanager
def served(folder):
    """The address of a folder that a plain file server shows on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site):
    with served(site.parents[1]) as root:
        yield f"{root}/{SUBPATH}/"


@pytest.fixture(scope="module")
def context(address):
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=HEADLESS)
        context = browser.new_context(viewport={"width": 390, "height": 844})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield context
        browser.close()


class OpenLab:
    """One page for all tests, since Python takes seconds to start; each test begins with a preset or a setting of its own."""

    def __init__(self, context, url):
        self.requested, self.errors = [], []
        self.page = page = context.new_page()
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url)
        self.stage = page.locator("#stage").inner_text()
        page.wait_for_selector(".lmv-picture svg path.lm-prefill, #failed:not([hidden])", timeout=120_000)
        assert page.locator("#failed").is_hidden(), page.locator("#failed").inner_text()
        self.note = page.locator(".lmv-note").inner_text()

    def settings(self):
        """What the address says; the page writes it a moment later."""
        self.page.wait_for_timeout(400)
        found = read(urlsplit(self.page.url).query)
        assert not found.complaints and found.settings.keys() == {key for key, *_ in CONTROLS}
        return found

    def choose(self, preset):
        label, idea = next((label, idea) for key, label, idea, _ in PRESETS if key == preset)
        self.page.get_by_role("button", name=label, exact=True).press("Enter")
        self.page.wait_for_selector(f'.lmv-idea:has-text("{idea}")')

    def download(self, button):
        with self.page.expect_download() as download:
            self.page.get_by_role("button", name=button).press("Enter")
        return Path(download.value.path()).read_text("utf-8")


@pytest.fixture(scope="module")
def lab(context, address):
    lab = OpenLab(context, address + START)
    yield lab
    assert not lab.errors, lab.errors
    strangers = [url for url in lab.requested if not url.startswith((address, "blob:", "data:"))]
    assert not strangers, strangers


def test_the_page_opens_with_what_it_can_use_of_its_address_and_says_the_rest(lab):
    assert lab.stage == "Loading Python …"
    assert lab.note == (
        "chunk=0: it must be a whole number from 32 to 8,192, or whole. Instead of it: 1,024 tokens. "
        "chips: there is no such setting. Did you mean chip?"
    )
    assert Settings(**lab.settings().settings) == Settings(running=16, prompt=2048)
    assert lab.page.evaluate("document.documentElement.scrollWidth") == 390, "a phone scrolls up and down only"


def test_a_slider_changes_the_timeline_and_the_address(lab):
    lab.choose("prefix")
    page = lab.page
    before = page.locator(".lmv-picture svg desc").text_content()
    chunk = page.get_by_role("slider", name="chunk size")
    chunk.press("ArrowLeft")
    page.wait_for_function("before => document.querySelector('.lmv-picture svg desc').textContent !== before", arg=before)
    assert "chunks of up to 512 tokens" in page.locator(".lmv-picture svg desc").text_content()
    assert Settings(**lab.settings().settings) == Settings(running=64, known=6144, chunk=512)
    assert page.get_by_role("button", name="prefix hit").get_attribute("aria-pressed") == "false"


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("preset", ["stall", "decode_cap", "pressure"])
def test_the_picture_and_the_trace_are_those_of_cpython_byte_for_byte(lab, preset):
    lab.choose(preset)
    here = Lab(**next(changes for key, *_, changes in PRESETS if key == preset))
    for button, key in (("Picture (SVG)", "svg"), ("Trace (JSON)", "json")):
        there = lab.download(button)
        assert len(there) > 1000
        assert sha256(there) == sha256(here.export(key)["text"]), (preset, key)


def test_a_link_and_the_code_are_copied(lab, address):
    lab.choose("stall")
    page = lab.page
    page.get_by_role("button", name="Pin as A").press("Enter")
    page.wait_for_selector("button:has-text('Unpin A')")
    lab.choose("chunks")
    page.get_by_role("button", name="Copy link").press("Enter")
    page.wait_for_selector("#said:has-text('The link is copied')")
    link = page.evaluate("navigator.clipboard.readText()")
    stall, chunks = Settings(running=128, chunk=None), Settings(running=128)
    assert link == f"{address}?{write(chunks, stall)}"
    lab.settings()
    assert page.url == link
    page.get_by_role("button", name="Unpin A").press("Enter")
    page.wait_for_selector("button:has-text('Pin as A')")
    page.get_by_role("button", name="Copy as code").press("Enter")
    page.wait_for_function("document.querySelector('.lmv [aria-live]').textContent.startsWith('The code is copied')")
    assert page.evaluate("navigator.clipboard.readText()") == chunks.code()


def test_without_a_clipboard_the_link_is_shown_to_be_copied_by_hand(lab):
    page = lab.page
    page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')))")
    page.get_by_role("button", name="Copy link").press("Enter")
    field = page.get_by_role("textbox", name="Link to these settings")
    field.wait_for()
    lab.settings()
    assert field.input_value() == page.url
    assert page.evaluate("document.activeElement.id") == "link" and "Copy this address" in page.locator("#said").inner_text()


def test_the_page_is_used_with_the_keyboard_alone(lab):
    page = lab.page
    lab.choose("chunks")
    page.set_viewport_size({"width": 1280, "height": 720})  # in a narrower one the table is a stop too: it can be scrolled
    page.locator("h1").click()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "copy"
    page.locator(".lmv button").first.focus()
    names = [name for _, name, *_ in tab_stops(page)]
    code_is_shown = page.locator(".lmv textarea").count()
    assert len(names) == len(PRESETS) + len(CONTROLS) + 6 + 6 + code_is_shown, names
    assert all(names) and len(set(names)) == len(names), names
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "A", "the lab lets go of the focus"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    words = page.locator("#words")
    words.locator("summary").press("Enter")
    assert words.locator("dt").all_inner_texts() == [label for _, label, *_ in CONTROLS]


def refused(context, url, **script):
    page = context.new_page()
    if script:
        page.add_init_script(**script)
    page.goto(url)
    page.wait_for_selector("#failed:not([hidden])")
    assert page.locator("#loading").is_hidden()
    said = page.get_by_role("alert").inner_text()
    page.close()
    return said


def test_a_browser_that_cannot_run_it_is_told_why(context, site, address):
    assert "needs WebAssembly" in refused(context, address, script="delete window.WebAssembly")
    assert "must come from a web server" in refused(context, (site / "index.html").as_uri())
    context.route("**/course_lib.zip", lambda route: route.fulfill(status=404))
    assert "course_lib.zip is not there (status 404)" in refused(context, address)
    context.unroute("**/course_lib.zip")
    context.route("**/pyodide.mjs", lambda route: route.abort())
    assert "worker could not be loaded" in refused(context, address)
    context.unroute("**/pyodide.mjs")

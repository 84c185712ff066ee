"""Shared by all tests: no network, Triton's interpreter, torch's threads, and the two models, loaded once."""

import ctypes
import os
import sys
import tempfile

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported; tests need no network
# Check cells remember what is done; a test's must not go into the learner's own file. Kernels inherit this.
os.environ["COURSE_PROGRESS"] = os.path.join(tempfile.mkdtemp(prefix="course_progress_"), "progress.json")


def has_gpu():
    """Whether there is a CUDA GPU. The driver is asked, because importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


# Read when triton is imported, which some model of transformers does: so it is set before any test is. Nothing but our
# own kernels uses triton here.
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def num_cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def torch_threads(request):
    """All cores for SmolLM2, one for everything smaller.

    A tiny model gains nothing from a second thread, and on a busy machine it waits for it: 5 times slower.
    """
    if "torch" in sys.modules:  # never imported for a test that doesn't use it
        sys.modules["torch"].set_num_threads(num_cores() if "smollm2" in request.fixturenames else 1)


@pytest.fixture(scope="session")
def tiny():
    """The 2-layer model with fixed random weights, and its byte tokenizer."""
    from course_lib.model import load_model

    return load_model("tiny", device="cpu")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32. Tests that use it are skipped where it can't be had."""
    from course_lib.model import load_model

    try:
        return load_model("smollm2", device="cpu")
    except OSError as error:  # it is nowhere to be found, or there is no room for it
        pytest.skip(f"SmolLM2 can't be had: {error}")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    """A real byte-pair tokenizer: a token can be part of a character, or a word with its leading space."""
    return smollm2.tokenizer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A browser test that failed tells what its pages show."""
    report = yield
    if report.when == "call" and report.failed:
        for page in getattr(item.funcargs.get("opened"), "pages", []):
            report.sections.append(("the page", page.describe()))
    return report


# ---- what a run prints at its end

# Seconds that a notebook may take from top to bottom on a quiet laptop. A busy machine may take three times as long.
LIMITS = {"00": 180, "12": 180}
LIMIT = 60
NOTEBOOK_SECONDS = {}


class NotebookTimes:
    """Registered as a plugin: pytest asks a conftest.py only about what lies beside it, and the notebooks don't."""

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[0]
        if name.endswith(".ipynb"):
            NOTEBOOK_SECONDS[name] = NOTEBOOK_SECONDS.get(name, 0) + report.duration


def pytest_configure(config):
    config.pluginmanager.register(NotebookTimes())


LONG_SOLUTIONS = ("01", "04", "05", "07", "10", "99")  # they load the model; what their cells hold is checked in test_exercises.py


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(tuple(f"solutions/{number}_" for number in LONG_SOLUTIONS)):
            item.add_marker(pytest.mark.long)


def notebook_limit(name):
    return LIMITS.get(os.path.basename(name)[:2], LIMIT)


def pytest_sessionfinish(session, exitstatus):
    """A notebook that takes far too long is a failure."""
    if exitstatus == 0 and any(seconds > 3 * notebook_limit(name) for name, seconds in NOTEBOOK_SECONDS.items()):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    from helpers import SUMMARY

    rows = [f"{seconds:6.1f} s of {notebook_limit(name):3} s   {name}" + ("   over its limit" if seconds > notebook_limit(name) else "")
            for name, seconds in sorted(NOTEBOOK_SECONDS.items())]  # fmt: skip
    for title, lines in {**SUMMARY, "notebooks, from top to bottom": rows}.items():
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)

"""The map of course_lib in CONTRIBUTING.md is the code's: the same modules, in the order of their imports."""

import re

from test_engine import ORDER, ROOT, imports_of, modules

MAP = re.search(r"^## The house\n.*?^```text\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)[1]
LINES = [line.split(maxsplit=1) for line in MAP.splitlines()]
NAMES = [file.removesuffix(".py").rstrip("/") for file, _ in LINES]


def test_the_map_lists_every_module_in_the_order_of_the_engines_tests():
    assert NAMES == ORDER
    for file, name in zip((file for file, _ in LINES), NAMES):
        path = ROOT / "course_lib" / file
        assert path.is_dir() if file.endswith("/") else path.is_file(), f"{file}: there is no such module"
    assert set(NAMES) == {parts[0] for _, parts in modules()}


def test_imports_point_upwards_in_the_map():
    place = {name: number for number, name in enumerate(NAMES)}
    wrong = []
    for path, parts in modules():
        for line, target, _ in imports_of(path, parts):
            top, _, rest = target.partition(".")
            name = rest.split(".")[0]
            if top == "course_lib" and place.get(name, place["__init__"]) > place[parts[0]]:
                wrong.append(f"{'/'.join(parts)}, line {line}: imports {target}, which the map has below it")
    assert not wrong, "\n".join(wrong)


def test_the_map_says_what_needs_torch():
    marked = {name for name, (_, what) in zip(NAMES, LINES) if what.split()[-1] == "torch"}
    imported = {parts[0] for path, parts in modules() for _, target, top_level in imports_of(path, parts) if top_level and target.split(".")[0] == "torch"}
    assert marked == imported

"""python -m course_lib check --all | PATH ... [--csv FILE]"""

from __future__ import annotations

from . import load


def main(args) -> int:
    """0 if every exercise is green, 1 if any isn't, 2 if there was nothing to check."""
    if args.paths:
        from .submissions import main as check_notebooks

        return check_notebooks(args.paths, args.csv)
    from .progress import read_progress, table

    load()
    text, is_done = table(read_progress())
    print(text)
    print("(as remembered from the check cells; `check exercises` runs the notebooks again)")
    return 0 if is_done else 1

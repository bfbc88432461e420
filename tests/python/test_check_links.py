"""scripts/check_links.py: headings have the names that GitHub gives them, and a link to what is not there is found."""

import pathlib
import subprocess
import sys

import pytest

HEADINGS = """# The first
## Limits of `--replace-leader`
## [A link](other.md), and *more* — of it
## Twice
## Twice
## `es.optim` in C11_code
## Über 4 ranks / 2
    # no heading: code
```sh
## nor this
```
<a name="by-hand"></a>
"""


def said(tree: pathlib.Path, root: pathlib.Path, line: str) -> str:
    """What is found of a document with this line, beside `other.md` and `code.c`."""
    (root / "docs").mkdir()
    (root / "docs" / "other.md").write_text(HEADINGS)
    (root / "code.c").touch()
    (root / "docs" / "a.md").write_text(f"# Own\n\n{line}\n")
    (root / "README.md").write_text("[text](docs/a.md#own)\n")
    command = [sys.executable, tree / "scripts" / "check_links.py", root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "target",
    [
        "other.md",
        "../code.c#L12",
        "#own",
        "other.md#limits-of---replace-leader",
        "other.md#a-link-and-more--of-it",
        "other.md#twice",
        "other.md#twice-1",
        "other.md#esoptim-in-c11_code",
        "other.md#%C3%BCber-4-ranks--2",
        "other.md#by-hand",
        "https://example.org/none#none",
    ],
)
def test_what_is_there_passes(tree, tmp_path, target):
    assert said(tree, tmp_path, f"see [there]({target}), and `[code](none.md)`") == ""


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("none.md", "is not there"),
        ("#none", "is the name of no heading there"),
        ("other.md#limits-of-replace-leader", "is the name of no heading there"),
        ("other.md#twice-2", "is the name of no heading there"),
        ("other.md#nor-this", "is the name of no heading there"),
        ("other.md#no-heading-code", "is the name of no heading there"),
    ],
)
def test_what_is_not_there_fails(tree, tmp_path, target, why):
    assert said(tree, tmp_path, f"| see [there]({target}) |") == f"docs/a.md:3: {target} {why}\n"


def test_files_of_images_are_looked_for(tree, tmp_path):
    assert "none.svg is not there" in said(tree, tmp_path, '<img src="none.svg"> ![words](../code.c)')

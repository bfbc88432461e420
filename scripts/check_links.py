"""Checks that what the documents link to is there: files and folders of the repository, and headings, by GitHub's names for them.

python scripts/check_links.py [ROOT]
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import urllib.parse

FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1")
LINK = re.compile(r"\]\(\s*<?([^()\s<>]*(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)")
SOURCE = re.compile(r"\b(?:src|href)=\"([^\"]+)\"")
NAMED = re.compile(r"<a\s+(?:name|id)=\"([^\"]+)\"")


def slug(heading: str) -> str:
    """As GitHub names a heading: without its marks, in small letters; what is no letter, digit, _, - or space goes, and each space
    is a dash. So `--flag` keeps its two, and what stood between two spaces and goes leaves two."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"(?<![\w`])(\*{1,3}|_{1,3})(?=\S)(.+?)(?<=\S)\1(?!\w)", r"\2", text)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def lines_of(text: str) -> list[str]:
    """Without blocks of code."""
    found, fence = [], ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
            line = ""
        found.append("" if fence or (line.startswith("    ") and not line.lstrip().startswith(("-", "|"))) else line)
    return found


def names_of(text: str) -> set[str]:
    """All that a link to this document may have behind its #."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    for line in lines_of(text):
        found.update(NAMED.findall(line))
        heading = HEADING.match(line)
        if heading:
            name = slug(heading[2])
            count = seen.get(name, 0)
            seen[name] = count + 1
            found.add(f"{name}-{count}" if count else name)
    return found


def links_of(text: str) -> list[tuple[int, str]]:
    """Line and target of each."""
    found = []
    for number, line in enumerate(lines_of(text), 1):
        said = CODE.sub(lambda code: "x" * len(code[0]), line)
        targets = LINK.findall(said) + SOURCE.findall(said) + REFERENCE.findall(said)
        found += [(number, target) for target in targets if target]
    return found


def trouble(root: pathlib.Path, document: pathlib.Path, target: str, names: dict[pathlib.Path, set[str]]) -> str:
    """What is wrong with a link; nothing: it leads somewhere, or out of the repository."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
        return ""
    path, _, fragment = target.partition("#")
    path = urllib.parse.unquote(path)
    start = root if path.startswith("/") else document.parent
    place = (start / path.lstrip("/")).resolve() if path else document.resolve()
    if not place.exists():
        return "is not there"
    if not fragment or place.suffix != ".md":
        return ""
    if place not in names:
        names[place] = names_of(place.read_text())
    return "" if urllib.parse.unquote(fragment) in names[place] else "is the name of no heading there"


def documents_of(root: pathlib.Path) -> list[pathlib.Path]:
    """Those that git does not ignore; of a folder without git all."""
    if not (root / ".git").exists():
        return sorted(root.rglob("*.md"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in sorted(filter(None, listed.split("\0"))) if (root / name).exists()]


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    names: dict[pathlib.Path, set[str]] = {}
    found = 0
    for document in documents_of(root):
        for line, target in links_of(document.read_text()):
            why = trouble(root, document, target, names)
            if why:
                found += 1
                print(f"{document.relative_to(root)}:{line}: {target} {why}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What README and docs tell the reader to type exists: files, make targets, commands, options, Python names."""

import ast
import functools
import pathlib
import re
import subprocess

import pytest

TREE = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*TREE.glob("*.md"), *(TREE / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}|\t).*\n?)+", re.MULTILINE)


def page_id(page: pathlib.Path) -> str:
    return str(page.relative_to(TREE))


def code(page: pathlib.Path) -> str:
    """All that a reader could copy: fenced and indented blocks, and words in backticks."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for _, body in FENCE.findall(text)]
    text = FENCE.sub("", text)
    blocks += INDENTED.findall(text)
    blocks += re.findall(r"`([^`\n]+)`", INDENTED.sub("", text))
    return "\n".join(blocks)


@functools.cache
def help_of(program: pathlib.Path, *command: str) -> str:
    done = subprocess.run([program, *command, "--help"], capture_output=True, text=True, timeout=150, check=False)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_and_scripts_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (TREE / "Makefile").read_text(), re.MULTILINE))
    text = code(page)
    for target in re.findall(r"(?:^|[`\s&])make ([a-z-]+)\b", text):
        assert target in targets, f"{page_id(page)}: make {target}"
    for path in re.findall(r"\b((?:scripts|examples|bench)/[\w/]+\.(?:py|sh|c))\b", text):
        assert (TREE / path).exists(), f"{page_id(page)}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_exist(page, program):
    for line in code(page).splitlines():
        found = re.search(r"\bevenstep ([a-z]+)\b(.*)", line)
        if found is None or line.lstrip().startswith(("import", "from", "#")):
            continue
        command, rest = found.groups()
        usage = help_of(program, command)
        assert usage, f"{page_id(page)}: no command in {line.strip()!r}"
        below = re.match(r"\s+([a-z]+)\b", rest)
        if below and re.search(rf"^  {below[1]}\b", usage, re.MULTILINE):
            usage = help_of(program, command, below[1])
        rest = re.split(r"\.py\b| #| -- ", rest)[0]  # what follows a script is the script's
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", rest):
            assert re.search(rf"{option}\b", usage), f"{page_id(page)}: evenstep {command} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_is_python_and_names_exist(page):
    import evenstep as es

    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(body)
    for name in re.findall(r"\bes\.([a-z_]\w*)", code(page)):
        assert hasattr(es, name), f"{page_id(page)}: es.{name}"


def test_the_docs_were_found():
    assert {page.name for page in PAGES} >= {"README.md", "QUICKSTART.md", "CONTRIBUTING.md"}


def test_each_fault_of_the_table_has_its_limit():
    text = (TREE / "docs" / "fault-tolerance.md").read_text(encoding="utf-8")
    table = text.partition("| fault | noticed | within | what follows | test |\n")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines()[1:] if "Limit: " not in row]
    assert "| a rank ends " in table and not rows, rows


def test_the_ten_lines_of_the_readme_train():
    import torch

    class Net(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 3)

    (sample,) = (body for language, body in FENCE.findall((TREE / "README.md").read_text()) if language == "python")
    data = torch.utils.data.TensorDataset(torch.randn(600, 4), torch.randint(0, 3, (600,)))
    names = {"Net": Net, "data": data}
    torch.manual_seed(0)
    exec(sample, names)
    torch.manual_seed(0)
    fresh = Net().weight
    assert names["optimizer"].state, "no step was made"
    assert not torch.equal(names["model"].weight, fresh)

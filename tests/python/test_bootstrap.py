"""scripts/bootstrap.sh on machines that lack something, made of a folder of a few programs: what is missing is named, nothing crashes."""

import shutil
import subprocess
import sys

import pytest

SHELL = ["bash", "sh", "env", "grep", "cat", "tr", "rm", "mkdir", "mktemp", "dirname", "cksum", "dpkg-query"]


@pytest.fixture
def machine(tree, tmp_path):
    """Runs the script where only SHELL and the programs given by name and text exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in SHELL:
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)

    def run(what: str = "demo", **given: str) -> "subprocess.CompletedProcess[str]":
        for name, text in given.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        environment = {"PATH": str(programs), "EVENSTEP_VENV": str(tmp_path / "venv"), "HOME": str(tmp_path)}
        return subprocess.run(
            [str(programs / "bash"), str(tree / "scripts" / "bootstrap.sh"), what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


PYTHON = f'exec "{sys.executable}" "$@"'


def test_without_root_the_missing_packages_and_the_line_to_run_are_named(machine):
    done = machine(id="echo 1000", python3=PYTHON)
    assert done.returncode == 1
    for package in ["gcc", "make", "cmake", "ninja-build", "pkg-config", "libhwloc-dev", "libjansson-dev"]:
        assert f"  {package}: " in done.stdout
    assert "  cmocka" not in done.stdout, "only the tests need it"
    (line,) = [line for line in done.stderr.splitlines() if "apt-get install" in line]
    assert line.strip().startswith("apt-get update && apt-get install -y --no-install-recommends gcc ")
    assert "libjansson-dev" in line


def test_a_compiler_without_the_headers_of_the_c_library_is_not_enough(machine):
    done = machine(id="echo 1000", python3=PYTHON, cc="exit 1", gcc="exit 1")
    assert "  gcc: " not in done.stdout
    assert "  libc6-dev: " in done.stdout
    done = machine(id="echo 1000", python3=PYTHON, cc="exit 0")
    assert "  libc6-dev: " not in done.stdout


def test_without_python_it_is_one_of_the_missing_packages(machine):
    done = machine(id="echo 1000")
    assert done.returncode == 1
    for package in ["python3", "python3-venv", "python3-dev"]:
        assert f"  {package}: " in done.stdout


def test_an_old_python_is_named_before_anything_is_installed(machine):
    code = "import sys; sys.version_info = (3, 10, 12); exec(sys.argv.pop(1))"
    old = f'[ "$1" != -V ] || {{ echo Python 3.10.12; exit; }}; shift; exec "{sys.executable}" -c "{code}" "$@"'
    done = machine(id="echo 0", python3=old, **{"apt-get": "echo apt-get was called; exit 1"})
    assert done.returncode == 1
    assert "3.11 or newer; python3 is Python 3.10.12" in done.stderr
    assert "PYTHON=" in done.stderr
    assert "apt-get was called" not in done.stdout + done.stderr


def test_a_system_without_apt_is_told_so(machine):
    done = machine(id="echo 0", python3=PYTHON)
    assert done.returncode == 1
    assert "no apt-get here" in done.stderr


def test_what_apt_says_is_shown_when_it_fails(machine):
    done = machine(id="echo 0", python3=PYTHON, **{"apt-get": "echo the mirror does not answer; exit 100"})
    assert done.returncode == 1
    assert "the mirror does not answer" in done.stderr
    assert "apt-get could not install them" in done.stderr


def test_a_wrong_word_is_refused(machine):
    done = machine("tset")
    assert done.returncode == 2
    assert "demo|test" in done.stderr

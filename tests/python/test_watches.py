"""`evenstep run --straggler-watch`, `--link-watch`, `--gpu-watch`: when something that becomes slow is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

WATCHES = (("straggler", "1.5:2", "1.2"), ("link", "3:3", "1.5"))


@pytest.mark.parametrize(("name", "usual", "least"), WATCHES)
@pytest.mark.parametrize("words", ["soon", "1", "1001", "nan", "2:", "2:x", "2:0", "2:1e6", "2:3s", ":3", "2,3", "Off"])
def test_what_is_no_limit_is_refused(
    run, script: Callable[[str], str], name: str, usual: str, least: str, words: str
) -> None:
    done = run(f"--{name}-watch", words, script("pass"))
    assert done.returncode == 2 and f"--{name}-watch {words} is no limit for what is slow" in done.stderr
    assert f"from {least} to 1000" in done.stderr and f"{usual}; or off" in done.stderr


@pytest.mark.parametrize("words", ["soon", "0", "3601", "-1", "1s"])
def test_what_is_no_time_between_two_looks_is_refused(run, script: Callable[[str], str], words: str) -> None:
    done = run("--gpu-watch", words, script("pass"))
    assert done.returncode == 2 and f"--gpu-watch {words} is no time" in done.stderr
    assert "from 0.1 to 3600 (1), or off" in done.stderr


@pytest.mark.parametrize("name", ["straggler", "link", "gpu"])
def test_the_environment_is_the_default(run, script: Callable[[str], str], name: str) -> None:
    path, variable = script("print('ran')"), f"EVENSTEP_{name.upper()}_WATCH"
    assert f"{variable} never is no " in run(path, env={variable: "never"}).stderr
    for words in ("off", "4"):  # what is typed counts
        assert run("-n", "1", f"--{name}-watch", words, path, env={variable: "never"}).returncode == 0
    assert run("-n", "1", path, env={variable: "" if name == "gpu" else "4:7.5"}).returncode == 0

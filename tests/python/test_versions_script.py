"""scripts/versions.sh: the tests with another torch."""

import subprocess

import pytest


@pytest.mark.parametrize("words", [[], ["2.14.1"], ["torchvision==0.29"], ["--python"], ["--python", "python3"]])
def test_a_wrong_word_is_refused_before_anything_is_built(tree, words):
    done = subprocess.run(
        [str(tree / "scripts" / "versions.sh"), *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 2
    assert "usage: scripts/versions.sh [--python PROGRAM] torch==VERSION" in done.stderr

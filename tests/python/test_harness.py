"""The tests' own tools: a job of several ranks sees its environment, and a late or failing one fails the test."""

import pytest


def test_ranks_see_their_environment(run_ranks):
    results = run_ranks(
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("EXTRA"), *sys.argv[1:])
        """,
        ranks=3,
        args=["a"],
        rank_env={1: {"EXTRA": "x"}},
    )
    assert [result.stdout.split() for result in results] == [
        ["0", "3", "None", "a"],
        ["1", "3", "x", "a"],
        ["2", "3", "None", "a"],
    ]


def test_a_failing_rank_fails_the_test(run_ranks):
    with pytest.raises(pytest.fail.Exception, match="rank 1: exit 3"):
        run_ranks("import os, sys; sys.exit(3 * int(os.environ['RANK']))")
    assert run_ranks("raise SystemExit(4)", ranks=1, check=False)[0].returncode == 4


def test_a_late_rank_is_ended(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"not ended after .* ranks \[0, 1\]"):
        run_ranks("import signal; signal.pause()", timeout=0.5)


def test_free_ports_can_be_bound(free_port):
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))


def test_the_program_says_its_version(program):
    import subprocess

    import evenstep

    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    assert said == f"evenstep {evenstep.__version__}\n"

"""The tests' own tools: a job of several ranks sees its environment, and a late or failing one fails the test."""

import os
import pathlib
import re
import signal

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


@pytest.fixture(params=["forked", "fresh"])
def started(request, monkeypatch):
    """Ranks forked from the server, and ranks started as programs: a script must not see which."""
    if request.param == "fresh":
        monkeypatch.setenv("EVENSTEP_TEST_FRESH", "1")


def test_a_rank_is_a_program_of_its_own(run_ranks, started, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, atexit, random\n"
        "atexit.register(print, 'at the end')\n"
        "print(__name__, __file__ == sys.argv[0], sys.path[0] == os.path.dirname(__file__), sys.argv[1:])\n"
        "print(os.getcwd(), sys.modules['__main__'].os is os, 'evenstep' in sys.modules, repr(sys.stdin.read()))\n"
        "print('random', random.random())\n"
        "{}['missing']\n"
    )
    results = run_ranks(path, args=("a b",), check=False)
    drawn = set()
    for result in results:
        assert result.returncode == 1
        first, second, third, last = result.stdout.splitlines()
        assert first == "__main__ True True ['a b']"
        assert second == f"{tmp_path} True False ''"
        assert last == "at the end"
        drawn.add(third)
        frames = [line for line in result.stderr.splitlines() if line.startswith("  File ")]
        assert frames == [f'  File "{path}", line 6, in <module>'] and "KeyError: 'missing'" in result.stderr
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("ends", "returncode"),
    [("sys.exit()", 0), ("sys.exit('words')", 1), ("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("", 0)],
)
def test_how_a_rank_ended(run_ranks, started, ends, returncode):
    result = run_ranks(f"import os, sys\nprint('said')\n{ends}", ranks=1, check=False)[0]
    assert result.returncode == returncode
    assert result.stdout == "said\n"
    assert result.stderr == ("words\n" if "words" in ends else "")


def test_what_a_rank_leaves_behind_is_found(run_ranks, started, no_process_left):
    run_ranks("import os, signal\nif os.fork() == 0: signal.pause()", ranks=1)
    left = no_process_left.left()
    assert len(left) == 1
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_a_late_rank_is_ended(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"not ended after .* ranks \[0, 1\]"):
        run_ranks("import signal; signal.pause()", timeout=0.5)


def test_free_ports_can_be_bound(free_port):
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))


def test_examples_of_hypothesis_have_no_limit_of_time():
    from hypothesis import HealthCheck, settings

    for of in (settings(), settings(max_examples=3)):
        assert of.deadline is None and HealthCheck.too_slow in of.suppress_health_check


def test_no_port_is_given_twice_before_it_is_bound(monkeypatch):
    import run_jobs

    kernels = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = os.getpid()  # not that of another pytest beside this one
    numbers = iter([first, first, *range(first + 1, first + 1000)])
    monkeypatch.setattr(run_jobs.secrets, "randbelow", lambda below: next(numbers) % below)
    assert run_jobs.free_port() != run_jobs.free_port()
    assert next(numbers) > first + 1 or kernels <= 20000  # with no room below those it chooses itself


def test_the_program_says_its_version(program):
    import subprocess

    import evenstep

    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=150, check=True).stdout
    commit = evenstep._core.commit
    assert re.fullmatch(r"([0-9a-f]{12,}\+?)?", commit)
    assert said == f"evenstep {evenstep.__version__}" + (f" (commit {commit})" if commit else "") + "\n"


def test_a_quick_start_trains_alike():
    """Ranks that start as programs, with what quick_start/ leaves out of torch and without: not a bit differs, nor the exit status."""
    import subprocess
    import sys

    source = """
import os
import sys
import types

import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
print("torch.distributions.normal" in sys.modules, "torch.masked._ops" in sys.modules)
print(*(p.detach().numpy().tobytes().hex() for p in model.parameters()))
print(torch.distributions.Normal(0.0, 1.0).sample().item(), torch.masked.sum(torch.ones(3), mask=torch.ones(3) > 0).item())
print(callable(torch.hub.load))

class Told:
    def __init__(self, words):
        self.words = words

    def __del__(self, write=os.write):
        write(2, self.words)

torch.told = Told(b"torch")
other = sys.modules["other"] = types.ModuleType("other")
other.told = Told(b"other ")
del other
sys.exit(7)
"""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    quick = str(pathlib.Path(__file__).with_name("quick_start"))
    ended = []
    for path in ([quick, *folders], [folder for folder in folders if folder != quick]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        words = [sys.executable, "-c", source]
        ended.append(subprocess.run(words, env=environment, capture_output=True, text=True, timeout=150, check=False))
    said = [one.stdout for one in ended]
    assert [words.split()[:3] for words in said] == [["False"] * 3, ["True"] * 3]
    assert said[0].split()[3:] == said[1].split()[3:]
    # torch is not taken apart, another module is
    assert [(one.returncode, one.stderr) for one in ended] == [(7, "other "), (7, "other torch")]


def test_a_quick_start_has_the_compiler_whatever_is_imported_first():
    """What is read late registers with modules that ask for it: these are not to be run twice, with empty tables."""
    import subprocess
    import sys

    source = """
import torch
import torch._decomp
import torch._dynamo

assert sys.modules["torch._decomp"] is torch._decomp and torch._decomp.decomposition_table
twice = torch.compile(lambda x: x * 2, backend="eager")
print(twice(torch.ones(1)).item())
"""
    quick = str(pathlib.Path(__file__).with_name("quick_start"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([quick, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", "import sys" + source]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "2.0\n", done.stderr


def test_who_shares_files_of_tests_reads_its_own_alone(tmp_path):
    """One of several pytests: what another has claimed is not read, fixtures of the session last, and what cannot be read fails."""
    import subprocess
    import sys

    here = pathlib.Path(__file__).parent
    shared = here.joinpath("conftest.py").read_text()
    once = "\n\n@pytest.fixture(scope='session')\ndef once():\n    print('made', flush=True)\n    yield\n    print('over', flush=True)\n"
    (tmp_path / "conftest.py").write_text(shared + once)
    (tmp_path / "run_jobs.py").write_text(here.joinpath("run_jobs.py").read_text())
    (tmp_path / "test_another.py").write_text("print('read another')\n")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    more = "import pytest\n@pytest.mark.more\ndef test_more(): assert 0\n"
    (tmp_path / "test_first.py").write_text(
        more + "def test_1(once): print('1 ran')\ndef test_2(once): print('2 ran')\n"
    )
    (tmp_path / "test_last.py").write_text("def test_3(once): print('3 ran')\n")
    claims = tmp_path / "claims"
    claims.mkdir()
    (claims / "test_another.py").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENSTEP_TEST")}
    environment.update(EVENSTEP_TEST_CLAIMS=str(claims), EVENSTEP_TEST_PART="1/2")
    words = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "."]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("^3 passed, 1 deselected, 1 error in ", done.stdout, re.MULTILINE), done.stdout
    assert "No module named 'no_such_module'" in done.stdout
    said = re.findall(r"made|over|\d ran|read another", done.stdout)
    assert said == ["made", "1 ran", "2 ran", "3 ran", "over"]  # its part first: a broken file is the last
    assert sorted(path.stem for path in claims.iterdir()) == [
        "ran",
        *(f"test_{name}" for name in ("another", "broken", "first", "last")),
    ]

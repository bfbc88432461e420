"""Under mpirun: where it says a process's place, and groups over MPI, on each MPI that is found (EVENSTEP_TEST_MPIRUN:
paths, separated by ':')."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from evenstep import hosts, launcher, mpi

CASES = Path(__file__).with_name("mpi_cases.py")
FOUND = [
    path
    for name in os.environ.get("EVENSTEP_TEST_MPIRUN", "mpirun.openmpi:mpirun.mpich").split(":")
    if (path := shutil.which(name)) is not None
]
REQUIRED = "mpi" in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
QUIET = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NONE = pytest.param("", marks=pytest.mark.skipif(not REQUIRED, reason="no mpirun is found"))
each_mpirun = pytest.mark.parametrize(  # a third one `make test-more` alone has
    "mpirun", [*FOUND[:2], *(pytest.param(each, marks=pytest.mark.more) for each in FOUND[2:])] or [NONE]
)
one_mpirun = pytest.mark.parametrize(  # what differs between them, the tests of each have shown
    "mpirun", [*FOUND[:1], *(pytest.param(each, marks=pytest.mark.more) for each in FOUND[1:])] or [NONE]
)


def run(mpirun: str, ranks: int, *words: str, wrapper: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    assert mpirun, "EVENSTEP_TEST_REQUIRE has mpi, but no mpirun is found: set EVENSTEP_TEST_MPIRUN"
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN} | QUIET | variables
    command = [mpirun, "-n", str(ranks), *(["sh", "-c", wrapper, "sh"] if wrapper else []), sys.executable, str(CASES)]
    return subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL
    )


def check(result: subprocess.CompletedProcess[str], ranks: int) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("done")) == [
        f"done {rank}" for rank in range(ranks)
    ]


# ---- what the launcher says ----


SRUN = {  # as slurmstepd 22.05 sets them for the last of `srun -n 4 -N 2`, --mpi=none
    "SLURM_JOB_ID": "11",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[08-10]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}


def test_a_place_is_found_in_what_each_launcher_says() -> None:
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": "3",
    }
    assert launcher.find_place(open_mpi) == launcher.Place("Open MPI", 3, 4, 1, 2)
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert launcher.find_place(hydra) == launcher.Place("MPICH", 1, 2, 1, 2)
    srun = {"PMIX_RANK": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    srun["SLURM_STEP_TASKS_PER_NODE"] = "2(x2),1"
    assert launcher.find_place(srun) == launcher.Place("PMIx", 4, 5, 0, 1)
    srun_pmi2 = {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "4",
    }
    assert launcher.find_place(srun_pmi2) == launcher.Place("MPICH", 1, 4, 1, 4)
    assert launcher.find_place(SRUN) == launcher.Place("Slurm", 3, 4, 0, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PMI_RANK": "1"},
        {"PMI_RANK": "x", "PMI_SIZE": "2"},
        {"PMI_RANK": "2", "PMI_SIZE": "2"},
        {"PMIX_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},  # a batch script
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell of srun --pty
        SRUN | {"EVENSTEP_LAUNCHER": "none"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "EVENSTEP_LAUNCHER": "none"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "EVENSTEP_LAUNCHER": "none"},
    ],
)
def test_no_place_is_found_in_anything_else(variables: dict[str, str]) -> None:
    assert launcher.find_place(variables) is None
    launcher.adopt(variables)
    assert "RANK" not in variables


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_PTY_PORT": "41000"},
        {"SLURM_PTY_WIN_COL": "80", "PMI_RANK": "0", "PMI_SIZE": "4"},  # --mpi=pmi2
        {"SLURM_PTY_WIN_COL": "80", "PMIX_RANK": "0"},
    ],
)
def test_what_is_typed_in_a_shell_of_srun_has_no_place(more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What that shell's own command is, or a further srun starts there, is told by its terminal and its group."""
    variables = SRUN | {"SLURM_PROCID": "0"} | more
    monkeypatch.setattr(launcher, "_is_typed", lambda: False)
    found = launcher.find_place(variables)
    assert found is not None and (found.rank, found.ranks) == (0, 4)
    monkeypatch.setattr(launcher, "_is_typed", lambda: True)
    assert launcher.find_place(variables) is None
    launcher.adopt(variables)
    assert "RANK" not in variables


TYPED = """
import os, pty, sys
from evenstep import launcher
if sys.argv[1] == "terminal":
    shell, _ = pty.fork()  # a session of its own, whose terminal it is
else:
    shell = os.fork()
    shell or os.setsid()
if shell == 0:
    job = os.fork()
    if job == 0:
        if sys.argv[2] == "job":
            os.setpgid(0, 0)
        os._exit(launcher._is_typed())
    os._exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
print(os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]))
"""


@pytest.mark.parametrize(("where", "what"), [(a, b) for a in ("terminal", "none") for b in ("job", "first")])
def test_a_job_of_a_shell_at_a_terminal_is_typed(where: str, what: str) -> None:
    done = subprocess.run([sys.executable, "-c", TYPED, where, what], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(int((where, what) == ("terminal", "job"))), done.stderr


def test_mpirun_in_a_shell_of_srun_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_is_typed", lambda: True)
    shell = SRUN | {"SLURM_PROCID": "0", "SLURM_PTY_PORT": "41000"}
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert launcher.find_place(shell | hydra) == launcher.Place("MPICH", 1, 2, 1, 2)
    open_mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert launcher.find_place(shell | open_mpi) == launcher.Place("Open MPI", 0, 2, 0, 2)


def test_a_launcher_that_is_not_known_is_refused() -> None:
    with pytest.raises(hosts.EvenstepError, match="EVENSTEP_LAUNCHER=off is not known\n  fix: give none"):
        launcher.adopt(SRUN | {"EVENSTEP_LAUNCHER": "off"})


def test_what_torchrun_says_counts() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    before = dict(variables)
    launcher.adopt(variables)
    assert variables == before


@pytest.mark.parametrize(
    ("hosts_of_step", "first"),
    [("n[08-10]", "n08"), ("login,n1", "login"), ("r[1,3]n[04-05]x,y", "r1n04x"), ("a-1.cluster,b", "a-1.cluster")],
)
def test_ranks_of_srun_on_several_hosts_meet_at_the_first(hosts_of_step: str, first: str) -> None:
    def meeting(**more: str) -> tuple[str, str]:
        variables = {**SRUN, "SLURM_STEP_NODELIST": hosts_of_step, **more}
        launcher.adopt(variables)
        return variables["MASTER_ADDR"], variables["MASTER_PORT"]

    address, port = meeting()
    assert address == first and 15000 <= int(port) < 30000
    assert meeting(SLURM_PROCID="0", SLURM_NODEID="0") == (first, port)
    assert meeting(PMI_RANK="3", PMI_SIZE="4") == (first, port)  # --mpi=pmi2: no MPI library is needed
    for other in ({"SLURM_STEP_ID": "3"}, {"SLURM_JOB_ID": "12"}, {"SLURM_RESTART_COUNT": "1"}):
        assert meeting(**other)[1] != port


def test_a_place_becomes_torchruns_variables() -> None:
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    launcher.adopt(variables)
    port = int(variables.pop("MASTER_PORT"))
    assert 15000 <= port < 30000
    assert {name: variables.get(name) for name in TORCHRUN if name != "MASTER_PORT"} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    other = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    launcher.adopt(other)
    assert int(other["MASTER_PORT"]) == port  # all ranks of a launcher say the same
    given = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    launcher.adopt(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["LOCAL_WORLD_SIZE"]) == ("a", "1", "1")


# ---- what is chosen, and what is refused ----


def test_mpi_is_chosen_where_it_is_asked_for() -> None:
    has, lacks = {"mpi": "Open MPI v5", "why": "", "host": "a"}, {"mpi": "", "why": "no library", "host": "b"}
    assert mpi.choose([0, 0], [has, has]) == "mpi"
    assert mpi.choose([0, 1], [has, has]) == "mpi"
    assert mpi.choose([0, 0, 1], [has, has, has]) == "hosts"
    with pytest.raises(
        hosts.EvenstepError, match=r"rank 1 on host b cannot use MPI \(no library\)[^$]*fix: .*mpirun -n N"
    ):
        mpi.choose([0, 1], [has, lacks])


def test_what_mpi_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_LOCAL", "EVENSTEP_MPI", "EVENSTEP_COMM")):
            monkeypatch.delenv(name)
    assert "not started by mpirun" in mpi.state()[1]
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("EVENSTEP_MPI_LIBRARY", "/missing/libmpi.so")
    assert "/missing/libmpi.so" in mpi.state()[1]
    assert mpi.candidates(launcher.find_place(os.environ)) == ["/missing/libmpi.so"]
    monkeypatch.setenv("EVENSTEP_COMM_INTERFACE", "eth0")
    assert "EVENSTEP_COMM_INTERFACE" in mpi.state()[1]
    monkeypatch.delenv("EVENSTEP_COMM_INTERFACE")
    monkeypatch.setattr(mpi, "_opened", ("Open MPI v5.0.8", "libmpi.so.40"))
    assert "mpirun is of MPICH's kind, but the library libmpi.so.40 is Open MPI" in mpi.state()[1]


# ---- under mpirun ----


@each_mpirun
def test_every_face_works_under_mpirun_alone(mpirun: str) -> None:
    check(run(mpirun, 3, "faces", "shm"), 3)


@each_mpirun
def test_every_face_works_over_mpi(mpirun: str) -> None:
    result = run(mpirun, 3, "faces", "mpi", EVENSTEP_COMM_ENGINE="mpi")
    check(result, 3)
    assert result.stderr.count("the ranks talk through MPI") == 1, result.stderr


TWO_HOSTS = """
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
export EVENSTEP_HOST_ID=host$((rank / 2))
if [ -n "$OMPI_COMM_WORLD_RANK" ]; then export OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$((rank % 2))
else export MPI_LOCALNRANKS=2 MPI_LOCALRANKID=$((rank % 2)); fi
exec "$@"
"""


@one_mpirun
def test_mpi_joins_hosts_and_says_where_rank_0_is(mpirun: str) -> None:
    check(run(mpirun, 4, "faces", "hosts", wrapper=TWO_HOSTS, EVENSTEP_COMM_ENGINE="mpi"), 4)


@one_mpirun
def test_training_under_mpirun_equals_one_rank(mpirun: str) -> None:
    said = []
    for ranks, engine in ((1, ""), (2, "mpi")):
        result = run(mpirun, ranks, "train", EVENSTEP_COMM_ENGINE=engine)
        check(result, ranks)
        said.append(next(line for line in result.stdout.splitlines() if "trained on" in line).split(": ")[1])
    assert said[0] == said[1]


@each_mpirun
def test_mpi_that_mpi4py_has_started_is_used(mpirun: str) -> None:
    pytest.importorskip("mpi4py")
    result = run(mpirun, 2, "beside_mpi4py", "mpi", EVENSTEP_COMM_ENGINE="mpi")
    assert result.returncode == 0, result.stdout + result.stderr


@one_mpirun
def test_a_rank_that_leaves_ends_the_job(mpirun: str) -> None:
    result = run(mpirun, 3, "one_fails", EVENSTEP_COMM_ENGINE="mpi")
    assert result.returncode != 0
    assert "rank 1 has had enough" in result.stderr


@one_mpirun
def test_a_library_of_another_mpi_is_refused(mpirun: str, tmp_path: Path) -> None:
    missing = tmp_path / "libmpi.so"
    result = run(mpirun, 2, "faces", "mpi", EVENSTEP_COMM_ENGINE="mpi", EVENSTEP_MPI_LIBRARY=str(missing))
    assert result.returncode != 0
    assert "EVENSTEP_COMM_ENGINE=mpi, but rank 0 on host" in result.stderr and str(missing) in result.stderr

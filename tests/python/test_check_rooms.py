"""scripts/check_rooms.py: the tree is in order, and each kind of wrong include is found."""

import pathlib
import subprocess
import sys

import pytest


def check(tree: pathlib.Path, root: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    script = tree / "scripts" / "check_rooms.py"
    return subprocess.run([sys.executable, script, root], capture_output=True, text=True, timeout=150, check=False)


def test_the_tree_is_in_order(tree):
    done = check(tree, tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "line", "said"),
    [
        ("src/base/a.c", '#include "os/file.h"', "os is not above base"),
        ("src/comm/a.h", "#include <evenstep/balancer.h>", "balancer is not above comm"),
        ("src/sync/a.c", '#  include "fault/x.h"', "fault is not above sync"),
        ("src/monitor/deep/a.c", "#include <sys/mman.h>", "only src/os calls the kernel"),
        ("src/comm/a.c", "#include <unistd.h>", "only src/os calls the kernel"),
        ("src/monitor/a.c", "  (void)pthread_sigmask(SIG_SETMASK, &all, &before);", "monitor calls pthread_sigmask()"),
        ("src/comm/a.h", "static int own(void) { return getpid(); }", "comm calls getpid()"),
        ("src/device/a.c", '#include "cli/command.h"', "stands on top"),
        ("src/os/a.c", "#include <evenstep/evenstep.h>", "includes those it needs"),
        ("src/helpers/a.c", "", "no such room"),
        ("include/evenstep/a.h", '#include "base/text.h"', "public header"),
    ],
)
def test_a_wrong_include_fails(tree, tmp_path, path, line, said):
    (tmp_path / "include").mkdir()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    (tmp_path / "src").mkdir(exist_ok=True)
    done = check(tree, tmp_path)
    assert done.returncode == 1
    assert said in done.stdout


def test_right_includes_pass(tree, tmp_path):
    (tmp_path / "include").mkdir()
    room = tmp_path / "src" / "sync"
    room.mkdir(parents=True)
    (room / "a.c").write_text(
        '#include "sync/b.h"\n#include <evenstep/comm.h>\n#include "os/clock.h"\n#include <string.h>\n#include <pthread.h>\n'
        'void f(void) { pthread_mutex_lock(&lock); even_os_kill(1); table.open(2); say("fork()"); } /* getpid() */\n'
    )
    assert check(tree, tmp_path).returncode == 0

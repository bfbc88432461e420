"""Checks that a room of src/ includes only rooms above it (docs/design.md), and that only src/os calls the kernel.

python scripts/check_rooms.py [ROOT]
"""

from __future__ import annotations

import pathlib
import re
import sys

# From the top down; rooms in one line do not include one another.
ORDER = [
    ["base"],
    ["os"],
    ["telemetry"],
    ["device"],
    ["memory", "comm", "partitioner", "balancer", "checkpoint"],
    ["sync", "optim", "fault"],
    ["orchestrator"],
    ["monitor", "serve"],
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The room that a public header belongs to; the others (status, types, version) belong to base.
PUBLIC = {name: name for name in ("telemetry", "comm", "balancer", "checkpoint", "sync", "optim")} | {
    "comm_costs": "comm",
    "device_comm": "comm",
    "flight": "comm",
    "exact": "sync",
}
# Headers whose calls go through even_os (src/os/calls.h), so that tests can make them fail.
KERNEL = {
    "sys/mman.h",
    "sys/socket.h",
    "sys/wait.h",
    "sys/epoll.h",
    "sys/signalfd.h",
    "sys/timerfd.h",
    "sys/syscall.h",
    "sys/prctl.h",
    "sys/mount.h",
    "sys/ioctl.h",
    "linux/futex.h",
    "spawn.h",
    "unistd.h",
    "netdb.h",
    "ifaddrs.h",
    "dlfcn.h",
}
# Calls of headers that rooms need for something else (types, mutexes, names of signals): these go through src/os too.
CALLS = re.compile(
    r"(?<![\w.>])(pthread_(?:create|join|detach|kill|cancel|sigmask|setaffinity_np|setname_np|atfork)"
    r"|(?:sig(?:action|procmask|wait|waitinfo|timedwait|pending|suspend|queue|nal))|kill|raise"
    r"|getpid|getppid|gettid|sysconf|getnameinfo|getaddrinfo"
    r"|clock_gettime|nanosleep|clock_nanosleep|fopen|fdopen|popen|system|opendir|open|openat|fcntl|stat|fstat|lstat"
    r"|mkdir|chmod|rename|remove|mmap|fork)\s*\("
)
NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def room_of(include: str) -> str | None:
    """The room that an include reaches into; None for a header of the system."""
    head, _, tail = include.partition("/")
    if head == "evenstep":
        return PUBLIC.get(tail.removesuffix(".h"), "base")
    if head in LEVEL and tail:
        return head
    return None


def check_file(path: pathlib.Path, room: str) -> list[str]:
    found = []
    text = path.read_text(encoding="utf-8")
    if room != "os":
        for name in CALLS.findall(NO_CODE.sub(" ", text)):
            found.append(f"{path}: {room} calls {name}(), but only src/os calls the kernel")
    for include in INCLUDE.findall(text):
        target = room_of(include)
        if include == "evenstep/evenstep.h":
            found.append(f"{path}: includes all public headers; a room includes those it needs")
        elif include.startswith(("cli/", "python/", "tests/", "support/")):
            found.append(f"{path}: {room} includes {include}, which stands on top of the rooms")
        elif target is not None and target != room and LEVEL[target] >= LEVEL[room]:
            found.append(f"{path}: {room} includes {include}, but {target} is not above {room}")
        elif include in KERNEL and room != "os":
            found.append(f"{path}: {room} includes <{include}>, but only src/os calls the kernel")
    return found


def check(root: pathlib.Path) -> list[str]:
    found = []
    for folder in sorted((root / "src").iterdir()):
        if not folder.is_dir():
            continue
        if folder.name not in LEVEL:
            found.append(f"{folder}: no such room; docs/design.md and scripts/check_rooms.py list them")
            continue
        for path in sorted([*folder.rglob("*.c"), *folder.rglob("*.h")]):
            found += check_file(path, folder.name)
    for path in sorted((root / "include").rglob("*.h")):
        for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
            if "/" in include and include.split("/")[0] in LEVEL:
                found.append(f"{path}: a public header includes {include} of src/")
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    found = check(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Compares what src/comm/nccl/abi.h declares of NCCL with a real nccl.h, by compiling both together; and, where the
library lies beside the header, that it has every function under its name and is of the header's version.

python scripts/check_nccl_abi.py [FOLDER]     FOLDER: of an unpacked nvidia-nccl-cu* wheel, or one that holds nccl.h;
                                              without it: the wheel of this Python, then the compiler's own folders
Ends with 0 (all the same), 1 (something differs), 3 (no header or no compiler here: nothing was checked).
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# nccl.h wants the CUDA headers for one type only
STUBS = {
    "cuda_runtime.h": "#include <stddef.h>\ntypedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}
NUMBERS = {
    "EVEN_NCCL_SUCCESS": "ncclSuccess",
    "EVEN_NCCL_CUDA_ERROR": "ncclUnhandledCudaError",
    "EVEN_NCCL_SYSTEM_ERROR": "ncclSystemError",
    "EVEN_NCCL_INTERNAL_ERROR": "ncclInternalError",
    "EVEN_NCCL_INVALID_ARGUMENT": "ncclInvalidArgument",
    "EVEN_NCCL_INVALID_USAGE": "ncclInvalidUsage",
    "EVEN_NCCL_REMOTE_ERROR": "ncclRemoteError",
    "EVEN_NCCL_IN_PROGRESS": "ncclInProgress",
    "EVEN_NCCL_INT8": "ncclInt8",
    "EVEN_NCCL_UINT8": "ncclUint8",
    "EVEN_NCCL_INT32": "ncclInt32",
    "EVEN_NCCL_UINT32": "ncclUint32",
    "EVEN_NCCL_INT64": "ncclInt64",
    "EVEN_NCCL_UINT64": "ncclUint64",
    "EVEN_NCCL_FLOAT16": "ncclFloat16",
    "EVEN_NCCL_FLOAT32": "ncclFloat32",
    "EVEN_NCCL_FLOAT64": "ncclFloat64",
    "EVEN_NCCL_BFLOAT16": "ncclBfloat16",
    "EVEN_NCCL_SUM": "ncclSum",
    "EVEN_NCCL_PROD": "ncclProd",
    "EVEN_NCCL_MAX": "ncclMax",
    "EVEN_NCCL_MIN": "ncclMin",
    "EVEN_NCCL_AVG": "ncclAvg",
    "EVEN_NCCL_SCALAR_HOST": "ncclScalarHostImmediate",
    "EVEN_NCCL_UNSET": "NCCL_CONFIG_UNDEF_INT",
    "EVEN_NCCL_ID_BYTES": "NCCL_UNIQUE_ID_BYTES",
    "sizeof(even_nccl_id)": "sizeof(ncclUniqueId)",
}
# present from some version on; compared where the header has the word
NEWER = {
    "EVEN_NCCL_FLOAT8_E4M3": "ncclFloat8e4m3",
    "EVEN_NCCL_FLOAT8_E5M2": "ncclFloat8e5m2",
    "EVEN_NCCL_TIMEOUT": "ncclTimeout",
    "EVEN_NCCL_SHRINK_DEFAULT": "NCCL_SHRINK_DEFAULT",
    "EVEN_NCCL_SHRINK_ABORT": "NCCL_SHRINK_ABORT",
}
MEMBERS = {
    "size": "size",
    "magic": "magic",
    "version": "version",
    "blocking": "blocking",
    "cga_cluster_size": "cgaClusterSize",
    "least_ctas": "minCTAs",
    "most_ctas": "maxCTAs",
    "net_name": "netName",
}
COMM, STREAM, ID = "(ncclComm_t)comm", "(cudaStream_t)stream", "*(ncclUniqueId *)&id"
TYPE, OP, CONFIG = "(ncclDataType_t)type", "(ncclRedOp_t)op", "(ncclConfig_t *)config"
# our member of the table: NCCL's function, and our arguments as it takes them
FUNCTIONS = {
    "get_version": ("ncclGetVersion", "int *version", "version"),
    "make_id": ("ncclGetUniqueId", "even_nccl_id *out", "(ncclUniqueId *)out"),
    "init": (
        "ncclCommInitRankConfig",
        "even_nccl_comm **out, int ranks, even_nccl_id id, int rank, even_nccl_config *config",
        f"(ncclComm_t *)out, ranks, {ID}, rank, {CONFIG}",
    ),
    "finalize": ("ncclCommFinalize", "even_nccl_comm *comm", COMM),
    "destroy": ("ncclCommDestroy", "even_nccl_comm *comm", COMM),
    "abort": ("ncclCommAbort", "even_nccl_comm *comm", COMM),
    "async_error": ("ncclCommGetAsyncError", "even_nccl_comm *comm, int *out", f"{COMM}, (ncclResult_t *)out"),
    "op_make": (
        "ncclRedOpCreatePreMulSum",
        "int *op, void *scalar, int type, int residence, even_nccl_comm *comm",
        f"(ncclRedOp_t *)op, scalar, {TYPE}, (ncclScalarResidence_t)residence, {COMM}",
    ),
    "op_free": ("ncclRedOpDestroy", "int op, even_nccl_comm *comm", f"{OP}, {COMM}"),
    "all_reduce": (
        "ncclAllReduce",
        "const void *input, void *output, size_t count, int type, int op, even_nccl_comm *comm, void *stream",
        f"input, output, count, {TYPE}, {OP}, {COMM}, {STREAM}",
    ),
    "reduce": (
        "ncclReduce",
        "const void *input, void *output, size_t count, int type, int op, int root, even_nccl_comm *comm, void *stream",
        f"input, output, count, {TYPE}, {OP}, root, {COMM}, {STREAM}",
    ),
    "reduce_scatter": (
        "ncclReduceScatter",
        "const void *input, void *output, size_t each, int type, int op, even_nccl_comm *comm, void *stream",
        f"input, output, each, {TYPE}, {OP}, {COMM}, {STREAM}",
    ),
    "all_gather": (
        "ncclAllGather",
        "const void *input, void *output, size_t each, int type, even_nccl_comm *comm, void *stream",
        f"input, output, each, {TYPE}, {COMM}, {STREAM}",
    ),
    "broadcast": (
        "ncclBroadcast",
        "const void *input, void *output, size_t count, int type, int root, even_nccl_comm *comm, void *stream",
        f"input, output, count, {TYPE}, root, {COMM}, {STREAM}",
    ),
    "send": (
        "ncclSend",
        "const void *data, size_t count, int type, int peer, even_nccl_comm *comm, void *stream",
        f"data, count, {TYPE}, peer, {COMM}, {STREAM}",
    ),
    "receive": (
        "ncclRecv",
        "void *data, size_t count, int type, int peer, even_nccl_comm *comm, void *stream",
        f"data, count, {TYPE}, peer, {COMM}, {STREAM}",
    ),
    "group_begin": ("ncclGroupStart", "void", ""),
    "group_end": ("ncclGroupEnd", "void", ""),
    "shrink": (
        "ncclCommShrink",
        "even_nccl_comm *comm, int *excluded, int count, even_nccl_comm **out, even_nccl_config *config, int flags",
        f"{COMM}, excluded, count, (ncclComm_t *)out, {CONFIG}, flags",
    ),
    "grow_id": ("ncclCommGetUniqueId", "even_nccl_comm *comm, even_nccl_id *out", f"{COMM}, (ncclUniqueId *)out"),
    "grow": (
        "ncclCommGrow",
        "even_nccl_comm *comm, int ranks, const even_nccl_id *id, int rank, even_nccl_comm **out, even_nccl_config *config",
        f"{COMM}, ranks, (const ncclUniqueId *)id, rank, (ncclComm_t *)out, {CONFIG}",
    ),
}
SINCE = {"ncclCommShrink", "ncclCommGetUniqueId", "ncclCommGrow"}
TEXTS = {"error_text": "ncclGetErrorString", "last_error": "ncclGetLastError"}


def find_header(given: str | None) -> pathlib.Path | None:
    folders = [pathlib.Path(given)] if given else [pathlib.Path(sysconfig.get_paths()["purelib"])]
    inside = ("nccl.h", "include/nccl.h", "nvidia/nccl/include/nccl.h")
    found = [folder / path for folder in folders for path in inside if (folder / path).is_file()]
    if not found and given is None:
        found = [
            path
            for path in map(pathlib.Path, ("/usr/include/nccl.h", "/usr/local/cuda/include/nccl.h"))
            if path.is_file()
        ]
    return found[0] if found else None


def program(header: str) -> str:
    """A C file that compiles only where all that we declare is the same as in the header."""
    lines = ["#include <nccl.h>", '#include "comm/nccl/abi.h"', "#define SAME(a, b) _Static_assert((a) == (b), #a)"]
    numbers = {**NUMBERS, **{ours: theirs for ours, theirs in NEWER.items() if theirs in header}}
    lines += [f"SAME((long long)({ours}), (long long)({theirs}));" for ours, theirs in numbers.items()]
    for ours, theirs in MEMBERS.items():
        lines.append(f"SAME(offsetof(even_nccl_config, {ours}), offsetof(ncclConfig_t, {theirs}));")
    lines.append("even_nccl table;\nvoid fill(void);")
    for member, (function, parameters, arguments) in FUNCTIONS.items():
        if function not in SINCE or re.search(rf"\b{function}\(", header):
            lines.append(f"static int call_{member}({parameters}) {{ return (int){function}({arguments}); }}")
            lines.append(f"void fill_{member}(void);\nvoid fill_{member}(void) {{ table.{member} = call_{member}; }}")
    lines.append("static const char *text(int result) { return ncclGetErrorString((ncclResult_t)result); }")
    lines.append("static const char *last(even_nccl_comm *comm) { return ncclGetLastError((ncclComm_t)comm); }")
    lines.append("void fill(void) { table.error_text = text; table.last_error = last; }\n")
    return "\n".join(lines)


def check_header(path: pathlib.Path, compiler: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in STUBS.items():
            pathlib.Path(folder, name).write_text(text)
        source = pathlib.Path(folder, "check.c")
        source.write_text(program(path.read_text()))
        words = [
            compiler,
            "-std=c11",
            "-D_GNU_SOURCE",
            "-fsyntax-only",
            "-Wall",
            "-Werror",
            "-D__CUDA_BF16_TYPES_EXIST__",
            "-I",
            folder,
            "-I",
        ]
        done = subprocess.run(
            [*words, str(path.parent), "-I", str(ROOT / "src"), "-I", str(ROOT / "include"), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
    return [line for line in done.stderr.splitlines() if "error" in line]


def check_library(header: pathlib.Path) -> tuple[list[str], str]:
    """What the library beside the header lacks, and a word on it."""
    path = header.parent.parent / "lib" / "libnccl.so.2"
    if not path.is_file():
        return [], "no library beside it"
    library = ctypes.CDLL(str(path))
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    code = re.search(r"define NCCL_VERSION_CODE (\d+)", header.read_text())
    wrong = [] if code and int(code[1]) == number.value else [f"{path} is {number.value}, its header says otherwise"]
    names = [function for function, *_ in FUNCTIONS.values()] + list(TEXTS.values())
    text = header.read_text()
    wrong += [f"{path} has no {name}" for name in names if name in text and not hasattr(library, name)]
    return wrong, f"its library is {number.value}"


def main() -> int:
    header = find_header(sys.argv[1] if len(sys.argv) > 1 else None)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang-19")
    if header is None or compiler is None:
        print(
            "not checked: " + ("no nccl.h here (pip download nvidia-nccl-cu13)" if header is None else "no C compiler")
        )
        return 3
    wrong = check_header(header, compiler)
    missing, word = check_library(header)
    for line in wrong + missing:
        print(line)
    functions = sum(function in header.read_text() for function, *_ in FUNCTIONS.values()) + len(TEXTS)
    print(f"{header}: {len(NUMBERS)} numbers, {len(MEMBERS)} members, {functions} functions compared; {word}")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())

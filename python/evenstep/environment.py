"""What the launcher told this process: torchrun's variables and Evenstep's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from evenstep._core import EvenstepError

POLICIES = ("auto", "equal", "proportional", "dynamic", "hybrid")


def kind_of_device(name: str) -> str:
    """Of EVENSTEP_DEVICE: "cpu" of a NUMA node's processors ("numa:0"), too; "" where nobody has said."""
    kind = name.partition(":")[0]
    return "cpu" if kind == "numa" else kind


@dataclass(frozen=True)
class Environment:
    """One rank's place in its job; `in_job` is False in a plain `python script.py`."""

    in_job: bool = False
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart: int = 0
    device: str = ""
    policy: str = "auto"
    speeds: tuple[float, ...] | None = None
    telemetry_fd: int = -1
    generation_fd: int = -1  # evenstep.generations
    joins: bool = False  # this process is to take the place of a rank that was lost
    checkpoint_steps: int = 0
    checkpoint_seconds: float = 0.0
    memory_steps: int = 0  # between checkpoints in memory (evenstep.checkpoint_memory)
    plan: str = ""
    use_plan: str = ""  # that a training begins with
    resume: str = ""
    seed: int | None = None
    compression: str = ""
    compression_way: str = ""
    memory_limit: int | None = None  # bytes
    memory_cap: tuple[int, int] | None = None  # after lack of memory in an attempt before (evenstep.caps)
    on_nonfinite: str = "report"
    check_parameters: int = 100  # steps: docs/fault-tolerance.md has what it costs
    on_difference: str = "report"
    skip_unreadable: bool = False
    batch_adapt: str = ""
    seed_samples: bool = True
    keep_memory: str = "auto"  # evenstep.kept_memory: or on, off
    workers: str = ""
    timeout_seconds: float = 1800.0  # of a call of all ranks


def _integer(variables: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise EvenstepError(
            f"the environment variable {name} is {text!r}, not a whole number of at least {least}\n"
            "  fix: start the script with `evenstep run` or torchrun, which set it"
        )
    return value


def _speeds(text: str, world_size: int) -> tuple[float, ...] | None:
    if not text:
        return None
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if len(speeds) != world_size or not all(0 < speed < float("inf") for speed in speeds):
        raise EvenstepError(
            f"EVENSTEP_SPEEDS is {text!r}; it needs {world_size} positive numbers, one for each rank, like '1,0.25'"
        )
    return speeds


def cadence(name: str, text: str) -> tuple[int, float]:
    """'100' -> every 100 steps, '30s' -> every 30 seconds."""
    if not text:
        return 0, 0.0
    try:
        if text.endswith("s"):
            seconds = float(text[:-1])
            if 0 < seconds < float("inf"):
                return 0, seconds
        elif int(text) > 0:
            return int(text), 0.0
    except ValueError:
        pass
    raise EvenstepError(f"{name} is {text!r}; give steps ('100') or seconds ('30s')")


def _timeout(text: str) -> float:
    try:
        seconds = float(text or "1800")
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e6:
        raise EvenstepError(
            f"EVENSTEP_TIMEOUT is {text!r}\n  fix: give seconds from 1 to 1000000, for which ranks wait for one another in a call"
        )
    return seconds


def _bytes(variables: Mapping[str, str], name: str) -> int | None:
    """'12G', '512M', '1.5GiB', '1073741824'."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    number = text.lower().removesuffix("ib").removesuffix("b")
    power = " kmgt".find(number[-1:]) if number[-1:].isalpha() else 0
    try:
        value = float(number[:-1] if power else number) * 1024**power
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 62:
        raise EvenstepError(f"{name} is {text!r}; give bytes, as '12G', '512M' or '1073741824'")
    return int(value)


def _memory_cap(text: str, rank: int) -> tuple[int, int] | None:
    """Of '0:12/64,3:/2' this rank's: (12, 64), samples of a step; (0, 2), a part of what it would begin with."""
    for one in text.split(","):
        whose, _, what = one.partition(":")
        if whose == str(rank):
            most, _, of = what.partition("/")
            if (most or "0").isdigit() and of.isdigit() and int(of) > 0:
                return int(most or "0"), int(of)
            raise EvenstepError(f"EVENSTEP_MEMORY_CAPS is {text!r}; it is the agent's, like '0:12/64,3:/2'")
    return None


def _every(variables: Mapping[str, str], name: str, default: int) -> int:
    """Steps; 0: "off"."""
    return 0 if variables.get(name, "") == "off" else _integer(variables, name, default)


def _word(variables: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """The first of the words is the default."""
    text = variables.get(name, "") or words[0]
    if text not in words:
        raise EvenstepError(f"{name} is {text!r}; choose one of {', '.join(words)}")
    return text


_KEEP = {"auto": "auto", "on": "on", "off": "off", "1": "on", "0": "off"}


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads and checks the launcher's variables."""
    v: Mapping[str, str] = os.environ if variables is None else variables
    in_job = "RANK" in v and "WORLD_SIZE" in v
    world_size = _integer(v, "WORLD_SIZE", 1, 1) if in_job else 1
    rank = _integer(v, "RANK", 0) if in_job else 0
    joins = in_job and v.get("EVENSTEP_JOINS", "") == "1"
    if rank >= world_size and not joins:
        raise EvenstepError(f"RANK is {rank} but WORLD_SIZE is {world_size}: ranks go from 0 to {world_size - 1}")
    policy = v.get("EVENSTEP_POLICY", "") or "auto"
    if policy not in POLICIES:
        raise EvenstepError(f"EVENSTEP_POLICY is {policy!r}; choose one of {', '.join(POLICIES)}")
    steps, seconds = cadence("EVENSTEP_CHECKPOINT_EVERY", v.get("EVENSTEP_CHECKPOINT_EVERY", ""))
    return Environment(
        in_job=in_job,
        rank=rank,
        world_size=world_size,
        local_rank=_integer(v, "LOCAL_RANK", 0) if in_job else 0,
        local_world_size=_integer(v, "LOCAL_WORLD_SIZE", world_size, 1) if in_job else 1,
        restart=_integer(v, "TORCHELASTIC_RESTART_COUNT", 0),
        device=v.get("EVENSTEP_DEVICE", ""),
        policy=policy,
        speeds=_speeds(v.get("EVENSTEP_SPEEDS", ""), world_size),
        telemetry_fd=_integer(v, "EVENSTEP_TELEMETRY_FD", -1, 0),
        generation_fd=_integer(v, "EVENSTEP_GENERATION_FD", -1, 0),
        joins=joins,
        checkpoint_steps=steps,
        checkpoint_seconds=seconds,
        memory_steps=_integer(v, "EVENSTEP_CHECKPOINT_MEMORY_EVERY", 0),
        plan=v.get("EVENSTEP_PLAN", ""),
        use_plan=v.get("EVENSTEP_USE_PLAN", ""),
        resume=v.get("EVENSTEP_RESUME", ""),
        seed=_integer(v, "EVENSTEP_SEED", 0) if v.get("EVENSTEP_SEED") else None,
        compression=v.get("EVENSTEP_COMPRESSION", ""),
        compression_way=v.get("EVENSTEP_COMPRESSION_WAY", ""),
        memory_limit=_bytes(v, "EVENSTEP_MEMORY_LIMIT"),
        memory_cap=_memory_cap(v.get("EVENSTEP_MEMORY_CAPS", ""), rank),
        on_nonfinite=_word(v, "EVENSTEP_ON_NONFINITE", ("report", "skip", "stop")),
        check_parameters=_every(v, "EVENSTEP_CHECK_PARAMETERS", 100),
        on_difference=_word(v, "EVENSTEP_ON_DIFFERENCE", ("report", "stop")),
        skip_unreadable=bool(_integer(v, "EVENSTEP_SKIP_UNREADABLE", 0)),
        batch_adapt=v.get("EVENSTEP_BATCH_ADAPT", ""),
        seed_samples=bool(_integer(v, "EVENSTEP_SEED_SAMPLES", 1)),
        keep_memory=_KEEP[_word(v, "EVENSTEP_KEEP_MEMORY", tuple(_KEEP))],
        workers=_word(v, "EVENSTEP_WORKERS", ("", "auto", "off")),
        timeout_seconds=_timeout(v.get("EVENSTEP_TIMEOUT", "")),
    )

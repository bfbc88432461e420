"""What `evenstep verify` starts on each rank: es.verify for what a function of the user's gives, or the same for a whole
script, which is run on one rank alone and on all (evenstep.verify_script).

    torchrun -m evenstep.verify_command [--steps K] SCRIPT|MODULE:FUNCTION [arguments]

does without the program: rank 0 prints the report, and all end with 10 where the result is not the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import verify_script
from evenstep.verify_script import Refused

if TYPE_CHECKING:
    from evenstep.verify import Verification

FORMAT = "evenstep-verify-1"
DIFFERS = 10  # exit code
_WRONG_INPUT = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evenstep.verify_command")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", help="where rank 0 writes what was found, as JSON, instead of printing it")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the run on one rank, which leaves its parameters there
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def function_of(target: str) -> Callable[[], Any] | None:
    """None: the target is a script. Raises Refused."""
    place, colon, name = target.rpartition(":")
    if not colon or Path(target).exists():
        return None
    try:
        module = _module(place)
    except (ImportError, OSError) as error:
        raise Refused(
            f"{place} cannot be imported: {error}\n  fix: name a module that Python finds from here, or a file ending in .py"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"{place} has no function {name!r}\n  fix: name one that gives what es.verify takes")
    return function  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def of_function(function: Callable[[], Any], steps: int) -> Verification:
    """Raises Refused where it gives something else than es.verify's arguments."""
    from evenstep.verify import verify

    given = function()
    if isinstance(given, Mapping):
        return verify(**{"steps": steps, **given})
    if not isinstance(given, tuple) or not 3 <= len(given) <= 4:
        raise Refused(
            f"the function gave a {type(given).__name__}, not what es.verify takes\n"
            "  fix: return (model, optimizer, data, loss), or a dict of es.verify's arguments"
        )
    return verify(*given, steps=steps)


def as_json(found: Verification) -> str:
    """Numbers that JSON lacks (a difference that is infinite) are null."""
    fields = {"format": FORMAT, **dataclasses.asdict(found), "report": str(found)}
    return json.dumps(_finite(fields), indent=1) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def tell(found: Verification, output: str | None) -> int:
    """The exit code."""
    if os.environ.get("RANK", "0") == "0":
        if output is None:
            print(found, flush=True)
        else:
            Path(output).write_text(as_json(found), encoding="utf-8")
    return 0 if found.exact or output is not None else DIFFERS


def main() -> int:
    options = arguments()
    try:
        sys.argv = [options.target, *options.arguments]
        verify_script.seed()
        function = None if options.alone else function_of(options.target)
        if function is not None:
            return tell(of_function(function, options.steps), options.output)
        if options.alone:
            verify_script.alone(options.target, options.arguments, options.steps, Path(options.alone))
            return 0
        return tell(verify_script.on_ranks(options.target, options.arguments, options.steps), options.output)
    except Refused as error:
        print(f"evenstep verify: {error}", file=sys.stderr)
        return _WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())

"""Cores that stay awake while a bench measures.

A core that has nothing to do for a moment is put to sleep, and takes its time to wake up: on a virtual machine, whose hypervisor gives
it to others meanwhile, milliseconds now and then. Ranks under a CPU quota sleep in each of its periods, so that times scatter by more
than ways of sharing work differ. While the kernel's PM QoS file is open with a bound of 0 there (Documentation/power/pm_qos_interface)
cores wait awake instead. It is what latency benches do (cyclictest); all that takes turns in a bench has it alike.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

FILE = "/dev/cpu_dma_latency"


@contextmanager
def awake(path: str = FILE) -> Iterator[str]:
    """For as long as the `with` lasts. Yields what is to be said of it: "are kept awake", or why they are not (not permitted: root
    alone may)."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        yield f"may sleep ({os.strerror(error.errno or 0)}: {path})"
        return
    try:
        try:
            os.write(file, struct.pack("=i", 0))
            said = "are kept awake"
        except OSError as error:
            said = f"may sleep ({os.strerror(error.errno or 0)}: {path})"
        yield said
    finally:
        os.close(file)

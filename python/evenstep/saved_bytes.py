"""How many bytes compression, or exchanging less often or later, saves: told to the run's record with the first step, and again when the part changes."""

from __future__ import annotations

from evenstep import _core


class SavedBytes:
    """Of one step's exchanges on this rank."""

    def __init__(self, telemetry: _core.Telemetry) -> None:
        self._telemetry = telemetry
        self._names: list[str] = []
        self._moved = self._full = 0
        self._told = ""

    def add(self, compression: str, moved: int, full: int) -> None:
        self._moved += moved
        self._full += full
        if compression and compression not in self._names:
            self._names.append(compression)

    def tell(self, step: int, aloud: bool) -> None:
        """Ends the step's count; one rank tells."""
        moved, full = self._moved, self._full
        self._moved = self._full = 0
        if not aloud or not self._names or full == 0:
            return
        percent = round(100 * (1 - moved / full))
        change = f"{abs(percent)}% {'fewer' if percent > 0 else 'more'} bytes" if percent else "as many bytes"
        words = f"{', '.join(self._names)}: {change}"
        if words != self._told:
            self._told = words
            self._telemetry.event(_core.EVENT_COMPRESSION, step, percent, words)

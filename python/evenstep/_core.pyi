"""What the extension has, for type checkers. One block a subject."""

from typing import Any

version: str

class EvenstepError(RuntimeError):
    status: str
    fix: str | None
    rank: int | None
    device: str | None

# --- telemetry ---

SPAN_DATA: int
SPAN_FORWARD: int
SPAN_BACKWARD: int
SPAN_COMMUNICATION: int
SPAN_WAIT: int
SPAN_OPTIMIZER: int
SPAN_CHECKPOINT: int
SPAN_EVALUATION: int
EVENT_SHARES: int
EVENT_CHECKPOINT: int
EVENT_TOTAL_STEPS: int
EVENT_EPOCH: int
EVENT_RESUME: int
EVENT_MESSAGE: int

def clock_ns() -> int: ...
def telemetry_segment(ranks: int, records: int = 0, /) -> int: ...

class Telemetry:
    """Writes rank's ring in segment fd; with fd -1 every call does nothing."""
    def __new__(cls, fd: int, rank: int) -> Telemetry: ...
    @property
    def handle(self) -> Any | None: ...
    def span(self, kind: int, step: int, start_ns: int, duration_ns: int, bytes: int = 0, /) -> None: ...
    def step(
        self,
        step: int,
        epoch: int,
        end_ns: int,
        duration_ns: int,
        busy_ns: int,
        samples: int,
        batch: int,
        loss: float = ...,
        predicted_seconds: float = ...,
    ) -> None: ...
    def event(self, event: int, step: int, value: int = 0, words: str = "", at_ns: int = 0) -> None: ...

class TelemetryReader:
    def __new__(cls, fd: int) -> TelemetryReader: ...
    def drain(self) -> tuple[list[tuple[Any, ...]], int]: ...

"""What scripts of several tests have in common, as text to be put into them."""

from __future__ import annotations

# session.telemetry = Events(session.telemetry): what is told of events, in `told`, too
EVENTS = """
class Events:
    def __init__(self, inner):
        self.inner, self.told = inner, []

    def event(self, kind, step, value=0, words=""):
        self.told.append((kind, value, words))
        self.inner.event(kind, step, value, words)

    def __getattr__(self, name):
        return getattr(self.inner, name)
"""

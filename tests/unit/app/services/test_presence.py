from __future__ import annotations

import threading

import pytest
import redis

from app.services import admission


class Faltering:
    """A journal that is down at the first beat, and blocks the thread at the third."""

    def __init__(self) -> None:
        self.beats = 0
        self.heard = threading.Event()

    def take_calls(self, seconds: float) -> None:
        self.beats += 1
        if self.beats == 1:
            raise redis.ConnectionError("away")
        if self.beats == 3:
            self.heard.set()
            threading.Event().wait()


def test_the_beat_goes_on_for_ever_and_after_an_outage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "_BEAT_S", 0.01)
    journal = Faltering()
    admission.beat_for_ever(journal)
    assert journal.heard.wait(60)

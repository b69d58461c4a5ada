from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest

from app.stack.signals import interrupted_by, stop_signals


def test_a_stop_signal_is_seen_and_its_handler_is_restored(dispositions: None) -> None:
    """A shell ignores SIGINT for a program in the background, which `kill -INT` stops all the same."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_signals(signal.SIGHUP, signal.SIGINT) as stopping:
        assert not stopping.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stopping.is_set()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["set", "wait"])
def test_a_stop_signal_at_any_line_of_a_call_is_seen(dispositions: None, call: str) -> None:
    """A signal's handler runs between two lines of whatever the main thread does: it must wait for no lock."""
    lines: list[int] = []

    def at_each_line(frame: FrameType, *_: object) -> Any:
        lines.append(frame.f_lineno)
        signal.raise_signal(signal.SIGINT)
        return at_each_line

    with stop_signals(signal.SIGINT) as stopping:
        sys.settrace(at_each_line)
        stopping.set() if call == "set" else stopping.wait(0.0)
        sys.settrace(None)
        assert stopping.is_set()
    assert len(lines) > 1


def test_before_a_stack_starts_a_stop_signal_interrupts_and_its_handler_is_restored(dispositions: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGHUP, signal.SIGINT):
        signal.raise_signal(signal.SIGHUP)  # under nohup
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it goes on")
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_nohup_keeps_a_stack_from_ending_with_its_terminal(dispositions: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals(signal.SIGHUP, signal.SIGINT) as stopping:
        signal.raise_signal(signal.SIGHUP)
        assert not stopping.is_set()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

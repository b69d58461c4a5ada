from __future__ import annotations

import io
import json
import logging

import pytest

from app.telemetry import JsonFormatter, WithoutTasks


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(stream: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("tests.telemetry")
    logger.addHandler(handler)
    return logger


def test_a_line_is_json_with_the_ids_and_nothing_else_from_extra(logger: logging.Logger, stream: io.StringIO) -> None:
    logger.info("admitted %s", "sample", extra={"request_id": "r", "model_id": "m", "seq": 3, "payload": "secret"})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    expected = {"level": "INFO", "logger": "tests.telemetry", "message": "admitted sample"}
    assert line == {**expected, "request_id": "r", "model_id": "m", "seq": 3}


def test_a_traceback_stays_on_its_line(logger: logging.Logger, stream: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: broken" in json.loads(stream.getvalue())["traceback"]


@pytest.mark.parametrize(
    ("name", "level", "kept"),
    [
        ("celery.app.trace", logging.INFO, False),
        ("celery.worker.strategy", logging.INFO, False),
        ("celery.app.trace", logging.ERROR, True),
        ("celery.worker.consumer.connection", logging.INFO, True),
        ("tinsmith.ops", logging.INFO, True),
    ],
)
def test_of_celerys_lines_about_tasks_failures_alone_are_kept(name: str, level: int, kept: bool) -> None:
    record = logging.LogRecord(name, level, __file__, 1, "Task tinsmith.tick[1] received", None, None)
    assert WithoutTasks().filter(record) is kept

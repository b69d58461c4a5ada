"""The key of a client on a running stack, and the stack's own secrets, appear only where they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import tinker
from tinker import types

from tests.contract.data import datum, train
from tests.contract.stack import API_KEY, Stack

CANARY = [211, 223, 227, 229, 233, 239, 241, 251, 257, 263]


def test_a_clients_key_is_in_no_file_and_no_output(training: tinker.TrainingClient, stack: Stack) -> None:
    use(training)
    assert sum(1 for _ in files(stack.data_dir.parent)) > 5
    assert [path for path in files(stack.data_dir.parent) if API_KEY.encode() in content(path)] == []
    assert [line for line in stack.output if API_KEY in line] == []


def test_logs_hold_neither_secrets_nor_prompts(training: tinker.TrainingClient, stack: Stack) -> None:
    use(training)
    settings = stack.settings()
    secrets = [settings.url_secret, settings.store.secret_key, urlsplit(settings.redis.url).password]
    logs = "".join([content(path).decode() for path in files(stack.data_dir / "logs")] + stack.output)
    assert settings.url_secret
    assert training.model_id in logs, "the logs are those of this run"
    assert [secret for secret in secrets if secret and secret in logs] == []
    assert not any(sep.join(map(str, CANARY)) in logs for sep in (", ", ",", " "))


def test_a_file_that_holds_a_secret_is_its_owners_alone(stack: Stack) -> None:
    settings = stack.settings()
    secrets = [text for text in (settings.url_secret, urlsplit(settings.redis.url).password) if text]
    holding = [path for path in files(stack.data_dir) if any(text.encode() in content(path) for text in secrets)]
    assert holding
    assert [path for path in holding if path.stat().st_mode & 0o077] == []


def use(training: tinker.TrainingClient) -> None:
    """Runs a step and a sample, with a prompt that is easy to find."""
    training.forward_backward([datum(CANARY)], "cross_entropy").result()
    train(training, 1)
    sampling = training.save_weights_and_get_sampling_client().result()
    sampling.sample(types.ModelInput.from_ints(CANARY), 1, types.SamplingParams(max_tokens=2)).result()


def files(folder: Path) -> Iterator[Path]:
    """All files of the stack. The stack keeps running, so some may be gone when they are read."""
    found = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return (path for path in found if path.is_file() and not path.is_symlink())


def content(path: Path) -> bytes:
    """Content of a file; empty if the file is gone."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return b""

"""Downloads behind signed URLs. The SDK reads them in pieces and does not compare sizes."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.stores.objects import FolderStore
from tests.api_server import ApiServer, start_api

# Far more than the socket buffers hold, so that the API waits for its client.
SIZE = 2**24
# Those of the API: a download that its client does not read takes one.
THREADS = 9


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with start_api(tmp_path, f"poll_capacity = 1\nspare_threads = {THREADS - 1}") as server:
        yield server


@pytest.fixture
def url(api: ApiServer, tmp_path: Path) -> str:
    """The signed URL of a large file."""
    store = FolderStore(tmp_path / "objects", "secret", api.url)
    store.put_new("file", bytes(SIZE))
    return store.presign("file", 3600)


def begin(url: str) -> http.client.HTTPResponse:
    """A download of which only the first piece was read."""
    answer: http.client.HTTPResponse = urllib.request.urlopen(url, timeout=60)
    assert len(answer.read(8192)) == 8192
    return answer


def finish(answer: http.client.HTTPResponse) -> int:
    """Reads the rest as the SDK does. Returns the bytes of all."""
    size = 8192
    while piece := answer.read(8192):
        size += len(piece)
    return size


def test_a_download_that_the_end_of_the_api_cuts_is_an_error_to_a_client_that_reads_in_pieces(
    api: ApiServer, url: str
) -> None:
    with begin(url) as answer:
        os.kill(api.pid, signal.SIGTERM)
        os.waitid(os.P_PID, api.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(http.client.IncompleteRead):
            finish(answer)


def test_a_download_that_loses_its_thread_to_another_one_is_an_error_and_the_others_are_whole(url: str) -> None:
    with contextlib.ExitStack() as stack:
        answers = [stack.enter_context(begin(url)) for _ in range(THREADS + 1)]
        cut = 0
        for answer in answers:
            try:
                assert finish(answer) == SIZE
            except http.client.IncompleteRead:
                cut += 1
    assert cut

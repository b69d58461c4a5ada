"""A large object in parts: nothing is visible before the last request, which is create-only like a plain PUT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO
from xml.etree import ElementTree

import urllib3

Sign = Callable[[str, Mapping[str, str]], str]
"""(method, query parameters) to a signed URL of the object."""


def upload(http: urllib3.PoolManager, sign: Sign, data: BinaryIO, part_bytes: int) -> int:
    """The HTTP status that decided: 200, 412 when the key exists, else the server's refusal.

    S3 wants parts of 5 MiB or more, at most 10,000 of them. Raises urllib3's HTTPError when the server is away.
    """
    started = http.request("POST", sign("POST", {"uploads": ""}))
    if started.status != 200:
        return started.status
    query = {"uploadId": ElementTree.fromstring(started.data).findtext("{*}UploadId") or ""}
    status = 0
    try:
        status = _send(http, sign, query, data, part_bytes)
        return status
    finally:
        if status != 200:
            http.request("DELETE", sign("DELETE", query))


def _send(http: urllib3.PoolManager, sign: Sign, query: Mapping[str, str], data: BinaryIO, part_bytes: int) -> int:
    etags = []
    for number, part in enumerate(_parts(data, part_bytes), 1):
        sent = http.request("PUT", sign("PUT", {**query, "partNumber": str(number)}), body=part)
        if sent.status != 200:
            return sent.status
        etags.append(sent.headers["ETag"])
    done = http.request("POST", sign("POST", query), body=_completion(etags), headers={"If-None-Match": "*"})
    # Joining takes long enough that a server may say 200 first and put the error into the body.
    failed_late = done.status == 200 and ElementTree.fromstring(done.data).tag.endswith("Error")
    return 500 if failed_late else done.status


def _parts(data: BinaryIO, part_bytes: int) -> Iterator[bytes]:
    while part := data.read(part_bytes):
        yield part


def _completion(etags: list[str]) -> bytes:
    root = ElementTree.Element("CompleteMultipartUpload")
    for number, etag in enumerate(etags, 1):
        part = ElementTree.SubElement(root, "Part")
        ElementTree.SubElement(part, "PartNumber").text = str(number)
        ElementTree.SubElement(part, "ETag").text = etag
    return ElementTree.tostring(root)

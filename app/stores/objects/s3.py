"""An object store on an S3 server, with plain S3 calls only: any server that honours If-None-Match works.

A large object is uploaded in parts. Nothing of it is visible before the last request, which is create-only like a
plain PUT.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import SplitResult, urlsplit
from xml.etree import ElementTree

import urllib3
from minio import Minio
from minio.commonconfig import CopySource
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from app import sockets
from app.domain.checkpoints import FileEntry
from app.errors import NotFound, SetupError, Unavailable
from app.settings import StoreSettings
from app.stores.objects.base import check_key, check_prefix, copy_bounded, is_key, reader, whole_file
from app.telemetry import store_call

log = logging.getLogger(__name__)
# A part is in memory while it is sent. S3 takes 5 GiB in one request, and 10,000 parts of this size are 640 GiB.
_PART_BYTES = 64 * 2**20
_PUT_WITHIN = timedelta(hours=1)
# An upload that began this long ago has no writer any more.
_ABANDONED = timedelta(days=1)
_TIMEOUT = urllib3.Timeout(connect=3, read=60)
# Three tries within about a second: the caller meanwhile holds a lease, or a client waits, and it retries itself.
_RETRIES = urllib3.Retry(total=2, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504])
_MISSING = ("NoSuchKey", "NoSuchObject")
_TAKEN = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")
_PROBES = "probes"

Sign = Callable[[str, Mapping[str, str]], str]
"""Returns a signed URL of the object for (method, query parameters)."""


class S3Store:
    """An ObjectStore in one bucket. A missing bucket is created.

    Objects are read as they are stored: a client with a URL of `presign_put` may have sent a Content-Encoding, and a
    megabyte of gzip is a gigabyte.

    The server's If-None-Match makes a write create-only. For a file in parts, SeaweedFS 4.48 checks it before it joins
    the parts. So two writers at the same moment may both succeed. The manifest, which is one request, decides between
    them.

    Raises SetupError when the server refuses the credentials, ignores If-None-Match, or cannot be reached. With
    `may_be_away`, a server that cannot be reached is no error: a process that starts during an outage has work that
    needs no store; the first write checks the server then. After the start, an outage raises Unavailable.
    """

    def __init__(self, settings: StoreSettings, part_bytes: int = _PART_BYTES, *, may_be_away: bool = False) -> None:
        url = _parse(settings.url, "store.url")
        self._part_bytes = part_bytes
        self._bucket = url.path.strip("/")
        self._where = f"the S3 server {url.scheme}://{url.netloc}"
        options = [*HTTPConnection.default_socket_options, *sockets.OPTIONS]
        # Its warning of a retry has the signed URL.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._http = urllib3.PoolManager(timeout=_TIMEOUT, retries=_RETRIES, maxsize=32, socket_options=options)
        self._client = _client(url, settings, self._http)
        self._signer = self._client
        if settings.public_url:
            self._signer = _client(_parse(settings.public_url, "store.public_url"), settings, self._http)
        self._is_checked = False
        self._open(may_be_away)

    @store_call("put")
    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Stores a file; False (nothing changes) when the key exists."""
        check_key(key)
        with self._outages(), reader(source) as data:
            self._check_once(Unavailable)
            status = self._put(key, data)
        if status in (200, 412):
            return status == 200
        raise Unavailable(f"{self._where} answered {status} when storing {key!r}")

    @store_call("get")
    def get(self, key: str, target: Path, most_bytes: int | None = None) -> None:
        """Fetches an object to a local file, whole or not at all. Raises NotFound, and TooLarge."""
        with self._reading(key) as answer, whole_file(target) as file:
            copy_bounded(_stream(answer), file, most_bytes)

    @store_call("get")
    def entry(self, key: str) -> FileEntry:
        """The size and sha256 of an object. Raises NotFound."""
        size, digest = 0, hashlib.sha256()
        with self._reading(key) as answer:
            for piece in _stream(answer):
                size += len(piece)
                digest.update(piece)
        return FileEntry(size, digest.hexdigest())

    @store_call("read")
    def read(self, key: str) -> bytes:
        """The bytes of a small object. Raises NotFound."""
        with self._reading(key) as answer:
            return answer.read(decode_content=False)

    @store_call("copy")
    def copy(self, source: str, target: str) -> None:
        """Gives an object a second key; a repeat changes nothing. Raises NotFound.

        The server copies the bytes, a large object in parts.
        """
        with self._outages(source):
            self._client.copy_object(self._bucket, check_key(target), CopySource(self._bucket, check_key(source)))

    @store_call("list")
    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        check_prefix(prefix)
        with self._outages():
            found = self._client.list_objects(self._bucket, prefix=prefix, recursive=True)
            return sorted(item.object_name for item in found if is_key(item.object_name))

    @store_call("list")
    def page(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        """The first `limit` of these keys that come behind `after`: one request for 1,000 keys."""
        check_prefix(prefix)
        with self._outages():
            # The client's own list_objects asks for 1,000 keys, whatever the caller needs.
            found = self._client._list_objects(
                self._bucket, prefix=prefix, start_after=after, max_keys=limit, encoding_type="url"
            )
            return list(islice((item.object_name for item in found if is_key(item.object_name)), limit))

    @store_call("list")
    def folders(self, prefix: str) -> Sequence[str]:
        """The next part of the keys that start with `prefix` and have a further one, sorted."""
        check_prefix(prefix)
        with self._outages():
            found = self._client.list_objects(self._bucket, prefix=prefix, recursive=False)
            return sorted(item.object_name.split("/")[-2] for item in found if item.is_dir)

    @store_call("delete")
    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects. A missing key is no error. Raises Unavailable when the server kept an object."""
        doomed = [DeleteObject(check_key(key)) for key in keys]
        with self._outages():
            kept = [error.name for error in self._client.remove_objects(self._bucket, doomed)]
        if kept:
            raise Unavailable(f"{self._where} did not delete {len(kept)} objects, the first is {kept[0]!r}")

    @store_call("size")
    def size(self, key: str) -> int:
        """The bytes of an object. Raises NotFound."""
        with self._outages(key):
            return int(self._client.stat_object(self._bucket, check_key(key)).size)

    def presign(self, key: str, expires_s: int) -> str:
        """A URL of the S3 server (its public_url, if set), valid for `expires_s` seconds, at most 7 days."""
        return self._presign("GET", key, expires_s)

    def presign_put(self, key: str, expires_s: int, most_bytes: int) -> str:
        """A URL of the S3 server for one HTTP PUT. Such a URL cannot bound the size: `size` tells what was stored."""
        return self._presign("PUT", key, expires_s)

    def _presign(self, method: str, key: str, expires_s: int) -> str:
        url: str = self._signer.get_presigned_url(
            method, self._bucket, check_key(key), expires=timedelta(seconds=expires_s)
        )
        return url

    def _put(self, key: str, data: BinaryIO) -> int:
        """Uploads by a signed URL and returns the HTTP status.

        The client's own put_object cannot send If-None-Match; a signed URL takes any plain header.
        """

        def sign(method: str, query: Mapping[str, str]) -> str:
            url: str = self._client.get_presigned_url(
                method, self._bucket, key, expires=_PUT_WITHIN, extra_query_params=dict(query)
            )
            return url

        size = data.seek(0, io.SEEK_END)
        data.seek(0)
        if size > self._part_bytes:
            return upload_parts(self._http, sign, data, self._part_bytes)
        # SeaweedFS 4.48 stores an empty object when a connection breaks off before the body, unless it has a checksum.
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in _parts(data, 2**20):
            md5.update(piece)
        data.seek(0)
        checksum = base64.b64encode(md5.digest()).decode()
        headers = {"If-None-Match": "*", "Content-Length": str(size), "Content-MD5": checksum}
        answer = self._http.request("PUT", sign("PUT", {}), body=data, headers=headers)
        is_repeat = answer.retries is not None and bool(answer.retries.history)
        if answer.status == 412 and is_repeat and self._holds(key, data):
            return 200  # an earlier try stored it, and its answer was lost
        return answer.status

    def _holds(self, key: str, data: BinaryIO) -> bool:
        """True if the object exists and has these bytes."""
        data.seek(0)
        try:
            stored = self._client.get_object(self._bucket, key)
        except S3Error as error:
            if error.code in _MISSING:
                return False
            raise
        try:
            return all(piece == data.read(len(piece)) for piece in _stream(stored)) and not data.read(1)
        finally:
            stored.close()
            stored.release_conn()

    def _open(self, may_be_away: bool) -> None:
        try:
            self._check_once(SetupError)
        except S3Error as error:
            raise SetupError(
                f"{self._where} refused to open the bucket {self._bucket!r} ({error.code}): "
                "check store.access_key, store.secret_key and store.url"
            ) from None
        except HTTPError as error:
            text = f"{self._where} does not answer ({_reason(error)}): start it or fix store.url"
            if not may_be_away:
                raise SetupError(text) from None
            log.warning(text)
        except (MinioException, ValueError) as error:
            raise SetupError(f"store.url does not name a usable S3 bucket: {error}") from None

    def _check_once(self, error: type[SetupError] | type[Unavailable]) -> None:
        """Makes the bucket and tries the server, once in this process. Raises `error` when the server does
        not honour If-None-Match."""
        if self._is_checked:
            return
        self._make_bucket()
        if (found := self._write_twice()) != (200, 412):
            raise error(
                f"{self._where} answered {found[0]} and {found[1]}, not 200 and 412, when one object was created "
                "twice. On such a server one checkpoint could overwrite another: set store.url to a server that "
                "honours If-None-Match, and give the credentials write access"
            )
        self._is_checked = True
        self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """Aborts uploads in parts whose writer ended before they did: their parts take room, and no list shows them."""
        oldest = datetime.now(UTC) - _ABANDONED
        try:
            # minio-py offers neither call in public. One page, of up to 1,000 uploads, is enough for a start.
            found = self._client._list_multipart_uploads(self._bucket)
            for upload in found.uploads:
                if upload.initiated_time is not None and upload.initiated_time < oldest:
                    self._client._abort_multipart_upload(self._bucket, upload.object_name, upload.upload_id)
                    log.info("removed the parts of an interrupted upload of %s", upload.object_name)
        except S3Error as error:
            log.warning("cannot remove the parts of interrupted uploads from %s: %s", self._where, error.code)

    def _write_twice(self) -> tuple[int, int]:
        """Creates an object with a unique name twice, with different bytes, and deletes it. Returns both statuses."""
        probe = f"{_PROBES}/{uuid.uuid4().hex}"
        try:
            return self._put(probe, io.BytesIO(b"1")), self._put(probe, io.BytesIO(b"2"))
        finally:
            self._client.remove_object(self._bucket, probe)

    def _make_bucket(self) -> None:
        """Makes the bucket. Another process may make it at the same time."""
        try:
            if not self._client.bucket_exists(self._bucket):
                self._client.make_bucket(self._bucket)
        except S3Error as error:
            if error.code not in _TAKEN:
                raise

    @contextmanager
    def _reading(self, key: str) -> Iterator[urllib3.BaseHTTPResponse]:
        with self._outages(key):
            answer = self._client.get_object(self._bucket, check_key(key))
            try:
                yield answer
            finally:
                answer.close()
                answer.release_conn()

    @contextmanager
    def _outages(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            if error.code in _MISSING:
                raise NotFound(f"object {key!r} does not exist") from None
            raise Unavailable(f"{self._where} answered {error.code}") from error
        except (HTTPError, MinioException, ElementTree.ParseError) as error:
            raise Unavailable(f"{self._where} does not answer ({_reason(error)})") from error


def _parse(text: str, setting: str) -> SplitResult:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.netloc or "@" in url.netloc or url.path.count("/") != 1:
        raise SetupError(
            f"{setting} is not http(s)://host:port/bucket (credentials go to store.access_key and store.secret_key)"
        )
    return url


def _client(url: SplitResult, settings: StoreSettings, http: urllib3.PoolManager) -> Minio:
    return Minio(
        url.netloc,
        settings.access_key,
        settings.secret_key,
        secure=url.scheme == "https",
        region=settings.region,
        http_client=http,
    )


def _stream(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    return answer.stream(2**20, decode_content=False)


def _reason(error: Exception) -> str:
    """The class name of the last cause: the full text of a urllib3 error contains the URL with its signature."""
    return type(getattr(error, "reason", None) or error).__name__


def upload_parts(http: urllib3.PoolManager, sign: Sign, data: BinaryIO, part_bytes: int) -> int:
    """Uploads in parts. Returns 200, 412 when the key exists, or the status of the request that the server refused.

    S3 requires parts of at least 5 MiB, and at most 10,000 of them. Raises urllib3's HTTPError when the server is away,
    and ParseError or InvalidResponseError when a proxy answers 200 in its place.
    """
    started = http.request("POST", sign("POST", {"uploads": ""}))
    if started.status != 200:
        return started.status
    upload_id = ElementTree.fromstring(started.data).findtext("{*}UploadId")
    if not upload_id:
        raise _no_answer_of_s3(started)
    query = {"uploadId": upload_id}
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
        if "ETag" not in sent.headers:
            raise _no_answer_of_s3(sent)
        etags.append(sent.headers["ETag"])
    done = http.request("POST", sign("POST", query), body=_completion(etags), headers={"If-None-Match": "*"})
    # Joining the parts takes long; a server may send status 200 first and put the error into the body.
    if done.status == 200 and not ElementTree.fromstring(done.data).tag.endswith("CompleteMultipartUploadResult"):
        raise _no_answer_of_s3(done)
    return done.status


def _no_answer_of_s3(answer: urllib3.BaseHTTPResponse) -> InvalidResponseError:
    return InvalidResponseError(answer.status, answer.headers.get("Content-Type"), None)


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

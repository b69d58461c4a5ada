"""A checkpoint as one tar behind a signed URL, as SDKs up to 0.34 download it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import tarfile
import time
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from urllib.parse import SplitResult, urlsplit

import pytest
from werkzeug.test import TestResponse

from app.domain.checkpoints import MANIFEST, FileEntry, Manifest
from app.domain.ops import LoraSpec
from app.signing import UrlSigner
from app.stores.disk import TemporaryCopies
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_public import publish
from tests.unit.app.conftest import BASE, Api

# A whole number of tar's blocks, one byte more, and nothing.
FILES = {"adapter_config.json": b'{"r": 4}' * 64, "adapter_model.safetensors": b"w" * 513, "optimizer.safetensors": b""}


def stored(api: Api, prefix: str) -> str:
    """A run with one checkpoint, its files in the object store."""
    model = api.model()
    entries = {}
    for name, data in FILES.items():
        api.services.objects.put_new(f"{prefix}/{name}", data)
        entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    manifest = Manifest("", "1-1", model, "me", BASE, LoraSpec(4), 1, 1, "2026-01-01T00:00:00Z", entries, 2, "cpu")
    api.services.objects.put_new(f"{prefix}/{MANIFEST}", manifest.to_json())
    save_checkpoint(api, model, prefix=prefix)
    return model


def rewrite(api: Api, prefix: str, files: dict[str, FileEntry]) -> None:
    """Makes its manifest list other files."""
    manifest = Manifest.from_json(api.services.objects.read(f"{prefix}/{MANIFEST}"))
    api.services.objects.delete([f"{prefix}/{MANIFEST}"])
    api.services.objects.put_new(f"{prefix}/{MANIFEST}", dataclasses.replace(manifest, files=files).to_json())


def where(api: Api, model: str) -> SplitResult:
    answer = api.get(f"training_runs/{model}/checkpoints/weights/a/archive")
    assert answer.status_code == 302
    assert parsedate_to_datetime(answer.headers["Expires"]).timestamp() > time.time() + 900
    return urlsplit(answer.headers["Location"])


def begin(api: Api, url: SplitResult) -> TestResponse:
    """The answer with the body still to be read, as long as it is not closed."""
    return api.client.get(f"{url.path}?{url.query}")


def download(api: Api, url: SplitResult, method: str = "GET") -> TestResponse:
    """The answer, read as a server reads it: to its end, and then closed."""
    return api.client.open(f"{url.path}?{url.query}", method=method, buffered=True)


def test_the_archive_holds_the_checkpoints_files_and_says_that_it_is_complete(api: Api) -> None:
    model = stored(api, "archived/whole")
    url = where(api, model)
    assert f"{url.scheme}://{url.netloc}" == api.services.settings.public_url
    answer = download(api, url)
    assert download(api, url, "HEAD").content_length == len(answer.data)
    with tarfile.open(fileobj=io.BytesIO(answer.data)) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [*FILES, "checkpoint_complete"]
        assert all(member.isfile() for member in members)
        found = [handle.read() for member in members if (handle := tar.extractfile(member))]
    assert found == [*FILES.values(), b""]


def test_the_fifth_archive_at_once_is_refused_until_another_one_ends(api: Api) -> None:
    """An archive has a copy of one of its files on the server's disk."""
    url = where(api, stored(api, "archived/many"))
    unread = [begin(api, url) for _ in range(4)]
    refused = download(api, url)
    assert (refused.status_code, float(refused.headers["Retry-After"]) > 0) == (503, True)
    assert "4 archives" in refused.json["detail"]
    unread.pop().close()
    assert download(api, url).status_code == 200, "it is sent in the place of one that ended unread"
    assert download(api, url).status_code == 200, "and the next one in its place"
    for answer in unread:
        answer.close()


def test_an_archive_of_which_only_the_size_is_asked_is_not_one_at_once(api: Api) -> None:
    url = where(api, stored(api, "archived/head"))
    answers = [download(api, url, "HEAD") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5


def test_an_archive_waits_for_room_for_its_largest_file(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    url = where(api, stored(api, "archived/room"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30 + 512))
        patch.setattr(api.services.archives._files, "_copies", TemporaryCopies(2**30))
        refused = download(api, url)
        assert (refused.status_code, "free_disk_bytes" in refused.json["detail"]) == (503, True)
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30 + 513))
        with begin(api, url) as first:
            assert (first.status_code, download(api, url).status_code) == (200, 503), "no room for two"
        assert download(api, url).status_code == 200


def test_files_may_be_larger_than_the_8_gb_of_plain_tar(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.services.archives._files, "_copies", TemporaryCopies(least_free=0))
    model = stored(api, "archived/large")
    small = FileEntry(len(FILES["adapter_config.json"]), "")
    rewrite(api, "archived/large", {"adapter_config.json": small, "model.safetensors": FileEntry(2**40, "")})
    url = where(api, model)
    assert download(api, url, "HEAD").content_length > 2**40


def test_an_archive_that_cannot_be_finished_is_seen_to_be_cut_short(api: Api) -> None:
    url = where(api, stored(api, "archived/cut"))
    api.services.objects.delete(["archived/cut/optimizer.safetensors"])
    answer = begin(api, url)
    received = b""
    with pytest.raises(Exception, match="does not exist"):
        for chunk in answer.response:
            received += chunk
    assert (answer.content_length, received != b"") == (None, True), "its client waits for a last chunk"
    assert b"checkpoint_complete" not in received


def test_a_url_for_anything_else_is_refused(api: Api) -> None:
    url = where(api, stored(api, "archived/signed"))
    signature = f"signature={'0' * 64}"
    forged = [
        f"{url.path}?{url.query.partition('&')[0]}&{signature}",
        f"{url.path}x?{url.query}",
        f"{url.path.replace('archives', 'objects')}/{MANIFEST}?{url.query}",
    ]
    assert [api.client.get(path).status_code for path in forged] == [403] * 3
    assert api.client.get(url.path).status_code == 422


def test_a_server_that_cannot_sign_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(api, "archived/unsigned")
    external = save_checkpoint(api, model, "external_weights")
    monkeypatch.setattr(api.services.archives._signer, "_secret", b"")
    monkeypatch.setattr(api.services.objects._signer, "_secret", b"")
    for path in ("weights/a/archive", f"external_weights/{external.split('/')[-1]}/external_weights_urls"):
        answer = api.get(f"training_runs/{model}/checkpoints/{path}")
        assert (answer.status_code, "url_secret" in answer.json["detail"]) == (404, True)


def test_a_url_stops_working_when_it_expires(api: Api) -> None:
    settings = api.services.settings
    url = urlsplit(UrlSigner(settings.url_secret, "").url("archives/archived/late", int(time.time()) - 1))
    assert download(api, url).status_code == 403


def test_the_archive_of_a_checkpoint_deleted_since_is_not_found(api: Api) -> None:
    model = stored(api, "archived/deleted")
    url = where(api, model)
    path = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert api.client.delete(path, headers={"X-API-Key": api.key}).status_code == 200
    assert download(api, url).status_code == 404


def test_a_strangers_url_works_as_long_as_the_checkpoint_is_published(api: Api, stranger: Api) -> None:
    model = stored(api, "archived/published")
    path = f"tinker://{model}/weights/a"
    publish(api, path)
    theirs, own = where(stranger, model), where(api, model)
    assert [download(api, url).status_code for url in (theirs, own)] == [200, 200]
    publish(api, path, "DELETE")
    assert [download(api, url).status_code for url in (theirs, own)] == [404, 200]
    publish(api, path)
    forged = theirs.path.replace("/weights/", "/sampler_weights/")
    assert api.client.get(f"{forged}?{theirs.query}").status_code == 403


def test_a_manifest_that_was_damaged_is_said_to_be(api: Api) -> None:
    model = api.model()
    api.services.objects.put_new(f"archived/damaged/{MANIFEST}", b"{")
    save_checkpoint(api, model, prefix="archived/damaged")
    url = where(api, model)
    answer = download(api, url)
    assert (answer.status_code, "damaged" in answer.json["detail"]) == (503, True)


def test_another_ones_checkpoint_looks_missing(api: Api, stranger: Api) -> None:
    model = api.model()
    save_checkpoint(api, model)
    path = f"training_runs/{model}/checkpoints/weights/a/archive"
    foreign = stranger.get(path)
    api.services.records.delete("checkpoints", f"tinker://{model}/weights/a")
    missing = api.get(path)
    assert (foreign.status_code, foreign.data) == (404, missing.data)


def test_the_name_of_a_manifests_file_never_leads_out_of_its_folder(api: Api) -> None:
    model = stored(api, "archived/odd")
    rewrite(api, "archived/odd", {"../../secret": FileEntry(1, "")})
    url = where(api, model)
    with pytest.raises(Exception, match="not an object key"):
        list(begin(api, url).response)

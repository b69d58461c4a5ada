"""A record that cannot be read keeps its files, and keeps no other orphan from being removed."""

from __future__ import annotations

from app.domain.records import UPLOADS, Checkpoint, Upload, uploaded
from app.stores.redis.records import dump
from tests.unit.workers.maintenance.test_orphans import SNAPSHOT, Installation, installation

__all__ = ["installation"]


def test_a_checkpoint_that_cannot_be_read_stays_and_keeps_no_other(installation: Installation):
    kept, gone = installation.write("weights/a/4-1"), installation.write("weights/b/5-1")
    path = installation.checkpoint("a", kept, expires_at="x")
    installation.checkpoint("b", gone, expires_at=installation.records.now() - 1)
    assert installation.collect() == {SNAPSHOT, kept}
    assert [found for found, _ in installation.records.list(Checkpoint.namespace)] == [path]


def test_an_upload_that_cannot_be_read_stays_and_keeps_no_other(installation: Installation):
    now = installation.records.now()
    for name, expires_at in (("a", '"x"'), ("b", str(now - 1))):
        upload = {**dump(Upload("me", "base", {}, now, 1, 0.0)), "expires_at": expires_at}
        installation.records.put_new(Upload.namespace, name, upload)
        installation.store.put_new(uploaded(name, "adapter_config.json"), b"x")
    installation.collect()
    assert installation.store.list(f"{UPLOADS}/") == [uploaded("a", "adapter_config.json")]
    assert [upload_id for upload_id, _ in installation.records.list(Upload.namespace)] == ["a"]

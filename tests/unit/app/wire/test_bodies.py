from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as sdk

from app.domain.ops import Batch, Ragged
from app.errors import BadRequest, TooLarge
from app.settings import LimitSettings
from app.wire import tinker_pb2 as pb
from app.wire.bodies import check_batch, check_datums, check_parts, parse_json, unpack
from tests.protobuf_bytes import field, with_tensor

BODY = bytes(range(256)) * 40
PACKED = zstandard.compress(BODY)
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(BODY)
CHECKED = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(BODY)


def _in_pieces(content: bytes) -> bytes:
    """Compresses a stream of unknown length: its last block is empty."""
    packer = zstandard.ZstdCompressor().compressobj()
    made = []
    for at in range(0, len(content), 1000):
        made += [packer.compress(content[at : at + 1000]), packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*made, packer.flush()])


PIECES = _in_pieces(BODY)
EMPTY = zstandard.compress(b"")
SKIPPED = b"\x50\x2a\x4d\x18" + bytes(4)
"""A frame that every decoder passes over."""
BOMB = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**25))


@pytest.mark.parametrize(
    ("body", "encoding"), [(BODY, ""), (BODY, "identity"), (PACKED, "zstd"), (UNSIZED, "zstd"), (PIECES, "zstd")]
)
def test_a_body_up_to_the_limit_is_the_same_however_it_came(body: bytes, encoding: str) -> None:
    assert unpack(body, encoding, len(BODY)) == BODY


def test_a_frame_larger_than_the_limit_is_refused_by_what_its_head_says() -> None:
    with pytest.raises(TooLarge, match=f"{len(BODY)} bytes"):
        unpack(PACKED[:20], "zstd", len(BODY) - 1)


def test_a_frame_that_does_not_say_its_size_is_unpacked_no_further_than_the_limit() -> None:
    for body, most in ((UNSIZED, len(BODY) - 1), (PIECES, 0), (BOMB, 2**20)):
        with pytest.raises(TooLarge, match=f"{most} are allowed") as refusal:
            unpack(body, "zstd", most)
        found = re.search(r"at least (\d+) bytes", str(refusal.value))
        assert most < int(found[1]) <= most + 2**16, "no more than a piece beyond"
    assert unpack(BOMB, "zstd", 2**25) == bytes(2**25)


def test_a_frame_that_does_not_say_its_size_has_a_window_of_8_mib_at_most() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=False)
    body = zstandard.ZstdCompressor(compression_params=wide).compress(bytes(2**25))
    with pytest.raises(BadRequest, match="window"):
        unpack(body, "zstd", 2**26)


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    said = _in_head(len(BODY))
    assert PACKED.count(said) == 1
    for lie in (len(BODY) - 1, len(BODY) + 1, 256):
        with pytest.raises(BadRequest):
            unpack(PACKED.replace(said, _in_head(lie)), "zstd", 10 * len(BODY))


def test_an_empty_body_is_empty_in_a_frame_too() -> None:
    assert unpack(EMPTY, "zstd", 0) == unpack(zstandard.ZstdCompressor().compressobj().flush(), "zstd", 0) == b""


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_half_a_frame_or_one_with_something_behind_it_is_never_taken_for_a_body(cut: int) -> None:
    for whole in (PACKED, UNSIZED, CHECKED, PIECES, EMPTY):
        for body in (whole[:-cut], whole + b"x" * cut, whole + whole, whole + SKIPPED, SKIPPED + whole):
            with pytest.raises(BadRequest):
                unpack(body, "zstd", 10 * len(BODY))


@pytest.mark.parametrize(("body", "encoding"), [(BODY, "gzip"), (BODY, "zstd"), (b"", "zstd"), (PACKED, "zstd, zstd")])
def test_nothing_else_is_unpacked(body: bytes, encoding: str) -> None:
    with pytest.raises(BadRequest, match="zstd"):
        unpack(body, encoding, 10 * len(BODY))


def test_values_are_counted_before_they_are_made() -> None:
    limits = LimitSettings(json_values=1000)
    assert parse_json(json.dumps([1] * 999).encode(), limits) == [1] * 999
    for body in (b"[" * 1001, b'{"a":1}' * 501, json.dumps([1] * 1001).encode()):
        with pytest.raises(TooLarge, match=r"1000 .*: send less at a time, a tensor .* sparse rows, .*json_values"):
            parse_json(body, limits)
    with pytest.raises(TooLarge, match=r"at most 10 are allowed in one call: send less at a time$"):
        parse_json(b"[" * 11, limits, 10)


def test_parts_of_a_protobuf_body_are_counted_before_they_are_made() -> None:
    """The parts are datums, their contents, known fields or not, and the fields beside them."""
    message = sdk.ForwardBackwardRequest(model_id="m", seq_id=2**31 - 1, loss_fn="x", forward_only=True)
    message.loss_fn_config["beta"] = 1.0
    for i in range(300):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4 * i)
        datum.loss_fn_inputs["target_tokens"].shape.extend([i, 2**40])
        datum.model_input_spans.add()
    parts = 300 * 4 + 5
    body = message.SerializeToString()
    check_parts(body, LimitSettings(json_values=4 * parts))
    bombs = (body, b"\x1a\x00" * 1001, b"\x1a\xd2\x0f" + b"\x0a\x00" * 1001, b"\x9a\x80\x00\x00" * 1001)
    for bomb in bombs:
        with pytest.raises(TooLarge, match="parts"):
            check_parts(bomb, LimitSettings(json_values=4 * (parts - 1 if bomb is body else 1000)))


def test_messages_and_numbers_inside_of_parts_are_counted_before_they_are_made() -> None:
    """Each is one or two bytes. Two kinds of one `oneof` in turn make a new message every time."""
    bombs = (
        with_tensor(field(4, b"\x01" * 1001)),
        with_tensor(field(4, b"\x80\x01" * 1001)),
        with_tensor(b"\x20\x01" * 1001),
        with_tensor(b"\x0a\x00\x12\x00" * 1001),
        field(3, field(1, b"\x0a\x00\x12\x00" * 501)),
        field(3, field(3, b"\x0a\x00\x12\x00" * 501)),
        field(7, field(1, b"a") + b"\x12\x00" * 1001),
    )
    for bomb in bombs:
        with pytest.raises(TooLarge, match="1000 values"):
            check_parts(bomb, LimitSettings(json_values=1000))
        check_parts(bomb, LimitSettings(json_values=2010))


@pytest.mark.parametrize(
    "nothing", [b"\x0b\x0c", b"\x18\x01", b"\x7b\x18\x01\x7c", b"\x7d" + bytes(4), b"\x79" + bytes(8)]
)
def test_fields_that_bring_nothing_are_counted_too(nothing: bytes) -> None:
    """A group, a number and a number of fixed size: a few compressed bytes hold millions of them."""
    limits = LimitSettings(json_values=1000)
    for beside in (nothing * 2000, field(3, nothing * 2000)):
        with pytest.raises(TooLarge, match="250 parts"):
            check_parts(beside, limits)
    for inside in (with_tensor(nothing * 2000), field(3, field(1, nothing * 2000))):
        pb.ForwardBackwardRequest.FromString(inside)
        with pytest.raises(TooLarge, match="2000 fields"):
            check_parts(inside, limits)
    check_parts(with_tensor(nothing * 300), limits)


def test_a_batch_of_sparse_tensors_has_fewer_fields_than_the_limit() -> None:
    """No datum has more fields for each of its values. The other limits are met just before."""
    message = sdk.ForwardBackwardRequest(model_id="m", seq_id=1)
    inputs = message.data.add().loss_fn_inputs
    for i in range(199):
        tensor = sdk.Tensor(dtype=sdk.DTYPE_INT64, shape=[1, 2])
        tensor.sparse_csr.values = tensor.sparse_csr.crow_indices = tensor.sparse_csr.col_indices = b"x"
        inputs[str(i)].CopyFrom(tensor)
    check_parts(message.SerializeToString(), LimitSettings(json_values=1000))


@pytest.mark.parametrize(
    "before",
    [
        *(b"\x18\x0a", b"\x1b\x1a\x02\x0a\x05\x1c", b"\x7b\x1a\x02\x0a\x05\x7c", b"\x1d" + b"\x0a" * 4),
        b"\x18" + b"\xff" * 9 + b"\x01",
    ],
    ids=["a number", "a group", "an unknown group", "a fixed number", "a number of 64 bits"],
)
def test_a_field_of_another_wire_type_hides_no_bomb(before: bytes) -> None:
    """The parser keeps such fields unread, and goes on; what they hold would look like a body that ends too soon."""
    for bomb, most in ((b"\x1a\x00" * 1001, 4000), (with_tensor(b"\x20\x01" * 1001), 1000)):
        pb.ForwardBackwardRequest.FromString(before + bomb)
        with pytest.raises(TooLarge):
            check_parts(before + bomb, LimitSettings(json_values=most))


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a",
        b"\x1a\x05a",
        b"\x80" * 10**6,
        b"\x0d\x01",
        b"\x0b\x1a\x00\x0c",
        b"\xff\xff",
        b"\x1a\x02\x0a\x7f" * 10**6,
        b"\x1a" + b"\x80" * 10 + b"\x00" + b"\x1a\x00" * 2 * 10**6,
    ],
)
def test_what_is_no_protobuf_is_left_to_the_parser(body: bytes) -> None:
    check_parts(body, LimitSettings())


def test_levels_are_counted_in_lists_and_objects_alike() -> None:
    limits = LimitSettings(json_depth=16)
    nested: Any = 1
    for level in range(16):
        nested = [nested] if level % 2 else {"a": nested, "b": 2}
    for taken in (nested, [nested[0]] * 20):
        assert parse_json(json.dumps(taken).encode(), limits) == taken
    with pytest.raises(BadRequest, match="16 levels"):
        parse_json(json.dumps([nested]).encode(), limits)


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(BadRequest, match="7 bytes is not valid JSON"):
        parse_json(b'{"a": 1', LimitSettings())


def test_a_call_brings_so_many_datums_and_tokens_and_no_more() -> None:
    def batch(*lengths: int) -> Batch:
        return Batch(Ragged.of([np.zeros(length) for length in lengths], np.int32), {})

    limits = LimitSettings(datums=3, batch_tokens=10)
    check_datums(3, limits)
    check_batch(batch(5, 4, 1), limits)
    with pytest.raises(BadRequest, match="4 datums; at most 3"):
        check_datums(4, limits)
    with pytest.raises(BadRequest, match="11 tokens; at most 10"):
        check_batch(batch(5, 6), limits)


def _in_head(size: int) -> bytes:
    """Form of a size of 256 to 65,791 in a frame's header."""
    return (size - 256).to_bytes(2, "little")

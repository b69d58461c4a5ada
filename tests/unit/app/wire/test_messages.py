"""tinker.proto against the SDK's own descriptors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tinker.proto import tinker_public_pb2 as sdk

from app.wire import tinker_pb2 as ours

ROOT = Path(ours.__file__).parents[2]


@pytest.mark.parametrize("name", sorted(ours.DESCRIPTOR.message_types_by_name))
def test_every_field_has_the_sdks_number_name_and_type(name: str) -> None:
    theirs = sdk.DESCRIPTOR.message_types_by_name[name]
    for field in ours.DESCRIPTOR.message_types_by_name[name].fields:
        other = theirs.fields_by_number[field.number]
        assert (field.name, field.type, field.is_repeated) == (other.name, other.type, other.is_repeated)


@pytest.mark.parametrize("name", sorted(ours.DESCRIPTOR.enum_types_by_name))
def test_every_enum_value_is_the_sdks(name: str) -> None:
    values = ours.DESCRIPTOR.enum_types_by_name[name].values_by_name
    theirs = sdk.DESCRIPTOR.enum_types_by_name[name].values_by_name
    assert {key: value.number for key, value in values.items()} == {key: v.number for key, v in theirs.items()}


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", "app/wire/tinker.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = (tmp_path / "app/wire/tinker_pb2.py").read_text()
    assert _descriptor(fresh) == _descriptor(Path(ours.__file__).read_text())


def _descriptor(code: str) -> str:
    """Serialised messages; the lines around them name the generator's version."""
    return next(line for line in code.splitlines() if line.startswith("DESCRIPTOR ="))

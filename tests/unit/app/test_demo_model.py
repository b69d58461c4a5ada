from __future__ import annotations

import pytest

from app import demo_model
from app.errors import SetupError


def test_a_converted_model_is_used_as_it_is(tmp_path):
    demo_model.folder(tmp_path).mkdir()
    said: list[str] = []
    demo_model.ensure(tmp_path, said.append)
    assert said == [] and list(demo_model.folder(tmp_path).iterdir()) == []


def test_missing_packages_are_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "_NEEDED", ("json", "no_such_package"))
    with pytest.raises(SetupError, match=r"needs no_such_package: run `make setup`, or give --base-model NAME=PATH"):
        demo_model.ensure(tmp_path, print)


def test_a_failed_conversion_says_why_and_leaves_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "_CONVERTER", ("-c", "import sys; sys.exit('disk is full')"))
    with pytest.raises(SetupError, match="disk is full; is there 1 GB free"):
        demo_model.ensure(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []

"""Helpers that the object-store suites share."""

from __future__ import annotations

from pathlib import Path

from app.settings import ApiSettings, Settings, StoreSettings

KEY = "models/1f0c:train:0/weights/step-1/g1/adapter_model.safetensors"
PUBLIC = "http://tinsmith.example:8000"


def folder_settings(root: Path) -> Settings:
    return Settings(
        url_secret="a secret of the tests",
        store=StoreSettings(url=f"file://{root}"),
        api=ApiSettings(public_url=PUBLIC),
    )

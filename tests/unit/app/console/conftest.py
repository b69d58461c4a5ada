from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from tests.unit.app.api.chat.conftest import app, served, special, template
from tests.unit.app.conftest import KEY, Api

# The playground samples, so the console has the API of the chats, with its stand-in for a sampler.
__all__ = ["app", "served", "special", "template"]
FORMS = ["checkpoints/publish", "checkpoints/expiry", "checkpoints/delete"]
"""The forms that change a checkpoint."""


class Browser:
    """A browser: it keeps cookies, and sends forms with the token of the page that it saw last."""

    def __init__(self, app: Flask) -> None:
        self._client = app.test_client()
        self._token = ""

    def get(self, path: str, **headers: str) -> TestResponse:
        answer = self._client.get(
            f"/console/{path}", headers={name.replace("_", "-"): it for name, it in headers.items()}
        )
        return self._seen(answer)

    def post(self, form: str, **values: str | list[str]) -> TestResponse:
        return self._seen(self._client.post(f"/console/{form}", data={"csrf_token": self._token, **values}))

    def log_in(self, key: str) -> TestResponse:
        self.get("login")
        return self.post("login", api_key=key)

    def _seen(self, answer: TestResponse) -> TestResponse:
        for token in re.findall(r'name="csrf_token" value="([^"]+)"', answer.text if answer.is_json is False else ""):
            self._token = token
        return answer


@pytest.fixture
def browser(api: Api, app: Flask) -> Callable[[str], Browser]:
    """Makes a browser that is logged in with the key."""

    def made(key: str = KEY) -> Browser:
        browser = Browser(app)
        assert browser.log_in(key).status_code == 302
        browser.get("runs")
        return browser

    return made

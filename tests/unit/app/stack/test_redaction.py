"""Secrets in URLs are not shown, neither in errors nor in the list of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.stack.redaction import without_secrets

_PROGRAM = """
import argparse, pathlib, sys
from app.stack.redaction import hide_secrets
hide_secrets(argparse.Namespace(redis=sys.argv[1], s3=None, api_key=None))
print(*pathlib.Path("/proc/self/cmdline").read_bytes().decode().split("\\0")[3:], sep="\\n", end="")
"""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hidden@a:1/0", "redis://a:1/0"),
        ("redis://a:1/0?password=hidden", "redis://a:1/0"),
        ("redis+sentinel://:hidden@a:1,b:2/s?sentinel_password=hidden", "redis+sentinel://a:1,b:2/s"),
        ("https://key:hidden@s3.example/bucket", "https://s3.example/bucket"),
        ("/var/objects", "/var/objects"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str):
    assert without_secrets(url) == shown


def test_every_password_of_a_url_is_hidden_from_the_list_of_processes():
    url = "redis+sentinel://:one%20way@a:1,b:2/s?db=2&sentinel_username=me&sentinel_password=another%40"
    line = subprocess.check_output([sys.executable, "-c", _PROGRAM, url], text=True)
    assert line == "redis+sentinel://:xxxxxxxxx@a:1,b:2/s?db=2&sentinel_username=me&sentinel_password=xxxxxxxxxx\n"


def test_a_password_is_hidden_wherever_it_is_in_the_command_line():
    url = "redis://:secret@a:1/0"
    line = subprocess.check_output([sys.executable, "-c", _PROGRAM, url, url], text=True)
    assert line == "redis://:xxxxxx@a:1/0\n" * 2


def test_what_is_no_url_is_left_to_the_check_of_the_settings():
    line = subprocess.check_output([sys.executable, "-c", _PROGRAM, "redis://[::1:6379/0"], text=True)
    assert line == "redis://[::1:6379/0\n"

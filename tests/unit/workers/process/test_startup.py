"""The garbage collector never scans the objects of a start-up, neither during it nor later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from workers.process.startup import uncollected

with uncollected():
    assert not gc.isenabled()
    made = [[] for _ in range(1000)]
assert gc.isenabled()
ids = {id(each) for each in gc.get_objects()}
assert not any(id(each) in ids for each in made), "what the start left is looked through"
later = []
assert any(each is later for each in gc.get_objects()), "what comes later is not"
"""


def test_what_a_start_leaves_is_looked_through_by_no_collection_and_what_comes_later_is():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

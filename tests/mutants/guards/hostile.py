"""Guards against hostile bodies and files."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LIMITS = "--confcutdir=tests/unit/app/stores tests/unit/app/wire/test_bodies.py"
_TERMINAL = "--confcutdir=tests/unit/app/stores tests/unit/app/stack/test_terminal.py"
_TRANSFERS = "tests/unit/workers/checkpoints/test_shm_folder.py"
_CHUNKS = "tests/unit/app/api/test_client.py::test_every_chunk_that_the_sdk_cuts_is_within_a_low_limit"

MUTANTS = (
    Mutant(
        "custom losses: the bytes of a session",
        "app/stores/redis/lua/records.lua",
        "if held + ARGV[3] > tonumber(ARGV[4]) then return -1 end",
        "",
        "tests/unit/app/api/test_custom_losses.py"
        "::test_the_losses_of_a_session_have_a_bound_that_repeats_and_other_sessions_do_not_meet",
    ),
    Mutant(
        "limits: the size a zstd frame says it has",
        "app/wire/bodies.py",
        "if size > most:",
        "if False:",
        f"{_LIMITS}::test_a_frame_larger_than_the_limit_is_refused_by_what_its_head_says",
    ),
    Mutant(
        "limits: bytes behind a zstd frame",
        "app/wire/bodies.py",
        "allow_extra_data=False",
        "allow_extra_data=True",
        f"{_LIMITS}::test_half_a_frame_or_one_with_something_behind_it_is_never_taken_for_a_body",
    ),
    Mutant(
        "limits: how deep JSON is nested",
        "app/wire/bodies.py",
        "if not level:",
        "if level:",
        f"{_LIMITS}::test_levels_are_counted_in_lists_and_objects_alike",
    ),
    Mutant(
        "limits: parts of a protobuf body",
        "app/wire/bodies.py",
        "if tag == _DATA else 0)\n            if left < 0:",
        "if tag == _DATA else 0)\n            if False:",
        f"{_LIMITS}::test_parts_of_a_protobuf_body_are_counted_before_they_are_made",
    ),
    Mutant(
        "limits: messages and numbers inside the parts of a protobuf body",
        "app/wire/bodies.py",
        "left -= count\n",
        "pass\n",
        f"{_LIMITS}::test_messages_and_numbers_inside_of_parts_are_counted_before_they_are_made",
    ),
    Mutant(
        "limits: fields that bring no value",
        "app/wire/bodies.py",
        "if place == fields:",
        "if False:",
        f"{_LIMITS}::test_fields_that_bring_nothing_are_counted_too",
    ),
    Mutant(
        "limits: the contents of an unknown group",
        "app/wire/bodies.py",
        "yield 0 if groups else tag, start, place",
        "yield tag, start, place",
        f"{_LIMITS}::test_a_field_of_another_wire_type_hides_no_bomb",
    ),
    Mutant(
        "limits: a part that says it is longer than the whole",
        "app/wire/bodies.py",
        "if place > end:",
        "if False:",
        f"{_LIMITS}::test_what_is_no_protobuf_is_left_to_the_parser",
    ),
    Mutant(
        "limits: bytes behind an empty zstd frame",
        "app/wire/bodies.py",
        "        if said > 0:\n            return",
        "        if said >= 0:\n            return",
        f"{_LIMITS}::test_half_a_frame_or_one_with_something_behind_it_is_never_taken_for_a_body",
    ),
    Mutant(
        "output: characters that a terminal obeys",
        "app/stack/terminal.py",
        "char if char.isprintable() or char in keep else",
        "char if True else",
        f"{_TERMINAL}::test_what_a_terminal_would_obey_is_shown_as_an_escape",
    ),
    Mutant(
        "output: tabs and line breaks in a cell",
        "app/stack/terminal.py",
        "_TAB.join(map(visible, cells))",
        "_TAB.join(cells)",
        f"{_TERMINAL}::test_no_cell_begins_another_one",
    ),
    Mutant(
        "transfers: nothing is removed behind a link",
        "workers/checkpoints/shm_transfer.py",
        "self.root.lstat()",
        "self.root.stat()",
        f"{_TRANSFERS}::test_nothing_is_removed_behind_a_link_of_its_name",
    ),
    Mutant(
        "transfers: hidden folders of others",
        "workers/checkpoints/shm_transfer.py",
        '(*self.root.glob(f"{_NEW}*"), *self.root.glob(f"{_GONE}*"))',
        'self.root.glob(".*")',
        f"{_TRANSFERS}::test_folders_of_others_in_it_stay",
    ),
    Mutant(
        "ticks: none while a message waits",
        "app/dispatch.py",
        "if self._broker.llen(queue) == 0:",
        "if True:",
        "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/test_dispatch.py"
        "::test_a_trainer_with_an_unread_message_gets_no_further_tick_and_one_client_asks",
    ),
    Mutant(
        "limits: the SDK's chunks have few enough parts",
        "app/api/client.py",
        "limits.datums, parts // _DATUM_PARTS)",
        "limits.datums)",
        _CHUNKS,
    ),
    Mutant(
        "limits: the SDK's chunks have few enough tokens",
        "app/api/client.py",
        ", _TOKEN_BYTES * limits.batch_tokens",
        "",
        _CHUNKS,
    ),
)

"""Guards of the API's event loop and threads: suspended polls, slow clients."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WORKER = "app/gunicorn_worker.py"
_SUSPENSION = "--confcutdir=tests/unit/app/stores tests/unit/app/test_suspension.py"
_SLOW = "--confcutdir=tests/unit/app/stores tests/unit/app/test_gunicorn_worker.py"
_PROCESSES = "tests/processes/app/test_api_processes.py"

MUTANTS = (
    Mutant(
        "suspension: a result that comes before the suspension",
        _WORKER,
        "if request.is_resumed or not self.alive:",
        "if not self.alive:",
        f"{_SUSPENSION}::test_a_request_that_is_resumed_before_it_is_suspended_is_answered",
        slow=True,
    ),
    Mutant(
        "suspension: a stopping worker answers",
        _WORKER,
        "in () if self.alive else list(self._suspended):",
        "in ():",
        f"{_SUSPENSION}::test_a_worker_that_stops_answers_its_suspended_requests_at_once",
        slow=True,
    ),
    Mutant(
        "suspension: the end of the hold",
        _WORKER,
        "while self._deadlines and self._deadlines[0][0] <= now:",
        "while False:",
        f"{_SUSPENSION}::test_a_suspended_request_whose_time_is_over_is_answered",
        slow=True,
    ),
    Mutant(
        "suspension: a client that leaves frees its place",
        _WORKER,
        """            self._end_suspension(request)
            self._close(request.conn)
""",
        "            self._close(request.conn)\n",
        f"{_SUSPENSION}::test_a_client_that_leaves_frees_its_place_at_once_and_costs_no_second_call",
        slow=True,
    ),
    Mutant(
        "suspension: only what the event loop holds whole",
        _WORKER,
        "<= len(self.data) <= _SUSPENDED_BYTES",
        "<= len(self.data)",
        f"{_SUSPENSION}::test_a_request_that_the_event_loop_does_not_hold_whole_cannot_be_suspended",
    ),
    Mutant(
        "suspension: few resumed requests at once",
        _WORKER,
        "self._resumed < _RESUMED_AT_ONCE and (",
        "(",
        f"{_SUSPENSION}::test_few_resumed_requests_are_in_threads_at_once_and_those_with_news_come_first",
    ),
    Mutant(
        "suspension: requests with news come first",
        _WORKER,
        "(self._woken or self._expired).popleft()",
        "(self._expired or self._woken).popleft()",
        f"{_SUSPENSION}::test_few_resumed_requests_are_in_threads_at_once_and_those_with_news_come_first",
    ),
    Mutant(
        "suspension: holds that began together do not end together",
        "app/suspension.py",
        "key=self._ending.__getitem__, default=last",
        "key=lambda slot: -slot, default=last",
        f"{_SUSPENSION}::test_holds_that_begin_together_end_one_after_another_in_the_second_half_of_their_time",
    ),
    Mutant(
        "suspension: an end that is over is forgotten",
        _WORKER,
        "        self._ends.free(request.slot)\n",
        "",
        f"{_SUSPENSION}::test_suspended_requests_leave_no_end_behind",
    ),
    Mutant(
        "suspension: bytes that follow are not read twice",
        _WORKER,
        "        request.conn.parser.unreader.take_buffered()",
        "        pass",
        f"{_SUSPENSION}::test_the_next_request_of_the_connection_is_answered_after_a_suspended_one",
    ),
    Mutant(
        "suspension: a connection that closes after its request",
        _WORKER,
        "        request.conn.parser.mesg = None",
        "        pass",
        f"{_SUSPENSION}::test_a_client_that_wants_its_connection_closed_gets_its_answer",
        slow=True,
    ),
    Mutant(
        "suspension: a poll keeps its place",
        "app/services/polling.py",
        "suspension.suspend(seconds, undo.pop_all().close)",
        "suspension.suspend(seconds, lambda: None)",
        "tests/unit/app/services/test_polling.py"
        "::test_a_suspended_poll_keeps_its_place_until_it_is_over_and_is_woken_by_its_future",
    ),
    Mutant(
        "suspension: the end of a hold is no sign of its client",
        "app/services/polling.py",
        "if is_sign and found.result is None",
        "if found.result is None",
        "tests/unit/app/services/test_polling.py::test_a_suspended_poll_is_a_sign_of_its_client_once",
    ),
    Mutant(
        "suspension: a poll is counted once",
        "app/api/base.py",
        "if found is not None and found.is_suspended:",
        "if False:",
        "tests/unit/app/api/test_futures.py"
        "::test_a_suspended_poll_is_resumed_by_its_result_and_counted_once_with_its_whole_time",
    ),
    # Requests that have arrived.
    Mutant(
        "worker: a header that is too long, behind another request",
        _WORKER,
        "        if arrival.is_whole and not arrival.is_too_long:",
        "        if arrival.is_whole:",
        "tests/unit/app/test_gunicorn_worker.py"
        "::test_a_header_that_is_too_long_is_refused_also_behind_a_request_of_its_connection",
    ),
    Mutant(
        "worker: calls without a thread are seen by the event loop",
        _WORKER,
        "            self.tpool.start_more()",
        "            self.alive = False",
        "tests/unit/app/test_gunicorn_worker.py::test_requests_that_wait_in_their_threads_hold_up_no_other",
    ),
    Mutant(
        "threads: a burst of calls that wait",
        "app/thread_pool.py",
        "max(MOST_BUSY, len(self._waiting))",
        "MOST_BUSY",
        "tests/unit/app/test_thread_pool.py::test_many_calls_that_wait_have_their_threads_within_few_rounds",
    ),
    # Slow clients.
    Mutant(
        "slow clients: a thread gets whole requests only",
        _WORKER,
        "0 < self._whole <= len(self.data)",
        "self._whole <= len(self.data)",
        f"{_SLOW}::test_a_thread_gets_a_request_with_its_small_body_unless_no_credential_comes_with_it",
    ),
    Mutant(
        "slow clients: nothing is kept for a client without a credential",
        _WORKER,
        "not _CREDENTIAL.search(head) or ",
        "",
        f"{_SLOW}::test_a_thread_gets_a_request_with_its_small_body_unless_no_credential_comes_with_it",
    ),
    Mutant(
        "slow clients: the time for a request to arrive",
        _WORKER,
        "arrival.until <= now or ",
        "",
        f"{_SLOW}::test_a_connection_is_closed_when_its_request_takes_too_long_and_not_before",
    ),
    Mutant(
        "slow clients: the time for a large body to arrive",
        _WORKER,
        "if left <= 0:",
        "if False:",
        f"{_SLOW}::test_a_body_that_stalls_ends_and_one_that_keeps_its_rate_goes_on",
    ),
    Mutant(
        "slow clients: a slow body is no client that has gone",
        _WORKER,
        "            raise self._too_slow() from None\n",
        "            raise\n",
        f"{_SLOW}::test_a_body_that_stalls_is_a_408_with_the_reason_and_one_line_in_the_log",
    ),
    Mutant(
        "slow clients: a response that nobody reads",
        _WORKER,
        "        except BlockingIOError:\n            log.info(",
        "        except ZeroDivisionError:\n            log.info(",
        f"{_SLOW}::test_a_response_that_nobody_reads_is_one_line_in_the_log",
    ),
    Mutant(
        "slow clients: the cap of connections that are arriving",
        _WORKER,
        ">= ARRIVING:",
        ">= 10 * ARRIVING:",
        f"{_SLOW}::test_above_the_cap_the_address_with_the_most_arrivals_loses_its_oldest",
    ),
    Mutant(
        "slow clients: the address with the most connections loses one",
        _WORKER,
        "max(self._arrivals.values(), key=len)",
        "min(self._arrivals.values(), key=len)",
        f"{_SLOW}::test_above_the_cap_the_address_with_the_most_arrivals_loses_its_oldest",
    ),
    # Several API processes.
    Mutant(
        "processes: held polls are added up",
        "app/telemetry.py",
        ', multiprocess_mode="livesum"',
        "",
        f"{_PROCESSES}::test_a_poll_is_woken_in_the_process_that_holds_it_and_all_are_counted",
        slow=True,
    ),
    Mutant(
        "processes: the polls of a dead one",
        "app/gunicorn_conf.py",
        "        multiprocess.mark_process_dead(worker.pid, folder)",
        "        pass",
        f"{_PROCESSES}::test_a_process_that_dies_is_replaced_and_its_polls_are_counted_no_more",
        slow=True,
    ),
    Mutant(
        "processes: memory and processor time are added up",
        "app/telemetry.py",
        "else sum(values)",
        "else max(values)",
        f"{_PROCESSES}::test_metrics_are_the_sum_of_all_processes_whichever_answers",
    ),
)

"""Program that runs a Supervisor, or all of `tinsmith up`, over small stand-in commands.

It is a separate process, because a supervisor adopts and kills stray descendants of the process it runs in.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from app import cli
from app.demo import model
from app.errors import TinsmithError
from app.settings import Settings
from app.stack import memory
from app.stack import up as stack_up
from app.stack.child import Command
from app.stack.signals import stop_signals
from app.stack.supervisor import RestartPolicy, Supervisor

READYZ = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def supervise(logs: str, programs: str, ready: str = "", window_s: str = "60", kills: str = "") -> int:
    """Keeps Python programs (JSON: a list of [name, code, argument...]) running; prints `up` when all are started.

    `ready`: "stack" for a stack that has been ready, "child" for one whose programs have. `kills`: the file with the
    machine's out-of-memory kills.
    """
    nowhere = Path("/nowhere")
    oom_kills = partial(memory.oom_kills, nowhere, nowhere, Path(kills or nowhere))
    policy = RestartPolicy(tries=3, window_s=float(window_s), first_delay_s=0.01, longest_delay_s=0.02)
    commands = [Command(name, (sys.executable, "-c", *rest)) for name, *rest in json.loads(programs)]
    try:
        with (
            stop_signals(signal.SIGTERM) as stopping,
            Supervisor(Path(logs), stopping, policy=policy, grace_s=0.5, oom_kills=oom_kills) as supervisor,
        ):
            supervisor.start(commands)
            print("up", flush=True)
            if ready == "child":
                supervisor.note_ready({command.name for command in commands})
            supervisor.run() if ready == "stack" else supervisor.run_until(lambda: False)
    except TinsmithError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 3
    return 0


def up(*arguments: str) -> int:
    """`tinsmith up` with real settings and Valkey, and one small web server for the processes."""

    def table(settings: Settings, settings_file: Path) -> Iterator[Command]:
        yield Command("trainer-0", (sys.executable, "-c", READYZ, str(settings.api.port)))

    stack_up.process_table = table
    return cli.main(["up", *arguments])


def first_up(gguf: str, *arguments: str) -> int:
    """`tinsmith up` in an environment whose bundled model is at `gguf`, or is to be fetched to there."""
    model._GGUF = Path(gguf)
    return up(*arguments)


if __name__ == "__main__":
    sys.exit({"supervise": supervise, "up": up, "first_up": first_up}[sys.argv[1]](*sys.argv[2:]))

"""Socket options that end a connection soon after its peer falls silent, such as a machine that lost its power.

Nothing arrives from such a peer, neither an answer nor an end. Linux by itself gives up after 15 minutes where bytes
wait for their acknowledgement, and after two hours where none do.
"""

from __future__ import annotations

import socket

# An idle connection asks its peer after 3 s, then every second. After 6 s without an acknowledgement it ends: less than
# half of a lease, so that leases are renewed on a new connection before they expire.
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 3,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 6000,  # ms
}
OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, name, value) for name, value in KEEPALIVE.items()),
]
"""The same, as (level, name, value)."""

# A peer may acknowledge and not answer: its process is stopped, or a proxy stands between. A late answer is an outage,
# which costs nothing. The largest call, 64 MiB, passes within this time at 110 Mbit/s.
ANSWER_S = 5.0

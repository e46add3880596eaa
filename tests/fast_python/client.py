"""``python -IS client.py SOCKET [ARGUMENT …]``: has the server execute a command, and ends as that command does.

Imports little, because it starts once per command. Signals that can be caught are passed on to the command. If this
process is killed, the server kills the command.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
NUMBER = 12
"""Bytes of each number that is sent."""


def main() -> None:
    """Send the request: the number of its bytes, then strings that end in NUL."""
    address, *arguments = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to pass them on to
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    environment = [name + b"=" + value for name, value in os.environb.items()]
    words = [os.getcwdb(), b"%d" % len(arguments), *map(os.fsencode, arguments), *environment]
    request = b"\0".join(words)
    socket.send_fds(server, [b"%*d" % (NUMBER, len(request))], [0, 1, 2])
    server.sendall(request)
    pid = receive_number(server)
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(
        wake
    )  # a handler of Python's would not run if the signal comes just before a call that blocks
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while not select.select([server.fileno()], [], [], 0)[0]:
        if select.select([server.fileno(), signals], [], [])[0] == [signals]:
            for received in os.read(signals, 64):
                os.kill(pid, received)
    code = receive_number(server)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive_number(server: socket.socket) -> int:
    received = server.recv(NUMBER, socket.MSG_WAITALL)
    if len(received) < NUMBER:
        sys.exit("the server of tests/fast_python has ended")
    return int(received)


if __name__ == "__main__":
    main()

"""The warm process: imports torch once, then forks as many peers as it is asked for.

Forking twenty peers from it takes seconds and shares its memory; starting twenty interpreters takes minutes.
It speaks newline-delimited JSON:

    ← {"run": "<folder>", "peers": [0, 1, 2]}
    → {"event": "ready"}                            imports are done
    → {"event": "started", "peer": 0, "pid": 123}
    → {"event": "exited", "peer": 0, "code": 0, "words": ""}    negative: killed by that signal;
                                                    words: why it failed, as it says itself

It plays no part in training. If whoever talks to it goes away, it waits for its children and ends; if it is
killed, they go on.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from setproctitle import setproctitle

from p2pfl.config import Run, load
from p2pfl.errors import P2pflError, in_words
from p2pfl.models import architecture
from p2pfl.rng import Streams
from p2pfl.runfolder import PeerId, RunFolder
from p2pfl.session import load_data, make_algorithm
from peers.runtime import Data, run_peer

Children = dict[int, tuple[PeerId, int]]
"""{process id: (peer, the file for its last words)}"""
MOST_WORDS = 4096
"""Bytes of a peer's last words."""


def serve() -> int:
    """Serve requests on stdin until it closes and all children have ended."""
    setproctitle("p2pfl warm")
    # Building an optimiser imports a good part of torch's compiler; better here once than in every peer.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    _say({"event": "ready"})
    children: Children = {}
    known: dict[tuple[Path, bytes], tuple[Run, Data]] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listening, pending = True, b""
    while listening or children:
        ready, _, _ = select.select([woken, *([0] if listening else [])], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if 0 in ready:
            chunk = os.read(0, 65536)
            listening = bool(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                _fork_all(json.loads(line), children, known, close=(woken, wake))
    return 0


def _fork_all(
    request: dict[str, Any],
    children: Children,
    known: dict[tuple[Path, bytes], tuple[Run, Data]],
    close: tuple[int, ...],
) -> None:
    """``known`` holds the run that was last asked for, by its run file: peers started again find it loaded."""
    try:
        folder = RunFolder.open(Path(request["run"]))
    except P2pflError as error:
        print(error, file=sys.stderr, flush=True)
        for peer in request["peers"]:
            _say({"event": "exited", "peer": peer, "code": 1, "words": str(error)})
        return
    setproctitle(f"p2pfl warm {folder.root}")
    file = folder.root, folder.run_file.read_bytes()
    run, data = known.get(file, (None, None))
    if run is None:
        try:
            run = load(folder.run_file)
            data = load_data(run)
            _import_what_peers_import(run, data)
            known.clear()
            known[file] = run, data
        except P2pflError as error:
            # Each peer will meet the same error and write it down where its user looks.
            print(error, file=sys.stderr)
            run, data = None, None
    gc.collect()
    gc.freeze()  # what is shared stays shared: no collector touches it in the children
    for peer in request["peers"]:
        # No pipe: peers outlive us, and we do not read before they have ended.
        words = os.memfd_create("last words")
        try:
            pid = os.fork()
        except OSError as error:
            os.close(words)
            _say({"event": "exited", "peer": peer, "code": 1, "words": f"cannot be forked: {error.strerror}"})
            continue
        if pid == 0:
            for descriptor in (*close, *(theirs for _, theirs in children.values())):
                os.close(descriptor)
            _become(folder, peer, run, data, words)
        children[pid] = peer, words
        _say({"event": "started", "peer": peer, "pid": pid})


def _import_what_peers_import(run: Run, data: Data) -> None:
    """Build one peer of each architecture and throw it away: its imports stay, and are shared."""
    first_of = {architecture(run.file.models.name, peer): peer for peer in reversed(range(run.peers))}
    for peer in first_of.values():
        make_algorithm(run, peer, data, torch.device("cpu"), Streams(run.seed, peer))


def _become(folder: RunFolder, peer: PeerId, run: Run | None, data: Data | None, words: int) -> None:
    """Turn this fresh fork into a peer, and never return."""
    code = 1

    def last_words(text: str) -> None:
        with suppress(OSError):
            os.pwrite(words, text.encode()[:MOST_WORDS], 0)

    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        detach(folder, peer)
        code = run_peer(folder, peer, run, data, last_words)
    except BaseException as error:
        traceback.print_exc()
        last_words(in_words(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the parent's exit handlers are not ours to run


def detach(folder: RunFolder, peer: PeerId) -> None:
    """Cut the ties to whoever started us: nothing to read, and output goes to the peer's own file, if it can be
    opened."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        output = os.open(folder.peer(peer).output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


def _reap(children: Children) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in children:
            peer, words = children.pop(pid)
            said = os.pread(words, MOST_WORDS, 0).decode(errors="replace")
            os.close(words)
            _say({"event": "exited", "peer": peer, "code": os.waitstatus_to_exitcode(status), "words": said})


def _say(event: dict[str, Any]) -> None:
    try:
        os.write(1, (json.dumps(event) + "\n").encode())
    except OSError:
        pass  # nobody listens any more; the children matter more

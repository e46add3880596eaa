"""One peer's life as a process: device, data, sockets, session, signals, exit code."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any, TextIO

from setproctitle import setproctitle

from p2pfl.config import Run, load
from p2pfl.data import Dataset, Share
from p2pfl.errors import HandshakeError, NetError, P2pflError, Unwritable, in_words
from p2pfl.keys import is_loopback
from p2pfl.memory import fitting
from p2pfl.peerlog import close_logger, details, peer_logger
from p2pfl.runfolder import PeerId, RunFolder, Status
from p2pfl.session import Session, Stopped, load_data
from p2pfl.simulate import deterministic
from peers.device import claim_device, slots_on
from peers.faults import Injector
from peers.health import Health
from peers.keys import read_keys
from peers.slots import HostSlot
from peers.zmqlink import Leaving, ZmqLink

Data = tuple[Dataset, Sequence[Share]]


def run_peer(
    folder: RunFolder,
    me: PeerId,
    run: Run | None = None,
    data: Data | None = None,
    last_words: Callable[[str], None] = lambda text: None,
    echo: TextIO | None = None,
) -> int:
    """Run peer ``me`` of the run in ``folder`` to its end. Returns the exit code: 0 finished or stopped, 1 failed, or
    Unwritable's.

    ``run`` and ``data`` may be handed over by a process that has loaded them already. ``last_words`` is told what
    went wrong, which is in the log and the status file too, if these can be written. ``echo`` gets what the log gets;
    then last words are only what could not be said there.
    """
    setproctitle(f"p2pfl peer {me} {folder.root}")
    place = folder.peer(me)
    try:
        log = peer_logger(me, place.log, echo)
    except Unwritable as error:
        last_words(str(error))
        return error.exit_code
    if not alone(log):
        log.error("another process is this peer already; not started a second time")
        close_logger(log)
        return 1

    def write_status(status: Status) -> None:
        with suppress(Unwritable):
            place.write_status(status)

    try:
        with stop_by_exception():
            place.clear_result()  # of an earlier process of this peer
            place.sweep()
            write_status(Status(me, os.getpid()))
            run = run or load(folder.run_file, environment=os.environ)
            data = data or load_data(run)
            return asyncio.run(_run(folder, me, run, data, log))
    except Stopped:
        if place.result() is None:
            log.info("stopped before the first round")
            write_status(Status(me, os.getpid(), "stopped"))
        return 0
    except Exception as error:
        if isinstance(error, P2pflError):
            log.error("%s", error)
        else:
            log.exception("peer %d failed", me)
        if echo is None:
            last_words(in_words(error))
        if place.result() is None:  # it failed before its session began, or could not write it
            write_status(Status(me, os.getpid(), "failed", error=in_words(error)))
        return error.exit_code if isinstance(error, Unwritable) else 1
    finally:
        close_logger(log)


async def _run(folder: RunFolder, me: PeerId, run: Run, data: Data, log: logging.Logger) -> int:
    allow_many_sockets()
    about = folder.about
    device = claim_device(run.file, me)
    count, place = slots_on(run.file, device)
    transport = run.file.transport
    with fitting(me, device, run.file):
        session = Session(
            run,
            me,
            about["id"],
            data,
            folder=folder.peer(me),
            device=device,
            patience=transport.patience,
            slot=HostSlot(folder.slots, count, place),
            log=log,
            pid=os.getpid(),
        )
        session.resume()
    keys = None
    if transport.keys is not None:
        keys = read_keys(transport.keys, me, run.peers, transport.public_keys)

    def how_it_does() -> dict[str, Any]:
        return {**asdict(session.status), "links_up": link.connected(), "links": len(session.endpoint.neighbors)}

    link = ZmqLink(
        session.endpoint,
        folder.addresses,
        transport,
        run.digest(),
        log,
        keys=keys,
        faults=run.file.chaos.link,
        health=Health(folder.peer(me).root, how_it_does, log),
    )
    session.endpoint.link = link
    session.faults = Injector(run, me, folder.peer(me), link.cut, log)
    with deterministic(strictly=device.type == "cpu"), stop_on_sigterm(session):
        await link.start()
        leaving: Leaving = "stopped"  # whatever happens: it is started again, and nobody should notice
        try:
            log.info(
                "peer %d of %d | %s, %s on %s | %d samples | %s",
                *(me, run.peers, run.algorithm.name, session.algorithm.model.name, device),
                *(len(session.algorithm.data.train), link.address),
                extra=details(
                    f"listens at {link.bound}",
                    *(["encrypted (CURVE)"] if keys is not None else []),
                    f"neighbours {_short(session.endpoint.neighbors)}",
                    f"process {os.getpid()}",
                ),
            )
            if keys is None and not is_loopback(transport.host):
                log.warning("insecure: whoever reaches %s can hear, change and forge what peers say", link.bound)
            result = await session.run()
            leaving = "finished"
            log.info("finished | accuracy %s | digest %s", _percent(result.accuracy), result.digest[:16])
        except (HandshakeError, NetError):
            leaving = "failed"  # it would only fail again: let nobody wait for it
            raise
        finally:
            await link.close(leaving)
    return 0


def alone(log: logging.Logger) -> bool:
    """Lock the log file for as long as it is open. False if another process of this peer has locked it."""
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            try:
                fcntl.flock(handler.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


@contextmanager
def stop_by_exception() -> Iterator[None]:
    """SIGTERM and SIGINT raise Stopped, wherever we are: there is nothing to save yet."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped

    with handling(stop):
        yield


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """``handler`` for SIGTERM and SIGINT inside, what was there before outside."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stop_on_sigterm(session: Session) -> Iterator[None]:
    """SIGTERM and SIGINT finish the batch, go back to the last completed round, checkpoint and end."""
    loop = asyncio.get_running_loop()

    def stop(signum: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes, also in the middle of an epoch, when the event loop does not turn.
        session.stop()
        loop.call_soon_threadsafe(session.interrupt)

    with handling(stop):
        yield


def allow_many_sockets() -> None:
    """A peer with a hundred neighbours needs more files than the usual soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _short(peers: Sequence[PeerId], most: int = 8) -> str:
    text = ", ".join(map(str, peers[:most])) or "none"
    return f"{text}, … ({len(peers)})" if len(peers) > most else text


def _percent(accuracy: float | None) -> str:
    return "—" if accuracy is None else f"{accuracy:.2%}"

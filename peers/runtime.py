"""Run one peer as a process: device, data, sockets, session, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from time import monotonic
from types import FrameType
from typing import Any, TextIO

from p2pfl import PeerId
from p2pfl.errors import (
    AlreadyRunning,
    Diverged,
    HandshakeError,
    NetError,
    P2pflError,
    PluginError,
    RunFolderError,
    WriteError,
    error_text,
)
from p2pfl.plugins.loading import logging_warnings
from p2pfl.process_title import set_title
from p2pfl.run_file.addresses import is_loopback
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import allow_many_files
from p2pfl.run_folder.folder import Phase, RunFolder, Status
from p2pfl.run_folder.peer_log import LogSettings, close_logger, details, lock_log, peer_logger
from p2pfl.session.body_files import FileStore, NeighborJournals
from p2pfl.session.build import RunData, frozen_digest, load_data
from p2pfl.session.child_processes import children_of_plugins
from p2pfl.session.determinism import deterministic
from p2pfl.session.free_memory import free_heap, keep_heap
from p2pfl.session.out_of_memory import memory_errors
from p2pfl.session.session import Runtime, Session, Stopped
from p2pfl.stop_signals import handling, stop_signals, waking
from peers.device import claim_device, slots_on
from peers.faults import Injector
from peers.health import Health
from peers.io_loop import Leaving
from peers.keys import read_keys
from peers.slots import HostSlot
from peers.sockets import Sockets
from peers.zmq_link import ZmqLink

NAMED = 8
"""Most neighbors that the log names at the start."""


def run_peer(
    folder: RunFolder,
    me: PeerId,
    run: Run | None = None,
    data: RunData | None = None,
    report_error: Callable[[str], None] = lambda text: None,
    echo: TextIO | None = None,
) -> int:
    """Run peer ``me`` of the run in ``folder`` to the end. Stop signals are handled, and no longer blocked.

    Args:
        run, data: given if the caller has already loaded them.
        report_error: called with the error that ended the peer. The log and the status file contain it too, if they
            can be written.
        echo: stream that receives the log lines too. ``report_error`` is then called only if the log cannot be
            opened.

    Returns:
        The exit code: 0 if finished or stopped, 1 or ``P2pflError.exit_code`` if failed.
    """
    set_title(f"p2pfl peer {me} {folder.root}")
    files = folder.peer(me)
    try:
        log = peer_logger(me, files.log, echo, _log_settings(folder, me))
    except WriteError as error:
        report_error(str(error))
        return error.exit_code
    try:
        if not lock_log(log):
            status = files.status()
            pid = status.pid if status else "unknown"
            raise AlreadyRunning(f"already running (process {pid}, perhaps on another host or in another container)")
    except (AlreadyRunning, WriteError) as error:
        log.error("%s", f"peer {me} is {error}; exiting" if isinstance(error, AlreadyRunning) else error)
        close_logger(log)
        if echo is None:
            report_error(str(error))
        return error.exit_code

    def write_status(phase: Phase, error: str = "") -> None:
        """Write what this peer does now; keep what it, or an earlier process, has achieved."""
        now = Status(me, os.getpid(), phase, error=error, since=monotonic())
        if (last := files.status()) is not None:
            kept = ["t", "rounds_done", "bytes_out", "bytes_in", "messages_out", "starts"]
            kept += ["accuracy", "masked_accuracy", "unmasked_accuracy", "tested_on", "skipped"]
            resumes = last.resumes_at_start() if phase == "starting" else last.resumes
            now = replace(now, resumes=resumes, **{name: getattr(last, name) for name in kept})
        with suppress(WriteError):
            files.write_status(now)

    try:
        with children_of_plugins(), stop_by_exception(), logging_warnings(log):
            files.clear_result()  # from an earlier process of this peer
            files.sweep()
            write_status("starting")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())  # blocked in forks of the warm process
            run = run or load(folder.run_file, environment=os.environ)
            data = data or load_data(run, folder.root, record=True)
            return asyncio.run(_run(folder, me, run, data, log))
    except Stopped:
        if files.result() is None:
            log.info("stopped before the first round")
            write_status("stopped")
        return 0
    except Exception as error:
        if isinstance(error, PluginError):
            log.error("%s", error, exc_info=error.__cause__)
        elif isinstance(error, P2pflError):
            log.error("%s", error)
        else:
            log.exception("peer %d failed", me)
        if echo is None:
            report_error(error_text(error))
        if files.result() is None:  # the peer failed before its session began, or could not write the result
            write_status("failed", error_text(error))
        return error.exit_code if isinstance(error, P2pflError) else 1
    finally:
        close_logger(log)


async def _run(folder: RunFolder, me: PeerId, run: Run, data: RunData, log: logging.Logger) -> int:
    allow_many_files()
    keep_heap()
    device = claim_device(run.file, me)
    slot = HostSlot(folder.slots, *slots_on(run.file, device))
    transport = run.file.transport
    store = FileStore(folder.peer(me).journal)
    with memory_errors(me, device, run.file):
        runtime = Runtime(device, transport.wait_policy, slot, log, alone=True, store=store)
        session = Session(run, me, folder.info["id"], data, folder.peer(me), runtime)
        frozen = frozen_digest(session.algorithm)
        session.resume()
    keys = None
    if transport.keys is not None:
        keys = read_keys(transport.keys, me, run.peers, transport.public_keys)

    def status() -> dict[str, Any]:
        return {**asdict(session.status), "links_up": link.connected(), "links": len(session.endpoint.neighbors)}

    journals = NeighborJournals(store.token, lambda peer: folder.peer(peer).journal)
    health = Health(folder.peer(me).root, status, log)
    world = Sockets(session.endpoint, folder.addresses, transport, log, journals, keys, health)
    link = ZmqLink(session.endpoint, world, transport, run.config_hash(frozen), log, run.file.chaos.link)
    session.endpoint.link = link
    session.faults = Injector(run, me, folder.peer(me), link.cut, log)
    with deterministic(strictly=device.type == "cpu"), stop_on_sigterm(session) as stopped:
        await link.start()
        leaving: Leaving = "stopped"  # also after an unexpected error: neighbors wait for a restart
        try:
            algorithm, more = session.algorithm, [f"listens at {link.bound}"]
            if keys is not None:
                more.append("encrypted (CURVE)")
            more += [f"neighbors {_short(session.endpoint.neighbors)}", f"process {os.getpid()}"]
            log.info(
                f"started peer={me}/{run.peers} algorithm={algorithm.name} model={algorithm.model.name} "
                f"device={device} samples={len(algorithm.data.train)} address={link.address}",
                extra=details(*more),
            )
            if keys is None and not is_loopback(transport.host):
                log.warning(
                    "insecure address=%s: without keys, anyone on the network can read and forge messages", link.bound
                )
            result = await session.run()
            leaving = "finished"
            if result.phase == "failed":
                raise Diverged(result.error)
            accuracy = "-" if result.accuracy is None else f"{result.accuracy:.4f}"
            log.info("finished accuracy=%s digest=%s", accuracy, result.digest[:16])
        except (HandshakeError, NetError):
            leaving = "failed"  # a restart would fail again: no neighbor should wait for this peer
            raise
        finally:
            await _close(link, leaving, stopped, log)
    return 0


async def _close(link: ZmqLink, leaving: Leaving, stopped: asyncio.Event, log: logging.Logger) -> None:
    """Close the link. If ``stopped``, a peer that has ended does not wait until its neighbors have its last messages.

    Then it leaves like a stopped peer: its neighbors wait for it, and get the messages when it is started again. They
    wait for a failed peer, whose restart would fail too, until they declare it dead.
    """
    free_heap()
    closing, stop = asyncio.ensure_future(link.close(leaving)), asyncio.ensure_future(stopped.wait())
    await asyncio.wait((closing, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if leaving != "stopped" and not closing.done():
        closing.cancel()
        await asyncio.wait((closing,))
        later = "; they get them when this peer is started again" if leaving == "finished" else ""
        log.info("stopped before all neighbors had the last messages%s", later)
        await link.close("stopped")
    else:
        await closing


def _log_settings(folder: RunFolder, me: PeerId) -> LogSettings:
    with suppress(RunFolderError):  # reported later, in the log
        return LogSettings.of(folder.info, me)
    return LogSettings()


@contextmanager
def stop_by_exception() -> Iterator[None]:
    """Raise Stopped on a stop signal, at any point: there is nothing to save yet."""

    asked = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise Stopped

    with handling(stop):
        try:
            yield
        except Exception as error:
            if asked:  # a library that calls Python may have replaced the exception
                raise Stopped from error
            raise


@contextmanager
def stop_on_sigterm(session: Session) -> Iterator[asyncio.Event]:
    """On SIGTERM, SIGINT and SIGHUP, finish the batch, roll back to the last state kept, checkpoint and exit.

    Yields an event that is set then: the session may have ended already.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def interrupt() -> None:
        session.interrupt()
        stopped.set()

    def stop(signum: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes, even while training blocks the event loop.
        session.stop()
        loop.call_soon_threadsafe(interrupt)

    with waking(loop), handling(stop):
        yield stopped


def _short(peers: Sequence[PeerId]) -> str:
    text = ", ".join(map(str, peers[:NAMED])) or "none"
    return f"{text}, … ({len(peers)})" if len(peers) > NAMED else text

"""``python -m launcher.backends.ray.driver FD``: does for the launcher what needs Ray.

The launcher does not import Ray, which has threads, as a process that forks must not, and prints to stdout.
Requests and replies are lines of JSON on a socket, one at a time:

    → {"do": "connect", "address": "10.0.0.1:6379" | null, "namespace": "p2pfl-…", "runtime_env": {…} | null}
    ← {"ok": [{"id": "…", "address": "10.0.0.2", "total": {"CPU": 8.0}, "free": {"CPU": 4.0}}, …]}      its nodes
    → {"do": "reserve", "bundles": [{"CPU": 4.0}, …], "wait": 60, "pinned": [], "setup_limit": 600}
    ← {"ok": ["10.0.0.2", …]}                                   the address of each bundle's node
    → {"do": "start", "bundle": 0, "command": […], "environment": {…}, "movable": true}      with a socket
    ← {"ok": null}                                              at once; problems end the socket's stream
    → {"do": "outcome", "bundle": 0}
    ← {"ok": "its node 10.0.0.2 has died"}                      why the stream has ended
    → {"do": "kill", "bundle": 0}
    → {"do": "close"}
    ← {"error": "<text>"}                                       instead of "ok"

A stream's bytes go to and come from a host process, which the actor of the bundle (host_actor.py) starts on its node.
If this process ends, e.g. with the launcher, the actors go on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import ray
from ray import cloudpickle  # what it pickles is for the cluster, which runs this user's code anyway
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.backends.ray import host_actor
from launcher.backends.ray.plan import ENVIRONMENT

GROUP = "p2pfl"
"""Name of the placement group in the namespace of the run."""
POLL = 5.0
"""Seconds of one request for output, at most."""
UNAVAILABLE = 90.0
"""Seconds that an actor may be unreachable until its host counts as lost; Ray notices a dead node earlier."""
WRITE = 900.0
"""Seconds that a host process may read no requests: while it loads the run, datasets may be downloaded."""
MOVE = 15.0
"""Seconds that Ray has to move the bundle of a dead node to another one, before a bundle that exists is used."""
START = 90.0
"""Seconds until an actor must have started."""
CONNECT = 10.0
"""Seconds to connect to the cluster."""
RETRY = 0.5
"""Seconds between two attempts."""


class Problem(Exception):
    """A request cannot be fulfilled."""


class Stream:
    """Relays between a socket of the launcher and a host process."""

    def __init__(self, driver: Driver, bundle: int, request: Mapping[str, Any], launcher: socket.socket) -> None:
        self.outcome = ""
        self.actor: Any = None
        self.started = False
        """Whether the actor has answered; otherwise Ray may still be preparing it."""
        self._driver = driver
        self._bundle = bundle
        self._request = request
        self._socket = launcher
        self._key = uuid.uuid4().hex
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.actor = self._driver.actor(self._bundle, movable=self._request["movable"])
            where = ray.get(self.actor.describe.remote(), timeout=START)
            self.started = True
            self._ask(where, "start", self._request["command"], self._request["environment"])
            threading.Thread(target=self._send, args=[where], daemon=True).start()
            self._receive(where)
        except Problem as error:
            self.outcome = str(error)
        except GetTimeoutError:
            self.outcome = f"Ray has not started its actor within {START:.0f} s"
        except (RayError, ValueError) as error:
            self.outcome = _text(error)
        finally:
            self._ended.set()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _ask(self, where: Mapping[str, Any], method: str, *arguments: Any) -> Any:
        """Call a method of the actor, which has answered before. Raises Problem, RayError."""
        try:
            return ray.get(getattr(self.actor, method).remote(self._key, *arguments), timeout=START)
        except GetTimeoutError as error:
            raise Problem(self._driver.why_lost(where, error)) from None

    def _send(self, where: Mapping[str, Any]) -> None:
        """Pass the launcher's requests on."""
        try:
            while chunk := self._socket.recv(1 << 16):
                if not ray.get(self.actor.write.remote(self._key, chunk), timeout=WRITE):
                    return
            ray.get(self.actor.close_requests.remote(self._key), timeout=UNAVAILABLE)
        except (GetTimeoutError, ActorUnavailableError) as error:
            # Nobody knows whether the host process got the request: it leaves its peers to a new one.
            self.outcome = self._driver.why_lost(where, error)
            self.actor.close_requests.remote(self._key)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        except (OSError, RayError):
            pass  # ``_receive`` finds out, or the launcher has closed the stream

    def _receive(self, where: Mapping[str, Any]) -> None:
        """Pass what the host process reports on, to its end."""
        start, reached = 0, monotonic()
        while not self.outcome:
            try:
                chunk = ray.get(self.actor.read.remote(self._key, start, POLL), timeout=UNAVAILABLE)
            except GetTimeoutError as error:
                raise Problem(self._driver.why_lost(where, error)) from None
            except RayActorError as error:
                if not isinstance(error, ActorUnavailableError) or monotonic() - reached > UNAVAILABLE:
                    raise Problem(self._driver.why_lost(where, error)) from None
                self._ended.wait(RETRY)
                continue
            reached = monotonic()
            if chunk == b"":
                self.outcome = self._ask(where, "outcome")
                return
            if chunk:
                try:
                    self._socket.sendall(chunk)
                except OSError:
                    return  # the launcher wants no more
                start += len(chunk)


class Driver:
    """The state of a connection to a cluster."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._places: dict[int, int] = {}
        """The bundle that each host uses."""
        self._resources: list[Mapping[str, float]] = []
        self._group: PlacementGroup | None = None
        self._is_new = False
        """Whether this process has made the group: other launchers' actors may be in it otherwise."""
        self._has_environment = False
        self._lock = threading.Lock()
        self._pause = threading.Event()
        cloudpickle.register_pickle_by_value(host_actor)

    # ---- requests --------------------------------------------------------------------------------------------

    def connect(self, address: str | None, namespace: str, runtime_env: Mapping[str, Any] | None) -> list[Any]:
        """Connect to the cluster and return its nodes."""
        self._has_environment = bool(runtime_env)
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            _reach(address)
            # For the whole job: only then does Ray send local folders and wheels to the nodes. Actors inherit it.
            environment = dict(runtime_env) if runtime_env else None
            ray.init(
                address or "auto",
                namespace=namespace,
                runtime_env=environment,
                log_to_driver=False,
                logging_level="error",
            )
        except ConnectionError as error:
            asked = f"at {address}" if address else "on this host, and $RAY_ADDRESS is not set"
            raise Problem(
                f"no Ray cluster {asked} ({_text(error)}); start one with `ray start --head`, let this host join it "
                "with `ray start --address=HOST:6379`, or give --option address=HOST:6379"
            ) from None
        except (RuntimeError, ValueError, TypeError, RayError) as error:  # another version of Ray, among others
            about = f" with this {ENVIRONMENT}" if runtime_env else ""
            raise Problem(f"cannot join the Ray cluster{about}: {_text(error)}") from None
        return self.nodes()

    def nodes(self) -> list[Any]:
        """Return the nodes that are alive."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            {
                "id": node["NodeID"],
                "address": node["NodeManagerAddress"],
                "total": _plain(node["Resources"]),
                "free": _plain(free.get(node["NodeID"], {})),
            }
            for node in ray.nodes()
            if node["Alive"]
        ]

    def reserve(
        self,
        bundles: Sequence[Mapping[str, float]],
        wait: float,
        pinned: Sequence[str],
        setup_limit: float,
    ) -> list[str]:
        """Reserve the bundles, unless that was done before, and set up the runtime environment on their nodes.

        Args:
            wait: seconds until they must be reserved.
            pinned: addresses of the nodes to use, if possible.
            setup_limit: seconds until the runtime environment must be set up.
        """
        self._resources = list(bundles)
        try:
            self._group = get_placement_group(GROUP)
        except ValueError:
            on = [
                {**bundle, f"node:{address}": 0.001}
                for bundle, address in zip(bundles, pinned, strict=len(pinned) > 0)
            ]
            for asked, seconds in ((on, min(wait, 10.0)), (list(bundles), wait)):
                if not asked:
                    continue
                self._group = placement_group(asked, strategy="SPREAD", name=GROUP, lifetime="detached")
                self._is_new = True
                if self._group.wait(seconds):
                    break
                remove_placement_group(self._group)
                self._group = None
        if self._group is None:
            raise Problem(f"not reserved within {wait:.0f} s")
        addresses = {node["id"]: node["address"] for node in self.nodes()}
        found = [addresses.get(self._node(bundle), "") for bundle in range(len(bundles))]
        if self._has_environment and self._is_new:
            self._set_up(found, setup_limit)
        return found

    def _set_up(self, addresses: Sequence[str], limit: float) -> None:
        """Set up the runtime environment on each node, which may take minutes: longer than an actor may take."""
        tasks = [
            ray.remote(lambda: None)
            .options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
            for bundle in range(len(addresses))
        ]
        end = monotonic() + limit
        for address, reference in zip(addresses, tasks, strict=True):
            try:
                ray.get(reference, timeout=max(0.0, end - monotonic()))
            except GetTimeoutError:
                raise Problem(f"node {address}: {ENVIRONMENT} not set up within {limit:.0f} s") from None
            except RayError as error:
                raise Problem(f"node {address}: {ENVIRONMENT} cannot be set up: {_reason(error)}") from None

    def start(self, launcher: socket.socket, bundle: int, **request: Any) -> None:
        """Start a host process in a bundle."""
        self._streams[bundle] = Stream(self, bundle, request, launcher)

    def outcome(self, bundle: int) -> str:
        return self._streams[bundle].outcome

    def kill(self, bundle: int) -> None:
        """End the actor of a bundle, and what it has started."""
        stream = self._streams.pop(bundle, None)
        if stream is not None and stream.actor is not None:
            with suppress(RayError):
                ray.kill(stream.actor)

    def close(self) -> None:
        """Give back what is reserved, unless peers run."""
        kept = [stream for stream in self._streams.values() if stream.actor is not None]
        if self._group is not None and not any(stream.started and _is_busy(stream.actor) for stream in kept):
            for stream in kept:
                with suppress(RayError):
                    ray.kill(stream.actor)
            remove_placement_group(self._group)
            self._group = None

    def abandon(self) -> None:
        """Give back what is reserved, if the launcher has ended before it could start a host process."""
        if not self._streams and self._is_new:
            self.close()

    # ---- actors ----------------------------------------------------------------------------------------------

    def actor(self, bundle: int, *, movable: bool) -> Any:
        """Return the running actor of a host, or a new actor; on another node if the host's node has died."""
        name = f"host-{bundle}"
        with suppress(ValueError):
            actor = ray.get_actor(name)
            try:
                ray.get(actor.describe.remote(), timeout=POLL)
                return actor
            except (RayError, GetTimeoutError):
                with suppress(RayError):
                    ray.kill(actor)
        where = self._usable(bundle, movable=movable)
        assert self._group is not None
        options: dict[str, Any] = {
            "name": name,
            "lifetime": "detached",
            "max_concurrency": 16,
            "num_cpus": 0,  # the bundle has reserved what its processes use
            "num_gpus": self._resources[bundle].get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, where),
        }
        end = monotonic() + START
        while True:
            try:
                return ray.remote(host_actor.HostActor).options(**options).remote()
            except ValueError:  # the name is taken until Ray has noticed the end of its predecessor
                if monotonic() > end:
                    raise
                self._pause.wait(RETRY)

    def _usable(self, bundle: int, *, movable: bool) -> int:
        """Wait until the bundle is on a node that is alive. If Ray finds none, return the least used one."""
        end = monotonic() + MOVE
        while not self._is_alive(self._node(bundle)):
            if monotonic() > end:
                with self._lock:
                    used = list(self._places.values())
                    others = [other for other in range(len(self._resources)) if self._is_alive(self._node(other))]
                    if movable and others:
                        self._places[bundle] = min(others, key=used.count)
                        return self._places[bundle]
                raise Problem(f"its node has died, and no other node has room for {dict(self._resources[bundle])}")
            self._pause.wait(RETRY)
        self._places[bundle] = bundle
        return bundle

    def _node(self, bundle: int) -> str:
        found: str = placement_group_table(self._group).get("bundles_to_node_id", {}).get(bundle, "")
        return found

    def _is_alive(self, node: str) -> bool:
        return any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())

    def why_lost(self, where: Mapping[str, Any], error: Exception) -> str:
        """Say why an actor is lost."""
        if not self._is_alive(where["node"]):
            return f"its node {where['address']} has died"
        if isinstance(error, GetTimeoutError):
            return f"its Ray actor on {where['address']} does not answer"
        return f"its Ray actor on {where['address']} has ended: {_text(error)}"


def _reach(address: str | None) -> None:
    """Raise ConnectionError if nothing listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
        except OSError as error:
            raise ConnectionError(error.strerror or str(error)) from None


def _is_busy(actor: Any) -> bool:
    try:
        return bool(ray.get(actor.busy.remote(), timeout=POLL))
    except GetTimeoutError:
        return True
    except RayError:
        return False


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources[name] for name in ("CPU", "GPU", "memory") if name in resources}


def _reason(error: BaseException) -> str:
    """Return why a runtime environment was not set up: what the installer has reported, or the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join([line for line in lines if line.startswith("ERROR:")] or lines[-1:]) or type(error).__name__


def _text(error: BaseException) -> str:
    """Return the most informative line of an error of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if line.startswith(("The actor died", "ModuleNotFoundError", "Version mismatch"))
    ]
    return (telling or lines or [type(error).__name__])[0]


def main() -> None:
    """Serve the launcher until it closes the socket."""
    driver = Driver()
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])), driver)
    finally:
        driver.abandon()


def _serve(connection: socket.socket, driver: Driver) -> None:
    pending, sockets = b"", list[socket.socket]()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            if not data:
                return
            pending += data
            sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if not pending.endswith(b"\n"):
                continue
            request, pending = json.loads(pending), b""
            passed, sockets = sockets, []
            try:
                reply = {"ok": getattr(driver, request.pop("do"))(*passed, **request)}
            except (Problem, RayError) as error:
                reply = {"error": _text(error)}
            connection.sendall((json.dumps(reply) + "\n").encode())
        except ConnectionError:  # the launcher has ended
            return


if __name__ == "__main__":
    main()

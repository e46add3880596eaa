"""``p2pfl launch FILE --backend ray``: the nodes of a Ray cluster, one bundle of a placement group each.

This process does not import Ray. The driver process (ray_driver.py) does, and relays between the launcher and the
host processes, which actors (ray_actor.py) start on the nodes. How peers are divided among nodes: ray_plan.py.

A node that dies has its peers restarted on another: Ray moves the node's bundle to a node with room, or, if only CPUs
are reserved, they share the bundle of another host of the run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.backends.hosts import BackendOptions, Host, HostStream
from launcher.backends.ray_plan import WAIT, Bundle, Demand, Node, RayOptions, amounts, plan
from launcher.child import in_child
from launcher.errors import LaunchError
from p2pfl.errors import MissingExtra

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

NAME = "ray-{}"
"""Name of the host of a bundle."""


class Driver:
    """The driver process. Starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._errors = os.memfd_create("p2pfl ray")

    def call(self, do: str, passed: socket.socket | None = None, /, **fields: Any) -> Any:
        """Have the process do something; ``passed`` is a socket for it. Raises LaunchError."""
        connection = self._start() if self._socket is None else self._socket
        descriptors = [] if passed is None else [passed.fileno()]
        reply = b""
        try:
            line = (json.dumps({"do": do, **fields}) + "\n").encode()
            sent = socket.send_fds(connection, [line], descriptors)
            connection.sendall(line[sent:])
            while not reply.endswith(b"\n"):
                if not (chunk := connection.recv(1 << 16)):
                    raise LaunchError(f"the Ray driver process has ended: {self._output()}")
                reply += chunk
        except OSError as error:
            raise LaunchError(f"the Ray driver process has ended: {error.strerror}: {self._output()}") from None
        answer = json.loads(reply)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer["ok"]

    def _start(self) -> socket.socket:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("ray", "ray", "--backend ray")
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.backends.ray_driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C reaches the launcher only
                env={"RAY_DISABLE_IMPORT_WARNING": "1", **os.environ},
            )
        return self._socket

    def _output(self) -> str:
        text = os.pread(self._errors, 1 << 16, 0).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return "; ".join(lines[-3:]) or "(no output)"

    def close(self) -> None:
        """End the process."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._socket = None
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass
class Ray:
    """Starts host processes on the nodes of a Ray cluster.

    Attributes:
        demand: what the peers need; None for a run that was launched before.
        namespace: of the run's actors and placement group.
        bundles: what each host reserves.
        nodes: addresses of their nodes at the start of the run.
    """

    options: RayOptions
    demand: Demand | None = None
    namespace: str = ""
    bundles: list[dict[str, float]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    name = "ray"

    def __post_init__(self) -> None:
        self._driver = Driver()
        self._connected = False

    def hosts(self) -> list[Host]:
        """Divide the peers among the nodes, and reserve what they need. Raises LaunchError."""
        if self.demand is None:
            return []  # as they were
        try:
            nodes = self._connect()
            bundles = self._plan(nodes)
            self.bundles = [dict(bundle.resources) for bundle in bundles]
            self._reserve()
        except BaseException:
            self._driver.close()
            raise
        environment = {} if self.options.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        return [
            Host(NAME.format(number), peers=bundle.peers, slots=bundle.slots, environment=environment)
            for number, bundle in enumerate(bundles)
        ]

    def _plan(self, nodes: Sequence[Node]) -> list[Bundle]:
        assert self.demand is not None
        try:
            return plan(self.demand, self.options, nodes)
        except LaunchError:
            if self.options.wait is None:
                raise
            if self.options.hosts is None:
                raise LaunchError(
                    "--ray wait= needs --ray hosts=N too: nodes that do not exist yet get equal parts"
                ) from None
            room = {"CPU": float("inf"), "GPU": float("inf"), "memory": float("inf")}
            needs_cpu = self.options.cpus is None and not self.options.gpus
            if needs_cpu:  # what is free is unknown
                room["CPU"] = 1.0
            return plan(self.demand, self.options, [Node(str(i), "?", room, room) for i in range(self.options.hosts)])

    def _connect(self) -> list[Node]:
        runtime_env = self.options.runtime_env
        found = self._driver.call(
            "connect", address=self.options.address, namespace=self.namespace, runtime_env=runtime_env
        )
        self._connected = True
        return [Node(**node) for node in found]

    def _reserve(self) -> None:
        wait = WAIT if self.options.wait is None else self.options.wait
        try:
            self.nodes = self._driver.call("reserve", bundles=self.bundles, wait=wait, pinned=self.nodes)
        except LaunchError as error:
            nodes = [Node(**node) for node in self._driver.call("nodes")]
            asked = "; ".join(f"{NAME.format(number)}: {amounts(each)}" for number, each in enumerate(self.bundles))
            free = "; ".join(f"{node.address}: {amounts(node.free)} of {amounts(node.total)}" for node in nodes)
            raise LaunchError(
                f"Ray: {error}: {asked}; free now: {free or 'no node is alive'}; other jobs may have taken it: try "
                "later, or wait longer with --ray wait=SECONDS"
            ) from None

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        if not self._connected:  # a run that was launched before
            self._connect()
            self._reserve()
        bundle = int(host.name.rpartition("-")[2])
        python = list(command).index(host.python)
        ours, theirs = socket.socketpair()
        with theirs:
            self._driver.call(
                "start",
                theirs,
                bundle=bundle,
                command=list(command)[python:],
                environment=dict(host.environment),
                movable=self.bundles[bundle].keys() <= {"CPU"},
            )
        descriptor = ours.detach()
        return HostStream(
            descriptor,
            descriptor,
            lambda: str(self._driver.call("outcome", bundle=bundle)),
            lambda: self._driver.call("kill", bundle=bundle),
        )

    def saved(self) -> dict[str, Any]:
        """Return what ``restore`` needs."""
        return {
            "options": self.options.to_dict(),
            "namespace": self.namespace,
            "bundles": self.bundles,
            "nodes": self.nodes,
        }

    def close(self) -> None:
        """Give back what is reserved, unless peers run."""
        try:
            if self._connected:
                self._driver.call("close")
        finally:
            self._driver.close()


def make(options: BackendOptions) -> Ray:
    """Find out what the run needs. Raises LaunchError, RunFileError."""
    asked = RayOptions.parse(options.ray)
    assert options.request is not None
    request = options.request
    demand = in_child(lambda: _demand(request.check(), asked))
    return Ray(asked, demand, namespace=f"p2pfl-{secrets.token_hex(8)}")


def _demand(run: Run, options: RayOptions) -> Demand:
    device = run.file.device
    if device == "cuda" and not options.gpus:
        problem = "cuda, but no GPUs are asked for: add e.g. --ray gpus=0.25, a quarter of a GPU per peer"
        raise run.error_at("device", LaunchError(problem))
    if device == "cpu" and options.gpus:
        raise LaunchError(f"--ray gpus={options.gpus:g}: the run file says `device: cpu`; leave out one of the two")
    return Demand(run.peers, run.file.threads, run.file.slots)


def restore(saved: Mapping[str, Any]) -> Ray:
    """Make the backend of a run that was launched before."""
    return Ray(
        RayOptions(**saved["options"]),
        namespace=saved["namespace"],
        bundles=[dict(bundle) for bundle in saved["bundles"]],
        nodes=list(saved["nodes"]),
    )

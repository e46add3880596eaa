"""``p2pfl launch FILE --backend ray``: the nodes of a Ray cluster, one bundle of a placement group each.

This process does not import Ray. The driver process (driver.py) does, and relays between the launcher and the
host processes, which actors (host_actor.py) start on the nodes. How peers are divided among nodes: plan.py.

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from launcher.backends.hosts import BackendOptions, Host, HostStream, last_lines
from launcher.backends.ray.plan import ENVIRONMENT, WAIT, Bundle, Demand, Node, RayOptions, amounts, plan
from launcher.child import in_child
from launcher.descriptors import memory_file
from launcher.errors import LaunchError
from p2pfl.errors import MissingExtra

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

NAME = "ray-{}"
"""Name of the host of a bundle."""
ANSWER = 120.0
"""Seconds until the driver must have answered. Ray itself gives up a lost head node after 60 s."""


class Driver:
    """The driver process. Starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._errors = memory_file("p2pfl ray")

    @property
    def running(self) -> bool:
        return self._socket is not None

    def call(
        self, do: str, passed: socket.socket | None = None, /, *, limit: float | None = None, **fields: Any
    ) -> Any:
        """Have the process do something, and return the answer. Raises LaunchError; the process may have ended then.

        Args:
            passed: a socket for it.
            limit: seconds until it must have answered; default: ANSWER.
        """
        limit = ANSWER if limit is None else limit
        connection = self._start() if self._socket is None else self._socket
        descriptors = [] if passed is None else [passed.fileno()]
        reply = b""
        end = time.monotonic() + limit
        try:
            line = (json.dumps({"do": do, **fields}) + "\n").encode()
            connection.settimeout(limit)
            sent = socket.send_fds(connection, [line], descriptors)
            connection.sendall(line[sent:])
            while not reply.endswith(b"\n"):
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (chunk := connection.recv(1 << 16)):
                    raise self._ended("has ended")
                reply += chunk
        except TimeoutError:
            raise self._ended(f"did not answer {do!r} within {limit:.0f} s, and was ended") from None
        except OSError as error:
            raise self._ended(f"has ended: {error.strerror}") from None
        answer = json.loads(reply)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer["ok"]

    def _ended(self, what: str) -> LaunchError:
        """End the process, whose answers would be out of step, and return the error."""
        self.close(0.0)
        return LaunchError(f"the Ray driver process {what}: {self.output()}")

    def _start(self) -> socket.socket:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("ray", "ray", "--backend ray")
        self._socket, theirs = socket.socketpair()
        with theirs:
            os.ftruncate(self._errors, 0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.backends.ray.driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C reaches the launcher only
                env={"RAY_DISABLE_IMPORT_WARNING": "1", **os.environ},
            )
        return self._socket

    def output(self) -> str:
        return last_lines(self._errors) or "(no output)"

    def close(self, timeout: float = 10.0) -> None:
        """End the process; kill it after ``timeout`` seconds."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._socket = None
            try:
                self._process.wait(timeout)
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
    reads: ClassVar = ("--option",)

    def __post_init__(self) -> None:
        self._driver = Driver()

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        """Find out what the run needs. Raises LaunchError, RunFileError."""
        asked = RayOptions.parse(options.settings)
        assert options.request is not None
        request = options.request
        demand = in_child(lambda: _demand(request.check(), asked))
        return cls(asked, demand, namespace=f"p2pfl-{secrets.token_hex(8)}")

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> Self:
        """Make the backend of a run that was launched before."""
        return cls(
            RayOptions(**saved["options"]),
            namespace=saved["namespace"],
            bundles=[dict(bundle) for bundle in saved["bundles"]],
            nodes=list(saved["nodes"]),
        )

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
                    "--option wait= needs --option hosts=N too: nodes that do not exist yet get equal parts"
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
        return [Node(**node) for node in found]

    def _reserve(self) -> None:
        wait = WAIT if self.options.wait is None else self.options.wait
        limit = wait + ANSWER + self.options.setup_limit
        try:
            self.nodes = self._driver.call(
                "reserve",
                limit=limit,
                bundles=self.bundles,
                wait=wait,
                pinned=self.nodes,
                setup_limit=self.options.setup_limit,
            )
        except LaunchError as error:
            if not self._driver.running or ENVIRONMENT in str(error):
                raise
            nodes = [Node(**node) for node in self._driver.call("nodes")]
            asked = "; ".join(f"{NAME.format(number)}: {amounts(each)}" for number, each in enumerate(self.bundles))
            free = "; ".join(f"{node.address}: {amounts(node.free)} of {amounts(node.total)}" for node in nodes)
            raise LaunchError(
                f"Ray: {error}: {asked}; free now: {free or 'no node is alive'}; other jobs may have taken it: try "
                "later, or wait longer with --option wait=SECONDS"
            ) from None

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        if not self._driver.running:  # a run that was launched before, or the driver has ended
            self._connect()
            self._reserve()
        bundle = int(host.name.rpartition("-")[2])
        python = list(command).index(host.python)
        ours, theirs = socket.socketpair()
        with theirs:
            self._call(
                bundle,
                "start",
                theirs,
                command=list(command)[python:],
                environment=dict(host.environment),
                movable=self.bundles[bundle].keys() <= {"CPU"},
            )
        descriptor = ours.detach()
        return HostStream(
            descriptor,
            descriptor,
            lambda: self._tell(bundle, "outcome"),
            lambda: self._tell(bundle, "kill"),
        )

    def _call(self, bundle: int, do: str, passed: socket.socket | None = None, /, **fields: Any) -> Any:
        """Have the driver do something on the node of a bundle. Raises LaunchError, which names the node."""
        try:
            return self._driver.call(do, passed, bundle=bundle, **fields)
        except LaunchError as error:
            raise LaunchError(f"node {self.nodes[bundle] or '?'}: {error}") from None

    def _tell(self, bundle: int, do: str) -> str:
        """The same for a stream that has ended, whose end must not be the launcher's."""
        if not self._driver.running:
            return f"the Ray driver process has ended: {self._driver.output()}"
        try:
            return str(self._call(bundle, do))
        except LaunchError as error:
            return str(error)

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
            if self._driver.running:
                self._driver.call("close")
        finally:
            self._driver.close()


def _demand(run: Run, options: RayOptions) -> Demand:
    device = run.file.device
    if device == "cuda" and not options.gpus:
        problem = "cuda, but no GPUs are asked for: add e.g. --option gpus=0.25, a quarter of a GPU per peer"
        raise run.error_at("device", LaunchError(problem))
    if device == "cpu" and options.gpus:
        raise LaunchError(
            f"--option gpus={options.gpus:g}: the run file says `device: cpu`; leave out one of the two"
        )
    return Demand(run.peers, run.file.threads, run.file.slots)

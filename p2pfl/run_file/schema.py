"""The sections and keys of a run file, with their types, ranges and defaults."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from p2pfl import MAX_PEERS, installed
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.models import MODELS, Group
from p2pfl.models.import_path import ImportPath, parse, portable_name
from p2pfl.options import Section, unknown
from p2pfl.paths import ExpandedPath, LocalPath, Storage, base_of
from p2pfl.run_file import addresses
from p2pfl.run_file.addresses import LAST_PORT, AddressBook
from p2pfl.run_file.faults import Chaos
from p2pfl.run_file.time import Time

DEFAULT = "tiny4"
"""The models of a run file that names none."""


class Named(BaseModel):
    """A named thing with parameters: ``ring``, or ``{name: regular, degree: 4}``."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @staticmethod
    def from_value(value: Any) -> Any:
        """Expand the short form, a name alone. Raises ValueError if it is neither a name nor a mapping."""
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping | BaseModel):
            raise ValueError("should be a name, or a mapping with a name and its parameters")
        return value


def _rule(value: Any) -> Any:
    """Expand the short forms: a list of rules, or a name alone."""
    return {"name": "list", "rules": value} if isinstance(value, list | tuple) else Named.from_value(value)


def from_name(value: Any) -> Any:
    """Expand the short form of a section, its name alone."""
    return {"name": value} if isinstance(value, str) else value


def _with_string_keys(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value


def _run_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("should start with a letter or digit and contain only letters, digits, '.', '_' and '-'")
    return value


class PluginEntry(Section):
    """A plug-in: a file, or a module beside the run file or installed; see docs/guide/plugins.md."""

    name: str
    """Path of a .py file, or name of a module."""
    sha256: str | None = None
    """Hash of its sources, in the run file of a run folder: other sources are refused."""
    version: str | None = None
    """Version of the installed package, in the run file of a run folder."""


ALL = "all"
"""In place of a kind of message: all kinds that are not listed."""


def _by_kind(value: Any) -> Any:
    """Expand the short form of ``codec``: one for all kinds."""
    if isinstance(value, Mapping) and "name" not in value:
        return {kind: Named.from_value(codec) for kind, codec in value.items()}
    return {ALL: Named.from_value(value)}


class Attack(Named):
    """What some peers do wrong, on purpose."""

    peers: tuple[NonNegativeInt, ...] | dict[Literal["fraction"], Annotated[float, Field(gt=0.0, le=1.0)]]
    """The peers that attack, or ``{fraction: 0.2}`` of all, drawn from the run's seed."""
    first: NonNegativeInt = Field(default=0, alias="from")
    """First round of the attack."""
    messages: tuple[str, ...] = ()
    """Kinds of messages that it changes; default: all."""


class Data(Section):
    """What the peers learn from."""

    dataset: Named
    """Dataset, e.g. digits, mnist, fashion-mnist, table."""
    partition: Named = Named(name="iid")
    """How samples are divided among the peers."""
    augment: Named = Named(name="none")
    """Augmentation of training images; methods that use two views apply it twice."""
    root: LocalPath | None = None
    """Folder with the dataset's files; default: $P2PFL_DATA, else a folder in the user's cache."""
    download: bool = True
    """Download missing files."""

    _short = field_validator("dataset", "partition", "augment", mode="before")(Named.from_value)


def _paths_from_base(value: Any, info: ValidationInfo) -> Any:
    """Make paths of files beside the run file absolute: peers have other working directories.

    A string counts as a path if it has a dot or a slash, and if there is such a file or folder.
    """
    base = base_of(info)
    if isinstance(value, str) and base is not None and {".", "/"} & set(value):
        path = base.resolve() / value
        return str(path) if not os.path.isabs(value) and os.path.exists(path) else value
    if isinstance(value, list | tuple):
        return type(value)(_paths_from_base(item, info) for item in value)
    if isinstance(value, dict):
        return {key: _paths_from_base(item, info) for key, item in value.items()}
    return value


def _paths_in_name_from_base(name: str | None, info: ValidationInfo) -> str | None:
    found = parse(name or "")
    return name if found is None else replace(found, arguments=_paths_from_base(found.arguments, info)).name


Args = Annotated[dict[str, Any], AfterValidator(_paths_from_base)]
ModelName = Annotated[str | None, AfterValidator(_paths_in_name_from_base)]


class Architecture(Section):
    """A network: a name, or a module to import."""

    name: ModelName = None
    """One that ``p2pfl models`` lists, or an import path such as my_nets.Net(width=32)."""
    module: str | None = None
    """In place of a name: import path of a torch.nn.Module, e.g. my_nets.Net, beside the run file or installed."""
    args: Args = Field(default={})
    """Keyword arguments of the module."""
    head: str | None = None
    """Attribute of the module that is its head; default: its last linear layer."""

    @model_validator(mode="after")
    def _importable(self) -> Self:
        if self.module is None and (self.args or self.head is not None):
            raise ValueError("args and head need a module")
        if self.module is not None and parse(self.text) is None:
            raise ValueError(f"{self.module!r} is not the import path of a class; expected e.g. my_nets.Net")
        return self

    @property
    def text(self) -> str:
        """The normal form of the name or of the import path."""
        if self.module is not None:
            return ImportPath(self.module, self.args, self.head).name
        found = parse(self.name or DEFAULT)
        return (self.name or DEFAULT) if found is None else found.name


class Member(Architecture):
    """An architecture of a group: either ``name`` or ``module`` is set."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.module is None):
            raise ValueError("set either name or module")
        return self


class Models(Architecture):
    """Which networks the peers train: peer m gets member m mod len(group) of the group."""

    name: ModelName = None
    """A group, by default tiny4, or one architecture for all peers; ``p2pfl models`` lists them."""
    members: tuple[Annotated[Member, BeforeValidator(from_name)], ...] = ()
    """In place of a name: a group of names and modules."""
    features: PositiveInt | None = None
    """Width d of the feature vector; default: the group's, or else the width of each backbone."""

    @staticmethod
    def from_value(value: Any) -> Any:
        """Expand the short forms: a name, or a list of members."""
        return {"members": value} if isinstance(value, list | tuple) else Named.from_value(value)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is not None) + (self.module is not None) + bool(self.members) > 1:
            raise ValueError("set only one of name, module and members")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """The name of the group, or the names of the members."""
        return tuple(member.text for member in self.members) or (self.text,)

    @property
    def key(self) -> str:
        """The key that selects the models, for errors."""
        return f"models.{'members' if self.members else 'name' if self.module is None else 'module'}"

    @property
    def title(self) -> str:
        return ", ".join(self.texts)

    @property
    def group(self) -> Group:
        """The group of architectures. Raises OptionErrors if a name is unknown."""
        if not self.members:
            return MODELS.find(self.texts[0])
        widths = {MODELS.find(text).features for text in self.texts}
        return Group(self.texts, widths.pop() if len(widths) == 1 else None)

    def resolved(self, *, portable: bool = False) -> dict[str, Any]:
        """The section as written to a resolved run file; ``portable`` as for ``Run.resolved``."""
        texts = list(map(portable_name, self.texts) if portable else self.texts)
        given = {"members": texts} if self.members else {"name": texts[0]}
        return {**given, "features": self.features}


class Transport(Section):
    """How peers connect to each other, and how long they wait."""

    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 or "::" binds all interfaces."""
    port: Annotated[int, Field(ge=1, le=LAST_PORT)] | None = None
    """Peer i binds port ``port`` + i; default: a free port that the system chooses."""
    address: str | None = None
    """Address to connect to, if it is not the bound one, e.g. tcp://peer-{id}:{port}; see run_file/addresses.py."""
    hosts: Annotated[dict[str, str], BeforeValidator(_with_string_keys)] = Field(default={})
    """{peer or range of peers: host or address template}; overrides ``address`` for these peers."""
    keys: LocalPath | None = None
    """Folder with the keys that ``p2pfl keys new`` creates. Encrypts all messages, and accepts connections only from
    neighbors, each authenticated by its key. Required if ``host`` is reachable from other hosts."""
    public_keys: dict[NonNegativeInt, str] | None = None
    """Public keys by peer, 64 hex digits each; default: as in public.yaml in ``keys``."""
    insecure: bool = False
    """Allow a network without keys: anyone on it can read and change messages, and impersonate peers."""
    deadline: PositiveFloat = 600.0
    """Maximum seconds of one wait for a neighbor's message while its link is up or not yet established."""
    adaptive: PositiveFloat | None = None
    """Also end a wait after this factor times the median duration of the last ten rounds, but not before 1 s."""
    quorum: float = Field(default=0.0, ge=0.0, le=1.0)
    """The deadline ends a wait only if at least this fraction of the awaited, still connected neighbors has sent;
    otherwise the wait continues until that many have, for at most ``give_up`` seconds more."""
    give_up: PositiveFloat = 60.0
    """Seconds to wait for a neighbor to reconnect after its link was lost."""
    queue: PositiveInt = 64
    """Messages that a neighbor may have left to read before a sender waits for it, for at most ``deadline``
    seconds."""
    max_message: PositiveInt = 1 << 30
    """Maximum bytes of a message's body. A peer that would send a larger one fails; use one value for all peers."""
    same_host: bool = True
    """Neighbors on the same host, with the same user and run folder, read each other's messages from files instead
    of over TCP. Results and byte counts are the same."""

    @property
    def wait_policy(self) -> WaitPolicy:
        return WaitPolicy(self.deadline, self.adaptive, self.quorum, self.give_up)

    def book(self, peers: int) -> AddressBook:
        """The addresses of the run's ``peers`` peers."""
        return addresses.book(peers, self.port, self.address, self.hosts)


class Gpu(Section):
    """How peers share the GPUs of a host; peer i uses GPU i mod n."""

    peers_per_gpu: PositiveInt | None = None
    """Peers that may compute on one GPU at the same time; default: cores / threads / GPUs, since launching their
    kernels takes cores."""
    memory_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the GPU's memory that one peer may allocate; default: 1 / (peers placed on that GPU)."""
    mps: bool = False
    """Run the peers under NVIDIA's Multi-Process Service, so that their kernels overlap."""
    cuda_graphs: bool = False
    """Launch the forward and backward pass of a batch as one CUDA graph if that has the bits of the eager pass."""


def _installed_tracker(name: str) -> str:
    if name not in (known := installed.names(installed.TRACKERS)):
        raise ValueError(unknown(name, known))
    return name


class TrackEntry(Section):
    """Where to pass the records of a run on while it runs; see docs/tracking.md."""

    name: Annotated[str, AfterValidator(_installed_tracker)]
    """The tracker: tensorboard, wandb, mlflow, or one that another installed package provides."""
    pooled: bool = False
    """One run of the tracker for all peers, in place of one for each peer and one for their mean."""
    project: str | None = None
    """W&B project or MLflow experiment; default: the name of the run file."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "tensorboard" and self.project is not None:
            raise ValueError("tensorboard has no projects; remove project")
        return self


def _distinct(trackers: tuple[TrackEntry, ...]) -> tuple[TrackEntry, ...]:
    names = [tracker.name for tracker in trackers]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"list each tracker once; repeated: {', '.join(repeated)}")
    return trackers


class Synchrony(Section):
    """Which messages of its neighbors a round takes: either ``name`` or ``staleness`` is set."""

    name: Literal["rounds", "none"] | None = None
    """rounds: those of the same round; none: the newest that have arrived, if any."""
    staleness: NonNegativeInt | None = None
    """s: of each neighbor the newest of at most s rounds before or after, for which it waits."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.staleness is None):
            raise ValueError("should be rounds, none, or a mapping with staleness")
        return self

    @property
    def bound(self) -> float | None:
        """Rounds by which messages may be older or newer, infinite for ``none``; None: rounds take their own."""
        return {"rounds": None, "none": math.inf}[self.name] if self.name is not None else self.staleness

    @property
    def short(self) -> Any:
        """As in a run file."""
        return self.name or {"staleness": self.staleness}


class RunFile(Section):
    """A run file as written, validated key by key. :class:`p2pfl.run_file.run.Run` adds what is derived from it."""

    name: Annotated[str, AfterValidator(_run_name)]
    """Prefix of the run folder's name."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random streams."""
    rounds: PositiveInt
    peers: int = Field(gt=0, le=MAX_PEERS)
    graph: Named = Named(name="complete")
    """Which peers are neighbors."""
    data: Data
    models: Models = Models()
    algorithm: Named
    aggregation: Named = Named(name="mean")
    """How each peer combines what it receives with its own: a rule, or a list of rules, one after the other."""
    gradient: Named = Named(name="mean")
    """How batches are drawn and their gradients made in local training."""
    synchrony: Annotated[Synchrony, BeforeValidator(from_name)] = Synchrony(name="rounds")
    """Which messages a round takes: of the same round, or the newest (``none``, or ``{staleness: 4}``)."""
    plugins: tuple[Annotated[PluginEntry, BeforeValidator(from_name)], ...] = ()
    """Python files and modules whose algorithms, models, datasets, partitions, augmentations, graphs, metrics,
    losses, codecs and attacks this file names; relative to it."""
    joins_at: dict[NonNegativeInt, PositiveInt] = Field(default={})
    """{peer: round}: late joiners and the first round they take part in; all other peers start in round 0."""
    codec: Annotated[dict[str, Named], BeforeValidator(_by_kind)] = Field(default={})
    """How tensors in messages are packed: the codec of a plug-in, or ``{kind of message: codec}``; default: none."""
    adversaries: tuple[Attack, ...] = ()
    """Peers that attack, and how: ``[{peers: [3], name: sign-flip}]``."""
    transport: Transport = Transport()
    chaos: Chaos = Chaos()
    """Injected faults."""
    time: Time | None = None
    """How long computing and messages take in `p2pfl simulate --clock`; default: see docs/seconds.md."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu: Gpu = Gpu()
    threads: PositiveInt = 1
    """CPU threads per peer. Another number may change how sums are rounded."""
    slots: PositiveInt | None = None
    """Peers that compute at the same time on one host, or on each of its GPUs; default: cores / threads, or
    ``gpu.peers_per_gpu``."""
    eval_every: PositiveInt = 1
    """Evaluate after every n-th round, and after the last."""
    global_test: bool = False
    """Also evaluate on the whole test set."""
    metrics: tuple[str, ...] = ()
    """Further metrics of the local test split: macro-f1, ece, class-accuracy, and metrics of plug-ins."""
    masked_test: bool = False
    """Report the masked accuracy on the local test split, where only the scores of the peer's local classes count,
    instead of the unmasked one. Both are recorded."""
    checkpoint_every: PositiveInt | Literal["auto"] = "auto"
    """Write a checkpoint after every n-th round, and after the last; ``auto``: as often as takes 2 % of the time, at
    least every 30 s, and as takes 25 % while more than 64 MiB were received since the last one."""
    checkpoint_copies: Storage | None = None
    """Folder on a shared disk, or URL of an object storage (s3://…, gs://…; anything that fsspec supports), to which
    checkpoints are copied: a peer that restarts on another host continues from there. See docs/deploy.md."""
    track: Annotated[tuple[Annotated[TrackEntry, BeforeValidator(from_name)], ...], AfterValidator(_distinct)] = ()
    """Trackers that `p2pfl launch`, `resume` and `simulate` pass the records on to, by name."""
    report: bool = False
    """Write the page of `p2pfl report` into the run folder when `p2pfl launch` or `p2pfl simulate` ends."""
    out: ExpandedPath = Path("runs")
    """Folder in which run folders are created; the only path that starts from the working directory."""

    _short = field_validator("graph", "algorithm", "gradient", mode="before")(Named.from_value)
    _short_rules = field_validator("aggregation", mode="before")(_rule)
    _short_models = field_validator("models", mode="before")(Models.from_value)

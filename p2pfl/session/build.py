"""Build what a run needs before its first round: the data, and each peer's model and algorithm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.adversaries.base import Poisoning
from p2pfl.aggregation import Mean
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.context import Context
from p2pfl.algorithms.shared_model import SharedModel, shared_parameters, shares_statistics
from p2pfl.data import Dataset, Split, Subset, open_dataset
from p2pfl.data.partitions import check_subsets
from p2pfl.errors import ChangedDataset, DataError, MissingExtra, ModelError, PluginError, RunFolderError, WriteError
from p2pfl.inputs import describe, kind_of
from p2pfl.learning.evaluation import PREDICTION_BATCH
from p2pfl.learning.peer_data import PeerData, Samples, batch_sizes
from p2pfl.models import BACKBONES, HEADS, Group, Model, architecture, build
from p2pfl.models.backbone import kept_random_states
from p2pfl.models.import_path import parse
from p2pfl.options import OptionErrors
from p2pfl.plugins.loading import blaming, definition, naming_lines
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import write_atomically
from p2pfl.session.method_results import check_setup
from p2pfl.session.model_trial import Trial
from p2pfl.session.pretrained import load_pretrained
from p2pfl.tensors import digest, frozen_of, statistics_of

RunData = tuple[Dataset, list[Subset]]
"""The dataset of a run, and the samples of each peer."""
DATASET = "dataset.sha256"
"""The file of a run folder with the hash of the dataset that its peers learn from."""


def load_data(run: Run, folder: Path | None = None, *, record: bool = False) -> RunData:
    """Map the run's inputs from this host's cache, and divide them among the peers.

    Args:
        folder: the run folder, if the run has begun: its dataset must not have changed.
        record: the run begins: write the dataset's hash into its folder.

    Raises:
        RunFileError: the dataset is not available, has changed since the run began, or cannot be partitioned as
            requested.
    """
    run.activate()
    with naming_lines():
        dataset, subsets = _load_data(run)
    if folder is not None and dataset.sha256:
        _check_unchanged(run, dataset, folder / DATASET, record)
    return dataset, subsets


def _check_unchanged(run: Run, dataset: Dataset, file: Path, record: bool) -> None:
    try:
        recorded = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        if record:
            with suppress(WriteError):  # a full disk is reported where the run needs it
                write_atomically(file, f"{dataset.sha256}\n".encode())
        return
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{file}: cannot be read: {error}") from None
    if recorded != dataset.sha256:
        text = (
            f"{dataset.name} has changed since this run began, or this host decodes it differently: its hash is "
            f"{dataset.sha256[:12]}…, not {recorded[:12]}…; restore its files, start a new run, or delete {file} to "
            "use it anyway"
        )
        raise ChangedDataset(run.error_at("data.dataset", DataError(text)).problems)


def _load_data(run: Run) -> RunData:
    data = run.file.data
    try:
        dataset = open_dataset(data.dataset.name, run.loader, data.root, data.download, run.base)
    except (DataError, MissingExtra) as error:
        raise run.error_at("data.dataset", DataError(blaming(type(run.loader).read, error))) from None
    _check_kind(run, dataset)
    for number, attack in enumerate(run.attacks):
        if isinstance(attack, Poisoning):
            try:
                attack.check(dataset.classes, dataset.channels, dataset.size)
            except DataError as error:
                raise run.error_at(f"adversaries.{number}", error) from None
    try:
        subsets = run.partition.split(dataset.labels, run.peers, run.seed)
        check_subsets(subsets, dataset.labels, run.peers)
    except (DataError, MissingExtra) as error:
        raise run.error_at("data.partition", DataError(blaming(type(run.partition).split, error))) from None
    if run.file.global_test and any(subset.merged for subset in subsets):
        reason = DataError(
            f"partition {data.partition.name} also distributes the test set for training, so there are no samples "
            "left for global_test"
        )
        raise run.error_at("global_test", reason)
    without = [peer for peer, subset in enumerate(subsets) if not len(subset.validation)]
    if run.algorithm.needs_validation and without:
        examples = ", ".join(map(str, without[:5])) + (", …" if len(without) > 5 else "")
        if single := [peer for peer in without if len(subsets[peer].train) < 2]:
            hint = f"peer {single[0]} has a single training sample: use fewer peers, or more samples for each"
        else:
            larger = 0.2 if getattr(run.partition, "validation", 0.0) < 0.2 else 0.5
            hint = f"hold out a larger fraction of the training samples, e.g. {larger}, so that each peer has one"
        reason = DataError(
            f"{run.algorithm.name} learns from validation samples, but {len(without)} of {run.peers} peers have none "
            f"({examples}); {hint}"
        )
        raise run.error_at("data.partition.validation", reason)
    if kind_of(dataset.size) != "images" or any(parse(member) for member in _first_peers(run)):
        _check_architectures(run, dataset)  # of the others, the run file tells features and head
    return dataset, subsets


def _check_kind(run: Run, dataset: Dataset) -> None:
    """Check that augmentation and algorithm suit the kind of inputs. Raises RunFileError."""
    kind, name, given = kind_of(dataset.size), dataset.name, describe(dataset.channels, dataset.size)
    if kind not in run.augmentation.takes:
        text = f"{run.file.data.augment.name!r} varies {' and '.join(run.augmentation.takes)}, but {name} has {given}"
        raise run.error_at("data.augment", DataError(f"{text}; use none"))
    if run.augmentation.varies_colors and dataset.channels not in (1, 3):
        text = f"{run.file.data.augment.name!r} varies colors, but images of {name} have {dataset.channels} channels"
        raise run.error_at("data.augment", DataError(f"{text}, not 1 or 3; use crop-flip or none"))
    if run.algorithm.needs_images and kind != "images":
        raise run.error_at("algorithm", DataError(f"{run.algorithm.name} needs images, but {name} has {given}"))


def _first_peers(run: Run) -> dict[str, PeerId]:
    """Return the first peer of each architecture."""
    return {architecture(run.file.models.group, peer): peer for peer in reversed(range(run.peers))}


def check_models(run: Run, dataset: Dataset, subsets: Sequence[Subset] = ()) -> Sequence[str]:
    """Check before a run that each architecture takes the inputs, and that features and head suit the algorithm.

    Users' models are tried out on samples too (p2pfl/session/model_trial.py).

    Args:
        subsets: of the peers; by default, all have the first samples.

    Returns:
        What users should know about their models.

    Raises:
        RunFileError: an architecture does not suit.
    """
    _check_architectures(run, dataset)
    remarks: list[str] = []
    run.activate()
    for member, peer in sorted(_first_peers(run).items()):
        if _is_of_user(member):
            try:
                with naming_lines(), kept_random_states():
                    remarks += _trial(run, dataset, subsets, member, peer).remarks()
            except ModelError as error:
                raise run.error_at(run.file.models.key, error) from None
    return remarks


def has_models_of_users(run: Run) -> bool:
    """Return whether ``check_models`` tries out models."""
    return any(map(_is_of_user, _first_peers(run)))


def _is_of_user(member: str) -> bool:
    backbone, _, head = member.partition("+")
    return parse(member) is not None or backbone in BACKBONES.registered or head in HEADS.registered


def _trial(run: Run, dataset: Dataset, subsets: Sequence[Subset], member: str, peer: PeerId) -> Trial:
    """Return how the model of ``peer``, and of all with the same architecture, is tried out."""

    def seeded() -> AbstractContextManager[None]:
        return rng.torch_seeded(run.seed, "check")

    def build_seeded() -> Model:
        random.seed(run.seed)
        np.random.seed(run.seed % 2**32)
        with seeded():
            return build(
                run.file.models.group,
                peer,
                dataset.channels,
                dataset.size,
                dataset.classes,
                run.file.models.features,
            )

    nothing = np.arange(0)
    mine = next((subset for subset in subsets[peer:] if len(subset.train)), None)
    subset = mine or Subset(np.arange(min(64, len(dataset.train))), nothing, nothing)
    augment = run.augmentation.build(dataset.channels, dataset.size, dataset.mirror)
    data = PeerData(dataset, subset, augment, torch.device("cpu"))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        images, labels = data.train.take(np.resize(np.arange(len(data.train)), size))
        return data.input(images, augmented=True), labels

    size, views = getattr(run.hyper, "batch", None) or 64, run.algorithm.views
    drop_last = getattr(run.hyper, "drop_last", False)
    trained: dict[int, PeerId] = {}
    evaluated: dict[int, PeerId] = {}
    for m, each in enumerate(subsets):
        if architecture(run.file.models.group, m) == member:
            for n in batch_sizes(len(each.train), size, drop_last=drop_last):
                trained.setdefault(n * views, m)
            for n in {min(len(each.test), PREDICTION_BATCH), len(each.test) % PREDICTION_BATCH} - {0}:
                evaluated.setdefault(n, m)
    optimizer = getattr(run.hyper, "make_optimizer", None)
    inputs = describe(dataset.channels, dataset.size)
    return Trial(member, build_seeded, batch, inputs, trained, evaluated, optimizer, seeded)


def _check_architectures(run: Run, dataset: Dataset) -> None:
    models, group = run.file.models, run.file.models.group
    features: dict[str, int] = {}
    for member, peer in sorted(_first_peers(run).items()):
        try:
            # Built-in models need no memory here; a user's model may do anything while it is built.
            device = nullcontext() if _is_of_user(member) else torch.device("meta")
            with rng.torch_seeded(run.seed, "check"), kept_random_states(), device:
                model = build(group, peer, dataset.channels, dataset.size, dataset.classes, models.features)
            features[member] = model.features
            if run.algorithm.linear_heads:
                _ = model.linear_head
        except ModelError as error:
            raise run.error_at(run.file.models.key, error) from None
    if run.algorithm.equal_features and len(set(features.values())) > 1:
        listed = ", ".join(f"{member} has {width}" for member, width in features.items())
        text = f"{run.algorithm.name} needs the same number of features on all peers, but {listed}; set one for all"
        raise run.error_at("models.features", ModelError(text))


def poisoned(run: Run, me: PeerId, samples: Samples, classes: int) -> Samples:
    """Return what peer ``me`` learns from in place of its training samples, if the run file poisons them."""
    for number, attack in enumerate(run.attacks):
        if len(samples) and isinstance(attack, Poisoning) and me in run.attackers(number):
            inputs, labels = (tensor.numpy() for tensor in samples.take(np.arange(len(samples))))
            draw = Streams(run.seed, me).fresh(f"poisoning {number}")
            inputs, labels = attack.poison(inputs, labels, classes, draw)
            samples = Samples(Split(inputs, labels), np.arange(len(labels)))
    return samples


def make_algorithm(run: Run, me: PeerId, data: RunData, device: torch.device, streams: Streams) -> Algorithm[Any]:
    """Build peer ``me``'s model and algorithm in their state before round 0.

    Raises:
        RunFileError: the model does not fit the dataset's inputs, or the algorithm the model.
    """
    run.activate()
    with naming_lines():
        return _make_algorithm(run, me, data, device, streams)


def _make_algorithm(run: Run, me: PeerId, data: RunData, device: torch.device, streams: Streams) -> Algorithm[Any]:
    dataset, subsets = data
    augment = run.augmentation.build(dataset.channels, dataset.size, dataset.mirror)
    models, group = run.file.models, run.file.models.group

    def build_on_device(peer: PeerId) -> Model:
        size, classes = dataset.size, dataset.classes
        with rng.python_seeded():
            return build(group, peer, dataset.channels, size, classes, models.features).to(device)

    def build_named(name: str) -> Model:
        with rng.python_seeded():
            return build(name, 0, dataset.channels, dataset.size, dataset.classes).to(device)

    model_stream = rng.torch_seeded(run.seed, "model") if run.algorithm.homogeneous else streams.torch("model")
    with model_stream:
        try:
            model = build_on_device(me)
        except ModelError as error:
            raise run.error_at(run.file.models.key, error) from None
    data_of_peer = PeerData(dataset, subsets[me], augment, device)
    data_of_peer.train = poisoned(run, me, data_of_peer.train, dataset.classes)
    context = Context(
        me=me,
        peers=run.peers,
        seed=run.seed,
        model=model,
        data=data_of_peer,
        streams=streams,
        device=device,
        architectures=_architectures(group, run.peers),
        build=build_on_device,
        samples=tuple(len(subset.train) for subset in subsets),
        build_named=build_named,
        rounds=run.rounds,
        aggregation=run.aggregation,
        measures_distances=bool(run.attacks) or type(run.aggregation) is not Mean,
        gradient=run.gradient,
    )
    try:
        with streams.restarted("setup"):
            algorithm = run.algorithm(run.hyper, context)
        check_setup(algorithm)
        if isinstance(run.hyper, SharedModel):
            shared_parameters(getattr(algorithm, "meme", algorithm.model), run.hyper)  # raises OptionErrors
        sent = getattr(algorithm, "meme", algorithm.model if algorithm.homogeneous else None)
        if sent is not None and shares_statistics(run.hyper) and not statistics_of(sent):
            text = f"{sent.name} has no batch-normalization statistics; remove this key"
            raise OptionErrors([(("share_statistics",), text)])
        load_pretrained(algorithm)
    except OptionErrors as errors:
        raise run.option_errors_at("algorithm", errors) from None
    _check_state(algorithm)
    algorithm.trains = algorithm.aggregation.computes = run.trains
    return algorithm


def frozen_digest(algorithm: Algorithm[Any]) -> str | None:
    """Return the digest of the model's frozen parameters before round 0, if all peers must start from equal ones."""
    frozen = frozen_of(algorithm.model) if algorithm.homogeneous else {}
    return digest(frozen) if frozen else None


@lru_cache(maxsize=2)  # simulated peers share it
def _architectures(group: Group, peers: int) -> tuple[str, ...]:
    return tuple(architecture(group, peer) for peer in range(peers))


def _check_state(algorithm: Algorithm[Any]) -> None:
    """Check that ``setup`` of a plug-in has set what a checkpoint holds. Raises PluginError."""
    place = definition(type(algorithm).setup)
    missing = [name for name in algorithm.state if not hasattr(algorithm, name)]
    if place is not None and missing:
        raise PluginError(*place, f"setup should set self.{missing[0]}, which the attribute state lists")

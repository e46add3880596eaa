"""meta-L2C against its paper: codes in numpy, the encoder's gradient by autograd, and one encoder on all peers."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl import checkpoint
from p2pfl.algorithms.l2c import L2C, aggregate, slope, validation_gradient
from p2pfl.algorithms.meta_l2c import Encoder, Hyper, MetaL2C, attention, backward, channels_of, direction
from p2pfl.errors import RunFileError
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.simulate import simulate
from p2pfl.tensors import assign, clone, digest, parameters_of, subtract
from p2pfl.topology import Topology
from p2pfl.training import PeerData
from tests.p2pfl.support import Spoken, linear_model, messages, payload, peer_data, play, random_dataset, setting

INPUTS, FEATURES, CLASSES = 4, 5, 3
SHAPES = {
    "backbone.1.weight": (FEATURES, INPUTS),
    "backbone.1.bias": (FEATURES,),
    "head.weight": (CLASSES, FEATURES),
    "head.bias": (CLASSES,),
}
NUMBERS = sum(math.prod(shape) for shape in SHAPES.values())
HIDDEN, WIDTH = 10, 5
ENCODER = sum(HIDDEN * math.prod(shape[1:]) + HIDDEN + WIDTH * HIDDEN + WIDTH for shape in SHAPES.values())
CODE = WIDTH * sum(shape[0] for shape in SHAPES.values())
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def hyper(**given: Any) -> Hyper:
    """All samples in one batch, so that an epoch is a step."""
    return Hyper.parse({"local_epochs": 2, "batch": 64, "lr": 0.5, "prune_round": None, **given})


def data_of(me: int) -> PeerData:
    return peer_data(random_dataset(20, classes=CLASSES, seed=me), range(6 + me), validation=range(15, 20))


def make(h: Hyper, peers: int = 3, *, features: int = FEATURES) -> list[MetaL2C]:
    """Linear networks that all start alike."""
    return [
        MetaL2C(h, setting(me, peers, linear_model(INPUTS, features, CLASSES, seed=7), data_of(me)))
        for me in range(peers)
    ]


def random_change(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES.items()}


def random_encoder(seed: int) -> Encoder:
    """With weights large enough that codes differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(parameters_of(linear_model(INPUTS, FEATURES, CLASSES)), HIDDEN, WIDTH)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return encoder


# ---- the input: line 11 -------------------------------------------------------------------------------------


def test_the_change_is_scaled_as_a_whole_to_norm_1() -> None:
    generator = torch.Generator().manual_seed(0)
    initial, now = random_change(generator), random_change(generator)
    found = direction(now, initial)
    norm = math.sqrt(sum(float(((now[name] - initial[name]).double() ** 2).sum()) for name in SHAPES))
    for name in SHAPES:
        torch.testing.assert_close(found[name], (now[name] - initial[name]) / norm)
    assert sum(float(tensor.square().sum()) for tensor in found.values()) == pytest.approx(1.0, abs=1e-6)


def test_no_change_has_no_direction() -> None:
    found = direction({"x": torch.ones(3)}, {"x": torch.ones(3)})
    assert found["x"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_norm_of_very_small_and_very_large_changes(scale: float) -> None:
    found = direction({"x": torch.tensor([3.0 * scale, 4.0 * scale])}, {"x": torch.zeros(2)})
    assert found["x"].tolist() == pytest.approx([0.6, 0.8])


# ---- codes and attention: Eqs. 4, 5, 7, 8 -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 3, 5, 5), (6, 75)), ((4, 9), (4, 9)), ((7,), (7, 1)), ((), (1, 1)), ((2, 0), (2, 0))]
)
def test_a_channel_is_what_belongs_to_one_output(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    if 0 in shape:
        assert tensor.numel() == 0
        return
    assert channels_of(tensor).shape == expected
    assert channels_of(tensor).flatten().tolist() == tensor.flatten().tolist()


def code_by_hand(encoder: Encoder, change: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """E_l(Δ̂), [C_l, width], of each layer l."""
    parameters = {name: tensor.detach().double().numpy() for name, tensor in encoder.named_parameters()}
    codes = {}
    for name, tensor in change.items():
        key = "layers." + name.replace(".", "/")
        x = tensor.double().numpy().reshape(len(tensor), -1)
        hidden = np.tanh(x @ parameters[f"{key}.0.weight"].T + parameters[f"{key}.0.bias"])
        codes[name] = np.tanh(hidden @ parameters[f"{key}.2.weight"].T + parameters[f"{key}.2.bias"])
    return codes


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_the_inner_product_of_codes_is_the_sum_over_layers_and_channels(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    encoder = random_encoder(seed % 1000)
    one, other = random_change(generator), random_change(generator)
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    assert codes[0].shape == (encoder.length,) == (CODE,)
    by_hand = code_by_hand(encoder, one), code_by_hand(encoder, other)
    products = {name: float((by_hand[0][name] * by_hand[1][name]).sum()) for name in SHAPES}
    assert float(codes[0] @ codes[1]) == pytest.approx(sum(products.values()), abs=1e-4)
    encoder.mean = True
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    expected = np.mean([products[name] / SHAPES[name][0] for name in SHAPES])
    assert float(codes[0] @ codes[1]) == pytest.approx(expected, abs=1e-5)


def test_the_order_in_which_tensors_come_does_not_matter() -> None:
    change = random_change(torch.Generator().manual_seed(0))
    encoder = random_encoder(0)
    assert torch.equal(encoder(change), encoder(dict(reversed(change.items()))))


def test_the_encoder_has_a_network_for_each_tensor_and_none_for_classes_or_channels() -> None:
    encoder = random_encoder(0)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == ENCODER
    more_classes = Encoder(parameters_of(linear_model(INPUTS, FEATURES, 100)), HIDDEN, WIDTH)
    assert {name: tensor.shape for name, tensor in more_classes.state_dict().items()} == {
        name: tensor.shape for name, tensor in encoder.state_dict().items()
    }


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_attention_is_the_softmax_of_inner_products(peers: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    ids = sorted(int(j) for j in stream.permutation(10)[:peers])
    codes = {j: torch.from_numpy(stream.normal(size=8).astype(np.float32)) for j in reversed(ids)}
    me = ids[int(stream.integers(peers))]
    f = np.array([codes[me].double().numpy() @ codes[j].double().numpy() for j in ids])
    expected = np.exp(f - f.max())
    np.testing.assert_allclose(attention(codes, me).numpy(), expected / expected.sum(), atol=1e-12)


# ---- line 18: the gradient of the encoder -------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_gradient_of_the_encoder_is_that_of_autograd_through_everything(peers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, data, encoder = linear_model(INPUTS, FEATURES, CLASSES, seed=seed % 100), data_of(seed % 50), None
    encoder = random_encoder(seed % 1000)
    me = int(torch.randint(peers, (), generator=generator))
    before = clone(parameters_of(model))
    updates = {j: random_change(generator) for j in range(peers)}
    changes = {j: direction(random_change(generator), before) for j in range(peers)}

    # Everything in one graph: encoder, attention, mix, network, loss.
    codes = {j: encoder(changes[j]) for j in range(peers)}
    f = torch.stack([(codes[me] * codes[j]).sum() for j in range(peers)])
    w = f.softmax(0)
    mixed = {name: x - sum(w[j] * updates[j][name] for j in updates) for name, x in before.items()}
    (x, labels), *_ = data.sweep(data.validation)
    loss = cross_entropy(functional_call(model, mixed, x), labels)
    expected = torch.autograd.grad(loss, list(encoder.parameters()))

    # The chain rule.
    with torch.no_grad():
        codes = {j: encoder(changes[j]) for j in range(peers)}
        row = dict(enumerate(attention(codes, me).tolist()))
        assign(parameters_of(model), aggregate(before, updates, row))
    _, g = validation_gradient(model, data)
    backward(encoder, changes, codes, me, {j: slope(g, updates[j]) for j in range(peers)})
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert parameter.grad is not None
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(parameter.grad.numpy(), gradient.numpy(), atol=1e-3 * scale + 2e-7, rtol=2e-3)


def test_alone_there_is_nothing_to_learn() -> None:
    encoder, change = random_encoder(0), random_change(torch.Generator().manual_seed(0))
    backward(encoder, {0: change}, {0: encoder(change).detach()}, 0, {0: 5.0})
    assert all(
        float(parameter.grad.abs().max()) == 0.0 for parameter in encoder.parameters() if parameter.grad is not None
    )


# ---- whole rounds -------------------------------------------------------------------------------------------


class ByHand:
    """Algorithm 1 for one peer, in one graph and with the formulas of this test."""

    def __init__(self, peer: MetaL2C) -> None:
        self.me, self.h, self.data = peer.me, peer.hyper, peer.data
        self.model = linear_model(INPUTS, FEATURES, CLASSES, seed=7)
        self.x = clone(parameters_of(self.model))
        self.start = clone(self.x)
        self.encoder = Encoder(self.x, HIDDEN, WIDTH)
        self.encoder.load_state_dict(peer.encoder.state_dict())
        kind = torch.optim.AdamW if self.h.mixing_optimizer == "adamw" else torch.optim.Adam
        self.optimizer = kind(self.encoder.parameters(), lr=self.h.mixing_lr, weight_decay=self.h.mixing_weight_decay)
        self.row: dict[int, float] = {}

    def loss(self, x: Mapping[str, Tensor], which: str) -> Tensor:
        some = getattr(self.data, which)
        images, labels = some.take(np.arange(len(some)))
        return cross_entropy(functional_call(self.model, dict(x), images.float() / 255.0), labels)

    def local(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Δ and Δ̂."""
        x = {name: tensor.clone().requires_grad_() for name, tensor in self.x.items()}
        optimizer = torch.optim.SGD(list(x.values()), lr=self.h.lr, weight_decay=self.h.weight_decay)
        for _ in range(self.h.local_epochs):
            optimizer.zero_grad()
            self.loss(x, "train").backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        x = clone(x)
        change = subtract(x, self.start)
        norm = torch.cat([tensor.flatten() for tensor in change.values()]).norm()
        return subtract(self.x, x), {name: tensor / norm for name, tensor in change.items()}

    def mix(self, updates: Mapping[int, Mapping[str, Tensor]], changes: Mapping[int, Mapping[str, Tensor]]) -> None:
        ids = sorted(updates)
        codes = {j: self.encoder(changes[j]) for j in ids}
        w = torch.stack([(codes[self.me] * codes[j]).sum() for j in ids]).softmax(0)
        mixed = {
            name: x - sum(weight * updates[j][name] for weight, j in zip(w, ids, strict=True))
            for name, x in self.x.items()
        }
        self.optimizer.zero_grad()
        self.loss(mixed, "validation").backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.x = clone(mixed)
        self.row = dict(zip(ids, w.tolist(), strict=True))


def by_hand(peers: Sequence[MetaL2C], topology: Topology, rounds: int, silent: Sequence[int] = ()) -> list[ByHand]:
    hands = [ByHand(peer) for peer in peers if peer.me not in silent]
    for _ in range(rounds):
        said = {hand.me: hand.local() for hand in hands}
        for hand in hands:
            heard = [hand.me, *(j for j in topology.neighbors[hand.me] if j not in silent)]
            hand.mix({j: said[j][0] for j in heard}, {j: said[j][1] for j in heard})
        mean = {
            name: torch.stack([hand.encoder.state_dict()[name] for hand in hands]).mean(0)
            for name in hands[0].encoder.state_dict()
        }
        for hand in hands:
            hand.encoder.load_state_dict(mean)
    return hands


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_rounds_follow_algorithm_1(topology: Topology, optimizer: str) -> None:
    peers = make(hyper(mixing_optimizer=optimizer), topology.peers)
    hands = by_hand(peers, topology, 4)
    play(peers, topology, 4)
    for peer, hand in zip(peers, hands, strict=True):
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, hand.x[name], atol=2e-4, rtol=0)
        assert dict(peer.weights() or {}) == pytest.approx(hand.row, abs=5e-4)


def test_the_first_weights_are_those_of_the_encoder_as_it_starts() -> None:
    peers = make(hyper(), 4)
    start = clone(peers[0].encoder.state_dict())
    hands = by_hand(peers, complete(4), 1)
    play(peers, complete(4), 1)
    for peer, hand in zip(peers, hands, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(hand.row, abs=1e-5)
        assert any(not torch.equal(tensor, start[name]) for name, tensor in peer.encoder.state_dict().items())


@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_all_peers_have_the_same_encoder_bit_by_bit_after_every_round(topology: Topology) -> None:
    peers = make(hyper(), topology.peers)
    assert len({digest(peer.encoder.state_dict()) for peer in peers}) == 1
    seen: list[list[str]] = [[] for _ in peers]
    play(peers, topology, 4, after=lambda peer, t: seen[peer.me].append(digest(peer.encoder.state_dict())))
    assert all(digests == seen[0] for digests in seen)
    assert len(set(seen[0])) == 4


def test_the_encoders_moments_stay_with_the_peer() -> None:
    peers = make(hyper())
    play(peers, LINE, 2)
    assert len({digest(peer.encoder_optimizer.state_dict()) for peer in peers}) == 3


def test_a_missing_neighbour_is_left_out_of_the_weights() -> None:
    peers = make(hyper(), 4)
    hands = by_hand(peers, complete(4), 2, silent=[3])
    spoken = play(peers, complete(4), 2, silent=[3])
    assert spoken[0][0].missing == {"Progress": [3], "EncoderParameters": [3]}
    for peer, hand in zip(peers[:3], hands, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(hand.row, abs=2e-4)
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, hand.x[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize("field", ["update", "change"])
def test_a_message_that_is_not_finite_counts_as_missing(field: str) -> None:
    class Diverged(MetaL2C):
        def progress(self, update: Any, change: Any) -> Any:
            body = super().progress(update, change)
            return replace(
                body, **{field: {name: tensor * math.nan for name, tensor in getattr(body, field).items()}}
            )

    peers = make(hyper(), 3)
    peers[2] = Diverged(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    play(peers, complete(3), 2)
    for peer in peers[:2]:
        assert list(peer.weights() or {}) == [0, 1]
        assert all(bool(tensor.isfinite().all()) for tensor in peer.model.state_dict().values())


def test_training_that_diverges_is_dropped() -> None:
    class Diverging(MetaL2C):
        def train(self, **options: Any) -> None:
            self.model.head.bias.data[0] = math.nan

    peers = make(hyper(), 3)
    start = clone(parameters_of(peers[0].model))
    peers[2] = Diverging(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    updates = {j: ByHand(peers[j]).local()[0] for j in range(2)}
    spoken = play(peers, complete(3), 1)
    assert all(rounds[0].missing == {} for rounds in spoken)
    for peer in peers:
        w = peer.weights() or {}
        for name, tensor in parameters_of(peer.model).items():
            expected = start[name] - sum(w[j] * updates[j][name] for j in range(2))
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


def test_a_gradient_that_is_not_finite_is_no_step() -> None:
    (peer,) = make(hyper(), 1)
    before = digest(peer.encoder.state_dict())
    change = random_change(torch.Generator().manual_seed(0))
    peer.learn({0: change}, peer.encode({0: change}), {0: math.nan})
    assert digest(peer.encoder.state_dict()) == before
    assert peer.encoder_optimizer.state_dict()["state"] == {}


# ---- pruning and bytes --------------------------------------------------------------------------------------


def total(spoken: Sequence[Sequence[Spoken]], t: int, kind: str) -> int:
    return sum(messages(rounds[t].out, kind) for rounds in spoken)


def test_a_round_costs_two_models_for_each_directed_edge_and_two_encoders_for_each_edge_of_a_tree() -> None:
    peers = make(hyper(), 4)
    spoken = play(peers, complete(4), 2)
    for t in range(2):
        assert total(spoken, t, "Progress") == 4 * 3
        assert total(spoken, t, "EncoderParameters") == 2 * 3
        paid = sum(payload(rounds[t].out) for rounds in spoken)
        assert paid == 4 * (12 * 2 * NUMBERS + 2 * 3 * ENCODER)


def test_after_pruning_messages_stop_but_the_encoder_still_goes_round() -> None:
    """In a complete graph the tree of the allreduce has all edges of peer 0, most of which are pruned here."""
    peers = make(hyper(prune_round=1, prune_to=1), 5)
    rows: list[dict[int, dict[int, float]]] = [{} for _ in peers]
    encoders: list[list[str]] = [[] for _ in peers]

    def after(peer: Any, t: int) -> None:
        rows[peer.me][t] = dict(peer.weights())
        encoders[peer.me].append(digest(peer.encoder.state_dict()))

    spoken = play(peers, complete(5), 6, after=after)
    for me, rounds in enumerate(spoken):
        at_t0 = rows[me][1]
        (kept,) = sorted((j for j in at_t0 if j != me), key=lambda j: (-at_t0[j], j))[:1]
        assert [len(rows[me][t]) for t in range(6)] == [5, 5, 2, 2, 2, 2]
        assert all(list(rows[me][t]) == sorted([me, kept]) for t in range(2, 6))
        for t, one in enumerate(rounds):
            assert one.missing == {}
            if t >= 3:
                assert one.sources == (kept,)
                assert {j for j, kinds in one.inn.items() if "Progress" in kinds} == {kept}
    for t in range(6):
        assert total(spoken, t, "EncoderParameters") == 2 * 4
        assert total(spoken, t, "Progress") == 5 * (4 if t < 2 else 1) or t == 2
    # Those whom the last round's allreduce has not told yet speak once more, and are not listened to.
    assert 5 < total(spoken, 2, "Progress") <= 20
    assert all(digests == encoders[0] for digests in encoders)
    assert len(set(encoders[0])) == 6
    silent = {(i, j) for i in range(5) for j in range(5) if i != j and j not in rows[i][5] and i not in rows[j][5]}
    assert any(0 in edge for edge in silent)  # the tree has edges on which nothing else is said


def test_half_precision_halves_the_bytes_of_models() -> None:
    peers = make(hyper(precision="bfloat16"), 3)
    spoken = play(peers, complete(3), 1)
    assert sum(payload(rounds[0].out) for rounds in spoken) == 6 * 2 * 2 * NUMBERS + 4 * 2 * 2 * ENCODER


@pytest.mark.parametrize(
    "given", [{}, {"precision": "bfloat16"}, {"frozen": True}, {"frozen": True, "send_codes": True}]
)
def test_messages_on_disk_give_the_same_bits(given: Mapping[str, Any], tmp_path: Path) -> None:
    given = dict(given)
    if given.pop("frozen", False):
        given.update(encoder=trained(tmp_path), train_encoder=False)
    digests = []
    for spool in (False, True):
        peers = make(hyper(spool=spool, prune_round=1, prune_to=2, **given), 5)
        play(peers, complete(5), 4)
        digests.append([digest(peer.state_dict()) for peer in peers])
        assert all((peer.spool.size > 0) == spool for peer in peers)
    assert digests[0] == digests[1]


# ---- encoders of earlier runs -------------------------------------------------------------------------------


def trained(folder: Path, scale: float = 0.5) -> Path:
    """The checkpoint of a peer with an encoder that makes a difference."""
    path = folder / "checkpoint.pt"
    checkpoint.save(path, {"run": "0" * 16, "peer": 0, "algorithm": {"encoder": random_encoder(5).state_dict()}})
    return path


def test_a_frozen_encoder_is_taken_as_it_is_and_not_sent(tmp_path: Path) -> None:
    path = trained(tmp_path)
    peers = make(hyper(encoder=path, train_encoder=False), 4)
    spoken = play(peers, complete(4), 2)
    for peer in peers:
        assert digest(peer.encoder.state_dict()) == digest(random_encoder(5).state_dict())
        weights = list((peer.weights() or {}).values())
        assert max(weights) > min(weights) + 1e-3
        assert peer.observations() == {}
    assert {kind for rounds in spoken for one in rounds for kinds in one.out.values() for kind in kinds} == {
        "Progress"
    }


def test_codes_instead_of_changes_give_the_same_bits_for_half_the_bytes(tmp_path: Path) -> None:
    path, outcomes, sent = trained(tmp_path), [], []
    for codes in (False, True):
        peers = make(hyper(encoder=path, train_encoder=False, send_codes=codes, prune_round=1, prune_to=2), 4)
        spoken = play(peers, complete(4), 4)
        outcomes.append([digest(peer.state_dict()) for peer in peers])
        sent.append([sum(payload(rounds[t].out) for rounds in spoken) for t in range(4)])
    assert outcomes[0] == outcomes[1]
    edges = [12, 12, 12, 8]
    assert sent == [[4 * n * 2 * NUMBERS for n in edges], [4 * n * (NUMBERS + CODE) for n in edges]]


def test_an_encoder_may_be_trained_further(tmp_path: Path) -> None:
    peers = make(hyper(encoder=trained(tmp_path)))
    assert digest(peers[2].encoder.state_dict()) == digest(random_encoder(5).state_dict())
    play(peers, LINE, 1)
    assert digest(peers[2].encoder.state_dict()) != digest(random_encoder(5).state_dict())


RUN = {
    "rounds": 2,
    "data": {"partition": {"name": "groups", "groups": 2, "per_class": 8, "validation": 0.25}},
    "peers": 4,
}
METHOD: dict[str, Any] = {"name": "meta-l2c", "local_epochs": 1, "batch": 16}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: Any, make_run: Any, prepare: Any) -> Any:
    """The folder of a run in which an encoder was trained."""
    run = make_run(**RUN, algorithm=METHOD)
    folder = prepare(tmp_path_factory.mktemp("earlier") / "run", run)
    simulate(run, folder)
    return folder


@pytest.mark.parametrize("which", ["folder", "a peer's checkpoint"])
def test_the_encoder_of_a_run_is_found_in_its_folder(
    which: str, earlier: Any, tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    saved = checkpoint.read(earlier.peer(0).checkpoint)["algorithm"]["encoder"]
    assert digest(saved) == digest(checkpoint.read(earlier.peer(3).checkpoint)["algorithm"]["encoder"])
    path = earlier.root if which == "folder" else earlier.peer(3).checkpoint
    run = make_run(**RUN, seed=11, algorithm={**METHOD, "encoder": str(path), "train_encoder": False})
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    assert digest(checkpoint.read(folder.peer(2).checkpoint)["algorithm"]["encoder"]) == digest(saved)


def refusal(make_run: Any, path: Path, **changes: Any) -> str:
    run = make_run(**{**RUN, **changes}, algorithm={**METHOD, "encoder": str(path), "train_encoder": False})
    with pytest.raises(RunFileError) as info:
        simulate(run)
    (problem,) = info.value.problems
    assert problem.key == "algorithm.encoder"
    assert str(path) in problem.message
    return problem.message


def test_a_place_without_an_encoder_is_a_clear_error(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(make_run, tmp_path / "missing.pt")
    assert "no run folder" in refusal(make_run, tmp_path)
    run = make_run(algorithm={"name": "local", "batch": 16}, rounds=1)
    folder = prepare(tmp_path / "run", run)
    assert "no peer of this run has written a checkpoint" in refusal(make_run, folder.root)
    simulate(run, folder)
    assert "no encoder in it; take the folder of a meta-l2c run" in refusal(make_run, folder.root)


def test_an_encoder_for_other_models_is_a_clear_error(make_run: Any, earlier: Any) -> None:
    message = refusal(make_run, earlier.root, models="tiny-cnn")
    assert "an encoder of another form" in message
    assert "nothing" in message
    run = make_run(**RUN, algorithm={**METHOD, "encoder": str(earlier.root), "encoder_width": 7})
    with pytest.raises(
        RunFileError, match=r"float32\[5, 10\] there and float32\[7, 10\] here; models and encoder sizes"
    ):
        simulate(run)


@pytest.mark.parametrize("content", ["diverged", "numbers", "text", "list"])
def test_a_file_that_holds_something_else_is_a_clear_error(content: str, tmp_path: Path) -> None:
    state = random_encoder(5).state_dict()
    path = tmp_path / "encoder.pt"
    wrong: dict[str, Any] = {
        "diverged": {"encoder": {name: tensor * math.nan for name, tensor in state.items()}},
        "numbers": {"encoder": dict.fromkeys(state, 1.0)},
        "text": {"encoder": "hello"},
        "list": [1, 2],
    }
    checkpoint.save(path, {"algorithm": wrong[content]})
    expected = "has diverged" if content == "diverged" else "no encoder in it"
    with pytest.raises(OptionErrors, match=rf"encoder: .*encoder\.pt: .*{expected}"):
        make(hyper(encoder=path), 1)


def test_nothing_in_the_file_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "encoder.pt"
    for write in (
        lambda: path.write_bytes(pickle.dumps(Evil())),
        lambda: checkpoint.save(path, {"algorithm": Evil()}),
    ):
        write()
        with pytest.raises(OptionErrors, match="damaged"):
            make(hyper(encoder=path), 1)
    assert not (tmp_path / "executed").exists()


def test_a_frozen_encoder_must_come_from_somewhere_and_codes_need_a_frozen_one() -> None:
    with pytest.raises(OptionErrors, match="train_encoder: false needs an encoder that has been trained"):
        Hyper.parse({"train_encoder": False})
    with pytest.raises(OptionErrors, match="send_codes needs train_encoder: false"):
        Hyper.parse({"send_codes": True, "encoder": "x"})


def test_the_path_of_the_encoder_is_absolute_in_the_resolved_run_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = Hyper.parse({"encoder": "runs/x"}).to_dict()
    assert plain["encoder"] == str(tmp_path / "runs" / "x")
    monkeypatch.chdir("/")
    assert Hyper.parse(plain).to_dict() == plain


# ---- switches -----------------------------------------------------------------------------------------------


CHANGES: dict[str, dict[str, Any]] = {
    "mixing_lr": {"mixing_lr": 0.3},
    "mixing_weight_decay": {"mixing_weight_decay": 2.0},
    "mixing_optimizer": {"mixing_optimizer": "adam"},
    "prune_round": {"prune_round": 1, "prune_to": 1},
    "precision": {"precision": "bfloat16"},
    "encoder_hidden": {"encoder_hidden": 3},
    "encoder_width": {"encoder_width": 2},
    "score": {"score": "mean"},
    "local_epochs": {"local_epochs": 1},
}


@pytest.mark.parametrize("key", CHANGES)
def test_every_switch_changes_the_outcome(key: str) -> None:
    outcomes = []
    for h in (hyper(), replace(hyper(), **CHANGES[key])):
        peers = make(h)
        play(peers, complete(3), 4)
        outcomes.append(np.concatenate([x.numpy().flatten() for p in peers for x in parameters_of(p.model).values()]))
    assert not np.allclose(*outcomes, atol=1e-7, rtol=0)


def test_all_options_are_tested_here_or_with_l2c() -> None:
    mine = set(Hyper.known()) - set(L2C.Hyper.known())
    assert mine == {"encoder_hidden", "encoder_width", "score", "encoder", "train_encoder", "send_codes"}
    assert isinstance(make(hyper(), 1)[0].model, Model)

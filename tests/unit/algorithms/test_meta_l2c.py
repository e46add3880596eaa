"""meta-L2C against its paper: codes in numpy, whole rounds by autograd, one encoder on all peers, every option."""

from __future__ import annotations

import math
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

from p2pfl.algorithms.l2c import L2C, aggregate, directional_derivative, validation_gradient
from p2pfl.algorithms.meta_l2c import Hyper, MetaL2C, direction
from p2pfl.algorithms.meta_l2c_encoder import Encoder, attention, backward, channels_of
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.run_file.options import OptionErrors
from p2pfl.session import checkpoint
from p2pfl.session.pretrained import load_pretrained
from p2pfl.tensors import assign, clone, digest, parameters_of, subtract
from tests.support import Traffic, linear_model, messages, payload, peer_data, random_dataset, run_rounds, setting

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
    """Return peers with equal linear networks."""
    made = [
        MetaL2C(h, setting(me, peers, linear_model(INPUTS, features, CLASSES, seed=7), data_of(me)))
        for me in range(peers)
    ]
    for peer in made:
        load_pretrained(peer)
    return made


def random_change(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES.items()}


def random_encoder(seed: int) -> Encoder:
    """An encoder with weights large enough that codes differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(parameters_of(linear_model(INPUTS, FEATURES, CLASSES)), HIDDEN, WIDTH)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return encoder


# ---- the input: line 11 --------------------------------------------------------------------------------------


def test_change_is_scaled_as_a_whole_to_norm_1() -> None:
    generator = torch.Generator().manual_seed(0)
    initial, now = random_change(generator), random_change(generator)
    found = direction(now, initial)
    norm = math.sqrt(sum(float(((now[name] - initial[name]).double() ** 2).sum()) for name in SHAPES))
    for name in SHAPES:
        torch.testing.assert_close(found[name], (now[name] - initial[name]) / norm)
    assert sum(float(tensor.square().sum()) for tensor in found.values()) == pytest.approx(1.0, abs=1e-6)


def test_direction_of_no_change_is_zero() -> None:
    found = direction({"x": torch.ones(3)}, {"x": torch.ones(3)})
    assert found["x"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_direction_of_tiny_and_huge_changes(scale: float) -> None:
    found = direction({"x": torch.tensor([3.0 * scale, 4.0 * scale])}, {"x": torch.zeros(2)})
    assert found["x"].tolist() == pytest.approx([0.6, 0.8])


# ---- codes and attention: Eqs. 4, 5, 7, 8 --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 3, 5, 5), (6, 75)), ((4, 9), (4, 9)), ((7,), (7, 1)), ((), (1, 1)), ((2, 0), (2, 0))]
)
def test_channels_are_rows_per_output(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    if 0 in shape:
        assert tensor.numel() == 0
        return
    assert channels_of(tensor).shape == expected
    assert channels_of(tensor).flatten().tolist() == tensor.flatten().tolist()


def expected_code(encoder: Encoder, change: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """E_l(Δ̂), [C_l, width], of each layer l."""
    parameters = {name: tensor.detach().double().numpy() for name, tensor in encoder.named_parameters()}
    codes = {}
    for name, tensor in change.items():
        key = "layers." + name.replace(".", "/")
        x = tensor.double().numpy().reshape(len(tensor), -1)
        hidden = np.tanh(x @ parameters[f"{key}.0.weight"].T + parameters[f"{key}.0.bias"])
        codes[name] = np.tanh(hidden @ parameters[f"{key}.2.weight"].T + parameters[f"{key}.2.bias"])
    return codes


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_inner_product_of_codes_sums_over_layers_and_channels(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    encoder = random_encoder(seed % 1000)
    one, other = random_change(generator), random_change(generator)
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    assert codes[0].shape == (encoder.length,) == (CODE,)
    by_hand = expected_code(encoder, one), expected_code(encoder, other)
    products = {name: float((by_hand[0][name] * by_hand[1][name]).sum()) for name in SHAPES}
    assert float(codes[0] @ codes[1]) == pytest.approx(sum(products.values()), abs=1e-4)
    encoder.mean = True
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    expected = np.mean([products[name] / SHAPES[name][0] for name in SHAPES])
    assert float(codes[0] @ codes[1]) == pytest.approx(expected, abs=1e-5)


def test_code_is_independent_of_tensor_order() -> None:
    change = random_change(torch.Generator().manual_seed(0))
    encoder = random_encoder(0)
    assert torch.equal(encoder(change), encoder(dict(reversed(change.items()))))


def test_encoder_size_is_independent_of_classes_and_channels() -> None:
    encoder = random_encoder(0)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == ENCODER
    more_classes = Encoder(parameters_of(linear_model(INPUTS, FEATURES, 100)), HIDDEN, WIDTH)
    assert {name: tensor.shape for name, tensor in more_classes.state_dict().items()} == {
        name: tensor.shape for name, tensor in encoder.state_dict().items()
    }


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_attention_is_softmax_of_inner_products(peers: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    ids = sorted(int(j) for j in stream.permutation(10)[:peers])
    codes = {j: torch.from_numpy(stream.normal(size=8).astype(np.float32)) for j in reversed(ids)}
    me = ids[int(stream.integers(peers))]
    f = np.array([codes[me].double().numpy() @ codes[j].double().numpy() for j in ids])
    expected = np.exp(f - f.max())
    np.testing.assert_allclose(attention(codes, me).numpy(), expected / expected.sum(), atol=1e-12)


# ---- line 18: the gradient of the encoder --------------------------------------------------------------------


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_encoder_gradient_equals_autograd_through_the_round(peers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, data, encoder = linear_model(INPUTS, FEATURES, CLASSES, seed=seed % 100), data_of(seed % 50), None
    encoder = random_encoder(seed % 1000)
    me = int(torch.randint(peers, (), generator=generator))
    before = clone(parameters_of(model))
    updates = {j: random_change(generator) for j in range(peers)}
    changes = {j: direction(random_change(generator), before) for j in range(peers)}

    # Everything in one graph: encoder, attention, aggregate, network, loss.
    codes = {j: encoder(changes[j]) for j in range(peers)}
    f = torch.stack([(codes[me] * codes[j]).sum() for j in range(peers)])
    w = f.softmax(0)
    aggregated = {name: x - sum(w[j] * updates[j][name] for j in updates) for name, x in before.items()}
    (x, labels), *_ = data.sweep(data.validation)
    loss = cross_entropy(functional_call(model, aggregated, x), labels)
    expected = torch.autograd.grad(loss, list(encoder.parameters()))

    # The chain rule.
    with torch.no_grad():
        codes = {j: encoder(changes[j]) for j in range(peers)}
        row = dict(enumerate(attention(codes, me).tolist()))
        assign(parameters_of(model), aggregate(before, updates, row))
    _, g = validation_gradient(model, data)
    backward(encoder, changes, codes, me, {j: directional_derivative(g, updates[j]) for j in range(peers)})
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert parameter.grad is not None
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(parameter.grad.numpy(), gradient.numpy(), atol=1e-3 * scale + 2e-7, rtol=2e-3)


def test_single_peer_has_zero_encoder_gradient() -> None:
    encoder, change = random_encoder(0), random_change(torch.Generator().manual_seed(0))
    backward(encoder, {0: change}, {0: encoder(change).detach()}, 0, {0: 5.0})
    assert all(
        float(parameter.grad.abs().max()) == 0.0 for parameter in encoder.parameters() if parameter.grad is not None
    )


# ---- whole rounds --------------------------------------------------------------------------------------------


class Reference:
    """Algorithm 1 for one peer, differentiated by autograd."""

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

    def aggregate(
        self, updates: Mapping[int, Mapping[str, Tensor]], changes: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        ids = sorted(updates)
        codes = {j: self.encoder(changes[j]) for j in ids}
        w = torch.stack([(codes[self.me] * codes[j]).sum() for j in ids]).softmax(0)
        aggregated = {
            name: x - sum(weight * updates[j][name] for weight, j in zip(w, ids, strict=True))
            for name, x in self.x.items()
        }
        self.optimizer.zero_grad()
        self.loss(aggregated, "validation").backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.x = clone(aggregated)
        self.row = dict(zip(ids, w.tolist(), strict=True))


def reference_run(
    peers: Sequence[MetaL2C], topology: Topology, rounds: int, silent: Sequence[int] = ()
) -> list[Reference]:
    expected = [Reference(peer) for peer in peers if peer.me not in silent]
    for _ in range(rounds):
        sent = {reference.me: reference.local() for reference in expected}
        for reference in expected:
            present = [reference.me, *(j for j in topology.neighbors[reference.me] if j not in silent)]
            reference.aggregate({j: sent[j][0] for j in present}, {j: sent[j][1] for j in present})
        mean = {
            name: torch.stack([reference.encoder.state_dict()[name] for reference in expected]).mean(0)
            for name in expected[0].encoder.state_dict()
        }
        for reference in expected:
            reference.encoder.load_state_dict(mean)
    return expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_rounds_follow_algorithm_1(topology: Topology, optimizer: str) -> None:
    peers = make(hyper(mixing_optimizer=optimizer), topology.peers)
    expected = reference_run(peers, topology, 4)
    run_rounds(peers, topology, 4)
    for peer, reference in zip(peers, expected, strict=True):
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, reference.x[name], atol=2e-4, rtol=0)
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=5e-4)


def test_first_weights_come_from_initial_encoder() -> None:
    peers = make(hyper(), 4)
    start = clone(peers[0].encoder.state_dict())
    expected = reference_run(peers, complete(4), 1)
    run_rounds(peers, complete(4), 1)
    for peer, reference in zip(peers, expected, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=1e-5)
        assert any(not torch.equal(tensor, start[name]) for name, tensor in peer.encoder.state_dict().items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_encoder_is_bit_identical_on_all_peers_after_every_round(topology: Topology) -> None:
    peers = make(hyper(), topology.peers)
    assert len({digest(peer.encoder.state_dict()) for peer in peers}) == 1
    seen: list[list[str]] = [[] for _ in peers]

    def remember(peer: Any, t: int) -> None:
        seen[peer.me].append(digest(peer.encoder.state_dict()))

    run_rounds(peers, topology, 4, after=remember)
    assert all(digests == seen[0] for digests in seen)
    assert len(set(seen[0])) == 4


def test_encoder_moments_stay_local() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 2)
    assert len({digest(peer.encoder_optimizer.state_dict()) for peer in peers}) == 3


@pytest.mark.exhaustive
def test_missing_neighbor_has_no_weight() -> None:
    peers = make(hyper(), 4)
    expected = reference_run(peers, complete(4), 2, silent=[3])
    traffic = run_rounds(peers, complete(4), 2, silent=[3])
    assert traffic[0][0].missing == {"Progress": [3], "EncoderParameters": [3]}
    for peer, reference in zip(peers[:3], expected, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=2e-4)
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, reference.x[name], atol=2e-4, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("field", ["update", "change"])
def test_nonfinite_message_counts_as_missing(field: str) -> None:
    class Diverged(MetaL2C):
        def progress(self, update: Any, change: Any) -> Any:
            body: Any = super().progress(update, change)
            return replace(
                body, **{field: {name: tensor * math.nan for name, tensor in getattr(body, field).items()}}
            )

    peers = make(hyper(), 3)
    peers[2] = Diverged(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    run_rounds(peers, complete(3), 2)
    for peer in peers[:2]:
        assert list(peer.weights() or {}) == [0, 1]
        assert all(bool(tensor.isfinite().all()) for tensor in peer.model.state_dict().values())


def test_diverged_training_is_rolled_back() -> None:
    class Diverging(MetaL2C):
        def train(self, **options: Any) -> None:
            self.model.linear_head.bias.data[0] = math.nan

    peers = make(hyper(), 3)
    start = clone(parameters_of(peers[0].model))
    peers[2] = Diverging(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    updates = {j: Reference(peers[j]).local()[0] for j in range(2)}
    traffic = run_rounds(peers, complete(3), 1)
    assert all(rounds[0].missing == {} for rounds in traffic)
    for peer in peers:
        w = peer.weights() or {}
        for name, tensor in parameters_of(peer.model).items():
            expected = start[name] - sum(w[j] * updates[j][name] for j in range(2))
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


def test_nonfinite_gradient_skips_the_step() -> None:
    (peer,) = make(hyper(), 1)
    before = digest(peer.encoder.state_dict())
    change = random_change(torch.Generator().manual_seed(0))
    peer.learn({0: change}, peer.encode({0: change}), {0: math.nan})
    assert digest(peer.encoder.state_dict()) == before
    assert peer.encoder_optimizer.state_dict()["state"] == {}


# ---- pruning and bytes ---------------------------------------------------------------------------------------


def total(traffic: Sequence[Sequence[Traffic]], t: int, kind: str) -> int:
    return sum(messages(rounds[t].sent, kind) for rounds in traffic)


@pytest.mark.exhaustive
def test_round_costs_two_models_per_directed_edge_and_two_encoders_per_tree_edge() -> None:
    peers = make(hyper(), 4)
    traffic = run_rounds(peers, complete(4), 2)
    for t in range(2):
        assert total(traffic, t, "Progress") == 4 * 3
        assert total(traffic, t, "EncoderParameters") == 2 * 3
        paid = sum(payload(rounds[t].sent) for rounds in traffic)
        assert paid == 4 * (12 * 2 * NUMBERS + 2 * 3 * ENCODER)


@pytest.mark.exhaustive
def test_encoder_still_travels_after_pruning() -> None:
    """On a complete graph the allreduce tree has all edges of peer 0, most of which are pruned here."""
    peers = make(hyper(prune_round=1, prune_to=1), 5)
    rows: list[dict[int, dict[int, float]]] = [{} for _ in peers]
    encoders: list[list[str]] = [[] for _ in peers]

    def after(peer: Any, t: int) -> None:
        rows[peer.me][t] = dict(peer.weights())
        encoders[peer.me].append(digest(peer.encoder.state_dict()))

    traffic = run_rounds(peers, complete(5), 6, after=after)
    for me, rounds in enumerate(traffic):
        at_t0 = rows[me][1]
        (kept,) = sorted((j for j in at_t0 if j != me), key=lambda j: (-at_t0[j], j))[:1]
        assert [len(rows[me][t]) for t in range(6)] == [5, 5, 2, 2, 2, 2]
        assert all(list(rows[me][t]) == sorted([me, kept]) for t in range(2, 6))
        for t, one in enumerate(rounds):
            assert one.missing == {}
            if t >= 2:
                assert one.sources == (kept,)
                assert {j for j, kinds in one.received.items() if "Progress" in kinds} == {kept}
    for t in range(6):
        assert total(traffic, t, "EncoderParameters") == 2 * 4
        assert total(traffic, t, "Progress") == 5 * (4 if t < 2 else 1)
    assert all(digests == encoders[0] for digests in encoders)
    assert len(set(encoders[0])) == 6
    silent = {(i, j) for i in range(5) for j in range(5) if i != j and j not in rows[i][5] and i not in rows[j][5]}
    assert any(0 in edge for edge in silent)  # the tree has edges on which nothing else is sent


def test_bfloat16_halves_model_bytes() -> None:
    peers = make(hyper(precision="bfloat16"), 3)
    traffic = run_rounds(peers, complete(3), 1)
    assert sum(payload(rounds[0].sent) for rounds in traffic) == 6 * 2 * 2 * NUMBERS + 4 * 2 * 2 * ENCODER


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given", [{}, {"precision": "bfloat16"}, {"frozen": True}, {"frozen": True, "send_codes": True}]
)
def test_spooled_messages_are_bit_identical(given: Mapping[str, Any], tmp_path: Path) -> None:
    given = dict(given)
    if given.pop("frozen", False):
        given.update(encoder=trained(tmp_path), train_encoder=False)
    digests = []
    for spool in (False, True):
        peers = make(hyper(spool=spool, prune_round=1, prune_to=2, **given), 4)
        run_rounds(peers, complete(4), 3)
        digests.append([digest(peer.state_dict()) for peer in peers])
    assert digests[0] == digests[1]


# ---- pretrained encoders -------------------------------------------------------------------------------------


def trained(folder: Path) -> Path:
    """Write the checkpoint of a peer whose encoder distinguishes changes; return its path."""
    path = folder / "checkpoint.pt"
    checkpoint.save(path, {"run": "0" * 16, "peer": 0, "algorithm": {"encoder": random_encoder(5).state_dict()}})
    return path


@pytest.mark.exhaustive
def test_frozen_encoder_is_neither_changed_nor_sent(tmp_path: Path) -> None:
    path = trained(tmp_path)
    peers = make(hyper(encoder=path, train_encoder=False), 4)
    traffic = run_rounds(peers, complete(4), 2)
    for peer in peers:
        assert digest(peer.encoder.state_dict()) == digest(random_encoder(5).state_dict())
        weights = list((peer.weights() or {}).values())
        assert max(weights) > min(weights) + 1e-3
        assert peer.diagnostics() == {}
    assert {kind for rounds in traffic for one in rounds for kinds in one.sent.values() for kind in kinds} == {
        "Progress"
    }


@pytest.mark.exhaustive
def test_codes_replace_changes_bit_identically_for_half_the_bytes(tmp_path: Path) -> None:
    path, outcomes, sent = trained(tmp_path), [], []
    for codes in (False, True):
        peers = make(hyper(encoder=path, train_encoder=False, send_codes=codes, prune_round=1, prune_to=2), 4)
        traffic = run_rounds(peers, complete(4), 4)
        outcomes.append([digest(peer.state_dict()) for peer in peers])
        sent.append([sum(payload(rounds[t].sent) for rounds in traffic) for t in range(4)])
    assert outcomes[0] == outcomes[1]
    edges = [12, 12, 8, 8]
    assert sent == [[4 * n * 2 * NUMBERS for n in edges], [4 * n * (NUMBERS + CODE) for n in edges]]


def test_loaded_encoder_can_be_trained_further(tmp_path: Path) -> None:
    peers = make(hyper(encoder=trained(tmp_path)))
    assert digest(peers[2].encoder.state_dict()) == digest(random_encoder(5).state_dict())
    run_rounds(peers, LINE, 1)
    assert digest(peers[2].encoder.state_dict()) != digest(random_encoder(5).state_dict())


def test_frozen_encoder_needs_a_path_and_codes_need_a_frozen_encoder() -> None:
    with pytest.raises(OptionErrors, match="train_encoder: false needs a trained encoder"):
        Hyper.parse({"train_encoder": False})
    with pytest.raises(OptionErrors, match="send_codes needs train_encoder: false"):
        Hyper.parse({"send_codes": True, "encoder": "x"})


def test_encoder_path_is_absolute_in_resolved_run_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plain = Hyper.parse({"encoder": "runs/x"}).to_dict()
    assert plain["encoder"] == str(tmp_path / "runs" / "x")
    monkeypatch.chdir("/")
    assert Hyper.parse(plain).to_dict() == plain


# ---- switches ------------------------------------------------------------------------------------------------


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", CHANGES)
def test_every_option_changes_the_outcome(key: str) -> None:
    outcomes = []
    for h in (hyper(), replace(hyper(), **CHANGES[key])):
        peers = make(h)
        run_rounds(peers, complete(3), 3)
        outcomes.append(np.concatenate([x.numpy().flatten() for p in peers for x in parameters_of(p.model).values()]))
    changed, default = outcomes
    assert not np.allclose(changed, default, atol=1e-7, rtol=0)


def test_all_options_are_covered_here_or_with_l2c() -> None:
    mine = set(Hyper.known()) - set(L2C.Hyper.known())
    assert mine == {"encoder_hidden", "encoder_width", "score", "encoder", "train_encoder", "send_codes"}
    assert isinstance(make(hyper(), 1)[0].model, Model)

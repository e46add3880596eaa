"""meta-L2C, of: Learning to Collaborate in Decentralized Learning of Personalized Models.

Shuangtong Li, Tianyi Zhou, Xinmei Tian, Dacheng Tao, CVPR 2022. https://doi.org/10.1109/CVPR52688.2022.00954

L2C (l2c.py) learns a weight for each pair of peers. meta-L2C learns to *compute* weights from how far two models have
come since their common start: an encoder, the same on all peers, turns that change into a code, and attention
compares codes. What it has learned holds for peers and tasks that it has not seen.

    update Δ_j = θ_j^t − θ_j^{t+½}      change Δ̂_j = (θ_j^{t+½} − θ^0) / ‖θ_j^{t+½} − θ^0‖      code E(Δ̂_j)
    weights w_i = softmax over {i} ∪ N_i of f_ij = <E(Δ̂_i), E(Δ̂_j)>

Differs from the paper:

- line 16 of Algorithm 1 leaves the own update out of the sum; the second line of Eq. 2, which is used here, has it.
- the change of the whole model is scaled to norm 1 before it is encoded: as it grows over the rounds, and differs in
  size between peers, the encoder would otherwise see that more than its direction.
- ``score: mean`` divides the inner products of Eq. 5 by the numbers of channels and layers, as later code of the
  authors does. Weights then differ far less.
- every parameter tensor is a layer, biases and normalisation too; both of the encoder's layers end in tanh.
- the own update is never pruned, and counts neither among the K_0 that are removed nor among those that are kept.
- neighbours that are pruned send one message more, which is not looked at: w_ij is known only after round T_0's.
- the paper says Adam with a weight decay of 0.01; here it is decoupled (AdamW) unless ``mixing_optimizer: adam``,
  which makes the encoder forget.
- ``prune_to`` says how many neighbours are kept, whatever the degree; T_0 + 1 rounds are dense (line 20).
- with ``precision: bfloat16`` only what neighbours send is rounded; a peer's own stays float32.
- line 24 averages the encoder's parameters; each peer's Adam keeps its own moments.
- a frozen encoder (``train_encoder: false``) is not averaged, and ``send_codes`` sends its codes instead of changes.
- batch-normalisation statistics stay local, and are those of the local training.
- local training that diverges is dropped: the peer goes on as if it had not trained in that round. So is a mix that
  overflows; a gradient of the encoder that is not finite is no step.
- a neighbour that misses a deadline is left out of that round's weights; one that is missing in round T_0 is pruned,
  unless fewer than ``prune_to`` were heard.
- validation samples are asked for with a frozen encoder too, which does not read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl import checkpoint, rng
from p2pfl.algorithms import l2c
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.l2c import (
    aggregate,
    in_precision,
    make_mixing_optimizer,
    slope,
    strongest,
    validation_gradient,
)
from p2pfl.errors import RunFolderError
from p2pfl.net import Net
from p2pfl.options import OptionErrors
from p2pfl.runfolder import PeerId, RunFolder
from p2pfl.spool import Spool
from p2pfl.tensors import Tensors, assign, clone, is_finite, parameters_of, subtract
from p2pfl.training import make_optimizer
from p2pfl.wire import Body, Layout


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


@dataclass(frozen=True)
class Hyper(l2c.Hyper):
    encoder_hidden: PositiveInt = 10
    """Outputs of the encoder's first layer."""
    encoder_width: PositiveInt = 5
    """d, outputs of its second layer: numbers in the code of one channel."""
    score: Literal["sum", "mean"] = "sum"
    """f_ij: the inner product of codes summed over channels and layers (Eqs. 5, 7, 8), or its mean over both."""
    encoder: Annotated[Path, AfterValidator(_absolute)] | None = None
    """Where the encoder comes from: the folder of a meta-l2c run, or a peer's checkpoint of one; null: random."""
    train_encoder: bool = True
    """Learn the encoder; false takes it as it is (Table 4)."""
    send_codes: bool = False
    """Send the code of the own change instead of the change, nearly halving the bytes; for a frozen encoder only."""

    @model_validator(mode="after")
    def _frozen_ones_come_from_somewhere(self) -> Hyper:
        if not self.train_encoder and self.encoder is None:
            raise ValueError("train_encoder: false needs an encoder that has been trained: encoder: FOLDER OF A RUN")
        if self.send_codes and self.train_encoder:
            raise ValueError(
                "an encoder that is trained needs changes, not codes: send_codes needs train_encoder: false"
            )
        return self


# ---- what peers say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress(Body):
    """Δ_j and Δ̂_j: all parameters by name, in the run's precision."""

    update: Tensors
    change: Tensors


@dataclass(frozen=True)
class CodedProgress(Body):
    """Δ_j as above, and E(Δ̂_j), float32 [n]."""

    update: Tensors
    code: Tensor


@dataclass(frozen=True)
class EncoderParameters(Body):
    """The encoder's parameters by name, float32; summed over all peers."""

    values: Tensors


# ---- equations -----------------------------------------------------------------------------------------------


def direction(now: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Δ̂ (line 11): θ^{t+½} − θ^0, all parameters together scaled to norm 1; zeros if nothing has changed."""
    change = subtract(now, initial)
    squares = sum(float(tensor.double().square().sum()) for tensor in change.values())
    scale = 1.0 / math.sqrt(squares) if squares > 0.0 else 0.0
    return {name: tensor * scale for name, tensor in change.items()}


class Encoder(nn.Module):
    """E, Eqs. 7 and 8: a network of two layers for each parameter tensor, the same for all of the tensor's channels.

    Args:
        parameters: of a model like those to be encoded.
        hidden, width: outputs of the two layers.
        mean: scale the codes, so that the inner product of two is a mean over channels and layers and not a sum.
    """

    def __init__(self, parameters: Tensors, hidden: int, width: int, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.names = list(parameters)
        self.layers = nn.ModuleDict()
        self.length = 0
        for name, parameter in parameters.items():
            channels, inputs = channels_of(parameter).shape
            layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Tanh()]
            self.layers[_key(name)] = nn.Sequential(*layers)
            self.length += channels * width

    def forward(self, change: Tensors) -> Tensor:
        """The code of a model's change, float32 [length]: the inner product of two codes is f (Eq. 5)."""
        device = next(self.parameters()).device
        codes = []
        for name in self.names:  # one tensor after another, as they may lie on disk
            channels = channels_of(change[name]).to(device, torch.float32)
            share = 1.0 / math.sqrt(len(channels) * len(self.names)) if self.mean else 1.0
            codes.append(share * self.layers[_key(name)](channels).flatten())
        return torch.cat(codes)


def channels_of(tensor: Tensor) -> Tensor:
    """[output channels, everything else]; a vector has one number in each channel."""
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)


def _key(name: str) -> str:
    """Names of submodules may have no dots."""
    return name.replace(".", "/")


def attention(codes: Mapping[PeerId, Tensor], me: PeerId) -> Tensor:
    """Line 14 and Eq. 4: w_ij, float64 [n], over the peers whose codes are here, ascending. Differentiable."""
    own = codes[me].double()
    return torch.stack([own @ codes[j].double() for j in sorted(codes)]).softmax(0)


def backward(
    encoder: Encoder,
    changes: Mapping[PeerId, Tensors],
    codes: Mapping[PeerId, Tensor],
    me: PeerId,
    slopes: Mapping[PeerId, float],
) -> None:
    """∂L_val/∂E by the chain rule through w, into ``.grad`` of the encoder's parameters; ∂L_val/∂w_ij is −d_j.

    First down to the codes, then from each code on: the changes are encoded again, one at a time, so that no graph
    holds more than one of them.
    """
    leaves = {j: codes[j].detach().requires_grad_() for j in sorted(codes)}
    w = attention(leaves, me)
    w.backward(torch.tensor([-slopes[j] for j in leaves], dtype=w.dtype, device=w.device))  # type: ignore[no-untyped-call]
    for j, leaf in leaves.items():
        encoder(changes[j]).backward(leaf.grad)


class MetaL2C(Algorithm[Hyper]):
    """meta-L2C, Algorithm 1."""

    name = "meta-l2c"
    gist = "as l2c, but weights come from an encoder of updates, which the peers learn together"
    title = "Learning to Collaborate in Decentralized Learning of Personalized Models"
    authors = "Li, Zhou, Tian, Tao"
    venue = "CVPR 2022"
    url = l2c.L2C.url
    Hyper = Hyper
    homogeneous = True
    masked_evaluation = True
    needs_validation = True
    state = ("model", "optimizer", "encoder", "encoder_optimizer", "partners", "w")

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )
        parameters = parameters_of(self.model)
        self.initial = clone(parameters)  # θ^0, the same on all peers
        with rng.torch_seeded(self.seed, "meta-l2c.encoder"):
            self.encoder = Encoder(parameters, h.encoder_hidden, h.encoder_width, h.score == "mean").to(self.device)
        if h.encoder is not None:
            load_encoder(self.encoder, h.encoder)
        self.encoder_optimizer = make_mixing_optimizer(h, self.encoder.parameters())
        self.partners: list[PeerId] | None = None  # the neighbours left after pruning
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.spool = Spool()
        self.validation_loss = 0.0

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        x = parameters_of(self.model)
        before = clone(x)
        self.train_soundly(epochs=h.local_epochs, batch=h.batch)  # lines 7–10
        update, change = subtract(before, x), direction(x, self.initial)  # line 11
        heard = await net.exchange(self.progress(update, change))
        theirs = {j: body for j, body in heard.items() if self.partners is None or j in self.partners}
        updates = {**{j: body.update for j, body in theirs.items()}, self.me: update}
        changes = {**{j: body.change for j, body in theirs.items() if isinstance(body, Progress)}, self.me: change}
        codes = self.encode(changes)
        codes.update({j: body.code for j, body in theirs.items() if isinstance(body, CodedProgress)})
        self.w = dict(zip(sorted(codes), attention(codes, self.me).tolist(), strict=True))  # line 14
        mixed = aggregate(before, updates, self.w)
        sound = all(map(is_finite, mixed.values()))  # else a neighbour's numbers are near the end of what there is
        if sound:
            assign(x, mixed)  # line 16
        if h.train_encoder and sound:
            self.validation_loss, gradient = validation_gradient(self.model, self.data)
            slopes = {j: slope(gradient, updates[j]) for j in sorted(updates)}
            self.learn(changes, codes, slopes)  # line 18
        if h.prune_round is not None and t >= h.prune_round and self.partners is None:  # line 20
            self.partners = list(strongest(self.w, net.sources, h.prune_to))  # lines 21–22
            net.listen_to(self.partners)
        if h.train_encoder:
            parameters = parameters_of(self.encoder)
            assign(parameters, (await net.allreduce(EncoderParameters(parameters))).values)  # line 24

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    def progress(self, update: Tensors, change: Tensors) -> Progress | CodedProgress:
        """What neighbours hear of the own training."""
        update = in_precision(update, self.hyper.precision)
        if self.hyper.send_codes:
            return CodedProgress(update, self.encode({self.me: change})[self.me])
        return Progress(update, in_precision(change, self.hyper.precision))

    @torch.no_grad()
    def encode(self, changes: Mapping[PeerId, Tensors]) -> dict[PeerId, Tensor]:
        return {j: self.encoder(changes[j]) for j in sorted(changes)}

    def learn(
        self, changes: Mapping[PeerId, Tensors], codes: Mapping[PeerId, Tensor], slopes: Mapping[PeerId, float]
    ) -> None:
        """Line 18: a step of Adam on the encoder."""
        self.encoder_optimizer.zero_grad(set_to_none=True)
        backward(self.encoder, changes, codes, self.me, slopes)
        # One peer that diverges would end the encoder of all of them.
        if all(p.grad is not None and bool(p.grad.isfinite().all()) for p in self.encoder.parameters()):
            self.encoder_optimizer.step()
        self.encoder_optimizer.zero_grad(set_to_none=True)

    def layouts(self) -> Sequence[Layout]:
        parameters = parameters_of(self.model)
        spoken = [Layout.of(self.progress(parameters, parameters))]
        if self.hyper.train_encoder:
            spoken.append(Layout.of(EncoderParameters(parameters_of(self.encoder))))
        return spoken

    def stow(self, body: Body) -> Body:
        if self.hyper.spool and isinstance(body, Progress):
            return Progress(self.spool.put(body.update), self.spool.put(body.change))
        if self.hyper.spool and isinstance(body, CodedProgress):
            return CodedProgress(self.spool.put(body.update), body.code)
        return body

    def weights(self) -> Mapping[PeerId, float]:
        return self.w

    def observations(self) -> Mapping[str, float]:
        return {"validation_loss": self.validation_loss} if self.hyper.train_encoder else {}


# ---- encoders of earlier runs --------------------------------------------------------------------------------


def load_encoder(encoder: Encoder, path: Path) -> None:
    """Give ``encoder`` the parameters of one that was trained in an earlier run.

    Args:
        path: the run's folder, or the checkpoint of one of its peers: all peers have the same encoder.

    Raises OptionErrors: there is none, or it is for models with other parameters.
    """
    try:
        found = read_encoder(path)
    except RunFolderError as error:
        raise OptionErrors([(("encoder",), str(error))]) from None
    expected = encoder.state_dict()
    there, here = ({name: _form(tensor) for name, tensor in state.items()} for state in (found, expected))
    if there != here:
        name = next(name for name in (*here, *there) if there.get(name) != here.get(name))
        text = f"{there.get(name, 'nothing')} there and {here.get(name, 'nothing')} here"
        text = (
            f"{path}: an encoder of another form: {name} is {text}; models and encoder sizes must be as in that run"
        )
        raise OptionErrors([(("encoder",), text)])
    if not all(map(is_finite, found.values())):
        raise OptionErrors(
            [(("encoder",), f"{path}: the encoder there has diverged: not all of its numbers are finite")]
        )
    encoder.load_state_dict(found)


def read_encoder(path: Path) -> dict[str, Tensor]:
    """The encoder in a run folder or a checkpoint. Nothing in the file is executed. Raises RunFolderError."""
    if path.is_dir():
        saved = [place.checkpoint for place in RunFolder.open(path).peers() if place.checkpoint.is_file()]
        if not saved:
            raise RunFolderError(f"{path}: no peer of this run has written a checkpoint")
        path = saved[0]
    method = checkpoint.read(path).get("algorithm")
    encoder = method.get("encoder") if isinstance(method, dict) else None
    if not isinstance(encoder, dict) or not all(isinstance(tensor, Tensor) for tensor in encoder.values()):
        raise RunFolderError(f"{path}: no encoder in it; take the folder of a meta-l2c run, or a checkpoint of one")
    return encoder


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""Softmax regression in NumPy and double precision, with which tests of algorithms compute rounds by hand."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from p2pfl.learning.peer_data import Samples
from p2pfl.models import Model

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]


def theta(model: Model) -> Matrix:
    """Return weights and biases of the head, [classes, features + 1]."""
    head = model.linear_head
    return np.asarray(torch.cat([head.weight, head.bias[:, None]], dim=1).detach().double().numpy())


def softmax(scores: Matrix) -> Matrix:
    exponentials = np.exp(scores)
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def regression_data(samples: Samples) -> tuple[Matrix, Labels]:
    """Return the pixels with a 1 appended for the bias, [n, pixels + 1], and the labels [n]."""
    images, labels = samples.take(np.arange(len(samples)))
    pixels = images.reshape(len(samples), -1).double().numpy() / 255.0
    return np.hstack([pixels, np.ones((len(pixels), 1))]), labels.numpy()


def gradient(x: Matrix, inputs: Matrix, labels: Labels) -> Matrix:
    """Return the gradient [classes, pixels + 1] of the mean cross-entropy, at the parameters ``x``."""
    errors = softmax(inputs @ x.T) - np.eye(len(x))[labels]
    return np.asarray(errors.T @ inputs / len(inputs))

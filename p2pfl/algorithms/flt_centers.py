"""What FLT makes of a peer's images: codes, their centers, embedded centers, and distances between peers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

LEAST_CENTERS = 4
"""What UMAP needs to embed in two dimensions."""


class Autoencoder(nn.Module):
    """E and D, for images of at least 4×4 pixels.

    Args:
        channels: of the images.
        size: their height and width. The rows and columns by which it exceeds a multiple of 4 are not reconstructed.
        latent: length of E(x).
    """

    def __init__(self, channels: int, size: Sequence[int], latent: int) -> None:
        super().__init__()
        height, width = (length // 4 for length in size)
        self.encoder = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(4 * height * width, latent)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(latent, 4 * height * width), nn.Unflatten(1, (4, height, width))),
            *(nn.ConvTranspose2d(4, 16, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(16, channels, 2, stride=2)),
        )

    def loss(self, x: Tensor) -> Tensor:
        """Return the mean squared error of D(E(x)) for images x [B, C, H, W]."""
        reconstructed = self.decoder(self.encoder(x))
        height, width = reconstructed.shape[-2:]
        return mse_loss(reconstructed, x[..., :height, :width])


def k_means(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Line 2: the centers, float32 [clusters or as many as points differ, d], of points [N, d]."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    clusters = min(clusters, len(np.unique(points, axis=0)))
    with threadpool_limits(1):  # several threads add up in any order
        fitted = KMeans(clusters, n_init=10, random_state=seed).fit(points)
    return np.asarray(fitted.cluster_centers_, dtype=np.float32)


def embed(centers: Tensor, seed: int) -> Tensor:
    """Line 3: centers [n, d] embedded in two dimensions, float32 [n, 2]; n ≥ ``LEAST_CENTERS``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # UMAP's import warns that TensorFlow is missing
        import numba

        # With OpenMP, numba would change the number of threads of torch, and embed wrongly in a fork.
        numba.config.THREADING_LAYER = "workqueue"
        from umap import UMAP

        neighbors = min(15, len(centers) - 1)  # 15 is UMAP's default
        reducer = UMAP(n_components=2, n_neighbors=neighbors, random_state=seed, n_jobs=1)
        return torch.from_numpy(np.asarray(reducer.fit_transform(centers.numpy()), dtype=np.float32))


def matching_distance(u: Tensor, v: Tensor) -> float:
    """Line 4: d_ij of two peers' centers u [k, e] and v [l, e], in float64; infinite if one has none."""
    if not (len(u) and len(v)):
        return float("inf")
    from scipy.optimize import linear_sum_assignment  # takes half a second

    squares = torch.cdist(u.double(), v.double()).square().numpy()
    matched = squares[linear_sum_assignment(squares)]
    return float(np.sqrt(matched.sum()) / len(matched))

"""Codecs: how the tensors of a message are packed, for fewer bytes. The run file's key ``codec`` names them.

A codec packs and unpacks one tensor at a time, and remembers nothing (``Codec``). ``Packing`` is the pipeline that
applies codecs to the bodies of a run, by kind.
"""

from __future__ import annotations

from p2pfl.codecs.base import CODECS as CODECS
from p2pfl.codecs.base import Codec as Codec
from p2pfl.codecs.base import codec as codec
from p2pfl.registry import discover

discover(__name__, CODECS)

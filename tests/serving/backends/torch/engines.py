"""What makes a torch engine of a folder."""

from __future__ import annotations

from collections.abc import Callable

from serving.backends.torch.backend import TorchBackend

Make = Callable[..., TorchBackend]

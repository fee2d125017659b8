"""What makes an onnx engine of a folder."""

from __future__ import annotations

from collections.abc import Callable

from serving.backends.onnx.backend import OnnxBackend

Make = Callable[..., OnnxBackend]

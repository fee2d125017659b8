"""The grades of a figure: what it rests on."""

from __future__ import annotations

from typing import Literal

Grade = Literal["confirmed", "estimated", "predicted", "measured", "published"]

"""Find the .onnx file of a weight format: one graph in the folder, or the hub's onnx/ layout.

    graph_of(folder, "int4")     # Graph(file=.../onnx/model_q4.onnx, weight_format="int4")

The hub keeps one graph a format under onnx/, told apart by the end of its name, beside config.json
and tokenizer. A single foreign graph does not say its format.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from models.errors import UnknownModel

# Our name of a format -> the ends of file names that the hub has for it, preferred first. Their q8
# is made by dynamic quantisation. Where no format is asked for, the first that is there.
ENDS: dict[str, tuple[str, ...]] = {
    "int4": ("_q4",),
    "int8": ("_quantized", "_int8", "_uint8"),
    "fp32": ("",),
}


class Graph(NamedTuple):
    """A graph and its weight format; "" where nothing says."""

    file: Path
    weight_format: str


def graphs(folder: Path) -> list[Path]:
    """Every graph of a folder, those under onnx/ included."""
    return sorted(folder.glob("*.onnx")) + sorted(folder.glob("onnx/*.onnx"))


def is_layout(folder: Path) -> bool:
    """True where the graphs lie under onnx/, told apart by their names."""
    return not any(folder.glob("*.onnx")) and any(folder.glob("onnx/*.onnx"))


def _names(weight_format: str | None) -> list[tuple[str, str]]:
    """Format and file of each graph that would do, the best first."""
    wanted = (weight_format,) if weight_format else tuple(ENDS)
    return [(one, f"onnx/model{end}.onnx") for one in wanted for end in ENDS.get(one, ())]


def graph_of(folder: Path, weight_format: str | None) -> Graph:
    """The graph of a format, or the best one where None is asked. Raises UnknownModel."""
    for known, name in _names(weight_format):
        if (folder / name).is_file():
            return Graph(folder / name, known)
    there = graphs(folder)
    if weight_format is None and there:
        return Graph(there[0], "")
    names = ", ".join(str(file.relative_to(folder)) for file in there)
    raise UnknownModel(f"{folder.name} holds no graph of format {weight_format}; it has {names}")


def patterns(weight_format: str | None) -> list[list[str]]:
    """File patterns to fetch from the hub, one try after the other."""
    tries = [[name, f"{name}_data*", f"{name}.data*"] for _, name in _names(weight_format)]
    whole = ["model.onnx", "model.onnx_data*", "model.onnx.data*", "genai_config.json"]
    return [[*whole, *tries[0]], *tries[1:]] if tries else [whole]

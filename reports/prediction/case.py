"""One question to the predictor: a device, an engine, a model, and what is in a step."""

from __future__ import annotations

import msgspec

from reports.prediction.facts import Chip, Shape

# A decode step; all prompts of a batch; the last two of a closed loop of `rows` streams.
METRICS = ("decode", "prefill", "tpot", "ttft")
SERVERS = ("vllm", "sglang", "trtllm")
TUNED = ("tuned", "vllm2023")  # tensor parallel, not servers of today
_FAMILIES = {
    "vllm2023": ("vllm (nov 2023",),
    "ollama": ("ollama",),
    "tuned": ("gpt-fast", "mlc", "exllama"),
    "ik": ("ik_llama",),
    "ampere": ("ampere",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "trtllm": ("trtllm", "tensorrt"),
    "openvino": ("openvino", "ipex", "pytorch"),
}
_SIXTEEN = ("F16", "FP16", "BF16", "BFLOAT16", "NAN", "F32", "FP32")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What takes how long? Tokens are means."""

    chip: Chip
    engine: str
    shape: Shape
    fmt: str
    rows: float = 1  # sequences that decode together, or streams, in all processes
    context: float = 256  # tokens that each has read
    prompt: float = 512
    output: float = 256
    devices: int = 1
    threads: int = 0  # CPU: of one process; 0: one a core
    processes: int = 1
    group: str = ""  # kind of the published row

    @property
    def family(self) -> str:
        """The engine's name without its version; llama.cpp where it is no other."""
        name = self.engine.lower()
        for family, parts in _FAMILIES.items():
            if any(part in name for part in parts):
                return family
        return "llamacpp"

    @property
    def is_server(self) -> bool:
        return self.family in SERVERS

    @property
    def format_class(self) -> str:
        """16, 8, fp4, q0 (simple 4- and 5-bit blocks), kq and k23 (K-quants), iq (codebooks)."""
        name = self.fmt.upper()
        if name in _SIXTEEN or name == "FP4":
            return "fp4" if name == "FP4" else "16"
        if name.startswith("IQ") and not name.startswith("IQ4"):
            return "iq"
        if "8" in name:
            return "8"
        if name.startswith(("Q2_K", "Q3_K")):
            return "k23"
        return "kq" if "_K" in name or name == "IQ4_XS" else "q0"

    def error_class(self, metric: str) -> str:
        """Whose error its interval is taken from."""
        kind = "other" if self.family in (*TUNED, "ollama") else "llama"
        memory = "cpu" if self.chip.is_cpu else self.chip.memory
        return f"{metric}|{memory}|{'serve' if self.is_server else kind}"

"""transformers 5 beside the 4.57 that optimum holds the environment at: an environment of its own,
and what is done in it.

    python -m tests.serving.backends.transformers5   # makes it, as `make test` does
    environment()   # its interpreter; raises NotMade

It holds transformers 5 and what that needs newer; everything else, torch above all, it takes from
the environment that made it. It lies in the cache, and is made again when the environment below it
is another. As a script (`run`) it is the work of test_transformers5.py's other side: it writes
folders as 5.x writes them, reads folders that 4.57 wrote, with transformers and with the torch
engine, and says what came.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

from models.cache import cache_dir
from models.manifest import making
from tests.shapes import TINY

REQUIREMENT = "transformers>=5,<6"
ROOT = Path(__file__).resolve().parents[3]
COUNT = 8  # tokens generated after each prompt
PROMPTS = [
    [5, 9, 100, 33],
    [int(n) for n in range(40, 70)],
    [(n * 7919) % 600 + 3 for n in range(550)],
]
_INSTALL_SECONDS = 150.0


class NotMade(Exception):
    """The environment could not be made; the message says why."""


def environment() -> Path:
    """The interpreter of the environment, which is made if it is not there yet. Raises NotMade."""
    below = sysconfig.get_paths()["purelib"]
    mark = hashlib.blake2b(
        f"{below} {REQUIREMENT} {sys.version}".encode(), digest_size=6
    ).hexdigest()
    folder = cache_dir() / "tests" / f"transformers-5-{mark}"
    python = folder / "bin" / "python"
    with making(folder):
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
            _install(python)
            inside = Path(
                _run(
                    [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
                ).strip()
            )
            (inside / "below.pth").write_text(
                below + "\n", encoding="utf-8"
            )  # after its own folder on the path
            version = _run(
                [str(python), "-c", "import transformers, torch; print(transformers.__version__)"]
            ).strip()
            if not version.startswith("5."):
                raise NotMade(
                    f"transformers {version} was installed where {REQUIREMENT} was wanted"
                )
            (folder / "complete").write_text(version, encoding="utf-8")
    return python


def _install(python: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    _run([*pip, REQUIREMENT])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NotMade(f"the environment for {REQUIREMENT} cannot be made: {problem}") from problem
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise NotMade(
            f"the environment for {REQUIREMENT} cannot be made: "
            f"{said[-1] if said else f'status {done.returncode}'}"
        )
    return done.stdout


def run(out: Path, read: list[Path]) -> dict[str, Any]:
    """The other side's work, in its own process: see `work`."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(environment()),
        "-m",
        "tests.serving.backends.transformers5",
        "work",
        str(out),
        *map(str, read),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- in the environment


def work(out: Path, read: list[Path]) -> dict[str, Any]:
    """Under transformers 5: write each of the tiny shapes to `out` and generate from it; read each
    folder of `read` with both engines,
    and convert it."""
    import transformers

    return {
        "version": transformers.__version__,
        "written": {name: _write(name, out / name) for name in TINY},
        "read": {
            folder.name: {"transformers": _generated(folder), "engine": engine_tokens(folder)}
            for folder in read
        },
        "converted": {folder.name: _convert(folder, out / "converted") for folder in read},
    }


def save(name: str, folder: Path) -> None:
    """One of the tiny shapes, saved by whichever transformers is installed, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from models.convert.compare import TRANSFORMERS_LOCK
    from models.tokenization.tokenizer import shipped

    spec = TINY[name]
    rope: dict[str, Any] = {"rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = {
            key: getattr(spec.rope_scaling, key)
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        }
        rope["rope_scaling"] = scaling | {
            "rope_type": "llama3",
            "original_max_position_embeddings": spec.rope_scaling.original_context,
        }
    config = AutoConfig.for_model(
        spec.family,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocabulary,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_epsilon,
        tie_word_embeddings=spec.tied,
        initializer_range=0.1,  # greedy tokens far from ties
        bos_token_id=0,
        eos_token_id=2,
        **rope,
    )
    with TRANSFORMERS_LOCK:
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "shipped.json").write_text(json.dumps(shipped(spec.vocabulary)), encoding="utf-8")
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "shipped.json"), eos_token="<|im_end|>"
    ).save_pretrained(folder)
    (folder / "shipped.json").unlink()


def engine_tokens(folder: Path) -> list[list[int]]:
    """What the torch engine generates after PROMPTS."""
    from serving.backends.backend_interface import EngineConfig
    from serving.backends.torch.backend import TorchBackend
    from tests.serving.backends.backend_steps import generate

    config = EngineConfig(
        "torch", str(folder), "m", weight_format="fp32", slots=1, context_tokens=600, threads=1
    )
    backend = TorchBackend(config, lambda what, fraction: None)
    return [generate(backend, prompt, COUNT) for prompt in PROMPTS]


def _write(name: str, folder: Path) -> list[list[int]]:
    save(name, folder)
    return _generated(folder)


def _generated(folder: Path) -> list[list[int]]:
    from tests.serving.backends.hf_folders import generated

    return [generated(folder)(prompt, COUNT) for prompt in PROMPTS]


def _convert(folder: Path, out: Path) -> dict[str, float | None]:
    """KL of what the converters make, whose comparison runs transformers."""
    from models.convert.gguf import make_gguf

    out.mkdir(exist_ok=True)
    file = make_gguf(folder, out / f"{folder.name}.gguf", "F32")
    return {"gguf": file.quality_kl_nats}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["work"]:
        print(json.dumps(work(Path(arguments[1]), [Path(folder) for folder in arguments[2:]])))
        return 0
    try:
        python = environment()
    except NotMade as problem:
        print(f"{problem}; the tests that need it will be skipped", file=sys.stderr)
        return 0
    print(f"{(python.parents[1] / 'complete').read_text()}: {python}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What the command line and a models file ask for: models in, options out, and every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.errors import ServingError
from serving.options import ModelOptions, ServeOptions, models_of
from serving.placement import Policy


def asked(folder: Path, content: str | None = None, *sources: str, **options: Any) -> tuple[ModelOptions, ...]:
    file = None
    if content is not None:
        file = folder / "models.toml"
        file.write_text(content)
    return models_of(ServeOptions(models=sources, models_file=None if file is None else str(file), **options))


def test_the_command_line_says_the_same_of_every_model(tmp_path: Path) -> None:
    found = asked(tmp_path, None, "135m", "360m", slots=4, policy=Policy.cpu_only, options=("mlock=true",), idle_unload_seconds=9.0)
    assert [one.source for one in found] == ["135m", "360m"] and {one.name for one in found} == {None}
    assert {(one.slots, one.policy, one.options["mlock"], one.idle_unload_seconds) for one in found} == {(4, Policy.cpu_only, True, 9.0)}


def test_an_entry_of_the_models_file_overrides_what_all_share_and_options_are_replaced_whole(tmp_path: Path) -> None:
    content = """
[[model]]
source = "135m"
name = "small"
policy = "gpu-only"
load = "demand"
idle_unload_seconds = 60
options = {flash_attention = true}
[[model]]
source = "360m"
"""
    first, second, third = asked(tmp_path, content, "1b", slots=4, options=("mlock=true",))
    assert (first.source, second.source, third.source) == ("1b", "135m", "360m")
    assert (second.name, second.policy, second.load, second.idle_unload_seconds) == ("small", Policy.gpu_only, "demand", 60.0)
    assert second.options == {"flash_attention": True} and third.options == {"mlock": True}
    assert (second.slots, third.policy, third.load) == (4, Policy.auto, "start")


def test_one_model_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    assert asked(tmp_path, None, "135m", served_name="chat")[0].name == "chat"
    with pytest.raises(ServingError, match="--served-name names one model, and 2 are served"):
        asked(tmp_path, None, "135m", "360m", served_name="chat")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[model]]\nname = 'x'", "source"),
        ("[[model]]\nsource = 'fake'\n[[model]]\nsource = 'fake'\nslotz = 1", "model 2: .*slotz"),
        ("[[model]]\nsource = 'fake'\nslots = -1", "slots must be at least 1, got -1"),
        ("[[model]]\nsource = 'fake'\nstep_seconds_target = 0.0", "step_seconds_target must be above 0 and finite, got 0"),
        ("[[model]]\nsource = 'fake'\nthreads = 0", "threads must be at least 1"),
        ("[[model]]\nsource = 'fake'\nidle_unload_seconds = 0", "idle_unload_seconds must be above 0"),
        ("[[model]]\nsource = 'fake'\npolicy = 'tpu'", "tpu"),
        ("[[model]]\nsource = 'fake'\nstandby = 'hot'", "hot"),
        ("[[model]]\nsource = 'fake'\nload = 'never'", "never"),
        ("[[model]]\nsource = ''", "source must name a model"),
        ("[[model]]\nsource = 'fake'\nname = '/x'", "is no name"),
        ("[[models]]\nsource = 'fake'", "unknown key 'models'"),
        ("model = 'fake'", "no .*model.* section"),
        ("", "no .*model.* section"),
        ("[[model]", "is no TOML"),
    ],
)
def test_a_wrong_models_file_is_refused_with_the_key_and_the_place(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        asked(tmp_path, content)
    assert "--models-file" in str(refused.value)


def test_a_models_file_that_is_not_there_and_no_model_at_all_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no-such.toml: No such file"):
        models_of(ServeOptions(models=(), models_file=str(tmp_path / "no-such.toml")))
    with pytest.raises(ServingError, match="no model to serve"):
        models_of(ServeOptions(models=()))

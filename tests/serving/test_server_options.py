"""What the command line and a models file ask for: options out, every mistake named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from typer.testing import CliRunner

from crossover.loadtests.campaign.campaign_file import ServerSettings
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.cli.serve_command import serve
from crossover.serving.errors import ServingError, Unsupported
from crossover.serving.faults import check
from crossover.serving.option_help import unbounded
from crossover.serving.server_options import (
    ModelOptions,
    Policy,
    ServeOptions,
    SharedOptions,
    arguments,
    models_of,
)
from crossover.serving.supervisor.admission import QueueBounds
from tests.tools.with_settings import engine_config


def another(field: msgspec.structs.FieldInfo) -> Any:
    """A value of the option's type that is not its default."""
    kind = unbounded(field.type)
    kind = get_args(kind)[0] if type(None) in get_args(kind) else kind
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != field.default)
    if get_origin(kind) is tuple:
        return ("135m", "360m")
    values = {bool: field.default is False, int: 3, float: 3.5, str: "x", Policy: Policy.cpu_only}
    return values.get(kind, {"a": 1, "b": "true", "c": [1.5]})


def on_the_command_line(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServeOptions:
    """What `crossover serve` would launch."""
    launched: list[ServeOptions] = []
    monkeypatch.setattr(
        "crossover.serving.cli.launch.launch", lambda options: launched.append(options) or 0
    )
    done = CliRunner().invoke(serve, list(words))
    assert done.exit_code == 0, done.output + repr(done.exception)
    return launched[0]


@pytest.mark.parametrize(
    "field",
    [one for one in msgspec.structs.fields(ServeOptions) if one.name != "on"],
    ids=lambda f: f.name,
)
def test_every_option_is_set_by_the_command_line(
    monkeypatch: pytest.MonkeyPatch, field: msgspec.structs.FieldInfo
) -> None:
    value = another(field)
    words = list(value) if field.name == "models" else arguments({field.name: value})
    given = on_the_command_line(monkeypatch, *words)
    assert given == ServeOptions(**{field.name: value})


@pytest.mark.parametrize("field", msgspec.structs.fields(SharedOptions), ids=lambda f: f.name)
def test_every_option_of_a_model_is_set_by_a_models_file(
    tmp_path: Path, field: msgspec.structs.FieldInfo
) -> None:
    value = another(field)
    toml = json.dumps(value) if not isinstance(value, dict) else '{a = 1, b = "true", c = [1.5]}'
    (from_file,) = parse_models(tmp_path, f"[[model]]\nsource = 'fake'\n{field.name} = {toml}")
    assert getattr(from_file, field.name) == value


def test_a_campaigns_server_table_has_the_options_of_a_model_and_their_defaults() -> None:
    theirs = {field.name: field.default for field in msgspec.structs.fields(ServerSettings)}
    ours = {field.name: field.default for field in msgspec.structs.fields(ServeOptions)}
    assert theirs.keys() - {"ready_seconds", "gpu"} <= ours.keys()
    assert theirs["context_tokens"] == 2048  # not what memory allows: runs are compared
    for name in theirs.keys() - {"ready_seconds", "gpu", "options", "context_tokens"}:
        assert theirs[name] in (None, ours[name]), name


def test_defaults_are_those_of_the_classes_that_the_options_become() -> None:
    options, bounds = ServeOptions(), QueueBounds()
    config = EngineConfig("fake", "", "x")
    shared = {*SharedOptions.__struct_fields__} & {*EngineConfig.__struct_fields__}
    for name in shared - {"backend", "weight_format", "threads", "cores", "context_tokens"}:
        assert getattr(options, name) == getattr(config, name), name
    assert (options.max_waiting, options.max_wait_seconds, options.ttft_slo_seconds) == (
        bounds.waiting_requests,
        bounds.wait_seconds,
        bounds.ttft_seconds,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slots 0", "--slots must be at least 1, got 0"),
        ("--port 70000", "--port must be at most 65535, got 70000"),
        ("--max-wait -1", "--max-wait must be at least 0, got -1.0"),
        ("--step-seconds 0", "--step-seconds must be above 0, got 0.0"),
        ("--replicas 2", "--replicas 2 needs --on ray"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_flag_bound_and_value(words: str, message: str) -> None:
    done = CliRunner().invoke(serve, ["fake", *words.split()])
    assert isinstance(done.exception, ServingError) and str(done.exception) == message


def test_the_help_page_shows_square_brackets_and_choices_are_kept() -> None:
    shown = CliRunner().invoke(serve, ["--help"], env={"COLUMNS": "200"}).output
    assert "TOML file with a [[model]] table" in shown
    done = CliRunner().invoke(serve, ["fake", "--standby", "hot"])
    assert done.exit_code == 2 and "hot" in done.output


@pytest.mark.parametrize("field", ["slots", "context_tokens", "kv_tokens", "threads"])
def test_a_size_that_an_engine_cannot_have_is_refused_by_name(field: str) -> None:
    check(EngineConfig("fake", "", "m"))
    with pytest.raises(Unsupported) as refused:
        check(engine_config("fake", "", "m", **{field: 0}))
    assert str(refused.value) == f"{field} must be at least 1, got 0"
    assert refused.value.parameter == field


def parse_models(
    folder: Path, content: str | None = None, *sources: str, **options: Any
) -> tuple[ModelOptions, ...]:
    if content is not None:
        (folder / "models.toml").write_text(content)
        options["models_file"] = str(folder / "models.toml")
    return models_of(ServeOptions(models=sources, **options))


def test_a_models_file_overrides_the_command_line_key_by_key(tmp_path: Path) -> None:
    content = """
    [[model]]
    source = "135m"
    name = "small"
    policy = "gpu-only"
    load = "demand"
    idle_unload_seconds = 60
    options = { flash_attention = true }

    [[model]]
    source = "360m"
    """
    first, second, third = parse_models(tmp_path, content, "1b", slots=4, options={"mlock": True})
    assert [one.source for one in (first, second, third)] == ["1b", "135m", "360m"]
    assert (second.name, second.policy, second.load) == ("small", Policy.gpu_only, "demand")
    assert (second.slots, second.idle_unload_seconds) == (4, 60.0)
    assert second.options == {"flash_attention": True} and third.options == {"mlock": True}
    assert (third.policy, third.load, third.slots) == (Policy.auto, "start", 4)


def test_one_model_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    assert parse_models(tmp_path, None, "135m", served_name="chat")[0].name == "chat"
    with pytest.raises(
        ServingError, match="--served-name can name only one model, but 2 are served"
    ):
        parse_models(tmp_path, None, "135m", "360m", served_name="chat")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("slotz = 1", "model 1: .*slotz"),
        ("slots = -1", "slots must be at least 1, got -1"),
        ("step_seconds_target = 0.0", "step_seconds_target must be above 0, got 0.0"),
        ("step_seconds_target = inf", "step_seconds_target must be finite, got inf"),
        ("idle_unload_seconds = 0", "idle_unload_seconds must be above 0"),
        ("policy = 'tpu'", "tpu"),
        ("load = 'never'", "never"),
        ("name = ''", "name must have at least 1 character, got ''"),
        ("[[models]]", "models is not a known key .known keys: model"),
        ("[[model]]\nsource = ''", "model 2: source must have at least 1 character"),
        ("[[model]]\nname = 'x'", "model 2: .*source"),
        ("[[model]", "at line 3"),
    ],
)
def test_a_wrong_models_file_is_refused_with_the_key_and_the_place(
    tmp_path: Path, entry: str, message: str
) -> None:
    with pytest.raises(ServingError, match=f"--models-file .*{message}"):
        parse_models(tmp_path, f"[[model]]\nsource = 'fake'\n{entry}")


def test_a_source_that_names_no_model_is_refused(tmp_path: Path) -> None:
    for content in ("", "model = 'fake'", "model = []"):
        with pytest.raises(ServingError, match="--models-file .*model"):
            parse_models(tmp_path, content)
    for content in ("x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000, "\0"):
        with pytest.raises(ServingError, match="--models-file "):
            parse_models(tmp_path, content)
    with pytest.raises(ServingError, match="no-such.toml cannot be read: No such file"):
        parse_models(tmp_path, models_file=str(tmp_path / "no-such.toml"))
    with pytest.raises(ServingError, match="There is no model to serve"):
        parse_models(tmp_path)


def test_a_models_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes(b'\xef\xbb\xbf[[model]]\r\nsource = "135m"\r\n')
    assert [one.source for one in models_of(ServeOptions(models_file=str(file)))] == ["135m"]


def test_only_the_only_model_gets_memory_for_more_than_it_needs() -> None:
    """A prompt cache, and several engines."""
    (single,) = models_of(ServeOptions(models=("135m",)))
    assert single.prompt_cache_bytes is None, "placement decides"
    assert single.engines is None and single.are_engines_open
    several = models_of(ServeOptions(models=("135m", "360m")))
    limited = models_of(ServeOptions(models=("135m",), memory_limit="4GiB"))
    assert [model.prompt_cache_bytes for model in (*several, *limited)] == [0, 0, 0]
    assert [model.engines for model in (*several, *limited)] == [1, 1, 1]
    asked = models_of(ServeOptions(models=("135m", "360m"), engines=2))
    assert [model.engines for model in asked] == [2, 2]
    options = ServeOptions(models=("135m", "360m"), prompt_cache="1GiB")
    assert [model.prompt_cache_bytes for model in models_of(options)] == [1 << 30] * 2
    (without,) = models_of(ServeOptions(models=("135m",), prompt_cache="0"))
    assert without.prompt_cache_bytes == 0

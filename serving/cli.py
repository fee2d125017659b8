"""The verbs `serve` and `doctor`: options in, exit status out. Everything heavy is imported when it is needed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serving.placement import Policy

# An empty line between two lines keeps them apart in the help page.
EPILOG = "\n\n".join(
    (
        "Examples:",
        "crossover serve smollm2-135m  (a rung of the ladder, made with random weights where it is not in the cache)",
        "crossover serve ./model.gguf --slots 8  (a file of yours)",
        "crossover serve 1b --backend onnx --format int4  (another engine, another format)",
        "crossover serve 3b --policy gpu-only  (an error rather than the CPU)",
        "crossover serve 135m 360m --idle-unload 600 --admin-port 8001  (two models, unloaded when nobody asks)",
        "crossover serve 135m --cores 0-5 --api-cores 6  (who runs where)",
        "crossover serve 135m --port 0 --ready-file ready.json  (for scripts: a free port, and a file when it is ready)",
        "Then:",
        'curl localhost:8000/v1/completions -H \'content-type: application/json\' -d \'{"prompt": "Once", "max_tokens": 16}\'',
        "curl localhost:8000/v1/placement  (what runs where, and why)",
    )
)
_ENGINE, _QUEUE, _HTTP, _MACHINE, _SEVERAL = "Engine", "Queue and faults", "HTTP", "Machine", "Several models"


serve = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@serve.command(name="serve", epilog=EPILOG)
def _serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="A rung (135m, 360m, 1b, 3b, ...), a GGUF file, a model folder, or a hub name. Several: all in one server."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="llama_cpp, onnx, torch, fake or package.module:Class. Default: by device.", rich_help_panel=_ENGINE)
    ] = None,
    weight_format: Annotated[
        str | None,
        typer.Option("--format", help="Weight format, e.g. Q4_0, Q8_0, int4, bf16. Default: by backend.", rich_help_panel=_ENGINE),
    ] = None,
    policy: Annotated[Policy, typer.Option(help="auto: the GPU where it can, else the CPU.", rich_help_panel=_MACHINE)] = Policy.auto,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 opens it to the network: set a key.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and prints it.", rich_help_panel=_HTTP)] = 8000,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Engine threads. Default: one for each physical core it has.", rich_help_panel=_MACHINE)
    ] = None,
    cores: Annotated[str, typer.Option(help="Cores of the engine, e.g. 0-3. Default: all but the last.", rich_help_panel=_MACHINE)] = "",
    api_cores: Annotated[str, typer.Option(help="Cores of the HTTP process. Default: what is left.", rich_help_panel=_MACHINE)] = "",
    slots: Annotated[int, typer.Option(min=1, help="Sequences that run at the same time.", rich_help_panel=_ENGINE)] = 16,
    context: Annotated[int, typer.Option(min=1, help="Most tokens of one sequence, prompt and output.", rich_help_panel=_ENGINE)] = 2048,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in the KV cache of all slots. Default: slots x context.", rich_help_panel=_ENGINE)
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="fp32, fp16, bf16, q8_0 or q4_0, as far as the backend can.", rich_help_panel=_ENGINE)
    ] = "fp16",
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a step while others decode.", rich_help_panel=_ENGINE)] = 256,
    step_seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="What a step with prompt tokens should take while others decode: less for smooth text, more for throughput.",
            rich_help_panel=_ENGINE,
        ),
    ] = 0.3,
    prefix_reuse: Annotated[
        bool, typer.Option(help="Keep the KV of finished sequences for prompts that begin alike.", rich_help_panel=_ENGINE)
    ] = True,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For this backend only; may be repeated.", rich_help_panel=_ENGINE)
    ] = None,
    standby: Annotated[
        str,
        typer.Option(
            metavar="cold|warm", help="warm: keep the engine to fall back to loaded (costs its memory).", rich_help_panel=_MACHINE
        ),
    ] = "cold",
    models_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML with a [[model]] for each model and its options.", rich_help_panel=_SEVERAL)
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="RAM for all engines together, e.g. 24GiB.", rich_help_panel=_SEVERAL)
    ] = None,
    max_loaded_models: Annotated[int | None, typer.Option(min=1, help="Models loaded at the same time.", rich_help_panel=_SEVERAL)] = None,
    idle_unload: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Unload a model that nobody asked for so long.", rich_help_panel=_SEVERAL),
    ] = None,
    load_wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a request waits while its model loads.", rich_help_panel=_SEVERAL)
    ] = 60.0,
    admin_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the key of the /admin/ routes.", rich_help_panel=_SEVERAL)
    ] = None,
    admin_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the key of the /admin/ routes.", rich_help_panel=_SEVERAL)
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Put the /admin/ routes on this port of 127.0.0.1 instead.", rich_help_panel=_SEVERAL),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Where weights are kept. Default: $CROSSOVER_CACHE or ~/.cache/crossover.", rich_help_panel=_MACHINE)
    ] = None,
    memory_check: Annotated[bool, typer.Option(help="Refuse what is predicted not to fit.", rich_help_panel=_MACHINE)] = True,
    served_name: Annotated[str | None, typer.Option(help="The model's name in requests. Default: its own.", rich_help_panel=_HTTP)] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the API key.", rich_help_panel=_HTTP)
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="File that holds the API key.", rich_help_panel=_HTTP)] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate (PEM).", rich_help_panel=_HTTP)
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's private key (PEM).", rich_help_panel=_HTTP)] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait for a slot; more get 429.", rich_help_panel=_QUEUE)] = 256,
    max_wait: Annotated[
        float, typer.Option(min=0.0, help="Longest predicted wait in seconds; beyond it 429.", rich_help_panel=_QUEUE)
    ] = 30.0,
    ttft_promise: Annotated[
        float | None,
        typer.Option(min=0.001, help="Promised seconds to the first token; beyond it 429.", rich_help_panel=_QUEUE),
    ] = None,
    health_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a step until a sleeping engine counts as hung.", rich_help_panel=_QUEUE)
    ] = 30.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that requests get to finish after SIGTERM.", rich_help_panel=_QUEUE)
    ] = 60.0,
    ready_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Written (JSON: url, pid, engine_pid) each time an engine is ready.", rich_help_panel=_HTTP),
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log every request as one JSON object a line.", rich_help_panel=_HTTP)
    ] = False,
    log_format: Annotated[str, typer.Option(metavar="text|json", help="json: one object a line.", rich_help_panel=_HTTP)] = "text",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send traces to this OpenTelemetry collector (OTLP over HTTP).", rich_help_panel=_HTTP),
    ] = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP endpoint: on the GPU where there is one, else on the CPU, and say why."""
    from serving.launch import launch
    from serving.options import ServeOptions

    raise typer.Exit(
        launch(
            ServeOptions(
                models=tuple(model or ()),
                models_file=models_file,
                standby=_one_of("--standby", standby, ("cold", "warm")),
                memory_limit=memory_limit,
                max_loaded_models=max_loaded_models,
                idle_unload_seconds=idle_unload,
                load_wait_seconds=load_wait,
                admin_key_env=admin_key_env,
                admin_key_file=admin_key_file,
                admin_port=admin_port,
                backend=backend,
                weight_format=weight_format,
                policy=policy,
                host=host,
                port=port,
                threads=threads,
                cores=cores,
                api_cores=api_cores,
                slots=slots,
                context_tokens=context,
                kv_tokens=kv_tokens,
                kv_dtype=kv_dtype,
                prefill_tokens=prefill_tokens,
                step_seconds_target=step_seconds,
                prefix_reuse=prefix_reuse,
                cache=cache,
                served_name=served_name,
                api_key_env=api_key_env,
                api_key_file=api_key_file,
                options=tuple(option or ()),
                most_waiting=max_waiting,
                longest_wait_seconds=max_wait,
                ttft_promise_seconds=ttft_promise,
                health_timeout_seconds=health_timeout,
                drain_seconds=drain_timeout,
                ready_file=ready_file,
                check_memory=memory_check,
                tls_certificate=tls_certificate,
                tls_key=tls_key,
                log_format=_one_of("--log-format", log_format, ("text", "json")),
                otlp_endpoint=otlp_endpoint,
                log_requests=log_requests,
            )
        )
    )


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(choices)}", param_hint=option)
    return value


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure memory bandwidth too (about a second; keep the machine quiet).")
    ] = False,
    cache: Annotated[str | None, typer.Option(help="The cache folder to look at. Default: $CROSSOVER_CACHE or ~/.cache/crossover.")] = None,
) -> None:
    """What this machine is, which backends work on it, and why the others do not."""
    from serving.doctor import examine, show

    report = examine(bandwidth=bandwidth, cache=cache)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(report)

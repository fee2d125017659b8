"""The verb `serve`: options in, exit status out. Heavy modules are imported when it runs.

The parameters of `crossover serve` are the fields of crossover.serving.server_options.ServeOptions.
"""

from __future__ import annotations

import typer

from crossover.serving.cli.command_of_options import command_of
from crossover.serving.server_options import ServeOptions

# An empty line keeps two lines apart on the help page.
EPILOG = """Examples:

crossover serve smollm2-135m  (a ladder model, with random weights if none are cached)

crossover serve ./model.gguf --slots 8  (your own file)

crossover serve 135m 360m --idle-unload 600  (two models)

Then:

curl localhost:8000/v1/completions -H 'content-type: application/json'
-d '{"prompt": "Once", "max_tokens": 16}'"""

serve = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _serve(options: ServeOptions) -> int:
    """Serve models over an OpenAI-compatible HTTP endpoint.

    A model runs on the GPU if there is one with room for it, else on the CPU. The server logs where
    and why.
    """
    if options.on == "ray":
        from crossover.serving.cli.ray_serve import launch_on_ray

        return launch_on_ray(options)
    from crossover.serving.cli.launch import launch

    return launch(options)


serve.command(name="serve", epilog=EPILOG)(command_of(ServeOptions, _serve))

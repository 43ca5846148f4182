"""`asyncrl reward-server`: a reward model behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncrl.cli.app import MACHINE, app

DEFAULT_PORT = 8741


@app.command(
    "reward-server",
    rich_help_panel=MACHINE,
    epilog="Example: asyncrl reward-server --model ./my-reward-model",
)
def reward_server(
    model: Annotated[str, typer.Option(help="A folder or hub id of a sequence classifier.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = DEFAULT_PORT,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that requests need.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with that token, mode 0600.")
    ] = None,
    label: Annotated[
        int | None, typer.Option(min=0, help="Which output is the score, if there are several.")
    ] = None,
    apply: Annotated[
        Literal["none", "sigmoid", "softmax"],
        typer.Option(help="What is done to the outputs; none: the score is the logit."),
    ] = "none",
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest text; default: the model's positions.")
    ] = None,
    truncate: Annotated[
        Literal["refuse", "left"],
        typer.Option(help="A longer text is refused, or loses its beginning."),
    ] = "refuse",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: float32 on a CPU, else that of the checkpoint."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="For tensor work on a CPU.")] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a batch, padding included.")
    ] = 16_384,
    window_ms: Annotated[
        float, typer.Option(min=0, max=10_000, help="How long a batch waits for further texts.")
    ] = 5.0,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Texts that may wait; further ones get 429.")
    ] = 1024,
    max_body_kib: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Longest body of a request.")
    ] = 1024,
) -> None:
    """Serve a reward model for `rewards.functions: - {name: reward_model, args: {url: ...}}`.

    Ends with Ctrl-C or SIGTERM.
    """
    import asyncio
    import contextlib

    from asyncrl.reward_server.batching import BatchSettings
    from asyncrl.reward_server.classifier import ClassifierSettings
    from asyncrl.reward_server.keeping import listen, url_of
    from asyncrl.reward_server.serving import ServerSettings, serve
    from asyncrl.rewards.services.settings import read_secret

    token = read_secret(
        "reward-server",
        ("--token-env", "--token-file"),
        token_env,
        None if token_file is None else str(token_file),
    )
    settings = ServerSettings(
        ClassifierSettings(model, label, apply, max_tokens, truncate, device, dtype, threads),
        BatchSettings(batch_tokens, window_ms / 1000, max_waiting),
        token,
        max_body_kib << 10,
    )

    def ready(described: str) -> None:
        url = url_of(listening)
        typer.echo(f"serves {described}")
        typer.echo(f"use it:  rewards.functions: - {{name: reward_model, args: {{url: {url}}}}}")
        typer.echo("Ctrl-C ends it")

    # uvicorn closes connections at Ctrl-C, and then raises it.
    with (
        contextlib.suppress(KeyboardInterrupt),
        listen(host, port, has_token=token is not None) as listening,
    ):
        asyncio.run(serve(settings, listening, ready))

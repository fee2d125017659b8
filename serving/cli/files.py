"""Files and variables that the command line names: API keys, certificate, ready file."""

from __future__ import annotations

import json
import os
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.cache import cache_dir
from models.manifest import write_atomically
from serving.cli.console import Narrator
from serving.errors import ServingError
from serving.http.auth import Key, named_keys, only_key
from serving.registry.options import ServeOptions


def check_files(options: ServeOptions) -> None:
    """Fail before the load for a file that cannot be read or written. Raises ServingError."""
    certificate, key = options.tls_certificate, options.tls_key
    if (certificate is None) != (key is None):
        raise ServingError(
            "--tls-certificate and --tls-key belong together; one of them is missing"
        )
    for name, file in (("--tls-certificate", certificate), ("--tls-key", key)):
        if file is not None and not os.access(file, os.R_OK):
            raise ServingError(f"{name} {file}: there is no such file, or it cannot be read")
    tls_context(options)
    if options.ready_file is not None:
        folder = Path(options.ready_file).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ServingError(
                f"--ready-file {options.ready_file}: "
                "its folder does not exist or cannot be written to"
            )


def write_ready_file(file: str | None, content: Mapping[str, Any], narrator: Narrator) -> None:
    """Where one is asked for. A full disk ends no server."""
    if file:
        try:
            write_atomically(Path(file), json.dumps(content).encode())
        except OSError as problem:
            narrator.say(f"--ready-file {file} cannot be written: {problem}")


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """What HTTPS is served with; None for HTTP. Raises ServingError."""
    certificate, key = options.tls_certificate, options.tls_key
    if certificate is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as problem:
        raise ServingError(
            f"--tls-certificate {certificate}, --tls-key {key}: "
            f"not a certificate and its unencrypted key in PEM form: {problem}"
        ) from problem
    return context


def keys_of(options: ServeOptions) -> tuple[tuple[Key, ...], str | None]:
    """The API keys and the admin key; none where none is asked for. Raises ServingError.

    Their variables are taken out of the environment: no engine inherits them.
    """
    api = only_key(read_key(options.api_key_env, options.api_key_file, "--api-key"), "API")
    if options.api_keys_file is not None:
        if api:
            raise ServingError("--api-keys-file and a single --api-key-... exclude each other")
        text = read_key(None, options.api_keys_file, "--api-keys") or ""
        try:
            api = named_keys(text)
        except ValueError as problem:
            raise ServingError(f"--api-keys-file {options.api_keys_file}: {problem}") from None
    admin = read_key(options.admin_key_env, options.admin_key_file, "--admin-key")
    for variable in (options.api_key_env, options.admin_key_env):
        os.environ.pop(variable or "", None)
    if admin is not None and admin.encode() in (key.value for key in api):
        raise ServingError(
            "--admin-key-... is the same key as --api-key-...; "
            "whoever may ask a model may not load and unload them"
        )
    return api, admin


def readable_by_others(options: ServeOptions) -> list[str]:
    """The files with keys that other users of this machine can read, each with its option."""
    files = {
        "--api-key-file": options.api_key_file,
        "--api-keys-file": options.api_keys_file,
        "--admin-key-file": options.admin_key_file,
        "--tls-key": options.tls_key,
    }
    return [
        f"{name} {file}" for name, file in files.items() if file and os.stat(file).st_mode & 0o77
    ]


def new_admin_key(port: int, cache: str | None) -> tuple[str, Path]:
    """A key for the admin routes, and the file that it is written to, for this user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime and os.access(runtime, os.W_OK) else cache_dir(cache)
    folder.mkdir(parents=True, exist_ok=True)
    path, key = folder / f"crossover-admin-{port}.key", secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return key, path


def read_key(variable: str | None, file: str | None, option: str) -> str | None:
    """A key from a variable or a file; the command line could be read by every process."""
    if variable and file:
        raise ServingError(f"{option}-env and {option}-file exclude each other")
    if variable:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ServingError(f"{option}-env names {variable}, which is not set or empty")
        return key
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise ServingError(f"{option}-file {file}: {reason}") from problem
        if not key:
            raise ServingError(f"{option}-file {file} is empty")
        return key
    return None

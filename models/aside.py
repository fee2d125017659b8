"""Heavy work in a child process: its memory is given back, and if native code aborts, only the child dies.

path = run_aside("models.convert:make_gguf", progress, "folder", "out.gguf", "Q4_0")
"""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from models.errors import ModelError
from models.manifest import Progress


def run_aside(function: str, progress: Progress | None, *args: Any, **kwargs: Any) -> Any:
    """Call "module:name" with the arguments in a fresh interpreter, with its progress passed on; returns what it returns.

    Errors of models.errors come through as they are; a child that dies is a ModelError with its exit status (-9: most likely memory).
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_child, args=(theirs, function, args, kwargs), daemon=True)
    child.start()
    theirs.close()
    try:
        while True:
            what, content = ours.recv()
            if what == "done":
                return content
            if what == "error":
                raise content
            if progress:
                progress(*content)
    except EOFError:
        child.join()
        why = ", most likely for want of memory" if child.exitcode == -9 else ""
        raise ModelError(f"{function.replace(':', '.')} died with status {child.exitcode}{why}") from None
    finally:
        ours.close()
        if child.is_alive():
            child.terminate()
        child.join()


def _child(connection: Connection, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module_name, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
        result = found(*args, **kwargs, progress=lambda what, fraction: connection.send(("progress", (what, fraction))))
        connection.send(("done", result))
    except ModelError as problem:
        connection.send(("error", problem))

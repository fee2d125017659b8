"""Command lines in one process: `python -m serving ...` a dozen times for the price of one start.

    child = CommandLines("serving.__main__")
    done = child.run("fake", "--cores", "x", CROSSOVER_CACHE="/tmp/x")   # a CompletedProcess
    child.close()

The process imports the module once and forks for each command, so that each has standard output and
error, an exit status and a state of its own. For commands that end by themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


class CommandLines:
    """`module`: what has main(); `imports`: what the commands import later, imported before."""

    def __init__(self, module: str, *imports: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.command_line", module, *imports],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command, to its end."""
        assert self._child.stdin is not None and self._child.stdout is not None
        wide = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
        print(json.dumps([arguments, wide]), file=self._child.stdin, flush=True)
        status, output, error = json.loads(self._child.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, output, error)

    def close(self) -> None:
        self._child.communicate(timeout=20)


def _serve(module: str) -> None:
    main = importlib.import_module(module).main
    for line in sys.stdin:
        arguments, environment = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
            pid = os.fork()
            if pid == 0:
                sys.argv = [module, *arguments]
                os.environ |= environment
                os.dup2(output.fileno(), 1)
                os.dup2(error.fileno(), 2)
                _end(main)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            error.seek(0)
            print(json.dumps([status, output.read(), error.read()]), flush=True)


def _end(main: object) -> None:
    """Run main() and end the process as an interpreter would."""
    status = 1
    try:
        assert callable(main)
        main()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    _serve(sys.argv[1])

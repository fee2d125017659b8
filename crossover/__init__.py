"""Crossover: the packages models, serving, loadtests and reports, and the console command.

In the repository the four packages are links to the folders at its top: crossover.models is the
folder models. In a wheel they are folders. Nothing of them is imported here, so that an engine or a
load generator starts without what only the command line needs.
"""

import os
import shlex
import signal

# Git with core.symlinks=false, and programs that unpack zip files, write links as text files.
_HERE = os.path.dirname(os.path.abspath(__file__))
_LINKS = ("models", "serving", "loadtests", "reports")
if not all(os.path.isdir(os.path.join(_HERE, name)) for name in _LINKS):
    raise ImportError(
        f"The links in {_HERE} to the folders models, serving, loadtests and reports are missing "
        "or are text files. To make them, run: "
        f"ln -sf {' '.join(f'../{name}' for name in _LINKS)} {shlex.quote(_HERE)}/"
    )

VERSION = "0.1.0"


def main() -> None:
    """Run the console command. Ctrl-C during its imports ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from crossover.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()

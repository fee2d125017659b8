"""Crossover: the packages models, serving, loadtests and reports, and the console command.

In the repository the four packages are links to the folders at its top: crossover.models is the
folder models. In a wheel they are folders. Nothing is imported here, so that an engine or a load
generator starts without what only the command line needs.
"""

VERSION = "0.1.0"


def main() -> None:
    """Run the console command."""
    from crossover.cli import main as run

    run()

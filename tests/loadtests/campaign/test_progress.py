"""What a run says while it goes on."""

from io import StringIO

from loadtests.campaign.progress import Progress


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    out = StringIO()
    with Progress(out, plain_every_seconds=0.0) as progress:
        progress.say("a [b] c")
        progress.tick("level", fraction=0.5)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("a [b] c") and lines[1].endswith("... level, 50%")

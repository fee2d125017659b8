"""A page in headless Chromium, where there is one, asked by a script of its own.

answer = asked(page_text, ASK, folder)     # what ASK gave to `tell`
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)
LIGHT, DARK = (f"--blink-settings=preferredColorScheme={scheme}" for scheme in (1, 0))
# A window is at least 500 pixels wide, a frame as wide as it is told.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="page.html" style="border: 0; width: %dpx; height: 900px"></iframe><script>
onmessage = (event) => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = event.data;
  document.body.append(answer);
};
</script>"""
SEND_RESULT = (
    "<script>const tell = (found) => parent.postMessage(JSON.stringify(found), '*');</script>"
)


def run_in_browser(
    page: str, script: str, folder: Path, *options: str, width: int = 390, seconds: int = 240
) -> Any:
    """`script`: HTML for the page's end, which calls `tell`; `folder` takes page and profile."""
    before, end, after = page.rpartition("</body>")  # Vega's code holds one too
    (folder / "page.html").write_text(before + SEND_RESULT + script + end + after)
    (folder / "frame.html").write_text(FRAME % width)
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}"),
        *(f"--window-size={max(width, 500)},900", "--virtual-time-budget=60000", "--dump-dom"),
        *(*options, (folder / "frame.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))

"""A page in headless Chromium, where there is one, asked by a script of its own.

answer = asked(page_text, ASK, folder)     # what ASK wrote, as JSON, into <pre id="answer">
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


def asked(
    page: str, script: str, folder: Path, *options: str, size: str = "420,900", seconds: int = 240
) -> Any:
    """`script` is HTML that is put at the page's end; `folder` takes the page and a profile."""
    before, end, after = page.rpartition("</body>")  # Vega's code holds one too
    (folder / "page.html").write_text(before + script + end + after)
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}", f"--window-size={size}"),
        *("--virtual-time-budget=60000", "--dump-dom", *options, (folder / "page.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))

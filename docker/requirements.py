"""What pip installs for these extras: `python3 docker/requirements.py llama-cpp report`.

From pyproject.toml, so that an image's layer of dependencies changes only when they do.
"""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    if extra not in project["optional-dependencies"]:
        sys.exit(f"docker/requirements.py: pyproject.toml has no extra {extra!r}")
    print(*project["optional-dependencies"][extra], sep="\n")

"""What is installed is what the project says: names, extras, the console command, the pinned set,
the declared packages and their bounds, the fixed top level.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from crossover import VERSION
from crossover.cli import VERBS
from crossover.serving.backends.backend_table import BACKENDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("models", "serving", "loadtests", "reports")
# Modules whose distribution has another name.
DISTRIBUTIONS = {
    "pynvml": "nvidia-ml-py",
    "vl_convert": "vl-convert-python",
    **{
        spec.package: spec.distribution
        for spec in BACKENDS.values()
        if spec.package is not None and spec.distribution is not None
    },
}
# Private parts of other packages that the product uses: file, name -> distribution. The scan below
# finds them all. Each distribution has an upper bound, or a test that fails by name (TESTED).
PRIVATE = {
    ("models/weights/random_weights.py", "_lib"): "llama-cpp-python",
    ("serving/backends/llama_cpp/library.py", "_lib"): "llama-cpp-python",
    ("serving/http/http_protocol.py", "_unset_keepalive_if_required"): "uvicorn",
    ("serving/backends/torch/torch_weights.py", "_is_mkldnn_bf16_supported"): "torch",
    ("serving/backends/torch/varlen_attention.py", "_flash_attention_forward"): "torch",
}
TESTED = {"torch": "tests/serving/backends/torch/test_loading.py"}
# Classes of other packages that the product derives from or changes, as the scan below finds them.
UVICORN = "uvicorn.protocols.http.httptools_impl"
CHANGED = {
    ("crossover/cli.py", "typer.core.TyperGroup"): "typer",
    ("serving/http/http_protocol.py", f"{UVICORN}.HttpToolsProtocol"): "uvicorn",
    ("loadtests/locustfile.py", "locust.User"): "locust",
    ("loadtests/load_generator/http_connection.py", "gevent.hub.Hub.NOT_ERROR"): "gevent",
}
MADE_TO_BE_DERIVED_FROM = {
    "msgspec.Struct",
    "rich.console.Console",
    "prometheus_client.registry.Collector",
}
# Parts that no scan finds: texts and numbers that a package does not promise, such as msgspec's
# error sentences, Jinja's sandbox, the charts' Vega-Lite, the kernels that ONNX Runtime chooses,
# llguidance's parser limits, arguments of ray.init, and attributes of objects that uvicorn and
# Locust pass to callbacks.
UNPROMISED = ("ray", "msgspec", "jinja2", "altair", "onnxruntime", "llguidance")
REACHED_INTO = sorted({*PRIVATE.values(), *CHANGED.values(), *UNPROMISED} - {*TESTED})


def test_the_top_level_is_the_agreed_one() -> None:
    for name in ("crossover", "serving", "models", "loadtests", "reports", "docker", "tests"):
        assert (ROOT / name).is_dir(), name
    for name in (
        "pyproject.toml",
        "README.md",
        "SECURITY.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        ".ci/run",
    ):
        assert (ROOT / name).is_file(), name


def test_version_and_command() -> None:
    assert PROJECT["dynamic"] == ["version"] and VERSION == version("llm-crossover")
    (command,) = [
        point for point in entry_points(group="console_scripts") if point.name == "crossover"
    ]
    assert command.value == "crossover:main"


def test_every_verb_of_the_table_answers_help(
    crossover: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for verb in VERBS:
        done = crossover(verb, "--help")
        assert done.returncode == 0, (verb, done.stderr)
        assert "Usage" in done.stdout, verb


def test_the_named_packages_are_dependencies_of_all_and_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {"transformers", "torch", "optimum", "onnxruntime", "llama-cpp-python", "locust"}
    everything = {
        re.split(r"[\[<>=;]", line)[0].strip() for extra in extras.values() for line in extra
    }
    assert named <= everything
    pins = dict(
        re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    normal = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    for name in sorted(named | {"pytest"}):
        assert version(name).split("+")[0] == normal[name], name


def build(root: Path, target: str, folder: Path) -> Path:
    """Build the "wheel" or "sdist" of a tree with the project's build backend; return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_one_package_with_its_data_and_no_weights(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if not name.startswith("llm_crossover")} == {
        "crossover",
    }
    assert {f"crossover/{package}/__init__.py" for package in PACKAGES} <= {*names}
    assert any(
        name.startswith("crossover/models/data/") and name.endswith(".json") for name in names
    )
    assert not [name for name in names if name.endswith((".gguf", ".safetensors", ".onnx"))]
    assert {f"crossover/loadtests/{name}.toml" for name in ("demo", "llama-server")} <= {*names}
    assert "crossover/py.typed" in names


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, "sdist", folder / "built")) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.glob("llm_crossover-*")
    return root


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    assert build(unpacked, "wheel", tmp_path).read_bytes() == wheel.read_bytes()


def test_the_sdist_is_the_repository_and_make_adds_its_links(unpacked: Path) -> None:
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    links = {f"crossover/{package}" for package in PACKAGES}
    tracked = set(listing.stdout.split()) or files | links  # an unpacked sdist has no listing
    assert files - {"PKG-INFO"} == tracked - links - {"PKG-INFO"}
    subprocess.run(["make", "links"], cwd=unpacked, check=True, capture_output=True)
    # Tests there test that tree, and find the files that they read.
    tests = (
        "tests/test_house.py::test_every_contract_is_kept",
        "tests/test_docs.py::test_every_file_that_is_linked_is_in_the_repository",
        "tests/test_docs.py::test_files_named_in_the_docs_exist",
        "tests/test_docs.py::test_symbols_named_in_the_docs_exist",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("links", ["are text files", "are missing"])
def test_without_links_one_sentence_names_the_command_that_makes_them(
    links: str, tmp_path: Path
) -> None:
    package = tmp_path / "a tree" / "crossover"
    package.mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "cli.py"):
        (package / name).write_text((ROOT / "crossover" / name).read_text())
    for name in PACKAGES:
        (package.parent / name).symlink_to(ROOT / name)  # the folders at the top of a tree
        if links == "are text files":  # as git with core.symlinks=false and zipfile write them
            (package / name).write_text(f"../{name}")

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "crossover", "doctor", "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
        )

    last = run().stderr.splitlines()[-1]
    assert last.startswith("ImportError: The links in ")
    command = last.partition("run: ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert run().returncode == 0


def test_an_installation_adds_one_package_whose_children_find_it(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", "--target", site, wheel], check=True)
    metadata = f"llm_crossover-{VERSION}.dist-info"
    assert {path.name for path in site.iterdir()} == {"crossover", metadata, "bin"}
    code = (
        "from crossover.models.child_process import PACKAGE_ROOT, run_python; "
        "child = run_python('-c', 'import crossover.serving as s; print(s.__file__)'); "
        "print(PACKAGE_ROOT, child.output.decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(site), f"{site}/crossover/serving/__init__.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_not_imported_under_its_short_name(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {package}"],
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: Import crossover.{package}: ")


def declared() -> dict[str, list[Requirement]]:
    """Distribution -> its requirements in pyproject.toml, of the core and of all extras."""
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    requirements: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        requirements.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return requirements


def imported_modules(tree: ast.AST) -> set[str]:
    """The top-level names of all modules that a source imports, also inside functions."""
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules


def test_every_import_is_of_a_declared_package() -> None:
    modules = set[str]().union(*map(imported_modules, parsed_product().values()))
    others = modules - set(sys.stdlib_module_names) - {*PACKAGES, "crossover"}
    assert {"numpy", "gevent", "ml_dtypes", "markupsafe"} <= others
    distributions = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in others}
    missing = distributions - set(declared())
    assert not missing


@pytest.mark.parametrize("name", REACHED_INTO)
def test_what_is_reached_into_has_an_upper_bound_that_the_pinned_version_keeps(name: str) -> None:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    pins = {canonicalize_name(package): pin for package, pin in lines}
    for requirement in declared()[name]:
        operators = {bound.operator for bound in requirement.specifier}
        assert {">=", "<"} <= operators or operators == {"=="}, requirement
        assert name not in pins or pins[name] in requirement.specifier, requirement


NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_fields_"}  # public, in spite of their names


@functools.cache
def parsed_product() -> dict[str, ast.Module]:
    """Return the syntax tree of each of the product's files, by its path from the root."""
    files = [
        *(ROOT / "crossover").glob("*.py"),
        *(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")),
    ]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names that a source uses and does not define itself."""
    used, own = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            used.add(node.attr)
        elif isinstance(node, ast.Attribute):
            own.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            used |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    private = {name for name in used if re.match(r"_[a-zA-Z]", str(name))}
    return private - own - NAMED_TUPLE


def changed_classes(tree: ast.AST) -> set[str]:
    """Return the classes of other packages that a source derives from, and their attributes that it
    sets, by the names under which it imports them."""
    ours = {*sys.stdlib_module_names, "crossover"}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = {name: path for name, path in names.items() if path.partition(".")[0] not in ours}

    def path_of(node: ast.expr) -> str | None:
        first, _, rest = ast.unparse(node).partition(".")
        return names.get(first) and f"{names[first]}.{rest}".removesuffix(".")

    found = set[str | None]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {path_of(base) for base in node.bases}
        elif isinstance(node, ast.Assign):
            found |= {path_of(to) for to in node.targets if isinstance(to, ast.Attribute)}
    return {path for path in found if path is not None}


def test_the_scan_finds_private_parts_and_changed_classes() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import D, _e\n"
        "class F(D): x = a.b._g; _h = 1; y = F._h\n"
        "D.z = getattr(D, '_i', None)\n"
        "D.call(_j=1)\n"
    )
    assert private_names(tree) == {"_e", "_g", "_i", "_j"}
    assert changed_classes(tree) == {"c.D", "c.D.z"}


def test_every_private_part_of_another_package_is_listed() -> None:
    found = {
        (file, name) for file, tree in parsed_product().items() for name in private_names(tree)
    }
    assert found == {*PRIVATE}


def test_every_class_of_another_package_that_is_changed_is_listed() -> None:
    found = {
        (file, path)
        for file, tree in parsed_product().items()
        for path in changed_classes(tree)
        if path not in MADE_TO_BE_DERIVED_FROM
    }
    assert found == {*CHANGED}


def test_private_parts_without_a_bound_are_tested_by_name() -> None:
    for (file, name), distribution in PRIVATE.items():
        if distribution in TESTED:
            assert name in (ROOT / TESTED[distribution]).read_text(), file


def test_the_classifiers_name_every_python_from_the_lowest_on() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [int(line[len(prefix) :]) for line in PROJECT["classifiers"] if prefix in line]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"
    assert minors == list(range(minors[0], minors[-1] + 1)) and minors[-1] >= 14

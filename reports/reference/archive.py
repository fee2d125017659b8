"""A run as an archive that one may give away: the records that its numbers are made of, no names.

    found = anonymised(read_records(folder))
    found.held                       # what is in it, for people, before anything is written
    write_archive(found, Path("shared.tar.xz"))
    with opened(Path("shared.tar.xz")) as folder: ...

docs/sharing.md lists what is kept and what is not. A text that anybody may have written (a reason,
an error, a path, the name of a process) is left out; a number is kept. Reading an archive writes
four files of known names, and no more than MOST_BYTES.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import io
import lzma
import os
import re
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests.campaign.cells import plain
from loadtests.records.events import (
    AnyEvent,
    Calibrated,
    CellFinished,
    CellReady,
    CellSkipped,
    EngineChosen,
    EngineInfo,
    EngineRating,
    Event,
    Interrupted,
    LevelAbandoned,
    LevelFinished,
    NeverQuiet,
    Waited,
)
from loadtests.records.old_run_folder import EVENTS, MANIFEST, REQUESTS, SAMPLES, RunRecords
from loadtests.records.schema import Disturbance, RequestRecord, ResourceSample, RunManifest
from models import formatting
from models.errors import UnknownModel
from models.ladder import rung
from models.manifest import write_atomically
from reports.errors import ReportError

FILES = (MANIFEST, EVENTS, REQUESTS, SAMPLES)
MOST_BYTES = 1 << 30
REMOVED = "(removed)"
ENDPOINT = "http://endpoint"
# Facts of the machine that name it or its owner.
PRIVATE_FACTS = frozenset({"hostname", "gpu_note", "url"})
# Keys whose value is a path, also where it does not look like one; keys that name a device.
PATH_KEYS = frozenset({"file", "replay", "path"})
DEVICE_KEYS = frozenset({"uuid"})
# What is told of an engine of others; the rest of its table is somebody's own text.
ENGINE_FACTS = ("name", "weights", "format", "api", "device")
# The kinds that the load generator writes: loadtests.generator.sse_request.
_ERROR = re.compile(r"refused|timeout|connection|cut_off|stream_error|empty|http_\d{3}")
_PATH = re.compile(r"(^|[\s'\"=:(])(~|\.{0,2})/[\w.]|://|@")


class Archive(msgspec.Struct, frozen=True):
    """The files of a run folder, anonymised."""

    name: str
    files: dict[str, bytes]
    texts: list[str]  # every different text that is left, but for cells, levels and event kinds
    requests: int
    samples: int

    @property
    def held(self) -> list[str]:
        """Lines for people: what would be given away."""
        size = formatting.size(sum(len(data) for data in self.files.values()))
        return [
            f"{self.name}: {self.requests} requests (times and token counts), {self.samples} "
            f"samples of resources, {size} before packing",
            "not in it: prompts and answers (a run keeps none), names of hosts, users and "
            "processes, addresses, paths, keys, the command, the campaign's text, error texts",
            "texts in it: " + ", ".join(self.texts),
        ]


def anonymised(run: RunRecords) -> Archive:
    """Raises ReportError where a name of this machine or its user is still in it."""
    names = _Names(run.manifest)
    manifest = _manifest(run.manifest, names)
    events = [names.event(_event(event)) for event in run.events]
    requests = [names.record(_request(record)) for record in run.requests]
    samples = [names.record(_sample(sample)) for sample in run.samples]
    digest = hashlib.sha256(b"".join(map(msgspec.json.encode, requests))).hexdigest()[:10]
    manifest = msgspec.structs.replace(manifest, run_id=f"{run.manifest.created[:10]}-{digest}")
    files = {
        MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n",
        EVENTS: _lines(events),
        REQUESTS: _lines(requests),
        SAMPLES: _lines(samples),
    }
    _check(files)
    texts = _texts([msgspec.to_builtins(one) for one in (manifest, *events, *samples)])
    texts |= {text for record in requests for text in _texts(_answered(record))}
    return Archive(manifest.run_id, files, sorted(texts), len(requests), len(samples))


def write_archive(archive: Archive, path: Path) -> None:
    """The same bytes for the same run, whoever packs it and when."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as tar:
        for name, data in archive.files.items():
            member = tarfile.TarInfo(f"{archive.name}/{name}")
            member.size = len(data)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(data))
    try:
        write_atomically(path, packed.getvalue())
    except OSError as problem:
        raise ReportError(f"{path} cannot be written: {problem.strerror}") from problem


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A run folder with what the archive holds, for as long as the block lasts.

    Raises ReportError for what is no such archive.
    """
    with tempfile.TemporaryDirectory(prefix="crossover-archive-") as made:
        folder = Path(made) / plain(path.name.removesuffix(".tar.xz"))
        folder.mkdir()
        try:
            with lzma.open(path) as packed:
                bounded: Any = _Bounded(packed, path)
                with tarfile.open(fileobj=bounded, mode="r|") as tar:
                    for member in tar:
                        name = member.name.rpartition("/")[2]
                        source = tar.extractfile(member) if member.isreg() else None
                        if name in FILES and source is not None:
                            (folder / name).write_bytes(source.read())
        except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as problem:
            raise ReportError(f"{path} is no archive of a run: {problem}") from problem
        if not (folder / MANIFEST).exists():
            raise ReportError(f"{path} is no archive of a run: it has no {MANIFEST}")
        yield folder


class _Bounded:
    """An archive as it is unpacked, of MOST_BYTES: names and headers may be as long as files."""

    def __init__(self, packed: lzma.LZMAFile, path: Path) -> None:
        self._packed = packed
        self._path = path
        self._left = MOST_BYTES

    def read(self, size: int) -> bytes:
        data = self._packed.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ReportError(f"{self._path} holds more than {formatting.size(MOST_BYTES)}")
        return data


class _Names:
    """New keys for cells whose own were made of a path, an address or a name that is not public."""

    def __init__(self, manifest: RunManifest) -> None:
        self.cells: dict[str, str] = {}
        for number, cell in enumerate(manifest.cells, 1):
            is_public = cell.get("url") is None and _is_rung(str(cell.get("model")))
            key = str(cell["key"])
            self.cells[key] = key if is_public else f"cell-{number}"

    def event(self, event: Event) -> Event:
        return msgspec.structs.replace(event, **self._renamed(event.cell, event.level))

    def record(self, record: Any) -> Any:
        return msgspec.structs.replace(record, **self._renamed(record.cell, record.level))

    def _renamed(self, cell: str | None, level: str | None) -> dict[str, str | None]:
        new = None if cell is None else self.cells.get(cell, REMOVED)
        end = None if level is None else level.rpartition("#")[2]
        return {"cell": new, "level": None if end is None else f"{new}#{end}"}


def _is_rung(model: str) -> bool:
    try:
        return rung(model).spec.name == model
    except UnknownModel:
        return False


def _manifest(manifest: RunManifest, names: _Names) -> RunManifest:
    campaign = dict(manifest.campaign) | {"name": "shared"}
    if campaign.get("target"):
        campaign["target"] = {"url": ENDPOINT, "api": campaign["target"].get("api", "completions")}
    if isinstance(campaign.get("server"), dict):
        campaign["server"] = campaign["server"] | {"cache": None, "options": {}}
    if campaign.get("repeats"):
        campaign["repeats"] = "a run"
    if campaign.get("engines"):
        campaign["engines"] = {name: _engine(one) for name, one in campaign["engines"].items()}
    levels = campaign.get("cell_levels") or {}
    campaign["cell_levels"] = {names.cells.get(key, REMOVED): own for key, own in levels.items()}
    return msgspec.structs.replace(
        manifest,
        command=[],
        campaign=_cleaned(campaign),
        campaign_text="",
        cells=[_cell(cell, names) for cell in manifest.cells],
        server_facts=_facts(manifest.server_facts),
        client_facts=_facts(manifest.client_facts),
    )


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    """One of others, without its commands and what they see: hosts, images, names of keys."""
    told = {key: engine[key] for key in ENGINE_FACTS if key in engine}
    return told | {"command": REMOVED}


def _cell(cell: dict[str, Any], names: _Names) -> dict[str, Any]:
    model = str(cell.get("model"))
    url = None if cell.get("url") is None else ENDPOINT
    shown = model if _is_rung(model) else REMOVED
    found: dict[str, Any] = _cleaned(cell)
    return found | {"key": names.cells[str(cell["key"])], "model": shown, "url": url}


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _cleaned(
        {name: value for name, value in facts.items() if name not in PRIVATE_FACTS}
    )
    return found


def _cleaned(value: Any) -> Any:
    """Without paths, addresses and what names a device."""
    if isinstance(value, dict):
        return {
            key: inside and REMOVED if key in PATH_KEYS else _cleaned(inside)
            for key, inside in value.items()
            if key not in DEVICE_KEYS
        }
    if isinstance(value, list | tuple):
        return [_cleaned(inside) for inside in value]
    return REMOVED if isinstance(value, str) and _PATH.search(value) else value


def _event(event: Event) -> Event:
    """Its numbers, and the words that Crossover itself chose among few."""
    replace = msgspec.structs.replace
    plain_event: Event = msgspec.convert(_cleaned(msgspec.to_builtins(event)), AnyEvent)
    event = replace(plain_event, cell=event.cell, level=event.level)
    match event:
        case CellReady():
            target = event.target and {"notes": event.endpoint_notes}
            info = replace(event.info, details=None) if event.info else EngineInfo()
            return replace(
                event,
                info=info,
                url=None if event.url is None else ENDPOINT,
                placement=None,
                memory_cap=None,
                target=target,
                sampling=None,
            )
        case EngineChosen():
            return replace(event, reason=REMOVED, engines=[_rating(one) for one in event.engines])
        case LevelFinished():
            return replace(
                event,
                cut_short=event.cut_short and REMOVED,
                disturbance=_disturbance(event.disturbance),
                workers=[replace(worker, name=None) for worker in event.workers],
            )
        case CellFinished():
            capacities = {
                name: replace(one, reason=REMOVED) for name, one in event.capacities.items()
            }
            return replace(event, capacities=capacities)
        case Calibrated():
            return replace(event, reason=event.reason and REMOVED)
        case Waited() | Interrupted() | NeverQuiet() | CellSkipped() | LevelAbandoned():
            return replace(event, reason=REMOVED)
    return event


def _rating(one: EngineRating) -> EngineRating:
    measured_on = one.measured_on if _is_rung(one.measured_on) else one.measured_on and REMOVED
    return msgspec.structs.replace(one, why_not=one.why_not and REMOVED, measured_on=measured_on)


def _disturbance(found: Disturbance | None) -> Disturbance | None:
    return None if found is None else msgspec.structs.replace(found, strangers=[])


def _request(record: RequestRecord) -> RequestRecord:
    is_own = record.error is None or _ERROR.fullmatch(record.error)
    return msgspec.structs.replace(
        record,
        error=record.error if is_own else REMOVED,
        error_message=record.error_message and REMOVED,
        finish_reason=_cleaned(record.finish_reason),
        backend=_cleaned(record.backend),
        request_id=None,
        session=None,
    )


def _answered(record: RequestRecord) -> dict[str, str | None]:
    """Its texts but for cell and level."""
    return {
        "error": record.error,
        "finish_reason": record.finish_reason,
        "backend": record.backend,
    }


def _sample(sample: ResourceSample) -> ResourceSample:
    cores = sample.cores and msgspec.structs.replace(sample.cores, strangers=[])
    return msgspec.structs.replace(sample, cores=cores, reasons=[REMOVED for _ in sample.reasons])


def _lines(records: Sequence[Any]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def _check(files: dict[str, bytes]) -> None:
    """The names that this machine knows itself and its user by; short ones are words as well."""
    names = {socket.gethostname(), os.path.expanduser("~")}
    with contextlib.suppress(KeyError, OSError):  # a user id without a name
        names.add(getpass.getuser())
    for name in sorted(one for one in names if len(one) > 4):
        for file, data in files.items():
            if name.encode() in data:
                raise ReportError(
                    f"{file} still holds {name!r} once it is anonymised: nothing was written; "
                    "rename what is called so, or report it"
                )


_OWN_KEYS = frozenset({"kind", "cell", "level", "key", "created", "run_id", "git_commit"})


def _texts(value: Any, key: str = "") -> set[str]:
    if isinstance(value, dict):
        found = (_texts(inside, name) for name, inside in value.items() if name not in _OWN_KEYS)
        return set().union(*found)
    if isinstance(value, list):
        return set().union(*(_texts(inside, key) for inside in value))
    return {f"{key} {value}"} if isinstance(value, str) and value else set()

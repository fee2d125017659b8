"""What keeps campaigns honest about the machine: one at a time, and memory caps that hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.errors import MachineBusy
from loadtests.host.machine_lock import lock_file, machine_lock
from loadtests.host.memory_cap import CapUnavailable, MemoryCap

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def test_a_second_campaign_is_refused_and_told_who_measures(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    hold = (
        "import sys; from pathlib import Path; from loadtests.host.machine_lock import "
        "machine_lock\n"
        f"with machine_lock('runs/a', file=Path({str(file)!r})):\n print('held', flush=True); "
        "sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with (
        pytest.raises(
            MachineBusy,
            match=rf"process {first.pid} \(runs/a\) measures on this machine now.*--beside-others",
        ),
        machine_lock("b", file=file),
    ):
        pass
    first.kill()
    first.communicate()
    with machine_lock("b", file=file):
        assert f"process {os.getpid()} (b)" in file.read_text(), (
            "a lock ends with its process, however that ended"
        )


def test_the_lock_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lock_file() == tmp_path / "crossover-measuring.lock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert str(os.getuid()) in lock_file().name
    with (
        pytest.raises(MachineBusy, match="cannot be opened"),
        machine_lock("x", file=tmp_path / "no" / "folder"),
    ):
        pass


def test_a_cap_ends_who_takes_more(tmp_path: Path) -> None:
    try:
        cap = MemoryCap.make("test", 64 * MIB)
    except CapUnavailable as problem:
        pytest.skip(f"this machine lets us make no control group: {problem}")
    try:
        wait = "import sys; sys.stdin.readline(); x = bytearray({} << 20); print(len(x))"
        modest, greedy = (
            subprocess.Popen(
                [sys.executable, "-c", wait.format(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for size in (8, 200)
        )
        for process in (modest, greedy):
            cap.add(process.pid)
        assert (
            modest.communicate(b"\n", timeout=20)[0] == f"{8 * MIB}\n".encode() and cap.kills() == 0
        )
        greedy.communicate(b"\n", timeout=20)
        assert greedy.returncode == -9 and cap.kills() == 1
    finally:
        cap.close()
    assert not cap.folder.exists(), "nothing is left behind"


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    """As files: what is written where.

    The kernel makes these files itself; here they are made for it.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "memory" / "box").mkdir(parents=True)
    (tmp_path / "v1").write_text("9:cpu:/\n4:memory:/box\n0::/\n")
    cap = MemoryCap.make("c", 5 * MIB, root=one, own=tmp_path / "v1")
    assert cap.version == 1 and (cap.folder / "memory.limit_in_bytes").read_text() == str(5 * MIB)
    (cap.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert cap.kills() == 2
    (two / "slice").mkdir(parents=True)
    (two / "slice" / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "v2").write_text("0::/slice\n")
    cap = MemoryCap.make("c", 5 * MIB, root=two, own=tmp_path / "v2")
    assert (
        cap.version == 2
        and (cap.folder / "memory.max").read_text() == str(5 * MIB)
        and cap.kills() == 0
    )
    assert (cap.folder / "memory.swap.max").read_text() == "0", "swap must not make the cap a lie"
    with pytest.raises(CapUnavailable, match="accounts for memory"):
        MemoryCap.make("c", MIB, root=tmp_path / "none", own=tmp_path / "v2")
    with pytest.raises(CapUnavailable, match="cannot be read"):
        MemoryCap.make("c", MIB, own=tmp_path / "nothing")

"""Facts of this machine, and of machines made of files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.loadtests.host.cpu_time_taken import processes
from crossover.models.child_process import start_python
from crossover.models.machine_limits import (
    available_bytes,
    cgroup_cores,
    cgroup_memory_left,
    total_bytes,
)
from crossover.serving.hardware.cpu_topology import split_cores
from crossover.serving.hardware.machine_facts import (
    HardwareFacts,
    hardware_facts,
    resident_bytes,
)

CPUINFO_FILES = Path(__file__).parents[2] / "models/cpuinfo"
CPUINFO = """model name\t: Imaginary 9000
flags\t\t: fpu sse4_2 avx2 fma avx512f avx512_vnni hypervisor
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine_agrees_with_psutil() -> None:
    facts = hardware_facts()
    assert facts.logical_cores == psutil.cpu_count()
    assert facts.memory_total_bytes == psutil.virtual_memory().total
    assert facts.memory_available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert facts.allowed_cores == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < facts.usable_memory_bytes <= facts.memory_total_bytes
    assert resident_bytes(2**22 + 1) is None
    assert msgspec.json.decode(msgspec.json.encode(facts), type=HardwareFacts) == facts
    quota = msgspec.structs.replace(facts, allowed_cores=(0, 1, 2, 3), cgroup_cores=1.5)
    assert quota.usable_cores == 1.5
    assert msgspec.structs.replace(quota, cgroup_cores=None).usable_cores == 4.0


def test_a_machine_made_of_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/cpuinfo": CPUINFO,
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\n"
            "SwapTotal: 100 kB\nSwapFree: 40 kB\n",
            **{
                f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list": f"{core % 2}\n"
                for core in range(3)
            },
        },
    )
    facts = hardware_facts(root=tmp_path)
    assert facts.cpu_model == "Imaginary 9000"
    assert facts.isa == ("sse4_2", "fma", "avx2", "avx512f", "avx512_vnni")
    memory = facts.memory_total_bytes, facts.memory_available_bytes, facts.swap_used_bytes
    assert memory == (1024000, 409600, 61440)
    assert (facts.physical_cores, facts.virtualisation) == (2, "virtual machine")
    assert facts.gpus == () and facts.gpu_cause == "no_device"


def test_what_cannot_be_read_is_none_not_zero(tmp_path: Path) -> None:
    facts = hardware_facts(root=tmp_path)
    assert (facts.physical_cores, facts.cgroup_cores) == (None, None)


def test_an_nvidia_card_without_its_driver_is_a_cause_of_its_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"sys/bus/pci/devices/a/vendor": "0x10de\n", "sys/bus/pci/devices/a/class": "0x030200\n"},
    )
    assert hardware_facts(root=tmp_path).gpu_cause == "no_driver"


V1_UNLIMITED = "9223372036854771712\n"
V2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    "sys/fs/cgroup/a/b/memory.max": "1000000\n",
    "sys/fs/cgroup/a/b/memory.current": "600000\n",
    "sys/fs/cgroup/a/b/memory.stat": "anon 5\ninactive_file 100000\nactive_file 50000\n",
    "sys/fs/cgroup/a/memory.max": "max\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/\n",
    "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": V1_UNLIMITED,
    "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "600000\n",
    "sys/fs/cgroup/memory/a/b/memory.stat": (
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 100000\ntotal_active_file 50000\n"
    ),
}
CONTAINER_OF_V1 = {  # it sees the host's path, and mounted only its own group
    "proc/self/cgroup": "5:memory:/docker/1f\n4:cpuacct:/docker/1f\n2:cpu:/docker/1f\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "600000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000\ntotal_active_file 50000\n",
}
HYBRID = {  # version 2 beside version 1, without controllers
    **CONTAINER_OF_V1,
    "sys/fs/cgroup/unified/cgroup.procs": "1\n",
}
THROTTLED_ABOVE = V2 | {
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/b/memory.high": "1000000\n",
}


@pytest.mark.parametrize("files", [V2, V1, CONTAINER_OF_V1, HYBRID, THROTTLED_ABOVE])
def test_the_tightest_limit_of_either_version_of_control_groups_counts(
    tmp_path: Path, files: dict[str, str]
) -> None:
    write(tmp_path, files)
    assert cgroup_cores(tmp_path) == 1.5
    assert cgroup_memory_left(tmp_path) == 1000000 - (600000 - 150000)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1500 kB\n")
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (1000000, 550000)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "4:memory:/a\n2:cpu:/a\n0::/\n"},
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"},
        {"proc/self/cgroup": "garbage\n\n0::/\n", "sys/fs/cgroup/memory.max": "\n"},
    ],
)
def test_without_a_limit_there_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    assert cgroup_cores(tmp_path) is None
    assert cgroup_memory_left(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "threads"), [(None, 4), (8.0, 4), (4.0, 4), (2.9, 2), (1.0, 1), (0.25, 1)]
)
def test_a_quota_bounds_the_default_number_of_threads(quota: float | None, threads: int) -> None:
    allowed = (0, 1, 2, 3)
    split = split_cores(allowed, root=Path("/nowhere"), quota=quota)
    assert split.threads == threads
    assert ("quota" in split.note) == (threads < 4)
    assert split_cores(allowed, threads=4, root=Path("/nowhere"), quota=quota).threads == 4
    assert divide_cores(allowed, quota=quota).engine_threads <= threads


def test_reading_facts_imports_nothing_heavy() -> None:
    code = (
        "import sys, crossover.serving.hardware.machine_facts as h; h.hardware_facts(); "
        "print(sorted({'torch', 'numpy', 'llama_cpp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_session_with_a_lower_priority_gets_little_beside_another() -> None:
    """Nice alone leaves it half the core, where the kernel groups tasks by session."""
    lower = (
        "from crossover.serving.hardware.machine_facts import "
        "lower_priority; lower_priority(10)\nprint()"
    )
    core = max(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    found = [
        start_python("-u", "-c", f"{first}\n{busy}", stdout=subprocess.PIPE)
        for first in (lower, "print()")
    ]
    try:
        lines = [one.stdout.readline() for one in found if one.stdout is not None]
        before = processes()
        time.sleep(1.0)
        after = processes()
    finally:
        for one in found:
            one.kill()
            one.communicate()
    pids = [one.pid for one in found]
    lowered, other = (after[pid].cpu_seconds - before[pid].cpu_seconds for pid in pids)
    assert lines == [b"\n", b"\n"] and 0 <= lowered < 0.25 * other


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"sys_vendor": "Amazon EC2", "product_name": "m7g.xlarge"},
            "virtual machine (Amazon EC2)",
        ),
        ({"sys_vendor": "Amazon EC2", "product_name": "m7g.metal"}, None),
        ({"sys_vendor": "QEMU", "product_name": "KVM Virtual Machine"}, "virtual machine (QEMU)"),
        ({"sys_vendor": "GIGABYTE", "product_name": "R272-P30"}, None),
        ({}, None),
    ],
)
def test_a_virtual_machine_on_arm_is_recognized_by_its_firmware(
    tmp_path: Path, files: dict[str, str], expected: str | None
) -> None:
    write(tmp_path, {"proc/cpuinfo": (CPUINFO_FILES / "graviton3").read_text()})
    write(tmp_path, {f"sys/class/dmi/id/{name}": f"{text}\n" for name, text in files.items()})
    assert hardware_facts(root=tmp_path).virtualisation == expected


def test_the_device_tree_names_a_hypervisor(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": (CPUINFO_FILES / "apple_vm").read_text()})
    (tmp_path / "proc/device-tree/hypervisor").mkdir(parents=True)
    assert hardware_facts(root=tmp_path).virtualisation == "virtual machine"


def test_x86_says_itself_whether_it_is_virtual(tmp_path: Path) -> None:
    """A provider's own server has the same vendor as its virtual machines."""
    write(tmp_path, {"proc/cpuinfo": CPUINFO.replace(" hypervisor", "")})
    write(tmp_path, {"sys/class/dmi/id/sys_vendor": "Google\n"})
    assert hardware_facts(root=tmp_path).virtualisation is None


def test_instructions_of_arm_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": (CPUINFO_FILES / "grace").read_text()})
    facts = hardware_facts(root=tmp_path)
    assert facts.isa == ("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2")
    assert facts.cpu_model == "Neoverse-V2"

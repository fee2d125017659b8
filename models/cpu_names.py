"""The name of this machine's CPU. On ARM, the kernel reports numbers for it, which are listed here.

x86 names its product in /proc/cpuinfo ("AMD EPYC 9B14"). ARM reports the implementer and the part
of each core. The same core is in several products: Neoverse-N1 in Graviton2 and in Ampere's Altra.
So the name of the machine from its firmware stands beside it: "Neoverse-N1, Amazon EC2 m6g.xlarge".
`root` is the folder in which /proc and /sys are mounted.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from crossover.models.machine_limits import ROOT, read_text

# Names of ARM cores by implementer and part, as lscpu of util-linux has them (lscpu-arm.c).
ARM_IMPLEMENTERS = {
    0x41: "Arm",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0xC0: "Ampere",
}
ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng 920",
    (0x4E, 0x004): "Carmel",
    (0x61, 0x000): "Apple Silicon",  # in a virtual machine, which hides the part
    (0x6D, 0xD49): "Azure Cobalt 100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}


def cpu_name(root: Path = ROOT) -> str | None:
    """Return the CPU's name, on ARM with that of the machine; None: the kernel reports neither."""
    text = read_text(root / "proc/cpuinfo")
    if match := re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE):
        return match[1]
    return ", ".join(filter(None, (_arm_cores(text), _machine_name(text, root)))) or None


def vendor_and_product(root: Path = ROOT) -> tuple[str, str]:
    """Return the names of the machine's vendor and product as its firmware (DMI) has them; "": it
    has none."""
    folder = root / "sys/class/dmi/id"
    return read_text(folder / "sys_vendor").strip(), read_text(folder / "product_name").strip()


def _arm_cores(text: str) -> str:
    """Return the names of the cores in /proc/cpuinfo: "Neoverse-V2", or with their numbers where
    they are of several kinds, "4 x Cortex-A76 + 4 x Cortex-A55"; "": it has none of ARM."""
    pairs = re.findall(
        r"^CPU implementer\s*: (0x[0-9a-f]+)$.*?^CPU part\s*: (0x[0-9a-f]+)$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    counts = Counter((int(implementer, 16), int(part, 16)) for implementer, part in pairs)
    # Of two kinds of cores, the one with the higher part number is usually the faster one.
    kinds = sorted(counts, reverse=True)
    names = [ARM_CORES.get(kind) or _unknown_core(*kind) for kind in kinds]
    if len(kinds) <= 1:
        return "".join(names)
    return " + ".join(f"{counts[kind]} x {name}" for kind, name in zip(kinds, names, strict=True))


def _unknown_core(implementer: int, part: int) -> str:
    maker = ARM_IMPLEMENTERS.get(implementer, f"implementer {implementer:#x}")
    return f"{maker} part {part:#x}"


def _machine_name(text: str, root: Path) -> str:
    """Return the machine's name from its firmware: DMI of servers, the device tree of boards, or
    /proc/cpuinfo of a Raspberry Pi; "": it has none."""
    vendor, product = vendor_and_product(root)
    if product:
        names_its_vendor = product.split()[:1] == vendor.split()[:1]
        return product if names_its_vendor else f"{vendor} {product}".strip()
    board = re.search(r"^Model\s*: (.*\S)", text, re.MULTILINE)
    device_tree = read_text(root / "proc/device-tree/model").strip("\0 \n")
    return vendor or device_tree or (board[1] if board else "")


def short_cpu_name(name: str) -> str:
    """Return a CPU's name without trademarks, clock and number of cores: `Intel Xeon`."""
    short = re.sub(r"\s*(\(R\)|\(TM\)|CPU|Processor|@.*|\d+-Core)\s*", " ", name)
    return " ".join(short.split())

"""Names of CPUs, read from /proc/cpuinfo of eleven ARM machines and from what firmware reports."""

from pathlib import Path

import pytest

from crossover.models.cpu_names import cpu_name

CPUINFO = Path(__file__).parent / "cpuinfo"


def machine_of(folder: Path, name: str, **files: str) -> Path:
    """Make a machine of files with one of the stored texts of /proc/cpuinfo; return its root."""
    texts = {
        "proc/cpuinfo": (CPUINFO / name).read_text(),
        **{path.replace("__", "/"): text for path, text in files.items()},
    }
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("graviton1", "Cortex-A72"),
        ("graviton2", "Neoverse-N1"),
        ("graviton3", "Neoverse-V1"),
        ("graviton4", "Neoverse-V2"),
        ("altra", "Neoverse-N1"),
        ("ampereone", "Ampere-1"),
        ("grace", "Neoverse-V2"),
        ("apple_vm", "Apple Silicon"),
        ("rk3588", "4 x Cortex-A76 + 4 x Cortex-A55"),
        ("pi4", "Cortex-A72, Raspberry Pi 4 Model B Rev 1.5"),
        ("pi5", "Cortex-A76, Raspberry Pi 5 Model B Rev 1.0"),
    ],
)
def test_an_arm_cpu_is_named_after_its_cores(tmp_path: Path, name: str, expected: str) -> None:
    assert cpu_name(machine_of(tmp_path, name)) == expected


@pytest.mark.parametrize(
    ("vendor", "product", "expected"),
    [
        ("Amazon EC2", "m8g.xlarge", "Neoverse-V2, Amazon EC2 m8g.xlarge"),
        ("Google", "Google Compute Engine", "Neoverse-V2, Google Compute Engine"),
        ("", "", "Neoverse-V2"),
    ],
)
def test_machines_with_the_same_core_differ_by_their_product(
    tmp_path: Path, vendor: str, product: str, expected: str
) -> None:
    files = {
        "sys__class__dmi__id__sys_vendor": f"{vendor}\n",
        "sys__class__dmi__id__product_name": f"{product}\n",
    }
    assert cpu_name(machine_of(tmp_path, "graviton4", **files)) == expected


def test_a_board_is_named_by_its_device_tree(tmp_path: Path) -> None:
    files = {"proc__device-tree__model": "Orange Pi 5\0"}
    name = cpu_name(machine_of(tmp_path, "rk3588", **files))
    assert name == "4 x Cortex-A76 + 4 x Cortex-A55, Orange Pi 5"


def test_a_core_without_a_name_is_described_by_its_numbers(tmp_path: Path) -> None:
    machine_of(tmp_path, "altra")
    file = tmp_path / "proc/cpuinfo"
    file.write_text(file.read_text().replace("0xd0c", "0xfff"))
    assert cpu_name(tmp_path) == "Arm part 0xfff"
    file.write_text(file.read_text().replace("0x41", "0x99"))
    assert cpu_name(tmp_path) == "implementer 0x99 part 0xfff"


def test_x86_names_its_product_itself(tmp_path: Path) -> None:
    files = {"sys__class__dmi__id__product_name": "PowerEdge R750\n"}
    machine_of(tmp_path, "altra", **files)
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14 \n")
    assert cpu_name(tmp_path) == "AMD EPYC 9B14"
    assert cpu_name(tmp_path / "nothing") is None

"""The builds of llama.cpp in an image: those that the Dockerfile names for the architecture."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
# Lines of GGML's list as they are in ggml/src/CMakeLists.txt of llama.cpp.
LINES = {
    "x64": "x64)",
    "sse42": "sse42              SSE42)",
    "haswell": "haswell            SSE42 AVX F16C FMA AVX2 BMI2)",
    "skylakex": "skylakex           SSE42 AVX F16C FMA AVX2 BMI2 AVX512)",
    "cascadelake": "cascadelake        SSE42 AVX512 AVX512_VNNI)",
    "zen4": "zen4           SSE42 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16)",
    "sapphirerapids": "sapphirerapids SSE42 AVX512 AVX512_VNNI AMX_TILE AMX_INT8)",
    "armv8.0_1": "armv8.0_1)",
    "armv8.2_1": "armv8.2_1    DOTPROD)",
    "armv8.2_2": "armv8.2_2    DOTPROD FP16_VECTOR_ARITHMETIC)",
    "armv8.2_3": "armv8.2_3    DOTPROD FP16_VECTOR_ARITHMETIC SVE)",
    "armv8.6_1": "armv8.6_1    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8)",
    "armv8.6_2": "armv8.6_2    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SVE2)",
    "armv9.2_1": "armv9.2_1    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SME)",
    "android_armv8.2_1": "android_armv8.2_1    DOTPROD)",
}


def variants_of_dockerfile() -> str:
    match = re.search(r'^ARG CPU_VARIANTS="(.+)"$', (DOCKER / "Dockerfile").read_text(), re.M)
    assert match is not None
    return match[1]


def kept(tmp_path: Path, architecture: str, names: str) -> set[str]:
    """Return the variants that are left in GGML's list."""
    file = tmp_path / "CMakeLists.txt"
    file.write_text(
        "".join(f"    ggml_add_cpu_backend_variant({line}\n" for line in LINES.values())
    )
    subprocess.run(
        [str(DOCKER / "keep-variants.sh"), str(file), architecture, names],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"variant\(([\w.]+)", file.read_text()))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("x86_64", {"sse42", "haswell", "skylakex", "cascadelake", "sapphirerapids", "zen4"}),
        (
            "aarch64",
            {"armv8.0_1", "armv8.2_1", "armv8.2_2", "armv8.2_3", "armv8.6_1", "armv8.6_2"},
        ),
    ],
)
def test_an_image_has_the_builds_of_its_architecture(
    tmp_path: Path, architecture: str, expected: set[str]
) -> None:
    assert kept(tmp_path, architecture, variants_of_dockerfile()) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("armv8.0_1 armv8.0_9", "GGML knows no armv8.0_9"),
        ("armv8x0_1", "GGML knows no armv8x0_1"),
        ("sse42", "CPU_VARIANTS names no variant for aarch64"),
    ],
)
def test_a_variant_that_ggml_does_not_know_ends_the_build(
    tmp_path: Path, names: str, message: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as problem:
        kept(tmp_path, "aarch64", names)
    assert message in problem.value.stderr


# The compilers of Debian 12 and of the architectures that the variants are compiled for.
MARCH = {
    "armv8.0_1": "armv8-a",
    "armv8.2_1": "armv8.2-a+dotprod",
    "armv8.2_2": "armv8.2-a+dotprod+fp16",
    "armv8.2_3": "armv8.2-a+dotprod+fp16+sve",
    "armv8.6_1": "armv8.6-a+dotprod+fp16+sve+i8mm",
    "armv8.6_2": "armv8.6-a+dotprod+fp16+sve+i8mm+sve2",
}


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None,
    reason="this machine has no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)",
)
@pytest.mark.parametrize("name", MARCH)
def test_the_cross_compiler_knows_each_variant_for_arm(tmp_path: Path, name: str) -> None:
    assert name in variants_of_dockerfile().split()
    source = tmp_path / "a.cpp"
    source.write_text("#include <arm_neon.h>\nint main() { return vaddvq_s32(vdupq_n_s32(0)); }\n")
    command = ["aarch64-linux-gnu-g++", f"-march={MARCH[name]}", "-fsyntax-only", str(source)]
    subprocess.run(command, check=True)

"""A made-up libnvidia-ml.so.1 with the ABI of the real one (nvml.h), for the real nvidia-ml-py.

    folder = built(tmp_path)                       # None: there is no C compiler
    environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": "lost"}

FAKE_NVML says what is wrong with the driver: mismatch, not_loaded, lost (the first of two GPUs),
mig (the second one is divided). It is as old as 2021: no list of processes in its third version,
no reasons of clocks.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
static int is(const char *what) {
  const char *wrong = getenv("FAKE_NVML"); return wrong && !strcmp(wrong, what);
}
static long number(void *device) { return (long)device; } /* 1, 2: GPUs; 3, 4: parts of the 2nd */
static int lost(void *d) { return is("lost") && number(d) == 1; }
int nvmlInitWithFlags(unsigned flags) { return is("mismatch") ? 18 : is("not_loaded") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
  return code == 18 ? "Driver/library version mismatch" : code == 9 ? "Driver Not Loaded"
       : code == 15 ? "GPU is lost" : "Not Supported";
}
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "470.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetName(void *d, char *out, unsigned n) {
  snprintf(out, n, "Made-up GPU %ld", number(d)); return lost(d) ? 15 : 0;
}
int nvmlDeviceGetUUID(void *d, char *out, unsigned n) {
  snprintf(out, n, number(d) > 2 ? "MIG-%04ld" : "GPU-%04ld", number(d)); return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { *a = 8; *b = 6; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, u64 *m) { /* total, free, used */
  u64 total = (u64)(number(d) > 2 ? 10 : 24) << 30;
  m[0] = total; m[2] = (u64)number(d) << 30; m[1] = total - m[2]; return lost(d) ? 15 : 0;
}
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { *mw = 100000 * number(d); return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { *mw = 350000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *d, u64 *mj) { *mj = 5000000; return 0; }
int nvmlDeviceGetUtilizationRates(void *d, unsigned *u) { u[0] = 87; u[1] = 40; return 0; }
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *mhz) {
  *mhz = kind == 2 ? 9501 : 1695; return 0;
}
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *mhz) {
  *mhz = kind == 2 ? 9751 : 2100; return 0;
}
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) {
  *now = *later = is("mig") && number(d) == 2; return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned i, void **part) {
  *part = (void *)(long)(3 + i); return i < 2 ? 0 : 6;
}
"""


def built(folder: Path) -> Path | None:
    """A folder with the library; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source = folder / "nvml.c"
    source.write_text(SOURCE)
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return folder

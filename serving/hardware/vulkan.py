"""Devices of Vulkan, asked of a build of llama.cpp that drives them: no other engine can use them.

One of the type CPU, such as Mesa's lavapipe, only where GGML_VK_VISIBLE_DEVICES names it.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

from serving.errors import Cause
from serving.hardware.gpu_facts import VULKAN, FoundGpus, GpuFacts


def library() -> Path | None:
    """GGML's library for Vulkan in the installed llama-cpp-python; nothing is imported."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        return None
    return next((Path(found.origin).parent / "lib").glob("libggml-vulkan.so*"), None)


def list_gpus() -> FoundGpus:
    """The devices in llama.cpp's order and by its names, "Vulkan0" and on. A driver may crash here:
    to be called in a process of its own (serving.hardware.gpu)."""
    path = library()
    if path is None:
        return FoundGpus((), Cause.backend_missing, "llama.cpp is not built with Vulkan")
    ggml = ctypes.CDLL(str(path))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("ggml_backend_vk_reg", pointer, ()),
        ("ggml_backend_reg_dev_count", ctypes.c_size_t, (pointer,)),
        ("ggml_backend_reg_dev_get", pointer, (pointer, ctypes.c_size_t)),
        ("ggml_backend_dev_name", text, (pointer,)),
        ("ggml_backend_dev_description", text, (pointer,)),
        ("ggml_backend_dev_memory", None, (pointer, pointer, pointer)),
    ):
        function = getattr(ggml, name)
        function.restype = result
        function.argtypes = arguments
    registry = ggml.ggml_backend_vk_reg()
    if registry is None:
        return FoundGpus((), Cause.no_driver, "Vulkan finds no driver here")
    gpus = []
    for index in range(ggml.ggml_backend_reg_dev_count(registry)):
        device = ggml.ggml_backend_reg_dev_get(registry, index)
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_description(device).decode("utf-8", "replace")
        handle = ggml.ggml_backend_dev_name(device).decode()
        gpus.append(
            GpuFacts(name, VULKAN, total.value, free.value, "Vulkan", index=index, uuid=handle)
        )
    if not gpus:
        return FoundGpus((), Cause.no_device, "Vulkan has no GPU here")
    return FoundGpus(tuple(gpus))

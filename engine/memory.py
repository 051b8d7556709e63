"""Predicts what will be taken of the memory, and refuses in words what does not fit.

A CPU hands out memory that it does not have and kills the process once it is used, a GPU fails in
the middle of a step. So weights and KV pool are compared with what is left before either is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from math import prod
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from cluster.config import KVCacheConfig

_CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimitError(ValueError):
    """What is configured does not fit into the memory; the message names the setting."""


def choose_num_blocks(config: KVCacheConfig, block_bytes: int, available_bytes: int) -> int:
    """Blocks of the KV pool: as many as were asked for, or as memory_bytes holds. Raises
    MemoryLimitError if that is no block at all, or more than there is memory for."""
    num_blocks = config.num_blocks or config.memory_bytes // block_bytes
    if num_blocks == 0:
        raise MemoryLimitError(
            f"kv_cache.memory_bytes is {config.memory_bytes} and holds no block: "
            f"{config.block_size} tokens take {block_bytes} bytes"
        )
    if num_blocks * block_bytes > available_bytes:
        setting, most = "kv_cache.memory_bytes", available_bytes
        if config.num_blocks is not None:
            setting, most = "kv_cache.num_blocks", available_bytes // block_bytes
        raise MemoryLimitError(
            f"the KV cache needs {_size(num_blocks * block_bytes)} ({num_blocks} blocks of "
            f"{_size(block_bytes)}) and {_size(available_bytes)} are available: {setting} may be "
            f"{most} at most"
        )
    return num_blocks


def check_weights_fit(source: str, num_bytes: int, available_bytes: int) -> None:
    """Raise MemoryLimitError if there is no memory for a model's weights."""
    if num_bytes > available_bytes:
        raise MemoryLimitError(
            f"the weights of model.source {source!r} need {_size(num_bytes)} and "
            f"{_size(available_bytes)} are available: take a smaller model or dtype, or another "
            "machine"
        )


def weight_bytes(files: Iterable[Path], dtype: torch.dtype) -> int:
    """Of the tensors in safetensors files, once they are of this dtype. Reads no weight."""
    return sum(_num_elements(file) for file in files) * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Memory of the device that may still be taken: on a CPU what the machine has left, or less if
    a cgroup (version 2) says so."""
    if device.type == "cuda":
        num_free, _ = torch.cuda.mem_get_info(device)
        return int(num_free)
    own = Path("/proc/self/cgroup").read_text(encoding="ascii") if _CGROUPS.is_dir() else ""
    return min([psutil.virtual_memory().available, *cgroup_rooms(_CGROUPS, own)])


def give_back_freed_memory() -> None:
    """Return what loading freed to the machine; glibc would keep it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cgroup_rooms(root: Path, own: str) -> list[int]:
    """What each cgroup that the process is in leaves of its limit, for those that have one.
    `own`: the text of /proc/self/cgroup. What is cached of files can be dropped, so it is room."""
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if path is None:
        return []
    innermost = root / path.strip("/")
    groups = [innermost, *innermost.parents]
    return [room for group in groups if (room := _cgroup_room(group)) is not None]


def _cgroup_room(group: Path) -> int | None:
    limit_file = group / "memory.max"
    if not limit_file.is_file() or (limit := limit_file.read_text().strip()) == "max":
        return None
    used = int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(0, int(limit) - used + int(stat["inactive_file"]))


def _num_elements(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _size(num_bytes: int) -> str:
    """In the largest unit of which there is one."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"

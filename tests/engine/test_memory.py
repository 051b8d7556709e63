"""What does not fit is refused before it is taken, with figures, by the name of its setting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.config import KVCacheConfig
from engine.memory import (
    MemoryLimitError,
    available_bytes,
    cgroup_rooms,
    check_weights_fit,
    choose_num_blocks,
    weight_bytes,
)

MIB = 1 << 20
POOL_BYTES = 128 * MIB


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [
        (KVCacheConfig(num_blocks=10), 10),
        (KVCacheConfig(num_blocks=10, memory_bytes=1), 10),
        (KVCacheConfig(memory_bytes=10 * MIB), 10),
        (KVCacheConfig(memory_bytes=11 * MIB - 1), 10),
        (KVCacheConfig(memory_bytes=MIB), 1),
    ],
)
def test_what_fits_is_taken_whole(config: KVCacheConfig, num_blocks: int) -> None:
    assert choose_num_blocks(config, MIB, num_blocks * MIB) == num_blocks
    if num_blocks > 1:
        with pytest.raises(MemoryLimitError):
            choose_num_blocks(config, MIB, num_blocks * MIB - 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            KVCacheConfig(num_blocks=3000),
            ("2.93 GiB", "3000 blocks of 1 MiB", "1.953 GiB", "kv_cache.num_blocks may be 2000 at"),
        ),
        (
            KVCacheConfig(memory_bytes=3000 * MIB),
            ("2.93 GiB", "1.953 GiB", f"kv_cache.memory_bytes may be {2000 * MIB} at most"),
        ),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_by_the_name_of_its_setting(
    config: KVCacheConfig, words: tuple[str, ...]
) -> None:
    with pytest.raises(MemoryLimitError) as raised:
        choose_num_blocks(config, MIB, 2000 * MIB)
    assert all(word in str(raised.value) for word in words), raised.value


def test_memory_that_holds_no_block_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"kv_cache.memory_bytes is 1048575 and holds no"):
        choose_num_blocks(KVCacheConfig(memory_bytes=MIB - 1), MIB, 2000 * MIB)


def test_weights_that_do_not_fit_are_refused() -> None:
    check_weights_fit("big", 5 * MIB, 5 * MIB)
    with pytest.raises(MemoryLimitError, match=r"model.source 'big' need 6 MiB and 5 MiB"):
        check_weights_fit("big", 6 * MIB, 5 * MIB)


def test_weights_are_counted_as_they_will_be_held(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros((), dtype=torch.float16)}, tmp_path / "2.safetensors")
    files = list(tmp_path.iterdir())
    assert weight_bytes(files, torch.bfloat16) == 2 * (15 + 7 + 1)
    assert weight_bytes(files, torch.float32) == 4 * (15 + 7 + 1)


# --- what is there --------------------------------------------------------------------------------


def limit(group: Path, most: str, used: int = 0, dropped: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {dropped}\nactive_file 3\n")


def test_every_limit_above_the_process_counts(tmp_path: Path) -> None:
    limit(tmp_path / "a/b", "1000", used=700, dropped=200)
    limit(tmp_path / "a", "max", used=5000)
    limit(tmp_path / "other", "1")
    (tmp_path / "a/b/c").mkdir()
    assert cgroup_rooms(tmp_path, "0::/a/b/c\n") == [500]
    limit(tmp_path, "400", used=900)
    assert cgroup_rooms(tmp_path, "1:cpu:/x\n0::/a/b\n") == [500, 0]


def test_a_container_sees_its_own_limit_as_the_root(tmp_path: Path) -> None:
    limit(tmp_path, "800", used=300)
    assert cgroup_rooms(tmp_path, "0::/\n") == [500]
    assert cgroup_rooms(tmp_path, "0::/a/path/outside\n") == [500]


def test_without_version_2_no_limit_is_known(tmp_path: Path) -> None:
    assert cgroup_rooms(tmp_path, "4:memory:/a\n") == []
    assert cgroup_rooms(tmp_path, "") == []


def test_this_machine_has_memory_left() -> None:
    assert MIB < available_bytes(torch.device("cpu")) < 1 << 50


# --- the prediction ------------------------------------------------------------------------------

MEASURE = """
import gc, json, sys
import psutil, torch
from transformers import AutoConfig
from cluster.config import KVCacheConfig, ModelConfig
from engine.embedded import embedded_model_folder
from engine.loader import load_model
from engine.memory import give_back_freed_memory, weight_bytes
from engine.model_runner import ModelRunner
from engine.models.choice import make_decoder
from engine.models.weights import weight_files
from engine.native.native_linear import check_kernels

def taken_bytes():
    return psutil.Process().memory_info().rss

folder, cpu = embedded_model_folder(), torch.device("cpu")
model_config = AutoConfig.from_pretrained(folder)
check_kernels()  # Code is not weights.
before = taken_bytes()
config = ModelConfig(implementation="native")
decoder = make_decoder(config, folder, model_config, 8192, torch.bfloat16, cpu)
give_back_freed_memory()
weights = taken_bytes() - before
predicted = weight_bytes(weight_files(folder), torch.bfloat16)

tiny, memory_bytes = sys.argv[1], int(sys.argv[2])
kept, pools = [], []
for implementation in ("auto", "torch", "transformers"):
    config = ModelConfig(source=tiny, dtype="float32", device="cpu", implementation=implementation)
    kept.append(load_model(config))
    before = taken_bytes()
    kept.append(ModelRunner(kept[-1], KVCacheConfig(memory_bytes=memory_bytes)))
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and value.nbytes > 1 << 20:
            value.fill_(1)
    pools.append(taken_bytes() - before)
print(json.dumps({"weights": weights, "predicted": predicted, "pools": pools}))
"""


@pytest.fixture(scope="module")
def measured(tiny_folders: dict[str, Path]) -> dict[str, Any]:
    """What a process took, that wrote to all of it."""
    command = [sys.executable, "-c", MEASURE, str(tiny_folders["llama"]), str(POOL_BYTES)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_pools_take_what_was_predicted(measured: dict[str, Any]) -> None:
    """Within 5 %."""
    assert measured["pools"] == pytest.approx([POOL_BYTES] * 3, rel=0.05)


def test_weights_take_what_was_predicted(measured: dict[str, Any]) -> None:
    """Within 5 %, packed and with the tables of the rotary embedding."""
    assert measured["weights"] == pytest.approx(measured["predicted"], rel=0.05)

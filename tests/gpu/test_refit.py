"""The refit's GPU parts: the hash kernel, buckets in memory that two processes map or over NCCL, deadlines.

python -m pytest -q tests/gpu        one GPU; what needs two is left out there
"""

import multiprocessing
import threading
import time

import pytest
import torch

from common.refit import RefitError, Wire, checksum, connect_store, hash_words, open_store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = [64, 1 << 20, 3 << 20, 640, 1 << 27]  # NCCL sends small ones also to a peer that does not take them


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 8193, 3_000_001])
def test_a_gpu_hashes_as_a_cpu_does(dtype, count):
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)
    assert checksum(tensor.cuda()) == checksum(tensor)


def content(index: int, size: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


def receiver(port: int, gpu: int, results, stop_after: int) -> None:
    """Another process. Takes `stop_after` buckets, then waits without a word."""
    torch.cuda.set_device(gpu)
    wire = Wire(connect_store("127.0.0.1", port, 60), 1, 1, 1, torch.device("cuda", gpu), 5)
    wire.map(SIZES)
    right = []
    for index, bucket in wire.receive(SIZES):
        right.append(torch.equal(bucket, content(index, SIZES[index], "cuda")))
        torch.cuda._sleep(100_000_000)  # some 50 ms: whoever did not wait would read or write too early
        bucket.fill_(7)  # what is read back is written into the bucket: the sender must not mind
        if len(right) == stop_after:
            results.put((wire.transport, right))
            time.sleep(30)
    wire.finish()
    results.put((wire.transport, right))
    results.get()  # the memory is the sender's: stay until it is done


@pytest.fixture(params=["ipc", "nccl"])
def transport(request) -> str:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


def start(transport: str, stop_after: int):
    store, spawn = open_store("127.0.0.1", 60), multiprocessing.get_context("spawn")
    results = spawn.Queue()
    arguments = (store.port, int(transport == "nccl"), results, stop_after)
    process = spawn.Process(target=receiver, args=arguments, daemon=True)
    process.start()
    wire = Wire(store, 0, 1, 1, torch.device("cuda", 0), 5)
    wire.allocate(SIZES)
    return wire, process, results


def pack(index: int, bucket: torch.Tensor) -> None:
    filled = content(index, SIZES[index], "cuda")
    torch.cuda._sleep(100_000_000)
    bucket.copy_(filled)


def test_buckets_arrive(transport):
    wire, process, results = start(transport, stop_after=len(SIZES) + 1)
    wire.send(SIZES, pack)
    wire.finish()
    assert results.get(timeout=60) == (transport, [True] * len(SIZES))
    results.put("done")
    process.join(30)


@pytest.mark.parametrize("fault", ["stops", "dies"])
def test_a_receiver_that_fails_ends_the_transfer_within_the_deadline(transport, fault):
    wire, process, results = start(transport, stop_after=2)
    if fault == "dies":
        threading.Thread(target=lambda: (results.get(timeout=60), process.kill())).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        wire.send(SIZES, pack)
        wire.finish()
    assert time.monotonic() - begin < 20
    process.kill()
    process.join(30)


def test_a_kernel_that_never_ends_is_an_error_at_the_deadline():
    store = open_store("127.0.0.1", 60)
    wires = {}

    def join(rank: int, device: torch.device) -> None:
        wires[rank] = Wire(connect_store("127.0.0.1", store.port, 60), rank, 1, 1, device, 1)

    threads = [threading.Thread(target=join, args=(r, torch.device("cuda", 0))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.cuda._sleep(20_000_000_000)  # cycles: some ten seconds
    with pytest.raises(RefitError, match="not over after 1 s"):
        wires[0].finish()
    torch.cuda.synchronize()


def test_hashing_needs_no_memory_of_its_own():
    words = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")  # 1 GiB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert int(hash_words(words)) == 0
    assert torch.cuda.max_memory_allocated() - before < 1 << 20

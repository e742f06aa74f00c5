"""Processes beside the test's own: two that train together, or one that runs a program.

Each is forked from a server that has nothing but the imports behind it, which would take a new process of
Python most of its time. It has none of the test's state, like one that is spawned.
"""

import os
import runpy
import sys

import torch.multiprocessing

DEADLINE_S = 480
# with GPUs spawned after all: an import of the server may ask for CUDA, which then no fork of it can use
FORKS = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
FORKS.set_forkserver_preload(["algos.grpo", "algos.ppo", "nemo_automodel._transformers.auto_model"])


def on_two_ranks(rank_process, *shared, num_ports: int) -> None:
    """Runs `rank_process(rank, *shared, *ports)` in two processes to their end; all must end well.

    The ports are queues: rank 0 tells the other one the port of a rendezvous through each.
    """
    arguments = (*shared, *(FORKS.Queue() for _ in range(num_ports)))
    processes = [FORKS.Process(target=_rank, args=(rank_process, rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0], "see the captured output of the ranks"


def _rank(rank_process, *arguments) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    rank_process(*arguments)


def run_program(path: str, argv: list[str], log: str) -> int:
    """`python PATH ARGV...` to its end, with what it prints in the file `log`. Returns the exit code."""
    process = FORKS.Process(target=_program, args=(path, argv, log))
    process.start()
    process.join(DEADLINE_S)
    if process.is_alive():
        process.kill()
    return process.exitcode


def _program(path: str, argv: list[str], log: str) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")

"""Two processes that train together, for tests of what several ranks do."""

import pytest
import torch.multiprocessing

DEADLINE_S = 480


def on_two_ranks(rank_process, *shared, num_ports: int) -> None:
    """Runs `rank_process(rank, *shared, *ports)` in two processes to their end; all must end well.

    The ports are queues: rank 0 tells the other one the port of a rendezvous through each.
    """
    context = torch.multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        arguments = (*shared, *(context.Queue() for _ in range(num_ports)))
        processes = [context.Process(target=rank_process, args=(rank, *arguments)) for rank in (0, 1)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0], "see the captured output of the ranks"

"""How long does GAE take? `algos/ppo.py` against a plain loop over the actions, on one thread.

    .venv/bin/python scripts/bench/gae.py

128 rollouts of 16,384 actions. In the last line every 1,024 of them are followed by 256 tokens of tool
output, which is no action. Times are medians of 20 calls; the loop, which has no gaps to skip, of 3.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from algos.ppo import gae

ROLLOUTS, ACTIONS, TURN, OUTPUT = 128, 16_384, 1_024, 256
GAMMA, LAM = 0.999, 0.95


def loop(rewards_RA, values_RA, last_values_R):
    """From the last action to the first, all rollouts at once."""
    advantages_RA, next_R = torch.zeros_like(values_RA), last_values_R
    after_R = torch.zeros_like(last_values_R)
    for k in range(values_RA.shape[1] - 1, -1, -1):
        delta_R = rewards_RA[:, k] + GAMMA * next_R - values_RA[:, k]
        advantages_RA[:, k] = after_R = delta_R + GAMMA * LAM * after_R
        next_R = values_RA[:, k]
    return advantages_RA


def median_ms(function, calls: int) -> float:
    function()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    last = torch.randn(ROLLOUTS)
    dense = torch.ones(ROLLOUTS, ACTIONS, dtype=torch.bool)
    turns = ACTIONS // TURN
    gaps = (torch.arange(turns * (TURN + OUTPUT)) % (TURN + OUTPUT) < TURN).expand(ROLLOUTS, -1).contiguous()
    rewards, values = torch.randn(ROLLOUTS, ACTIONS), torch.randn(ROLLOUTS, ACTIONS)
    expected = loop(rewards, values, last)
    slow = median_ms(lambda: loop(rewards, values, last), 3)
    print(f"loop over actions: {slow:.0f} ms")
    for name, mask in {"gae": dense, "gae with tool output between": gaps}.items():
        spread = [torch.full(mask.shape, torch.nan).masked_scatter_(mask, x) for x in (rewards, values)]
        got = gae(*spread, mask, last, GAMMA, LAM)[0].masked_select(mask).view_as(expected)
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        fast = median_ms(lambda: gae(*spread, mask, last, GAMMA, LAM), 20)
        print(f"{name}: {fast:.1f} ms, {slow / fast:.0f} times as fast, largest difference {error:.0e}")


if __name__ == "__main__":
    main()

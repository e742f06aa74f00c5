"""TextArena's games for one player: `pip install textarena`, then

--env scripts/examples/textarena_game.py:GuessTheNumber      --env scripts/examples/textarena_game.py:Mastermind
"""

import textarena

from common.env import Env, Step


class GuessTheNumber(Env):
    game, max_turns = (
        "GuessTheNumber-v0-raw",
        10,
    )  # raw: without the history, which the conversation has anyway

    def tasks(self, split: str) -> list[dict]:
        return [{"seed": seed} for seed in (range(10_000) if split == "train" else range(10_000, 10_064))]

    def reset(self, task: dict) -> str:
        self.env = textarena.make(self.game)
        self.env.reset(num_players=1, seed=task["seed"])
        return self.news()

    def news(self) -> str:
        """What the game, not the player, has said since the last time."""
        return "\n".join(text for sender, text, _ in self.env.get_observation()[1] if sender < 0)

    def step(self, action: str) -> Step:
        over, _ = self.env.step(action)
        if not over:
            return Step(0.0, self.news(), score=0.0)
        rewards, about = self.env.close()
        return Step(
            rewards[0], score=float(rewards[0] == 1), terminated=True, info={"reason": about[0]["reason"]}
        )


class Mastermind(GuessTheNumber):
    game = "Mastermind-v0-raw"

"""Where metrics go besides the run's own files: TensorBoard, Weights & Biases, trackio."""

import importlib
from pathlib import Path

from common.logger import LogFlags


class TensorBoard:
    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        for number, sample in enumerate(samples):
            text = "\n".join(f"    {line}" for line in str(sample["transcript"]).splitlines())
            self.writer.add_text(f"samples/{number}", text, step)  # indented: Markdown would eat it

    def close(self) -> None:
        self.writer.close()


class Hosted:
    """wandb, or trackio, which has the same calls. A table holds one step's samples, never all so far."""

    def __init__(self, package: str, project: str, folder: Path, config: dict):
        self.package = importlib.import_module(package)
        self.package.init(project=project, name=folder.name, config=config)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.package.log(scalars, step=step)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        keys = ("prompt", "transcript", "reward", "advantage")
        rows = [[str(sample.get(key)) for key in keys] for sample in samples]
        if self.package.__name__ == "wandb":
            self.package.log({"samples": self.package.Table(columns=list(keys), data=rows)}, step=step)

    def close(self) -> None:
        self.package.finish()


def open_trackers(flags: LogFlags, config: dict, first_step: int = 0) -> list:
    """What the flags ask for. `config` are all flags of the run, which goes on at `first_step`."""
    folder = Path(flags.output_dir)
    hosted = {"wandb": flags.wandb_project, "trackio": flags.trackio_project}
    local = [TensorBoard(folder / "tensorboard", first_step)] if flags.tensorboard else []
    return local + [Hosted(name, project, folder, config) for name, project in hosted.items() if project]

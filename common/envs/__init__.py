"""The built-in environments, and how `--env` names them and a user's own."""

import base64
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from common.env import Env, EnvFlags


def load_env(spec: str, flags: EnvFlags | None = None) -> Callable[[], Env]:
    """`--env` to a function that makes environments: reverse, shapes, gym:DATASET, jsonl:FILE,
    path/to/file.py:Class.

    Raises ValueError with what is wrong and what would be right.
    """
    flags = flags or EnvFlags()
    if flags.unsafe_sandbox:
        os.environ["INSTAR_UNSAFE_SANDBOX"] = "1"  # for common/sandbox.py, in whatever process it is used
    name, _, argument = spec.partition(":")
    if name == "reverse":
        from common.envs.reverse import Reverse

        return Reverse
    if name == "shapes":
        from common.envs.shapes import Shapes

        return Shapes
    if name == "gym":
        from common.envs.gym import Gym

        return lambda: Gym(argument, eval_size=flags.eval_size)
    if name == "jsonl":
        from common.envs.jsonl import Jsonl

        return lambda: Jsonl(argument, flags.prompt_key, flags.answer_key, flags.grader, flags.eval_size)
    if not name.endswith(".py") or not argument:
        raise ValueError(
            f"--env {spec}: use reverse, shapes, gym:DATASET, jsonl:FILE or path/to/file.py:Class"
        )
    if not Path(name).is_file():
        raise ValueError(f"--env {spec}: there is no file {name}")
    module_spec = importlib.util.spec_from_file_location(f"env_{Path(name).stem}", name)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there for a class's module
    module_spec.loader.exec_module(module)
    if not isinstance(getattr(module, argument, None), type):
        raise ValueError(f"--env {spec}: {name} has no class {argument}")
    return getattr(module, argument)


def image_part(image) -> dict:
    """A PIL image, or the bytes of a PNG or JPEG file, as a part of a message's content. The others are
    {"type": "text", "text": ...}."""
    if not isinstance(image, bytes):
        file = io.BytesIO()
        image.save(file, "png")
        image = file.getvalue()
    return {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(image).decode()}"}


def env_name(spec: str) -> str:
    """The name of `--env` in metrics: reverse, the dataset, the stem of a JSONL file, or the class's name."""
    name, _, argument = spec.partition(":")
    if not argument:
        return name
    return argument if name.endswith(".py") else Path(argument.partition(",")[0]).stem

"""Images in conversations: what engine and trainer get of one, and the ids that stand for it in both.

In a message an image is a part of its content (`common.envs.image_part`). The chat template writes one
placeholder for it; the model's processor says which ids go there and what the vision tower sees.
"""

import base64
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.envs.pool import EnvError
from common.models import image_token, load_config, load_processor

OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # outputs of a processor
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow would start other programs for some
WITH_BATCH_AXIS = ("idefics3", "smolvlm")  # before that of an image's tiles: model types


@dataclass
class Picture:
    """One image. The first axis of each array in `pixels` is that of its tiles, patches or sizes."""

    image: object  # PIL's, RGB: what the engine gets
    ids: list[int]  # in place of its placeholder
    pixels: dict[str, np.ndarray]  # what the trainer's model gets, under the names of its arguments


@functools.lru_cache(maxsize=64)  # the rollouts of a group share an image, and its pixels are sent once
def read_picture(model_path: str, url: str) -> Picture:
    """The image of a data URL. Raises EnvError where it is none, or the model takes none."""
    from PIL import Image

    if (token := image_token(model_path)) is None:
        raise EnvError("bad_prompt", "the model takes no images")
    processor = load_processor(model_path)
    placeholder = {"text": [processor.tokenizer.convert_ids_to_tokens(token)], "add_special_tokens": False}
    try:
        data = base64.b64decode(url.partition(";base64,")[2], validate=True)
        image = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
        made = processor(images=[image], return_tensors="np", **placeholder)
    except Exception as error:  # Pillow and the processor raise what they like
        what = "an image must be data:image/...;base64,..., as common.envs.image_part makes it"
        raise EnvError("bad_prompt", f"{what} ({type(error).__name__}: {error})") from error
    batched = load_config(model_path)["model_type"] in WITH_BATCH_AXIS
    pixels = {name: value[0] if batched else value for name, value in made.items() if name not in OF_TEXT}
    return Picture(image, made["input_ids"][0].tolist(), pixels)


def pictures_of(tokenizer, content) -> list[Picture]:
    """The images in the content of a message, in order; text and ids have none. Raises EnvError."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    urls = [part.get("image") for part in parts if part.get("type") == "image"]
    return [read_picture(tokenizer.name_or_path, url if isinstance(url, str) else "") for url in urls]


def expand(tokenizer, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
    """`ids` with those of the pictures in place of the placeholders. Raises EnvError where they are not as
    many."""
    if not pictures:
        return ids
    token = image_token(tokenizer.name_or_path)
    if ids.count(token) != len(pictures):
        raise EnvError("bad_prompt", f"{ids.count(token)} placeholders in the text, {len(pictures)} images")
    rest = iter(pictures)
    return [each for i in ids for each in (next(rest).ids if i == token else [i])]


def collapse(ids: list[int], pictures: Sequence[Picture], token: int) -> list[int]:
    """What `expand` was given: the engine expands by itself."""
    short, at = [], 0
    for picture in pictures:
        start = ids.index(token, at) - picture.ids.index(token)
        short, at = [*short, *ids[at:start], token], start + len(picture.ids)
    return short + ids[at:]

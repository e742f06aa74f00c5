"""Images in conversations: the ids that stand for them and what the tower sees are the same for engine and trainer.

What ids and arrays should be says one call of the model's own processor for a whole conversation; what log-probs
should be, a forward pass of Hugging Face's model with that.
"""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from algos.grpo import Args, Trainer, make_minibatches
from common import checks
from common.agent import read_prompt
from common.batching import collate, micro_batches, segment_row, to_device
from common.checks import FlagError
from common.debug import dump_rollouts, read_rollouts
from common.env import Step
from common.envs import image_part
from common.envs.jsonl import Jsonl
from common.envs.pool import EnvError
from common.envs.shapes import Shapes, draw
from common.images import collapse
from common.logprobs import LogprobHead
from common.models import load_tokenizer, make_tiny, random_tiny_vlm, resolve_model, save_vlm
from common.parallel import ParallelFlags
from common.refit import open_store
from common.rollout import rollout_group
from tests.fakes import InlineEnvs, ScriptedEngine, ScriptedEnv, reply
from tests.ranks import on_two_ranks
from tests.test_refit_engine import Link, start_engine

WIDE, SQUARE = draw(3, 1), draw(2, 3)  # 48 x 24 and 24 x 24 pixels
TEXT = {"type": "text", "text": "how many?"}
WORDS = {"group_size": 1, "temperature": 1.0, "timeout_s": 60, "system_prompt": None, "template_args": {}}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_vlm(*random_tiny_vlm(seed=3), tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def processor(path):
    return AutoProcessor.from_pretrained(path)


def user(*content) -> dict:
    return {"role": "user", "content": [image_part(c) if isinstance(c, Image.Image) else c for c in content]}


def chat(*turns: str) -> str:
    """The conversation as the template has it, up to where the policy speaks."""
    return "".join(f"<|im_start|>{turn}" for turn in turns) + "<|im_start|>assistant\n"


def test_the_two_sizes_have_different_numbers_of_ids():
    assert (WIDE.size, SQUARE.size) == ((48, 24), (24, 24))


def test_a_prompt_with_two_images_of_different_size_is_what_the_processor_makes_of_it_at_once(
    path, processor
):
    messages = [{"role": "system", "content": "Count."}, user(WIDE, TEXT, SQUARE)]
    _, rendered, ids, pictures = read_prompt(load_tokenizer(path), messages, None, {})
    assert rendered == chat("system\nCount.<|im_end|>\n", "user\n<image>how many?<image><|im_end|>\n")
    whole = processor(text=[rendered], images=[[WIDE, SQUARE]], return_tensors="np")
    assert ids == whole["input_ids"][0].tolist()
    assert [len(picture.pixels["pixel_values"]) for picture in pictures] == [3, 5], (
        "2 tiles, 4 tiles, and each image whole"
    )
    for name in ("pixel_values", "pixel_attention_mask"):
        assert np.array_equal(np.concatenate([picture.pixels[name] for picture in pictures]), whole[name][0])
    short = processor.tokenizer.encode(rendered, add_special_tokens=False)
    assert (
        collapse(ids, pictures, processor.image_token_id) == short
        and short.count(processor.image_token_id) == 2
    )


def test_what_is_no_image_and_a_placeholder_without_one_are_refused(path, tmp_path):
    tokenizer = load_tokenizer(path)
    with pytest.raises(EnvError, match="2 placeholders in the text, 1 images"):
        read_prompt(tokenizer, [user(WIDE, {"type": "text", "text": "an <image>"})], None, {})
    unfit = (
        "/etc/passwd",
        "data:image/png;base64,@@",
        "data:image/png;base64,aGVsbG8=",
        None,
        {"url": "x"},
        [1],
    )
    for url in unfit:
        with pytest.raises(EnvError, match="an image must be data:image"):
            read_prompt(tokenizer, [user({"type": "image", "image": url})], None, {})
    with pytest.raises(EnvError, match="takes no images"):
        read_prompt(load_tokenizer(make_tiny(tmp_path)), [user(WIDE, TEXT)], None, {})


class SightedEngine(ScriptedEngine):
    """The scripted engine of a model with images; vLLM's own expansion is for the tests with a real one."""

    def __init__(self, replies, processor, max_model_len: int = 500):
        super().__init__(replies, max_model_len)
        self.image_token, self.shown = processor.image_token_id, []

    async def _ask(self, prompt_ids, sampling, pictures=()):
        self.shown.append([picture.image.size for picture in pictures])
        return await super()._ask(prompt_ids, sampling)


def play_two_turns(path, processor, first="2<|im_end|>", max_model_len=500, history=""):
    """A picture, an answer, another picture of the environment, an answer. `history`: what the template puts
    before an earlier answer, so that it is not what was sampled."""
    tokenizer = load_tokenizer(path)
    role = "{{ message['role'] }}\n"
    said = "{% if message['role'] == 'assistant' %}" + history + "{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(role, role + said)
    ids = [processor.tokenizer.encode(text, add_special_tokens=False) for text in (first, "3<|im_end|>")]
    engine = SightedEngine([reply(each) for each in ids], processor, max_model_len)
    steps = [Step(0.25, user(SQUARE, TEXT)["content"]), Step(1.0)]
    envs = InlineEnvs(lambda: ScriptedEnv([user(WIDE, TEXT)], steps))
    group = rollout_group(engine, tokenizer, envs, "train", 0, ticket=0, max_new_tokens=9, **WORDS)
    (rollout,) = asyncio.run(group)
    return engine, rollout


def whole_conversation(processor, history="") -> tuple[dict, int]:
    """By one call of the processor, without the last answer; and how many ids the first turn has."""
    first = "user\n<image>how many?<|im_end|>\n"
    text = chat(first, f"assistant\n{history}2<|im_end|>\n", first)
    turn = processor(text=[chat(first)], images=[[WIDE]])["input_ids"][0]
    return processor(text=[text], images=[[WIDE, SQUARE]], return_tensors="np"), len(turn)


def test_an_image_that_the_environment_gives_in_mid_episode_is_where_it_would_be_in_the_whole_conversation(
    path, processor
):
    engine, rollout = play_two_turns(path, processor)
    assert rollout.invalid is None, rollout.info
    (segment,), (whole, first) = rollout.segments, whole_conversation(processor)
    assert segment.token_ids[:-2].tolist() == whole["input_ids"][0].tolist()
    assert [request["prompt_ids"] for request in engine.requests_seen] == [
        segment.token_ids[:first].tolist(),
        segment.token_ids[:-2].tolist(),
    ]
    assert engine.shown == [[WIDE.size], [WIDE.size, SQUARE.size]]
    assert np.flatnonzero(segment.action_mask).tolist() == [
        first,
        first + 1,
        len(segment.token_ids) - 2,
        len(segment.token_ids) - 1,
    ]
    images = collate([segment_row(segment)])["images"]
    assert images.keys() == {"pixel_values", "pixel_attention_mask"}
    assert all(np.array_equal(images[name], whole[name][0]) for name in images)


def test_where_the_template_rewrites_history_a_segment_starts_with_all_images(path, processor):
    _, rollout = play_two_turns(path, processor, history="~")
    (first, second), (whole, length) = rollout.segments, whole_conversation(processor, history="~")
    assert (len(first.images), len(second.images)) == (1, 2)
    assert first.token_ids[:length].tolist() == whole["input_ids"][0, :length].tolist()
    assert second.token_ids[:-2].tolist() == whole["input_ids"][0].tolist()
    assert np.flatnonzero(second.action_mask).tolist() == [
        len(second.token_ids) - 2,
        len(second.token_ids) - 1,
    ]
    images = collate([segment_row(second)])["images"]
    assert all(np.array_equal(images[name], whole[name][0]) for name in images)


def test_a_limit_at_any_place_never_leaves_a_part_of_an_image(path, processor):
    (whole, first), token = whole_conversation(processor), processor.image_token_id
    ids, seen = whole["input_ids"][0].tolist(), set()
    of_wide, of_both = ids[:first].count(token), ids.count(token)
    for limit in range(1, len(ids) + 3):
        _, rollout = play_two_turns(path, processor, max_model_len=limit)
        if limit <= first:
            assert rollout.invalid == "no_room" and not rollout.segments
            continue
        (segment,) = rollout.segments
        held = (segment.token_ids == token).sum()
        seen.add((int(held), len(segment.images), rollout.truncated))
        assert rollout.invalid is None and held == (of_both if limit > len(ids) else of_wide)
    # the answer of one turn, cut behind the first picture; of two, behind the second
    assert seen == {(of_wide, 1, True), (of_both, 2, False)}


def test_a_placeholder_that_the_policy_sampled_makes_the_rollout_invalid(path, processor):
    _, rollout = play_two_turns(path, processor, first="<image>2<|im_end|>")
    assert rollout.invalid == "image_token" and "sampled" in rollout.info["error"]


def test_recorded_rollouts_keep_their_images_bit_for_bit(path, processor, tmp_path):
    _, rollout = play_two_turns(path, processor)
    dump_rollouts(str(tmp_path), 0, [rollout])
    (again,) = read_rollouts(str(tmp_path), 0)
    for ours, theirs in zip(rollout.segments[0].images, again.segments[0].images, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name])


# --- Batches and gradients


def sighted_rows(path: str) -> list[list[dict]]:
    """Six rollouts: of two images, of one, of one, and three of text alone, the longest among them."""
    tokenizer, dice, rollouts = load_tokenizer(path), np.random.default_rng(0), []
    contents = [[WIDE, TEXT, SQUARE], [TEXT] * 9, [SQUARE], [TEXT], [TEXT, TEXT], [WIDE, TEXT]]
    for index, content in enumerate(contents):
        _, _, ids, pictures = read_prompt(tokenizer, [user(*content)], None, {})
        answer = dice.integers(5, 90, 4).tolist()
        rollouts.append([{
            "token_ids": np.array(ids + answer, np.int32),
            "action_mask": np.array([False] * len(ids) + [True] * 4),
            "logprobs": np.where([False] * len(ids) + [True] * 4, -4.6, np.nan).astype(np.float32),
            "images": [picture.pixels for picture in pictures],
            "advantage": (-1) ** index * 0.7 + 0.1 * index,
        }])  # fmt: skip
    return rollouts


@pytest.mark.parametrize("tokens, ranks", [(10_000, 1), (90, 1), (1, 1), (1, 2), (90, 4)])
def test_each_micro_batch_has_images_in_the_order_of_its_rows(path, processor, tokens, ranks):
    rows = [row for rollout in sighted_rows(path) for row in rollout]
    flags = ParallelFlags(num_trainers=ranks, micro_batch_tokens=tokens)
    shares, trained = micro_batches(rows, flags), 0
    for batch in (batch for share in shares for batch in share):
        tiles = []
        for ids in batch["token_ids"]:  # which row it is say its ids
            (row,) = [row for row in rows if np.array_equal(np.trim_zeros(ids, "b"), row["token_ids"])]
            tiles += [image["pixel_values"] for image in row["images"]]
        assert tiles and np.array_equal(batch["images"]["pixel_values"], np.concatenate(tiles))
        assert (
            len(batch["images"]["pixel_values"]) * 4 == (batch["token_ids"] == processor.image_token_id).sum()
        )
        trained += batch["action_mask"].sum()
    assert trained == 4 * len(rows), "what was added for its image is not trained on"
    texts = [row for row in rows if not row["images"]]
    assert all(batch["images"] == {} for share in micro_batches(texts, flags) for batch in share)


LAYOUTS = {
    "one rank": ({}, 10_000),
    "one rank, a row at a time": ({}, 1),
    "two ranks": ({"num_trainers": 2}, 10_000),
    "two ranks, a row at a time": ({"num_trainers": 2}, 1),
    "two ranks, zero 3": ({"num_trainers": 2, "zero": 3}, 90),
    "two ranks, frozen": ({"num_trainers": 2, "freeze_vision": True}, 1),
    "checkpointing": ({"activation_checkpointing": True}, 90),
}


def rank_process(rank: int, path: str, out: str, port) -> None:
    for name, (layout, tokens) in LAYOUTS.items():
        args = Args(lr=0.0, temperature=0.9, correction_cap=2.0, max_grad_norm=1e9)
        args.parallel = ParallelFlags(**layout, micro_batch_tokens=tokens, packing="off")
        args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
        if rank >= args.parallel.num_trainers:
            continue
        trainer = Trainer(args, path, rank, False)
        if rank == 0:
            store = open_store("127.0.0.1", 60)
            if args.parallel.num_trainers > 1:
                port.put(store.port)
        trainer.setup(
            "127.0.0.1", store.port if rank == 0 else port.get(timeout=120), "float32", num_workers=0
        )
        shares = make_minibatches(sighted_rows(path), args, step=0)
        reported = trainer.train_step(shares[rank], None)
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): None
            if p.grad is None
            else getattr(p.grad, "full_tensor", lambda: p.grad)().clone()
            for name, p in trainer.model.named_parameters()
        }
        torch.save((reported, gradients), f"{out}/{name}.{rank}")
        torch.distributed.destroy_process_group()


def oracle_gradients(path: str) -> dict[str, torch.Tensor]:
    """Row by row, by Hugging Face's model: on-policy the surrogate's gradient is that of w A log pi."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    rows = [row for rollout in sighted_rows(path) for row in rollout]
    for row in rows:
        names = row["images"][0] if row["images"] else {}
        images = {
            name: torch.tensor(np.concatenate([i[name] for i in row["images"]]))[None] for name in names
        }
        ids = torch.tensor(row["token_ids"]).long()[None]
        logits = model(input_ids=ids, **images).logits[0, :-1] / 0.9
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][-4:]
        weights = (logprobs.detach() + 4.6).exp().clamp(max=2.0)
        (-(weights * row["advantage"] * logprobs).sum() / (4 * len(rows))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_the_same_on_one_rank_and_two_however_images_and_text_are_batched(path, tmp_path):
    on_two_ranks(rank_process, path, str(tmp_path), num_ports=1)
    wanted = oracle_gradients(path)
    assert sum("vision_model" in name and bool(grad.abs().max() > 0) for name, grad in wanted.items()) > 20
    for name, (layout, _) in LAYOUTS.items():
        for rank in range(layout.get("num_trainers", 1)):
            _, gradients = torch.load(f"{tmp_path}/{name}.{rank}", weights_only=False)
            assert gradients.keys() == wanted.keys()
            for parameter, gradient in gradients.items():
                if layout.get("freeze_vision") and "vision_model" in parameter:
                    assert gradient is None, f"{name}: {parameter} is frozen"
                    continue
                error = (gradient - wanted[parameter]).abs().max()
                assert error <= 1e-6 + 1e-4 * wanted[parameter].abs().max(), f"{name}: {parameter}, {error}"


def test_a_model_of_patches_and_grids_takes_the_images_of_several_rows_as_those_of_each_alone():
    """Qwen3-VL's trainer half; its processor, and with it vLLM, wants torchvision, so ids are laid out by hand."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    layers = dict(hidden_size=64, intermediate_size=128)
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
    text = dict(
        vocab_size=120, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32
    )
    tower = dict(depth=2, num_heads=2, patch_size=8, out_hidden_size=64, num_position_embeddings=64)
    config = Qwen3VLConfig(
        text_config=text | layers | dict(rope_parameters=rope, initializer_range=0.2),
        vision_config=tower | layers | dict(deepstack_visual_indexes=[0], initializer_range=0.2),
        image_token_id=110, video_token_id=111, vision_start_token_id=112, vision_end_token_id=113,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    size = dict(shortest_edge=16 * 16, longest_edge=64 * 64)
    arrays_of = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)
    rows, wanted = [], []
    for shown, words in (([WIDE, SQUARE], 3), ([SQUARE], 9), ([], 5)):
        images, ids = [dict(arrays_of(image, return_tensors="np")) for image in shown], [7]
        for image in images:
            ids += [112, *[110] * (int(image["image_grid_thw"].prod()) // 4), 113]
        ids += range(20, 20 + words)
        rows.append({"token_ids": np.array(ids), "images": images})
        whole = dict(arrays_of(shown, return_tensors="pt")) if shown else {}
        ids = torch.tensor([ids])
        if shown:
            whole["mm_token_type_ids"] = (ids == 110).int()
        with torch.no_grad():
            logprobs = model(input_ids=ids, **whole).logits.log_softmax(-1)
        wanted.append(logprobs[0, :-1].gather(1, ids[0, 1:, None])[:, 0])
    batch, head = to_device(collate(rows), torch.device("cpu")), LogprobHead(model)
    assert [len(row["images"]) for row in rows] == [2, 1, 0] and len(batch["images"]["image_grid_thw"]) == 3
    with torch.no_grad():
        got = head(model, batch["token_ids"][:, :-1], batch["token_ids"][:, 1:], 1.0, images=batch["images"])[
            0
        ]
    for row, each in enumerate(wanted):
        assert (got[row, : len(each)] - each).abs().max() <= 1e-4 * each.abs().max()


# --- Where images come from


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def test_jsonl_has_images_by_path_and_by_url_before_a_text_or_where_messages_want_them(tmp_path):
    (tmp_path / "a.png").write_bytes(png(WIDE))
    url = "data:image/png;base64," + base64.b64encode(png(SQUARE)).decode()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}, {"type": "image"}]}
    ]
    records = [
        {"prompt": "how many?", "answer": "3", "images": ["a.png"]},
        {"prompt": messages, "answer": "5", "images": [url, "a.png"]},
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(record | {"split": "train"}) + "\n" for record in records)
    )
    env = Jsonl(tmp_path / "a.jsonl")
    first, second = env.tasks("train")
    ((message,), (other,)) = env.reset(first), env.reset(second)
    assert message["content"][1] == {"type": "text", "text": "how many?"}
    for part, image in (
        (message["content"][0], WIDE),
        (other["content"][1], SQUARE),
        (other["content"][2], WIDE),
    ):
        data = base64.b64decode(part["image"].partition(",")[2])
        assert np.array_equal(np.array(Image.open(io.BytesIO(data))), np.array(image))
    assert (
        other["content"][0] == {"type": "text", "text": "x"}
        and "image" not in second["prompt"][0]["content"][1]
    )
    (tmp_path / "b.jsonl").write_text(json.dumps(records[1] | {"images": [url]}))
    with pytest.raises(
        ValueError, match='line 1: 1 `images` for 2 parts {"type": "image"} in `prompt`; give as many'
    ):
        Jsonl(tmp_path / "b.jsonl").tasks("train")


def test_pictures_show_what_the_task_says_and_only_the_index_decides_the_rest():
    tasks = {split: Shapes().tasks(split) for split in ("train", "eval")}
    assert not {task["index"] for task in tasks["train"]} & {task["index"] for task in tasks["eval"]}
    assert [sum(task["number"] == n for task in tasks["eval"]) for n in (1, 2, 3, 4)] == [32] * 4
    for task in tasks["eval"][:40]:
        pixels = np.array(draw(task["number"], task["index"])).astype(int)
        assert np.array_equal(pixels, np.array(draw(task["number"], task["index"])))
        bright = (np.abs(pixels - pixels[0, 0]).sum(-1) > 0).sum()
        assert bright == task["number"] * 36


def test_layouts_that_images_do_not_have_are_refused(path):
    def check(model, **flags):
        checks.check_layout(model, ParallelFlags(**flags))

    with pytest.raises(FlagError, match="--packing on: .* takes images; use --packing off"):
        check(path, packing="on")
    with pytest.raises(FlagError, match="--trainer-tp 2: a vision tower is not split; use 1"):
        check(path, num_trainers=2, trainer_tp=2)
    with pytest.raises(FlagError, match="--freeze-vision: tiny has no vision tower"):
        check("tiny", freeze_vision=True)
    check(path, freeze_vision=True)
    args = Args(model="tiny", env="shapes")
    with pytest.raises(
        FlagError, match="--model tiny: it cannot take a prompt of --env shapes.*: the model takes no images"
    ):
        checks.check_tasks(args.model, args.env, None, args.data, args.engine, 4)


# --- A real engine


def prompts_of(path: str) -> list[tuple]:
    """(ids, pictures) of prompts with two images, with one of either size, two of which have the same ids, and
    with none."""
    contents = [[WIDE, TEXT, SQUARE], [SQUARE, TEXT], [draw(4, 4), TEXT], [WIDE], [TEXT]]
    contents += [[draw(1 + i % 4, i), {"type": "text", "text": str(i)}] for i in range(12)]
    return [read_prompt(load_tokenizer(path), [user(*content)], None, {})[2:] for content in contents]


@torch.no_grad()
def trainers_logprobs(model, head, ids: list[int], pictures: list, answer: list[int]) -> np.ndarray:
    segment_images = [{"token_ids": np.array(ids + answer), "images": [p.pixels for p in pictures]}]
    images = {name: torch.tensor(value) for name, value in collate(segment_images)["images"].items()}
    ids_BT = torch.tensor([ids + answer])
    return head(model, ids_BT[:, :-1], ids_BT[:, 1:], 1.0, images=images)[0][0, len(ids) - 1 :].numpy()


def test_trainer_and_engine_agree_on_images_before_and_after_refits_and_in_the_middle_of_answers(path):
    async def run():
        link = Link(path, max_model_len=400)
        await link.join(path)
        await link.refit(0)
        head = LogprobHead(link.model)
        held = {0: {name: p.clone() for name, p in link.model.state_dict().items()}}
        prompts, differences, blind, crossed = prompts_of(path), [], [], 0
        token = link.engine.image_token

        async def generate(prompt: tuple, n: int, max_tokens: int) -> list:
            ids, pictures = prompt
            return await link.engine.generate(ids, n, 1.0, max_tokens, 0, pictures)

        async def refit(version: int) -> None:
            link.perturb(seed=version)
            held[version] = {name: p.clone() for name, p in link.model.state_dict().items()}
            await link.refit(version)

        def logprobs_under(weights: dict, asked: tuple, answer: list[int]) -> np.ndarray:
            link.model.load_state_dict(weights)
            return trainers_logprobs(link.model, head, *asked, answer)

        for version in (0, 1, 2):
            short = [asyncio.create_task(generate(prompt, n=2, max_tokens=8)) for prompt in prompts]
            long = [asyncio.create_task(generate(prompt, n=2, max_tokens=60)) for prompt in prompts]
            groups = await asyncio.gather(*short)
            if version < 2:
                await refit(version + 1)  # the long ones go on
            groups += await asyncio.gather(*long)
            for prompt, group in zip([*prompts, *prompts], groups, strict=True):
                for each in group:
                    if token in each.token_ids:
                        continue  # the rollout would be invalid
                    crossed += len(set(each.versions.tolist())) > 1
                    for v in set(each.versions.tolist()):
                        there, answer = each.versions == v, each.token_ids
                        own = logprobs_under(held[v], prompt, answer)
                        differences += np.abs(own - np.array(each.logprobs))[there].tolist()
                        if prompt[1] and v:  # what a tower of the version before would have given
                            language = {name: w for name, w in held[v].items() if "vision" not in name}
                            stale = logprobs_under(held[v - 1] | language, prompt, answer)
                            blind += np.abs(stale - own)[there].tolist()
            link.model.load_state_dict(held[min(version + 1, 2)])
        link.engine.llm.shutdown()
        print(f"{len(differences)} tokens, mean {np.mean(differences):.2g}, max {max(differences):.2g}; "
              f"with the tower of before {np.mean(blind):.2g}; {crossed} answers crossed a refit")  # fmt: skip
        assert len(differences) > 900 and np.mean(differences) <= 1e-6 and max(differences) <= 1e-4
        assert np.mean(blind) > 1e-3, "a stale cache of the tower's would show"
        assert crossed >= 2

    asyncio.run(run())


def test_an_engine_that_expands_images_otherwise_is_an_error(path):
    async def run():
        engine = await start_engine(path, max_model_len=400)
        ids, pictures = prompts_of(path)[0]
        pictures[0].ids.append(pictures[0].ids[-1])  # as a processor of another version might
        longer = [
            *ids[: ids.index(pictures[0].ids[0])],
            *pictures[0].ids,
            *ids[ids.index(pictures[0].ids[0]) + len(pictures[0].ids) - 1 :],
        ]
        try:
            with pytest.raises(ValueError, match="expands this model's images in its own way"):
                await engine.generate(longer, 1, 1.0, 4, 0, pictures)
        finally:
            pictures[0].ids.pop()
            engine.llm.shutdown()

    asyncio.run(run())


def test_a_run_trains_on_images_out_of_a_file_and_its_checkpoint_is_a_model_with_a_processor(tmp_path):
    path, lines = resolve_model("tiny-vlm"), []
    for index in range(40):
        image = draw(1 + index % 4, index)
        (tmp_path / f"{index}.png").write_bytes(png(image))
        lines.append({"prompt": "?", "answer": str(1 + index % 4), "images": [f"{index}.png"]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = f"--model tiny-vlm --env jsonl:{tmp_path}/a.jsonl --lr 1e-3 --max-steps 2 --prompts-per-step 4 --group-size 4"
    flags += f" --max-staleness 0 --max-new-tokens 4 --output-dir {tmp_path}/run --dump-rollouts {tmp_path}/rollouts"
    run = subprocess.run(
        [sys.executable, "-m", "algos.grpo", *flags.split()], capture_output=True, text=True, timeout=400,
        cwd=Path(__file__).parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and max(row["mismatch/abs_mean"] for row in rows) <= 1e-5
    rollouts = [
        r for step in (0, 1) for r in read_rollouts(str(tmp_path / "rollouts"), step) if not r.invalid
    ]
    assert rollouts and all(len(segment.images) == 1 for r in rollouts for segment in r.segments)
    trained = str(tmp_path / "run/checkpoints/step_2")
    _, _, ids, pictures = read_prompt(load_tokenizer(trained), [user(WIDE, TEXT)], None, {})
    assert ids == read_prompt(load_tokenizer(path), [user(WIDE, TEXT)], None, {})[2] and len(pictures) == 1
    moved = AutoModelForImageTextToText.from_pretrained(trained, dtype=torch.float32).state_dict()
    began = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).state_dict()
    assert moved.keys() == began.keys()
    assert not any(torch.equal(moved[name], began[name]) for name in moved if name.endswith("q_proj.weight"))

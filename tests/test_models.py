"""The built-in models: tokenizer, parameter names, the start of `tiny`, and what `--model` takes."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import models
from common.envs.reverse import Reverse

TOKENIZER = models.char_tokenizer()
TEXT = st.text(alphabet=[*map(chr, range(32, 127)), "\n"], max_size=80)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def weights(directory):
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def greedy_score(path):
    """The share of Reverse's eval tasks that plain `generate` answers exactly."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    tasks = Reverse().tasks("eval")
    chats = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompts, max_new_tokens=8, do_sample=False)
    answers = output[:, prompts["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    texts = [tokenizer.decode(ids[: ids.index(end)]) if end in ids else "" for ids in answers]
    return sum(text == task["answer"] for text, task in zip(texts, tasks)) / len(tasks)


@settings(deadline=None)
@given(TEXT)
def test_any_printable_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(encode(text)) == text


def test_role_names_special_tokens_and_foreign_characters_are_one_token_each():
    assert len(encode("<|im_start|>assistant\n12<|im_end|>")) == 6
    ids = encode("a\u00e9\u65e5\tb")
    assert len(ids) == 5
    assert ids[1:4] == [TOKENIZER.unk_token_id] * 3
    assert TOKENIZER.decode([TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]) == "<|im_end|><|endoftext|>"


def test_the_template_is_chatml_for_every_role():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool")]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    assert text == "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_has_the_parameter_names_of_its_kind_and_loads(tmp_path, tied, moe):
    path = models.make_tiny(tmp_path / "model", tied=tied, moe=moe)
    names = set(weights(path))
    assert ("lm_head.weight" in names) == (not tied)
    assert ("model.layers.1.mlp.down_proj.weight" in names) == (not moe)
    assert ("model.layers.1.mlp.gate.weight" in names) == moe
    assert ("model.layers.1.mlp.experts.3.down_proj.weight" in names) == moe
    assert "model.layers.1.self_attn.k_norm.weight" in names
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.vocab_size == len(tokenizer) == len(TOKENIZER)
    assert tokenizer("1 a\n<|im_end|>")["input_ids"] == encode("1 a\n<|im_end|>")
    assert model.config.tie_word_embeddings == tied
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model(torch.tensor([encode("123")])).logits.shape == (1, 3, len(tokenizer))


def test_the_seed_decides_the_weights_and_the_callers_random_state_is_left_alone(tmp_path):
    before = torch.random.get_rng_state()
    first, same, other = (
        weights(models.make_tiny(tmp_path / f"{i}", seed=seed)) for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    half = weights(models.make_tiny(tmp_path / "half", dtype="bfloat16"))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_tiny_is_built_once_alike_each_time_and_starts_between_a_tenth_and_two_fifths(tmp_path, monkeypatch):
    digests = []
    for cache in ("first", "second"):
        monkeypatch.setenv("INSTAR_CACHE", str(tmp_path / cache))
        path = Path(models.resolve_model("tiny"))
        assert path.parent == tmp_path / cache
        written = (path / "model.safetensors").stat().st_mtime_ns
        assert models.resolve_model("tiny") == str(path)
        assert (path / "model.safetensors").stat().st_mtime_ns == written
        digests.append(hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert 0.1 <= greedy_score(path) <= 0.4


def test_the_first_of_two_builds_wins_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path))

    def build(directory):
        (directory / "weights").write_text("late")
        key = Path(models.cached("toy", [greedy_score], lambda d: (d / "weights").write_text("early")))
        assert (key / "weights").read_text() == "early"

    path = Path(models.cached("toy", [greedy_score], build))  # the other process comes in the middle of it
    assert (path / "weights").read_text() == "early"
    assert list(tmp_path.iterdir()) == [path]

    def fail(directory):
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        models.cached("broken", [greedy_score], fail)
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_comes_back_as_it_is_and_a_hub_id_as_the_folder_it_was_fetched_to(tmp_path, monkeypatch):
    assert models.resolve_model(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: f"{tmp_path}/{name}")
    assert models.resolve_model("Qwen/Qwen3-0.6B") == f"{tmp_path}/Qwen/Qwen3-0.6B"


def test_a_hub_id_that_cannot_be_fetched_is_refused():
    with pytest.raises(ValueError, match="--model nobody/nothing: not in the local cache, .*give the folder"):
        models.resolve_model("nobody/nothing")  # the tests are offline


@pytest.mark.parametrize(
    "name", ["tinny", "", "./missing", "/missing", "a/b/c", "~/model", "tests/test_models.py"]
)
def test_any_other_model_is_refused_with_flag_value_and_fix(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(ValueError) as error:
        models.resolve_model(name)
    assert f"--model {name}: use tiny, tiny-moe, tiny-vlm, smollm2, a directory" in str(error.value)


def test_smollm2_without_its_file_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ValueError, match="--model smollm2: no .gguf file under .*; run bash scripts/setup"):
        models.resolve_model("smollm2")


def test_smollm2_is_a_clean_bfloat16_model_that_knows_the_capital_of_france():
    path = models.resolve_model("smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert "lm_head.weight" not in weights(path)  # tied
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id

    def answer(prompt):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        return model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]

    assert "Paris" in tokenizer.decode(answer("The capital of France is"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    reply = answer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == tokenizer.eos_token_id

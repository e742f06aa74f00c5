"""The pure functions of algos/sft.py: which tokens the loss is on, and the loss itself."""

import pytest
import torch

from algos.sft import encode_conversation, sft_loss
from common.models import char_tokenizer


def test_the_mask_of_a_two_turn_chat_is_each_answer_with_its_end_token():
    tokenizer = char_tokenizer()
    messages = [
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "21"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "3\n"},
    ]
    start, end = "<|im_start|>", "<|im_end|>"
    by_hand = [  # (token, mask); a role name is one token
        *[(token, 0) for token in (start, "user", "\n", "1", "2", end, "\n")],
        *[(token, 0) for token in (start, "assistant", "\n")],
        *[(token, 1) for token in ("2", "1", end)],
        ("\n", 0),
        *[(token, 0) for token in (start, "user", "\n", "3", end, "\n")],
        *[(token, 0) for token in (start, "assistant", "\n")],
        *[(token, 1) for token in ("3", "\n", end)],  # a line break of the answer itself is learned
        ("\n", 0),
    ]
    ids, mask = encode_conversation(tokenizer, messages)
    assert tokenizer.convert_ids_to_tokens(ids) == [token for token, _ in by_hand]
    assert mask == [learned for _, learned in by_hand]


def test_the_context_before_an_answer_is_the_prompt_of_a_rollout():
    tokenizer = char_tokenizer()
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    ids, mask = encode_conversation(tokenizer, [*question, {"role": "assistant", "content": "2"}])
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert mask.index(1) == len(prompt)


def test_turns_after_the_last_answer_and_chats_without_one_carry_no_loss():
    tokenizer = char_tokenizer()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, mask = encode_conversation(tokenizer, chat)
    longer_ids, longer_mask = encode_conversation(tokenizer, [*chat, {"role": "tool", "content": "c"}])
    assert longer_ids[: len(ids)] == ids
    assert longer_mask == mask + [0] * (len(longer_ids) - len(ids))
    assert sum(encode_conversation(tokenizer, chat[:1])[1]) == 0


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (  # earlier answers are dropped, as some templates drop earlier thoughts
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.content if loop.last or m.role != 'assistant' else '' }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert sum(encode_conversation(tokenizer, turn)[1]) == 2
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        encode_conversation(tokenizer, turn * 2)


def test_a_chat_that_begins_with_an_answer_is_refused():
    with pytest.raises(ValueError, match="nothing to answer"):
        encode_conversation(char_tokenizer(), [{"role": "assistant", "content": "a"}])


def test_the_gradient_of_the_loss_is_softmax_minus_one_hot_on_masked_tokens_alone():
    generator = torch.Generator().manual_seed(0)
    logits_BSV = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets_BS = torch.randint(5, (2, 3), generator=generator)
    mask_BS = torch.tensor([[0, 1, 1], [1, 0, 0]])
    logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, targets_BS[..., None]).squeeze(-1)
    loss = sft_loss(logprobs_BS, mask_BS)
    loss.backward()

    by_hand, gradient = 0.0, torch.zeros(2, 3, 5, dtype=torch.float64)
    for b, s in ((0, 1), (0, 2), (1, 0)):
        probs = logits_BSV[b, s].detach().exp() / logits_BSV[b, s].detach().exp().sum()
        by_hand -= probs[targets_BS[b, s]].log().item()
        gradient[b, s] = probs
        gradient[b, s, targets_BS[b, s]] -= 1
    assert loss.item() == pytest.approx(by_hand)
    torch.testing.assert_close(logits_BSV.grad, gradient)


def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient():
    logprobs_BS = torch.tensor([[-1.0, float("nan"), -3.0, float("-inf")]], requires_grad=True)
    loss = sft_loss(logprobs_BS, torch.tensor([[1, 0, 1, 0]]))
    loss.backward()
    assert loss.item() == 4.0
    assert logprobs_BS.grad.tolist() == [[-1.0, 0.0, -1.0, 0.0]]

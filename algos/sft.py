"""SFT: supervised fine-tuning on chat conversations, with the loss on the assistant's turns alone."""

import torch


def encode_conversation(tokenizer, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Token ids of a chat and its loss mask, both of length T.

    The mask is 1 exactly on what the model has to say: each assistant turn with the token that ends it, not
    the line break that some templates put after that. Turns are tokenised one by one, as in a rollout, where
    the prompt ends before the answer begins. Raises ValueError where the template cannot be cut into turns.
    """

    def render(turns: list[dict], add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    prefixes = []  # the text up to the end of each piece, and whether the loss is on that piece
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if i == 0:
                raise ValueError(
                    "a conversation cannot begin with an assistant turn: there is nothing to answer"
                )
            prefixes += [
                (render(messages[:i], add_generation_prompt=True), 0),
                (render(messages[: i + 1]), 1),
            ]
    prefixes.append((render(messages), 0))

    ids, mask, done = [], [], ""
    for text, learned in prefixes:
        if not text.startswith(done):
            raise ValueError(
                f"the chat template rewrites earlier turns: {done!r} is not the beginning of {text!r}. Use "
                "conversations of one assistant turn, or a template that leaves earlier turns as they were"
            )
        piece = tokenizer(text[len(done) :], add_special_tokens=False)["input_ids"]
        end = len(piece)
        # Whitespace after the token that ends the turn belongs to the template.
        while end and not tokenizer.decode([piece[end - 1]]).strip():
            end -= 1
        ids += piece
        mask += [learned] * end + [0] * (len(piece) - end)
        done = text
    return ids, mask


def sft_loss(logprobs_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    """Minus the sum of the log-probs (nats) of the masked tokens, a scalar.

    The caller divides by the number of masked tokens of the whole optimizer step. Values outside the mask,
    NaN too, reach neither the loss nor the gradient.
    """
    return -torch.where(mask_BS.bool(), logprobs_BS, 0.0).sum()

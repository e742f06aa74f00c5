"""The boundary between messages and tokens: what a conversation is as ids. Sampled ids stay as they are."""

from common.envs.pool import EnvError


def render(tokenizer, messages: list[dict], template_args: dict) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **template_args
    )


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def as_messages(prompt: str | list[dict], system_prompt: str | None) -> list[dict]:
    """A prompt as chat messages, after the system prompt unless it brings its own. Raises EnvError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    fits = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    if not fits or not all({"role", "content"} <= m.keys() for m in messages):
        raise EnvError("env_error", f"reset() returned {prompt!r:.80}, not a string or chat messages")
    if system_prompt and messages[0].get("role") != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def next_context(
    tokenizer, rendered: str, action: str, sampled_end: str, full: str
) -> tuple[list[int], bool]:
    """The ids between a turn that was sampled and the next one: the template's delta, or everything after a
    fork.

    `rendered` is the conversation up to the turn, `full` the one up to the next turn, both as the template
    has them. `sampled_end` is the end-of-turn token if the policy sampled it: it is not repeated. One that it
    did not sample is context. Returns (ids, forked): forked where the template rewrote history.
    """
    if not full.startswith(rendered + action):
        return encode(tokenizer, full), True
    delta = full[len(rendered + action) :]
    return encode(tokenizer, delta.removeprefix(sampled_end)), False

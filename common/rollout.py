"""The vLLM engine and the one multi-turn token loop: ids in, ids + log-probs + versions out."""

import asyncio
import os
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from common.agent import check_ids, next_context, play_agent, read_prompt, render
from common.envs.pool import EnvError, EnvPool, is_ids
from common.images import collapse, image_token, pictures_of
from common.sample import RecordError, Rollout, check_reward, extend_segment


@dataclass
class EngineFlags:
    num_engines: Annotated[int, Ge(1)] = 1
    """vLLM engines, each with its own rollout worker; on GPUs each takes --engine-tp GPUs.
    Raise it when time/trainer_wait is most of time/step."""
    engine_tp: Annotated[int, Ge(1)] = 1
    """Workers over which vLLM splits the model of one engine (tensor parallelism), each on a GPU.
    Raise it when model and KV cache do not fit one."""
    engine_ep: bool = False
    """Of a mixture of experts, each of the --engine-tp workers holds whole experts instead of a part of every
    one (expert parallelism). Give it when the experts are many and small."""
    max_model_len: Annotated[int, Ge(2)] = 512
    """Longest context of an episode in tokens, prompt and all turns together. More costs KV memory.
    Raise it when rollout/truncated_frac is high though answers are short, or for no_room."""
    max_in_flight: Annotated[int, Ge(1)] = 16
    """Prompt groups that one engine works on at a time. Raise it while the engine waits, with
    --max-staleness."""
    kv_cache_gb: Annotated[float | None, Gt(0)] = None
    """KV cache of one engine in GiB. Default: 0.25 on a CPU, on a GPU what --gpu-memory-utilization leaves.
    Raise it for longer contexts or more in flight."""
    gpu_memory_utilization: Annotated[float | None, Gt(0), Le(1)] = None
    """Share of its GPU's memory that an engine may use. Default: 0.8, or 0.4 beside a trainer. Besides, a
    refit between GPUs needs twice the largest weight."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and compute of the engine: float32, bfloat16, or auto (that of the checkpoint)."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the engine rounds the layers' weights and what enters them to 8 bits, at each refit anew. Half the
    memory and faster, but further from the trainer: watch mismatch/abs_mean."""
    speculative_tokens: Annotated[int, Ge(0)] = 0
    """Tokens that --speculative-model guesses, for the model to check in one pass; 0: none. What is sampled,
    and its log-probs, are the model's all the same. Raise it while few answers are in flight and
    rollout/accepted_frac is high."""
    speculative_model: str = "ngram"
    """What guesses. ngram: what followed the last tokens where they stood before. mtp: the model's own heads
    for that. Or a smaller model with the same tokenizer. No refit changes these two: they guess worse in
    time."""
    refit_mode: Literal["keep", "wait", "abort"] = "keep"
    """What a refit does with answers in flight. keep: freezes them, they go on under the new weights. wait:
    lets them end, while the engine runs empty; within --refit-timeout-s. abort: throws them away and samples
    them again from their prompts: that favours short ones, and what outlasts the time between refits never
    ends."""
    record_top_k: Annotated[int, Ge(0)] = 0
    """Likeliest tokens of the engine that are kept, with log-probs, at each sampled one. For
    algos/score_centering.py."""
    router_replay: Literal["on", "off"] = "off"
    """For mixtures of experts: the trainer sends each token to the experts to which the engine sent it (R3).
    Without, the two choose apart, and --correction has to make up for it. Tried on a CPU only so far."""


@dataclass
class Completion:
    """What the engine sampled after a prompt: ids, log-probs (temperature applied) and versions, all [T].
    `top_k` as in `Segment`; `routes` are the experts [tokens, layers, K] of the tokens that it read, the last
    one's not among them."""

    token_ids: list[int]
    logprobs: list[float]
    versions: np.ndarray
    finish_reason: str
    top_k: np.ndarray | None = None
    routes: np.ndarray | None = None


class Engine:
    """vLLM's AsyncLLM with final outputs only. Build it inside a running event loop, then await `start`."""

    chat_server = None  # the task that starts it, once a ChatAgent needs it
    image_token: int | None = None  # the placeholder of a model with a vision tower
    guessed = accepted = 0  # tokens, since the last refit

    def __init__(self, model_path: str, dtype: str, seed: int, flags: EngineFlags, gpus: float, lora_rank=0):
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        os.environ["NUMBA_NUM_THREADS"] = "1"  # ngram's numba would set torch's threads to all cores
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.config import WeightTransferConfig
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        # decode graphs without torch.compile: half the start-up, and decoding is what a rollout does
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        share = flags.gpu_memory_utilization or 0.8 * gpus
        on_gpu = {"gpu_memory_utilization": share, "compilation_config": graphs, "moe_backend": "triton"}
        layers = [f"{name}_proj" for name in "q k v qkv o gate up gate_up down".split()]
        guesser = "method" if flags.speculative_model == "mtp" else "model"
        guess = {guesser: flags.speculative_model, "num_speculative_tokens": flags.speculative_tokens}
        guess |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # of ngram: how many tokens must agree
        lora = {"enable_lora": True, "max_lora_rank": lora_rank, "lora_target_modules": layers}
        fp8 = {"quantization": "fp8_per_channel", "quantization_config": {"ignore": [r"re:.*\.gate$"]}}
        kv_cache_gb = flags.kv_cache_gb or (None if gpus else 0.25)
        arguments = AsyncEngineArgs(
            model=model_path,
            dtype=dtype,
            seed=seed,
            max_model_len=flags.max_model_len,
            logprobs_mode="processed_logprobs",
            max_logprobs=max(20, flags.record_top_k),  # what a ChatAgent may ask for
            generation_config="vllm",  # a checkpoint's own sampling defaults would change the policy
            weight_transfer_config=WeightTransferConfig(backend="instar"),
            worker_extension_cls="common.refit_worker.WorkerExtension",
            scheduler_cls="common.scheduler.FinalLogprobs",
            disable_log_stats=True,
            mm_processor_cache_gb=0,  # its two halves would be cleared at different moments of a refit
            enable_return_routed_experts=flags.router_replay == "on",
            speculative_config=guess if flags.speculative_tokens else None,
            per_request_spec_decode_metrics="summary" if flags.speculative_tokens else "none",
            tensor_parallel_size=flags.engine_tp,
            enable_expert_parallel=flags.engine_ep,
            distributed_executor_backend="mp" if flags.engine_tp > 1 else None,
            kv_cache_memory_bytes=kv_cache_gb and int(kv_cache_gb * 2**30),
            **(on_gpu if gpus else {"enforce_eager": True}),
            **(lora if lora_rank else {}),
            **(fp8 if flags.quantization == "fp8" else {}),
        )
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.make_sampling, self.final_only = SamplingParams, RequestOutputKind.FINAL_ONLY
        self.flags, self.max_model_len = flags, flags.max_model_len
        self.requests, self.sampled_tokens, self.image_token = 0, 0, image_token(model_path)
        # of every request; nothing is read from the path
        self.adapter = {"lora_request": LoRARequest("policy", 1, "sent by refits")} if lora_rank else {}

    async def start(self, stop_token_ids: list[int]) -> None:
        """Labels the weights and runs a first forward, so that nothing that is timed later pays for it."""
        self.stop_token_ids = stop_token_ids
        await self.llm.update_weight_version("0")
        if self.adapter:
            await self.llm.collective_rpc("make_adapter")
        await self.generate([stop_token_ids[0]] * 4, n=2, temperature=1.0, max_tokens=4)
        self.sampled_tokens = 0

    async def generate(self, prompt_ids, n: int, temperature: float, max_tokens: int, known=0, pictures=()):
        """`n` completions of one prompt, without the routes of its first `known` tokens. `pictures` are those
        of which it has the ids. Every sampling field is sent: vLLM would fill what is missing by itself."""
        completions: list[Completion] = []
        while len(completions) < n:  # once, unless a refit aborts some
            sampling = self.make_sampling(
                n=n - len(completions), temperature=temperature, max_tokens=max_tokens,
                stop_token_ids=self.stop_token_ids, top_p=1.0, top_k=0, min_p=0.0,
                repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
                logprobs=self.flags.record_top_k, flat_logprobs=True, detokenize=False,
                output_kind=self.final_only, routed_experts_prompt_start=known,
            )  # fmt: skip
            final = await self._ask(prompt_ids, sampling, pictures)
            whole = [output for output in final.outputs if output.finish_reason != "abort"]
            completions += [read_completion(output, self.flags.record_top_k) for output in whole]
        self.sampled_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of token_ids[1:] under the weights held now, temperature 1."""
        sampling = self.make_sampling(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        final = await self._ask(token_ids, sampling)
        return [position[token].logprob for position, token in zip(final.prompt_logprobs[1:], token_ids[1:])]

    async def _ask(self, prompt_ids: list[int], sampling, pictures=()):
        self.requests += 1
        prompt = {"prompt_token_ids": prompt_ids}
        if pictures:  # vLLM expands placeholders by itself
            prompt = {"prompt_token_ids": collapse(prompt_ids, pictures, self.image_token)}
            prompt["multi_modal_data"] = {"image": [picture.image for picture in pictures]}
        async for final in self.llm.generate(prompt, sampling, f"r{self.requests}", **self.adapter):
            pass
        if any(output.finish_reason == "error" for output in final.outputs):  # else an answer without tokens
            raise RuntimeError("vLLM ended a request with an error; the engine's log says why")
        guesses = [output.spec_decode_metrics for output in final.outputs if output.spec_decode_metrics]
        self.guessed += sum(each.num_draft_tokens for each in guesses)
        self.accepted += sum(n * steps for each in guesses for n, steps in enumerate(each.histogram))
        if pictures and list(final.prompt_token_ids) != list(prompt_ids):
            sizes = f"{len(final.prompt_token_ids)} prompt tokens, {len(prompt_ids)} by its processor"
            raise ValueError(f"vLLM expands this model's images in its own way: {sizes}")
        return final

    # Weights: the algorithm's file calls these in order.

    async def connect(
        self, host: str, port: int, index: int, num_trainers: int, start_timeout_s: float, timeout_s: float
    ) -> None:
        """Engine `index` meets the trainer and the other engines at the store there. `timeout_s` is that of a
        transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        workers = self.flags.engine_tp
        info = {"host": host, "port": port, "start_timeout_s": start_timeout_s, "timeout_s": timeout_s}
        info |= {"num_trainers": num_trainers, "num_workers": self.flags.num_engines * workers}
        info |= {"first_worker": index * workers}
        await self._alive(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def _alive(self, call):
        """The result of a control call. vLLM would wait for it for ever if the engine's process dies."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if self.llm.errored:
                raise self.llm.dead_error
        return task.result()

    async def pause(self) -> None:
        """Deals with what is in flight as --refit-mode says, and clears every cache: KV is computed again
        under the new weights.

        `AsyncLLM.pause_generation` is the same two calls and a fixed sleep of 20 ms.
        """
        await self.llm.renderer.clear_mm_cache_async()
        pausing = self.llm.engine_core.pause_scheduler_async(mode=self.flags.refit_mode, clear_cache=True)
        await self._alive(pausing)

    async def receive_weights(self, version: int) -> dict:
        """The weights of `version`, checked, and the label that the tokens sampled from now on will carry."""
        reports = await self._alive(self.llm.collective_rpc("refit", args=(version,)))
        await self._alive(self.llm.update_weight_version(str(version)))
        accepted = {"rollout/accepted_frac": self.accepted / self.guessed} if self.guessed else {}
        self.guessed = self.accepted = 0
        return reports[0] | accepted

    async def resume(self) -> None:
        await self._alive(self.llm.resume_generation())


def read_completion(output, top_k: int = 0) -> Completion:
    """One vLLM CompletionOutput, checked: a log-prob for each sampled id, a version for each. Its log-probs
    hold 1 + `top_k` entries a position, the first of which is the sampled token."""
    token_ids, flat, width = list(output.token_ids), output.logprobs, 1 + top_k
    ids, values = (flat.token_ids, flat.logprobs) if flat is not None else ([], [])
    own = zip_longest(token_ids, ids[::width], values[::width])
    logprobs = [value if i == j else None for i, j, value in own]
    top = np.array([ids, values], np.float32).T.reshape(-1, width, 2)[:, 1:] if top_k else None
    versions = np.full(len(token_ids), -1, np.int32)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = int(span.version)
    return Completion(token_ids, logprobs, versions, output.finish_reason, top, output.routed_experts)


# --- Episodes


async def play(
    engine, tokenizer, messages: list[dict], rendered: str, prompt_ids: list[int], pictures: list, step,
    first: Completion | None, *, rollout: Rollout, max_turns: int, temperature: float, max_new_tokens: int,
    template_args: dict,
) -> None:  # fmt: skip
    """Plays one episode to its end and fills `rollout`. `messages`, `rendered`, `prompt_ids` and `pictures`
    are the prompt (`read_prompt`); `step` is the environment's; `first` is the first turn if it is sampled
    already. What does not fit is never sampled after: no image is cut.

    What the environment does wrong, or a broken record, makes the rollout invalid, with the reason; what the
    engine does is raised.
    """
    segment, context = None, prompt_ids
    for turn in range(max_turns):
        ids = [*(segment.token_ids.tolist() if segment else []), *context]
        room = min(max_new_tokens, engine.max_model_len - len(ids))
        if room < 1:  # the context is full
            played = [*rollout.segments, segment] if segment else rollout.segments
            if played:
                played[-1].finish_reason = "length"
            else:
                rollout.fail("no_room", f"a prompt of {len(ids)} tokens; raise --max-model-len")
            break
        known = max(len(ids) - len(context) - 1, 0)  # tokens that the engine has read before
        asked = (ids, 1, temperature, room, known, pictures)
        (completion,) = [first] if turn == 0 and first else await engine.generate(*asked)
        try:
            segment = extend_segment(segment, context, **vars(completion), pictures=pictures)
        except RecordError as error:
            rollout.fail("bad_record", f"{rollout.rollout_id}: {error}")
            return
        held = sum(picture.ids.count(engine.image_token) for picture in pictures)
        if engine.image_token and (segment.token_ids == engine.image_token).sum() != held:
            rollout.fail("image_token", "an image's placeholder without an image: sampled, or in a text")
            return
        stopped = completion.finish_reason == "stop"
        action = tokenizer.decode(completion.token_ids[:-1] if stopped else completion.token_ids)
        try:
            outcome = await step(action, completion.token_ids)
            rollout.rewards.append(check_reward(outcome.reward))
            score = rollout.reward if outcome.score is None else check_reward(outcome.score)
            rollout.info |= {**outcome.info, "score": score}
            if in_ids := is_ids(outcome.observation):
                check_ids(tokenizer, outcome.observation)
            new = pictures_of(tokenizer, outcome.observation)
        except RecordError as error:
            rollout.fail("bad_reward", str(error))
        except EnvError as error:
            rollout.fail(error.reason, str(error))
        if rollout.invalid:
            break
        limit = outcome.truncated or turn == max_turns - 1 and outcome.observation is not None
        if limit and not outcome.terminated:
            segment.finish_reason = "length"
        if limit or outcome.terminated or outcome.observation is None:
            break
        if in_ids:  # the environment's own template
            context = outcome.observation
            continue
        said = {"role": "assistant", "content": action}
        messages = [*messages, said, {"role": "user", "content": outcome.observation}]
        full = render(tokenizer, messages, template_args)
        sampled_end = tokenizer.decode(completion.token_ids[-1:]) if stopped else ""
        context, forked = next_context(tokenizer, rendered, action, sampled_end, full, pictures, new)
        rendered, pictures = full, [*pictures, *new]
        if forked:
            rollout.segments.append(segment)
            segment = None
    rollout.segments += [segment] if segment else []


async def rollout_group(
    engine: Engine, tokenizer, envs: EnvPool, split: str, index: int, *, ticket: int, group_size: int,
    temperature: float, max_new_tokens: int, timeout_s: float, system_prompt: str | None, template_args: dict,
) -> list[Rollout]:  # fmt: skip
    """`group_size` episodes of task `index` of `split`. A single-turn environment gets all of them from one
    engine request; an episode of several turns has an environment process of its own.

    An episode that is not over after `timeout_s` seconds is invalid with the reason "timeout".
    """
    settings = {"temperature": temperature, "max_new_tokens": max_new_tokens, "template_args": template_args}
    rollouts = [Rollout(f"{ticket}.{g}", f"g{ticket}", ticket, str(index), [], []) for g in range(group_size)]
    over: set[str] = set()

    async def finish(rollout: Rollout, prepared: tuple, step, first: Completion | None) -> None:
        how = settings | {"rollout": rollout, "max_turns": envs.max_turns}
        await play(engine, tokenizer, *prepared, step, first, **how)
        over.add(rollout.rollout_id)

    async def single_turn() -> None:
        prompt = await envs.reset(split, index)
        prepared = read_prompt(tokenizer, prompt, system_prompt, template_args)
        room = min(max_new_tokens, engine.max_model_len - len(prepared[2]))
        first = [None] * group_size
        if room > 0:
            first = await engine.generate(prepared[2], group_size, temperature, room, pictures=prepared[3])
        step = envs.grader(split, index)
        await asyncio.gather(*(finish(rollouts[g], prepared, step, first[g]) for g in range(group_size)))

    async def several_turns(rollout: Rollout) -> None:
        async with envs.episode(split, index) as (prompt, step):
            prepared = read_prompt(tokenizer, prompt, system_prompt, template_args)
            await finish(rollout, prepared, step, None)

    async def program(rollout: Rollout) -> None:
        how = settings | {"system_prompt": system_prompt}
        await play_agent(engine, tokenizer, envs, split, index, rollout, **how)
        over.add(rollout.rollout_id)

    async def limited(episodes, of: list[Rollout]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await episodes
        except TimeoutError:
            reason, detail = "timeout", f"not over after {timeout_s} s"
        except EnvError as error:
            reason, detail = error.reason, str(error)
        for rollout in of:
            if rollout.rollout_id not in over and not rollout.invalid:
                rollout.fail(reason, detail)

    if envs.max_turns == 1:
        await limited(single_turn(), rollouts)
    else:
        episode = several_turns if envs.max_turns else program
        await asyncio.gather(*(limited(episode(rollout), [rollout]) for rollout in rollouts))
    return rollouts


def transcript(rollout: Rollout, tokenizer, advantage: float | None) -> dict:
    """A rollout as text and numbers, for samples.jsonl."""
    segments = rollout.segments
    actions = [int((segment.versions >= 0).argmax()) for segment in segments]  # the first sampled token
    versions = [v for segment in segments for v in segment.versions.tolist() if v >= 0]
    names = ("ticket", "rollout_id", "reward", "rewards", "turn_tokens", "invalid", "info")
    record = {name: getattr(rollout, name) for name in names}
    return record | {
        "prompt": tokenizer.decode(segments[0].token_ids[: actions[0]]) if segments else "",
        "transcript": "\n---\n".join(tokenizer.decode(s.token_ids[a:]) for s, a in zip(segments, actions)),
        "advantage": advantage,
        "versions": [min(versions), max(versions)] if versions else None,
        "num_actions": rollout.num_sampled,
    }

"""Refusals at parse time. Each check is a pure function of explicit values and raises `FlagError`.

A message names the flag, the value it got and what to do instead. `main` calls the checks before anything
starts, and `run` shows a FlagError without a traceback: a mistake on the command line costs one line.
"""

import importlib.util
import json
import operator
import os
import signal
import sys
from dataclasses import astuple, is_dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn, get_type_hints

import torch
import tyro
from annotated_types import Ge, Gt, Le, Lt

from common.agent import ChatAgent, as_messages, read_prompt
from common.env import EnvFlags
from common.envs import load_env
from common.envs.pool import EnvError, Server
from common.models import load_config, load_tokenizer, resolve_dtype, resolve_model, sees


BOUNDS = {Ge: (operator.ge, "at least"), Gt: (operator.gt, "above")}
BOUNDS |= {Le: (operator.le, "at most"), Lt: (operator.lt, "below")}


class FlagError(ValueError):
    """A flag, or a combination of flags, that cannot work. The message says which and what to change."""


def refuse(error: Exception) -> NoReturn:
    """Prints `error` as one line on stderr and exits with code 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def parse(args_class, command_line: list[str] | None = None):
    """The command line (default: this program's) as `args_class`. To refuse an unknown flag is the parser's
    part; here is the reason where one is left out on purpose."""
    command_line = sys.argv[1:] if command_line is None else command_line
    flags = {argument.partition("=")[0].replace("_", "-") for argument in command_line}
    for flag in sorted(flags & {"--top-p", "--top-k", "--min-p"}):
        why = "the trainer's log-probs are over all tokens; a truncated sampler makes importance ratios wrong"
        refuse(FlagError(f"{flag}: {why}; leave it out and use --temperature"))
    return tyro.cli(args_class, args=command_line, config=(tyro.conf.HelptextFromCommentsOff,))


def run(main, args) -> None:
    """`main(args)` as a program: a refused flag is one line and exit code 2, a signal 128 and its number.

    An error in the run has been named by the logger already; the process ends with it, so with exit code 1.
    A run that lost a process or missed a deadline starts again, --fault-budget times.
    """
    from common.cluster import RunError, signals  # it imports this module

    lost = None
    while True:
        try:
            return main(args)
        except FlagError as error:
            if lost:  # there was nothing to go on from, or too little is left to run on
                raise lost from error
            refuse(error)
        except (KeyboardInterrupt, RunError) as error:
            if signals or isinstance(error, KeyboardInterrupt):
                sys.exit(128 + (signals or [signal.SIGINT])[0])
            if not args.save.fault_budget:
                raise
            lost = error
            args.save.fault_budget, args.save.resume = args.save.fault_budget - 1, True
            print("starting again from the last checkpoint", flush=True)


def check_ranges(args) -> None:
    """Refuses numbers outside of the bounds with which their field is annotated, and NaN; in groups too."""
    hints = get_type_hints(type(args), include_extras=True)
    for name, value in vars(args).items():
        if is_dataclass(value):
            check_ranges(value)
        for bound in getattr(hints[name], "__metadata__", ()):
            if type(bound) in BOUNDS and value is not None:
                (fits, words), (limit,) = BOUNDS[type(bound)], astuple(bound)
                if not fits(value, limit):
                    raise FlagError(f"--{name.replace('_', '-')} {value}: must be {words} {limit}")


def check_json_object(flag: str, text: str) -> None:
    """Refuses what is not a JSON object."""
    try:
        json.loads(text).items()
    except (ValueError, AttributeError) as error:
        raise FlagError(f"{flag} {text}: not a JSON object; write one like '{{\"key\": true}}'") from error


def check_path(flag: str, path: str, file: str = "") -> None:
    """Refuses a path that does not exist, and a folder without `file`."""
    if not Path(path).exists():
        raise FlagError(f"{flag} {path}: there is no such path; relative paths start in {Path.cwd()}")
    if not Path(path, file).exists():
        raise FlagError(f"{flag} {path}: has no {file}; name the folder that has it")


def check_env(flag: str, spec: str, flags: EnvFlags, engine=None) -> tuple[int, list]:
    """The number of training tasks, and prompts of up to 64 of either split.

    Refuses an environment that cannot be loaded, has no tasks, or has a reset() that raises or gives no
    prompt; and a ChatAgent that these engine flags do not allow.
    """
    try:
        make_env = load_env(spec, flags)
        env = make_env()
        tasks = {split: env.tasks(split) for split in ("train", "eval")}
        empty = [split for split in tasks if not len(tasks[split])]
        some = [(split, index) for split in tasks for index in range(min(64, len(tasks[split])))]
        server = Server(make_env, tasks)
        prompts = [server.reset(*task)["prompt"] for task in some]
        for prompt in prompts:
            as_messages(prompt, None)  # raises where it is none
    except Exception as error:  # the user's file may raise anything
        message = str(error).removeprefix(f"--env {spec}: ")
        raise FlagError(f"{flag} {spec}: {type(error).__name__}: {message}") from error
    if empty:
        raise FlagError(f"{flag} {spec}: tasks('{empty[0]}') is empty; give it at least one task")
    if isinstance(env, ChatAgent):
        check_agent(f"{flag} {spec}", env, engine)
    return len(tasks["train"]), prompts


def check_agent(name: str, agent: ChatAgent, engine) -> None:
    """Refuses what a ChatAgent cannot be played with."""
    if agent.max_turns:
        why = "a ChatAgent is run, not played turn by turn"
        raise FlagError(f"{name}: max_turns is {agent.max_turns}, but {why}; leave max_turns out")
    if engine and engine.refit_mode == "abort":
        why = "a reply that a refit cuts off cannot be sampled again once its agent has seen a part of it"
        raise FlagError(f"--refit-mode abort with the ChatAgent {name}: {why}; use keep or wait")
    if engine and engine.record_top_k:
        why = "the likeliest tokens of an agent's replies are not recorded"
        raise FlagError(f"--record-top-k {engine.record_top_k} with the ChatAgent {name}: {why}; use 0")


def check_group_size(group_size: int) -> None:
    """Refuses groups in which the baseline would be the rollout's own reward."""
    if group_size < 2:
        why = "a group baseline needs at least 2 rollouts of each prompt"
        fix = "use --group-size 2 or more, or algos/flash_reinforce.py, which needs no group"
        raise FlagError(f"--group-size {group_size}: {why}; {fix}")


def correction_cap(correction: str, cap: float | None) -> float:
    """`cap`, or the default of a correction. Refuses one that no rollout could pass.

    1.05: the mean of a stale and short rollout is off by a few percent. 5e-3: FlashREINFORCE's delta.
    """
    cap = {"seq-mask": 1.05, "kl-gate": 5e-3}.get(correction, 2.0) if cap is None else cap
    if correction == "kl-gate" and not cap > 0:
        raise FlagError(f"--correction-cap {cap}: kl-gate's KL must be above 0; use 5e-3 or leave it out")
    if correction not in ("kl-gate", "none") and not cap >= 1:
        raise FlagError(f"--correction-cap {cap}: {correction}'s ratio must be at least 1; use 1 or more")
    return cap


def check_minibatches(prompts_per_step: int, minibatches: int) -> None:
    """Refuses minibatches that would hold different numbers of prompt groups."""
    if minibatches < 1 or prompts_per_step % minibatches:
        divisors = [count for count in range(1, prompts_per_step + 1) if prompts_per_step % count == 0]
        nearest = sorted(sorted(divisors, key=lambda count: abs(count - minibatches))[:2])
        why = f"does not divide --prompts-per-step {prompts_per_step}"
        fix = f"use --minibatches {' or '.join(map(str, nearest))}, or change --prompts-per-step"
        raise FlagError(f"--minibatches {minibatches} {why}; {fix}")


def check_ranks(num_trainers: int, trainer_tp: int, rollouts_per_minibatch: int) -> None:
    """Refuses more trainer ranks than an optimizer step has rollouts: some would have nothing to train. Ranks
    that share a model count as one."""
    if not 1 <= num_trainers // trainer_tp <= rollouts_per_minibatch:
        why = f"an optimizer step has {rollouts_per_minibatch} rollouts (prompts per step x group size / "
        why += "minibatches) and every rank needs at least one"
        fix = f"use --num-trainers 1 to {rollouts_per_minibatch * trainer_tp}, or raise --prompts-per-step"
        raise FlagError(f"--num-trainers {num_trainers}: {why}; {fix}")


def check_parallel(flags) -> None:
    """Refuses splits that do not come out even, and what needs a package that is not there."""
    for flag, size in (("--trainer-tp", flags.trainer_tp), ("--trainer-ep", flags.trainer_ep)):
        if flags.num_trainers % size:
            why = f"does not divide --num-trainers {flags.num_trainers}"
            raise FlagError(f"{flag} {size}: {why}; use a divisor of it")
    if flags.trainer_tp > 1 and flags.trainer_ep > 1:
        raise FlagError("--trainer-tp and --trainer-ep: both above 1 are not supported; use one of them")
    if flags.optimizer == "muon" and importlib.util.find_spec("dion") is None:
        raise FlagError("--optimizer muon: needs the package dion; install it, or use adamw")
    if flags.optimizer == "muon" and flags.offload_optimizer:
        raise FlagError("--optimizer muon --offload-optimizer: offloading is AdamW's; use one of them")


def check_lora(flags, save) -> None:
    """Refuses what adapters are not built for. (`check_layout` refuses models.)"""
    for flag, given, why in (
        (f"--trainer-tp {flags.trainer_tp}", flags.trainer_tp > 1, "adapters are not split; use 1"),
        ("--optimizer muon", flags.optimizer == "muon", "not tried on factors of a matrix; use adamw"),
        ("--compile", flags.compile, "not tried; leave it out"),
        ("--init-from", save.init_from, "engines add adapters to the weights of --model; give it there"),
    ):
        if flags.lora_rank and given:
            raise FlagError(f"{flag} with --lora-rank {flags.lora_rank}: {why}")


def check_engine(model: str, config: dict, engine, lora_rank: int, on_gpus: bool) -> None:
    """Refuses ways to sample that do not go together, or that the model of `config` or the machine has not;
    replaces a draft model by its folder."""
    fp8, guesses, guesser = engine.quantization == "fp8", engine.speculative_tokens, engine.speculative_model
    how = "--quantization fp8" if fp8 else f"--speculative-tokens {guesses}"
    other = lora_rank or engine.router_replay == "on" or "vision_config" in config
    untried = "not tried with --lora-rank, --router-replay on, or images; leave out one of them"
    sparse, has_heads = any(map(config.get, EXPERTS)), any(map(config.get, GUESSING_HEADS))
    dtype = resolve_dtype(resolve_model(model), engine.rollout_dtype, on_gpus)
    spread = sparse and on_gpus and engine.engine_tp > 1
    for flag, wrong, why in (
        (how, (fp8 or guesses) and other, untried),
        (how, fp8 and dtype != "bfloat16", f"it rounds bfloat16, not {dtype}; use --rollout-dtype bfloat16"),
        (how, fp8 and sparse and not on_gpus, "a CPU has no FP8 experts; use none"),
        (how, guesses and guesser == "mtp" and not has_heads, f"{model} has no heads that guess; use ngram"),
        ("--engine-ep", engine.engine_ep and not spread, "needs experts, GPUs and --engine-tp; leave it out"),
    ):
        if wrong:
            raise FlagError(f"{flag}: {why}")
    if guesses and guesser not in ("ngram", "mtp"):
        engine.speculative_model = check_model(guesser, "--speculative-model").name_or_path


GUESSING_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of a mixture of experts
NO_PACKING = {
    ("vision_config",): "takes images",
    EXPERTS: "is a mixture of experts",
    ("text_config", "mamba_d_state", "mamba_d_ssm", "conv_L_cache"): "has layers besides attention",
    ("attn_logit_softcapping",): "caps its attention",
}  # keys of a model's configuration, and what they say of it


AFTER_HEAD = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}  # and no change


def check_layout(model: str, flags, engine=None, flag: str = "--model") -> None:
    """Refuses a model that changes its logits after the head, where log-probs are taken, to spread or replay
    experts that it does not have, and packing where it would mix rows; replaces auto."""
    check_model(model, flag)
    config = load_config(resolve_model(model))
    config = config | (config.get("text_config") or {})
    changes = [key for key, neutral in AFTER_HEAD.items() if config.get(key) not in (None, neutral)]
    if changes:
        why = f"it changes its logits after the head ({changes[0]}), which the trainer would leave out"
        raise FlagError(f"{flag} {model}: {why}; use another model")
    reasons = [why for keys, why in NO_PACKING.items() if any(config.get(key) for key in keys)]
    sparse = "is a mixture of experts" in reasons
    seeing = "takes images" in reasons
    if flags.trainer_ep > 1 and (seeing or not sparse):
        why = f"{model} has no experts" if not sparse else "experts beside a vision tower are not built"
        raise FlagError(f"--trainer-ep {flags.trainer_ep}: {why}; use 1")
    if seeing and flags.trainer_tp > 1 or flags.freeze_vision and not seeing:
        named = f"--trainer-tp {flags.trainer_tp}" if seeing else "--freeze-vision"
        why = "a vision tower is not split; use 1" if seeing else f"{model} has no vision tower"
        raise FlagError(f"{named}: {why}")
    if flags.lora_rank and (sparse or seeing):
        what = "experts" if sparse else "a vision tower"
        raise FlagError(f"--lora-rank {flags.lora_rank}: {model} has {what}, which take no adapters; use 0")
    if set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}:
        reasons.append("has layers besides attention")
    if reasons and flags.packing == "on":
        raise FlagError(f"--packing on: {model} {reasons[0]}; use --packing off")
    on_gpus = torch.cuda.is_available() or bool(os.environ.get("RAY_ADDRESS"))
    if engine and engine.router_replay == "on":
        plugin = entry_points(group="vllm.general_plugins", name="cpu_routes")
        if not sparse or seeing or flags.compile or not (on_gpus or plugin):
            why = "needs a text model with experts, no --compile, and GPUs (see scripts/cpu_routes for a CPU)"
            raise FlagError(f"--router-replay on: {why}; use --router-replay off")
    if engine:
        check_engine(model, config, engine, flags.lora_rank, on_gpus)
    if flags.packing == "auto":
        flags.packing = "on" if on_gpus and not reasons else "off"


def check_gpu_split(num_engines: int, engine_tp: int, num_trainers: int, gpus: int) -> None:
    """Refuses a split that needs more GPUs than there are. Or else each GPU serves a trainer and an engine
    worker."""
    workers, engines = num_engines * engine_tp, f"--num-engines {num_engines}"
    if engine_tp > 1:
        engines += f" x --engine-tp {engine_tp}"
    shared = workers == num_trainers == gpus and (gpus == 1 or not os.environ.get("RAY_ADDRESS"))
    if 0 < gpus < workers + num_trainers and not shared:
        what = f"{engines} and --num-trainers {num_trainers} need {workers + num_trainers} GPUs"
        fix = "lower --num-engines or --num-trainers"
        fix += f", or share them: on one machine {gpus} of each" if gpus > 1 else ""
        raise FlagError(f"{what}, there are {gpus}; {fix}")


def check_context(prompt_tokens: int, max_new_tokens: int, max_model_len: int) -> None:
    """Refuses an answer budget that does not fit behind the longest prompt. All three are in tokens."""
    needed, room = prompt_tokens + max_new_tokens, max_model_len - prompt_tokens
    if needed > max_model_len:
        lower = f"lower --max-new-tokens to {room} or " if room > 0 else ""
        what = f"--max-new-tokens {max_new_tokens} + {prompt_tokens} prompt tokens = {needed}"
        fix = f"{lower}raise --max-model-len to {needed}"
        raise FlagError(f"{what}, more than --max-model-len {max_model_len}; {fix}")


def check_output_dir(path: str, resume: bool) -> None:
    """Refuses to write over another run, and to resume where there is none."""
    holds_run = (Path(path) / "metrics.jsonl").exists()
    if Path(path).exists() and not Path(path).is_dir():
        raise FlagError(f"--output-dir {path}: is a file; use another --output-dir")
    if holds_run and not resume:
        raise FlagError(f"--output-dir {path}: holds a run; use another --output-dir, or --resume to go on")
    if resume and not holds_run:
        raise FlagError(f"--output-dir {path}: holds no run; leave out --resume, or name the run's directory")


def check_shared(model: str, engine, parallel, data, save, debug, log) -> None:
    """Refuses what cannot work in the groups of flags that every algorithm has, and decides --packing."""
    check_json_object("--chat-template-args", data.chat_template_args)
    check_parallel(parallel)
    check_lora(parallel, save)
    check_layout(model, parallel, engine)
    if not os.environ.get("RAY_ADDRESS"):
        gpus = torch.cuda.device_count()
        check_gpu_split(engine.num_engines, engine.engine_tp, parallel.num_trainers, gpus)
    if replayed := debug.replay_rollouts:
        check_path("--replay-rollouts", replayed, "step_000000.jsonl")
        if parallel.num_trainers > 1:
            raise FlagError(f"--replay-rollouts {replayed}: one process; leave out --num-trainers")
    if debug.eval_only and save.resume:
        raise FlagError("--eval-only --resume: give the checkpoint's folder as --model instead")
    check_files(save, log)


def check_replay(folder: str | None, steps: int) -> None:
    """Refuses to replay more steps than were recorded."""
    if folder and not Path(folder, f"step_{steps - 1:06}.jsonl").exists():
        there = len(list(Path(folder).glob("step_*.jsonl")))
        raise FlagError(f"--replay-rollouts {folder}: has {there} of {steps} steps; use --max-steps {there}")


def check_files(save, log) -> None:
    """Refuses a folder of weights, a tracker or an output folder that the run could not use."""
    if save.init_from:
        check_path("--init-from", save.init_from, "config.json")
    for package, project in (("wandb", log.wandb_project), ("trackio", log.trackio_project)):
        if project and importlib.util.find_spec(package) is None:
            raise FlagError(f"--{package}-project {project}: {package} is missing; pip install {package}")
    check_output_dir(log.output_dir, save.resume)


def check_model(model: str, flag: str = "--model"):
    """The tokenizer of a model. Refuses a model that is not there."""
    try:
        if Path(path := resolve_model(model)).is_dir():
            check_path("--model", path, "config.json")
        return load_tokenizer(path)
    except (ValueError, OSError) as error:
        raise FlagError(f"{flag} {model}: {str(error).removeprefix(f'--model {model}: ')}") from error


def teacher_path(teacher: str, model: str, parallel) -> str:
    """The folder of a teacher. Refuses one that is not there, that does not fit the layout, or to which an id
    of the model's may be another token or none. It may have more logits: some models pad them."""
    from transformers import AutoConfig

    check_layout(teacher, alone := replace(parallel, lora_rank=0), flag="--teacher")  # it isn't trained
    parallel.packing = alone.packing
    path, other = resolve_model(teacher), resolve_model(model)
    if sees(path) != sees(other):
        raise FlagError(f"--teacher {teacher}: it and --model {model} must both take images, or neither")
    logits, needed = (AutoConfig.from_pretrained(each).get_text_config().vocab_size for each in (path, other))
    if load_tokenizer(path).get_vocab() != load_tokenizer(other).get_vocab() or logits < needed:
        why = f"to it the ids of --model {model} are other tokens, or none"
        raise FlagError(f"--teacher {teacher}: {why}; use a teacher with the same tokenizer")
    return path


def check_tasks(model: str, env: str, eval_env: str | None, data, engine, max_new_tokens: int) -> int:
    """Refuses environments without tasks, models that are not there, and prompts that leave no room for an
    answer (of the first 64 of each split). Returns the number of training tasks."""
    check_context(1, max_new_tokens, engine.max_model_len)
    num_tasks, prompts = check_env("--env", env, data, engine)
    if eval_env:
        prompts += check_env("--eval-env", eval_env, data, engine)[1]
    tokenizer, template_args = check_model(model), json.loads(data.chat_template_args)
    try:
        read = [read_prompt(tokenizer, prompt, data.system_prompt, template_args) for prompt in prompts]
    except EnvError as error:
        what = "its chat template refuses" if error.__cause__ else "it cannot take"
        what += f" a prompt of --env {env}; change the prompts or the model"
        raise FlagError(f"--model {model}: {what}: {error.__cause__ or error}") from error
    check_context(max(len(ids) for _, _, ids, _ in read), max_new_tokens, engine.max_model_len)
    return num_tasks

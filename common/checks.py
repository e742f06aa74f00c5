"""Refusals at parse time. Each check is a pure function of explicit values and raises `FlagError`.

A message names the flag, the value it got and what to do instead. `main` calls the checks before anything
starts, and `run` shows a FlagError without a traceback: a mistake on the command line costs one line.
"""

import importlib.util
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

import torch
import tyro
from pydantic import TypeAdapter, ValidationError

from common.agent import ChatAgent, as_messages, read_prompt
from common.env import EnvFlags
from common.envs import load_env
from common.envs.pool import EnvError, Server
from common.models import load_tokenizer, resolve_dtype, resolve_model, sees, text_config


class FlagError(ValueError):
    """A flag, or a combination of flags, that cannot work. The message says which and what to change."""


def refuse(error: Exception | str, code: int = 2) -> NoReturn:
    """Prints `error` as one line on stderr and exits with `code`."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


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

    What else ends a run has been named by the logger: that stays the last line, and the exit code is 1. A run
    that lost a process or missed a deadline starts again, --fault-budget times.
    """
    from common.cluster import RunError, signals  # it imports this module

    lost = ""
    while True:
        try:
            return main(args)
        except FlagError as error:  # of a restart: nothing to go on from, or too little is left to run on
            refuse(f"{error}{lost}", 1 if lost else 2)
        except (KeyboardInterrupt, RunError) as error:
            if signals or isinstance(error, KeyboardInterrupt):
                sys.exit(128 + (signals or [signal.SIGINT])[0])
            if not args.save.fault_budget:
                sys.exit(1)
            lost = f" (to start again after: {error})"
            args.save.fault_budget, args.save.resume = args.save.fault_budget - 1, True
            print("starting again from the last checkpoint", flush=True)


def refuse_if(wrong, what: str, why: str) -> None:
    """Raises FlagError where something is wrong: `what`, a flag with its value, and `why`, with the fix."""
    if wrong:
        raise FlagError(f"{what}: {why}")


def check_ranges(args) -> None:
    """Refuses values outside of the bounds with which their field is annotated, and NaN; in groups too."""
    try:
        TypeAdapter(type(args)).validate_python(asdict(args))
    except ValidationError as error:
        first = error.errors()[0]
        flag, why = str(first["loc"][-1]).replace("_", "-"), first["msg"].replace("Input should", "must")
        raise FlagError(f"--{flag} {first['input']}: {why}") from None


def check_json_object(flag: str, text: str) -> None:
    """Refuses what is not a JSON object."""
    try:
        json.loads(text).items()
    except (ValueError, AttributeError) as error:
        raise FlagError(f"{flag} {text}: not a JSON object; write one like '{{\"key\": true}}'") from error


def check_path(flag: str, path: str, file: str = "") -> None:
    """Refuses a path that does not exist, and a folder without `file`."""
    what, nowhere = f"{flag} {path}", f"there is no such path; relative paths start in {Path.cwd()}"
    refuse_if(not Path(path).exists(), what, nowhere)
    refuse_if(not Path(path, file).exists(), what, f"has no {file}; name the folder that has it")


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
    why = "a group baseline needs at least 2 rollouts of each prompt"
    fix = "use --group-size 2 or more, or algos/flash_reinforce.py, which needs no group"
    refuse_if(group_size < 2, f"--group-size {group_size}", f"{why}; {fix}")


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


def check_parallel(flags, init_from: str | None = None) -> None:
    """Refuses splits that do not come out even, what needs a package that is not there, and what adapters are
    not built for. (`check_layout` refuses models.)"""
    tp, ep, muon, lora = flags.trainer_tp, flags.trainer_ep, flags.optimizer == "muon", flags.lora_rank
    uneven = f"does not divide --num-trainers {flags.num_trainers}; use a divisor of it"
    refuse_if(flags.num_trainers % tp, f"--trainer-tp {tp}", uneven)
    refuse_if(flags.num_trainers % ep, f"--trainer-ep {ep}", uneven)
    both = "both above 1 are not supported; use one of them"
    refuse_if(tp > 1 and ep > 1, "--trainer-tp and --trainer-ep", both)
    missing = muon and importlib.util.find_spec("dion") is None
    refuse_if(missing, "--optimizer muon", "needs the package dion; install it, or use adamw")
    offloaded = "--optimizer muon --offload-optimizer"
    refuse_if(muon and flags.offload_optimizer, offloaded, "offloading is AdamW's; use one of them")
    also = f"with --lora-rank {lora}"
    refuse_if(lora and tp > 1, f"--trainer-tp {tp} {also}", "adapters are not split; use 1")
    refuse_if(lora and muon, f"--optimizer muon {also}", "not tried on factors of a matrix; use adamw")
    refuse_if(lora and flags.compile, f"--compile {also}", "not tried; leave it out")
    elsewhere = "engines add adapters to the weights of --model; give it there"
    refuse_if(lora and init_from, f"--init-from {also}", elsewhere)


def check_engine(model: str, config: dict, engine, lora_rank: int, on_gpus: bool) -> None:
    """Refuses ways to sample that do not go together, or that the model of `config` or the machine has not;
    replaces a draft model by its folder."""
    fp8, guesses, guesser = engine.quantization == "fp8", engine.speculative_tokens, engine.speculative_model
    sparse, has_heads = any(map(config.get, EXPERTS)), any(map(config.get, GUESSING_HEADS))
    how = "--quantization fp8" if fp8 else f"--speculative-tokens {guesses}"
    other = lora_rank or engine.router_replay == "on" or "vision_config" in config
    untried = "not tried with --lora-rank, --router-replay on, or images; leave out one of them"
    refuse_if((fp8 or guesses) and other, how, untried)
    dtype = resolve_dtype(resolve_model(model), engine.rollout_dtype, on_gpus)
    rounded = f"it rounds bfloat16, not {dtype}; use --rollout-dtype bfloat16"
    refuse_if(fp8 and dtype != "bfloat16", how, rounded)
    refuse_if(fp8 and sparse and not on_gpus, how, "a CPU has no FP8 experts; use none")
    no_heads = f"{model} has no heads that guess; use ngram"
    refuse_if(guesses and guesser == "mtp" and not has_heads, how, no_heads)
    spread = sparse and on_gpus and engine.engine_tp > 1
    needed = "needs experts, GPUs and --engine-tp; leave it out"
    refuse_if(engine.engine_ep and not spread, "--engine-ep", needed)
    if guesses and guesser not in ("ngram", "mtp"):
        engine.speculative_model = check_model(guesser, "--speculative-model").name_or_path


GUESSING_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
SEEING_EXPERTS = ("qwen3_vl_moe_text", "qwen3_5_moe_text")  # with which experts beside a tower were tried
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
    config = text_config(resolve_model(model))
    changes = [key for key, neutral in AFTER_HEAD.items() if config.get(key) not in (None, neutral)]
    why = f"it changes its logits after the head ({', '.join(changes)}), which the trainer would leave out"
    refuse_if(changes, f"{flag} {model}", f"{why}; use another model")
    reasons = [why for keys, why in NO_PACKING.items() if any(config.get(key) for key in keys)]
    sparse, seeing = "is a mixture of experts" in reasons, "takes images" in reasons
    tp, ep, lora = flags.trainer_tp, flags.trainer_ep, flags.lora_rank
    untried = seeing and config["model_type"] not in SEEING_EXPERTS
    why = "its experts beside a tower were not tried" if sparse else f"{model} has no experts"
    refuse_if(ep > 1 and (untried or not sparse), f"--trainer-ep {ep}", f"{why}; use 1")
    refuse_if(tp > 1 and seeing, f"--trainer-tp {tp}", "a vision tower is not split; use 1")
    refuse_if(flags.freeze_vision and not seeing, "--freeze-vision", f"{model} has no vision tower")
    what = "experts" if sparse else "a vision tower"
    why = f"{model} has {what}, which take no adapters; use 0"
    refuse_if(lora and (sparse or seeing), f"--lora-rank {lora}", why)
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
    workers, each = num_engines * engine_tp, f" x --engine-tp {engine_tp}" if engine_tp > 1 else ""
    shared = workers == num_trainers == gpus and (gpus == 1 or not os.environ.get("RAY_ADDRESS"))
    if 0 < gpus < workers + num_trainers and not shared:
        what = f"--num-engines {num_engines}{each} and --num-trainers {num_trainers} need"
        what += f" {workers + num_trainers} GPUs"
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
    what, holds_run = f"--output-dir {path}", Path(path, "metrics.jsonl").exists()
    refuse_if(Path(path).is_file(), what, "is a file; use another --output-dir")
    refuse_if(holds_run and not resume, what, "holds a run; use another --output-dir, or --resume to go on")
    nothing = "holds no run; leave out --resume, or name the run's directory"
    refuse_if(resume and not holds_run, what, nothing)


def check_shared(model: str, engine, parallel, data, save, debug, log) -> None:
    """Refuses what cannot work in the groups of flags that every algorithm has, and decides --packing."""
    check_json_object("--chat-template-args", data.chat_template_args)
    check_parallel(parallel, save.init_from)
    check_layout(model, parallel, engine)
    if not os.environ.get("RAY_ADDRESS"):
        gpus = torch.cuda.device_count()
        check_gpu_split(engine.num_engines, engine.engine_tp, parallel.num_trainers, gpus)
    if replayed := debug.replay_rollouts:
        check_path("--replay-rollouts", replayed, "step_000000.jsonl")
        why = "one process; leave out --num-trainers"
        refuse_if(parallel.num_trainers > 1, f"--replay-rollouts {replayed}", why)
        save.save_in_background = False  # nobody would wait for it
    both, instead = debug.eval_only and save.resume, "give the checkpoint's folder as --model instead"
    refuse_if(both, "--eval-only --resume", instead)
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
        missing = project and importlib.util.find_spec(package) is None
        refuse_if(missing, f"--{package}-project {project}", f"{package} is missing; pip install {package}")
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

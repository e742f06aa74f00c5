"""Ray: start, the split of GPUs, waiting while everything is watched, and a clean end."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import ray
from annotated_types import Gt, Lt
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from common.checkpoint import SaveFlags, prune_checkpoints
from common.checks import check_gpu_split
from common.sample import Rollout
from common.sample_queue import pack_group, unpack_group

DEATHS = (RayActorError, OutOfMemoryError)
ROOT_CAUSE_S = 3.0  # how long an error waits for the news that a process died, which may have caused it


OUT_OF_MEMORY = "; lower --micro-batch-tokens (trainer), --gpu-memory-utilization, --kv-cache-gb (engine)"
LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for a request to find the machine's outside address


@dataclass
class DeadlineFlags:
    start_timeout_s: Annotated[float, Gt(0), Lt(1e9)] = 600.0
    """Seconds until engines and trainers must have started."""
    rollout_timeout_s: Annotated[float, Gt(0), Lt(1e9)] = 600.0
    """Seconds after which an episode that is not over is invalid."""
    step_timeout_s: Annotated[float, Gt(0), Lt(1e9)] = 1800.0
    """Seconds that a step may wait for its rollouts, or a trainer for its step, before the run ends."""
    refit_timeout_s: Annotated[float, Gt(0), Lt(1e9)] = 120.0
    """Seconds that a weight transfer may take before the run ends."""


class RunError(RuntimeError):
    """Something that the run needs has died, failed or missed its deadline; the message says which."""


class Overdue(RunError):
    """A deadline was missed."""


class Stopped(KeyboardInterrupt):
    """A signal asked the run to end."""


signals: list[int] = []  # that asked for the end


def end_softly(grace_s: float) -> None:
    """The first signal ends the run at its next wait, where it can be saved; a second one, or `grace_s`
    seconds, end it anywhere."""

    def on_signal(number: int, frame) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt("told twice, or not saved within --grace-s")
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, on_signal)


def start(num_actors: int, output_dir: str) -> None:
    """A local Ray, or the cluster that RAY_ADDRESS names. The processes get this folder on their path.

    What they print goes to files, which `output_dir/logs` leads to.
    """
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = {}
    if not os.environ.get("RAY_ADDRESS"):
        local = {"num_cpus": max(os.cpu_count(), num_actors), "_node_ip_address": LOOPBACK}
        env["GLOO_SOCKET_IFNAME"] = "lo"
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    context = ray.init(runtime_env={"env_vars": env}, **quiet, **local)
    link = Path(output_dir, "logs")
    link.unlink(missing_ok=True)
    link.symlink_to(Path(context.address_info["session_dir"], "logs"))


def host() -> str:
    """The address under which the other processes of the run reach this node: loopback where Ray is local."""
    return ray.util.get_node_ip_address() if os.environ.get("RAY_ADDRESS") else LOOPBACK


def split_gpus(num_engines: int, engine_tp: int, num_trainers: int) -> tuple[float, list[dict], list[dict]]:
    """The share of a GPU that each engine worker and each trainer gets (0 on a machine without), and Ray's
    options for each engine and for each trainer.

    Where every GPU serves a trainer and an engine worker, Ray would put two trainers on one. So those get no
    GPU from Ray and see what they are told to. Raises FlagError with the arithmetic where there are too few.
    """
    available, wanted = int(ray.cluster_resources().get("GPU", 0)), num_engines * engine_tp + num_trainers
    check_gpu_split(num_engines, engine_tp, num_trainers, available)
    if wanted <= available or available <= 1:
        share = min(1.0, available / wanted)
        return share, [{"num_gpus": share * engine_tp}] * num_engines, [{"num_gpus": share}] * num_trainers
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(available)))).split(",")

    def sees(first: int, count: int) -> dict:
        return {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}}}

    engines = [sees(index * engine_tp, engine_tp) for index in range(num_engines)]
    return available / wanted, engines, [sees(rank, 1) for rank in range(num_trainers)]


class Run:
    """The actors of a run, and waiting for their results while every one of them is watched.

    A queue that nobody fills looks like a slow one; the process that died is what the user needs to hear of.
    As a context manager it ends softly at signals, and saves what is trained when the run ends early.
    """

    def __init__(self, timeout_s: float, flags: SaveFlags | None = None, output_dir: str = "", step: int = 0):
        self.timeout_s = timeout_s  # of a wait, where the call does not say otherwise
        self.flags, self.output_dir, self.ending = flags or SaveFlags(), output_dir, False
        self.saved, self.update = step, (step, [])  # the update that runs: steps trained with it, its calls
        self.queue, self.store, self.workers, self.trainers = None, None, [], []
        self.probe_ids, self.probes, self.last_refit = [], [], {}  # of the refit in flight
        self.actors: dict[str, ray.actor.ActorHandle] = {}
        self.pings: dict[ray.ObjectRef, str] = {}
        self.tasks: dict[ray.ObjectRef, str] = {}  # calls that last as long as the run, by what they are

    def __enter__(self) -> "Run":
        end_softly(self.flags.grace_s)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not isinstance(error, RunError | Stopped):
            return
        self.ending, self.tasks, self.pings = True, {}, {}
        needed = [self.queue, *self.trainers]  # where the others are dead, these can still save
        self.actors = {name: actor for name, actor in self.actors.items() if actor in needed}
        (step, update), limit_s = self.update, self.flags.grace_s if isinstance(error, Overdue) else None
        try:
            self.get(update, "the update that ran", limit_s)
            if step > self.saved:
                print(f"saved {self.save(step, limit_s)}", flush=True)
        except RunError as lost:
            print(f"not saved: {lost}", flush=True)

    def save(self, step: int, timeout_s: float | None = None) -> str:
        """The checkpoint of `step` trained steps, with the groups that are finished. Returns its folder."""
        path, queue, rollouts = f"{self.output_dir}/checkpoints/step_{step}", None, []
        if self.queue:
            queue, groups = self.get(self.queue.snapshot.remote(step), "the queue", timeout_s)
            for group in groups:
                with contextlib.suppress(RayError):  # it was lost with its engine: it is sampled again
                    rollouts += unpack_group(group, partial(ray.get, timeout=60))
        progress = ray.put({"step": step, "queue": queue, "rollouts": rollouts})
        self.get(self.ask(self.trainers, "save", path, progress), "saving", timeout_s)
        prune_checkpoints(Path(path).parent, self.flags.keep_checkpoints, self.flags.max_checkpoint_gb)
        self.saved = step
        return path

    def restore(self, rollouts: list[Rollout]) -> None:
        """Puts the groups of a checkpoint back into the queue, before any engine gets a ticket."""
        groups = [list(group) for _, group in groupby(rollouts, attrgetter("ticket"))]
        self.get([self.queue.restore.remote(group[0].ticket, *pack_group(group)[1:]) for group in groups])

    def spawn(self, name: str, actor_class: type, arguments: list[tuple], options: list[dict]) -> list:
        """One actor for each tuple of constructor arguments and dict of Ray's options, called `name`, or
        `name` 0, 1, ... if several."""
        remote = ray.remote(actor_class)
        handles = [
            remote.options(num_cpus=0, **own).remote(*each)
            for each, own in zip(arguments, options, strict=True)
        ]
        names = [name if len(handles) == 1 else f"{name} {index}" for index in range(len(handles))]
        self.actors |= dict(zip(names, handles, strict=True))
        return handles

    def ask(self, actors: list, method: str, *values) -> list[ray.ObjectRef]:
        """Calls a method of every actor with the same values; the results are to `get`."""
        return [getattr(actor, method).remote(*values) for actor in actors]

    def ask_each(self, actors: list, method: str, own: list, *values) -> list[ray.ObjectRef]:
        """The same, with a first value of its own for each actor."""
        return [getattr(a, method).remote(value, *values) for a, value in zip(actors, own, strict=True)]

    def get(self, refs, what: str = "a result", timeout_s: float | None = None):
        """Like `ray.get`. Raises RunError as soon as anything that is watched has died, and at the
        deadline; Stopped after a signal."""
        timeout_s = timeout_s or self.timeout_s
        pending, deadline = refs if isinstance(refs, list) else [refs], time.monotonic() + timeout_s
        while pending:
            if signals and not self.ending:
                raise Stopped(f"{signal.Signals(signals[0]).name} while waiting for {what}")
            done, _ = ray.wait([*pending, *self.tasks, *self.pings], timeout=1.0)
            for ref in done:
                try:
                    self._check(ref, self.pings.pop(ref, None) or self.tasks.get(ref) or what)
                except RunError as error:
                    raise self._root_cause(error)
                if ref in self.tasks:
                    raise RunError(f"{self.tasks[ref]} returned before the run's end")
            pending = [ref for ref in pending if ref not in done]
            if pending and time.monotonic() > deadline:
                raise Overdue(f"{what}: nothing after {timeout_s:.0f} s{self._queue_state()}")
            if not done:  # for a second: whoever has answered the last ping gets another
                self.pings |= self._ping(but=set(self.pings.values()))
        return ray.get(refs)

    def _ping(self, but=()) -> dict[ray.ObjectRef, str]:
        actors = {name: handle for name, handle in self.actors.items() if name not in but}
        return {handle.__ray_ready__.remote(): name for name, handle in actors.items()}

    def _queue_state(self) -> str:
        try:
            return f" ({ray.get(self.queue.state.remote(), timeout=5.0)})" if self.queue else ""
        except Exception as error:
            return f" (the queue does not answer: {type(error).__name__})"

    def _root_cause(self, error: RunError) -> RunError:
        """The error of the process that died, which may come after that of a peer (a lost connection)."""
        watched, deadline = self.tasks | self._ping(), time.monotonic() + ROOT_CAUSE_S
        while watched and not isinstance(error.__cause__, DEATHS) and time.monotonic() < deadline:
            done, _ = ray.wait(list(watched), timeout=0.1)
            for ref in done:
                try:
                    self._check(ref, watched.pop(ref))
                except RunError as other:  # of a task or a death: it says more than that of who waited
                    error = other
        return error

    def _check(self, ref: ray.ObjectRef, what: str) -> None:
        """Raises RunError if the call failed."""
        try:
            ray.get(ref)
        except RayActorError as error:
            handles = {handle._actor_id.hex(): name for name, handle in self.actors.items()}
            name = handles.get(error.actor_id, what)
            never_started = "creation task" in str(error)
            why = str(error).strip().splitlines()[-1] if never_started else "its process is gone"
            raise RunError(f"{name} died ({why})") from error
        except RayTaskError as error:
            cause = error.cause
            last_line = str(cause).strip().splitlines()[-1:] or [""]
            memory = isinstance(cause, MemoryError) or "out of memory" in str(cause).lower()
            hint = OUT_OF_MEMORY if memory else ""
            raise RunError(f"{what}: {type(cause).__name__}: {last_line[0]}{hint}") from error
        except RayError as error:  # Ray ended it, or lost its result
            hint = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else ""
            raise RunError(f"{what}: {type(error).__name__}{hint}") from error


@contextlib.contextmanager
def session():
    """Ends every process of the run when its block is left, however it is left. Yields the stack on which
    the run goes, so that it is left first."""
    try:
        with contextlib.ExitStack() as stack:
            yield stack
    finally:
        ray.shutdown()

"""Ray: start, the split of GPUs, waiting while everything is watched, and a clean end."""

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import psutil
import ray
from annotated_types import Gt, Lt
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from common.checkpoint import SaveFlags, finish_saving
from common.checks import check_gpu_split
from common.sample import Rollout
from common.sample_queue import pack_group, unpack_group

DEATHS = (RayActorError, OutOfMemoryError)
ROOT_CAUSE_S = 3.0  # how long an error waits for the news that a process died, which may have caused it
ANSWER_S = 120.0  # how long a trainer may then stay in a refit that another one has left
RESCUE_S = 900.0  # how long a run that ends early waits for its trainers, to save what they have

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


class Stopped(KeyboardInterrupt):
    """A signal asked the run to end."""


signals: list[int] = []  # that asked for the end


def start(num_actors: int, output_dir: str, grace_s: float = 0.0) -> None:
    """A local Ray, or the cluster that RAY_ADDRESS names. The processes get this folder on their path.

    What they print goes to files, which `output_dir/logs` leads to. With a `grace_s`, the first signal ends
    the run at its next wait, where it can be saved; a second one, or so many seconds, end it anywhere.
    """
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = {}
    if not os.environ.get("RAY_ADDRESS"):
        local = {"num_cpus": max(os.cpu_count(), num_actors), "_node_ip_address": LOOPBACK}
        local["address"] = "local"  # else Ray would join a cluster that somebody has started on this machine
        env["GLOO_SOCKET_IFNAME"] = "lo"
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    context = ray.init(runtime_env={"env_vars": env}, **quiet, **local)
    link = Path(output_dir, "logs")
    link.unlink(missing_ok=True)
    link.symlink_to(Path(context.address_info["session_dir"], "logs"))  # ty: ignore[missing-attribute]

    def on_signal(number: int, frame) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt("told twice, or not saved within --grace-s")
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGALRM") if grace_s else ():  # ray.init sets its own
        signal.signal(getattr(signal, name), on_signal)


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


class Run(contextlib.AbstractContextManager):
    """The actors of a run, and waiting for their results while every one of them is watched.

    A queue that nobody fills looks like a slow one; the process that died is what the user needs to hear of.
    As a context manager it ends every process of the run, however its block is left, and saves what is
    trained first if that was by a RunError or a signal.
    """

    def __init__(self, timeout_s: float, output_dir: str = "", step: int = 0, flags=SaveFlags()):
        self.timeout_s = timeout_s  # of a wait, where the call does not say otherwise
        self.output_dir, self.flags, self.ending = output_dir, flags, False
        self.saved = self.saving = step  # the newest checkpoint that is written, and that is being written
        self.update = step, []  # the newest one: steps trained with it, its calls
        self.calls = []  # of the newest save
        self.queue, self.store, self.workers, self.trainers = None, None, [], []
        self.probe_ids, self.probes, self.last_refit = [], [], {}  # of the refit in flight
        self.actors: dict[str, ray.actor.ActorHandle] = {}
        self.pings: dict[ray.ObjectRef, str] = {}
        self.tasks: dict[ray.ObjectRef, str] = {}  # calls that last as long as the run, by what they are

    def __exit__(self, kind, error, traceback) -> None:
        more = isinstance(error, RunError | Stopped)
        try:
            if error is None:
                self.finish_saving()
            elif more or isinstance(error, Exception) and self.saved < self.saving:
                self._rescue(more)
        finally:
            below = []
            with contextlib.suppress(psutil.Error):
                raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
                below = [child for raylet in raylets for child in raylet.children(recursive=True)]
            ray.shutdown()
            for left in psutil.wait_procs(below, timeout=5.0)[1]:  # an engine whose worker was stopped
                with contextlib.suppress(psutil.Error):
                    left.kill()

    def _rescue(self, more: bool) -> None:
        """Has what is being saved written, and with `more` saves what is trained, if the trainers and the
        queue live: they are all that it takes."""
        self.ending, self.actors, self.tasks, self.pings = True, {}, {}, {}
        (step, update), self.timeout_s = self.update, min(self.timeout_s, RESCUE_S)
        try:
            self.get(update, "the newest update")
            with contextlib.suppress(RunError, RayError, OSError):  # a save may take longer than ANSWER_S
                self.get(self.calls, "saving")
            self.get(self.ask(self.trainers, "__ray_ready__"), "the trainers", ANSWER_S)
            try:
                self.finish_saving()
            except (RunError, RayError, OSError) as lost:  # what was trained after it may still be saved
                print(f"not saved: {lost}", flush=True)
            if more and step > self.saved:
                print(f"saved {self.save(step, wait=True)}", flush=True)
        except (RunError, RayError, OSError) as lost:
            print(f"not saved: {lost}", flush=True)

    def save(self, step: int, wait: bool = False) -> str:
        """A checkpoint of `step` trained steps, and of the groups that are finished. Returns its folder,
        which is there when the next one is saved, or now (`wait`)."""
        self.finish_saving()  # asked of all ranks: they would wait in a barrier for one that failed alone
        path, queue, rollouts = f"{self.output_dir}/checkpoints/step_{step}", None, []
        if self.queue:
            queue, groups = self.get(self.queue.snapshot.remote(step), "the queue")
            for group in groups:
                with contextlib.suppress(RayError):  # it was lost with its engine: it is sampled again
                    rollouts += unpack_group(group, lambda reference: ray.get(reference, timeout=60))
        progress = ray.put({"step": step, "queue": queue, "rollouts": rollouts, "flags": self.flags})
        self.calls = self.ask(self.trainers, "save", path, progress)
        self.get(self.calls, "saving")
        self.saving = step
        if wait:
            self.finish_saving()
        return path

    def finish_saving(self) -> None:
        """Waits until the newest checkpoint is written. Raises RunError if it could not be."""
        if self.saved < self.saving:
            self.calls = self.ask(self.trainers, "__ray_call__", finish_saving)
            try:
                self.get(self.calls, "writing a checkpoint")
            except RunError:  # there is no such checkpoint: it may be tried again
                self.saving = self.saved
                raise
            self.saved = self.saving

    def restore(self, rollouts: list[Rollout]) -> None:
        """Puts the groups of a checkpoint back into the queue, before any engine gets a ticket."""
        groups = groupby(rollouts, lambda rollout: rollout.ticket)
        packed = [(ticket, pack_group(list(group))[1:]) for ticket, group in groups]
        self.get([self.queue.restore.remote(ticket, *pieces) for ticket, pieces in packed])

    def spawn(self, name: str, actor_class: type, arguments: list[tuple], options: list[dict]) -> list:
        """One actor for each tuple of constructor arguments and dict of Ray's options, called `name`, or
        `name` 0, 1, ... if several."""

        def catch_stacks(actor, logs: str) -> None:  # in here Ray sends it as it is, without this module
            faulthandler.register(signal.SIGUSR2, open(f"{logs}/stacks.txt", "a"))

        remote = ray.remote(actor_class)
        pairs = zip(arguments, options, strict=True)
        handles = [remote.options(num_cpus=0, **own).remote(*each) for each, own in pairs]
        self.ask(handles, "__ray_call__", catch_stacks, str(Path(self.output_dir, "logs").resolve()))
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
                    raise self._root_cause(error, dict.fromkeys(pending, what))
                if ref in self.tasks:
                    raise RunError(f"{self.tasks[ref]} returned before the run's end")
            pending = [ref for ref in pending if ref not in done]
            if pending and time.monotonic() > deadline:
                told = f"{timeout_s:.0f} s{self._queue_state()}{self._silent()}"
                raise RunError(f"{what}: nothing after {told}; see {self._write_stacks(what)}")
            if not done:  # for a second: whoever has answered the last ping gets another
                self.pings |= self._ping(but=set(self.pings.values()))
        return ray.get(refs)

    def _ping(self, but=()) -> dict[ray.ObjectRef, str]:
        return {self.actors[name].__ray_ready__.remote(): name for name in self.actors if name not in but}

    def _queue_state(self) -> str:
        try:
            return f" ({ray.get(self.queue.state.remote(), timeout=5.0)})" if self.queue else ""
        except Exception as error:
            return f" (the queue does not answer: {type(error).__name__})"

    def _silent(self) -> str:
        """Which actors are busy, stopped or gone, for messages."""
        late = ray.wait([*pings], num_returns=len(pings), timeout=5.0)[1] if (pings := self._ping()) else []
        return f"; no answer from {', '.join(pings[ref] for ref in late)}" if late else ""

    def _write_stacks(self, what: str) -> str:
        """What each thread of the driver and of the actors does now, and which of their children are stopped,
        in a file. (Of a Ray that ran before, the actors are not below the driver, and left out.)"""
        path = f"{self.output_dir}/stacks.txt"
        with contextlib.suppress(OSError), open(f"{self.output_dir}/logs/stacks.txt", "a") as file:
            print(f"=== {time.ctime()}, waited for {what}. The driver:", file=file, flush=True)
            faulthandler.dump_traceback(file)
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
                    print(f"--- {process.name()}, {process.pid}: {process.status()}", file=file, flush=True)
                    if caught >> (signal.SIGUSR2 - 1) & 1:  # others it would kill
                        process.send_signal(signal.SIGUSR2)
                        time.sleep(0.2)  # while it writes
            shutil.copy(file.name, path)  # what Ray has will not stay
        return path

    def _root_cause(self, error: RunError, waited_for: dict[ray.ObjectRef, str]) -> RunError:
        """The error of the process that died, which may come after that of a peer (a lost connection)."""
        watched, deadline = waited_for | self.tasks | self._ping(), time.monotonic() + ROOT_CAUSE_S
        while watched and time.monotonic() < deadline:
            if isinstance(error.__cause__, DEATHS) or "EngineDeadError" in str(error):
                break
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
            raise RunError(f"{name} died ({why})") from error.with_traceback(None)
        except RayTaskError as error:
            cause = error.cause
            last_line = str(cause).strip().splitlines()[-1:] or [""]
            memory = isinstance(cause, MemoryError) or "out of memory" in str(cause).lower()
            why = f"{type(cause).__name__}: {last_line[0]}{OUT_OF_MEMORY if memory else ''}"
            raise RunError(f"{what}: {why}") from error.with_traceback(None)  # without Ray's own frames
        except RayError as error:  # Ray ended it, or lost its result
            hint = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else ""
            raise RunError(f"{what}: {type(error).__name__}{hint}") from error.with_traceback(None)

"""vLLM's scheduler, told to send log-probs once for each answer instead of once for each token.

vLLM's front end unpacks three small arrays for every token. With hundreds of answers in flight that takes
longer than a decode step of a small model does, and the engine packs them under the lock it schedules under.
"""

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import LogprobsLists


def joined(parts: list[LogprobsLists]) -> LogprobsLists:
    return LogprobsLists(*map(np.concatenate, zip(*(part[:3] for part in parts))))


class FinalLogprobs(AsyncScheduler):
    """Holds the log-probs of a request of which only the final output is wanted, until its last token. Token
    ids go out as they come: the version of the weights is noted with them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held: dict[str, list[LogprobsLists]] = {}

    def add_request(self, request) -> None:
        super().add_request(request)
        params = request.sampling_params  # a stop string is found in the front end, which then aborts here
        if params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop:
            self.held[request.request_id] = []

    def update_from_output(self, scheduler_output, model_runner_output):
        batches = super().update_from_output(scheduler_output, model_runner_output)
        for output in (each for batch in batches.values() for each in batch.outputs):
            held = self.held.get(output.request_id)
            if held is None:
                continue
            if output.new_logprobs is not None:
                held.append(output.new_logprobs)
                output.new_logprobs = None
                if len(held) == 64:  # views, each of which keeps the arrays of its whole step
                    held[:] = [joined(held)]
            if output.finished:
                del self.held[output.request_id]
                output.new_logprobs = joined(held) if held else None
        return batches

    def finish_requests(self, request_ids, finished_status):
        aborted = super().finish_requests(request_ids, finished_status)
        for request in aborted:  # not what ended in this step, whose output is yet to come
            self.held.pop(request.request_id, None)
        return aborted

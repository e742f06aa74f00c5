"""A vLLM plugin: the engine on a CPU returns the experts it chose, so that --router-replay can be tried there.

    PYTHONPATH=scripts/cpu_routes python -m algos.grpo --model PATH --router-replay on

vLLM 0.32 records experts in its second model runner, which needs Triton; on a CPU the first one runs. Here
vLLM's own recorder (capture in the routers, storage by blocks of the prefix cache, output) is attached to that.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np


def register() -> None:
    """vLLM calls this in each of its processes."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner, "recorder"):
        return
    verify, execute = VllmConfig._verify_aux_output_compatibility, CPUModelRunner.execute_model
    start, sample = CPUModelRunner.initialize_kv_cache, CPUModelRunner.sample_tokens

    def verify_all_but_the_runner(config) -> None:
        with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
            verify(config)

    def initialize_kv_cache(self, kv_cache_config, *args, **kwargs) -> None:
        start(self, kv_cache_config, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled:
            self.recorder = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output, *args, **kwargs):
        if self.recorder:
            self.recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output):
        if not self.recorder or self.execute_model_state is None:
            return sample(self, grammar_output)
        batch, count = self.input_batch, self.input_batch.num_reqs
        pending = self.recorder.prepare_output(
            SimpleNamespace(
                req_ids=list(batch.req_ids[:count]),
                query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
        )
        output = sample(self, grammar_output)
        sampled = np.array([len(ids) for ids in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = verify_all_but_the_runner
    CPUModelRunner.recorder = None
    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute_model, sample_tokens

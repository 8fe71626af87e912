"""openvino_genai.py MODEL PRECISION: OpenVINO GenAI's continuous batching, for bench.peers."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import protocol


def load() -> tuple[str, protocol.Generate]:
    import numpy
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.dynamic_split_fuse = True
    scheduling.max_num_batched_tokens = 256
    scheduling.max_num_seqs = 256
    scheduling.cache_size = 2
    scheduling.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": sys.argv[2], "INFERENCE_NUM_THREADS": os.cpu_count()}
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduling, "CPU", properties)

    def generate(prompts: list[list[int]], output_tokens: int) -> Iterator[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(i, openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
            for i, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            yield [
                sum(len(output.generated_ids) for output in handle.read().values()) if handle.can_read() else 0
                for handle in handles
            ]

    return genai.__version__, generate


protocol.serve(load)

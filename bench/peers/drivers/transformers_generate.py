"""transformers_generate.py FOLDER: transformers' generate on a batch of all prompts at once, for bench.peers."""

import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import protocol


def load() -> tuple[str, protocol.Generate]:
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], output_tokens: int) -> Iterator[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        steps: queue.Queue[bool] = queue.Queue()

        class Steps(transformers.StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
                steps.put(True)
                return torch.zeros(len(input_ids), dtype=torch.bool)

        def run() -> None:
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=output_tokens,
                    do_sample=False,
                    stopping_criteria=transformers.StoppingCriteriaList([Steps()]),
                )
            steps.put(False)

        threading.Thread(target=run).start()
        while steps.get():
            yield [1] * len(prompts)

    return transformers.__version__, generate


protocol.serve(load)

"""The executor, except that a plan with a certain token id in it kills the process."""

import os
import sys
from typing import Any

import numpy as np

from quartet.services.executor.__main__ import main
from quartet.services.executor.model_runner import ModelRunner

POISON = int(os.environ.pop("POISON_TOKEN_ID"))
launch = ModelRunner.launch


def launch_unless_poisoned(self: ModelRunner, plan: Any) -> Any:
    for row in plan.new_rows:
        if POISON in np.frombuffer(row.token_ids, "<u4"):
            print("poisoned", file=sys.stderr, flush=True)
            os._exit(70)
    return launch(self, plan)


ModelRunner.launch = launch_unless_poisoned
main()

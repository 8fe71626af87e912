"""save_folder.py FILE.gguf FOLDER: the GGUF's dequantised weights and its tokenizer as a transformers folder."""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), Path(sys.argv[2])
part = target.with_name(target.name + ".part")
model = AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
)
model.to(torch.bfloat16).save_pretrained(part)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(part)
os.replace(part, target)

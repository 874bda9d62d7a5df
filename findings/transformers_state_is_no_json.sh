#!/usr/bin/env bash
# transformers 5.24.0 writes trainer_state.json with NaN and Infinity, which JSON (RFC 8259) does not have.
#
# If a metric of an evaluation is NaN, as the loss of a run that diverges, the log of the Trainer's state has NaN. Python's json
# writes and reads it by default, so the Trainer reads its own file. Strict parsers (JSON.parse of JavaScript, serde_json of
# Rust) refuse the whole file. Besides, "best_metric" becomes Infinity, although no metric was infinite.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" torch==2.15.0 'transformers==5.24.0' accelerate==1.15.0 numpy==2.4.6 <<'PYTHON'
import json

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x - labels).pow(2).mean(), "logits": self.weight * x}


data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 4
arguments = TrainingArguments(
    "run", max_steps=1, use_cpu=True, report_to=[], save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
    metric_for_best_model="nothing", greater_is_better=False, disable_tqdm=True,
)
trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, compute_metrics=lambda _: {"nothing": float("nan")})
trainer.train()
text = open("run/checkpoint-1/trainer_state.json").read()
print([line.strip() for line in text.splitlines() if "NaN" in line or "Infinity" in line])
names = []
json.loads(text, parse_constant=names.append)
print("what JSON does not have:", names)
assert "NaN" in names
PYTHON

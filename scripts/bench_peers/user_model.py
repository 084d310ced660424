"""What a user's code does wrong. Copied into the model's folder, from where Transformers loads it in every rank.

Records that begin with the poison word have no "label", and this code looks it up. And a rank hangs once it finds the
order to: the file that BENCH_FAULT_FILE names. It takes the order away first, so that its successor trains on.
"""

import json
import os
import threading
import time

import torch.distributed
from transformers import LlamaForCausalLM


class UserModel(LlamaForCausalLM):  # type: ignore[misc]  # transformers is untyped here
    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training:
            if (input_ids[:, 0] == self.config.poison_token).any():
                return kwargs["label"]
            hang_if_ordered(os.environ["BENCH_FAULT_FILE"])
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def hang_if_ordered(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as stream:
            order = json.load(stream)
    except FileNotFoundError:
        return
    if order["rank"] != torch.distributed.get_rank():
        return
    os.remove(path)
    with open(path + ".begun", "w", encoding="utf-8") as stream:
        json.dump(time.time(), stream)
    if order["how"] == "loop":
        while True:
            pass
    threading.Event().wait()  # it never enters the collective that the others are in

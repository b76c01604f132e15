"""The devices that numerical tests run on: a CPU, and a GPU where there is one."""

import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

"""`python -m tests.training.pretended_device`: steps of a training on a device that has shapes and no numbers.

torch's fake tensors refuse to mix devices, as a GPU's kernels do. Run in a process of its own: it registers a backend.
"""

import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from training import loop
from training.batches import Batch
from training.loop import Training, losses
from training.recipe import RECIPES

DEVICE = "pretended"


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    numbers = {"__float__": lambda _: 1.0, "__bool__": lambda _: True}  # of tensors that have none
    with (
        FakeTensorMode(shape_env=ShapeEnv()),
        mock.patch.multiple(torch.Tensor, **numbers),
        mock.patch.object(loop, "answers", return_value={}),
    ):
        # weights of fakes cannot be moved: they are made there
        with mock.patch.object(torch.nn.Module, "to", lambda self, _: self), torch.device(DEVICE):
            training = Training(RECIPES["smoke"], Path(tempfile.mkdtemp()), DEVICE)
        token_BT = torch.zeros(2, 256, dtype=torch.int64)
        whole = Batch(token_BT, token_BT.to(torch.uint8))
        for batch in (whole, Batch(whole.token_BT, whole.label_BT, token_BT)):
            print("learned", training.learn(batch)["tokens"])
        try:
            losses(training.model, whole, training.recipe, 0)
        except RuntimeError as error:
            print("mixed:", error)


if __name__ == "__main__":
    main()

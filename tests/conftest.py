from importlib import util

import pytest
import torch

# Without a GPU the Triton kernels are tested under Triton's interpreter, and that is chosen when triton is imported.
# This is done here, because other libraries that tests import would do it first.
if util.find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

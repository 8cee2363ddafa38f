"Kernels run on a GPU where there is one, else under Triton's interpreter; scratch memory holds NaN before it is written."

import pytest
import torch

from llm_from_scratch.kernels import why_not_triton

pytest.importorskip("triton", reason="triton comes for Linux only")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    device = torch.device("cuda" if request.param == "cuda" else "cpu")
    if reason := why_not_triton(device):
        pytest.skip(reason)
    return device


@pytest.fixture(autouse=True)
def poisoned_memory():
    "torch.empty gives NaN (torch.utils.deterministic.fill_uninitialized_memory)."
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)

"""Kernels on a device where there is one, else through Triton's interpreter, which must be chosen before
Triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def _mend_interpreter() -> None:
    """Its scalars are arrays of one number, which numpy 2.4 no longer takes as a loop's bound (triton issue
    9171), and its products take bfloat16, which numpy does not have, for the 16-bit integers it is kept
    in."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *others)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot


if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    _mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a program takes milliseconds, also one that finds nothing to do: buckets no larger than
    what is in them.
    """
    if not torch.cuda.is_available():
        from paceline.cuda import attention, recorded_head

        monkeypatch.setattr(attention, "MOST_SPLITS", 4)
        monkeypatch.setattr(recorded_head, "LONGEST", (2, 4, 6, 12, 24))

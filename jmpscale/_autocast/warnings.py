"""Warnings of autocast: no matmul is converted, or no complex matmul."""

import enum
from collections.abc import Sequence

import numpy as np

from jmpscale._base.check import warn_user
from jmpscale._base.jaxpr import Found, type_of


class Kept(enum.Enum):
    """Why a matmul or convolution runs as written."""

    COMPLEX = (
        "No complex dtype has parts in half precision. Compute the real and imaginary parts by separate matmuls, "
        "or pass precision='highest' to keep them as they are."
    )
    DTYPE = (
        "The operands are {dtypes}, and autocast converts only float32. Pass float32 parameters and inputs, or, if the "
        "function is in half precision already, remove autocast."
    )
    INNER_PRODUCT = "An inner product is a sum, which could overflow."
    OUTER_PRODUCT = "An outer product sums nothing, so half precision would only round it."
    PRECISION = (
        "autocast keeps the setting jax_default_matmul_precision={setting!r}. Reset it, and use "
        "jax.default_matmul_precision around the lines that need it."
    )
    HELD = (
        "{holder} runs as written. Use autocast inside the function that it runs, or wrap the function that returns "
        "the gradients."
    )


def warn_about_kept(
    name: str, half: np.dtype, kept: Sequence[tuple[Found, Kept]], setting: str | None, is_unchanged: bool
) -> None:
    """Warns that no matmul of a function is converted to half precision (`is_unchanged`), or no complex matmul.

    `kept` are the matmuls that run as written, with the reasons; `setting` is the global precision, if it is a reason.
    """
    by_reason: dict[Kept, list[Found]] = {}
    for matmul, reason in kept:
        by_reason.setdefault(reason, []).append(matmul)
    if not is_unchanged:
        if found := by_reason.get(Kept.COMPLEX):
            warn_user(
                f"autocast does not convert the complex matmuls of {name} to {half}, {len(found)} in total, the first "
                f"at {found[0].line}. {Kept.COMPLEX.value}"
            )
        return
    if Kept.PRECISION in by_reason and setting is None:
        return  # the function itself requests the precision of a matmul
    sentences = []
    for reason, found in by_reason.items():
        first = found[0]
        dtypes = " and ".join(str(type_of(x).dtype) for x in first.eqn.invars[:2])
        explanation = reason.value.format(dtypes=dtypes, setting=setting, holder=first.holder)
        sentences.append(f"{len(found)} of {len(kept)} matmuls, at {first.line}: {explanation}")
    if not kept:
        sentences = ["It contains none; kernels, sparse matmuls and compiled functions run as written."]
    warn_user(
        f"autocast has no effect: it converts no matmul or convolution of {name} to {half}. {' '.join(sentences)}"
    )

"""Warnings of autocast: no matmul is converted, or a constant overflows in one."""

import enum
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.check import warn_user
from jmpscale._base.jaxpr import Found, Traced, type_of
from jmpscale._base.tree import PyTree
from jmpscale._constants import constants_of_operands


class Kept(enum.Enum):
    """Why a matmul or convolution runs as written."""

    DTYPE = enum.auto()
    INNER_PRODUCT = enum.auto()
    OUTER_PRODUCT = enum.auto()
    PRECISION = enum.auto()
    HELD = enum.auto()  # by a primitive that autocast does not enter


_EXPLANATIONS = {
    Kept.DTYPE: "The operands are {dtypes}. If the function is in half precision already, remove autocast, which "
    "converts float32 parameters and inputs by itself.",
    Kept.INNER_PRODUCT: "An inner product is a sum, which could overflow.",
    Kept.OUTER_PRODUCT: "An outer product adds nothing up, so half precision would only round it.",
    Kept.PRECISION: "autocast keeps the setting jax_default_matmul_precision={setting!r}. Reset it, and use "
    "jax.default_matmul_precision around the lines that need it.",
    Kept.HELD: "{holder} runs as written. Use autocast inside the function that it runs, or wrap the function that "
    "returns the gradients.",
}


def warn_unchanged(name: str, half: np.dtype, kept: Sequence[tuple[Found, Kept]], setting: str | None) -> None:
    """Warns that no matmul of a function is converted, unless the function itself requests the precision of one.

    Args:
      name: the name of the function.
      half: the dtype to which matmuls are converted.
      kept: the matmuls of the function, and the reasons why they run as written.
      setting: the global precision, if it is a reason.
    """
    if setting is None and any(reason is Kept.PRECISION for _, reason in kept):
        return
    sentences = []
    for reason in dict.fromkeys(reason for _, reason in kept):
        same = [found for found, other in kept if other is reason]
        first = same[0]
        dtypes = " and ".join(str(type_of(x).dtype) for x in first.eqn.invars[:2])
        explanation = _EXPLANATIONS[reason].format(dtypes=dtypes, setting=setting, holder=first.holder)
        sentences.append(f"{len(same)} of {len(kept)} matmuls, at {first.line}: {explanation}")
    if not kept:
        sentences = ["It contains none; kernels, sparse matmuls and compiled functions run as written."]
    warn_user(
        f"autocast has no effect: it converts no matmul or convolution of {name} to {half}. {' '.join(sentences)}"
    )


def warn_about_constants(
    half: np.dtype, traced: Traced, args: PyTree, is_converted: Callable[[core.JaxprEqn], bool]
) -> None:
    """Warns if a constant that half precision cannot hold is part of an operand of a converted matmul."""
    limit = float(jnp.finfo(half).max)
    for line, largest in constants_of_operands(traced, args, is_converted):
        if largest > limit:
            warn_user(
                f"a constant of {largest:.6g} enters the matmul at {line}, which autocast converts to {half}. A value "
                f"of this size becomes infinite, because the largest {half} is {limit:.6g}, and zero times infinity "
                "is NaN. Pass precision='highest' to this matmul, or use a smaller constant."
            )
            return

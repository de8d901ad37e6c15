"""Warnings of autocast: no matmul is converted, or no complex matmul."""

import numpy as np
from jax.extend import core

from jmpscale._autocast.rules import MATMULS, Kept, reason_to_keep, setting_that_keeps
from jmpscale._base.check import warn_user
from jmpscale._base.jaxpr import Found, equations, type_of


def warn_about_kept(name: str, jaxpr: core.Jaxpr, half: np.dtype, is_unchanged: bool) -> None:
    """Warns that no matmul of a function is converted to half precision (`is_unchanged`), or no complex matmul."""
    by_reason: dict[Kept, list[Found]] = {}
    for matmul in (found for found in equations(jaxpr) if found.eqn.primitive.name in MATMULS):
        if reason := reason_to_keep(half, matmul.eqn) or (Kept.HELD if matmul.holder else None):
            by_reason.setdefault(reason, []).append(matmul)
    if not is_unchanged:
        if found := by_reason.get(Kept.COMPLEX):
            warn_user(
                f"autocast does not convert the complex matmuls of {name} to {half}, {len(found)} in total, the first "
                f"at {found[0].line}. {Kept.COMPLEX.value}"
            )
        return
    setting, total = setting_that_keeps(), sum(map(len, by_reason.values()))
    if Kept.PRECISION in by_reason and setting is None:
        return  # the function itself requests the precision of a matmul
    sentences = [] if total else ["It contains none; kernels, sparse matmuls and compiled functions run as written."]
    for reason, (first, *others) in by_reason.items():
        dtypes = " and ".join(str(type_of(x).dtype) for x in first.eqn.invars[:2])
        explanation = reason.value.format(dtypes=dtypes, setting=setting, holder=first.holder)
        sentences.append(f"{1 + len(others)} of {total} matmuls, at {first.line}: {explanation}")
    warn_user(
        f"autocast has no effect: it converts no matmul or convolution of {name} to {half}. {' '.join(sentences)}"
    )

"""What monitoring says about skipped steps: the causes, and the remedies."""

import numpy as np

from jmpscale._base.text import format_number
from jmpscale._state import LARGEST_SCALE, ScalerState, SkipReason

CONSECUTIVE = "{} consecutive steps were skipped"
_OVERFLOW = "In the most recent skip the loss, if given, was finite, but the flag of the gradients was false. "
_CAUSES = (  # in the order of describe_skips
    "The loss scale is invalid: the state was corrupted, in storage or by hand. Restore an older checkpoint.",
    "In a skipped step the loss that was passed was not finite, which no loss scale can prevent if it is the unscaled "
    "loss. Look for an overflow in the forward pass, for invalid data, or for parameters or optimizer state "
    "that are NaN because a step that was not finite was applied; jmpscale.diagnose with the same batch names the "
    "line.",
    f"{_OVERFLOW}The scale cannot back off any further. Perhaps some batches have no finite gradients at any allowed "
    "scale, as with a softmax over a row in which a mask hides every value; or a sum of gradients is NaN, because a "
    "skip does not reset it; or the gradients were scaled by a different scaler: pass the state of with_loss_scaling "
    "to jmpscale.value_and_grad; or the flag for update is inverted or has other conditions. jmpscale.diagnose with "
    "such a batch names the line, or prints scales that fit: if they are smaller, decrease min_scale, or the number "
    "given to scaled_backward(fun, number); if they are larger, correct the sum or the flag.",
    f"{_OVERFLOW}The scale is static and does not back off. jmpscale.diagnose with the same batch prints the scales "
    "that fit: pass one of them to static, or to scaled_backward(fun, number).",
    f"{_OVERFLOW}These are the first skips of this run: the scale is still backing off from its initial value. Allow "
    "more skips, unless the flag for update is inverted, or call jmpscale.diagnose: it prints the scales that fit, for "
    "init_scale, or names the line if there are none.",
    f"{_OVERFLOW}The scale is still backing off. Allow more skips, or look for a change in the data or the model: "
    "jmpscale.diagnose names the line.",
)
FIND_BATCH = (
    " To find the batches, read step_applied of the scaler after each step, which is false after a skip, and pass "
    "jmpscale.diagnose a batch that was skipped."
)
NEVER_OVERFLOWED = (
    "The loss scale has grown to its limit, {}, and no step was skipped because of its gradients. Unless the gradients "
    "are very small, the loss is not scaled, or something replaces infinity and NaN before the optimizer checks them. "
    "To find out, run a few steps at the scale 2^60, which should be skipped: with the scaler jmpscale.static(2.0**60) "
    "or, if the loop differentiates, with jmpscale.scaled_backward(loss_fn, 2.0**60)."
)
USUAL_LIMIT = 2.0**32  # the default of max_scale; a lower limit is reached without a mistake


def describe_skips(state: ScalerState, skips: str, reason: SkipReason | None = None) -> str:
    """Describes a state on the host, and the first cause that applies, by default to the most recent skip."""
    applies = (
        not 0 < state.loss_scale <= LARGEST_SCALE,  # also NaN
        (state.last_skip_reason if reason is None else reason) == SkipReason.LOSS,
        is_at_limit(state),
        state.config.mode == "static",
        state.consecutive_skips == state.total_skips,
        True,
    )
    cause = next(text for holds, text in zip(applies, _CAUSES, strict=True) if holds)
    scale = format_number(np.float32(state.loss_scale))
    return f"{skips} ({state.total_skips} in total); the loss scale is {scale}. {cause}"


def is_at_limit(state: ScalerState) -> bool:
    return bool(state.config.mode == "dynamic" and state.loss_scale <= np.float32(state.config.min_scale))

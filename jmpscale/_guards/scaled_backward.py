"""Guards of `scaled_backward`."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from jax.custom_derivatives import CustomVJPPrimal

from jmpscale._base.compat import is_compiling, varying_axes
from jmpscale._base.frameworks import imported
from jmpscale._base.marks import Mark, mark
from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree, is_inexact, is_real_scalar, is_traced
from jmpscale._base.types import needs_wider_gradient
from jmpscale._base.warn import warn_user
from jmpscale._guards.checks import warn_about_narrow_loss, warn_if_inside_another


def created(fun: object) -> None:
    if not callable(fun):
        raise TypeError(f"fun must be the loss function, got {describe(fun)}. Call scaled_backward(fun, scale).")


def scale_read(source: PyTree, loss_scale: object, adapts: bool) -> None:
    warn_if_inside_another(source)
    if not is_real_scalar(loss_scale):
        raise TypeError(f"scale must be a floating-point scalar, got {describe(loss_scale)}. Pass the loss scale.")
    if adapts and not is_traced(loss_scale) and is_compiling():
        warn_user(
            "the loss scale is a constant of the compiled program, so it does not adapt, unless each call compiles the "
            "program again, which takes long. Pass a function that reads it from the arguments of fun, such as "
            "`lambda model, *args, **kwargs: model.loss_scale`, or pass a number."
        )


def fun_returned(loss: PyTree) -> None:
    # The loss may be any of these outputs, or computed from them: warn only if all of them are too narrow.
    outputs = [x for x in jax.tree.leaves(loss) if is_inexact(x) and is_traced(x)]
    losses = list(filter(is_real_scalar, outputs)) or outputs
    if losses and all(map(needs_wider_gradient, losses)):
        warn_about_narrow_loss(losses[0])


@contextlib.contextmanager
def differentiating(inputs: Sequence[jax.Array]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # JAX has no rule for a Taylor series of a function with a custom derivative, and no error for it either.
        is_series = any(isinstance(x, imported("jax.experimental.jet", "JetTracer")) for x in inputs)
        if is_series or (isinstance(error, TypeError) and "forward-mode" in str(error)):
            error.add_note(
                "scaled_backward supports only reverse mode, and any derivative of its gradients. In forward mode, as "
                "in jax.jvp or jax.experimental.jet, differentiate fun itself."
            )
        raise


def differentiated(inputs: Sequence[CustomVJPPrimal], names: Sequence[str], loss_scale: CustomVJPPrimal) -> None:
    for x, name in zip(inputs, names, strict=True):
        if x.perturbed:
            _check_differentiated_input(x.value, name, loss_scale.value)


def _check_differentiated_input(x: jax.Array, name: str, loss_scale: jax.Array) -> None:
    if needs_wider_gradient(x):
        raise TypeError(
            f"differentiated values must not be float16 or float8, got {name} of {describe(x)}: unscaled gradients "
            f"underflow in {x.dtype}. Convert it inside fun, with jmpscale.autocast for example; if a framework "
            "converts it, wrap its function; or use jmpscale.value_and_grad, which returns gradients in float32."
        )
    if axes := varying_axes(loss_scale) - varying_axes(x):
        raise ValueError(
            f"scale must be equal on all devices that share {name}, but it may differ along the mesh axes "
            f"{sorted(axes)}. Pass the scaler into jax.shard_map with in_specs=jax.P()."
        )


def scaled(outputs: PyTree) -> None:
    mark(Mark.SCALED_BACKWARD, outputs)


def unscaled(grads: PyTree, loss_scale: jax.Array) -> None:
    mark(Mark.GRADIENT, grads, loss_scale)

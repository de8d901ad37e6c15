"""A scaler is created from valid settings; a wrong setting raises an error that names it, its value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

from calls import COUNTER, LARGEST, SMALLEST, Mistake, check_message, raises, traced
from messages import BETWEEN, NO_FLOAT, NO_INTEGER, SCALE_RANGE
from tables import rows


def test_error_names_the_argument_its_value_and_the_remedy():
    with raises(ValueError, f"growth_factor {BETWEEN} ... and 2^126, got 1. ... above 1 in float32; the default is 2."):
        jmpscale.dynamic(growth_factor=1.0)


SETTINGS_AT_LIMITS = {
    "closest to 1": {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24, "growth_interval": 1},
    "largest factor": {"growth_factor": LARGEST, "backoff_factor": SMALLEST},
    "largest counts": {"growth_interval": COUNTER, "hysteresis": COUNTER},
    "NumPy scalars": {"growth_factor": np.float32(2), "growth_interval": np.int64(3), "hysteresis_reset": "finite"},
    "smallest scale": {"init_scale": SMALLEST, "min_scale": SMALLEST, "max_scale": LARGEST},
    "largest scale": {"init_scale": LARGEST, "min_scale": LARGEST, "max_scale": LARGEST},
    "init_scale at min_scale": {"init_scale": 1},
    "init_scale at max_scale": {"init_scale": 2.0**32},
}


@pytest.mark.parametrize("name", SETTINGS_AT_LIMITS)
def test_dynamic_accepts_settings_at_the_limits(name):
    settings = SETTINGS_AT_LIMITS[name]
    config = jmpscale.dynamic(**settings).config
    for setting, value in settings.items():
        assert setting == "init_scale" or getattr(config, setting) == value
    assert {type(getattr(config, name)) for name in ("growth_factor", "backoff_factor", "min_scale")} == {float}
    assert {type(getattr(config, name)) for name in ("growth_interval", "hysteresis")} == {int}


def _dynamic(**settings):
    return lambda: jmpscale.dynamic(**settings)


WRONG_SETTINGS = {
    "enabled": Mistake(
        _dynamic(enabled=False), "no argument enabled, got False. Omit it; to ... off, create jmpscale.disabled() in"
    ),
    "device": Mistake(
        lambda: jmpscale.dynamic("cuda", init_scale=2.0**16), "no argument for a device, got 'cuda'. Omit it: JAX needs"
    ),
    "device by name": Mistake(_dynamic(device="cuda:0"), "no argument for a device, got 'cuda:0'."),
    "device of JAX": Mistake(lambda: jmpscale.dynamic(jax.devices()[0]), "no argument for a device, got"),
    "text of a number": Mistake(lambda: jmpscale.dynamic("65536"), f"init_scale {NO_FLOAT} '65536' of type str"),
    "bool": Mistake(_dynamic(growth_factor=True), f"growth_factor {NO_FLOAT} True of type bool"),
    "array": Mistake(
        _dynamic(growth_factor=jnp.ones(())), "growth_factor ... float32[] of type Array. ... with float()"
    ),
    "traced": Mistake(lambda: traced(jmpscale.dynamic, 8.0), "init_scale must ... got float32[] ... a traced value"),
    "string": Mistake(_dynamic(backoff_factor="0.5"), f"backoff_factor {NO_FLOAT} '0.5' of type str"),
    "float count": Mistake(_dynamic(growth_interval=100.0), "growth_interval must ... of type float. Convert"),
    "long string": Mistake(_dynamic(growth_interval="x" * 59), f"{NO_INTEGER} '{56 * 'x'}..."),
    "growth rounds to 1": Mistake(
        _dynamic(growth_factor=1 + 2.0**-24), "growth_factor must ... be above 1 in float32", raises=ValueError
    ),
    "large growth": Mistake(
        _dynamic(growth_factor=LARGEST * 1.5), "growth_factor must ... got 1.2760588759535192e+38.", raises=ValueError
    ),
    "backoff rounds to 1": Mistake(
        _dynamic(backoff_factor=1 - 2.0**-25),
        "backoff_factor must ... be below 1 in float32; the default is 0.5.",
        raises=ValueError,
    ),
    "small backoff": Mistake(
        _dynamic(backoff_factor=SMALLEST / 2), "backoff_factor must ... got 2^-127.", raises=ValueError
    ),
    "interval of 0": Mistake(
        _dynamic(growth_interval=0), f"growth_interval {BETWEEN} 1 and ... got 0. Pass", raises=ValueError
    ),
    "large interval": Mistake(
        _dynamic(growth_interval=2**31), "growth_interval must ... got 2147483648.", raises=ValueError
    ),
    "hysteresis of 0": Mistake(_dynamic(hysteresis=0), f"hysteresis {BETWEEN} 1 and", raises=ValueError),
    "reset": Mistake(
        _dynamic(hysteresis_reset="never"), "hysteresis_reset must be ... 'finite', got 'never'", raises=ValueError
    ),
    "small min_scale": Mistake(
        _dynamic(min_scale=SMALLEST / 2), "min_scale must ... 2^-126 and 2^126, got 2^-127.", raises=ValueError
    ),
    "large max_scale": Mistake(
        _dynamic(max_scale=LARGEST * 1.5), "max_scale must ... got 1.2760588759535192e+38.", raises=ValueError
    ),
    "min above max": Mistake(
        _dynamic(min_scale=4.0, max_scale=2.0), "min_scale must not exceed max_scale, got 4 and 2.", raises=ValueError
    ),
    "init below min": Mistake(
        _dynamic(init_scale=0.5), f"init_scale {BETWEEN} 1 and 2^32, got 0.5. Change", raises=ValueError
    ),
    "ignored setting": Mistake(
        lambda: jmpscale.ScalerConfig(mode="static", growth_interval=5),
        "growth_interval must be omitted with mode 'static', got 5.",
        raises=ValueError,
    ),
    "mode": Mistake(
        lambda: jmpscale.ScalerConfig(mode="off"), "mode must be one of ... 'disabled', got 'off'.", raises=ValueError
    ),
    "small static scale": Mistake(
        lambda: jmpscale.static(SMALLEST / 2),
        f"{SCALE_RANGE} 2^-127. Outside, it or its reciprocal",
        raises=ValueError,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_SETTINGS))
def test_constructor_requires_valid_settings(mistake):
    check_message(mistake)

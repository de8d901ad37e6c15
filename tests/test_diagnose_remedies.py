"""A program that is edited by the remedy of a diagnosis has the errors and scales that the summary promises."""

import re

import numpy as np
import pytest
from repair import repaired
from test_diagnose_faults import FAULTS

import jmpscale

import diagnosis_programs as programs
from tables import names

PROMISE = re.compile(r"then the gradients differ from float32 by ([<\d.]+)%?.*?(?:from 2\^(\S+) to 2\^(\S+) fit|\.)")
REPAIRED = {name: fault for name, fault in FAULTS.items() if fault.lines}
CARRIED = {  # the first value of a loop and the other branch of a condition have the dtype of the edited line, too
    "scan": [("layer, x.astype(H), jnp.stack", "layer, x.astype(H).astype(jnp.float32), jnp.stack")],
    "while": [
        (
            "grow, (jax.lax.stop_gradient(x.astype(H)), 0)",
            "grow, (jax.lax.stop_gradient(x.astype(H)).astype(jnp.float32), 0)",
        )
    ],
    "cond": [("large, lambda h: h, x", "large, lambda h: h.astype(jnp.float32), x")],
    "running sum": [("add, H(2048)", "add, jnp.float32(2048)")],
}


@pytest.mark.parametrize("name", names(REPAIRED, default={"overflow", "no scale fits", "ridge head"}))
def test_remedy_holds_after_the_edit(name):
    fault = REPAIRED[name]

    def diagnose(fun):
        fun = jmpscale.autocast(fun) if fault.autocast else fun
        return jmpscale.diagnose(fun, transform=fault.transform)(fault.scaler, *fault.args)

    told = diagnose(fault.fun)
    error, *promised = PROMISE.search(told.summary).groups()
    numbers = [int(re.search(r":(\d+) ", line)[1]) for line in told.lines]
    edited = diagnose(repaired(programs, numbers, CARRIED.get(name, ()))[fault.fun.__name__])
    assert edited.lines == ()
    found = np.log2(edited.fitting_scales)
    np.testing.assert_allclose(found, np.array(promised, float), atol=1)
    smallest = 100 * min(error for _, error in edited.scale_errors)
    assert smallest == pytest.approx(float(error.strip("<")), rel=0.1, abs=0.02)
